package grpchttp_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/grpchttp"
)

func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

// text is a message for connect, which knows gRPC from elsewhere.
type text struct{ s string }

type codec struct{}

func (codec) Name() string                       { return "proto" }
func (codec) Marshal(m any) ([]byte, error)      { return []byte(m.(*text).s), nil }
func (codec) Unmarshal(data []byte, m any) error { m.(*text).s = string(data); return nil }

func connectClient(hc connect.HTTPClient, method string, opts ...connect.ClientOption) *connect.Client[text, text] {
	return connect.NewClient[text, text](hc, "http://localhost"+method, append([]connect.ClientOption{connect.WithGRPC(), connect.WithCodec(codec{})}, opts...)...)
}

// connect's client understands our server.
func TestConnectClient(t *testing.T) {
	t.Parallel()
	status := grpchttp.Errorf(grpchttp.FailedPrecondition, "größer als 100%%\n")
	hc := serve(t, handler(map[string]grpchttp.Method{
		"/S/Echo":   grpchttp.Unary(echo),
		"/S/Count":  count,
		"/S/Parrot": parrot,
		"/S/Fail":   func(context.Context, *grpchttp.Call) error { return status },
		"/S/Late": func(_ context.Context, c *grpchttp.Call) error {
			c.SetHeader("begins", "b")
			c.SetTrailer("ends", "e")
			if err := c.Send([]byte("first")); err != nil {
				return err
			}
			return status
		},
	}))
	resp, err := connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&text{"hello"}))
	require.NoError(t, err)
	assert.Equal(t, "hello", resp.Msg.s)
	resp, err = connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&text{strings.Repeat("x", limit)}))
	require.NoError(t, err)
	assert.Len(t, resp.Msg.s, limit)
	_, err = connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&text{strings.Repeat("x", limit+1)}))
	assert.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
	_, err = connectClient(hc, "/S/Nothing").CallUnary(t.Context(), connect.NewRequest(&text{}))
	assert.Equal(t, connect.CodeUnimplemented, connect.CodeOf(err))

	s, err := connectClient(hc, "/S/Count").CallServerStream(t.Context(), connect.NewRequest(&text{"xxx"}))
	require.NoError(t, err)
	n := 0
	for s.Receive() {
		assert.Equal(t, "xxx", s.Msg().s)
		n++
	}
	require.NoError(t, s.Err())
	assert.Equal(t, 3, n)

	both := connectClient(hc, "/S/Parrot").CallBidiStream(t.Context())
	for _, want := range []string{"one", "", "three"} {
		require.NoError(t, both.Send(&text{want}))
		got, err := both.Receive()
		require.NoError(t, err)
		assert.Equal(t, want, got.s)
	}
	require.NoError(t, both.CloseRequest())
	_, err = both.Receive()
	assert.ErrorIs(t, err, io.EOF)

	for _, method := range []string{"/S/Fail", "/S/Late"} {
		s, err := connectClient(hc, method).CallServerStream(t.Context(), connect.NewRequest(&text{}))
		require.NoError(t, err)
		n := 0
		for s.Receive() {
			n++
		}
		e, ok := errors.AsType[*connect.Error](s.Err())
		require.True(t, ok, "%v", s.Err())
		assert.Equal(t, connect.CodeFailedPrecondition, e.Code())
		assert.Equal(t, status.Message, e.Message())
		assert.True(t, connect.IsWireError(e))
		if method == "/S/Late" {
			assert.Equal(t, 1, n)
			assert.Equal(t, "b", s.ResponseHeader().Get("begins"))
			assert.Equal(t, "e", s.ResponseTrailer().Get("ends"))
		}
	}
	// A compressed request is refused in a way that lets the client know what would not be.
	_, err = connectClient(hc, "/S/Echo", connect.WithSendGzip()).CallUnary(t.Context(), connect.NewRequest(&text{strings.Repeat("x", 10_000)}))
	require.Equal(t, connect.CodeUnimplemented, connect.CodeOf(err))
	e, _ := errors.AsType[*connect.Error](err)
	assert.Equal(t, "identity", e.Meta().Get("Grpc-Accept-Encoding"))
}

