package spiffegrpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/textproto"
	"net/url"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/internal/provenpeer"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// admit decides about a call, and returns the context for its handler. A nil admit denies all calls.
type admit func(ctx context.Context, method string) (context.Context, error)

// unary is a [grpc.UnaryServerInterceptor].
func (a admit) unary(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	ctx, err := a.ask(ctx, info.FullMethod)
	if err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

// stream is a [grpc.StreamServerInterceptor]. A stream is judged when it begins.
func (a admit) stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx, err := a.ask(ss.Context(), info.FullMethod)
	if err != nil {
		return err
	}
	return handler(srv, stream{ss, ctx})
}

func (a admit) ask(ctx context.Context, method string) (context.Context, error) {
	if a == nil || !strings.HasPrefix(method, "/") { // grpc-go has an option to serve paths without a slash
		return nil, errDenied
	}
	return a(ctx, method)
}

// The errors that a refused client sees.
var (
	errDenied          = status.Error(codes.PermissionDenied, "permission denied")
	errUnauthenticated = status.Error(codes.Unauthenticated, "unauthenticated")
	errUnavailable     = status.Error(codes.Unavailable, "the caller cannot be authenticated now")
)

// stream is a stream with another context.
type stream struct {
	grpc.ServerStream
	ctx context.Context
}

// Context implements [grpc.ServerStream].
func (s stream) Context() context.Context { return s.ctx }

// Methods is the policy of [RequirePeer] that says for each method which clients may call it. A key is a method,
// "/package.Service/Method", or a service, "/package.Service/", for its methods without a key of their own. A method
// without a policy is denied. The map is copied; the policies in it may be live. As a policy by itself it allows no
// peer.
type Methods map[string]spiffe.PolicySource

// Policy implements [spiffe.PolicySource]. It returns the zero Policy, which allows no peer.
func (Methods) Policy() spiffe.Policy { return spiffe.Policy{} }

// policies returns the function that finds a method's policy in allow. It returns nil for a method without one.
func policies(allow spiffe.PolicySource) (func(method string) spiffe.PolicySource, error) {
	methods, ok := allow.(Methods)
	if !ok {
		return func(string) spiffe.PolicySource { return allow }, spiffe.CheckPolicySource(allow)
	}
	if len(methods) == 0 {
		return nil, errors.New("Methods has no method")
	}
	for _, key := range slices.Sorted(maps.Keys(methods)) {
		if err := cmp.Or(checkMethod(key), checkPolicy(methods[key])); err != nil {
			return nil, fmt.Errorf("methods: %q: %w", key, err)
		}
	}
	methods = maps.Clone(methods)
	return func(method string) spiffe.PolicySource {
		if policy, ok := methods[method]; ok {
			return policy
		}
		return methods[method[:strings.LastIndexByte(method, '/')+1]] // of the service
	}, nil
}

// checkMethod returns an error unless key is the full name of a method or of a service.
func checkMethod(key string) error {
	rest, rooted := strings.CutPrefix(key, "/")
	service, method, ok := strings.Cut(rest, "/")
	if !rooted || !ok || service == "" || strings.ContainsAny(method, "/*") {
		return errors.New("want /package.Service/Method, or /package.Service/ for all methods of a service")
	}
	return nil
}

// checkPolicy returns an error for a policy that can allow no peer.
func checkPolicy(allow spiffe.PolicySource) error {
	if _, is := allow.(Methods); is {
		return errors.New("Methods allows no peer here")
	}
	return spiffe.CheckPolicySource(allow)
}

func interceptors(a admit, err error) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor, error) {
	return a.unary, a.stream, err
}

