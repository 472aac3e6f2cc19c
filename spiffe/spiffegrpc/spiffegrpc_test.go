package spiffegrpc_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// service answers with the ID of its client.
type service struct {
	testpb.UnimplementedTestServiceServer
	hold chan struct{} // if not nil, UnaryCall waits until it is closed
	held chan struct{} // gets a value when a call waits
}

func idOf(ctx context.Context) string {
	if p, ok := spiffegrpc.PeerFromContext(ctx); ok {
		return p.ID().String()
	}
	return "none"
}

func (s *service) UnaryCall(ctx context.Context, _ *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	if s.hold != nil {
		s.held <- struct{}{}
		<-s.hold
	}
	return &testpb.SimpleResponse{Username: idOf(ctx)}, nil
}

func (s *service) EmptyCall(context.Context, *testpb.Empty) (*testpb.Empty, error) {
	return &testpb.Empty{}, nil
}

// FullDuplexCall sends the ID of the client, and then everything back.
func (s *service) FullDuplexCall(stream grpc.BidiStreamingServer[testpb.StreamingOutputCallRequest, testpb.StreamingOutputCallResponse]) error {
	if err := stream.Send(&testpb.StreamingOutputCallResponse{Payload: &testpb.Payload{Body: []byte(idOf(stream.Context()))}}); err != nil {
		return err
	}
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = stream.Send(&testpb.StreamingOutputCallResponse{Payload: m.GetPayload()})
		}
		if err != nil {
			return err
		}
	}
}

// serve serves s until the end of the test and returns the address.
func serve(t testing.TB, creds credentials.TransportCredentials, s *service, opts ...grpc.ServerOption) string {
	t.Helper()
	_, addr := start(t, creds, s, opts...)
	return addr
}

func start(t testing.TB, creds credentials.TransportCredentials, s *service, opts ...grpc.ServerOption) (server *grpc.Server, addr string) {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	server = grpc.NewServer(append(opts, grpc.Creds(creds))...)
	testpb.RegisterTestServiceServer(server, s)
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, server.Serve(l)) })
	t.Cleanup(func() {
		server.Stop()
		wg.Wait()
	})
	return server, l.Addr().String()
}

// connect returns a client and its connection.
func connect(t testing.TB, target string, creds credentials.TransportCredentials, opts ...grpc.DialOption) testpb.TestServiceClient {
	t.Helper()
	conn := must.Get(grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(creds))...))(t)
	t.Cleanup(func() { assert.NoError(t, conn.Close()) })
	return testpb.NewTestServiceClient(conn)
}

// configOf returns opts, which may be nil, with the rest.
func configOf(self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Config) spiffetls.Config {
	var c spiffetls.Config
	if opts != nil {
		c = *opts
	}
	c.Self, c.Peers, c.Allow = self, peers, allow
	return c
}

func serverCreds(t testing.TB, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Config) credentials.TransportCredentials {
	t.Helper()
	creds := must.Get(spiffegrpc.ServerCredentials(configOf(self, peers, allow, opts)))(t)
	return creds
}

func clientCreds(t testing.TB, self spiffe.SVIDSource, peers spiffe.BundleSource, allow spiffe.PolicySource, opts *spiffetls.Config) credentials.TransportCredentials {
	t.Helper()
	creds := must.Get(spiffegrpc.ClientCredentials(configOf(self, peers, allow, opts)))(t)
	return creds
}

func callContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

var (
	web = spiffe.MustParseID("spiffe://example.org/web")
	ops = spiffe.MustParseID("spiffe://example.org/ops")
	db  = spiffe.MustParseID("spiffe://example.org/db")
)

