package spiffegrpc_test

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// guarded are the options of a server with interceptors.
func guarded(unary grpc.UnaryServerInterceptor, stream grpc.StreamServerInterceptor) []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream)}
}

// outcome is that of a unary call, and of a stream.
func outcome(t testing.TB, client testpb.TestServiceClient) (unary, stream codes.Code) {
	t.Helper()
	_, err := client.UnaryCall(callContext(t), &testpb.SimpleRequest{})
	s, streamErr := client.FullDuplexCall(callContext(t))
	if streamErr == nil {
		_, streamErr = s.Recv()
	}
	for _, err := range []error{err, streamErr} {
		for _, word := range []string{"spiffe", "policy", "token", "expired", "audience", "db"} {
			assert.NotContains(t, status.Convert(err).Message(), word, "a refusal says no reason")
		}
	}
	return status.Code(err), status.Code(streamErr)
}

const (
	unaryCall = "/grpc.testing.TestService/UnaryCall"
	duplex    = "/grpc.testing.TestService/FullDuplexCall"
	service_  = "/grpc.testing.TestService/"
)

func TestRequirePeer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	var live spiffe.LivePolicy
	require.NoError(t, live.Set(spiffe.AllowIDs(web)))
	const ok, denied = codes.OK, codes.PermissionDenied
	for name, c := range map[string]struct {
		allow         spiffe.PolicySource
		unary, stream codes.Code
	}{
		"one policy":        {spiffe.AllowIDs(web), ok, ok},
		"another policy":    {spiffe.AllowIDs(ops), denied, denied},
		"live policy":       {&live, ok, ok},
		"empty live policy": {&spiffe.LivePolicy{}, denied, denied},
		"unary":             {spiffegrpc.Methods{unaryCall: spiffe.AllowIDs(web)}, ok, denied},
		"stream":            {spiffegrpc.Methods{duplex: spiffe.AllowIDs(web)}, denied, ok},
		"service":           {spiffegrpc.Methods{service_: spiffe.AllowIDs(web)}, ok, ok},
		"another service":   {spiffegrpc.Methods{"/grpc.testing.Test/": spiffe.AllowIDs(web)}, denied, denied},
		"method first":      {spiffegrpc.Methods{service_: spiffe.AllowIDs(web), unaryCall: spiffe.AllowIDs(ops)}, denied, ok},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			guardUnary, guardStream, err := spiffegrpc.RequirePeer(c.allow)
			require.NoError(t, err)
			failures := new(spiffetls.Metrics)
			creds := serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), &spiffetls.Config{Metrics: failures})
			addr := serve(t, creds, &service{}, guarded(guardUnary, guardStream)...)
			unary, stream := outcome(t, connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil)))
			assert.Equal(t, c.unary, unary)
			assert.Equal(t, c.stream, stream)
			var want float64
			for _, code := range []codes.Code{unary, stream} {
				if code != ok {
					want++
				}
			}
			text := must.Get(metricstest.Of(failures.Report().Metrics))(t)
			assert.Equal(t, want, text.Samples[`svidkit_tls_denied_requests_total{reason="denied"}`])
			for _, err := range failures.Report().Problems {
				if m, byMethod := c.allow.(spiffegrpc.Methods); byMethod && m[unaryCall] == nil {
					assert.ErrorContains(t, err, "no policy is for the method "+service_, "%s", name)
				}
				assert.ErrorContains(t, err, "request denied: from 127.0.0.1:")
			}
		})
	}
}

// On an open connection the client is verified again, and one that no longer proves itself is unauthenticated.
func TestRequirePeerOnOpenConnection(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	guardUnary, guardStream, err := spiffegrpc.RequirePeer(spiffe.AllowAnyPeer())
	require.NoError(t, err)
	source := ca.Source("/db")
	var allow spiffe.LivePolicy
	require.NoError(t, allow.Set(spiffe.AllowIDs(web, ops)))
	addr := serve(t, serverCreds(t, source, source, &allow, nil), &service{}, guarded(guardUnary, guardStream)...)
	bundles := ca.Bundle()
	client := connect(t, addr, clientCreds(t, ca.SVID("/web"), bundles, spiffe.AllowIDs(db), nil))
	unary, stream := outcome(t, client)
	assert.Equal(t, []codes.Code{codes.OK, codes.OK}, []codes.Code{unary, stream})

	require.NoError(t, allow.Set(spiffe.AllowIDs(ops)))
	unary, stream = outcome(t, client)
	assert.Equal(t, []codes.Code{codes.Unauthenticated, codes.Unauthenticated}, []codes.Code{unary, stream})
	require.NoError(t, allow.Set(spiffe.AllowIDs(web)))
	unary, _ = outcome(t, client)
	assert.Equal(t, codes.OK, unary)

	ca.Rotate()
	ca.DropOldRoots()
	source.Renew()
	unary, stream = outcome(t, client)
	assert.Equal(t, []codes.Code{codes.Unauthenticated, codes.Unauthenticated}, []codes.Code{unary, stream})
}

