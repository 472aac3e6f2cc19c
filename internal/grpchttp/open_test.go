package grpchttp_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// Requests and responses of a call pass each other.
func TestOpen(t *testing.T) {
	t.Parallel()
	c := dial(t, handler(map[string]grpchttp.Method{
		"/S/Parrot": parrot,
		"/S/Early": func(_ context.Context, c *grpchttp.Call) error {
			if err := c.SendHeader(); err != nil {
				return err
			}
			if _, err := c.Receive(); err != io.EOF {
				return grpchttp.Errorf(grpchttp.Internal, "no end: %v", err)
			}
			return grpchttp.Errorf(grpchttp.Aborted, "as said")
		},
	}))
	s := c.Open(t.Context(), "/S/Parrot", nil)
	for _, want := range []string{"one", "", "three"} {
		require.NoError(t, s.Send([]byte(want)))
		assert.Equal(t, want, string(must.Get(s.Receive())(t)))
	}
	const n = 100
	go func() {
		for i := range n {
			_ = s.Send(make([]byte, 1000*i)) // the receiver finds out
		}
		s.CloseSend()
	}()
	for i := range n {
		assert.Len(t, must.Get(s.Receive())(t), 1000*i)
	}
	for range 2 {
		assert.Equal(t, io.EOF, must.Err(s.Receive()))
	}
	assert.Error(t, s.Send(nil), "the call has ended")
	assert.NoError(t, s.Close())

	s = c.Open(t.Context(), "/S/Early", nil)
	assert.NotNil(t, s.Header(), "before anything was sent")
	s.CloseSend()
	_, err := s.Receive()
	assert.Equal(t, &grpchttp.Error{Code: grpchttp.Aborted, Message: "as said", Remote: true}, err)
}

// A call that waits ends with its context and with Close, on both sides, wherever it waits.
func TestOpenEnds(t *testing.T) {
	t.Parallel()
	methods := map[string]grpchttp.Method{
		"silent": func(ctx context.Context, _ *grpchttp.Call) error { // sends no header, reads nothing
			<-ctx.Done()
			return ctx.Err()
		},
		"waiting": func(_ context.Context, c *grpchttp.Call) error {
			if err := c.SendHeader(); err != nil {
				return err
			}
			return must.Err(c.Receive())
		},
		"reading": parrot,
	}
	ends := map[string]struct {
		end  func(s *grpchttp.Stream, cancel func())
		code grpchttp.Code
	}{
		"cancel":   {func(_ *grpchttp.Stream, cancel func()) { cancel() }, grpchttp.Canceled},
		"close":    {func(s *grpchttp.Stream, _ func()) { _ = s.Close() }, grpchttp.Canceled},
		"deadline": {func(*grpchttp.Stream, func()) { time.Sleep(time.Minute) }, grpchttp.DeadlineExceeded},
	}
	for server, method := range methods {
		for name, test := range ends {
			bubble.Run(t, server+"/"+name, func(t *testing.T) {
				gone := make(chan struct{})
				c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(ctx context.Context, c *grpchttp.Call) error {
					defer close(gone)
					return method(ctx, c)
				}}))
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				s := c.Open(ctx, "/S/M", nil)
				if server == "reading" {
					require.NoError(t, s.Send(nil))
					must.Get(s.Receive())(t)
				}
				var sending sync.WaitGroup
				if server == "silent" { // what is sent is stuck
					sending.Go(func() {
						for s.Send(make([]byte, limit)) == nil {
							continue
						}
					})
				}
				var receiving sync.WaitGroup
				var err error
				receiving.Go(func() { _, err = s.Receive() })
				synctest.Wait()
				test.end(s, cancel)
				receiving.Wait()
				sending.Wait()
				<-gone
				assert.Equal(t, test.code, asError(t, err).Code, "%v", err)
			})
		}
	}
}

// A server that cannot be reached fails the call, and not the program.
func TestOpenUnreachable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // where a call that waits for ever fails at once
		l := memconn.Listen()
		require.NoError(t, l.Close())
		for _, url := range []string{"http://localhost", "http://local host"} {
			s := grpchttp.NewClient(&http.Client{Transport: transport(t, l.DialContext)}, url, limit).Open(t.Context(), "/S/M", nil)
			assert.Error(t, s.Send([]byte("lost")))
			_, err := s.Receive()
			asError(t, err)
			assert.Nil(t, s.Header())
			assert.NoError(t, s.Close())
		}
	})
}

// StopReceiving ends a Receive that waits in another goroutine.
func TestStopReceiving(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ended := make(chan error, 1)
		c := dial(t, handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
			if err := c.SendHeader(); err != nil {
				return err
			}
			var receiver sync.WaitGroup
			receiver.Go(func() {
				_, err := c.Receive()
				ended <- err
			})
			c.StopReceiving()
			receiver.Wait()
			return grpchttp.Errorf(grpchttp.Aborted, "over")
		}}))
		assert.Equal(t, grpchttp.Aborted, asError(t, must.Err(c.Open(t.Context(), "/S/M", nil).Receive())).Code)
		assert.Equal(t, grpchttp.Canceled, asError(t, <-ended).Code)
	})
}

