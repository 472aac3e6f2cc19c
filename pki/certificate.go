package pki

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/spiffe"
)

// errUnreadable says that the name of a trust domain has an empty label, as in "a..b" or "a.": a legal SPIFFE ID
// whose certificates crypto/x509 cannot read.
var errUnreadable = errors.New("crypto/x509 cannot read a trust domain name with an empty label")

// errOutlivesIssuer says that a certificate would end later than its issuer's certificate, and so stop working early.
var errOutlivesIssuer = errors.New("the certificate would outlive its issuer")

// ProfileError says why a certificate was not signed, or why a CA certificate cannot sign.
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
// Everything else is fixed. The key usage is digital signature; an RSA key adds key encipherment, and a CA adds
// certificate and CRL signing. Key usage and basic constraints are critical. A CA has a key identifier, which the
// certificates it signs refer to.
//
// A certificate with a SPIFFE ID is an X.509-SVID: the ID is its only URI. A workload's ID has a path; a CA's ID is
// its trust domain's, without a path.
type CertificateOptions struct {
	PublicKey crypto.PublicKey // required, such as CSR.PublicKey; NewRoot takes it from its key

	// SANs are the names, by the rules of [CSROptions.SANs]. The extension is critical if the subject is empty. Only
	// a CA, or a leaf with a subject, may have no names.
	SANs []SAN

	// Organization and CommonName make the subject. Each is optional; more than 64 bytes are refused, not cut. The
	// common name is for old readers that do not know alternative names; it is never an identity.
	//
	// A CA's subject also has the key identifier in hexadecimal as serial number, so two keys never share a subject,
	// and a certificate renewed with its key keeps it. A CA's organization defaults to the name of its trust domain,
	// if that fits.
	Organization string
	CommonName   string

	CA         bool // makes a CA certificate; the next two fields are for CAs only
	MaxPathLen *int // how many CAs may follow below; nil means any number

	// PermittedTrustDomains limits the certificates below this CA, at any depth: the host of a URI must be exactly
	// one of these trust domains. The extension is critical. Empty means no limit.
	//
	// RFC 5280 and crypto/x509 disagree on whether a host name covers the hosts below it, so those are excluded by
	// name. A list that the extension cannot express is refused: a trust domain that looks like an IP address, has an
	// empty label or is below another of the list. Verifiers that do not know URI constraints refuse every
	// certificate below such a CA: check yours.
	PermittedTrustDomains []spiffe.TrustDomain

	// ExtKeyUsage lists the extended key usages. Nil means server and client authentication for a leaf, and no
	// extension for a CA. An empty list that is not nil means no extension.
	ExtKeyUsage []x509.ExtKeyUsage

	// NotBefore and NotAfter are required; fractions of a second are cut off. Set NotBefore a minute or two back for
	// verifiers whose clocks are slow.
	NotBefore, NotAfter time.Time

	// SerialNumber is positive, has at most 20 octets, and must be unique per issuer (RFC 5280, section 4.1.2.2). Nil
	// means 128 random bits, which suits every CA that does not encode something in the number.
	SerialNumber *big.Int
}

// what returns the name of the certificate's kind, for errors.
func (o *CertificateOptions) what() string {
	if o.CA {
		return whatCA
	}
	return whatLeaf
}

// template checks o as far as possible without an issuer. It returns the certificate to sign, and its SPIFFE ID, if
// any.
func (o *CertificateOptions) template() (*x509.Certificate, spiffe.ID, error) {
	id, rule, err := o.checkNames()
	if err != nil {
		return nil, id, o.error(rule, "", err)
	}
	if err := certpem.CheckKey(o.PublicKey); err != nil {
		return nil, id, o.error("", "", err)
	}
	tmpl, err := newTemplate(o.NotBefore, o.NotAfter)
	if err != nil {
		return nil, id, o.error("", "", err)
	}
	if o.SerialNumber != nil {
		if o.SerialNumber.Sign() <= 0 || o.SerialNumber.BitLen() > maxSerialBits {
			return nil, id, o.error("", "the serial number is not positive, or has more than 20 octets", nil)
		}
		tmpl.SerialNumber = new(big.Int).Set(o.SerialNumber)
	}
	tmpl.PublicKey = o.PublicKey
	if err := o.setNames(tmpl, id.TrustDomain()); err != nil {
		return nil, id, o.error("", "", err)
	}
	if tmpl.ExtKeyUsage, rule, err = o.extKeyUsage(!id.IsZero()); err != nil {
		return nil, id, o.error(rule, "", err)
	}
	if o.CA {
		return tmpl, id, o.setCA(tmpl)
	}
	if o.MaxPathLen != nil || len(o.PermittedTrustDomains) > 0 {
		return nil, id, o.error("", "a path length or permitted trust domains, which are for CAs only", nil)
	}
	tmpl.KeyUsage = x509.KeyUsageDigitalSignature
	if _, ok := o.PublicKey.(*rsa.PublicKey); ok {
		tmpl.KeyUsage |= x509.KeyUsageKeyEncipherment
	}
	return tmpl, id, nil
}

