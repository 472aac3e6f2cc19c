package conns_test

import (
	"context"
	"errors"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/test/must"
)

// Close ends the connections that there are, also those that are made meanwhile, and no later ones.
func TestDialed(t *testing.T) {
	t.Parallel()
	var d conns.Dialed
	d.Close()
	var ends []net.Conn
	waits := func() {}
	dial := d.Dial(func(context.Context, string, string) (net.Conn, error) {
		waits()
		a, b := net.Pipe()
		ends = append(ends, b)
		return a, nil
	})
	gone := func(i int) bool {
		_, err := ends[i].Write([]byte("x")) // of a pipe, which waits for a reader
		return err != nil
	}
	a := must.Get(dial(t.Context(), "tcp", "a:1"))(t)
	b := must.Get(dial(t.Context(), "tcp", "b:1"))(t)
	require.NoError(t, a.Close())
	assert.True(t, gone(0))
	d.Close()
	assert.True(t, gone(1))
	require.NoError(t, b.Close(), "again")

	waits = d.Close
	require.ErrorIs(t, must.Err(dial(t.Context(), "tcp", "a:1")), net.ErrClosed)
	assert.True(t, gone(2))

	waits = func() {}
	c := must.Get(dial(t.Context(), "tcp", "a:1"))(t)
	go func() { _, _ = c.Read(make([]byte, 1)) }()
	assert.False(t, gone(3))
	d.Close()
	assert.True(t, gone(3))

	// A dial that hangs ends, and after End there is no other.
	done, err := errors.New("done"), error(nil)
	for _, end := range []func(){d.Close, func() { d.End(done) }} {
		begun, failed := make(chan struct{}), make(chan error, 1)
		hang := d.Dial(func(ctx context.Context, _, _ string) (net.Conn, error) {
			close(begun)
			<-ctx.Done()
			return nil, ctx.Err()
		})
		go func() {
			_, err := hang(context.Background(), "tcp", "a:1")
			failed <- err
		}()
		<-begun
		end()
		err = <-failed
		require.Error(t, err)
	}
	require.ErrorIs(t, err, done)
	d.Close()
	require.ErrorIs(t, must.Err(dial(t.Context(), "tcp", "a:1")), done)
	assert.Len(t, ends, 4, "it is not dialed")
}
