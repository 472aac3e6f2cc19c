//go:build unix

package conns_test

import (
	"fmt"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
)

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