// Both sides find the other one's proof, in unary calls and in streams, in interceptors and in handlers.
func TestPeers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var mu sync.Mutex
	var seen []string
	note := func(ctx context.Context) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, idOf(ctx))
	}
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{},
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			note(ctx)
			return next(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			note(ss.Context())
			return next(srv, ss)
		}))
	client := connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil))
	ctx := callContext(t)

	var p peer.Peer
	resp := must.Get(client.UnaryCall(ctx, &testpb.SimpleRequest{}, grpc.Peer(&p)))(t)
	assert.Equal(t, web.String(), resp.GetUsername())
	info, ok := p.AuthInfo.(spiffegrpc.AuthInfo)
	require.True(t, ok)
	assert.Equal(t, db, info.Peer.ID())
	assert.Equal(t, "h2", info.State.NegotiatedProtocol)
	assert.Equal(t, "tls", info.AuthType())
	require.NoError(t, credentials.CheckSecurityLevel(info, credentials.PrivacyAndIntegrity))
	assert.Equal(t, credentials.PrivacyAndIntegrity, info.GetCommonAuthInfo().SecurityLevel)
	assert.Equal(t, info.Peer.Chain()[0].Raw, info.GetSecurityValue().(*credentials.TLSChannelzSecurityValue).RemoteCertificate)

	stream := must.Get(client.FullDuplexCall(ctx))(t)
	m := must.Get(stream.Recv())(t)
	assert.Equal(t, web.String(), string(m.GetPayload().GetBody()))
	assert.Equal(t, db.String(), idOf(stream.Context()))
	assert.Equal(t, []string{web.String(), web.String()}, seen)

	_, ok = spiffegrpc.PeerFromContext(ctx)
	assert.False(t, ok)
	_, ok = spiffegrpc.PeerFromContext(peer.NewContext(ctx, &peer.Peer{AuthInfo: credentials.TLSInfo{}}))
	assert.False(t, ok)
	_, ok = spiffegrpc.PeerFromContext(peer.NewContext(ctx, &peer.Peer{AuthInfo: spiffegrpc.AuthInfo{}}))
	assert.False(t, ok)
	_, err := client.UnaryCall(ctx, &testpb.SimpleRequest{}, grpc.CallAuthority("other.example"))
	assert.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
}

// A side that proves no ID is served where an option says so, and is no peer.
func TestOneSided(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	guard, _, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{"/grpc.testing.TestService/EmptyCall": spiffe.AllowAnyPeer()})
	require.NoError(t, err)
	skip := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		if strings.HasSuffix(info.FullMethod, "/UnaryCall") {
			return next(ctx, req)
		}
		return guard(ctx, req, info, next)
	}
	failures := new(spiffetls.Metrics)
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), &spiffetls.Config{AllowAnonymousClients: true, Metrics: failures}),
		&service{}, grpc.UnaryInterceptor(skip))
	client := connect(t, addr, clientCreds(t, nil, ca.Bundle(), spiffe.AllowIDs(db), &spiffetls.Config{OptionalIdentity: true}))
	resp := must.Get(client.UnaryCall(callContext(t), &testpb.SimpleRequest{}))(t)
	assert.Equal(t, "none", resp.GetUsername())
	_, err = client.EmptyCall(callContext(t), &testpb.Empty{})
	assert.Equal(t, codes.Unauthenticated, status.Code(err))
	kept := failures.Report().Problems
	require.Len(t, kept, 1)
	assert.ErrorContains(t, kept[0], "request denied")

	// A server that is verified by its name.
	cert, key := ca.Certificate("/ingress", func(c *x509.Certificate) { c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)} })
	webCert := &tls.Certificate{PrivateKey: key}
	for _, c := range cert {
		webCert.Certificate = append(webCert.Certificate, c.Raw)
	}
	addr = serve(t, serverCreds(t, nil, ca.Bundle(), spiffe.AllowIDs(web), &spiffetls.Config{
		WebCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return webCert, nil },
	}), &service{})
	client = connect(t, addr, clientCreds(t, ca.SVID("/web"), nil, nil, &spiffetls.Config{
		WebRoots: func() (*x509.CertPool, error) {
			pool := x509.NewCertPool()
			pool.AddCert(ca.Root())
			return pool, nil
		},
	}))
	var p peer.Peer
	resp = must.Get(client.UnaryCall(callContext(t), &testpb.SimpleRequest{}, grpc.Peer(&p)))(t)
	assert.Equal(t, web.String(), resp.GetUsername())
	assert.Nil(t, p.AuthInfo.(spiffegrpc.AuthInfo).Peer)
}

