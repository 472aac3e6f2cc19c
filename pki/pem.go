package pki

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/certpem"
)

// ParseCertificatesPEM parses a file of certificates, such as a chain or a set of roots: one or more
// CERTIFICATE blocks and no others. Text in front of a block is allowed, as tools write comments
// there; text after the last one is not, nor is a damaged block anywhere. Input of more than 1 MiB or
// 1,000 certificates gives an error that wraps [spiffe.ErrTooLarge].
func ParseCertificatesPEM(data []byte) ([]*x509.Certificate, error) {
	certs, err := certpem.Certificates(data)
	if err != nil {
		return nil, fmt.Errorf("pki: parse certificates: %w", err)
	}
	return certs, nil
}

// ParseRootsPEM parses a file of roots as far as it goes: one bad certificate among good ones, such as an
// old one with a negative serial number, is no reason to trust none. It returns the good ones, none
// twice, and an error that says what was left out: blocks that are no certificate that crypto/x509 can
// read, certificates that are not a CA, keys that [CheckPublicKey] refuses, damaged blocks, and whatever
// follows text that is not PEM. Input without any block gives neither roots nor an error. Input of more
// than 1 MiB or 1,000 blocks gives no roots and an error that wraps [spiffe.ErrTooLarge].
//
// This is for what others made, such as the roots of an operating system. A CA's own files are for
// [ParseCertificatesPEM], which takes all or nothing.
func ParseRootsPEM(data []byte) ([]*x509.Certificate, error) {
	fail := func(err error) error { return fmt.Errorf("pki: parse roots: %w", err) }
	if err := certpem.Check(data, certpem.MaxInput, certpem.MaxCertificates); err != nil {
		return nil, fail(err)
	}
	var roots []*x509.Certificate
	var errs []error
	blocks := 0
	rest := data
	for {
		var b *pem.Block
		if b, rest = pem.Decode(rest); b == nil {
			break
		}
		blocks++
		if c, err := parseRoot(b); err != nil {
			errs = append(errs, fmt.Errorf("block %d: %w", blocks, err))
		} else {
			roots = append(roots, c)
		}
	}
	if n := certpem.Blocks(data) - blocks; n > 0 {
		errs = append(errs, fmt.Errorf("%d damaged PEM blocks", n))
	} else if len(bytes.TrimSpace(rest)) > 0 {
		errs = append(errs, fmt.Errorf("after block %d: text that is not PEM", blocks))
	}
	roots = distinct(roots)
	if len(errs) == 0 {
		return roots, nil
	}
	if more := len(errs) - maxListed; more > 0 {
		errs = append(errs[:maxListed], fmt.Errorf("and %d more", more))
	}
	return roots, fail(errors.Join(errs...))
}

const maxListed = 10 // errors in one

func parseRoot(b *pem.Block) (*x509.Certificate, error) {
	if b.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("%.40q, not CERTIFICATE", b.Type)
	}
	c, err := x509.ParseCertificate(b.Bytes)
	if err != nil {
		return nil, certpem.Short(err)
	}
	if !isCA(c) {
		return nil, fmt.Errorf("%.300q is not a CA certificate", c.Subject)
	}
	return c, checkKey(c.PublicKey)
}

// distinct returns certs in their order and none twice. Certificates are the same if they are the same in
// DER; of several, the first stays.
func distinct(certs []*x509.Certificate) []*x509.Certificate {
	seen := make(map[string]bool, len(certs))
	out := make([]*x509.Certificate, 0, len(certs))
	for _, c := range certs {
		if !seen[string(c.Raw)] {
			seen[string(c.Raw)] = true
			out = append(out, c)
		}
	}
	return out
}

// selfSigned reports whether c is a root. Keys are checked before a signature is verified with them.
func selfSigned(c *x509.Certificate) bool {
	return isCA(c) && bytes.Equal(c.RawSubject, c.RawIssuer) && checkKey(c.PublicKey) == nil && c.CheckSignatureFrom(c) == nil
}

// MarshalCertificatesPEM returns certs as CERTIFICATE blocks in the given order.
func MarshalCertificatesPEM(certs ...*x509.Certificate) []byte {
	return certpem.EncodeCertificates(certs)
}

// ParsePrivateKeyPEM parses a file of one private key: PKCS#8 (PRIVATE KEY), PKCS#1 (RSA PRIVATE KEY)
// or SEC1 (EC PRIVATE KEY, with or without EC PARAMETERS in front). An encrypted key, a second block
// and a key that [CheckPublicKey] refuses are errors; the last wraps [ErrWeakKey]. Input of more than
// 1 MiB or a key of more than 8 KiB gives an error that wraps [spiffe.ErrTooLarge]. Errors do not
// repeat the input.
func ParsePrivateKeyPEM(data []byte) (crypto.Signer, error) {
	key, err := parsePrivateKey(data)
	if err != nil {
		return nil, fmt.Errorf("pki: parse private key: %w", err)
	}
	return key, nil
}

// parsePrivateKey is ParsePrivateKeyPEM without the words that all its errors begin with.
func parsePrivateKey(data []byte) (crypto.Signer, error) {
	key, err := certpem.PrivateKey(data)
	if err != nil {
		return nil, err
	}
	if err := checkKey(key.Public()); err != nil {
		return nil, err
	}
	return key, nil
}

// MarshalPrivateKeyPEM returns key in the clear as a PRIVATE KEY block (PKCS#8). A key that lives in
// hardware cannot be exported and is an error.
func MarshalPrivateKeyPEM(key crypto.Signer) ([]byte, error) {
	data, err := certpem.EncodePrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("pki: marshal private key: %w", err)
	}
	return data, nil
}
