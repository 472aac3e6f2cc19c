// Package linkerd serves Linkerd's identity API: Linkerd's proxies take their certificates from an
// authority of this library.
//
// [New] makes a [Server], an [http.Handler] for the one method of the API, at the path [Certify].
// caserver.Serve serves it as proxies call it, which is HTTP/2 over TLS without ALPN.
//
//	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
//	srv, err := linkerd.New(linkerd.Options{Mesh: mesh, Signer: authority, Review: reviewer.Review})
//	…
//	err = caserver.Serve(ctx, listener, caserver.ServeOptions{Handler: srv, TLS: cfg})
//
// # What it promises
//
// A caller gets a certificate for the name of the service account that its token belongs to, and for
// nothing else. The name that it asks for must be that name. Out of the signing request comes the
// public key, and whether there is to be a common name; its signature is verified, and nothing else
// of it is used.
//
// What is sent was checked: the certificate has that one name and the key of the request, and leads
// to the trust anchors at the moment. A token is in no log and no error.
//
// # Answers
//
// The order of the checks is part of the protocol. The first that fails decides:
//
//	Unavailable         there are no trust anchors yet
//	InvalidArgument     no identity; no token; no CSR; a CSR that is not PKCS#10 in DER
//	Unavailable         what signs does not verify against the trust anchors, or is not valid now
//	FailedPrecondition  the CSR does not have the one DNS name that is asked for, or has another common
//	                    name, or an address, URI or email; its signature is bad; its key is not ECDSA
//	                    or weak
//	FailedPrecondition  the token is not authenticated
//	InvalidArgument     the token is invalid, or of something that has no name in the mesh
//	Internal            the token could not be reviewed
//	FailedPrecondition  the token belongs to another name
//	Internal            signing failed
//
// Linkerd's own certifier answers Unknown in the third row, verifies no signature, and comes to the
// key only when it signs, with Internal. Beyond those, ResourceExhausted is a limit of the authority
// or a request that is too large, and Unavailable an authority that cannot sign now, has no place to
// record what it signs, or takes too long. A client cannot tell a bad token from a bad name by the
// code alone.
//
// The certificates in an answer are DER, as on the wire of Linkerd, though the comments of its
// definition say PEM. The direct issuer always follows the leaf, also when it is a trust anchor.
//
// # What it does not do
//
// It does not check that a token belongs to the pod that shows it: the protocol has nothing for that.
// It limits no rates: the authority behind it does, as it sees all callers of all services.
package linkerd

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/carpc"
	"github.com/svidkit/svidkit/internal/metrics"
	wire "github.com/svidkit/svidkit/internal/wire/linkerd"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// Certify is the path of the API's one method.
const Certify = wire.Certify

// Audience is the audience that the tokens of Linkerd's proxies are made for.
const Audience = "identity.l5d.io"

const (
	maxRequest   = 192 << 10 // bytes; a CSR has at most 64 KiB, and so has a token
	readTimeout  = 10 * time.Second
	writeTimeout = 10 * time.Second
)

// Signer is what a [Server] needs of an authority; a *ca.Authority is one. Both methods are called
// from many goroutines.
type Signer interface {
	// Sign returns the chain for a request, leaf first. Its errors are those of [ca.Authority.Sign].
	Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error)

	// Bundle returns the trust anchors of the moment, or nil if there are none yet.
	Bundle() *spiffe.Bundle
}

// Options are the parts of a [Server]. Mesh, Signer and Review are required.
type Options struct {
	Mesh   linkerdname.Mesh
	Signer Signer

	// Review returns the service account that a token belongs to, if the token is good for one of the
	// audiences: the method Review of a kube.Reviewer. Its errors are those of that method. It is called
	// from many goroutines.
	Review func(ctx context.Context, token string, audiences []string) (*kube.Account, error)

	// Lifetime is how long a certificate is valid from now; 0 means 24 hours. The authority must grant
	// it, with ClockSkew.
	Lifetime time.Duration

	// ClockSkew is how much earlier than now a certificate begins, and how much later than Lifetime it
	// ends, for peers whose clocks differ; 0 means 10 seconds.
	ClockSkew time.Duration

	// Issuer returns the certificate that signs at the moment, followed by those between it and a trust
	// anchor, and nothing if that is not known. With it, an issuer that has expired, or is no longer
	// under the trust anchors, is found out before the shape of the signing request and the token are
	// looked at, and the metric knows it before the first request. Nil means to learn it from what was
	// signed. It is called from many goroutines.
	Issuer func() []*x509.Certificate

	// Events is told what happens, from many goroutines, while the caller waits: it must not take
	// long. Nil means that nobody wants to know.
	Events func(context.Context, Event)

	// Timeout bounds the work for one request; 0 means 75 seconds, enough for a registration
	// authority that waits a minute for its own. A request that is not there after 10 seconds is given
	// up earlier.
	Timeout time.Duration

	// Logger is told who got what (Debug), who was refused and why (Info), and what went wrong on
	// our side (Warn; Error for a panic). Nil means silence.
	Logger *slog.Logger
}

