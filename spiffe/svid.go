package spiffe

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/tokens/jws"
)

type redacted = redact.Text // an alias, so that the embedded field is not exported

// SVID is an X.509-SVID with its private key: the identity that a program has. It never changes and
// is safe for concurrent use. It is an [SVIDSource] of itself.
//
// It prints as its ID, and in package log/slog as a group of "id" and "not_after". No printer shows the key;
// [SVID.MarshalDER] and [SVID.MarshalPEM] return it.
type SVID struct {
	redacted
	id    ID
	chain []*x509.Certificate
	other *SVID                   // the alternative
	tls   func() *tls.Certificate // a func, because no printer looks into one, not even by reflection
}

// NewSVID returns the SVID made of a chain, leaf first, and the leaf's private key, which may live
// in hardware. The leaf must be an X.509-SVID of a workload and the others CA certificates, or the error
// is a [*ParseError] with one of these rules:
//
//	X5-3   no URI name: not an X.509-SVID, but perhaps a good certificate of another kind
//	X5-13  a certificate after the leaf is no CA certificate
//	X5-17  a certificate after the leaf has a key usage without keyCertSign
//	X5-30  the subject alternative name is malformed or occurs twice
//	X5-32  a CA certificate, which signs and never authenticates
//	X5-33  the key usage has keyCertSign or cRLSign
//	X5-34  the scheme of the URI is not "spiffe"
//	X5-35  the ID has no path: it names a trust domain, not a workload
//	X5-36  more than one URI name, of any scheme
//	X5-37  the URI breaks another rule of SPIFFE-ID; Err is the ParseError of the ID
//	X5-40  no key usage, or one without digitalSignature
//
// The key must belong to the leaf. More than 16 certificates or an RSA key of more than 8192 bits give
// an error that wraps [ErrTooLarge], as every verifier would refuse them. The slice is copied; the
// certificates and the key are shared. NewSVID checks neither signatures nor validity, which need a
// bundle and the time: see [Verifier].
func NewSVID(chain []*x509.Certificate, key crypto.Signer) (*SVID, error) {
	if len(chain) == 0 {
		return nil, errors.New("spiffe: SVID: no certificate")
	}
	if err := certchain.CheckCost(chain); err != nil {
		return nil, fmt.Errorf("spiffe: SVID: chain: %w", err)
	}
	id, err := checkLeaf(chain[0])
	if err != nil {
		return nil, err
	}
	if err := checkSigners(chain[1:]); err != nil {
		return nil, err
	}
	if key == nil {
		return nil, fmt.Errorf("spiffe: SVID: %q: no private key", redact.Clip(id.s, maxInError))
	}
	if !jws.SameKey(key.Public(), chain[0].PublicKey) {
		return nil, fmt.Errorf("spiffe: SVID: %q: the private key does not belong to the first certificate",
			redact.Clip(id.s, maxInError))
	}
	cert := &tls.Certificate{PrivateKey: key, Leaf: chain[0], Certificate: make([][]byte, len(chain))}
	for i, c := range chain {
		cert.Certificate[i] = c.Raw
	}
	text := redact.New(id.s, slog.String("id", id.s), slog.Time("not_after", chain[0].NotAfter))
	return &SVID{redacted: text, id: id, chain: slices.Clone(chain), tls: func() *tls.Certificate { return cert }}, nil
}

// ParseSVID parses an SVID in the form of the Workload API: certificates in DER, concatenated, leaf first, and the
// private key in PKCS#8 DER, not encrypted. The rules and errors are as in [NewSVID]; input of more than 1 MiB gives
// an error that wraps [ErrTooLarge]. No error carries the input.
func ParseSVID(certsDER, keyDER []byte) (*SVID, error) {
	chain, err := parseChain(certsDER)
	if err != nil {
		return nil, fmt.Errorf("spiffe: SVID: %w", err)
	}
	key, err := certpem.PKCS8(keyDER)
	if err != nil {
		return nil, fmt.Errorf("spiffe: SVID: private key: %w", err)
	}
	return NewSVID(chain, key)
}

// parseChain stops at the seventeenth certificate; x509.ParseCertificates would parse thousands.
func parseChain(der []byte) ([]*x509.Certificate, error) {
	if len(der) > certpem.MaxInput {
		return nil, fmt.Errorf("certificates of %d bytes, the limit is %d: %w", len(der), certpem.MaxInput,
			ErrTooLarge)
	}
	var chain []*x509.Certificate
	for len(der) > 0 {
		if len(chain) == certchain.MaxChain {
			return nil, fmt.Errorf("more than %d certificates: %w", certchain.MaxChain, ErrTooLarge)
		}
		var one asn1.RawValue
		rest, err := asn1.Unmarshal(der, &one)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(chain)+1, err)
		}
		c, err := x509.ParseCertificate(one.FullBytes)
		if err != nil {
			return nil, fmt.Errorf("certificate %d: %w", len(chain)+1, err)
		}
		chain, der = append(chain, c), rest
	}
	return chain, nil
}

