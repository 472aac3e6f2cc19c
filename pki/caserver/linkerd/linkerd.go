// Package linkerd serves Linkerd's identity API: Linkerd's proxies get their certificates from an authority of this
// library.
//
// [New] makes a [Server], an [http.Handler] for the API's only method, at the path [Certify]. caserver.Serve serves
// it as proxies expect: HTTP/2 over TLS without ALPN.
//
//	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
//	srv, err := linkerd.New(linkerd.Options{Mesh: mesh, Signer: authority, Review: reviewer.Review})
//	…
//	err = caserver.Serve(ctx, listener, caserver.ServeOptions{Handler: srv, TLS: cfg})
//
// # What it promises
//
// A caller gets a certificate only for the name of the service account that its token belongs to, and must ask for
// that name. The server verifies the signature of the signing request, and takes from it only the public key and
// whether a common name is wanted.
//
// The answer is checked before it is sent: the certificate has only that name and the key of the request, and leads
// to the current trust anchors. A token is in no log and no error.
//
// # Answers
//
// The order of the checks is part of the protocol. The first failed check decides:
//
//	Unauthenticated     the connection is not encrypted
//	Unavailable         there are no trust anchors yet
//	InvalidArgument     no identity; no token; no CSR
//	Unavailable         no trust anchor is valid now
//	InvalidArgument     a CSR that is not PKCS#10 in DER
//	FailedPrecondition  the CSR does not have the one DNS name that is asked for, or has another common
//	                    name, or an address, URI or email; its signature is bad; its key is not ECDSA
//	                    or weak
//	FailedPrecondition  the token is not authenticated
//	InvalidArgument     the token is invalid, or of something that has no name in the mesh
//	Internal            the token could not be reviewed
//	Unavailable         the token is not reviewed now, as a limit of the reviewer is reached; with a time to come
//	                    back
//	FailedPrecondition  the token belongs to another name
//	Internal            signing failed
//	Unavailable         the signed certificate does not verify against the trust anchors
//
// Linkerd's own certifier does not have the first row, answers Unknown if its issuer does not verify, verifies no
// signature, and checks the key only when it signs, with Internal. This server also answers ResourceExhausted for a
// limit of the authority or a request that is too large, and Unavailable for an authority that cannot sign now, cannot
// write its audit record, or takes too long. A client cannot tell a bad token from a bad name by the code alone.
//
// The certificates in an answer are DER, as Linkerd sends them; the comments of its protobuf definition say PEM. The
// direct issuer always follows the leaf, even when it is a trust anchor. The subject of a leaf is its name, if the
// request has that as its common name and it fits in one, and otherwise the authority's usual subject; Linkerd copies
// the request's.
//
// # What it does not do
//
// It does not check that a token belongs to the pod that shows it: the protocol has nothing for that.
// It limits no rates: the authority behind it does, as it sees the callers of all services.
package linkerd

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Certify is the path of the API's one method.
const Certify = "/io.linkerd.proxy.identity.Identity/Certify"

// audience is the audience of the tokens of Linkerd's proxies.
const audience = "identity.l5d.io"

// Options are the options of [New]. Mesh, Signer and Review are required.
type Options struct {
	Mesh   linkerdname.Mesh
	Signer ca.Signer // its bundle has the trust anchors

	// Review returns the service account that a token belongs to, if the token is good for one of the
	// audiences: the method Review of a kube.Reviewer. It returns that method's errors, and is safe for
	// concurrent use.
	Review func(ctx context.Context, token string, audiences []string) (*spiffe.Pod, error)

	// Lifetime is how long a certificate is valid from now. 0 means 24 hours. The authority must grant it,
	// with ClockSkew.
	Lifetime time.Duration

	// ClockSkew is how much earlier than now a certificate begins, and how much later than Lifetime it
	// ends, for peers whose clocks differ. 0 means 10 seconds.
	ClockSkew time.Duration

	// AllowPlaintext accepts connections that are neither TLS nor a Unix socket. Tokens are readable on them: set it
	// only for a proxy on the same host that terminates TLS, and for tests.
	AllowPlaintext bool

	// Events, if set, is called with each event while the client waits, so it must not block. It is safe for
	// concurrent use.
	Events func(context.Context, Event)

	// Logger gets certificates (Debug), refusals with their reason (Info), and failures of the server or its parts
	// (Warn, and Error for a panic). It gets at once the first refusal or failure of each reason and, for the first
	// 12 callers, of each caller; the others are counted every minute, so that no caller can fill a log. A Logger
	// that takes Debug gets all of them. Nil means silence.
	Logger *slog.Logger
}

