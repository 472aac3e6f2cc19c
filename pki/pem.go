package pki

import (
	"bytes"
	"crypto"
	"crypto/x509"
	"fmt"

	"github.com/svidkit/svidkit/internal/certs/certpem"
)

// ParseCertificatesPEM parses a file of certificates, such as a chain or a set of roots: one or more CERTIFICATE
// blocks and no others. Text around them is allowed, as tools write comments there; a damaged block is an error. More
// than 1 MiB or 1,000 certificates give an error that wraps [spiffe.ErrTooLarge].
func ParseCertificatesPEM(data []byte) ([]*x509.Certificate, error) {
	certs, err := certpem.Certificates(data)
	if err != nil {
		return nil, fmt.Errorf("pki: parse certificates: %w", err)
	}
	return certs, nil
}

// distinct returns certs without duplicates (compared by DER), keeping the order of first occurrence.
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

// selfSigned reports whether c is a root. It checks the key before it verifies a signature with it.
func selfSigned(c *x509.Certificate) bool {
	return isCA(c) && bytes.Equal(c.RawSubject, c.RawIssuer) && certpem.CheckKey(c.PublicKey) == nil &&
		c.CheckSignatureFrom(c) == nil
}

// MarshalCertificatesPEM returns certs as CERTIFICATE blocks in the given order.
func MarshalCertificatesPEM(certs ...*x509.Certificate) []byte {
	return certpem.EncodeCertificates(certs)
}

// ParsePrivateKeyPEM parses a file of one private key: PKCS#8 (PRIVATE KEY), PKCS#1 (RSA PRIVATE KEY) or SEC1 (EC
// PRIVATE KEY, with or without EC PARAMETERS in front), even under the label of another form. An encrypted key, a
// second block and a weak key ([ErrWeakKey]) are errors. More than 1 MiB of
// input or 8 KiB of key give an error that wraps [spiffe.ErrTooLarge]. Errors do not repeat the input.
func ParsePrivateKeyPEM(data []byte) (crypto.Signer, error) {
	key, err := certpem.PrivateKey(data)
	if err != nil {
		return nil, fmt.Errorf("pki: parse private key: %w", err)
	}
	return key, nil
}

// MarshalPrivateKeyPEM returns key as an unencrypted PRIVATE KEY block (PKCS#8). A key in hardware cannot be exported
// and gives an error.
func MarshalPrivateKeyPEM(key crypto.Signer) ([]byte, error) {
	data, err := certpem.EncodePrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("pki: marshal private key: %w", err)
	}
	return data, nil
}
