// Package istioca serves Istio's certificate API, so that Istio's agents, ztunnel and everything
// else that speaks it take their certificates from an authority of this library.
//
// [New] makes a [Server], which is an [http.Handler] for the one method of the API, at the path
// [CreateCertificate]. It wants an authority to sign, such as a *ca.Authority, and an
// [authn.Authenticator] that says who is asking; [authn.FirstOf] makes one of several.
//
//	srv, err := istioca.New(istioca.Options{Signer: authority, Authenticator: who})
//	…
//	mux := http.NewServeMux()
//	mux.Handle(istioca.CreateCertificate, srv)
//	server := &http.Server{Handler: mux, TLSConfig: cfg, …} // with "h2" in the NextProtos of cfg
//
// The protocol is gRPC over HTTP/2; stock gRPC clients are answered.
//
// # What it promises
//
// A caller gets a certificate for what its proof of identity proved, whatever it asks for. Out of the
// signing request comes the public key, and whether a common name is wished for; its signature is
// verified, and nothing else of it is used.
//
// Who is asking is found out before the request is read. Requests are bounded in size and in time,
// a panic of an authenticator or a signer ends one call and no more, and what is told to a client
// is a constant text, or about its own request: the reason goes to the log, with the address of the
// peer.
//
// # Answers
//
// The chain has one certificate in each text, leaf first, then intermediates, and in the last text
// all roots of the trust bundle of the moment; no root is repeated before it. Clients of this API
// refuse an answer without roots, so there is none.
//
// The codes are those that Istio's agents expect:
//
//	Unauthenticated    nobody is known to be asking; impersonation was refused; the connection is
//	                   not encrypted
//	InvalidArgument    the request, its CSR or its lifetime (a longer one than the authority grants is
//	                   refused, not shortened; 0 or less means the default)
//	Internal           building the certificate failed
//	Unavailable        the authority cannot sign now, has no place to record what it signs, or took
//	                   too long; who is asking could not be found out now
//	ResourceExhausted  a limit of the authority; the request is too large
//	PermissionDenied   the policy refused the caller, or the authority may not sign for its ID
//
// Istio's own CA answers Internal while it cannot sign, and Unauthenticated while it cannot find out
// who is asking. Its agents repeat Internal and Unavailable in the same way, and Unauthenticated
// not at all, while other clients of gRPC only repeat Unavailable, so that is the better name for what
// passes. The last two rows are for what Istio's CA does not have. Where it is known when to come back, the
// status has a google.rpc.RetryInfo, and the trailer grpc-retry-pushback-ms the same in milliseconds
// for the retries that are built into gRPC.
//
// # What it does not do
//
// It opens no port and terminates no TLS, and it limits no rates: the authority behind it does
// that, as it sees all callers of all services.
package istioca

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/carpc"
	wire "github.com/svidkit/svidkit/internal/wire/istioca"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// CreateCertificate is the path of the API's one method.
const CreateCertificate = wire.CreateCertificate

const (
	maxRequest   = 192 << 10 // bytes: a CSR in PEM is at most 128 KiB
	readTimeout  = 10 * time.Second
	writeTimeout = 10 * time.Second
)

// Signer is what a [Server] needs of an authority; a *ca.Authority is one. Both methods are called
// from many goroutines.
type Signer interface {
	// Sign returns the chain for a request, leaf first. Its errors are those of [ca.Authority.Sign];
	// one with a method Retryable() (after time.Duration, ok bool) may say that it passes. A root in
	// the chain is not given out twice.
	Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error)

	// Bundle returns the roots of the moment. A registration authority that does not know them may
	// return nil or an empty bundle: then a CA certificate at the end of the chain is the root.
	Bundle() *spiffe.Bundle
}

// Grant is what a caller is certified for.
type Grant struct {
	ID       spiffe.ID // required
	DNSNames []string  // further names, beside the ID
	IPs      []net.IP  // further addresses, beside the ID
}

// Policy decides what a caller is certified for. An error refuses it with PermissionDenied, unless
// the error has the method Retryable() (after time.Duration, ok bool) and says ok: then it is
// Unavailable. It is called from many goroutines.
type Policy func(ctx context.Context, caller *authn.Caller) (Grant, error)

// KeepDNSNames is a [Policy] that grants the caller its own ID and also the DNS names that its proof
// proved, as Istio's CA does: who renews with a client certificate gets all of its names again.
//
// It is not the default, because then a DNS name outlives the decision to give it for as long as
// its holder renews in time.
func KeepDNSNames(_ context.Context, caller *authn.Caller) (Grant, error) {
	return Grant{ID: caller.ID, DNSNames: caller.DNSNames}, nil
}

