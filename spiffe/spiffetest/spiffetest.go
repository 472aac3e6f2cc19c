// Package spiffetest gives tests a trust domain in one line. It is to package spiffe what httptest
// is to net/http.
//
//	ca := spiffetest.NewCA(t, "example.org")
//	web := ca.SVID("/web")     // an identity: a [spiffe.SVID], good for one hour
//	bundle := ca.Bundle()      // what a verifier needs
//
// An SVID and a bundle are sources of themselves, so that both can be given to a verifier or a TLS
// configuration.
//
// # Broken identities
//
// [Faults] lists identities with exactly one thing wrong, each with the rule that it breaks;
// [CA.Broken] mints one:
//
//	for _, f := range spiffetest.Faults() {
//		chain, key := ca.Broken(f.Name)
//		…
//	}
//
// Anything else is an edit of the template before it is signed:
//
//	chain, key := ca.Certificate("/web", func(c *x509.Certificate) { c.DNSNames = []string{"web.test"} })
//
// # A certificate authority to call
//
// A CA also answers signing requests ([CA.Sign]) and returns bundles ([CA.FetchBundles],
// [CA.WatchBundles]), as packages caclient and secretcache expect. Tests make it fail ([CA.FailNext]), for some calls
// or until they say otherwise, wait ([CA.Delay]) and give wrong answers ([CA.EditTemplates], [CA.EditAnswers]).
// [CA.Rotate] replaces its root in one step, [CA.Prepare], [CA.Activate] and [CA.DropOldRoots] in three.
//
// # A source to renew and to break
//
// [CA.Source] returns an identity with its bundles, as an agent would, that the test renews ([Source.Renew])
// and fails until it says otherwise ([Source.Fail]).
//
// # Handlers without a connection
//
// A handler that asks for its client, by the functions of package spiffetls, is tested without TLS:
//
//	w := httptest.NewRecorder()
//	handler.ServeHTTP(w, ca.RequestFrom("/web", httptest.NewRequest("GET", "/", nil)))
//
// [CA.Peer] is the proof alone. Both are made by verifying a certificate of the CA, and a program that is no
// test cannot make such a request.
//
// # A server of httptest
//
// [StartTLS] starts an httptest.Server with a configuration of package spiffetls. Its own client does not trust it;
// make one with spiffetls.Transport:
//
//	server := httptest.NewUnstartedServer(handler)
//	config, err := spiffetls.ServerConfig(ca.SVID("/db"), ca.Bundle(), allow, nil)
//	…
//	spiffetest.StartTLS(server, config)
//
// One that spiffetls.ConfigureServer prepared is started with server.TLS = server.Config.TLSConfig and
// server.StartTLS().
//
// # Tests that fail for the right reason
//
// A client of spiffetls presents no expired identity, so a test in which the connection fails may never have
// reached the server. [TLSConfig] presents whatever it is given. The server refuses it; the recipes show how a
// test begins, and the examples how each continues.
//
// A client of another trust domain, whose bundle the server does not have:
//
//	other := spiffetest.NewCA(t, "other.test")
//	conn, err := tls.Dial("tcp", addr, spiffetest.TLSConfig(other.Certificate("/web")))
//
// An SVID that expired a minute ago:
//
//	conn, err := tls.Dial("tcp", addr, spiffetest.TLSConfig(ca.Broken("Expired")))
//
// An SVID whose root was rotated away:
//
//	chain, key := ca.Certificate("/web")
//	ca.Rotate()
//	ca.DropOldRoots()
//	source.Renew() // of the server, which learns the new bundle
//	conn, err := tls.Dial("tcp", addr, spiffetest.TLSConfig(chain, key))
//
// In TLS 1.3 the refusal is the error of the client's first read. What the server says of it is in the
// spiffetls.FailureLog of its options.
//
// An agent that hangs, with package workloadapitest:
//
//	api := workloadapitest.NewServer(t, ca, "/web")
//	api.Hang()
//	_, err := workloadapi.Start(ctx, api.Config()) // which ends with ctx
//	…
//	api.Mend()
//	source, err := workloadapi.Start(t.Context(), api.Config()) // and Close it
//
// A CA that is down for half a day, which takes no time in a bubble of testing/synctest:
//
//	synctest.Test(t, func(t *testing.T) {
//		ca := spiffetest.NewCA(t, "example.org") // in the bubble, for its clock
//		source, err := secretcache.Start(t.Context(), secretcache.Config{ID: web, CA: ca, Lifetime: 24 * time.Hour})
//		…
//		defer source.Close()
//		ca.FailNext(-1, errors.New("the CA is down"))
//		time.Sleep(12 * time.Hour)
//		ca.FailNext(0, nil)
//		…
//	})
//
// # Suites for sources
//
// [TestSVIDSource] and [TestBundleSource] check that a source of identities or bundles keeps what its
// interface promises. A Workload API and a bundle endpoint, with faults that tests inject, are in the
// packages workloadapitest and federationtest below this one.
//
// # What it promises
//
// Certificates are made with crypto/x509 and nothing of this library, so that the code under test
// does not check itself. Validity starts at the present second, read from time.Now when the
// certificate is minted: in a testing/synctest bubble that is the bubble's clock, so make the CA
// inside. There is no network and no goroutine. All methods are safe for concurrent use.
//
// Methods without an error result call t.Fatal if they fail, and must be called from the test's own
// goroutine.
//
// # What it does not do
//
// It has no policy. It signs every request of every caller in its trust domain: never use it outside
// tests.
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

