package spiffegrpc

// Methods is the policy of [RequirePeer] that says for each method which clients may call it. A key is a method,
// "/package.Service/Method", or a service, "/package.Service/", for those of its methods that have no key of their own.
// A method without a policy is denied. The map is copied; the policies in it may be live. As a policy by itself it allows
// no peer.
type Methods map[string]spiffe.PolicySource

// MethodsFunc is [Methods] as a function of the full name of the method. Nil denies. It is called for every call, and
// must not block.
type MethodsFunc func(method string) spiffe.PolicySource

// An Interceptor decides about each call of a server before its handler runs. Its methods Unary and Stream are
// interceptors of grpc-go, and a server needs both. The zero Interceptor denies all calls.
type Interceptor struct{}

// RequirePeer returns an Interceptor for servers with [ServerCredentials] ...
func RequirePeer(allow spiffe.PolicySource) (*Interceptor, error)

// RequireCaller returns an Interceptor ... authn.CallerFromContext
func RequireCaller(a authn.Authenticator, logger *slog.Logger) (*Interceptor, error)

// TokenCredentials returns per-RPC credentials ...
func TokenCredentials(token func(context.Context) (string, error)) credentials.PerRPCCredentials
