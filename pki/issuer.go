package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"encoding/asn1"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/spiffe"
)

// Issuer is a CA certificate with its key, and the intermediates up to a root. It never changes and does not print
// its key. It is safe for concurrent use if the key is, as keys of [NewKey] are.
type Issuer struct {
	redacted
	chain []*x509.Certificate // this CA first
	id    spiffe.ID           // of the CA; zero if the certificate has none
	key   func() signer
}

// signer signs with a key that may live anywhere. Its public key is the CA certificate's. crypto/x509 verifies each
// signature with that, so none gets out if the private key was replaced.
type signer struct {
	crypto.Signer
	public crypto.PublicKey
}

func (s signer) Public() crypto.PublicKey { return s.public }

// SignMessage implements [crypto.MessageSigner], as the key itself may.
func (s signer) SignMessage(r io.Reader, msg []byte, opts crypto.SignerOpts) ([]byte, error) {
	return crypto.SignMessage(s.Signer, r, msg, opts)
}

// redacted is the printed form of a type that holds a key.
type redacted = redact.Text

// NewIssuer returns an Issuer for an existing CA. The chain has the CA certificate first and then each certificate
// that signed the previous one; the root may be left out. The slice is copied; the certificates are shared and must
// not be changed.
//
// The CA certificate must have the CA flag, certificate signing among its key usages, a subject, and a strong enough
// public key that matches key. It need not have a SPIFFE ID. If it has one, the ID must have no path, and
// [Issuer.Issue] signs only for workloads of that trust domain. NewIssuer does not check expiry; signing does. The
// error is a [*ProfileError].
func NewIssuer(chain []*x509.Certificate, key crypto.Signer) (*Issuer, error) {
	fail := func(rule, reason string, err error) (*Issuer, error) {
		return nil, &ProfileError{What: "issuer", Rule: rule, Reason: reason, Err: err}
	}
	switch {
	case len(chain) == 0 || slices.Contains(chain, nil):
		return fail("", "no CA certificate", nil)
	case key == nil:
		return fail("", "no private key", nil)
	}
	ca := chain[0]
	if err := certpem.CheckKey(ca.PublicKey); err != nil {
		return fail("", "", err)
	}
	switch {
	case !PublicKeysEqual(ca.PublicKey, key.Public()):
		return fail("", "", ErrKeyMismatch)
	case !ca.BasicConstraintsValid || !ca.IsCA:
		return fail("X5-8", "the certificate is not a CA", nil)
	case ca.KeyUsage&x509.KeyUsageCertSign == 0:
		return fail("X5-17", "the key usage does not include certificate signing", nil)
	case len(ca.RawSubject) <= 2: // the certificates that it signs would have no issuer (RFC 5280, section 4.1.2.4)
		return fail("", "the subject is empty", nil)
	}
	id, err := caID(ca)
	if err != nil {
		return fail("X5-9", "", err)
	}
	if err := checkChain(chain); err != nil {
		return nil, err
	}
	return &Issuer{
		redacted: redact.New("pki.Issuer(" + ca.Subject.String() + ")"),
		chain:    slices.Clone(chain), id: id, key: redact.Seal(signer{key, ca.PublicKey}),
	}, nil
}

// checkChain reports whether each certificate has signed the one before it, and allows the CAs below it.
func checkChain(chain []*x509.Certificate) error {
	for i := range len(chain) - 1 {
		if err := certpem.CheckKey(chain[i+1].PublicKey); err != nil {
			return &ProfileError{What: "issuer", Reason: fmt.Sprintf("certificate %d of the chain", i+2), Err: err}
		}
		if err := chain[i].CheckSignatureFrom(chain[i+1]); err != nil {
			return &ProfileError{What: "issuer", Rule: "X5-30",
				Reason: fmt.Sprintf("certificate %d of the chain is not signed by the next", i+1), Err: err}
		}
	}
	if n := tooDeep(chain); n > 0 {
		return &ProfileError{What: "issuer", Rule: "X5-14",
			Reason: fmt.Sprintf("certificate %d of the chain does not allow as many CAs below it", n+1)}
	}
	return nil
}

