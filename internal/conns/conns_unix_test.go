//go:build unix

package conns_test

import (
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
)

// The test says which peer a connection belongs to.
func TestListener(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer inner.Close()
	var mu sync.Mutex
	peers := map[string]string{}
	var reasons []string
	l := conns.Listen(inner, conns.Options[string]{
		Total: 5, Each: 2,
		Peer: func(c net.Conn) (string, bool) {
			mu.Lock()
			defer mu.Unlock()
			p := peers[c.RemoteAddr().String()]
			return p, p != "exempt"
		},
		Refused: func(_ net.Conn, err *limit.Error) { reasons = append(reasons, err.Reason) },
	})
	next := func(peer string) net.Conn {
		c, err := net.Dial("tcp", inner.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		mu.Lock()
		defer mu.Unlock()
		peers[c.LocalAddr().String()] = peer
		return c
	}
	accept := func() net.Conn {
		c, err := l.Accept()
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	var accepted []net.Conn
	for range 2 {
		next("a")
		accepted = append(accepted, accept())
	}
	beyond := next("a")
	next("b") // is not delayed by it
	accepted = append(accepted, accept())
	assert.Equal(t, []string{limit.CallerShare}, reasons)
	require.NoError(t, beyond.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err = beyond.Read(make([]byte, 1))
	require.Error(t, err)
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is closed at once")

	for range 2 {
		next("exempt")
		accepted = append(accepted, accept())
	}
	assert.Equal(t, 5, l.Held())
	next("c")
	go func() {
		time.Sleep(50 * time.Millisecond)
		l.Closed(accepted[4])
		l.Closed(accepted[4]) // counts once
		next("c")
	}()
	accept()
	assert.Equal(t, []string{limit.CallerShare, limit.TotalShare}, reasons)
	for _, c := range accepted {
		l.Closed(c)
	}
	assert.Equal(t, 1, l.Held())
	l.Closed(beyond)
	assert.Equal(t, 1, l.Held(), "it was never counted")
	require.NoError(t, inner.Close())
	_, err = l.Accept()
	assert.ErrorIs(t, err, net.ErrClosed)
}

// Peers that take what they can leave room for others.
func TestCrowded(t *testing.T) {
	t.Parallel()
	l := conns.Listen(&endless{}, conns.Options[string]{Total: 120, Peer: func(c net.Conn) (string, bool) { return c.(*fake).peer, true }})
	inner := l.Listener.(*endless)
	take := func(peer string) (taken int) {
		inner.peer, inner.left = peer, 1000
		for {
			if _, err := l.Accept(); err != nil {
				return taken
			}
			taken++
		}
	}
	assert.Equal(t, 80, take("a"), "two thirds")
	assert.Equal(t, 27, take("b"))
	assert.Equal(t, 9, take("c"))
	assert.Equal(t, 3, take("d"))
	assert.Equal(t, 1, take("e"))
	assert.Equal(t, 120, l.Held())
	assert.Zero(t, take("f"))
}

// endless accepts connections of a peer.
type endless struct {
	net.Listener
	peer string
	left int
}

type fake struct {
	net.Conn
	peer string
}

func (*fake) Close() error { return nil }

func (e *endless) Accept() (net.Conn, error) {
	if e.left--; e.left < 0 {
		return nil, net.ErrClosed
	}
	return &fake{peer: e.peer}, nil
}

func TestMaxConns(t *testing.T) {
	t.Parallel()
	for descriptors, usable := range map[int]int{0: 0, 2: 1, 64: 32, 128: 64, 256: 192, 512: 384, 1024: 768, 4096: 3072, 20_000: 18_976, 1 << 20: 1<<20 - 1024} {
		assert.Equal(t, usable, conns.Usable(descriptors), descriptors)
	}
	assert.Equal(t, 3, conns.Max(3))
	assert.LessOrEqual(t, conns.Max(1<<40), 1<<31)
}