// RequirePeer returns interceptors that pass the calls of clients that the policy allow permits: one policy for all
// methods, or [Methods]. A server needs both interceptors, for unary calls and for streams, which are
// judged when they begin. They are for servers with [ServerCredentials], whose own policy decides about connections;
// allow can only narrow it. A policy that [spiffe.CheckPolicySource] refuses is an error.
//
// The client is verified again for each call, as by [spiffetls.RequirePeer], so that a client whose certificate has
// expired, or whose authority was removed, is refused on an open connection, too. This costs some microseconds.
//
// Other calls end without a reason, with PermissionDenied, or with Unauthenticated if the client is not or no longer
// proven. The Logger and the Metrics of the credentials get the reason. With an error the interceptors deny all
// calls.
func RequirePeer(allow spiffe.PolicySource) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor, error) {
	policy, err := policies(allow)
	if err != nil {
		return interceptors(nil, fmt.Errorf("spiffegrpc: require peer: %w", err))
	}
	return interceptors(func(ctx context.Context, method string) (context.Context, error) {
		var info AuthInfo
		if p, ok := peer.FromContext(ctx); ok {
			info, _ = p.AuthInfo.(AuthInfo)
		}
		if info.conn == nil { // from other credentials
			return nil, errUnauthenticated
		}
		allow := policy(method)
		if allow == nil {
			allow = noPolicy(method)
		}
		handler, err := spiffetls.RequirePeer(allow, http.HandlerFunc(admitted))
		if err != nil {
			return nil, errDenied
		}
		a := ask(handler, request(provenpeer.With(ctx, info.conn), method))
		switch {
		case a.ctx != nil:
			return ctx, nil
		case info.Peer == nil, a.header.Get("Connection") == "close": // not proven, or no longer
			return nil, errUnauthenticated
		}
		return nil, errDenied
	}, nil)
}

// noPolicy denies all clients a method that has no policy.
func noPolicy(method string) spiffe.Policy {
	return spiffe.AllowFunc(func(spiffe.ID) error {
		return fmt.Errorf("%w: no policy is for the method %.200s", spiffe.ErrDenied, method)
	})
}

// RequireCaller returns two interceptors that pass the calls that a net/http middleware accepts. A server needs
// both. They are for callers that prove themselves by a token in the metadata "authorization", such as a JWT-SVID:
//
//	a, err := jwt.SVID(validator, spiffe.AllowIDs(web)) // of package authn/jwt
//	…
//	unary, stream, err := spiffegrpc.RequireCaller(func(next http.Handler) http.Handler {
//		return authn.Require(a, next, logger)
//	})
//
// The middleware is called once, and its handler for every call. The request has the metadata as its header, and the
// TLS state and the addresses of the connection. The connection may use other credentials: package authn refuses
// tokens on a connection that others can read. The path is the method, so an Authenticator can decide by method. The
// handler of the call gets the context that the middleware passes to next, so that it can read the caller with
// authn.CallerFromContext.
//
// Other calls end without a reason, with Unauthenticated, or with Unavailable if the middleware answers 503 or with
// that gRPC status. With an error the interceptors deny all calls.
func RequireCaller(
	require func(next http.Handler) http.Handler,
) (grpc.UnaryServerInterceptor, grpc.StreamServerInterceptor, error) {
	if require == nil {
		return interceptors(nil, errors.New("spiffegrpc: require caller: no middleware"))
	}
	handler := require(http.HandlerFunc(admitted))
	return interceptors(func(ctx context.Context, method string) (context.Context, error) {
		r := request(ctx, method)
		setHeader(r)
		answer := ask(handler, r)
		switch {
		case answer.ctx != nil:
			return answer.ctx, nil
		case answer.status == http.StatusServiceUnavailable,
			answer.header.Get("Grpc-Status") == fmt.Sprint(int(codes.Unavailable)):
			return nil, errUnavailable
		}
		return nil, errUnauthenticated
	}, nil)
}

