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
	"math/big"
	"slices"
	"strings"
	"time"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/spiffe"
)

// errUnreadable says that crypto/x509 cannot read certificates of a trust domain: its name has an empty label, as in
// "a..b" or "a.". Such names are legal SPIFFE IDs.
var errUnreadable = errors.New("crypto/x509 cannot read a trust domain name with an empty label")

// errOutlivesIssuer says that a certificate would end later than the certificate that signs it, so that it
// would stop working early.
var errOutlivesIssuer = errors.New("the certificate would outlive its issuer")

// ProfileError says why a certificate was not signed, or cannot be signed with.
type ProfileError struct {
	What   string // "leaf", "CA certificate" or "issuer"
	Rule   string // the broken rule of spiffe/CONFORMANCE.md; empty for a rule of this package
	Reason string // the rule in words
	Err    error  // such as ErrWeakKey or ErrKeyMismatch, or nil
}

func (e *ProfileError) Error() string {
	text := "pki: " + e.What
	if e.Reason != "" {
		text += ": " + e.Reason
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap returns e.Err.
func (e *ProfileError) Unwrap() error { return e.Err }

const (
	whatLeaf   = "leaf"
	whatCA     = "CA certificate"
	whatIssuer = "issuer"
)

// CertificateOptions are the contents of a certificate. Only the public key may come from a [CSR].
//
// Everything else is fixed. The key usage is digital signature, for an RSA key also key encipherment, and for a CA
// certificate and CRL signing; it and the basic constraints are critical. A CA has a key identifier, and what it signs
// names that.
//
// A certificate with a SPIFFE ID is an X.509-SVID and has to keep the rules of one: the ID is its only URI. That of a
// workload has a path, and that of a CA, which is the ID of its trust domain, has none.
type CertificateOptions struct {
	PublicKey crypto.PublicKey // required, such as CSR.PublicKey; NewRoot takes it from its key

	// SANs are the names, by the rules of [CSROptions.SANs]; they are critical if the subject is empty.
	// Only a CA, or a leaf with a subject, may have none.
	SANs []SAN

	// Organization and CommonName make the subject; each is optional and has at most 64 bytes, which are not cut but
	// refused beyond that. The common name is for readers that do not know alternative names ("dual use") and never an
	// identity.
	//
	// The subject of a CA also has the key identifier in hexadecimal as serial number: two keys never share a subject,
	// and a certificate that is renewed with its key keeps it. Its organization is by default the name of its trust
	// domain, if that is not longer.
	Organization string
	CommonName   string

	CA         bool // makes a CA certificate; the next three fields are for CAs only
	MaxPathLen *int // how many CAs may follow below; nil means any number

	// PermittedTrustDomains limits what may be below this CA, at any depth: the host of a URI must be
	// exactly one of these trust domains. The extension is critical. It says nothing of DNS names and
	// addresses, which PermittedDNSDomains is for. Empty means no limit.
	//
	// RFC 5280 and crypto/x509 do not agree whether the name of a host covers the hosts below it, so the hosts below
	// are excluded by name. What no such extension can express is refused: a trust domain that looks like an IP
	// address, one that is below another of the list, and one with an empty label. Verifiers that do not know
	// constraints of URIs refuse every certificate below such a CA: see that yours do.
	PermittedTrustDomains []spiffe.TrustDomain

	// PermittedDNSDomains limits the DNS names below this CA to these domains and what is below them.
	// Empty means no limit.
	PermittedDNSDomains []string

	// ExtKeyUsage is by default, nil, both server and client authentication, and for a CA no extension.
	// A list that is empty and not nil means no extension.
	ExtKeyUsage []x509.ExtKeyUsage

	// NotBefore and NotAfter are required; fractions of a second are cut off. A NotBefore of a minute or
	// two ago is for verifiers whose clocks are slow.
	NotBefore, NotAfter time.Time

	// SerialNumber is positive, has at most 20 octets, and is not used twice by one issuer (RFC 5280,
	// section 4.1.2.2). Nil means 128 random bits, which is right for everything but a CA that keeps
	// something in the number.
	SerialNumber *big.Int
}

// what names the certificate in errors.
func (o *CertificateOptions) what() string {
	if o.CA {
		return whatCA
	}
	return whatLeaf
}

// template checks o as far as that is possible without an issuer. It returns what to sign, and the
// SPIFFE ID in it, if there is one.
func (o *CertificateOptions) template() (*x509.Certificate, spiffe.ID, error) {
	fail := func(rule, reason string, err error) (*x509.Certificate, spiffe.ID, error) {
		return nil, spiffe.ID{}, &ProfileError{What: o.what(), Rule: rule, Reason: reason, Err: err}
	}
	id, rule, err := o.checkNames()
	if err != nil {
		return fail(rule, "", err)
	}
	if err := certpem.CheckKey(o.PublicKey); err != nil {
		return fail("", "", err)
	}
	tmpl, err := newTemplate(o.NotBefore, o.NotAfter)
	if err != nil {
		return fail("", "", err)
	}
	if o.SerialNumber != nil {
		if o.SerialNumber.Sign() <= 0 || o.SerialNumber.BitLen() > maxSerialBits {
			return fail("", "the serial number is not positive, or has more than 20 octets", nil)
		}
		tmpl.SerialNumber = new(big.Int).Set(o.SerialNumber)
	}
	tmpl.PublicKey = o.PublicKey
	organization := o.Organization
	if name := id.TrustDomain().String(); o.CA && !id.IsZero() && organization == "" && len(name) <= maxOrganization {
		organization = name
	}
	if tmpl.Subject, err = subject(organization, o.CommonName); err != nil {
		return fail("", "", err)
	}
	named := o.Organization != "" || o.CommonName != "" || o.CA // in the subject
	switch {
	case len(o.SANs) > 0:
		value, err := marshalSANs(o.SANs)
		if err != nil {
			return fail("", "", err)
		}
		tmpl.ExtraExtensions = []pkix.Extension{{Id: oidSAN(), Critical: !named, Value: value}}
	case !named:
		return fail("", "", sanError("there is no name, and no subject either"))
	}
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	if _, ok := o.PublicKey.(*rsa.PublicKey); ok {
		tmpl.KeyUsage |= x509.KeyUsageKeyEncipherment
	}
	if tmpl.ExtKeyUsage, rule, err = o.extKeyUsage(!id.IsZero()); err != nil {
		return fail(rule, "", err)
	}
	if !o.CA {
		if o.MaxPathLen != nil || len(o.PermittedTrustDomains) > 0 || len(o.PermittedDNSDomains) > 0 {
			return fail("", "a path length or permitted names, which are for CAs only", nil)
		}
		return tmpl, id, nil
	}
	tmpl.IsCA, tmpl.MaxPathLen, tmpl.KeyUsage = true, -1, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	if o.MaxPathLen != nil {
		if *o.MaxPathLen < 0 {
			return fail("X5-14", fmt.Sprintf("path length %d", *o.MaxPathLen), nil)
		}
		tmpl.MaxPathLen, tmpl.MaxPathLenZero = *o.MaxPathLen, *o.MaxPathLen == 0
	}
	if tmpl.SubjectKeyId, err = keyID(o.PublicKey); err != nil {
		return fail("", "", err)
	}
	tmpl.Subject.SerialNumber = hex.EncodeToString(tmpl.SubjectKeyId)
	if err := o.constrain(tmpl); err != nil {
		return fail("X5-15", "", err)
	}
	return tmpl, id, nil
}

// checkNames checks the SANs one by one. A certificate with a SPIFFE ID has no other URI;
// a leaf's has a path and a CA's has none.
func (o *CertificateOptions) checkNames() (id spiffe.ID, rule string, err error) {
	uris := 0
	for _, s := range o.SANs {
		if s.Type == URI {
			uris++
			if s.Value == "" { // IDSAN of the zero ID
				if rule = "X5-1"; o.CA {
					rule = "X5-10"
				}
				return spiffe.ID{}, rule, sanError("the SPIFFE ID is empty")
			}
		}
		if s.Type != URI || !strings.HasPrefix(s.Value, "spiffe:") {
			if err := s.checkRequested(); err != nil {
				return spiffe.ID{}, "", err
			}
			continue
		}
		if !id.IsZero() {
			return spiffe.ID{}, "X5-1", sanError("there are two SPIFFE IDs")
		}
		if id, err = spiffe.ParseID(s.Value); err != nil {
			return spiffe.ID{}, "X5-1", fmt.Errorf("%w: %w", errSAN, err)
		}
		if err := checkReadable(id.TrustDomain()); err != nil {
			return spiffe.ID{}, "GO-3", fmt.Errorf("%s: %w", id.TrustDomain(), err)
		}
	}
	switch {
	case id.IsZero():
	case uris > 1:
		return spiffe.ID{}, "X5-1", sanError("there is another URI beside the SPIFFE ID")
	case o.CA && id.Path() != "":
		return spiffe.ID{}, "X5-9", fmt.Errorf("%s has a path, as only a workload's ID should", id)
	case !o.CA && id.Path() == "":
		return spiffe.ID{}, "X5-6", fmt.Errorf("%s has no path", id)
	}
	return id, "", nil
}

// extKeyUsage returns the extended key usage, which is the usual one or, after a check, the one in o.
func (o *CertificateOptions) extKeyUsage(svid bool) (usage []x509.ExtKeyUsage, rule string, err error) {
	const server, client = x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth
	switch usage = o.ExtKeyUsage; {
	case usage == nil && o.CA:
		return nil, "", nil
	case usage == nil:
		return []x509.ExtKeyUsage{server, client}, "", nil
	case !o.CA && svid && len(usage) > 0 && !(slices.Contains(usage, server) && slices.Contains(usage, client)):
		return nil, "X5-20", errors.New("the extended key usage does not include both server " +
			"and client authentication")
	}
	for n, u := range usage {
		if u < x509.ExtKeyUsageAny || u > x509.ExtKeyUsageMicrosoftKernelCodeSigning || slices.Contains(usage[:n], u) {
			return nil, "", fmt.Errorf("extended key usage %d is not known, or there twice", int(u))
		}
	}
	return usage, "", nil
}

// newTemplate returns what every certificate of ours has.
func newTemplate(notBefore, notAfter time.Time) (*x509.Certificate, error) {
	if notBefore.IsZero() || notAfter.IsZero() {
		return nil, errors.New("NotBefore and NotAfter are required")
	}
	notBefore, notAfter = notBefore.UTC().Truncate(time.Second), notAfter.UTC().Truncate(time.Second)
	switch {
	case !notAfter.After(notBefore):
		return nil, fmt.Errorf("NotAfter %s is not after NotBefore %s", notAfter.UTC().Format(time.RFC3339),
			notBefore.UTC().Format(time.RFC3339))
	case notBefore.Year() < 1950 || notAfter.Year() > 9999:
		return nil, errors.New("the years must be 1950 to 9999")
	}
	return &x509.Certificate{
		SerialNumber:          newSerial(),
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		BasicConstraintsValid: true,
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

// checkReadable refuses the trust domains whose certificates crypto/x509 cannot read.
func checkReadable(td spiffe.TrustDomain) error {
	if !readableHost(td.String()) {
		return errUnreadable
	}
	return nil
}

// readableHost reports whether crypto/x509 reads a URI with this host, which may be empty: it takes
// printable ASCII without empty labels.
func readableHost(host string) bool {
	return host == "" || !strings.Contains("."+host+".", "..") && !strings.Contains(host, " ") && printable(host)
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