// ParseSVIDPEM parses an SVID from PEM: the CERTIFICATE blocks of certsPEM, leaf first, and the one private key of
// keyPEM, in PKCS#8, PKCS#1 or SEC1, not encrypted. A file that has both may be given twice: a private key in
// certsPEM and certificates in keyPEM are ignored. The rules and errors are as in [NewSVID]; each input may have up
// to 1 MiB. No error carries the input.
func ParseSVIDPEM(certsPEM, keyPEM []byte) (*SVID, error) {
	chain, err := certpem.CertificatesAmongKeys(certsPEM)
	if err != nil {
		return nil, fmt.Errorf("spiffe: SVID: certificates: %w", err)
	}
	key, err := certpem.PrivateKeyAmongCertificates(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("spiffe: SVID: private key: %w", err)
	}
	return NewSVID(chain, key)
}

// WithAlternative returns an SVID that is like s, and has another of the same ID whose key is ML-DSA. An endpoint of
// package spiffetls presents the alternative to peers that offer to verify such signatures, and s to all others, so
// that a trust domain can move from one to the other. Everything else takes s.
func (s *SVID) WithAlternative(alternative *SVID) (*SVID, error) {
	switch {
	case alternative == nil || alternative.id != s.id:
		return nil, fmt.Errorf("spiffe: SVID: %q: the alternative has another ID", redact.Clip(s.id.s, maxInError))
	case mldsa.Name(s.Leaf().PublicKey) != "" || mldsa.Name(alternative.Leaf().PublicKey) == "":
		return nil, fmt.Errorf("spiffe: SVID: %q: the alternative has a key of ML-DSA, and the first SVID has not",
			redact.Clip(s.id.s, maxInError))
	}
	both := *s
	both.other = alternative
	return &both, nil
}

// Alternative returns the SVID of [SVID.WithAlternative], or nil.
func (s *SVID) Alternative() *SVID { return s.other }

// ID returns the identity.
func (s *SVID) ID() ID { return s.id }

// Leaf returns the first certificate of the chain. It is shared and must not be changed.
func (s *SVID) Leaf() *x509.Certificate { return s.chain[0] }

// Chain returns the certificates as they are presented to peers, leaf first, in a new slice. The
// certificates are shared and must not be changed.
func (s *SVID) Chain() []*x509.Certificate { return slices.Clone(s.chain) }

// Signer returns the private key, to sign with.
func (s *SVID) Signer() crypto.Signer { return s.tls().PrivateKey.(crypto.Signer) }

// NotAfter returns the end of the leaf's validity.
func (s *SVID) NotAfter() time.Time { return s.chain[0].NotAfter }

// TLSCertificate returns the SVID as a certificate for crypto/tls. It is built once, is shared and must not be
// changed. Unlike the SVID it may show the key when it is printed.
func (s *SVID) TLSCertificate() *tls.Certificate { return s.tls() }

// MarshalDER returns the SVID in the form that [ParseSVID] reads, with the private key in the clear. A key that
// cannot be exported, because it lives in hardware, is an error.
func (s *SVID) MarshalDER() (certs, key []byte, err error) {
	key, err = x509.MarshalPKCS8PrivateKey(s.Signer())
	if err != nil {
		return nil, nil, fmt.Errorf("spiffe: SVID: %q: a key of type %T cannot be exported",
			redact.Clip(s.id.s, maxInError), s.Signer())
	}
	return bytes.Join(s.tls().Certificate, nil), key, nil
}

// MarshalPEM returns the SVID in the form that [ParseSVIDPEM] reads, with the private key in the clear as PKCS#8. A
// key that cannot be exported, because it lives in hardware, is an error.
func (s *SVID) MarshalPEM() (certs, key []byte, err error) {
	key, err = certpem.EncodePrivateKey(s.Signer())
	if err != nil {
		return nil, nil, fmt.Errorf("spiffe: SVID: %q: %w", redact.Clip(s.id.s, maxInError), err)
	}
	return certpem.EncodeCertificates(s.chain), key, nil
}

// SVID returns s, which makes a fixed identity an [SVIDSource]. The error is always nil.
func (s *SVID) SVID() (*SVID, error) { return s, nil }