// NewRoot makes a self-signed CA certificate for key and returns an Issuer for it. The public key in o must be nil or
// key's. CA need not be set. The error is a [*ProfileError], or says why key did not sign.
func NewRoot(key crypto.Signer, o CertificateOptions) (*Issuer, error) {
	o.CA = true
	if key == nil {
		return nil, o.error("", "no private key", nil)
	}
	public := key.Public()
	if o.PublicKey != nil && !PublicKeysEqual(o.PublicKey, public) {
		return nil, o.error("", "", ErrKeyMismatch)
	}
	o.PublicKey = public
	tmpl, _, err := o.template()
	if err != nil {
		return nil, err
	}
	cert, err := sign("CA certificate", tmpl, tmpl, signer{key, public})
	if err != nil {
		return nil, err
	}
	return NewIssuer([]*x509.Certificate{cert}, key)
}

// Renew returns an Issuer with the same key and a new certificate, which keeps the subject and extensions of the old
// one, but has its own serial number and dates. Leaves issued under either certificate verify with the other.
// Fractions of a second are cut off.
//
// The certificate must be self-signed: any other must be renewed by the CA that signed it. The error is a
// [*ProfileError], or says why the key did not sign.
func (i *Issuer) Renew(notBefore, notAfter time.Time) (*Issuer, error) {
	fail := func(reason string, err error) (*Issuer, error) {
		return nil, &ProfileError{What: "issuer", Reason: reason, Err: err}
	}
	old := i.Certificate()
	if !certchain.SelfSigned(old) {
		return fail("the certificate is not self-signed: its CA has to renew it", nil)
	}
	tmpl, err := newTemplate(notBefore, notAfter)
	if err != nil {
		return fail("", err)
	}
	// These carry all of the old certificate's own contents.
	tmpl.RawSubject, tmpl.PublicKey = old.RawSubject, old.PublicKey
	tmpl.BasicConstraintsValid = false
	for _, e := range old.Extensions {
		if e.Id.Equal(oidAuthorityKeyID()) {
			// The extension may also name the old certificate's serial number.
			if len(old.AuthorityKeyId) == 0 {
				continue
			}
			id := struct {
				KeyID []byte `asn1:"tag:0"`
			}{old.AuthorityKeyId}
			if e.Value, err = asn1.Marshal(id); err != nil {
				return fail("", err)
			}
		}
		tmpl.ExtraExtensions = append(tmpl.ExtraExtensions, e)
	}
	switch old.SignatureAlgorithm {
	case x509.SHA256WithRSAPSS, x509.SHA384WithRSAPSS, x509.SHA512WithRSAPSS, x509.SHA384WithRSA, x509.SHA512WithRSA,
		x509.ECDSAWithSHA256, x509.ECDSAWithSHA384, x509.ECDSAWithSHA512:
		tmpl.SignatureAlgorithm = old.SignatureAlgorithm
	}
	cert, err := sign("issuer", tmpl, tmpl, i.key())
	if err != nil {
		return nil, err
	}
	return NewIssuer([]*x509.Certificate{cert}, i.key().Signer)
}

// Certificate returns the CA certificate. It is shared and must not be changed.
func (i *Issuer) Certificate() *x509.Certificate { return i.chain[0] }

// Chain returns the CA certificate and the intermediates up to its root: a new slice of shared certificates.
func (i *Issuer) Chain() []*x509.Certificate { return slices.Clone(i.chain) }