// A call has no more time than the server or the client gives it, whichever is less.
func TestTimeout(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		causes := make(chan error, 1)
		h := handler(map[string]grpchttp.Method{"/S/M": func(ctx context.Context, c *grpchttp.Call) error {
			_, err := c.Receive()
			if err == nil {
				_, err = c.Receive() // the end does not come
			}
			causes <- context.Cause(ctx)
			return err
		}})
		h.Timeout = time.Minute
		c := dial(t, h)
		for limit, cause := range map[time.Duration]error{
			time.Second: context.DeadlineExceeded, time.Hour: grpchttp.ErrTimeout, 0: grpchttp.ErrTimeout,
		} {
			ctx, cancel := context.WithCancel(t.Context())
			if limit > 0 {
				ctx, cancel = context.WithTimeout(t.Context(), limit)
			}
			start := time.Now()
			s := c.Open(ctx, "/S/M", nil)
			require.NoError(t, s.Send(nil))
			_, err := s.Receive()
			assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code)
			if got := <-causes; cause == grpchttp.ErrTimeout {
				assert.Equal(t, time.Minute, time.Since(start))
				assert.ErrorIs(t, got, cause)
				assert.True(t, asError(t, err).Remote)
			} else {
				assert.Equal(t, limit, time.Since(start))
				assert.Error(t, got)
			}
			_ = s.Close()
			cancel()
		}
	})
}

// A client that does not read is cut off.
func TestSendTimeout(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ended := make(chan error, 1)
		h := handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error {
			for range 3 {
				time.Sleep(time.Minute) // which does not count
				if err := c.Send([]byte("small")); err != nil {
					return err
				}
			}
			err := c.Send(make([]byte, 8*limit))
			ended <- err
			return err
		}})
		h.SendTimeout = 10 * time.Second
		s, err := dial(t, h).Stream(t.Context(), "/S/M", nil, nil)
		require.NoError(t, err)
		start := time.Now()
		assert.Equal(t, grpchttp.Unavailable, asError(t, <-ended).Code)
		assert.Equal(t, 2*time.Minute+10*time.Second, time.Since(start))
		for err == nil {
			_, err = s.Receive()
		}
		asError(t, err)
	})
}

// deadlines is an answer that remembers until when it may be written.
type deadlines struct {
	*httptest.ResponseRecorder
	until time.Time
}

func (d *deadlines) SetWriteDeadline(until time.Time) error {
	d.until = until
	return nil
}

// What remains to be sent when a method returns has a limit in time, whatever that is, and a stream that waits has none.
func TestSendTimeoutOfTheStatus(t *testing.T) {
	t.Parallel()
	const timeout = 10 * time.Second
	wait := func(t *testing.T, d *deadlines) error {
		assert.Zero(t, d.until)
		time.Sleep(time.Hour)
		return nil
	}
	for name, method := range map[string]func(*testing.T, *grpchttp.Call, *deadlines) error{
		"nothing but the status": func(*testing.T, *grpchttp.Call, *deadlines) error { return nil },
		"nothing but an error":   func(*testing.T, *grpchttp.Call, *deadlines) error { return grpchttp.Errorf(grpchttp.NotFound, "no") },
		"the status after a header": func(t *testing.T, c *grpchttp.Call, d *deadlines) error {
			return errors.Join(c.SendHeader(), wait(t, d))
		},
		"the status after responses": func(t *testing.T, c *grpchttp.Call, d *deadlines) error {
			return errors.Join(c.Send([]byte("a")), wait(t, d), c.Send([]byte("b")), wait(t, d))
		},
		"an error after a response": func(t *testing.T, c *grpchttp.Call, d *deadlines) error {
			return errors.Join(c.Send([]byte("a")), wait(t, d), grpchttp.Errorf(grpchttp.Aborted, "no"))
		},
		"a response with the status": func(_ *testing.T, c *grpchttp.Call, _ *deadlines) error { return c.SendOnly([]byte("a")) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &deadlines{ResponseRecorder: httptest.NewRecorder()}
				h := handler(map[string]grpchttp.Method{"/S/M": func(_ context.Context, c *grpchttp.Call) error { return method(t, c, d) }})
				h.SendTimeout = timeout
				r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/S/M", http.NoBody)
				r.ProtoMajor, r.ProtoMinor = 2, 0
				r.Header.Set("Content-Type", "application/grpc")
				r.Header.Set("Te", "trailers")
				h.ServeHTTP(d, r)
				require.Equal(t, http.StatusOK, d.Code)
				assert.Equal(t, time.Now().Add(timeout), d.until)
			})
		})
	}
}

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
		{a, 1, "test: this peer has too many requests that are being received; try again later"},
		{b, 41, "test: all clients together have too many requests that are being received; try again later"},
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
