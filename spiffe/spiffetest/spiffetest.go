// Package spiffetest gives tests a trust domain in one line. It is to package spiffe what httptest is to net/http.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	web := ca.SVID("/web")     // an identity: a [spiffe.SVID], good for one hour
//	bundle := ca.Bundle()      // what a verifier needs
//
//	token := ca.JWTSVID("/web", "db") // a JWT-SVID, whose key the bundle has from then on
//
// An SVID and a bundle are sources of themselves: give them to a verifier or a TLS configuration. [CA.Source] returns
// a source with both, as an agent would, that the test renews ([Source.Renew]) and breaks ([Source.Fail]).
//
// Two packages below this one have servers whose faults tests inject: workloadapitest a Workload API, and
// federationtest a bundle endpoint.
//
// # Broken identities
//
// [Faults] lists identities with exactly one thing wrong, each with the rule that it breaks; [CA.Broken] mints one:
//
//	for _, f := range spiffetest.Faults() {
//		chain, key := ca.Broken(f.Name)
//		for _, role := range f.Refused { // two are faults of one role alone
//			_, err := verifier.VerifyChain(chain, role)
//			…
//		}
//	}
//
// Anything else is an edit of the template before it is signed:
//
//	chain, key := ca.Certificate("/web", func(c *x509.Certificate) { c.DNSNames = []string{"web.test"} })
//
// # A certificate authority to call
//
// A CA also answers signing requests ([CA.Sign]) and returns bundles ([CA.FetchBundles], [CA.WatchBundles]), as
// packages caclient and secretcache expect. Tests make it fail ([CA.FailNext]), wait ([CA.Delay]) and give wrong
// answers ([CA.EditTemplates], [CA.EditAnswers]). [CA.Rotate] replaces its root; [CA.Prepare] before it and
// [CA.DropOldRoots] after it are the other steps of a careful rotation.
//
// # Handlers and servers
//
// A handler that asks package spiffetls for its client is tested without TLS:
//
//	w := httptest.NewRecorder()
//	handler.ServeHTTP(w, ca.RequestFrom("/web", httptest.NewRequest("GET", "/", nil)))
//
// [Serve] serves an http.Server of package spiffetls until the test ends:
//
//	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow})
//	…
//	err = endpoint.ConfigureServer(server)
//	…
//	url := spiffetest.Serve(t, server)
//
// [StartTLS] starts an httptest.Server with a configuration of package spiffetls. The server's own client does not
// trust it; make one with the Transport of an Endpoint:
//
//	server := httptest.NewUnstartedServer(handler)
//	err = endpoint.ConfigureServer(server.Config)
//	…
//	spiffetest.StartTLS(server, server.Config.TLSConfig)
//
// # Tests that fail for the right reason
//
// A client of spiffetls presents no expired identity, so a test in which the connection fails may never have reached
// the server. [TLSConfig] presents any chain, so that the server is the side that refuses:
//
//	conn, err := tls.Dial("tcp", addr, spiffetest.TLSConfig(ca.Broken("Expired")))
//
// In TLS 1.3 the refusal is the error of the client's first read; the Report of the server's spiffetls.Metrics
// has the reason. The examples show the usual cases: a client of another trust domain, an expired SVID, a root that
// was rotated away, an agent that hangs, and a CA that is down for half a day, in a testing/synctest bubble.
//
// # Sources
//
// [TestSVIDSource] and [TestBundleSource] check that a source of identities or bundles keeps the promises of its
// interface.
//
// # Guarantees
//
// Certificates are made with crypto/x509 and nothing of this library, so that the code under test does not check
// itself. Validity starts at the present second, read from time.Now when the certificate is minted: make the CA
// inside a testing/synctest bubble for the bubble's clock. There is no network and no goroutine. All methods are safe
// for concurrent use. Methods without an error result call t.Fatal if they fail, and must be called from the test's
// own goroutine.
//
// A CA signs every request for its trust domain: never use it outside tests.
package spiffetest

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

type redacted = redact.Text // an alias, so that the embedded field is not exported

const (
	rootLifetime         = 10 * 365 * 24 * time.Hour
	intermediateLifetime = 365 * 24 * time.Hour
	leafLifetime         = time.Hour
)

// CA is a certificate authority for tests: a root, or an intermediate below one. The zero CA is not
// usable; see [NewCA].
type CA struct {
	redacted
	t     testing.TB
	trust *trust     // shared by a root CA and all its intermediates
	fixed *authority // nil for a root CA, which signs with the active root
	behaviour
}

// authority is a certificate that signs, with its key.
type authority struct {
	cert *x509.Certificate
	key  func() crypto.Signer // see seal
	tail []*x509.Certificate  // the intermediates that link a leaf to the root
}

// seal hides a key from package fmt, which prints unexported fields.
func seal(key crypto.Signer) func() crypto.Signer { return func() crypto.Signer { return key } }

// NewCA returns a CA for the trust domain, which is a name such as "example.org", with one root:
// ECDSA P-256, valid from now for ten years.
func NewCA(t testing.TB, trustDomain string) *CA {
	t.Helper()
	td, err := spiffe.ParseTrustDomain(trustDomain)
	if err != nil {
		t.Fatalf("spiffetest: new CA: %v", err)
	}
	ca := &CA{redacted: textOf(td), t: t, trust: &trust{td: td}}
	ca.trust.bundles.Store(new(spiffe.BundleSet))
	ca.addRoot(true)
	return ca
}