// Issue signs a certificate for a workload, for a CA below this one, or for another server or client. The caller
// vouches for every name in o.
//
// Issue checks that:
//
//   - the names are valid and few enough
//   - a SPIFFE ID is the only URI, with a path for a workload and without one for a CA; crypto/x509 can read its trust
//     domain; and a workload is in the issuer's trust domain, if the issuer has an ID (a CA may be in another)
//   - the key is strong enough ([ErrWeakKey]) and not the issuer's own
//   - no CA in [Issuer.Chain] has a path length that forbids another CA
//   - the validity is not empty and ends no later than [Issuer.Certificate]
//   - the name constraints of the CAs permit the names: if there are any, Issue verifies the signed certificate
//
// The error is a [*ProfileError], or says why the issuer's key did not sign. Issue never returns a certificate that
// does not verify with the issuer's certificate.
func (i *Issuer) Issue(o CertificateOptions) (*x509.Certificate, error) {
	tmpl, id, err := o.template()
	if err != nil {
		return nil, err
	}
	ca := i.Certificate()
	switch {
	case o.CA && noRoom(i.chain, o.MaxPathLen) != "":
		return nil, o.error("X5-14", noRoom(i.chain, o.MaxPathLen), nil)
	case !o.CA && !id.IsZero() && !i.id.IsZero() && !id.MemberOf(i.id.TrustDomain()):
		return nil, o.error("X5-11", fmt.Sprintf("%s is not in %s, the trust domain of the issuer", id,
			i.id.TrustDomain()), nil)
	case tmpl.NotAfter.After(ca.NotAfter):
		return nil, o.error("", fmt.Sprintf("NotAfter is %s later than the issuer's",
			tmpl.NotAfter.Sub(ca.NotAfter)), errOutlivesIssuer)
	case PublicKeysEqual(o.PublicKey, ca.PublicKey):
		rule := "X5-5"
		if o.CA {
			rule = ""
		}
		return nil, o.error(rule, "the key is the issuer's own", nil)
	}
	cert, err := sign(o.what(), tmpl, ca, i.key())
	if err != nil {
		return nil, err
	}
	if err := checkPermitted(cert, i.chain); err != nil {
		return nil, o.error("X5-15", "", err)
	}
	return cert, nil
}

// sign signs tmpl, whose PublicKey is set, for parent, which may be tmpl.
func sign(what string, tmpl, parent *x509.Certificate, key signer) (*x509.Certificate, error) {
	if parent != tmpl {
		// CreateCertificate leaves it out if the subjects are the same, whatever the keys.
		tmpl.AuthorityKeyId = parent.SubjectKeyId
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, tmpl.PublicKey, key) // verifies its own signature
	if err != nil {
		return nil, fmt.Errorf("pki: %s: sign: %w", what, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: read back: %w", what, err)
	}
	return cert, nil
}

// tooDeep returns the index of the first CA in chain whose path length is less than its index, or 0. The index is the
// number of CAs between it and a leaf.
func tooDeep(chain []*x509.Certificate) int {
	for n, c := range chain {
		if room, limited := pathLen(c); limited && n > room {
			return n
		}
	}
	return 0
}

// noRoom says which CA of an issuer's chain forbids another CA with path length want below it, or returns "".
func noRoom(chain []*x509.Certificate, want *int) string {
	for n, c := range chain {
		room, limited := pathLen(c)
		left := room - n // n CAs are between c and the new one
		if limited && (left <= 0 || want != nil && *want >= left) {
			return fmt.Sprintf("the path length of %.300q is %d, which allows path length %d below the issuer at most",
				c.Subject, room, left-1)
		}
	}
	return ""
}

// pathLen returns the path length constraint of ca, if there is one.
func pathLen(ca *x509.Certificate) (n int, limited bool) {
	return ca.MaxPathLen, ca.MaxPathLen > 0 || ca.MaxPathLen == 0 && ca.MaxPathLenZero
}

// caID returns the SPIFFE ID of a CA certificate, or the zero ID if it has none.
func caID(ca *x509.Certificate) (spiffe.ID, error) {
	sans, err := certificateSANs(ca)
	if err != nil {
		return spiffe.ID{}, err
	}
	id, _, err := findID(sans)
	if err == nil && id.Path() != "" {
		err = fmt.Errorf("%s has a path, as only a workload's ID should", id)
	}
	return id, err
}
