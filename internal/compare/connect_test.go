package compare

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
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// connectText is a message for connect, which knows gRPC from elsewhere.
type connectText struct{ s string }

type connectCodec struct{}

func (connectCodec) Name() string { return "proto" }
func (connectCodec) Marshal(m any) ([]byte, error) {
	if m, ok := m.(*connectText); ok {
		return []byte(m.s), nil
	}
	return proto.Marshal(m.(proto.Message)) // the details of an error
}

func (connectCodec) Unmarshal(data []byte, m any) error {
	if m, ok := m.(*connectText); ok {
		m.s = string(data)
		return nil
	}
	return proto.Unmarshal(data, m.(proto.Message))
}

func connectClient(hc connect.HTTPClient, method string, opts ...connect.ClientOption) *connect.Client[connectText, connectText] {
	return connect.NewClient[connectText, connectText](hc, "http://localhost"+method, append([]connect.ClientOption{connect.WithGRPC(), connect.WithCodec(connectCodec{})}, opts...)...)
}

// inMemory serves a handler in memory and returns a client for it.
func inMemory(t testing.TB, h http.Handler) *http.Client {
	t.Helper()
	l := memconn.Listen()
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: l.DialContext}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		_ = srv.Close()
		<-done
	})
	return &http.Client{Transport: tr}
}

func ours(methods map[string]grpchttp.Method) *grpchttp.Handler {
	return &grpchttp.Handler{Methods: methods, MaxMessage: largest}
}

func clientOf(t testing.TB, h http.Handler) *grpchttp.Client {
	return grpchttp.NewClient(inMemory(t, h), "http://localhost", largest)
}

func asError(t testing.TB, err error) *grpchttp.Error {
	t.Helper()
	e, ok := errors.AsType[*grpchttp.Error](err)
	require.True(t, ok, "%v", err)
	return e
}

// parrot answers each message with the same, as it comes.
func parrot(_ context.Context, c *grpchttp.Call) error {
	for {
		msg, err := c.Receive()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if err := c.Send(msg); err != nil {
			return err
		}
	}
}

// count answers one message with itself, as often as it is long.
func count(_ context.Context, c *grpchttp.Call) error {
	msg, err := c.ReceiveOnly()
	if err != nil {
		return err
	}
	for range msg {
		if err := c.Send(msg); err != nil {
			return err
		}
	}
	return nil
}

// connect's client understands our server.
func TestConnectClient(t *testing.T) {
	t.Parallel()
	status := grpchttp.Errorf(grpchttp.FailedPrecondition, "größer als 100%%\n")
	hc := inMemory(t, ours(map[string]grpchttp.Method{
		"/S/Echo":   grpchttp.Unary(func(_ context.Context, b []byte) ([]byte, error) { return b, nil }),
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
	resp := must.Get(connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&connectText{"hello"})))(t)
	assert.Equal(t, "hello", resp.Msg.s)
	resp, err := connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&connectText{strings.Repeat("x", largest)}))
	require.NoError(t, err)
	assert.Len(t, resp.Msg.s, largest)
	_, err = connectClient(hc, "/S/Echo").CallUnary(t.Context(), connect.NewRequest(&connectText{strings.Repeat("x", largest+1)}))
	assert.Equal(t, connect.CodeResourceExhausted, connect.CodeOf(err))
	_, err = connectClient(hc, "/S/Nothing").CallUnary(t.Context(), connect.NewRequest(&connectText{}))
	assert.Equal(t, connect.CodeUnimplemented, connect.CodeOf(err))

	s := must.Get(connectClient(hc, "/S/Count").CallServerStream(t.Context(), connect.NewRequest(&connectText{"xxx"})))(t)
	n := 0
	for s.Receive() {
		assert.Equal(t, "xxx", s.Msg().s)
		n++
	}
	require.NoError(t, s.Err())
	assert.Equal(t, 3, n)

	both := connectClient(hc, "/S/Parrot").CallBidiStream(t.Context())
	for _, want := range []string{"one", "", "three"} {
		require.NoError(t, both.Send(&connectText{want}))
		got := must.Get(both.Receive())(t)
		assert.Equal(t, want, got.s)
	}
	require.NoError(t, both.CloseRequest())
	_, err = both.Receive()
	assert.ErrorIs(t, err, io.EOF)

	for _, method := range []string{"/S/Fail", "/S/Late"} {
		s := must.Get(connectClient(hc, method).CallServerStream(t.Context(), connect.NewRequest(&connectText{})))(t)
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
	// When to come back is a detail of the error, and metadata.
	status.RetryAfter = 2500 * time.Millisecond
	_, err = connectClient(hc, "/S/Fail").CallUnary(t.Context(), connect.NewRequest(&connectText{}))
	e, ok := errors.AsType[*connect.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, "2501", e.Meta().Get("Grpc-Retry-Pushback-Ms"))
	require.Len(t, e.Details(), 1)
	detail := must.Get(e.Details()[0].Value())(t)
	assert.Equal(t, 2501*time.Millisecond, detail.(*errdetails.RetryInfo).GetRetryDelay().AsDuration())

	// A compressed request is refused in a way that lets the client know what would not be.
	_, err = connectClient(hc, "/S/Echo", connect.WithSendGzip()).CallUnary(t.Context(), connect.NewRequest(&connectText{strings.Repeat("x", 10_000)}))
	require.Equal(t, connect.CodeUnimplemented, connect.CodeOf(err))
	e, _ = errors.AsType[*connect.Error](err)
	assert.Equal(t, "identity", e.Meta().Get("Grpc-Accept-Encoding"))
}

