//go:build unix

package conns_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/test/must"
)

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
