package conns_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

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

// What is under way at a Close ends, and a request that follows is served by a new connection. That none finds a connection that is
// being closed, TestCloseAndSign of caclient/linkerd shows.
func TestTransport(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			protocols := new(http.Protocols)
			protocols.SetHTTP1(version == "HTTP/1.1")
			protocols.SetUnencryptedHTTP2(version == "HTTP/2")
			begun := make(chan struct{})
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/hang" {
					close(begun)
					<-r.Context().Done()
				}
			}))
			s.Config.Protocols = protocols
			s.Start()
			t.Cleanup(s.Close)
			transport := conns.NewTransport(new(net.Dialer).DialContext, func(dial conns.Dial) *http.Transport {
				return &http.Transport{DialContext: dial, Protocols: protocols}
			})
			t.Cleanup(transport.Close)
			client := &http.Client{Transport: transport}
			get := func(path string) error {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				defer cancel()
				r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL+path, nil)
				if err != nil {
					return err
				}
				response, err := client.Do(r)
				if err != nil {
					return err
				}
				return response.Body.Close()
			}
			for range 50 {
				require.NoError(t, get("/"))
				transport.Close()
			}
			failed := make(chan error, 1)
			go func() { failed <- get("/hang") }()
			<-begun
			transport.Close()
			err := <-failed
			require.Error(t, err)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.NoError(t, get("/"))
		})
	}
	(*conns.Transport)(nil).Close()
}