// Our client understands connect's server.
func TestConnectServer(t *testing.T) {
	t.Parallel()
	failed := connect.NewError(connect.CodeFailedPrecondition, errors.New("größer als 100%\n"))
	mux := http.NewServeMux()
	mux.Handle("/S/Echo", connect.NewUnaryHandler("/S/Echo", func(_ context.Context, r *connect.Request[connectText]) (*connect.Response[connectText], error) {
		if r.Msg.s == "fail" {
			return nil, failed
		}
		resp := connect.NewResponse(r.Msg)
		resp.Header().Set("begins", r.Header().Get("mine"))
		resp.Trailer().Set("ends", "e")
		return resp, nil
	}, connect.WithCodec(connectCodec{})))
	mux.Handle("/S/Count", connect.NewServerStreamHandler("/S/Count", func(_ context.Context, r *connect.Request[connectText], s *connect.ServerStream[connectText]) error {
		for range r.Msg.s {
			if err := s.Send(r.Msg); err != nil {
				return err
			}
		}
		return failed
	}, connect.WithCodec(connectCodec{})))
	mux.Handle("/S/Parrot", connect.NewBidiStreamHandler("/S/Parrot", func(_ context.Context, s *connect.BidiStream[connectText, connectText]) error {
		for {
			m, err := s.Receive()
			if errors.Is(err, io.EOF) {
				return failed
			}
			if err != nil {
				return err
			}
			if err := s.Send(m); err != nil {
				return err
			}
		}
	}, connect.WithCodec(connectCodec{})))
	c := clientOf(t, mux)
	for _, want := range []string{"", "hello", strings.Repeat("x", largest)} {
		got := must.Get(c.Unary(t.Context(), "/S/Echo", nil, []byte(want)))(t)
		assert.Equal(t, want, string(got))
	}
	want := &grpchttp.Error{Code: grpchttp.FailedPrecondition, Message: "größer als 100%\n", Remote: true}
	_, err := c.Unary(t.Context(), "/S/Echo", nil, []byte("fail"))
	assert.Equal(t, want, err)
	s := must.Get(c.Stream(t.Context(), "/S/Echo", http.Header{"Mine": {"m"}}, []byte("x")))(t)
	must.Get(s.Receive())(t)
	_, err = s.Receive()
	require.Equal(t, io.EOF, err)
	assert.Equal(t, "m", s.Header().Get("begins"))
	assert.Equal(t, "e", s.Trailer().Get("ends"))
	for n := range 3 {
		s := must.Get(c.Stream(t.Context(), "/S/Count", nil, make([]byte, n)))(t)
		for range n {
			must.Get(s.Receive())(t)
		}
		_, err := s.Receive()
		assert.Equal(t, want, err)
	}
	both := c.Open(t.Context(), "/S/Parrot", nil)
	for _, want := range []string{"one", "", strings.Repeat("x", largest)} {
		require.NoError(t, both.Send([]byte(want)))
		got := must.Get(both.Receive())(t)
		assert.Equal(t, want, string(got))
	}
	both.CloseSend()
	_, err = both.Receive()
	assert.Equal(t, want, err)

	detail := must.Get(connect.NewErrorDetail(&errdetails.RetryInfo{RetryDelay: durationpb.New(90 * time.Second)}))(t)
	failed.AddDetail(detail)
	_, err = c.Unary(t.Context(), "/S/Echo", nil, []byte("fail"))
	assert.Equal(t, 90*time.Second, asError(t, err).RetryAfter)
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
		hc := inMemory(t, ours(map[string]grpchttp.Method{"/S/Wait": func(ctx context.Context, _ *grpchttp.Call) (err error) {
			left, err = wait(ctx)
			return err
		}}))
		_, err := connectClient(hc, "/S/Wait").CallUnary(ctx, connect.NewRequest(&connectText{}))
		assert.Equal(t, connect.CodeDeadlineExceeded, connect.CodeOf(err))
		synctest.Wait()
		assert.Equal(t, time.Minute, left)

		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err = clientOf(t, connect.NewUnaryHandler("/S/Wait", func(ctx context.Context, r *connect.Request[connectText]) (_ *connect.Response[connectText], err error) {
			left, err = wait(ctx)
			return nil, err
		}, connect.WithCodec(connectCodec{}))).Unary(ctx, "/S/Wait", nil, nil)
		assert.Equal(t, grpchttp.DeadlineExceeded, asError(t, err).Code)
		synctest.Wait()
		assert.Equal(t, time.Minute, left)
	})
}
