package compare

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
)

// plain has grpc-go take bytes for messages.
type plain struct{}

func (plain) Name() string                  { return "proto" }
func (plain) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }
func (plain) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

const largest = 1 << 20 // bytes of a message

// texts are messages of errors that have to be encoded, and some that do not.
var texts = []string{"", "plain", "100% größer\nals 日本", "%41", strings.Repeat("long ", 200)}

func ours(methods map[string]grpchttp.Method) *grpchttp.Handler {
	return &grpchttp.Handler{Methods: methods, MaxMessage: largest}
}

func asError(t testing.TB, err error) *grpchttp.Error {
	t.Helper()
	return must.As[*grpchttp.Error](err)(t)
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

// oursForPeer is our server with a client of grpc-go.
func oursForPeer(t *testing.T, methods map[string]grpchttp.Method) *grpc.ClientConn {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := &http.Server{Handler: &grpchttp.Handler{Methods: methods, MaxMessage: largest}, Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
	return dialPeer(t, l.Addr().String())
}

// dialPeer returns a client of grpc-go.
func dialPeer(t *testing.T, addr string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithDefaultCallOptions(grpc.ForceCodec(plain{})))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// peerForOurs is a server of grpc-go with a client of ours.
func peerForOurs(t *testing.T, h grpc.StreamHandler) *grpchttp.Client {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := grpc.NewServer(grpc.ForceServerCodec(plain{}), grpc.UnknownServiceHandler(h), grpc.MaxRecvMsgSize(largest))
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	t.Cleanup(func() {
		srv.Stop()
		<-done
	})
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return grpchttp.NewClient(&http.Client{Transport: tr}, "http://"+l.Addr().String(), largest)
}

// grpc-go's client calls our server.
func TestPeerClientGRPC(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	var failure error
	left := make(chan time.Duration, 1)
	gone := make(chan struct{}, 1)
	conn := oursForPeer(t, map[string]grpchttp.Method{
		"/S/Echo": grpchttp.Unary(func(_ context.Context, b []byte) ([]byte, error) { return b, nil }),
		"/S/Fail": func(context.Context, *grpchttp.Call) error { return failure },
		"/S/Count": func(_ context.Context, c *grpchttp.Call) error {
			msg, err := c.ReceiveOnly()
			if err != nil {
				return err
			}
			assert.Equal(t, "m", c.Header().Get("mine"))
			for range msg {
				if err := c.Send(msg); err != nil {
					return err
				}
			}
			return failure
		},
		"/S/Wait": func(ctx context.Context, c *grpchttp.Call) error {
			d, _ := ctx.Deadline()
			left <- time.Until(d)
			if err := c.Send(nil); err != nil {
				return err
			}
			<-ctx.Done()
			gone <- struct{}{}
			return ctx.Err()
		},
		"/S/Panic": func(context.Context, *grpchttp.Call) error { panic(http.ErrAbortHandler) },
	})
	stream := &grpc.StreamDesc{ServerStreams: true}
	for _, n := range []int{0, 1, 100_000, largest} {
		in, out := make([]byte, n), []byte(nil)
		require.NoError(t, conn.Invoke(ctx, "/S/Echo", &in, &out))
		assert.Len(t, out, n)
	}
	in, out := make([]byte, largest+1), []byte(nil)
	assert.Equal(t, codes.ResourceExhausted, status.Code(conn.Invoke(ctx, "/S/Echo", &in, &out)))
	in = []byte("x")
	assert.Equal(t, codes.Unimplemented, status.Code(conn.Invoke(ctx, "/S/Other", &in, &out)))
	assert.Equal(t, codes.Unimplemented, status.Code(conn.Invoke(ctx, "/S/Echo", &in, &out, grpc.UseCompressor(gzip.Name))))
	assert.Equal(t, codes.Internal, status.Code(conn.Invoke(ctx, "/S/Panic", &in, &out)))

	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		for _, text := range texts {
			failure = &grpchttp.Error{Code: grpchttp.Code(code), Message: text}
			got := status.Convert(conn.Invoke(ctx, "/S/Fail", &in, &out))
			assert.Equal(t, code, got.Code())
			assert.Equal(t, text, got.Message())
			for n := range 3 {
				s := must.Get(conn.NewStream(metadata.AppendToOutgoingContext(ctx, "mine", "m"), stream, "/S/Count"))(t)
				msg := make([]byte, n)
				require.NoError(t, s.SendMsg(&msg))
				require.NoError(t, s.CloseSend())
				for range n {
					require.NoError(t, s.RecvMsg(&out))
				}
				got := status.Convert(s.RecvMsg(&out))
				assert.Equal(t, code, got.Code())
				assert.Equal(t, text, got.Message())
			}
		}
	}

	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	assert.Equal(t, codes.DeadlineExceeded, status.Code(conn.Invoke(short, "/S/Wait", &in, &out)))
	d := <-left
	assert.Positive(t, d)
	assert.LessOrEqual(t, d, 2*time.Second)
	<-gone
	leaving, leave := context.WithCancel(ctx)
	s := must.Get(conn.NewStream(leaving, stream, "/S/Wait"))(t)
	require.NoError(t, s.SendMsg(&in))
	require.NoError(t, s.CloseSend())
	require.NoError(t, s.RecvMsg(&out))
	leave()
	<-gone
	assert.Equal(t, codes.Canceled, status.Code(s.RecvMsg(&out)))
}

// Our client calls grpc-go's server.
func TestPeerServerGRPC(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	var failure error
	var left time.Duration
	gone := make(chan struct{}, 1)
	c := peerForOurs(t, func(_ any, s grpc.ServerStream) error {
		var msg []byte
		if err := s.RecvMsg(&msg); err != nil {
			return err
		}
		method, _ := grpc.MethodFromServerStream(s)
		switch method {
		case "/S/Echo":
			return s.SendMsg(&msg)
		case "/S/Count":
			in, _ := metadata.FromIncomingContext(s.Context())
			_ = s.SetHeader(metadata.Pairs("begins", strings.Join(in.Get("mine"), " ")))
			s.SetTrailer(metadata.Pairs("ends", "e"))
			for range msg {
				if err := s.SendMsg(&msg); err != nil {
					return err
				}
			}
			return failure
		case "/S/Wait":
			d, _ := s.Context().Deadline()
			left = time.Until(d)
			if len(msg) > 0 {
				if err := s.SendMsg(&msg); err != nil {
					return err
				}
			}
			<-s.Context().Done()
			gone <- struct{}{}
			return s.Context().Err()
		case "/S/Gzip":
			if err := grpc.SetSendCompressor(s.Context(), gzip.Name); err != nil {
				return err // as we did not offer it
			}
			return s.SendMsg(&msg)
		}
		return status.Error(codes.Unimplemented, method)
	})
	for _, n := range []int{0, 1, 100_000, largest} {
		got := must.Get(c.Unary(ctx, "/S/Echo", nil, make([]byte, n)))(t)
		assert.Len(t, got, n)
	}
	check := func(err error, code codes.Code, text string) {
		t.Helper()
		e := must.As[*grpchttp.Error](err)(t)
		assert.Equal(t, grpchttp.Code(code), e.Code)
		assert.True(t, e.Remote)
		if text != "" {
			assert.Equal(t, text, e.Message)
		}
	}
	_, err := c.Unary(ctx, "/S/Echo", nil, make([]byte, largest+1))
	check(err, codes.ResourceExhausted, "")
	_, err = c.Unary(ctx, "/S/Other", nil, nil)
	check(err, codes.Unimplemented, "/S/Other")
	_, err = c.Unary(ctx, "/S/Gzip", nil, nil)
	check(err, codes.Unknown, "")

	for code := codes.Canceled; code <= codes.Unauthenticated; code++ {
		for _, text := range texts {
			failure = status.Error(code, text)
			for n := range 3 { // without messages it is an answer of trailers only
				s := must.Get(c.Stream(ctx, "/S/Count", http.Header{"Mine": {"a", "b"}}, make([]byte, n)))(t)
				for range n {
					must.Get(s.Receive())(t)
				}
				_, err := s.Receive()
				check(err, code, text)
				if n > 0 {
					assert.Equal(t, "a b", s.Header().Get("begins"))
				}
			}
		}
	}
	failure = nil
	s := must.Get(c.Stream(ctx, "/S/Count", nil, nil))(t)
	_, err = s.Receive()
	assert.Equal(t, io.EOF, err)

	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err = c.Unary(short, "/S/Wait", nil, nil)
	e, _ := errors.AsType[*grpchttp.Error](err)
	require.NotNil(t, e)
	assert.Equal(t, grpchttp.DeadlineExceeded, e.Code)
	<-gone
	assert.Positive(t, left)
	assert.LessOrEqual(t, left, 2*time.Second)
	leaving, leave := context.WithCancel(ctx)
	s = must.Get(c.Stream(leaving, "/S/Wait", nil, []byte("x")))(t)
	must.Get(s.Receive())(t)
	leave()
	<-gone
	_, err = s.Receive()
	require.ErrorIs(t, err, context.Canceled)
}
