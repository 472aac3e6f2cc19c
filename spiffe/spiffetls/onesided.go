package spiffetls

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
)

// NoIdentity is the self of a client without an identity: it presents no certificate, and verifies the server as usual.
// The server must have AllowAnonymousClients, or authenticate this client by other means, such as a token. Servers
// refuse NoIdentity.
func NoIdentity() spiffe.SVIDSource { return noIdentity{} }

type noIdentity struct{}

// SVID implements [spiffe.SVIDSource].
func (noIdentity) SVID() (*spiffe.SVID, error) {
	return nil, errors.New("spiffetls: NoIdentity has no identity")
}

// OptionalIdentity is the self of a client that presents the identity of self while it is valid. If self fails or its
// SVID has expired, the client presents no certificate, as with [NoIdentity], and the Logger in the options gets a
// line. It is for a client that can also prove itself by other means, such as a token with which it renews that
// identity. Servers refuse OptionalIdentity.
//
// Such a client does not resume sessions, because the server takes the client of a resumed session for that of the
// original one, with or without its identity. An open connection stays as it was made, too: close idle connections once
// there is an identity.
func OptionalIdentity(self spiffe.SVIDSource) spiffe.SVIDSource { return optionalIdentity{self} }

type optionalIdentity struct{ spiffe.SVIDSource }

// WebCertificate is the self of a server that presents a certificate for its host name, such as one of a web PKI,
// instead of an SVID, and verifies its clients by their SPIFFE IDs. Its clients must verify it by its name: it proves
// no ID.
//
// The function is called for every handshake, like GetCertificate of a tls.Config, and must not block; those of ACME
// clients and certificate watchers fit. The certificate is shared and not changed. If the function fails or its
// certificate has expired, the handshake fails on this side. A server declines tickets from before a renewal, as for an
// SVID. Clients refuse WebCertificate.
func WebCertificate(get func(*tls.ClientHelloInfo) (*tls.Certificate, error)) spiffe.SVIDSource {
	return &webCertificate{get}
}

type webCertificate struct {
	get func(*tls.ClientHelloInfo) (*tls.Certificate, error)
}

// SVID implements [spiffe.SVIDSource].
func (*webCertificate) SVID() (*spiffe.SVID, error) {
	return nil, errors.New("spiffetls: a WebCertificate is not an SVID")
}

// certificate returns the certificate for one handshake, with its leaf.
func (w *webCertificate) certificate(hello *tls.ClientHelloInfo, now time.Time) (*tls.Certificate, error) {
	cert, err := w.get(hello)
	switch {
	case err != nil:
		return nil, fmt.Errorf("web certificate: %w", err)
	case cert == nil || len(cert.Certificate) == 0:
		return nil, errors.New("the function of WebCertificate returned none")
	}
	leaf := cert.Leaf
	if leaf == nil {
		if leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return nil, fmt.Errorf("web certificate: %w", err)
		}
		with := *cert // the original belongs to the function
		with.Leaf = leaf
		cert = &with
	}
	if now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("the web certificate for %.300q expired at %s and was not renewed", leaf.DNSNames, leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	return cert, nil
}

// WebRoots is the peers of a client that presents its own identity and verifies the server by the dialled host name,
// with roots for host names, instead of by SPIFFE ID. The policy must be nil, as there is no ID that it could allow. A
// ServerName in the configuration replaces the dialled name.
//
// The function is called at every handshake, resumed ones too, and must not block; [x509.SystemCertPool] returns the
// roots of the host. The certificate must be for server authentication. A refusal is a
// [*tls.CertificateVerificationError]. Servers refuse WebRoots, and so does a client with [NoIdentity], as neither side
// would prove an ID: use crypto/tls.
//
// crypto/tls does not pass on a dialled IP address. A [Transport] knows it; with [ClientConfig] a server that is
// dialled by its IP address is refused.
func WebRoots(roots func() (*x509.CertPool, error)) spiffe.BundleSource { return &webRoots{roots} }

type webRoots struct {
	roots func() (*x509.CertPool, error)
}

// Bundle implements [spiffe.BundleSource].
func (*webRoots) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return nil, fmt.Errorf("spiffetls: WebRoots has no bundle of %q: %w", td, spiffe.ErrUnknownTrustDomain)
}

// errNoWebRoots says that the function of WebRoots failed.
var errNoWebRoots = errors.New("there are no roots to verify a web server with")