// error returns the error for a certificate that is not signed.
func (o *CertificateOptions) error(rule, reason string, err error) error {
	return &ProfileError{What: o.what(), Rule: rule, Reason: reason, Err: err}
}

// setNames sets the subject and the alternative names.
func (o *CertificateOptions) setNames(tmpl *x509.Certificate, td spiffe.TrustDomain) (err error) {
	organization := o.Organization
	if name := td.String(); o.CA && organization == "" && !td.IsZero() && len(name) <= maxOrganization {
		organization = name
	}
	if tmpl.Subject, err = subject(organization, o.CommonName); err != nil {
		return err
	}
	named := o.Organization != "" || o.CommonName != "" || o.CA // in the subject
	if len(o.SANs) == 0 {
		if !named {
			return sanError("there is no name, and no subject either")
		}
		return nil
	}
	value, err := marshalSANs(o.SANs)
	tmpl.ExtraExtensions = []pkix.Extension{{Id: oidSAN(), Critical: !named, Value: value}}
	return err
}

// setCA sets what only a CA certificate has.
func (o *CertificateOptions) setCA(tmpl *x509.Certificate) (err error) {
	tmpl.IsCA, tmpl.MaxPathLen, tmpl.KeyUsage = true, -1, x509.KeyUsageCertSign|x509.KeyUsageCRLSign
	if o.MaxPathLen != nil {
		if *o.MaxPathLen < 0 {
			return o.error("X5-14", fmt.Sprintf("path length %d", *o.MaxPathLen), nil)
		}
		tmpl.MaxPathLen, tmpl.MaxPathLenZero = *o.MaxPathLen, *o.MaxPathLen == 0
	}
	if tmpl.SubjectKeyId, err = keyID(o.PublicKey); err != nil {
		return o.error("", "", err)
	}
	tmpl.Subject.SerialNumber = hex.EncodeToString(tmpl.SubjectKeyId)
	if err := o.constrain(tmpl); err != nil {
		return o.error("X5-15", "", err)
	}
	return nil
}

// checkNames checks the SANs one by one. A certificate with a SPIFFE ID has no other URI; a leaf's ID has a path, a
// CA's has none.
func (o *CertificateOptions) checkNames() (id spiffe.ID, rule string, err error) {
	id, uris, err := findID(o.SANs)
	switch {
	case err != nil && o.CA && slices.Contains(o.SANs, IDSAN(spiffe.ID{})):
		return id, "X5-10", err
	case err != nil:
		return id, "X5-1", err
	}
	for _, s := range o.SANs {
		if err := s.checkRequested(); errors.Is(err, errUnreadable) {
			return id, "GO-3", fmt.Errorf("%s: %w", id.TrustDomain(), err)
		} else if err != nil {
			return id, "", err
		}
	}
	switch {
	case id.IsZero():
	case uris > 1:
		return id, "X5-1", sanError("there is another URI beside the SPIFFE ID")
	case o.CA && id.Path() != "":
		return id, "X5-9", fmt.Errorf("%s has a path, as only a workload's ID should", id)
	case !o.CA && id.Path() == "":
		return id, "X5-6", fmt.Errorf("%s has no path", id)
	}
	return id, "", nil
}

// findID returns the SPIFFE ID among names, or the zero ID if there is none, and the number of URIs.
func findID(sans []SAN) (id spiffe.ID, uris int, err error) {
	for _, s := range sans {
		if s.Type != URI {
			continue
		}
		uris++
		switch {
		case s.Value == "": // IDSAN of the zero ID
			return id, uris, sanError("the SPIFFE ID is empty")
		case !strings.HasPrefix(s.Value, "spiffe:"):
		case !id.IsZero():
			return id, uris, sanError("there are two SPIFFE IDs")
		default:
			if id, err = spiffe.ParseID(s.Value); err != nil {
				return id, uris, fmt.Errorf("%w: %w", errSAN, err)
			}
		}
	}
	return id, uris, nil
}

// extKeyUsage returns the default extended key usages, or those in o after checking them.
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
	return usage, "", nil
}

// newTemplate returns the fields that all our certificates share.
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
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 128))
	return &x509.Certificate{
		SerialNumber:          serial,
		NotBefore:             notBefore,
		NotAfter:              notAfter,
		BasicConstraintsValid: true,
	}, err
}

// checkReadable refuses the trust domains whose certificates crypto/x509 cannot read.
func checkReadable(td spiffe.TrustDomain) error {
	if !readableHost(td.String()) {
		return errUnreadable
	}
	return nil
}

// readableHost reports whether crypto/x509 reads a URI with this host: printable ASCII without empty labels, or no
// host.
func readableHost(host string) bool {
	return host == "" || !strings.Contains("."+host+".", "..") && !strings.Contains(host, " ") && printable(host)
}

// keyID returns the key identifier of RFC 7093, section 2, method 1, which x509.CreateCertificate also uses for CAs.
func keyID(pub crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		return nil, err
	}
	var spki struct {
		Algorithm asn1.RawValue
		Key       asn1.BitString
	}
	if _, err := asn1.Unmarshal(der, &spki); err != nil {
		return nil, err
	}
	h := sha256.Sum256(spki.Key.Bytes)
	return h[:20], nil
}
