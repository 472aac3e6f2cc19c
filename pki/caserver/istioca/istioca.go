// Package istioca serves Istio's certificate API: Istio's agents, ztunnel and other clients of that API get their
// certificates from an authority of this library.
//
// [New] makes a [Server], an [http.Handler] for the one method of the API, at the path
// [CreateCertificate]. It needs an authority to sign, such as a *ca.Authority, and an
// [authn.Authenticator] that identifies the caller; [authn.FirstOf] makes one of several.
//
//	srv, err := istioca.New(istioca.Options{Signer: authority, Authenticator: authenticator})
//	…
//	mux := http.NewServeMux()
//	mux.Handle(istioca.CreateCertificate, srv)
//	err = caserver.Serve(ctx, listener, caserver.ServeOptions{Handler: mux, TLS: cfg})
//
// The protocol is gRPC over HTTP/2. Any server of net/http with HTTP/2 will do.
//
// # What it promises
//
// A caller gets a certificate for the SPIFFE ID that its proof of identity proved, whatever it asks for; without an
// ID it gets none. The server verifies the signature of the signing request, and takes from it only the public key
// and whether a common name is wanted.
//
// The caller is authenticated before the request is read. Requests are bounded in size and time. A panic of an
// authenticator or a signer ends one call. The client gets a constant text, or the fault in its own request; the
// reason goes to the log, with the client's address.
//
// # Certificates as proof
//
// [ClientCertificates] authenticates callers by certificates that the authority signed for them before, so that a
// workload without a token can renew, as a virtual machine of Istio does. It verifies them at each request, on old
// connections too, with the authority's CallerBundle: a tainted root authenticates no caller. Such a caller gets
// certificates of at most [Options].CertificateTTL and, if the operator has set a limit, none when its last other
// proof is too old.
//
// # Answers
//
// Each text of the chain has one certificate: leaf first, then intermediates. The last text has all roots of the
// current trust bundle; no other text has a root. Clients of this API refuse an answer without roots, so the server
// never sends one.
//
// Without a common name a leaf has the authority's usual subject. Istio's own CA leaves it empty, as
// ca.Config.EmptySubject does; but an agent may pass its certificate to readers that fail on that.
//
// The codes are those that Istio's agents expect:
//
//	Unauthenticated    the caller is not known; impersonation was refused; the connection is not
//	                   encrypted
//	InvalidArgument    the request, its CSR or its lifetime (one longer than the authority grants is refused, with
//	                   both figures, and not shortened, unless the caller is proven by its certificate alone; 0 or
//	                   less means the default)
//	Internal           building the certificate failed
//	Unavailable        the authority cannot sign now, cannot record what it signs, or took too long; the
//	                   caller could not be authenticated now
//	ResourceExhausted  a limit of the authority, or of the proof of callers; the request is too large
//	PermissionDenied   the policy refused the caller, or the authority may not sign for its ID
//
// Istio's own CA answers Internal while it cannot sign, and Unauthenticated while it cannot authenticate. Its agents
// retry Internal and Unavailable in the same way, and never Unauthenticated, while other gRPC clients retry only
// Unavailable. So Unavailable is the better code for a failure that passes. Istio's CA does not use the last two
// codes. If the time to come back is known, the status has a google.rpc.RetryInfo, and the trailer
// grpc-retry-pushback-ms has the same time in milliseconds for gRPC's built-in retries.
//
// # What it does not do
//
// It limits no rates: the authority behind it does, as it sees the callers of all services.
package istioca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// CreateCertificate is the path of the API's one method.
const CreateCertificate = "/istio.v1.auth.IstioCertificateService/CreateCertificate"

// Grant is the identity and names to certify for a caller.
type Grant struct {
	ID       spiffe.ID // required
	DNSNames []string  // further names, beside the ID
	IPs      []net.IP  // further addresses, beside the ID
}