// TrustDomain returns the trust domain of the CA.
func (ca *CA) TrustDomain() spiffe.TrustDomain { return ca.trust.td }

// SVID mints an identity whose ID is the trust domain followed by path, such as "/web" or "/ns/prod/sa/web". It has a
// new ECDSA P-256 key and is valid from now for one hour. The edits change the template before it is signed. The
// result must be an X.509-SVID; use [CA.Certificate] for other edits.
func (ca *CA) SVID(path string, edit ...func(*x509.Certificate)) *spiffe.SVID {
	ca.t.Helper()
	chain, key := ca.Certificate(path, edit...)
	svid, err := spiffe.NewSVID(chain, key)
	if err != nil {
		ca.t.Fatalf("spiffetest: mint %q: %v", path, err)
	}
	return svid
}

// Certificate is [CA.SVID] that returns bare certificates, leaf first and without the root, and the leaf's key.
// Nothing is checked, so the edits can break any rule. To break the SAN extension in ways that a template cannot
// express, put it into ExtraExtensions: it then replaces the usual one.
func (ca *CA) Certificate(path string, edit ...func(*x509.Certificate)) ([]*x509.Certificate, crypto.Signer) {
	ca.t.Helper()
	id, key := ca.id(path), ca.newKey()
	return ca.mustSign(ca.signer(), leafTemplate(id, leafLifetime), key.Public(), edit), key
}

// id returns the ID that is the trust domain followed by path.
func (ca *CA) id(path string) spiffe.ID {
	ca.t.Helper()
	if path != "" && path[0] != '/' {
		ca.t.Fatalf("spiffetest: mint %q: want a path that begins with a slash, such as %q, "+
			"which the CA puts after its trust domain", path, "/web")
	}
	id, err := spiffe.ParseID(ca.trust.td.ID().String() + path)
	if err == nil && id.TrustDomain() != ca.trust.td {
		err = errors.New("a path begins with a slash")
	}
	if err != nil {
		ca.t.Fatalf("spiffetest: mint %q: %v", path, err)
	}
	return id
}

// Intermediate returns a CA below ca. Its leaves have its certificate in their chain, and the bundle of the root
// verifies them. The certificate is valid from now for a year; the edits change its template and may break any rule.
//
// Bundle, Rotate and the other methods for roots act on the root CA. After a rotation an intermediate still signs
// below the root that made it, as a real one would: make another. Faults such as [CA.FailNext] are the
// intermediate's own.
func (ca *CA) Intermediate(edit ...func(*x509.Certificate)) *CA {
	ca.t.Helper()
	parent, key := ca.signer(), ca.newKey()
	chain := ca.mustSign(parent, caTemplate(ca.trust.td, "intermediate", intermediateLifetime), key.Public(), edit)
	fixed := &authority{cert: chain[0], key: seal(key), tail: chain}
	return &CA{redacted: textOf(ca.trust.td), t: ca.t, trust: ca.trust, fixed: fixed}
}

func textOf(td spiffe.TrustDomain) redacted { return redact.New("spiffetest.CA(" + td.String() + ")") }

// signer returns the current signer.
func (ca *CA) signer() *authority {
	if ca.fixed != nil {
		return ca.fixed
	}
	return ca.trust.activeRoot()
}

func (ca *CA) newKey() crypto.Signer {
	ca.t.Helper()
	key, err := newKey()
	if err != nil {
		ca.t.Fatalf("spiffetest: new key: %v", err)
	}
	return key
}

func (ca *CA) mustSign(
	by *authority, template *x509.Certificate, pub crypto.PublicKey, edit []func(*x509.Certificate),
) []*x509.Certificate {
	ca.t.Helper()
	for _, e := range edit {
		e(template)
	}
	chain, err := by.sign(template, pub)
	if err != nil {
		ca.t.Fatalf("spiffetest: sign: %v", err)
	}
	return chain
}

// sign returns the new certificate followed by the intermediates up to, but excluding, the root.
func (a *authority) sign(template *x509.Certificate, pub crypto.PublicKey) ([]*x509.Certificate, error) {
	cert, err := sign(template, a.cert, pub, a.key())
	if err != nil {
		return nil, err
	}
	return append([]*x509.Certificate{cert}, a.tail...), nil
}

func sign(template, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, pub, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

// newKey makes P-256 keys, the fastest kind that every verifier accepts.
func newKey() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

func newRoot(td spiffe.TrustDomain, name string) (*authority, error) {
	key, err := newKey()
	if err != nil {
		return nil, err
	}
	template := caTemplate(td, name, rootLifetime)
	cert, err := sign(template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("root of %s: %w", td, err)
	}
	return &authority{cert: cert, key: seal(key)}, nil
}

func leafTemplate(id spiffe.ID, lifetime time.Duration) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{"svidkit"}}, // like pki/ca
		URIs:                  []*url.URL{id.URL()},
		NotBefore:             now,
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}
}

func caTemplate(td spiffe.TrustDomain, name string, lifetime time.Duration) *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		Subject:               pkix.Name{Organization: []string{td.String()}, CommonName: "test " + name},
		URIs:                  []*url.URL{td.ID().URL()},
		NotBefore:             now,
		NotAfter:              now.Add(lifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
}
