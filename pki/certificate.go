package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/spiffe"
)

var (
	// ErrOutlivesIssuer says that a certificate would end later than the certificate that signs it, so
	// that it would stop working early. Who wants the longest possible life asks for the NotAfter of
	// [Issuer.Certificate].
	ErrOutlivesIssuer = errors.New("the certificate would outlive its issuer")

	// ErrUnreadableTrustDomain says that crypto/x509 cannot read certificates of a trust domain: its
	// name has an empty label, as in "a..b" or "a." (GO-3). Such names are legal SPIFFE IDs.
	ErrUnreadableTrustDomain = errors.New("crypto/x509 cannot read a trust domain name with an empty label")
)

// ProfileError says why a certificate was not signed, or is not fit to sign with.
type ProfileError struct {
	What   string // "leaf", "CA certificate" or "issuer"
	Rule   string // the id of the broken rule, such as "X5-6"; empty for rules that are not of the standard
	Reason string // the rule in words
	Err    error  // ErrWeakKey, ErrKeyMismatch, ErrSAN, ErrOutlivesIssuer, ErrUnreadableTrustDomain in a chain, or nil
}

func (e *ProfileError) Error() string {
	var b strings.Builder
	b.WriteString("pki: ")
	b.WriteString(e.What)
	if e.Reason != "" {
		b.WriteString(": ")
		b.WriteString(e.Reason)
	}
	if e.Err != nil {
		b.WriteString(": ")
		b.WriteString(e.Err.Error())
	}
	if e.Rule != "" {
		b.WriteString(" (")
		b.WriteString(e.Rule)
		b.WriteString(")")
	}
	return b.String()
}

// Unwrap returns e.Err.
func (e *ProfileError) Unwrap() error { return e.Err }

const (
	whatLeaf   = "leaf"
	whatCA     = "CA certificate"
	whatIssuer = "issuer"
)

// LeafOptions is everything that goes into an X.509-SVID for a workload. What it does not name is
// fixed: digital signature as key usage (and key encipherment for RSA), both server and client
// authentication, not a CA.
type LeafOptions struct {
	PublicKey crypto.PublicKey // required, such as CSR.PublicKey
	ID        spiffe.ID        // required, with a path; the one URI name

	DNSNames []string // optional; "*.example.org" is a name, "" is not
	IPs      []net.IP // optional

	// CommonName is for readers that do not know alternative names ("dual use"): at most 64 bytes.
	// Without it the subject is empty and the alternative names are critical.
	CommonName string

	NotBefore, NotAfter time.Time // required; fractions of a second are cut off
}

// CAOptions is everything that goes into a CA certificate of a trust domain. What it does not name is
// fixed: the ID of the trust domain as the one URI name, certificate and CRL signing as key usage, no
// extended key usage. The subject has the organization and the key identifier in hexadecimal as serial
// number: two keys never share a subject, and a certificate that is renewed with its key keeps it.
type CAOptions struct {
	PublicKey   crypto.PublicKey   // required; NewRoot takes it from its key
	TrustDomain spiffe.TrustDomain // required

	// Organization is the organization in the subject, at most 64 bytes; empty means the name of the
	// trust domain, if that is not longer.
	Organization string

	MaxPathLen *int // how many CAs may follow below; nil means any number

	NotBefore, NotAfter time.Time // required; fractions of a second are cut off
}

// Issuer is a CA certificate with its key, and what links it to a root. It never changes and cannot
// print its key. It is safe for concurrent use if the key is, as the keys of [NewKey] are.
type Issuer struct {
	chain []*x509.Certificate // this CA first
	id    spiffe.ID           // of the CA; zero if the certificate has none
	key   func() crypto.Signer
}

// seal puts a secret where package fmt cannot follow it. A struct may have an Issuer in an unexported
// field, and then fmt calls no String method and, for a verb that does not fit, follows pointers too.
func seal[T any](secret T) func() T { return func() T { return secret } }