// verify verifies the chain of a server by its name. The error is a [*tls.CertificateVerificationError], as that of
// crypto/tls.
func (w *webRoots) verify(chain []*x509.Certificate, name string, now time.Time) (proof, error) {
	refuse := func(err error) (proof, error) {
		return proof{}, &tls.CertificateVerificationError{UnverifiedCertificates: chain, Err: err}
	}
	if name == "" {
		return refuse(errors.New("the server's host name is not known: set ServerName, or use a Transport for an IP address"))
	}
	if err := certchain.CheckSize(chain); err != nil {
		return refuse(err)
	}
	pool, err := w.roots()
	if err != nil || pool == nil { // a nil pool would mean the roots of the host
		return refuse(fmt.Errorf("%w: %w", errNoWebRoots, cmp.Or(err, errors.New("the function of WebRoots returned none"))))
	}
	if err := chain[0].VerifyHostname(name); err != nil {
		return refuse(err)
	}
	path, err := certchain.Path(chain, pool, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, now)
	if err != nil {
		return refuse(err)
	}
	return proof{name: name, notAfter: certchain.End(path)}, nil
}

// proof is what a handshake shows of the other side.
type proof struct {
	peer     *spiffe.Peer // nil for a client without a certificate, and for a web server
	name     string       // of a web server
	addr     hostport     // of a server whose policy depends on it
	notAfter time.Time    // zero for a client without a certificate
	own      time.Time    // when the certificate that a server has presented expires; zero if that is not known
}

// String names the other side in logs.
func (p proof) String() string {
	if p.peer != nil {
		return p.peer.ID().String()
	}
	return p.name
}

// oneSided determines which sides prove a SPIFFE ID. Combinations without sense are errors when the program starts.
func (e *endpoint) oneSided(server bool, peers spiffe.BundleSource, allow spiffe.PolicySource) error {
	if optional, ok := e.self.(optionalIdentity); ok {
		e.self, e.optional = optional.SVIDSource, true
	}
	_, none := e.self.(noIdentity)
	e.web, _ = e.self.(*webCertificate)
	e.roots, _ = peers.(*webRoots)
	for _, source := range []any{e.self, peers} {
		if v := reflect.ValueOf(source); v.Kind() == reflect.Pointer && v.IsNil() {
			return fmt.Errorf("a source is a nil %T", source)
		}
		if s, is := source.(*spiffe.SVID); is && s.ID().IsZero() { // it would panic when a peer comes
			return errors.New("the identity is a zero SVID: NewSVID and ParseSVID make one")
		}
	}
	switch {
	case e.self == nil && server:
		return errors.New("no source of the identity to present; a server that proves no ID to its clients has WebCertificate")
	case e.self == nil:
		return errors.New("no source of the identity to present; a client without one has NoIdentity")
	case server && (none || e.optional):
		return errors.New("a server must present a certificate: NoIdentity and OptionalIdentity are for clients")
	case server && e.roots != nil:
		return errors.New("clients have no host name to verify: WebRoots is for clients")
	case !server && e.web != nil:
		return errors.New("a client has no host name to present: WebCertificate is for servers")
	case !server && e.opts.AllowAnonymousClients:
		return errors.New("AllowAnonymousClients is for servers: a client without an identity has NoIdentity")
	case e.web != nil && e.web.get == nil:
		return errors.New("WebCertificate has no function")
	case e.roots != nil && e.roots.roots == nil:
		return errors.New("WebRoots has no function; the roots of the host are x509.SystemCertPool")
	case e.roots != nil && allow != nil:
		return errors.New("with WebRoots the host name decides about the server: the policy must be nil")
	case e.roots != nil && none:
		return errors.New("with NoIdentity and WebRoots neither side proves a SPIFFE ID: use crypto/tls")
	case e.roots != nil:
	case peers == nil && server:
		return errors.New("no bundle source to verify clients with, such as a Workload API source or a *spiffe.Bundle; " +
			"AllowAnonymousClients does not replace it, as a certificate that is presented must verify")
	case peers == nil:
		return errors.New("no bundle source to verify servers with, such as a Workload API source or a *spiffe.Bundle; a server that is verified by its host name needs WebRoots")
	case allow == nil && server:
		return errors.New("no policy that says which clients are allowed, such as spiffe.AllowIDs; " +
			"AllowAnonymousClients does not replace it, as a certificate that is presented must be allowed")
	case allow == nil:
		return errors.New("no policy that says which servers are allowed, such as spiffe.AllowIDs or, by address, Hosts")
	}
	return nil
}
