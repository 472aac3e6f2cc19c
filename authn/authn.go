// Package authn answers who is calling.
//
// An [Authenticator] looks at an HTTP request (which every server of this library takes, the gRPC
// ones included) and gives the [Caller] that it can prove, or an error. [ClientCertificate] proves
// a caller by the X.509-SVID of its TLS connection; [FirstOf] asks several methods in order.
//
//	v, err := spiffe.NewVerifier(bundles, spiffe.AllowMembersOf(td), nil)
//	…
//	who := authn.ClientCertificate(v)
//	caller, err := who.Authenticate(r)
//
// # What it promises
//
// A Caller is made from a credential that was verified for this very request. No credential, and
// a credential that this method does not understand, is [ErrNoCredential]; one that was shown and
// refused is [ErrRefused]. There is no anonymous caller.
//
// # What it does not do
//
// It does not decide what a caller may have: a certificate authority and a secret server do that,
// from the Caller. Servers that only need the peer of a TLS connection read
// spiffetls.PeerFromRequest instead.
package authn

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Errors to test for with [errors.Is].
var (
	// ErrNoCredential says that the request carries nothing that this method can judge.
	ErrNoCredential = errors.New("no credential")

	// ErrRefused says that the request carries a credential that is not good enough. The cause is
	// wrapped too.
	ErrRefused = errors.New("credential refused")
)

// Caller is who sent a request, as far as it was proven. It never changes. Only an [Authenticator]
// should make one, from what it verified.
type Caller struct {
	ID       spiffe.ID // the proven identity, never zero
	Method   string    // how it was proven, such as "client-certificate": for logs and audit records
	NotAfter time.Time // when the proof ends; zero if the proof does not say

	// DNSNames are further names that the same proof proved, such as those of a client certificate.
	DNSNames []string

	// Pod is where the caller runs, if its proof says so; nil if not.
	Pod *Pod
}

// Pod is the Kubernetes pod that a credential is bound to.
type Pod struct {
	Cluster        string // the cluster that vouched for the credential; empty for our own
	Namespace      string
	ServiceAccount string
	Name, UID      string // empty for a credential that is not bound to a pod
}

// LogValue shows all of the Caller, which holds no secret.
func (c *Caller) LogValue() slog.Value {
	return slog.GroupValue(slog.String("id", c.ID.String()), slog.String("method", c.Method), slog.Time("not_after", c.NotAfter))
}

// An Authenticator proves who sent a request. Errors wrap [ErrNoCredential] or [ErrRefused] where
// they fit; any other error says that the question could not be answered now. It must be safe for
// concurrent use, must not write to the request, and must not put a credential into an error.
type Authenticator interface {
	Authenticate(r *http.Request) (*Caller, error)
}

// Func makes an [Authenticator] of a function.
type Func func(r *http.Request) (*Caller, error)

// Authenticate calls f.
func (f Func) Authenticate(r *http.Request) (*Caller, error) { return f(r) }

// ClientCertificate proves a caller by the client certificate of its TLS connection. The chain is
// verified by v at every call, so that a request on a connection older than the newest bundle or
// policy of v is judged by the newest. Its errors wrap [*spiffe.VerifyError].
//
// The TLS server must ask for the certificate, as spiffetls.ServerConfig does. A header that a
// proxy forwarded is not looked at.
func ClientCertificate(v *spiffe.Verifier) Authenticator {
	return Func(func(r *http.Request) (*Caller, error) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return nil, fmt.Errorf("authn: client certificate: %w", ErrNoCredential)
		}
		peer, err := v.VerifyChain(r.TLS.PeerCertificates, spiffe.ClientRole)
		if err != nil {
			return nil, fmt.Errorf("authn: client certificate: %w: %w", ErrRefused, err)
		}
		return &Caller{ID: peer.ID(), Method: "client-certificate", NotAfter: peer.NotAfter()}, nil
	})
}

// FirstOf asks each method in order and returns the first Caller. A credential that one method
// refuses does not keep a later method from proving the caller by another one. If none does, the
// error wraps the errors of all; with no methods at all it wraps [ErrNoCredential].
func FirstOf(methods ...Authenticator) Authenticator {
	return Func(func(r *http.Request) (*Caller, error) {
		var errs []error
		for _, m := range methods {
			c, err := m.Authenticate(r)
			if err == nil {
				return c, nil
			}
			errs = append(errs, err)
		}
		if errs == nil {
			return nil, fmt.Errorf("authn: no method is configured: %w", ErrNoCredential)
		}
		return nil, errors.Join(errs...)
	})
}