func ownID(_ context.Context, caller *authn.Caller) (Grant, error) {
	return Grant{ID: caller.ID}, nil
}

// NodeAuthorizer decides whether a caller may get a certificate for another identity, as proxies
// do that serve all workloads of a node.
type NodeAuthorizer interface {
	// Authorize returns nil if caller may have a certificate for requested, a workload's ID in the
	// caller's own trust domain. It has to check that the caller is such a proxy, and that the
	// workload runs on the caller's node; caller.Pod has what is known of the caller. It is called
	// from many goroutines.
	Authorize(ctx context.Context, caller *authn.Caller, requested spiffe.ID) error
}

// Options are the parts of a [Server]. Signer and Authenticator are required.
type Options struct {
	Signer        Signer
	Authenticator authn.Authenticator

	// Policy decides what a caller is certified for; nil means its own ID and nothing else.
	Policy Policy

	// NodeAuthorizer decides who may impersonate whom; nil means nobody. Policy is not asked then:
	// the certificate is for the one ID that was requested.
	NodeAuthorizer NodeAuthorizer

	// AllowPlaintext takes requests from connections on which net/http sees no TLS. Others can read
	// tokens there, so it is for Unix sockets, for a proxy on the same host that ends TLS, and for
	// tests. Authenticators that take tokens may want to be told as well.
	AllowPlaintext bool

	// Timeout bounds the work for one request; 0 means 75 seconds, enough for a registration
	// authority that waits a minute for its own. Istio's agents set no deadline. A request that is
	// not there after 10 seconds is given up earlier.
	Timeout time.Duration

	// Logger is told who got what (Debug), who was refused and why (Info), and what went wrong on
	// our side (Warn; Error for a panic). Nil means silence.
	Logger *slog.Logger
}

// Server answers the API. [New] makes one. It is safe for concurrent use.
type Server struct {
	opts    Options
	rpc     http.Handler
	errs    *connect.ErrorWriter
	metrics *serverMetrics
	tail    atomic.Pointer[tail]
}

// New returns a server. It starts no goroutine. The error says which option is missing or wrong.
func New(o Options) (*Server, error) {
	switch {
	case o.Signer == nil:
		return nil, errors.New("istioca: invalid Options: Signer is nil; a *ca.Authority is one")
	case o.Authenticator == nil:
		return nil, errors.New("istioca: invalid Options: Authenticator is nil; see package authn")
	case o.Timeout < 0:
		return nil, fmt.Errorf("istioca: invalid Options: Timeout is negative (%v)", o.Timeout)
	}
	if o.Policy == nil {
		o.Policy = ownID
	}
	o.Timeout = cmp.Or(o.Timeout, 75*time.Second)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	s := &Server{opts: o}
	s.metrics = newMetrics(s)
	options := []connect.HandlerOption{
		connect.WithCodec(codec{}),
		connect.WithReadMaxBytes(maxRequest),
		connect.WithCompression("gzip", nil, nil), // random bytes do not shrink, and hostile ones grow
	}
	s.errs = connect.NewErrorWriter(options...)
	s.rpc = connect.NewUnaryHandler(CreateCertificate, s.create, options...)
	return s, nil
}

// WriteMetrics writes the server's metrics in the text format of Prometheus (version 0.0.4), under
// the names that Istio's CA gives them: requests, refusals and successes counted, and when the first
// root and the intermediate that signs come to their ends. What is not known, such as the
// intermediate before the first certificate, is left out.
func (s *Server) WriteMetrics(w io.Writer) error { return s.metrics.set.Write(w) }

// ServeHTTP answers one request. What is not gRPC over HTTP/2 is refused with a status of HTTP.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !carpc.Admit(w, r, "istioca", CreateCertificate, s.errs) {
		return
	}
	s.metrics.requests.Inc()
	ctx, cancel := context.WithTimeoutCause(r.Context(), s.opts.Timeout, errTimeout)
	defer cancel()
	// Not every ResponseWriter can do this, and those of net/http can.
	deadlines := http.NewResponseController(w)
	_ = deadlines.SetReadDeadline(time.Now().Add(min(readTimeout, s.opts.Timeout)))
	_ = deadlines.SetWriteDeadline(time.Now().Add(s.opts.Timeout + min(writeTimeout, s.opts.Timeout)))

	c := &call{peer: r.RemoteAddr}
	r = r.WithContext(context.WithValue(ctx, callKey{}, c))
	if err := s.authenticate(r, c); err != nil {
		_ = s.errs.Write(w, r, err) // the client has gone
		return
	}
	s.rpc.ServeHTTP(w, r)
	if !c.read {
		s.metrics.badCSR.Inc()
		s.log(ctx, slog.LevelInfo, "the request could not be read: it is too large, too slow, cut, or no single message of gRPC", c)
	}
}