func TestInterceptorDenies(t *testing.T) {
	t.Parallel()
	never := func(context.Context, any) (any, error) {
		t.Error("the handler was called")
		return nil, nil
	}
	info := &grpc.UnaryServerInfo{FullMethod: unaryCall}
	guard, _, err := spiffegrpc.RequirePeer(spiffe.AllowAnyPeer())
	require.NoError(t, err)
	_, err = guard(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: unaryCall[1:]}, never)
	assert.Equal(t, codes.PermissionDenied, status.Code(err))
	proof, err := spiffetls.PeerFromRequest(spiffetest.NewCA(t, "example.org").RequestFrom("/web", httptest.NewRequest("GET", "/", nil)))
	require.NoError(t, err)
	for _, ctx := range []context.Context{
		t.Context(),
		peer.NewContext(t.Context(), &peer.Peer{}),
		peer.NewContext(t.Context(), &peer.Peer{AuthInfo: credentials.TLSInfo{}}),
		peer.NewContext(t.Context(), &peer.Peer{AuthInfo: spiffegrpc.AuthInfo{Peer: proof}}), // of no connection
	} {
		_, err := guard(ctx, nil, info, never)
		assert.Equal(t, codes.Unauthenticated, status.Code(err))
	}
}

// inContext is a stream with a context and nothing else.
type inContext struct {
	grpc.ServerStream
	ctx context.Context
}

func (s inContext) Context() context.Context { return s.ctx }

func TestRequirePeerMistakes(t *testing.T) {
	t.Parallel()
	denyAll := func(unary grpc.UnaryServerInterceptor, stream grpc.StreamServerInterceptor) {
		_, err := unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: unaryCall}, func(context.Context, any) (any, error) {
			t.Error("the handler was called")
			return nil, nil
		})
		assert.Equal(t, codes.PermissionDenied, status.Code(err))
		err = stream(nil, inContext{ctx: t.Context()}, &grpc.StreamServerInfo{FullMethod: duplex}, func(any, grpc.ServerStream) error {
			t.Error("the handler was called")
			return nil
		})
		assert.Equal(t, codes.PermissionDenied, status.Code(err))
	}
	some := spiffe.AllowAnyPeer()
	for _, allow := range []spiffe.PolicySource{
		nil, spiffe.Policy{}, spiffegrpc.Methods{}, spiffegrpc.Methods(nil),
		spiffegrpc.Methods{"": some}, spiffegrpc.Methods{"/": some}, spiffegrpc.Methods{"//": some}, spiffegrpc.Methods{"//b": some},
		spiffegrpc.Methods{"a.S/B": some}, spiffegrpc.Methods{"/a.S": some}, spiffegrpc.Methods{"/a.S/*": some}, spiffegrpc.Methods{"/a.S/B/": some},
		spiffegrpc.Methods{"/a.S/B": nil}, spiffegrpc.Methods{"/a.S/B": spiffe.Policy{}},
		spiffegrpc.Methods{"/a.S/B": spiffegrpc.Methods{"/a.S/B": some}},
	} {
		unary, stream, err := spiffegrpc.RequirePeer(allow)
		assert.ErrorContains(t, err, "spiffegrpc: require peer: ", "%v", allow)
		denyAll(unary, stream)
	}
	unary, stream, err := spiffegrpc.RequireCaller(nil)
	assert.Error(t, err)
	denyAll(unary, stream)
	assert.Equal(t, "no peer", spiffegrpc.Methods{"/a.S/B": some}.Policy().String())
}

// issuer signs tokens, and its bundle has the key.
func issuer(t testing.TB, ca *spiffetest.CA) (*jwtsvid.Issuer, *spiffe.Bundle) {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	i := must.Get(jwtsvid.NewIssuer(ca.TrustDomain(), "k", key, nil))(t)
	c := ca.Bundle().Contents()
	c.JWTAuthorities = map[string]crypto.PublicKey{"k": key.Public()}
	b := must.Get(spiffe.NewBundle(ca.TrustDomain(), c))(t)
	return i, b
}

// outage is a source of bundles that has failed.
type outage struct{}

func (outage) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, errors.New("down") }

