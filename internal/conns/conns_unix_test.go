//go:build unix

package conns_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/test/must"
)

// The test says which peer a connection belongs to.
func TestListener(t *testing.T) {
	t.Parallel()
	inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer inner.Close()
	var mu sync.Mutex
	peers := map[string]string{}
	var reasons []string
	l := conns.Listen(inner, conns.Options{
		Total: 6, Each: 2,
		Peer: func(c net.Conn) conns.Peer {
			mu.Lock()
			defer mu.Unlock()
			return conns.Peer{Names: []string{peers[c.RemoteAddr().String()]}}
		},
		Refused: func(_ net.Conn, _ string, err *limit.Error) { reasons = append(reasons, err.Reason) },
	})
	t.Cleanup(l.CloseAll)
	next := func(peer string) net.Conn {
		c := must.Get(net.Dial("tcp", inner.Addr().String()))(t)
		t.Cleanup(func() { _ = c.Close() })
		mu.Lock()
		defer mu.Unlock()
		peers[c.LocalAddr().String()] = peer
		return c
	}
	accept := func() net.Conn {
		c := must.Get(l.Accept())(t)
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
	_, err := beyond.Read(make([]byte, 1))
	require.Error(t, err)
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "it is closed at once")

	for _, peer := range []string{"b", "d", "e"} {
		next(peer)
		accepted = append(accepted, accept())
	}
	assert.Equal(t, 6, l.Held())
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
	assert.ErrorIs(t, must.Err(l.Accept()), net.ErrClosed)
}

// Peers that take what they can leave room for others.
func TestCrowded(t *testing.T) {
	t.Parallel()
	l, take := crowd(t, conns.Options{Total: 120})
	assert.Equal(t, 80, take("a"), "two thirds")
	assert.Equal(t, 27, take("b"))
	assert.Equal(t, 9, take("c"))
	assert.Equal(t, 3, take("d"))
	assert.Equal(t, 1, take("e"))
	assert.Equal(t, 120, l.Held())
	assert.Zero(t, take("f"))
}

// Processes of one user leave room for another, and a user has no more by many of them.
func TestCrowdedWithin(t *testing.T) {
	t.Parallel()
	l, take := crowd(t, conns.Options{Total: 120, Each: 70})
	assert.Equal(t, 68, take("a", "a 1"), "of 70")
	assert.Equal(t, 2, take("a", "a 2"))
	assert.Zero(t, take("a", "a 3"))
	assert.Equal(t, 33, take("b", "b 1"), "of the 34 that are two thirds of what is free")
	assert.Equal(t, 1, take("b", "b 2"))
	assert.Equal(t, 104, l.Held())
}

// crowd returns a listener, and a function that takes as many of its connections as a peer can have.
func crowd(t *testing.T, o conns.Options) (l *conns.Listener, take func(peer ...string) int) {
	inner := &endless{}
	o.Peer = func(c net.Conn) conns.Peer { return conns.Peer{Names: c.(*fake).peer} }
	l = conns.Listen(inner, o)
	t.Cleanup(l.CloseAll)
	return l, func(peer ...string) (taken int) {
		inner.peer, inner.left = peer, 1000
		for {
			if _, err := l.Accept(); err != nil {
				return taken
			}
			taken++
		}
	}
}

// endless accepts connections of a peer.
type endless struct {
	net.Listener
	peer []string
	left int
}