// Options are the options of [New]. Signer and Authenticator are required.
type Options struct {
	Signer        ca.Signer // the authority; answers leave out roots in its chains
	Authenticator authn.Authenticator

	// Policy decides which identity and names a caller gets; nil means only its own ID. An error refuses the caller
	// with PermissionDenied, or with Unavailable if it says that it passes (see [spiffe.ErrNotReady]). Policy is safe
	// for concurrent use.
	//
	// Istio's CA also grants the DNS names in the caller's certificate, so that a caller that renews keeps all its
	// names: caller.DNSNames. That is not the default, because a DNS name then outlives the decision to grant it for
	// as long as its holder renews in time.
	Policy func(ctx context.Context, caller *authn.Caller) (Grant, error)

	// NodeAuthorizer decides whether a caller may get a certificate for another identity, as a proxy needs that
	// serves all workloads of a node; nil means that none may. It returns nil if the caller may have a certificate
	// for requested, a workload's ID in the caller's own trust domain. It must check that the caller is such a proxy,
	// and that the workload runs on the caller's node; caller.Pod has the known facts about the caller. It is safe
	// for concurrent use. The method Authorize of a kube.NodeAuthorizer is one. Policy is then not called: the
	// certificate has only the requested ID.
	NodeAuthorizer func(ctx context.Context, caller *authn.Caller, requested spiffe.ID) error

	// CertificateTTL is the longest lifetime for a caller whose only proof is its certificate, shown to this server
	// or to a proxy ([authn.ForwardedCertificate]). Such a caller gets this lifetime if it asks for more or for none,
	// so that an hour with a stolen key cannot buy a certificate of [ca.Config].MaxTTL. 0 means 24 hours, and the
	// authority's default for a request without a lifetime.
	CertificateTTL time.Duration

	// AllowPlaintext accepts connections without TLS. Tokens are readable on them: set it only for Unix sockets, for
	// a proxy on the same host that terminates TLS, and for tests. Authenticators that read tokens may have a similar
	// setting.
	AllowPlaintext bool

	// Logger gets certificates (Debug), refusals with their reason (Info), and failures of the server or its parts
	// (Warn, and Error for a panic). It gets at once the first refusal or failure of each reason and, for the first
	// 12 callers, of each caller; the others are counted every minute, so that no caller can fill a log. A Logger
	// that takes Debug gets all of them. Nil means silence.
	Logger *slog.Logger
}

// Server answers the API. [New] makes one. It is safe for concurrent use.
type Server struct {
	opts    Options
	handler http.Handler
	metrics serverMetrics

	intermediate atomic.Pointer[x509.Certificate] // that signed the last leaf; nil for none
}

// New returns a server. It starts no goroutine. The error says which option is missing or wrong.
func New(o Options) (*Server, error) {
	switch {
	case o.Signer == nil:
		return nil, errors.New("istioca: invalid Options: Signer is nil; a *ca.Authority is one")
	case o.Authenticator == nil:
		return nil, errors.New("istioca: invalid Options: Authenticator is nil; see package authn")
	case o.CertificateTTL < 0:
		return nil, fmt.Errorf("istioca: invalid Options: CertificateTTL is negative (%v)", o.CertificateTTL)
	}
	if o.Policy == nil {
		o.Policy = func(_ context.Context, caller *authn.Caller) (Grant, error) { return Grant{ID: caller.ID}, nil }
	}
	s := &Server{opts: o}
	s.metrics.init(s)
	s.handler = caservice.Service{
		Name: "istioca", Path: CreateCertificate, Logger: o.Logger,
		Reasons: []error{authn.ErrRefused, authn.ErrNoCredential}, Answer: s.create,
	}.Handler()
	return s, nil
}

// ServeHTTP answers one request. A request that is not gRPC over HTTP/2 is refused with an HTTP status.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Report implements [report.Reporter] with metrics under Istio's names: counts of requests, refusals and
// certificates, and the expiry of the first root and of the signing intermediate. Unknown values, such as the
// intermediate before the first certificate, are left out.
func (s *Server) Report() report.Report { return report.Report{Metrics: s.metrics.Write} }

// encode returns the response for a chain: each certificate in its own text, then all roots in one.
func (s *Server) encode(chain []*x509.Certificate) ([]byte, error) {
	var roots []*x509.Certificate
	if b := s.opts.Signer.Bundle(); b != nil { // after the signing, so that the root of the leaf is in it
		roots = slices.Collect(b.X509Authorities())
	}
	if len(roots) == 0 {
		return nil, errors.New("there is no root: the bundle of the signer is empty")
	}
	var above []*x509.Certificate
	for i, c := range chain[1:] {
		// A root here may be an intermediate for a peer with another bundle, unless it ends the chain.
		if certchain.SelfSigned(c) || i == len(chain)-2 && slices.ContainsFunc(roots, c.Equal) ||
			slices.ContainsFunc(above, c.Equal) {
			continue
		}
		above = append(above, c)
	}
	if len(above) > 0 {
		s.intermediate.Store(above[0])
	} else {
		s.intermediate.Store(nil)
	}
	return protofield.Write(func(w *protofield.Writer) {
		w.AddBytes(1, pki.MarshalCertificatesPEM(chain[0]))
		for _, c := range above {
			w.AddBytes(1, pki.MarshalCertificatesPEM(c))
		}
		w.AddBytes(1, pki.MarshalCertificatesPEM(roots...))
	})
}