// proven is the middleware that requires what a proves.
func proven(a authn.Authenticator, logger *slog.Logger) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler { return authn.Require(a, next, logger) }
}

// A middleware that knows nothing of gRPC, and wraps the writer, answers 503, another code, or nothing; it may lose the context.
func TestRequireCallerMiddleware(t *testing.T) {
	t.Parallel()
	answering := func(status int) func(http.Handler) http.Handler {
		return func(http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", status) })
		}
	}
	for name, c := range map[string]struct {
		require func(http.Handler) http.Handler
		want    codes.Code
	}{
		"503":     {answering(http.StatusServiceUnavailable), codes.Unavailable},
		"403":     {answering(http.StatusForbidden), codes.Unauthenticated},
		"nothing": {func(http.Handler) http.Handler { return http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}) }, codes.Unauthenticated},
		"wrapped": {func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { next.ServeHTTP(struct{ http.ResponseWriter }{w}, r) })
		}, codes.OK},
		"other context": {func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { next.ServeHTTP(w, r.WithContext(context.Background())) })
		}, codes.Unauthenticated},
	} {
		unary, _, err := spiffegrpc.RequireCaller(c.require)
		require.NoError(t, err)
		_, err = unary(t.Context(), nil, &grpc.UnaryServerInfo{FullMethod: unaryCall}, func(context.Context, any) (any, error) { return nil, nil })
		assert.Equal(t, c.want, status.Code(err), name)
	}
}

func TestRequireCaller(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	authority, bundle := issuer(t, ca)
	token := func(r jwtsvid.Request) func(context.Context) (string, error) {
		text := must.Get(authority.Issue(r))(t)
		return func(context.Context) (string, error) { return text, nil }
	}
	good := token(jwtsvid.Request{ID: ops, Audience: []string{"db"}})
	text := must.Get(good(t.Context()))(t)
	const ok, refused = codes.OK, codes.Unauthenticated
	for name, c := range map[string]struct {
		token   func(context.Context) (string, error) // nil for none
		now     time.Duration                         // of the server
		bundles spiffe.BundleSource
		want    codes.Code
	}{
		"good":           {good, 0, bundle, ok},
		"missing":        {nil, 0, bundle, refused},
		"expired":        {good, time.Hour, bundle, refused},
		"wrong audience": {token(jwtsvid.Request{ID: ops, Audience: []string{"cache"}}), 0, bundle, refused},
		"wrong ID":       {token(jwtsvid.Request{ID: db, Audience: []string{"db"}}), 0, bundle, refused},
		"another key":    {good, 0, func() spiffe.BundleSource { _, b := issuer(t, ca); return b }(), refused},
		"no token":       {tokensource.Static("word").Token, 0, bundle, refused},
		"cannot tell":    {good, 0, outage{}, codes.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			validator, err := jwtsvid.NewValidator(c.bundles, []string{"db"}, &jwtsvid.ValidatorOptions{Now: func() time.Time { return time.Now().Add(c.now) }})
			require.NoError(t, err)
			method := must.Get(jwt.SVID(validator, spiffe.AllowIDs(ops)))(t)
			var log notes
			tokens, tokenStream, err := spiffegrpc.RequireCaller(proven(method, slog.New(slog.NewTextHandler(&log, nil))))
			require.NoError(t, err)
			var callers []string
			note := func(ctx context.Context) {
				caller, ok := authn.CallerFromContext(ctx)
				require.True(t, ok)
				callers = append(callers, caller.String()+" by "+idOf(ctx))
			}
			addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{},
				grpc.ChainUnaryInterceptor(tokens, func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
					note(ctx)
					return next(ctx, req)
				}),
				grpc.ChainStreamInterceptor(tokenStream, func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
					note(ss.Context())
					return next(srv, ss)
				}))
			var opts []grpc.DialOption
			if c.token != nil {
				opts = append(opts, grpc.WithPerRPCCredentials(spiffegrpc.TokenCredentials(c.token)))
			}
			unary, stream := outcome(t, connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil), opts...))
			assert.Equal(t, c.want, unary)
			assert.Equal(t, c.want, stream)
			if c.want == ok {
				who := ops.String() + " by " + web.String()
				assert.Equal(t, []string{who, who}, callers)
				assert.Empty(t, log.String())
				return
			}
			assert.Empty(t, callers)
			assert.Contains(t, log.String(), "request refused")
			assert.NotContains(t, log.String(), strings.Split(text, ".")[2], "no log has a token")
		})
	}
}