type fake struct {
	net.Conn
	peer []string
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

// Descriptors are the process's: a peer has no more of them at several Listeners than at one. This
// test takes those of the process, and so is not parallel.
func TestBudget(t *testing.T) {
	all := conns.Max(1 << 30)
	first, atFirst := crowd(t, conns.Options{Total: 100_000, Descriptors: all/120 + 1})
	second, atSecond := crowd(t, conns.Options{Total: 100_000, Descriptors: all/120 + 1})
	assert.Equal(t, 80, atFirst("a"), "two thirds of 120")
	assert.Zero(t, atSecond("a"), "the same peer")
	assert.Equal(t, 27, atFirst("b"))
	assert.Zero(t, atSecond("b"))
	assert.Equal(t, 9, atSecond("c"), "another peer")
	third, atThird := crowd(t, conns.Options{Total: 100_000})
	assert.Positive(t, atThird("d"), "connections that cost less")
	for _, l := range []*conns.Listener{first, second, third} {
		l.CloseAll()
	}
	assert.Equal(t, 80, atSecond("e"), "what was given back")
}

// On loopback each user of the machine is a peer, as far as the system says.
func TestPeer(t *testing.T) {
	t.Parallel()
	for _, address := range []string{"127.0.0.1", "::1"} {
		l, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
		if err != nil {
			t.Logf("%s: %v", address, err)
			continue
		}
		defer l.Close()
		client := must.Get(net.Dial("tcp", l.Addr().String()))(t)
		c := must.Get(l.Accept())(t)
		defer c.Close()
		want := conns.Peer{Names: []string{address}}
		if runtime.GOOS == "linux" {
			want.User = "uid " + strconv.Itoa(os.Getuid())
			want.Names[0] += " " + want.User
		}
		assert.Equal(t, want, conns.TCPPeer(c))
		require.NoError(t, client.Close())
		require.Error(t, must.Err(c.Read(make([]byte, 1))))
		assert.Equal(t, conns.Peer{Names: []string{address}}, conns.TCPPeer(c), "a connection that has ended is nobody's, and not root's")
	}
	inMemory, _ := net.Pipe()
	assert.Empty(t, conns.TCPPeer(inMemory))
}

// admits reports whether a peer gets one connection more.
func admits(t *testing.T, l *conns.Listener, inner *endless, peer ...string) bool {
	t.Helper()
	inner.peer, inner.left = peer, 1
	c, err := l.Accept()
	if err == nil {
		t.Cleanup(func() { l.Closed(c) })
	}
	return err == nil
}

// The first connection of a process passes while more than a quarter is free, whatever the other processes of its user have, and no longer:
// a user has no more than two thirds by starting processes until the last place is gone.
func TestFirstOfANarrowName(t *testing.T) {
	t.Parallel()
	for _, total := range []int{120, 100, 8, 7, 5, 4} {
		inner := &endless{}
		var reasons []string
		l := conns.Listen(inner, conns.Options{
			Total: total, Peer: func(c net.Conn) conns.Peer { return conns.Peer{Names: c.(*fake).peer} }, Refused: func(_ net.Conn, _ string, err *limit.Error) { reasons = append(reasons, err.Reason) },
		})
		t.Cleanup(l.CloseAll)
		for admits(t, l, inner, "a", "a 0") {
		}
		most := l.Held() // of one process
		require.Less(t, most, total)
		require.False(t, admits(t, l, inner, "a", "a 0"), "%d: no second one by asking again", total)
		for n := 1; n <= 2*total; n++ {
			free, held := total-l.Held(), l.Held()
			first := admits(t, l, inner, "a", fmt.Sprint("a ", n))
			if held >= 2*free { // the user is beyond his share
				require.Equal(t, 4*free > total, first, "%d in total, %d free: the first of process %d", total, free, n)
			} else {
				require.True(t, first)
			}
			if first && l.Held() >= 2*(total-l.Held()) {
				require.False(t, admits(t, l, inner, "a", fmt.Sprint("a ", n)), "%d: the second of process %d", total, n)
			}
		}
		require.True(t, admits(t, l, inner, "b", "b 1"), "%d in total: there is room for another user", total)
		assert.NotContains(t, reasons, limit.TotalShare, "%d", total)
	}
}

// A refused connection counts nowhere, and what is given back can be taken again, by all names of a peer.
func TestRefusedCountsNowhere(t *testing.T) {
	t.Parallel()
	l, take := crowd(t, conns.Options{Total: 30, Each: 6})
	for range 3 {
		first := take("a", "a 1")
		require.Positive(t, first)
		require.Equal(t, first, l.Held(), "after a thousand that were refused")
		require.LessOrEqual(t, first+take("a", "a 2"), 6)
		l.CloseAll()
		require.Zero(t, l.Held())
		require.Equal(t, 6, take("b"), "of each")
		require.Equal(t, 6, l.Held())
		l.CloseAll()
	}
}

// A user is one peer of the process by whatever first names he is known at its Listeners. This test takes the descriptors of the
// process, and so is not parallel.
func TestUserOfTheProcess(t *testing.T) {
	all := conns.Max(1 << 30)
	crowd := func() (*conns.Listener, func(conns.Peer) int) {
		inner := &endless{}
		var peer conns.Peer
		l := conns.Listen(inner, conns.Options{Total: 100_000, Descriptors: all/120 + 1, Peer: func(net.Conn) conns.Peer { return peer }})
		t.Cleanup(l.CloseAll)
		return l, func(p conns.Peer) (taken int) {
			peer, inner.left = p, 1000
			for {
				if _, err := l.Accept(); err != nil {
					return taken
				}
				taken++
			}
		}
	}
	_, atFirst := crowd()
	_, atSecond := crowd()
	require.Equal(t, 80, atFirst(conns.Peer{Names: []string{"127.0.0.1 uid 7"}, User: "uid 7"}), "two thirds of 120")
	assert.Zero(t, atSecond(conns.Peer{Names: []string{"::1 uid 7"}, User: "uid 7"}), "the same user at another address")
	assert.Zero(t, atSecond(conns.Peer{Names: []string{"uid 7"}}), "and at a socket")
	assert.Equal(t, 27, atSecond(conns.Peer{Names: []string{"::1 uid 8"}, User: "uid 8"}), "another user")
}

// closes counts how often a connection is closed.
type closes struct {
	net.Conn
	n atomic.Int32
}

func (c *closes) Close() error { c.n.Add(1); return nil }

// A connection that its user has closed is none of those that Close closes.
func TestDialedClosesOnce(t *testing.T) {
	t.Parallel()
	var d conns.Dialed
	var made []*closes
	dial := d.Dial(func(context.Context, string, string) (net.Conn, error) {
		c := new(closes)
		made = append(made, c)
		return c, nil
	})
	for range 2 {
		for range 3 {
			c := must.Get(dial(t.Context(), "tcp", "127.0.0.1:1"))(t)
			if len(made)%3 == 1 {
				require.NoError(t, c.Close())
			}
		}
		d.Close()
		d.Close()
	}
	require.Len(t, made, 6, "later ones are not affected")
	for i, c := range made {
		assert.EqualValues(t, 1, c.n.Load(), "connection %d", i)
	}
}