// The server refuses each of these clients, and says why in its report.
func TestServerRefuses(t *testing.T) {
	t.Parallel()
	ca, foreign := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	anyServer := func(t *testing.T, self spiffe.SVIDSource) credentials.TransportCredentials {
		return clientCreds(t, self, ca.Bundle(), spiffe.AllowAnyPeer(), &spiffetls.Config{OptionalIdentity: self == nil})
	}
	presents := func(chain []*x509.Certificate, key any) credentials.TransportCredentials {
		config := &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{{PrivateKey: key}}}
		for _, c := range chain {
			config.Certificates[0].Certificate = append(config.Certificates[0].Certificate, c.Raw)
		}
		return credentials.NewTLS(config)
	}
	expired, expiredKey := ca.Broken("Expired")
	stranger, strangerKey := foreign.Certificate("/web")
	for name, c := range map[string]struct {
		creds       credentials.TransportCredentials
		stage, rule string
	}{
		"another ID":           {anyServer(t, ca.SVID("/web2")), "policy", ""},
		"another trust domain": {presents(stranger, strangerKey), "bundle", "X5-38"},
		"expired":              {presents(expired, expiredKey), "chain", "X5-30"},
		"no certificate":       {anyServer(t, nil), "tls", ""},
		"plaintext":            {insecure.NewCredentials(), "", ""},
		"another authority":    {anyServer(t, spiffetest.NewCA(t, "example.org").SVID("/web")), "chain", "X5-31"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			failures := new(spiffetls.Metrics)
			addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), &spiffetls.Config{Metrics: failures}), &service{})
			_, err := connect(t, addr, c.creds).UnaryCall(callContext(t), &testpb.SimpleRequest{})
			assert.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
			assert.NotContains(t, fmt.Sprint(err), "policy", "the client learns no reason")
			if c.stage == "" {
				return
			}
			require.EventuallyWithT(t, func(t *assert.CollectT) {
				kept := failures.Report().Problems
				if !assert.NotEmpty(t, kept) {
					return
				}
				ve, ok := errors.AsType[*spiffe.VerifyError](kept[0])
				assert.Equal(t, c.stage != "tls", ok, "%v", kept[0])
				if ok {
					assert.Equal(t, c.stage, ve.Stage, "%v", ve)
					assert.Equal(t, c.rule, ve.Rule)
				}
			}, time.Minute, 5*time.Millisecond)
		})
	}
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{})
	t.Run("HTTP/1", func(t *testing.T) {
		t.Parallel()
		endpoint := must.Get(spiffetls.New(spiffetls.Config{
			Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(db), NextProtos: []string{"http/1.1"},
		}))(t)
		transport := must.Get(endpoint.Transport())(t)
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Get("https://" + addr + "/")
		if err == nil {
			_ = resp.Body.Close()
		}
		assert.Error(t, err)
	})
	for name, protocols := range map[string][]string{"HTTP/1": {"http/1.1"}, "none": nil, "another": {"acme"}, "gRPC": {"h2"}} {
		t.Run("protocol "+name, func(t *testing.T) {
			t.Parallel()
			below, ours := net.Pipe()
			creds := serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil)
			config := spiffetest.TLSConfig(ca.Certificate("/web"))
			config.NextProtos = protocols
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				conn := tls.Client(below, config)
				defer conn.Close()
				_, _ = io.Copy(io.Discard, conn)
			})
			conn, info, err := creds.ServerHandshake(ours)
			if conn != nil {
				defer conn.Close()
			}
			if name == "gRPC" {
				require.NoError(t, err)
				assert.Equal(t, web, info.(spiffegrpc.AuthInfo).Peer.ID())
				return
			}
			assert.ErrorContains(t, err, map[bool]string{true: "unsupported application protocols", false: "did not negotiate h2"}[name == "another"])
			assert.Nil(t, info)
		})
	}
	t.Run("silent", func(t *testing.T) {
		t.Parallel()
		below, ours := net.Pipe()
		defer below.Close()
		creds := serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), &spiffetls.Config{HandshakeTimeout: 20 * time.Millisecond})
		_, _, err := creds.ServerHandshake(ours)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// A session that is resumed is judged as a new one is.