// What a method of package authn sees of a call.
func TestRequireCallerSeesTheCall(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	v := must.Get(spiffe.NewVerifier(ca.Bundle(), spiffe.AllowIDs(web), nil))(t)
	var seen *http.Request
	tokens, tokenStream, err := spiffegrpc.RequireCaller(proven(authn.Func(func(r *http.Request) (*authn.Caller, error) {
		seen = r
		return authn.ClientCertificate(v).Authenticate(r)
	}), nil))
	require.NoError(t, err)
	addr := serve(t, serverCreds(t, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{}, guarded(tokens, tokenStream)...)
	client := connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil))
	ctx := metadata.AppendToOutgoingContext(callContext(t), "x-request-id", "a", "x-request-id", "b", "x-raw-bin", "\x00")
	must.Get(client.UnaryCall(ctx, &testpb.SimpleRequest{}))(t)
	assert.Equal(t, unaryCall, seen.URL.Path)
	assert.Equal(t, addr, seen.Host)
	assert.Equal(t, []string{"a", "b"}, seen.Header["X-Request-Id"])
	assert.NotContains(t, seen.Header, "X-Raw-Bin")
	for key := range seen.Header {
		assert.False(t, strings.HasPrefix(key, ":"), key)
	}
	assert.Equal(t, http.MethodPost, seen.Method)
	assert.True(t, seen.ProtoAtLeast(2, 0))
	assert.Contains(t, seen.RemoteAddr, "127.0.0.1:")
	assert.Equal(t, addr, fmt.Sprint(seen.Context().Value(http.LocalAddrContextKey)))
	assert.True(t, seen.TLS.HandshakeComplete)
}

// A token goes neither out nor in over a connection that others can read.
func TestTokensNeedTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	authority, bundle := issuer(t, ca)
	text := must.Get(authority.Issue(jwtsvid.Request{ID: ops, Audience: []string{"db"}}))(t)
	creds := spiffegrpc.TokenCredentials(tokensource.Static(text).Token)
	_, err := grpc.NewClient("127.0.0.1:1", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithPerRPCCredentials(creds))
	require.ErrorContains(t, err, "transport level security")

	validator := must.Get(jwtsvid.NewValidator(bundle, []string{"db"}, nil))(t)
	method := must.Get(jwt.SVID(validator, spiffe.AllowIDs(ops)))(t)
	var log notes
	tokens, tokenStream, err := spiffegrpc.RequireCaller(proven(method, slog.New(slog.NewTextHandler(&log, nil))))
	require.NoError(t, err)
	addr := serve(t, insecure.NewCredentials(), &service{}, guarded(tokens, tokenStream)...)
	client := connect(t, addr, insecure.NewCredentials())
	ctx := metadata.AppendToOutgoingContext(callContext(t), "authorization", "Bearer "+text)
	_, err = client.UnaryCall(ctx, &testpb.SimpleRequest{})
	assert.Equal(t, codes.Unauthenticated, status.Code(err))
	assert.Contains(t, log.String(), "not encrypted")

	// With grpc-go's own credentials for TLS it may.
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(web)}))(t)
	config := must.Get(endpoint.ServerConfig())(t)
	addr = serve(t, credentials.NewTLS(config), &service{}, guarded(tokens, tokenStream)...)
	client = connect(t, addr, clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil), grpc.WithPerRPCCredentials(creds))
	_, err = client.UnaryCall(callContext(t), &testpb.SimpleRequest{})
	assert.NoError(t, err)
}

func TestTokenCredentials(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	const secret = "s3cret-token"
	for name, c := range map[string]struct {
		ctx   context.Context
		token string
		err   error
		want  codes.Code
	}{
		"good":      {t.Context(), secret, nil, codes.OK},
		"failed":    {t.Context(), "", errors.New("agent is down"), codes.Unauthenticated},
		"cancelled": {ctx, "", context.Canceled, codes.Canceled},
		"empty":     {t.Context(), "", nil, codes.Unauthenticated},
		"two lines": {t.Context(), secret + "\n", nil, codes.Unauthenticated},
		"two words": {t.Context(), "a " + secret, nil, codes.Unauthenticated},
	} {
		creds := spiffegrpc.TokenCredentials(func(context.Context) (string, error) { return c.token, c.err })
		assert.True(t, creds.RequireTransportSecurity())
		md, err := creds.GetRequestMetadata(c.ctx, "https://db")
		assert.Equal(t, c.want, status.Code(err), name)
		assert.NotContains(t, fmt.Sprint(err), secret)
		if c.err != nil && c.want != codes.Canceled {
			assert.ErrorContains(t, err, c.err.Error())
		}
		if c.want == codes.OK {
			assert.Equal(t, map[string]string{"authorization": "Bearer " + secret}, md)
		}
	}
}
