// Package authn authenticates the callers of servers.
//
// An [Authenticator] reads an HTTP request (all servers of this library, the gRPC ones included, take HTTP requests)
// and returns the proven [Caller], or an error. [ClientCertificate] proves a caller by the X.509-SVID of its TLS
// connection, and [ForwardedCertificate] by a trusted proxy's report of that certificate. Below this package, kube
// proves callers by the tokens of their Kubernetes service accounts, and jwt by other signed tokens. [FirstOf] tries
// several methods in order.
//
//	v, err := spiffe.NewVerifier(bundles, spiffe.AllowMembersOf(td), nil)
//	…
//	handler = authn.Require(authn.ClientCertificate(v), handler, logger)
//
// [Require] stands in front of any handler, which reads the caller with [CallerFromContext].
//
// # What it promises
//
// A Caller is made from a credential that was verified for this request. A request without a credential,
// or with one that a method does not know, gives [ErrNoCredential]; a credential that is refused gives
// [ErrRefused]. There is no anonymous caller.
//
// Methods accept tokens over TLS and Unix sockets only, unless an option says otherwise: a token that others can
// read, they can use.
//
// # What it does not do
//
// It does not decide what a caller may have: certificate authorities and secret servers decide that from
// the Caller. Servers that only need the peer of a TLS connection use spiffetls.PeerFromContext instead.
package authn

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/retry"
	"github.com/svidkit/svidkit/spiffe"
)

// Errors to test for with [errors.Is].
var (
	// ErrNoCredential means that the request carries no credential that this method can judge.
	ErrNoCredential = errors.New("no credential")

	// ErrRefused means that the request carries a credential that was refused. The cause is wrapped too.
	ErrRefused = errors.New("credential refused")
)

// errNothing is the error for an [Authenticator] that returned neither a caller with a name nor an error.
var errNothing = fmt.Errorf("authn: the method returned neither a caller with a name nor an error: %w",
	ErrNoCredential)

// Caller is the proven sender of a request. It must not be changed, because requests with the same credential may
// share one. Only an [Authenticator] should construct a Caller, from a credential that it verified.
//
// A caller has at least one proven name: ID, Name or DNSNames. Most have an ID. A Unix peer, the holder of another
// system's token, or a certificate with only DNS names has the zero ID and is proven by its other names. A server
// that decides by the ID refuses such a caller; a server that admits every proven caller decides by [Caller.String].
type Caller struct {
	ID spiffe.ID // the proven SPIFFE ID; zero for a caller without one

	// Name is the principal as the Method names it, if that is not a SPIFFE ID: "uid:1000" for a Unix peer, the
	// subject of a token, the common name of a certificate. It is unique only together with Method, and may be empty.
	Name string

	Method   string    // how it was proven, such as "client-certificate": for logs and audit records
	NotAfter time.Time // when the proof expires; zero if the proof does not say

	// DNSNames are further names that the same credential proves, such as the DNS names of a client certificate. A
	// policy must decide whether the caller keeps them: a certificate authority that signs all of them keeps a name
	// alive as long as the caller renews it.
	DNSNames []string

	// Actors are the parties that act for this caller, according to a token of an authorization server: the present
	// actor first, then earlier ones. Empty for a caller that acts itself, as most do.
	Actors []string

	// Pod is where the caller runs; nil if the proof does not say.
	Pod *spiffe.Pod

	// Certificate is the leaf that proved the caller; nil for another proof. A certificate authority that signs for
	// such a caller decides how long it may renew without another proof.
	Certificate *x509.Certificate
}

func (c *Caller) proven() bool {
	return c != nil && (!c.ID.IsZero() || c.Name != "" || len(c.DNSNames) > 0)
}

// String returns the name by which limits, records and policies identify the caller: its ID, or else METHOD:NAME,
// such as "unix-peer:uid:1000", or else "METHOD DNS:" and its first DNS name. It is empty if nothing is proven. A
// method contains no colons and blanks, so different principals have different names.
func (c *Caller) String() string {
	switch {
	case !c.proven():
		return ""
	case !c.ID.IsZero():
		return c.ID.String()
	case c.Name != "":
		return c.Method + ":" + c.Name
	}
	return c.Method + " DNS:" + c.DNSNames[0]
}

// LogValue returns all fields of the Caller, which holds no secret, except empty ones and the Certificate.
func (c *Caller) LogValue() slog.Value {
	id := ""
	if !c.ID.IsZero() {
		id = c.ID.String()
	}
	attrs := texts("id", id, "name", c.Name, "method", c.Method)
	if !c.NotAfter.IsZero() {
		attrs = append(attrs, slog.Time("not_after", c.NotAfter))
	}
	if len(c.DNSNames) > 0 {
		attrs = append(attrs, slog.Any("dns_names", c.DNSNames))
	}
	if len(c.Actors) > 0 {
		attrs = append(attrs, slog.Any("actors", c.Actors))
	}
	if p := c.Pod; p != nil {
		attrs = append(attrs, slog.GroupAttrs("pod", texts("cluster", p.Cluster, "namespace", p.Namespace,
			"service_account", p.ServiceAccount, "name", p.Name, "uid", p.UID, "node", p.Node,
			"service_account_uid", p.ServiceAccountUID, "node_uid", p.NodeUID)...))
	}
	return slog.GroupValue(attrs...)
}