// call is what is known of a request beside what is in it.
type call struct {
	peer   string // address
	caller *authn.Caller
	read   bool // there is a message
}

type callKey struct{}

// log adds who is asking to the attributes.
func (s *Server) log(ctx context.Context, level slog.Level, what string, c *call, attrs ...slog.Attr) {
	if !s.opts.Logger.Enabled(ctx, level) {
		return
	}
	attrs = append(attrs, slog.String("peer", c.peer))
	if c.caller != nil {
		attrs = append(attrs, slog.Any("caller", c.caller))
	}
	s.opts.Logger.LogAttrs(ctx, level, "istioca: "+what, attrs...)
}

// contain makes an error of a panic, which came from a part that was given to us.
func (s *Server) contain(ctx context.Context, c *call, err *error) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler { //nolint:errorlint // the very value, as in net/http
		panic(p)
	}
	s.log(ctx, slog.LevelError, "panic", c, slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
	*err = connect.NewError(connect.CodeInternal, errors.New("internal error"))
}

// What clients are told, word for word as Istio's CA tells them.
var (
	errTimeout       = errors.New("the server took too long")
	errNotProven     = errors.New("request authenticate failure")
	errImpersonation = errors.New("request impersonation authentication failure")
)

// authenticate finds out who is asking.
func (s *Server) authenticate(r *http.Request, c *call) (err error) {
	ctx := r.Context()
	failed := true
	defer func() {
		if failed {
			s.metrics.unauthenticated.Inc()
		}
	}()
	defer s.contain(ctx, c, &err)
	refuse := func(level slog.Level, code connect.Code, cause error) error {
		s.log(ctx, level, "authentication failed", c, slog.Any("err", cause))
		return connect.NewError(code, errNotProven)
	}
	if r.TLS == nil && !s.opts.AllowPlaintext {
		return refuse(slog.LevelInfo, connect.CodeUnauthenticated, errors.New("the connection is not encrypted, and AllowPlaintext is not set"))
	}
	caller, err := s.opts.Authenticator.Authenticate(r)
	switch {
	case err != nil && (ctx.Err() != nil || !judged(err)):
		after, _ := retryable(err)
		return withRetryInfo(refuse(slog.LevelWarn, connect.CodeUnavailable, err), after)
	case err != nil:
		return refuse(slog.LevelInfo, connect.CodeUnauthenticated, err)
	case caller == nil || caller.ID.IsZero():
		return refuse(slog.LevelWarn, connect.CodeUnauthenticated, errors.New("the authenticator returned neither a caller with an ID nor an error"))
	}
	c.caller, failed = caller, false
	return nil
}

// judged reports whether err says that no credential is good, as far as package authn has words for
// that; anything else says that the question could not be answered now. Of several methods that
// failed, all must have judged.
func judged(err error) bool {
	isWord := func(e error) bool { return e == authn.ErrNoCredential || e == authn.ErrRefused } //nolint:errorlint // this node
	if isWord(err) {
		return true
	}
	if e, ok := err.(interface{ Retryable() (time.Duration, bool) }); ok { //nolint:errorlint // this node of the tree
		_, passes := e.Retryable()
		return !passes
	}
	switch e := err.(type) { //nolint:errorlint // the shape of the tree is what matters
	case interface{ Unwrap() error }:
		return e.Unwrap() != nil && judged(e.Unwrap())
	case interface{ Unwrap() []error }:
		all := e.Unwrap()
		if slices.ContainsFunc(all, isWord) { // a word beside its cause
			return true
		}
		return len(all) > 0 && !slices.ContainsFunc(all, func(e error) bool { return !judged(e) })
	}
	return false
}

// retryable asks the outermost error in the tree that knows whether it passes.
func retryable(err error) (after time.Duration, ok bool) {
	if e, ok := errors.AsType[interface {
		error
		Retryable() (time.Duration, bool)
	}](err); ok {
		return e.Retryable()
	}
	return 0, false
}

// tail is the part of an answer after the leaf, as it was last. It never changes.
type tail struct {
	chain   []*x509.Certificate // after the leaf, as the signer gave it
	bundle  *spiffe.Bundle
	encoded []byte
	signer  *x509.Certificate // the first intermediate; nil for none
	root    *x509.Certificate // the first root
}

func (t *tail) is(chain []*x509.Certificate, bundle *spiffe.Bundle) bool {
	return t != nil && t.bundle == bundle && slices.Equal(t.chain, chain)
}

func contains(certs []*x509.Certificate, c *x509.Certificate) bool {
	return slices.ContainsFunc(certs, func(o *x509.Certificate) bool { return bytes.Equal(o.Raw, c.Raw) })
}