// request returns a call as an HTTP request without its metadata, so that net/http middleware and package spiffetls
// can judge it.
func request(ctx context.Context, method string) *http.Request {
	p, _ := peer.FromContext(ctx)
	if p != nil && p.LocalAddr != nil {
		ctx = context.WithValue(ctx, http.LocalAddrContextKey, p.LocalAddr)
	}
	r := new(http.Request).WithContext(ctx)
	r.Method, r.URL, r.RequestURI, r.Body = http.MethodPost, &url.URL{Path: method}, method, http.NoBody
	r.Proto, r.ProtoMajor = "HTTP/2.0", 2
	if p == nil {
		return r
	}
	if p.Addr != nil {
		r.RemoteAddr = p.Addr.String()
	}
	switch info := p.AuthInfo.(type) {
	case AuthInfo:
		r.TLS = &info.State
	case credentials.TLSInfo:
		r.TLS = &info.State
	}
	return r
}

// setHeader adds the metadata of a call to its request.
func setHeader(r *http.Request) {
	md, _ := metadata.FromIncomingContext(r.Context())
	r.Header = make(http.Header, len(md)+1)
	for key, values := range md {
		switch {
		case key == ":authority" && len(values) == 1:
			r.Host = values[0]
		case strings.HasPrefix(key, ":"), strings.HasSuffix(key, "-bin"): // a "-bin" value is not text
		default:
			r.Header[textproto.CanonicalMIMEHeaderKey(key)] = values
		}
	}
	r.Header["Content-Type"] = []string{"application/grpc"}
}

// answer is the response to a request. Once the call is admitted, it has the request's context.
type answer struct {
	header http.Header
	status int
	ctx    context.Context
}

type answerKey struct{}

func ask(handler http.Handler, r *http.Request) *answer {
	a := &answer{header: make(http.Header)}
	handler.ServeHTTP(a, r.WithContext(context.WithValue(r.Context(), answerKey{}, a)))
	return a
}

// admitted is the handler that runs after a middleware has let a call through. The middleware may have wrapped the
// writer.
func admitted(_ http.ResponseWriter, r *http.Request) {
	if a, ok := r.Context().Value(answerKey{}).(*answer); ok {
		a.ctx = r.Context()
	}
}

// Header implements [http.ResponseWriter].
func (a *answer) Header() http.Header { return a.header }

// Write implements [http.ResponseWriter].
func (a *answer) Write(p []byte) (int, error) { return len(p), nil }

// WriteHeader implements [http.ResponseWriter].
func (a *answer) WriteHeader(status int) { a.status = status }

// TokenCredentials returns per-RPC credentials that send the function's result as "authorization: Bearer TOKEN". The
// function is called for every call, with the call's context, and should have the token at hand. The method Token of
// a tokensource.Source fits, and for JWT-SVIDs the Fetch of a jwtsvid.Cache:
//
//	tokens := spiffegrpc.TokenCredentials(func(ctx context.Context) (string, error) {
//		return cache.Fetch(ctx, "db")
//	})
//	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(creds), grpc.WithPerRPCCredentials(tokens))
//
// For some calls alone, use [grpc.PerRPCCredentials] as an option of these calls. grpc-go sends no token over a
// connection that is not encrypted. The token goes to every server that the transport credentials allow. Without a
// token the call ends with Unauthenticated and the text of the function's error. No error has the token.
func TokenCredentials(token func(context.Context) (string, error)) credentials.PerRPCCredentials {
	return perRPC(token)
}

type perRPC func(context.Context) (string, error)

// GetRequestMetadata implements [credentials.PerRPCCredentials].
func (p perRPC) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token, err := p(ctx)
	switch {
	case err != nil && ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	case err != nil:
		return nil, status.Errorf(codes.Unauthenticated, "no token: %v", err)
	case token == "", !bearer.Printable(token):
		return nil, status.Error(codes.Unauthenticated, "no token: what the function of TokenCredentials has "+
			"returned is empty, or not one word of printable ASCII")
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

// RequireTransportSecurity implements [credentials.PerRPCCredentials].
func (perRPC) RequireTransportSecurity() bool { return true }
