package compare

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/must"
)

var bidi = &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}

// echoAll is parrot for grpc-go's server.
func echoAll(_ any, s grpc.ServerStream) error {
	for {
		var msg []byte
		if err := s.RecvMsg(&msg); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.SendMsg(&msg); err != nil {
			return err
		}
	}
}

// Our client and grpc-go's server send and receive at the same time, and end in each way.
func TestPeerServerBothWays(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	gone := make(chan error, 1)
	c := peerForOurs(t, func(_ any, s grpc.ServerStream) error {
		err := echoAll(nil, s)
		if method, _ := grpc.MethodFromServerStream(s); method == "/S/Watched" {
			gone <- err
		}
		return err
	})
	s := c.Open(ctx, "/S/Echo", nil)
	sizes := []int{0, 1, 100_000, largest, 3, largest - 1}
	go func() {
		for _, n := range sizes {
			_ = s.Send(make([]byte, n))
		}
		s.CloseSend()
	}()
	for _, n := range sizes {
		got := must.Get(s.Receive())(t)
		assert.Len(t, got, n)
	}
	_, err := s.Receive()
	assert.Equal(t, io.EOF, err)

	// grpc-go sends no header before its first message.
	for _, end := range []func(s *grpchttp.Stream, cancel func()){
		func(s *grpchttp.Stream, _ func()) { _ = s.Close() },
		func(_ *grpchttp.Stream, cancel func()) { cancel() },
	} {
		leaving, leave := context.WithCancel(ctx)
		s := c.Open(leaving, "/S/Watched", nil)
		require.NoError(t, s.Send([]byte("x")))
		must.Get(s.Receive())(t)
		end(s, leave)
		_, err := s.Receive()
		assert.Equal(t, grpchttp.Canceled, asError(t, err).Code)
		assert.Equal(t, codes.Canceled, status.Code(<-gone))
		leave()
	}
}

// grpc-go's client and our server do, too.
func TestPeerClientBothWays(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	s := must.Get(oursForPeer(t, map[string]grpchttp.Method{"/S/Echo": parrot}).NewStream(ctx, bidi, "/S/Echo"))(t)
	sizes := []int{0, 1, 100_000, largest, 3, largest - 1}
	go func() {
		for _, n := range sizes {
			msg := make([]byte, n)
			_ = s.SendMsg(&msg)
		}
		_ = s.CloseSend()
	}()
	for _, n := range sizes {
		var got []byte
		require.NoError(t, s.RecvMsg(&got))
		assert.Len(t, got, n)
	}
	assert.Equal(t, io.EOF, s.RecvMsg(new([]byte)))
}

// When to come back passes between grpc-go and us in both directions.
func TestPeerRetryInfo(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	conn := oursForPeer(t, map[string]grpchttp.Method{"/S/M": func(context.Context, *grpchttp.Call) error {
		return &grpchttp.Error{Code: grpchttp.ResourceExhausted, Message: "größer\xff", RetryAfter: 90 * time.Second}
	}})
	in, out := []byte(nil), []byte(nil)
	got := status.Convert(conn.Invoke(ctx, "/S/M", &in, &out))
	assert.Equal(t, codes.ResourceExhausted, got.Code())
	require.Len(t, got.Details(), 1)
	assert.Equal(t, 90*time.Second+time.Millisecond, got.Details()[0].(*errdetails.RetryInfo).GetRetryDelay().AsDuration())

	st, err := status.New(codes.Unavailable, "later").WithDetails(
		&errdetails.DebugInfo{Detail: "not for us"}, &errdetails.RetryInfo{RetryDelay: durationpb.New(1500 * time.Millisecond)})
	require.NoError(t, err)
	_, err = peerForOurs(t, func(any, grpc.ServerStream) error { return st.Err() }).Unary(ctx, "/S/M", nil, nil)
	assert.Equal(t, &grpchttp.Error{Code: grpchttp.Unavailable, Message: "later", Remote: true, RetryAfter: 1500 * time.Millisecond}, err)
}

// A server of grpc-go that says GOAWAY lets our streams come to their end.
func TestPeerGoAway(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := grpc.NewServer(grpc.ForceServerCodec(plain{}), grpc.UnknownServiceHandler(echoAll))
	go func() { _ = srv.Serve(l) }()
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	c := grpchttp.NewClient(&http.Client{Transport: tr}, "http://"+l.Addr().String(), largest)
	s := c.Open(ctx, "/S/Echo", nil)
	exchange := func() {
		t.Helper()
		require.NoError(t, s.Send([]byte("x")))
		got := must.Get(s.Receive())(t)
		assert.Equal(t, "x", string(got))
	}
	exchange()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		srv.GracefulStop()
	}()
	require.Eventually(t, func() bool { // no new calls
		_, err := c.Unary(ctx, "/S/Echo", nil, nil)
		return err != nil
	}, time.Minute, time.Millisecond)
	exchange()
	s.CloseSend()
	_, err := s.Receive()
	assert.Equal(t, io.EOF, err)
	<-stopped
}

