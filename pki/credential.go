package pki

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Credential is a certificate with its private key that need not be an X.509-SVID, such as the DNS-named certificate
// of a Linkerd workload, or the certificate of an Athenz service or a web server. It never changes, is safe for
// concurrent use, and does not print its key: [Credential.MarshalPEM] returns it. Functions that need a SPIFFE ID
// take a [*spiffe.SVID], which a Credential never becomes.
type Credential struct {
	redacted
	chain []*x509.Certificate
	tls   func() *tls.Certificate // a func, because fmt does not print what it captures
}

// NewCredential returns the Credential of a chain, leaf first, and the leaf's private key, which may live in
// hardware. The leaf must not be a CA, and the key must belong to it, else the error wraps [ErrKeyMismatch]. More
// than 16 certificates, or 64 KiB of them, give an error that wraps [spiffe.ErrTooLarge]. The slice is copied; the
// certificates and the key are shared. NewCredential does not check names, signatures and validity: see
// [Expectation].
func NewCredential(chain []*x509.Certificate, key crypto.Signer) (*Credential, error) {
	if err := certchain.CheckSize(chain); err != nil {
		return nil, fmt.Errorf("pki: credential: %w", err)
	}
	switch {
	case chain[0].IsCA:
		return nil, fmt.Errorf("pki: credential: %.300q is a CA certificate, and the leaf comes first",
			chain[0].Subject)
	case key == nil:
		return nil, errors.New("pki: credential: no private key")
	case !PublicKeysEqual(chain[0].PublicKey, key.Public()):
		return nil, fmt.Errorf("pki: credential: %w", ErrKeyMismatch)
	}
	cert := &tls.Certificate{PrivateKey: key, Leaf: chain[0], Certificate: make([][]byte, len(chain))}
	for i, c := range chain {
		cert.Certificate[i] = c.Raw
	}
	return &Credential{
		redacted: redact.New("pki.Credential(" + leafNames(chain[0]) + ")"),
		chain:    slices.Clone(chain),
		tls:      func() *tls.Certificate { return cert },
	}, nil
}

// ParseCredentialPEM parses a Credential from PEM, by the rules of [ParseCertificatesPEM], [ParsePrivateKeyPEM] and
// [NewCredential]. Errors do not carry the input.
func ParseCredentialPEM(certsPEM, keyPEM []byte) (*Credential, error) {
	chain, err := certpem.Certificates(certsPEM)
	if err != nil {
		return nil, fmt.Errorf("pki: credential: certificates: %w", err)
	}
	key, err := certpem.PrivateKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("pki: credential: key: %w", err)
	}
	return NewCredential(chain, key)
}

// Leaf returns the first certificate of the chain. It is shared and must not be changed.
func (c *Credential) Leaf() *x509.Certificate { return c.chain[0] }

// Chain returns the certificates to present to peers, leaf first, in a new slice. The certificates are shared and
// must not be changed.
func (c *Credential) Chain() []*x509.Certificate { return slices.Clone(c.chain) }

// NotAfter returns the end of the leaf's validity.
func (c *Credential) NotAfter() time.Time { return c.chain[0].NotAfter }

// TLSCertificate returns the Credential for crypto/tls. It is built once, is shared and must not be changed. Printing
// it may show the key, unlike printing the Credential.
func (c *Credential) TLSCertificate() *tls.Certificate { return c.tls() }

// MarshalPEM returns the Credential in the form that [ParseCredentialPEM] reads, with the private key unencrypted in
// PKCS#8. A key in hardware cannot be exported and gives an error.
func (c *Credential) MarshalPEM() (certs, key []byte, err error) {
	key, err = certpem.EncodePrivateKey(c.tls().PrivateKey.(crypto.Signer))
	if err != nil {
		return nil, nil, fmt.Errorf("pki: credential: %w", err)
	}
	return certpem.EncodeCertificates(c.chain), key, nil
}

// leafNames returns the alternative names of a certificate, or else its subject, for messages.
func leafNames(c *x509.Certificate) string {
	sans, err := certificateSANs(c)
	if err != nil || len(sans) == 0 {
		return fmt.Sprintf("%.300q", c.Subject)
	}
	return fmt.Sprintf("%.300v", sans)
}

// Expectation describes the certificate that a CA must return: for a SPIFFE ID ([ExpectID]), for a DNS name
// ([ExpectDNSName]), or of another form ([ExpectLeaf]). No certificate meets the zero Expectation. It never changes
// and is safe for concurrent use.
type Expectation struct {
	td    spiffe.TrustDomain
	id    spiffe.ID
	text  string
	names []SAN
	check func(leaf *x509.Certificate) error
}

// ExpectID expects an X.509-SVID for id, by the rules of [spiffe.Verifier]. The CA may add other names.
func ExpectID(id spiffe.ID) Expectation {
	e := Expectation{td: id.TrustDomain(), id: id, text: id.String()}
	if !id.IsZero() {
		e.names = []SAN{IDSAN(id)}
	}
	return e
}