// seal puts a key where package fmt cannot follow it, as it does follow unexported fields.
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

// SVID mints an identity whose ID is the trust domain followed by path, such as "/web" or
// "/ns/prod/sa/web". It has a new ECDSA P-256 key and is valid from now for one hour. The edits
// change the template before it is signed and must leave an X.509-SVID; see [CA.Certificate] for
// those that do not.
func (ca *CA) SVID(path string, edit ...func(*x509.Certificate)) *spiffe.SVID {
	ca.t.Helper()
	chain, key := ca.Certificate(path, edit...)
	svid, err := spiffe.NewSVID(chain, key)
	if err != nil {
		ca.t.Fatalf("spiffetest: mint %q: %v", path, err)
	}
	return svid
}

// Certificate mints what [CA.SVID] mints and returns it as bare certificates, leaf first and
// without the root, and the leaf's key. Nothing is checked, so the edits can break any rule. To
// break the SAN extension in ways that a template cannot express, put it into ExtraExtensions: it
// then replaces the usual one.
func (ca *CA) Certificate(path string, edit ...func(*x509.Certificate)) ([]*x509.Certificate, crypto.Signer) {
	ca.t.Helper()
	if path != "" && path[0] != '/' {
		ca.t.Fatalf("spiffetest: mint %q: want a path that begins with a slash, such as %q, which the CA puts after its trust domain", path, "/web")
	}
	id, err := spiffe.ParseID(ca.trust.td.ID().String() + path)
	if err == nil && id.TrustDomain() != ca.trust.td {
		err = errors.New("a path begins with a slash")
	}
	if err != nil {
		ca.t.Fatalf("spiffetest: mint %q: %v", path, err)
	}
	key := ca.newKey()
	return ca.mustSign(ca.signer(), leafTemplate(id, leafLifetime), key.Public(), edit), key
}

// Intermediate returns a CA below ca: what it signs comes with its certificate in the chain, and is
// verified by the bundle of the root. The certificate is valid from now for a year; the edits change
// its template and may break any rule.
//
// Bundle, Rotate and the other methods for roots act on the root CA. After a rotation an intermediate
// still signs below the root that made it, as a real one would: make another. Faults such as
// [CA.FailNext] are the intermediate's own.
func (ca *CA) Intermediate(edit ...func(*x509.Certificate)) *CA {
	ca.t.Helper()
	parent, key := ca.signer(), ca.newKey()
	chain := ca.mustSign(parent, caTemplate(ca.trust.td, "intermediate", intermediateLifetime), key.Public(), edit)
	return &CA{redacted: textOf(ca.trust.td), t: ca.t, trust: ca.trust, fixed: &authority{cert: chain[0], key: seal(key), tail: chain}}
}

func textOf(td spiffe.TrustDomain) redacted { return redact.New("spiffetest.CA(" + td.String() + ")") }

// signer returns the present signer.
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

func (ca *CA) mustSign(by *authority, template *x509.Certificate, pub crypto.PublicKey, edit []func(*x509.Certificate)) []*x509.Certificate {
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

// sign returns the new certificate and the intermediates that link it to the root.
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