func TestResumed(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var allow spiffe.LivePolicy
	require.NoError(t, allow.Set(spiffe.AllowIDs(web)))
	failures := new(spiffetls.Metrics)
	resumed := make(chan bool, 10)
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), &allow, &spiffetls.Config{Metrics: failures}), &service{},
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			p, _ := peer.FromContext(ctx)
			resumed <- p.AuthInfo.(spiffegrpc.AuthInfo).State.DidResume
			return next(ctx, req)
		}))
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(db)}))(t)
	config := must.Get(endpoint.ClientConfig())(t)
	config.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	call := func() error {
		conn := must.Get(grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(config))))(t)
		defer conn.Close()
		resp, err := testpb.NewTestServiceClient(conn).UnaryCall(callContext(t), &testpb.SimpleRequest{})
		if err == nil {
			assert.Equal(t, web.String(), resp.GetUsername())
		}
		return err
	}
	require.NoError(t, call())
	require.NoError(t, call())
	assert.False(t, <-resumed)
	assert.True(t, <-resumed)
	require.NoError(t, allow.Set(spiffe.AllowIDs(ops)))
	assert.Equal(t, codes.Unavailable, status.Code(call()))
	require.Eventually(t, func() bool {
		kept := failures.Report().Problems
		return len(kept) == 1 && errors.Is(kept[0], spiffe.ErrDenied)
	}, time.Minute, 5*time.Millisecond)
}

// The client refuses each of these servers, and sends nothing.
func TestClientRefuses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	bundles, allow := ca.Bundle(), spiffe.AllowIDs(db)
	good := serverCreds(t, ca.SVID("/db"), bundles, spiffe.AllowAnyPeer(), nil)
	noALPN := spiffetest.TLSConfig(ca.Certificate("/db"))
	expired := spiffetest.TLSConfig(ca.Broken("Expired"))
	for name, c := range map[string]struct {
		server credentials.TransportCredentials
		allow  spiffe.PolicySource
		hosts  map[string]spiffe.PolicySource
		stage  string
		text   string
	}{
		"good":                 {good, allow, nil, "", ""},
		"another ID":           {serverCreds(t, ca.SVID("/db2"), bundles, spiffe.AllowAnyPeer(), nil), allow, nil, "policy", "db2"},
		"another trust domain": {serverCreds(t, spiffetest.NewCA(t, "other.test").SVID("/db"), bundles, spiffe.AllowAnyPeer(), nil), allow, nil, "bundle", "other.test"},
		"expired":              {withTLS{expired}, allow, nil, "chain", "expired"},
		"plaintext":            {insecure.NewCredentials(), allow, nil, "tls", ""},
		"no h2":                {withTLS{noALPN}, allow, nil, "", "h2"},
		"unknown host":         {good, nil, map[string]spiffe.PolicySource{"db.example": allow}, "", "no known host"},
		"host of another":      {good, nil, map[string]spiffe.PolicySource{"127.0.0.1": spiffe.AllowIDs(web)}, "policy", "not allowed"},
		"known host":           {good, nil, map[string]spiffe.PolicySource{"127.0.0.1": allow}, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addr := serve(t, c.server, &service{})
			failures := new(spiffetls.Metrics)
			client := connect(t, addr, clientCreds(t, ca.SVID("/web"), bundles, c.allow, &spiffetls.Config{Hosts: c.hosts, Metrics: failures}))
			_, err := client.UnaryCall(callContext(t), &testpb.SimpleRequest{})
			if c.stage == "" && c.text == "" {
				require.NoError(t, err)
				return
			}
			assert.Equal(t, codes.Unavailable, status.Code(err))
			assert.ErrorContains(t, err, c.text)
			if kept := failures.Report().Problems; c.stage != "" && assert.NotEmpty(t, kept) {
				assert.ErrorContains(t, kept[0], "from "+addr)
				if ve, ok := errors.AsType[*spiffe.VerifyError](kept[0]); ok {
					assert.Equal(t, c.stage, ve.Stage)
				}
			}
		})
	}
}

// withTLS are the credentials of a server with any configuration, with or without h2.
type withTLS struct{ config *tls.Config }

func (w withTLS) ServerHandshake(below net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn := tls.Server(below, w.config)
	return conn, credentials.TLSInfo{}, conn.Handshake()
}

func (w withTLS) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	panic("a server's")
}
func (w withTLS) Info() credentials.ProtocolInfo          { return credentials.ProtocolInfo{} }
func (w withTLS) Clone() credentials.TransportCredentials { return w }
func (w withTLS) OverrideServerName(string) error         { return nil }