// texts returns attributes for pairs of a key and a value, without the empty values.
func texts(pairs ...string) (attrs []slog.Attr) {
	for pair := range slices.Chunk(pairs, 2) {
		if pair[1] != "" {
			attrs = append(attrs, slog.String(pair[0], pair[1]))
		}
	}
	return attrs
}

// An Authenticator proves the sender of a request. Its errors wrap [ErrNoCredential] or [ErrRefused] if that is the
// reason; any other error means that it could not decide now. It must be safe for concurrent use, must not write to
// the request, and must not put a credential into an error.
type Authenticator interface {
	Authenticate(r *http.Request) (*Caller, error)
}

// Func makes an [Authenticator] of a function.
type Func func(r *http.Request) (*Caller, error)

// Authenticate calls f.
func (f Func) Authenticate(r *http.Request) (*Caller, error) { return f(r) }

// ClientCertificate proves a caller by the client certificate of its TLS connection. It verifies the chain with v at
// every call, so the newest bundle and policy of v apply to requests on old connections. Its errors wrap
// [*spiffe.VerifyError].
//
// The valid DNS names of the certificate become the caller's, in order, so that a workload that renews with its
// current certificate can get the same names again. Other names, such as addresses, are dropped.
//
// The TLS server must ask for the certificate, as a server of package spiffetls does. Headers are not read.
func ClientCertificate(v *spiffe.Verifier) Authenticator {
	return Func(func(r *http.Request) (*Caller, error) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return nil, fmt.Errorf("authn: client certificate: %w", ErrNoCredential)
		}
		peer, err := v.VerifyChain(r.TLS.PeerCertificates, spiffe.ClientRole)
		if err != nil {
			return nil, fmt.Errorf("authn: client certificate: %w: %w", ErrRefused, err)
		}
		leaf := r.TLS.PeerCertificates[0]
		return &Caller{
			ID:       peer.ID(),
			Method:   "client-certificate",
			NotAfter: peer.NotAfter(),
			DNSNames: validNames(leaf.DNSNames),

			Certificate: leaf,
		}, nil
	})
}

// validNames returns the names that are DNS names, without duplicates; nil if there are none. A certificate can
// contain any text there, and an invalid name would make its renewal fail.
func validNames(names []string) []string {
	var valid []string
	seen := make(map[string]bool, len(names))
	for _, name := range names {
		if !seen[name] && validName(name) {
			valid = append(valid, name)
		}
		seen[name] = true
	}
	return valid
}

// validName reports whether name is a host name, possibly with underscores, or a wildcard for the hosts of a domain.
func validName(name string) bool {
	if _, err := netip.ParseAddr(name); err == nil || len(name) > 253 {
		return false
	}
	rest, wild := strings.CutPrefix(name, "*.")
	for label := range strings.SplitSeq(rest, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			switch c := label[i]; {
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			default:
				return false
			}
		}
	}
	return !wild || strings.Contains(rest, ".")
}

// FirstOf tries each method in order and returns the first Caller. If one method refuses a credential, a later method
// may still prove the caller by another credential: a workload may have a token and an expired certificate. So each
// method must be sufficient by itself. A method that returns no error and no Caller with a name has proven nothing,
// and FirstOf tries the next. A Caller without an ID counts: if the ID decides, put methods that prove such callers
// last. If no method proves the caller, the error wraps the errors of all; without methods it wraps
// [ErrNoCredential].
func FirstOf(methods ...Authenticator) Authenticator {
	return Func(func(r *http.Request) (*Caller, error) {
		var errs []error
		var wait time.Duration
		decided := true
		for _, m := range methods {
			c, err := m.Authenticate(r)
			if err == nil && c.proven() {
				return c, nil
			}
			if err == nil {
				err = errNothing
			}
			if Unavailable(err) {
				after, _ := retry.After(err)
				wait, decided = max(wait, after), false
			}
			errs = append(errs, err)
		}
		switch err := errors.Join(errs...); {
		case err == nil:
			return nil, fmt.Errorf("authn: no method is configured: %w", ErrNoCredential)
		case !decided:
			return nil, &undecided{err, wait}
		default:
			return nil, err
		}
	})
}

// undecided is the error of several methods, some of which could not judge.
type undecided struct {
	error
	after time.Duration // the longest wait of the undecided methods
}

func (e *undecided) Unwrap() error                             { return e.error }
func (e *undecided) Retryable() (after time.Duration, ok bool) { return e.after, true }