// IDFromCertificate returns the SPIFFE ID in cert. A workload's certificate names the workload; a CA certificate
// names a trust domain, without a path. It reads the bytes of the extension, because cert.URIs has been normalised,
// and requires exactly one URI name, of any scheme. The error is a [*ParseError] with a rule as in [NewSVID].
//
// The result is a claim. A [Verifier] proves it.
func IDFromCertificate(cert *x509.Certificate) (ID, error) {
	uri, err := uriSAN(cert)
	if err != nil {
		return ID{}, err
	}
	id, err := ParseID(uri)
	if err == nil {
		return id, nil
	}
	e := invalid("X5-37", "the URI name is not a SPIFFE ID")
	e.Err = err
	if pe, ok := errors.AsType[*ParseError](err); ok && pe.Rule == "ID-2" {
		e.Rule = "X5-34"
	}
	return ID{}, e
}

// invalid returns the error of a certificate that is not an X.509-SVID.
func invalid(rule, reason string) *ParseError {
	return &ParseError{What: "X.509-SVID", Offset: -1, Rule: rule, Reason: reason}
}

var oidSubjectAltName = asn1.ObjectIdentifier{2, 5, 29, 17}

// uriSAN returns the one URI name of cert.
func uriSAN(cert *x509.Certificate) (string, error) {
	if cert == nil {
		return "", invalid("X5-3", "there is no certificate")
	}
	var found [][]byte
	for _, ext := range cert.Extensions {
		if ext.Id.Equal(oidSubjectAltName) {
			found = append(found, ext.Value)
		}
	}
	switch len(found) {
	case 0:
		return "", invalid("X5-3", "there is no subject alternative name, so no SPIFFE ID")
	case 1:
		return oneURI(found[0])
	}
	return "", invalid("X5-30", "the subject alternative name extension occurs twice")
}

// oneURI returns the one URI name of a subject alternative name extension.
func oneURI(san []byte) (string, error) {
	malformed := invalid("X5-30", "the subject alternative name is malformed")
	var names asn1.RawValue
	rest, err := asn1.Unmarshal(san, &names)
	if err != nil || len(rest) > 0 || names.Class != asn1.ClassUniversal || names.Tag != asn1.TagSequence ||
		!names.IsCompound {
		return "", malformed
	}
	uri, found := "", 0
	for rest = names.Bytes; len(rest) > 0; {
		var name asn1.RawValue
		if rest, err = asn1.Unmarshal(rest, &name); err != nil || name.Class != asn1.ClassContextSpecific {
			return "", malformed
		}
		if name.Tag != 6 { // uniformResourceIdentifier
			continue
		}
		if name.IsCompound {
			return "", malformed
		}
		uri = string(name.Bytes)
		found++
	}
	switch found {
	case 0:
		return "", invalid("X5-3", "there is no URI name, so no SPIFFE ID")
	case 1:
		return uri, nil
	}
	return "", invalid("X5-36", fmt.Sprintf("there are %d URI names, one is allowed", found))
}

// checkSigners applies the rules for the certificates above the leaf. Peers would build no path with one that breaks
// them. A key usage that is absent restricts nothing (RFC 5280, 4.2.1.3).
func checkSigners(signers []*x509.Certificate) error {
	for i, c := range signers {
		switch {
		case !c.BasicConstraintsValid || !c.IsCA:
			return invalid("X5-13", fmt.Sprintf("certificate %d of the chain is not a CA certificate", i+2))
		case c.KeyUsage != 0 && c.KeyUsage&x509.KeyUsageCertSign == 0:
			return invalid("X5-17", fmt.Sprintf("the key usage of certificate %d of the chain lacks keyCertSign", i+2))
		}
	}
	return nil
}

// checkLeaf applies the rules for the leaf of a workload and returns its ID, even with some errors.
func checkLeaf(leaf *x509.Certificate) (ID, error) {
	id, err := IDFromCertificate(leaf)
	if err != nil {
		return ID{}, err
	}
	refuse := func(rule, reason string) (ID, error) {
		return id, invalid(rule, reason)
	}
	const signing = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	switch {
	case leaf.IsCA: // before the path, which a signing certificate rightly lacks
		return refuse("X5-32", "it is a CA certificate")
	case id.Path() == "":
		return refuse("X5-35", "its ID has no path, so it names a trust domain and not a workload")
	case leaf.KeyUsage == 0:
		return refuse("X5-40", "it has no key usage")
	case leaf.KeyUsage&signing != 0:
		return refuse("X5-33", "its key usage has keyCertSign or cRLSign")
	case leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return refuse("X5-40", "its key usage lacks digitalSignature")
	}
	return id, nil
}