// The policy of a channel depends on its authority, whatever the address that a resolver finds for it.
func TestHosts(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer(), nil), &service{})
	creds := clientCreds(t, ca.SVID("/web"), ca.Bundle(), nil, &spiffetls.Config{Hosts: map[string]spiffe.PolicySource{
		"db.example:8443": spiffe.AllowIDs(db), "billing.example": spiffe.AllowIDs(ops),
	}})
	there := grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	})
	for target, want := range map[string]string{
		"passthrough:///db.example:8443":      "",
		"passthrough:///DB.example:8443":      "",
		"passthrough:///db.example:8444":      "no known host",
		"passthrough:///billing.example:8443": "db",
		"passthrough:///db.example":           "no known host",
	} {
		_, err := connect(t, target, creds, there).UnaryCall(callContext(t), &testpb.SimpleRequest{})
		if want == "" {
			assert.NoError(t, err, target)
		} else {
			assert.Equal(t, codes.Unavailable, status.Code(err), target)
			assert.ErrorContains(t, err, want, target)
		}
	}
	_, err := connect(t, addr, creds, grpc.WithAuthority("db.example:8443")).UnaryCall(callContext(t), &testpb.SimpleRequest{})
	assert.NoError(t, err)
}

func TestMistakes(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	self, bundles, allow := ca.SVID("/db"), ca.Bundle(), spiffe.AllowAnyPeer()
	for name, c := range map[string]struct {
		self  spiffe.SVIDSource
		peers spiffe.BundleSource
		allow spiffe.PolicySource
		opts  *spiffetls.Config
		both  bool
	}{
		"no identity":         {nil, bundles, allow, nil, true},
		"no bundles":          {self, nil, allow, nil, true},
		"no policy":           {self, bundles, nil, nil, true},
		"zero policy":         {self, bundles, spiffe.Policy{}, nil, true},
		"protocols":           {self, bundles, allow, &spiffetls.Config{NextProtos: []string{"h2"}}, true},
		"bounded handshakes":  {self, bundles, allow, &spiffetls.Config{MaxHandshakes: 5}, false},
		"a client's identity": {nil, bundles, allow, &spiffetls.Config{OptionalIdentity: true}, false},
		"a client's policy":   {self, bundles, nil, &spiffetls.Config{Hosts: map[string]spiffe.PolicySource{"a": allow}}, false},
	} {
		creds, err := spiffegrpc.ServerCredentials(configOf(c.self, c.peers, c.allow, c.opts))
		assert.ErrorContains(t, err, "spiffegrpc: server credentials: ", name)
		assert.Nil(t, creds, name)
		if creds, err = spiffegrpc.ClientCredentials(configOf(c.self, c.peers, c.allow, c.opts)); c.both {
			assert.ErrorContains(t, err, "spiffegrpc: client credentials: ", name)
			assert.Nil(t, creds, name)
		}
	}
	server, client := serverCreds(t, self, bundles, allow, nil), clientCreds(t, self, bundles, allow, nil)
	_, _, err := server.ClientHandshake(t.Context(), "db", nil)
	assert.ErrorContains(t, err, "credentials of a server")
	_, _, err = client.ServerHandshake(nil)
	assert.ErrorContains(t, err, "credentials of a client")
	for _, creds := range []credentials.TransportCredentials{server, client} {
		assert.Equal(t, "tls", creds.Info().SecurityProtocol)
		assert.Same(t, creds, creds.Clone())
		assert.Error(t, creds.OverrideServerName("a")) //lint:ignore SA1019 part of the interface
		for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
			assert.Regexp(t, "^spiffegrpc: credentials of a (server|client)$", fmt.Sprintf(verb, creds))
		}
		var log strings.Builder
		slog.New(slog.NewTextHandler(&log, nil)).Info("made", "creds", creds)
		assert.Contains(t, log.String(), "spiffegrpc: credentials of a ")
	}
}

// notes are written by one goroutine and read by another.
type notes struct {
	mu sync.Mutex
	b  strings.Builder
}

func (n *notes) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.b.Write(p)
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.b.String()
}