// Our server that shuts down lets the streams of grpc-go come to their end.
func TestOurGoAway(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	srv := &http.Server{Handler: ours(map[string]grpchttp.Method{"/S/Echo": parrot}), Protocols: new(http.Protocols)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = srv.Serve(l) }()
	s := must.Get(dialPeer(t, l.Addr().String()).NewStream(ctx, bidi, "/S/Echo"))(t)
	exchange := func() {
		t.Helper()
		msg, got := []byte("x"), []byte(nil)
		require.NoError(t, s.SendMsg(&msg))
		require.NoError(t, s.RecvMsg(&got))
		assert.Equal(t, "x", string(got))
	}
	exchange()
	stopped := make(chan error, 1)
	go func() { stopped <- srv.Shutdown(ctx) }()
	time.Sleep(100 * time.Millisecond)
	exchange()
	require.NoError(t, s.CloseSend())
	assert.Equal(t, io.EOF, s.RecvMsg(new([]byte)))
	assert.NoError(t, <-stopped)
}

// A client that does not read holds up its own stream and no other.
func TestPeerSlowReader(t *testing.T) {
	t.Parallel()
	ctx := timeout(t)
	flood := func(_ context.Context, c *grpchttp.Call) error {
		for range 100 {
			if err := c.Send(make([]byte, largest)); err != nil {
				return err
			}
		}
		return nil
	}
	conn := oursForPeer(t, map[string]grpchttp.Method{"/S/Echo": parrot, "/S/Flood": flood})
	slow := must.Get(conn.NewStream(ctx, bidi, "/S/Flood"))(t)
	require.NoError(t, slow.RecvMsg(new([]byte)))
	for range 20 {
		in, out := make([]byte, 10_000), []byte(nil)
		require.NoError(t, conn.Invoke(ctx, "/S/Echo", &in, &out))
	}
	for range 99 {
		var got []byte
		require.NoError(t, slow.RecvMsg(&got))
		require.Len(t, got, largest)
	}
	assert.Equal(t, io.EOF, slow.RecvMsg(new([]byte)))
}

// 10,000 streams are open at the same time on one connection, of either client.
func TestPeerManyStreams(t *testing.T) {
	t.Parallel()
	const n = 10_000
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var mu sync.Mutex
	open, peak, conns := 0, 0, 0
	count := func(d int) {
		mu.Lock()
		defer mu.Unlock()
		open += d
		peak = max(peak, open)
	}
	srv := &http.Server{
		Handler: ours(map[string]grpchttp.Method{"/S/Echo": func(ctx context.Context, c *grpchttp.Call) error {
			count(1)
			defer count(-1)
			return parrot(ctx, c)
		}}),
		Protocols: new(http.Protocols), HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 2 * n, MaxReadFrameSize: 16 << 10},
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateNew {
				mu.Lock()
				defer mu.Unlock()
				conns++
			}
		},
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()

	conn := dialPeer(t, l.Addr().String())
	theirs := make([]grpc.ClientStream, n)
	for i := range theirs {
		theirs[i] = must.Get(conn.NewStream(ctx, bidi, "/S/Echo"))(t)
		msg := []byte{byte(i)}
		require.NoError(t, theirs[i].SendMsg(&msg))
	}
	for i, s := range theirs {
		var got []byte
		require.NoError(t, s.RecvMsg(&got))
		require.Equal(t, []byte{byte(i)}, got)
	}
	assert.Equal(t, n, peak)
	for _, s := range theirs {
		require.NoError(t, s.CloseSend())
		require.Equal(t, io.EOF, s.RecvMsg(new([]byte)))
	}

	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	defer tr.CloseIdleConnections()
	c := grpchttp.NewClient(&http.Client{Transport: tr}, "http://"+l.Addr().String(), largest)
	peak = 0
	mine := make([]*grpchttp.Stream, n)
	for i := range mine {
		mine[i] = c.Open(ctx, "/S/Echo", nil)
		require.NoError(t, mine[i].Send([]byte{byte(i)}))
		if i == 0 { // until it has the server's settings, net/http makes a connection for each 100 streams
			must.Get(mine[0].Receive())(t)
			require.NoError(t, mine[0].Send([]byte{0}))
		}
	}
	for i, s := range mine {
		got := must.Get(s.Receive())(t)
		require.Equal(t, []byte{byte(i)}, got)
	}
	assert.Equal(t, n, peak)
	for _, s := range mine {
		s.CloseSend()
		_, err := s.Receive()
		require.Equal(t, io.EOF, err)
	}
	assert.Equal(t, 2, conns)
}