// Our client understands connect's server.
func TestConnectServer(t *testing.T) {
	t.Parallel()
	failed := connect.NewError(connect.CodeFailedPrecondition, errors.New("größer als 100%\n"))
	mux := http.NewServeMux()
	mux.Handle("/S/Echo", connect.NewUnaryHandler("/S/Echo", func(_ context.Context, r *connect.Request[text]) (*connect.Response[text], error) {
		if r.Msg.s == "fail" {
			return nil, failed
		}
		resp := connect.NewResponse(r.Msg)
		resp.Header().Set("begins", r.Header().Get("mine"))
		resp.Trailer().Set("ends", "e")
		return resp, nil
	}, connect.WithCodec(codec{})))
	mux.Handle("/S/Count", connect.NewServerStreamHandler("/S/Count", func(_ context.Context, r *connect.Request[text], s *connect.ServerStream[text]) error {
		for range r.Msg.s {
			if err := s.Send(r.Msg); err != nil {
				return err
			}
		}
		return failed
	}, connect.WithCodec(codec{})))
	c := dial(t, mux)
	for _, want := range []string{"", "hello", strings.Repeat("x", limit)} {
		got, err := c.Unary(t.Context(), "/S/Echo", nil, []byte(want))
		require.NoError(t, err)
		assert.Equal(t, want, string(got))
	}
	want := &grpchttp.Error{Code: grpchttp.FailedPrecondition, Message: "größer als 100%\n", Remote: true}
	_, err := c.Unary(t.Context(), "/S/Echo", nil, []byte("fail"))
	assert.Equal(t, want, err)
	s, err := c.Stream(t.Context(), "/S/Echo", http.Header{"Mine": {"m"}}, []byte("x"))
	require.NoError(t, err)
	_, err = s.Receive()
	require.NoError(t, err)
	_, err = s.Receive()
	require.Equal(t, io.EOF, err)
	assert.Equal(t, "m", s.Header().Get("begins"))
	assert.Equal(t, "e", s.Trailer().Get("ends"))
	for n := range 3 {
		s, err := c.Stream(t.Context(), "/S/Count", nil, make([]byte, n))
		require.NoError(t, err)
		for range n {
			_, err := s.Receive()
			require.NoError(t, err)
		}
		_, err = s.Receive()
		assert.Equal(t, want, err)
	}
	_, err = c.Unary(t.Context(), "/S/Other", nil, nil)
	assert.Equal(t, grpchttp.Unimplemented, asError(t, err).Code)
	assert.False(t, asError(t, err).Remote, "that was the mux, with 404")
}

// Deadlines pass between connect and us in both directions.
func TestConnectDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		wait := func(ctx context.Context) (time.Duration, error) {
			d, _ := ctx.Deadline()
			left := time.Until(d)
			<-ctx.Done()
			return left, ctx.Err()
		}
		var left time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		hc := serve(t, handler(map[string]grpchttp.Method{"/S/Wait": func(ctx context.Context, _ *grpchttp.Call) (err error) {
			left, err = wait(ctx)
			return err
		}}))
		_, err := connectClient(hc, "/S/Wait").CallUnary(ctx, connect.NewRequest(&text{}))
		assert.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err))
		synctest.Wait()
		assert.Equal(t, time.Minute, left)

		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = dial(t, connect.NewUnaryHandler("/S/Wait", func(ctx context.Context, r *connect.Request[text]) (_ *connect.Response[text], err error) {
			left, err = wait(ctx)
			return nil, err
		}, connect.WithCodec(codec{}))).Unary(ctx, "/S/Wait", nil, nil)
		assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code)
		synctest.Wait()
		assert.Equal(t, time.Minute, left)
	})
}