// Event is for operators. Its fields are as in a Kubernetes event.
type Event struct {
	// Reason says what happened:
	//
	//   - IssuedLeafCertificate: a certificate was issued and is being sent.
	//   - IssuerUpdated: a different certificate signs now.
	//   - IssuerValidationFailed, a warning: nothing was issued, as the issuer does not verify against the trust
	//     anchors.
	Reason  string
	Warning bool
	Message string

	// The service account of the event. Both are empty for an event of the certifier.
	Namespace, ServiceAccount string
}

// Server answers the API. [New] makes one. It is safe for concurrent use.
type Server struct {
	opts    Options
	handler http.Handler
	metrics metrics.Set
	issuer  atomic.Pointer[x509.Certificate] // the last certificate that signed; nil for none
}

// New returns a server. It starts no goroutine. The error says which option is missing or wrong.
func New(o Options) (*Server, error) {
	o.Lifetime = cmp.Or(o.Lifetime, 24*time.Hour)
	o.ClockSkew = cmp.Or(o.ClockSkew, 10*time.Second)
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("linkerd: invalid Options: %w", err)
	}
	s := &Server{opts: o}
	s.metrics.Gauge("issuer_cert_ttl_seconds", "The seconds until the certificate that signs "+
		"expires; 0 before it is known.", func() (float64, bool) {
		if c := s.issuer.Load(); c != nil {
			return time.Until(c.NotAfter).Seconds(), true
		}
		return 0, true
	})
	var codes []string
	for c := grpchttp.OK; c <= grpchttp.Unauthenticated; c++ {
		codes = append(codes, c.String())
	}
	answered := s.metrics.Counters("linkerd_identity_certify_total",
		"The number of requests, by the code of the answer.", "code", codes...)
	s.handler = caservice.Service{
		Name: "linkerd", Path: Certify, Logger: o.Logger,
		Reasons: []error{errPlaintext, kube.ErrNotAuthenticated, kube.ErrInvalidToken,
			errOtherName}, Answer: s.certify, Answered: func(c grpchttp.Code) { answered[c.String()].Inc() },
	}.Handler()
	return s, nil
}

func (o *Options) check() error {
	if _, err := o.Mesh.Certifier(); err != nil {
		return fmt.Errorf("the option Mesh: %w", err)
	}
	switch {
	case o.Signer == nil:
		return errors.New("the option Signer is nil; a *ca.Authority is one")
	case o.Review == nil:
		return errors.New("the option Review is nil; a kube.Reviewer has such a method")
	case o.ClockSkew < 0:
		return fmt.Errorf("the option ClockSkew is negative (%v)", o.ClockSkew)
	case o.Lifetime < time.Second:
		return fmt.Errorf("the option Lifetime is %v, but certificates carry whole seconds", o.Lifetime)
	case o.ClockSkew > math.MaxInt64-o.Lifetime:
		return fmt.Errorf("the options Lifetime %v and ClockSkew %v together are too long", o.Lifetime, o.ClockSkew)
	}
	return nil
}

// ServeHTTP answers one request. A request that is not gRPC over HTTP/2 is refused with an HTTP status.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.handler.ServeHTTP(w, r) }

// Report implements [report.Reporter] with the metric issuer_cert_ttl_seconds, under Linkerd's name, and the number
// of requests answered with each code.
func (s *Server) Report() report.Report { return report.Report{Metrics: s.metrics.Write} }

func (s *Server) tell(ctx context.Context, e Event, format string, args ...any) {
	if s.opts.Events != nil {
		e.Message = fmt.Sprintf(format, args...)
		s.opts.Events(ctx, e)
	}
}

// validity is the end of a certificate and its SHA-256, as in events.
type validity struct{ c *x509.Certificate }

func (v validity) String() string {
	return fmt.Sprintf("%s: %x", v.c.NotAfter.UTC().Format(time.RFC3339), sha256.Sum256(v.c.Raw))
}
