package grpchttp_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
)

func TestIncoming(t *testing.T) {
	t.Parallel()
	from := func(address string) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr = address
		return r
	}
	in := grpchttp.NewIncoming("test", 100, 60)
	a, b := from("192.0.2.1:1"), from("192.0.2.1:2")
	require.NoError(t, in.Take(a, 60))
	for _, c := range []struct {
		r    *http.Request
		n    int
		text string
	}{
		{a, 1, "test: this peer sends too many requests at the same time; try again later"},
		{b, 41, "test: too many requests are being received; try again later"},
	} {
		e := must.As[*grpchttp.Error](in.Take(c.r, c.n))(t)
		assert.Equal(t, grpchttp.ResourceExhausted, e.Code)
		assert.Equal(t, c.text, e.Message)
		assert.Positive(t, e.RetryAfter)
	}
	require.NoError(t, in.Take(b, 40))
	assert.Equal(t, 100, in.Held())
	in.Give(a, 60)
	in.Give(b, 40)
	assert.Zero(t, in.Held())
}

// What was taken for a request is given back when the next one is waited for, when the call ends, and when the client leaves in the
// middle of a request.
func TestIncomingIsGivenBack(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const size = 256 << 10
		in := grpchttp.NewIncoming("test", 1<<20, 1<<20)
		held, over := make(chan int, 1), make(chan error, 1)
		h := handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
			for {
				_, err := c.Receive()
				if err != nil {
					over <- err
					return err
				}
				held <- in.Held()
			}
		}, "/S/One": grpchttp.Unary(func(_ context.Context, request []byte) ([]byte, error) {
			held <- in.Held()
			return nil, nil
		})})
		h.Incoming, h.MaxMessage = in, size
		client := serve(t, h)
		c := grpchttp.NewClient(client, "http://localhost", size)

		must.Get(c.Unary(t.Context(), "/S/One", nil, make([]byte, size)))(t)
		assert.Positive(t, <-held, "a method has a request")
		synctest.Wait()
		assert.Zero(t, in.Held(), "it has returned")

		s := c.Open(t.Context(), "/S/M", nil)
		for range 3 {
			require.NoError(t, s.Send(make([]byte, size)))
			assert.Positive(t, <-held, "a method has a request")
			synctest.Wait()
			assert.Zero(t, in.Held(), "it waits for the next")
		}
		require.NoError(t, s.Close())
		require.Error(t, <-over)

		ctx, leave := context.WithCancel(t.Context())
		unfinished, rest := io.Pipe()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/S/M", io.MultiReader(strings.NewReader(frame(0, strings.Repeat("x", size))[:size/2]), unfinished))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/grpc")
		left := make(chan struct{})
		go func() {
			defer close(left)
			if resp, err := client.Do(r); err == nil {
				resp.Body.Close()
			}
		}()
		synctest.Wait()
		assert.Positive(t, in.Held(), "half a request is there")
		leave()
		require.NoError(t, rest.Close())
		<-left
		require.Error(t, <-over)
		synctest.Wait()
		assert.Zero(t, in.Held(), "its client has left")
	})
}

// A request that has room has to come within 30 seconds, and the next one may be a long time away.
func TestIncomingComesInTime(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const size = 64 << 10
		in := grpchttp.NewIncoming("test", 1<<20, 1<<20)
		got, over := make(chan int, 1), make(chan error, 1)
		h := handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
			for {
				msg, err := c.Receive()
				if err != nil {
					over <- err
					return err
				}
				got <- len(msg)
			}
		}})
		h.Incoming, h.MaxMessage = in, size
		body, rest := io.Pipe()
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/S/M", body))(t)
		r.Header.Set("Content-Type", "application/grpc")
		client := serve(t, h)
		go func() {
			if resp, err := client.Do(r); err == nil {
				resp.Body.Close()
			}
		}()
		whole := frame(0, strings.Repeat("x", size))
		must.Get(io.WriteString(rest, whole))(t)
		assert.Equal(t, size, <-got)
		time.Sleep(time.Hour)
		must.Get(io.WriteString(rest, whole[:size/2]))(t)
		time.Sleep(29 * time.Second)
		assert.Empty(t, over)
		assert.Positive(t, in.Held())
		time.Sleep(2 * time.Second)
		assert.Equal(t, grpchttp.DeadlineExceeded, must.As[*grpchttp.Error](<-over)(t).Code)
		synctest.Wait()
		assert.Zero(t, in.Held())
		require.NoError(t, rest.Close())
	})
}