// ExpectDNSName expects a certificate whose only alternative name is name, byte for byte, as Linkerd's workloads
// have. Its chain must end at a root of td.
func ExpectDNSName(td spiffe.TrustDomain, name string) Expectation {
	if name == "" {
		return Expectation{}
	}
	want := DNSSAN(name)
	return Expectation{td: td, text: name, names: []SAN{want}, check: func(leaf *x509.Certificate) error {
		got, err := certificateSANs(leaf)
		if err != nil {
			return err
		}
		if len(got) != 1 || got[0] != want {
			return fmt.Errorf("the leaf is for %.300v, and not for the DNS name %q alone", got, name)
		}
		return nil
	}}
}

// ExpectLeaf expects a certificate of another form: check returns an error for a leaf that does not have it. check
// must look at all names that a peer may take for the identity, must not keep the certificate, and must be safe for
// concurrent use. form names the form in messages, names go into the signing request, and the chain must end at a
// root of td.
func ExpectLeaf(td spiffe.TrustDomain, form string, names []SAN,
	check func(leaf *x509.Certificate) error) Expectation {
	if check == nil {
		return Expectation{}
	}
	return Expectation{td: td, text: form, names: slices.Clone(names), check: check}
}

// IsZero reports whether e expects nothing.
func (e Expectation) IsZero() bool { return e.id.IsZero() && e.check == nil }

// ID returns the expected SPIFFE ID; zero if another form is expected.
func (e Expectation) ID() spiffe.ID { return e.id }

// TrustDomain returns the trust domain whose roots vouch for the certificate.
func (e Expectation) TrustDomain() spiffe.TrustDomain { return e.td }

// Names returns the names of a signing request for such a certificate, in a new slice.
func (e Expectation) Names() []SAN { return slices.Clone(e.names) }

// String describes the expected certificate, for messages.
func (e Expectation) String() string { return e.text }

// Verify checks that chain, leaf first, meets e: the leaf has the form, is not a CA, may sign in a handshake, and
// leads through the other certificates, in any order, to a root in the bundle of e's trust domain. Every certificate
// on the path is valid at now and permits the role. Verify returns the path that stays valid longest, root last. The
// certificates are shared.
//
// The error is a [*spiffe.VerifyError], whose stages mean the same for every form; its ID is zero unless e expects
// one.
func (e Expectation) Verify(chain []*x509.Certificate, bundles spiffe.BundleSource, role spiffe.Role,
	now time.Time) ([]*x509.Certificate, error) {
	if !e.id.IsZero() {
		return e.verifyID(chain, bundles, role, now)
	}
	if err := e.checkLeaf(chain); err != nil {
		return nil, &spiffe.VerifyError{Stage: "leaf", Err: err}
	}
	usages := certchain.Usages(int(role))
	if usages == nil || bundles == nil {
		return nil, &spiffe.VerifyError{Stage: "leaf",
			Err: fmt.Errorf("no bundle source, or unknown Role(%d)", int(role))}
	}
	b, err := bundles.Bundle(e.td)
	switch {
	case err != nil:
	case b == nil || b.TrustDomain() != e.td:
		err = fmt.Errorf("the bundle source did not give the bundle of %q: %w", e.td, spiffe.ErrUnknownTrustDomain)
	case len(slices.Collect(b.X509Authorities())) == 0:
		err = fmt.Errorf("trust domain %q: %w", e.td, spiffe.ErrNoAuthority)
	}
	if err != nil {
		return nil, &spiffe.VerifyError{Stage: "bundle", Err: err}
	}
	path, err := certchain.Path(chain, b.CertPool(), usages, now, spiffe.AnyAlgorithm().Check)
	if err != nil {
		v := &spiffe.VerifyError{Stage: "chain", Err: err}
		if bad, ok := errors.AsType[x509.CertificateInvalidError](err); ok && bad.Reason == x509.IncompatibleUsage {
			v.Rule = "X5-39"
		}
		return nil, v
	}
	return path, nil
}

// verifyID is Verify for a SPIFFE ID.
func (e Expectation) verifyID(chain []*x509.Certificate, bundles spiffe.BundleSource, role spiffe.Role,
	now time.Time) ([]*x509.Certificate, error) {
	v, err := spiffe.NewVerifier(bundles, spiffe.AllowIDs(e.id), func() time.Time { return now })
	if err != nil {
		return nil, err
	}
	if len(chain) > 0 { // report a wrong ID before any signature is verified
		if got, err := spiffe.IDFromCertificate(chain[0]); err == nil && got != e.id {
			return nil, &spiffe.VerifyError{Stage: "policy", ID: got,
				Err: fmt.Errorf("the leaf is for %q: %w", got, spiffe.ErrDenied)}
		}
	}
	peer, err := v.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(chain, role)
	if err != nil {
		return nil, err
	}
	return peer.Chain(), nil
}

func (e Expectation) checkLeaf(chain []*x509.Certificate) error {
	if e.check == nil {
		return errors.New("nothing was expected: the Expectation is zero")
	}
	if err := certchain.CheckSize(chain); err != nil {
		return err
	}
	leaf := chain[0]
	const signing = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	switch {
	case leaf.IsCA || leaf.KeyUsage&signing != 0:
		return errors.New("the leaf is a CA")
	case leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return errors.New("the leaf's key usage lacks digitalSignature")
	}
	return e.check(leaf)
}