// Server answers the API. [New] makes one. It is safe for concurrent use.
type Server struct {
	opts Options
	rpc  http.Handler
	errs *connect.ErrorWriter

	metrics  metrics.Set
	answered map[string]*metrics.Counter // by code

	anchors atomic.Pointer[anchors]
	tickets atomic.Uint64

	mu     sync.Mutex
	ticket uint64            // of the request that issuer was learned from
	issuer *x509.Certificate // that signed last; nil for none
}

// New returns a server. It starts no goroutine. The error says which option is missing or wrong.
func New(o Options) (*Server, error) {
	_, err := o.Mesh.Certifier()
	switch {
	case err != nil:
		return nil, fmt.Errorf("linkerd: invalid Options: Mesh: %w", err)
	case o.Signer == nil:
		return nil, errors.New("linkerd: invalid Options: Signer is nil; a *ca.Authority is one")
	case o.Review == nil:
		return nil, errors.New("linkerd: invalid Options: Review is nil; a kube.Reviewer has such a method")
	}
	for name, d := range map[string]time.Duration{"Lifetime": o.Lifetime, "ClockSkew": o.ClockSkew, "Timeout": o.Timeout} {
		if d < 0 {
			return nil, fmt.Errorf("linkerd: invalid Options: %s is negative (%v)", name, d)
		}
	}
	o.Lifetime = cmp.Or(o.Lifetime, 24*time.Hour)
	o.ClockSkew = cmp.Or(o.ClockSkew, 10*time.Second)
	o.Timeout = cmp.Or(o.Timeout, 75*time.Second)
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	switch {
	case o.Lifetime < time.Second:
		return nil, fmt.Errorf("linkerd: invalid Options: Lifetime is %v, but certificates carry whole seconds", o.Lifetime)
	case o.ClockSkew > math.MaxInt64-o.Lifetime:
		return nil, fmt.Errorf("linkerd: invalid Options: Lifetime %v and ClockSkew %v together are too long", o.Lifetime, o.ClockSkew)
	}
	s := &Server{opts: o}
	s.metrics.Gauge("issuer_cert_ttl_seconds", "The seconds until the certificate that signs expires; 0 before it is known.", func() (float64, bool) {
		if c := s.knownIssuer(); c != nil {
			return time.Until(c.NotAfter).Seconds(), true
		}
		return 0, true
	})
	s.answered = s.metrics.Counters("linkerd_identity_certify_total", "The number of requests that were read, by the code of the answer.", "code", codeNames()...)
	options := []connect.HandlerOption{
		connect.WithCodec(codec{}),
		connect.WithReadMaxBytes(maxRequest),
		connect.WithCompression("gzip", nil, nil), // random bytes do not shrink, and hostile ones grow
	}
	s.errs = connect.NewErrorWriter(options...)
	s.rpc = connect.NewUnaryHandler(Certify, s.certify, options...)
	return s, nil
}

func codeNames() []string {
	names := []string{"ok"}
	for c := connect.CodeCanceled; c <= connect.CodeUnauthenticated; c++ {
		names = append(names, c.String())
	}
	return names
}

// WriteMetrics writes the server's metrics in the text format of Prometheus (version 0.0.4):
// issuer_cert_ttl_seconds, under Linkerd's name, and how many requests that were read got which code.
func (s *Server) WriteMetrics(w io.Writer) error { return s.metrics.Write(w) }

// knownIssuer returns the certificate that signs, as far as it is known.
func (s *Server) knownIssuer() *x509.Certificate {
	if s.opts.Issuer != nil {
		if chain := s.opts.Issuer(); len(chain) > 0 {
			return chain[0]
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.issuer
}

// ServeHTTP answers one request. What is not gRPC over HTTP/2 is refused with a status of HTTP.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !carpc.Admit(w, r, "linkerd", Certify, s.errs) {
		return
	}
	ctx, cancel := context.WithTimeoutCause(r.Context(), s.opts.Timeout, errTimeout)
	defer cancel()
	// Not every ResponseWriter can do this, and those of net/http can.
	deadlines := http.NewResponseController(w)
	_ = deadlines.SetReadDeadline(time.Now().Add(min(readTimeout, s.opts.Timeout)))
	_ = deadlines.SetWriteDeadline(time.Now().Add(s.opts.Timeout + writeTimeout))
	s.rpc.ServeHTTP(w, r.WithContext(context.WithValue(ctx, peerKey{}, r.RemoteAddr)))
}

var errTimeout = errors.New("the server took too long")

type peerKey struct{}