// NewIssuer returns an Issuer for an existing CA. The chain has the CA certificate first and then each
// certificate that signed the one before; it may, but need not, end with the root. The slice is copied,
// the certificates are shared and must not be changed.
//
// The CA certificate must have the CA flag and certificate signing among its key usages (X5-8, X5-17),
// a subject, and a key that is strong enough and belongs to key. It need not have a SPIFFE ID (X5-10),
// but if it has one, that is one without a path (X5-9), and [Issuer.IssueLeaf] signs for that trust
// domain only. Whether it is expired shows when it signs. The error is a [*ProfileError].
func NewIssuer(chain []*x509.Certificate, key crypto.Signer) (*Issuer, error) {
	fail := func(rule, reason string, err error) (*Issuer, error) {
		return nil, &ProfileError{What: whatIssuer, Rule: rule, Reason: reason, Err: err}
	}
	switch {
	case len(chain) == 0 || slices.Contains(chain, nil):
		return fail("", "no CA certificate", nil)
	case key == nil:
		return fail("", "no private key", nil)
	}
	ca := chain[0]
	if err := checkKey(ca.PublicKey); err != nil {
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
	for i := range len(chain) - 1 {
		if err := chain[i].CheckSignatureFrom(chain[i+1]); err != nil {
			return fail("X5-30", fmt.Sprintf("certificate %d of the chain is not signed by the next", i+1), err)
		}
	}
	return &Issuer{chain: slices.Clone(chain), id: id, key: seal(key)}, nil
}

// NewRoot makes a self-signed CA certificate for key and returns an Issuer for it. The public key in o
// may be nil; if it is not, it is that of key. The error is a [*ProfileError], or says why key did not
// sign.
func NewRoot(key crypto.Signer, o CAOptions) (*Issuer, error) {
	if key == nil {
		return nil, &ProfileError{What: whatCA, Reason: "no private key"}
	}
	if o.PublicKey != nil && !PublicKeysEqual(o.PublicKey, key.Public()) {
		return nil, &ProfileError{What: whatCA, Err: ErrKeyMismatch}
	}
	o.PublicKey = key.Public()
	tmpl, err := o.template()
	if err != nil {
		return nil, err
	}
	cert, err := sign(whatCA, tmpl, tmpl, o.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return NewIssuer([]*x509.Certificate{cert}, key)
}

// Certificate returns the CA certificate. It is shared and must not be changed.
func (i *Issuer) Certificate() *x509.Certificate { return i.chain[0] }

// Chain returns the CA certificate and what links it to its root: a new slice of shared certificates.
func (i *Issuer) Chain() []*x509.Certificate { return slices.Clone(i.chain) }

// String returns the subject of the CA.
func (i Issuer) String() string { return "pki.Issuer(" + i.subject() + ")" }

// GoString returns the same as String, so that %#v does not show the key.
func (i Issuer) GoString() string { return i.String() }

// LogValue implements [slog.LogValuer]: the subject and the end of the CA certificate.
func (i Issuer) LogValue() slog.Value {
	if len(i.chain) == 0 {
		return slog.StringValue(i.String())
	}
	return slog.GroupValue(slog.String("subject", i.subject()), slog.Time("not_after", i.chain[0].NotAfter))
}

func (i Issuer) subject() string {
	if len(i.chain) == 0 {
		return ""
	}
	return i.chain[0].Subject.String()
}

// IssueLeaf signs an X.509-SVID for a workload. The caller vouches for every name in o.
//
// Everything is checked before anything is signed: the ID has a path (X5-6) and belongs to the trust
// domain of the issuer, if that has an ID (X5-11); crypto/x509 can read the trust domain
// ([ErrUnreadableTrustDomain]); the key is strong enough ([ErrWeakKey]) and not the issuer's own; DNS
// names and addresses are valid and few enough ([ErrSAN], [spiffe.ErrTooLarge]); the validity is not
// empty and ends with the issuer's or before ([ErrOutlivesIssuer]). The error is a [*ProfileError], or
// says why the issuer's key did not sign.
//
// Name constraints of an issuer from elsewhere are not evaluated: who verifies the chain does that.
func (i *Issuer) IssueLeaf(o LeafOptions) (*x509.Certificate, error) {
	tmpl, err := o.template()
	if err != nil {
		return nil, err
	}
	ca := i.Certificate()
	fail := func(rule, reason string, err error) (*x509.Certificate, error) {
		return nil, &ProfileError{What: whatLeaf, Rule: rule, Reason: reason, Err: err}
	}
	switch {
	case !i.id.IsZero() && !o.ID.MemberOf(i.id.TrustDomain()):
		return fail("X5-11", fmt.Sprintf("%s is not in %s, the trust domain of the issuer", o.ID, i.id.TrustDomain()), nil)
	case tmpl.NotAfter.After(ca.NotAfter):
		return fail("", fmt.Sprintf("NotAfter is %s later than the issuer's", tmpl.NotAfter.Sub(ca.NotAfter)), ErrOutlivesIssuer)
	case PublicKeysEqual(o.PublicKey, ca.PublicKey):
		return fail("X5-5", "the key is the issuer's own", nil)
	}
	return sign(whatLeaf, tmpl, ca, o.PublicKey, i.key())
}

// IssueCA signs the certificate of a CA below this one, of the same or, as the standard allows
// (X5-12), of another trust domain. The checks are those of [Issuer.IssueLeaf] as far as they apply;
// also, the issuer's own path length must leave room for another CA (X5-14).
func (i *Issuer) IssueCA(o CAOptions) (*x509.Certificate, error) {
	tmpl, err := o.template()
	if err != nil {
		return nil, err
	}
	ca := i.Certificate()
	fail := func(rule, reason string, err error) (*x509.Certificate, error) {
		return nil, &ProfileError{What: whatCA, Rule: rule, Reason: reason, Err: err}
	}
	switch room, limited := pathLen(ca); {
	case limited && room == 0:
		return fail("X5-14", "the path length of the issuer is 0, which allows no CA below it", nil)
	case limited && o.MaxPathLen != nil && *o.MaxPathLen >= room:
		return fail("X5-14", fmt.Sprintf("path length %d, the issuer's of %d allows at most %d", *o.MaxPathLen, room, room-1), nil)
	case tmpl.NotAfter.After(ca.NotAfter):
		return fail("", fmt.Sprintf("NotAfter is %s later than the issuer's", tmpl.NotAfter.Sub(ca.NotAfter)), ErrOutlivesIssuer)
	case PublicKeysEqual(o.PublicKey, ca.PublicKey):
		return fail("", "the key is the issuer's own", nil)
	}
	return sign(whatCA, tmpl, ca, o.PublicKey, i.key())
}

// template checks o and returns what to sign.
func (o *LeafOptions) template() (*x509.Certificate, error) {
	fail := func(rule, reason string, err error) (*x509.Certificate, error) {
		return nil, &ProfileError{What: whatLeaf, Rule: rule, Reason: reason, Err: err}
	}
	switch {
	case o.ID.IsZero():
		return fail("X5-1", "no SPIFFE ID", nil)
	case o.ID.Path() == "":
		return fail("X5-6", fmt.Sprintf("%s has no path", o.ID), nil)
	}
	if err := checkReadable(o.ID.TrustDomain()); err != nil {
		return fail("GO-3", o.ID.TrustDomain().String(), err)
	}
	if err := checkKey(o.PublicKey); err != nil {
		return fail("", "", err)
	}
	sans := make([]SAN, 1, 1+len(o.DNSNames)+len(o.IPs))
	sans[0] = IDSAN(o.ID)
	for _, name := range o.DNSNames {
		if err := checkDNSName(name); err != nil {
			return fail("", "", err)
		}
		sans = append(sans, DNSSAN(name))
	}
	for _, ip := range o.IPs {
		s, err := ipSAN(ip)
		if err != nil {
			return fail("", "", err)
		}
		sans = append(sans, s)
	}
	tmpl, err := newTemplate(o.NotBefore, o.NotAfter, o.CommonName == "", sans...)
	if err != nil {
		return fail("", "", err)
	}
	if o.CommonName != "" {
		if err := checkCommonName(o.CommonName); err != nil {
			return fail("", "", err)
		}
		tmpl.Subject = pkix.Name{CommonName: o.CommonName}
	}
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	if _, ok := o.PublicKey.(*rsa.PublicKey); ok {
		tmpl.KeyUsage |= x509.KeyUsageKeyEncipherment
	}
	tmpl.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	return tmpl, nil
}

// template checks o and returns what to sign.
func (o *CAOptions) template() (*x509.Certificate, error) {
	fail := func(rule, reason string, err error) (*x509.Certificate, error) {
		return nil, &ProfileError{What: whatCA, Rule: rule, Reason: reason, Err: err}
	}
	if o.TrustDomain.IsZero() {
		return fail("X5-10", "no trust domain", nil)
	}
	if err := checkReadable(o.TrustDomain); err != nil {
		return fail("GO-3", o.TrustDomain.String(), err)
	}
	if err := checkKey(o.PublicKey); err != nil {
		return fail("", "", err)
	}
	if o.MaxPathLen != nil && *o.MaxPathLen < 0 {
		return fail("X5-14", fmt.Sprintf("path length %d", *o.MaxPathLen), nil)
	}
	keyID, err := keyID(o.PublicKey)
	if err != nil {
		return fail("", "", err)
	}
	subject := pkix.Name{SerialNumber: hex.EncodeToString(keyID)}
	switch name := o.TrustDomain.String(); {
	case len(o.Organization) > maxOrganization:
		return fail("", fmt.Sprintf("the organization has %d bytes, the limit is %d", len(o.Organization), maxOrganization), nil)
	case o.Organization != "":
		if err := checkText("organization", o.Organization); err != nil {
			return fail("", "", err)
		}
		subject.Organization = []string{o.Organization}
	case len(name) <= maxOrganization:
		subject.Organization = []string{name}
	}
	tmpl, err := newTemplate(o.NotBefore, o.NotAfter, false, IDSAN(o.TrustDomain.ID()))
	if err != nil {
		return fail("", "", err)
	}
	tmpl.Subject = subject
	tmpl.SubjectKeyId = keyID
	tmpl.IsCA = true
	tmpl.MaxPathLen = -1
	if o.MaxPathLen != nil {
		tmpl.MaxPathLen, tmpl.MaxPathLenZero = *o.MaxPathLen, *o.MaxPathLen == 0
	}
	tmpl.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	return tmpl, nil
}

const maxOrganization = 64 // bytes; RFC 5280 calls it ub-organization-name

// newTemplate returns what every certificate of ours has.
func newTemplate(notBefore, notAfter time.Time, criticalSANs bool, sans ...SAN) (*x509.Certificate, error) {
	if notBefore.IsZero() || notAfter.IsZero() {
		return nil, errors.New("NotBefore and NotAfter are required")
	}
	notBefore, notAfter = notBefore.UTC().Truncate(time.Second), notAfter.UTC().Truncate(time.Second)
	switch {
	case !notAfter.After(notBefore):
		return nil, fmt.Errorf("NotAfter %s is not after NotBefore %s", notAfter.Format(time.RFC3339), notBefore.Format(time.RFC3339))
	case notBefore.Year() < 1950 || notAfter.Year() > 9999:
		return nil, errors.New("the years must be 1950 to 9999")
	}
	value, err := marshalSANs(sans)
	if err != nil {
		return nil, err
	}
	return &x509.Certificate{
		SerialNumber:          newSerial(),
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		BasicConstraintsValid: true,
		ExtraExtensions:       []pkix.Extension{{Id: oidSAN(), Critical: criticalSANs, Value: value}},
	}, nil
}

// newSerial returns a random number from 1 to 2^128-1.
func newSerial() *big.Int {
	var b [16]byte
	for {
		_, _ = rand.Read(b[:]) // it does not fail
		if n := new(big.Int).SetBytes(b[:]); n.Sign() > 0 {
			return n
		}
	}
}

func sign(what string, tmpl, parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) (*x509.Certificate, error) {
	if parent != tmpl {
		// CreateCertificate leaves it out if the subjects are the same, whatever the keys.
		tmpl.AuthorityKeyId = parent.SubjectKeyId
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, pub, key) // verifies its own signature
	if err != nil {
		return nil, fmt.Errorf("pki: %s: sign: %w", what, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("pki: %s: read back: %w", what, err)
	}
	return cert, nil
}

// checkReadable refuses the trust domains whose certificates crypto/x509 cannot read.
func checkReadable(td spiffe.TrustDomain) error {
	if name := "." + td.String() + "."; strings.Contains(name, "..") {
		return ErrUnreadableTrustDomain
	}
	return nil
}

// keyID returns the key identifier of RFC 7093, section 2, method 1, which is also that of
// CreateCertificate for CAs.
func keyID(pub crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return nil, err
	}
	spki := cryptobyte.String(der)
	var bits []byte
	if !spki.ReadASN1(&spki, asn1.SEQUENCE) || !spki.SkipASN1(asn1.SEQUENCE) || !spki.ReadASN1BitStringAsBytes(&bits) {
		return nil, errors.New("the public key has no DER form")
	}
	h := sha256.Sum256(bits)
	return h[:20], nil
}

// pathLen returns the path length constraint of ca, if there is one.
func pathLen(ca *x509.Certificate) (n int, limited bool) {
	return ca.MaxPathLen, ca.MaxPathLen > 0 || ca.MaxPathLen == 0 && ca.MaxPathLenZero
}

// caID returns the SPIFFE ID of a CA certificate, or the zero ID if it has none.
func caID(ca *x509.Certificate) (spiffe.ID, error) {
	var id spiffe.ID
	for _, ext := range ca.Extensions {
		if !ext.Id.Equal(oidSAN()) {
			continue
		}
		sans, err := parseSANs(ext.Value)
		if err != nil {
			return spiffe.ID{}, err
		}
		for _, s := range sans {
			if s.Type != URI || !strings.HasPrefix(s.Value, "spiffe:") {
				continue
			}
			if !id.IsZero() {
				return spiffe.ID{}, errors.New("the certificate has two SPIFFE IDs")
			}
			if id, err = spiffe.ParseID(s.Value); err != nil {
				return spiffe.ID{}, err
			}
			if id.Path() != "" {
				return spiffe.ID{}, fmt.Errorf("%s has a path, as only a workload's ID should", id)
			}
		}
	}
	return id, nil
}
