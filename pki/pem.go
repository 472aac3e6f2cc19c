package pki

import (
	"crypto"
	"crypto/x509"
	"fmt"

	"github.com/svidkit/svidkit/internal/certpem"
)

// ParseCertificatesPEM parses a file of certificates, such as a chain or a set of roots: one or more
// CERTIFICATE blocks and no others. Text in front of a block is allowed, as tools write comments
// there; text after the last one is not. Input of more than 1 MiB or 1,000 certificates gives an
// error that wraps [spiffe.ErrTooLarge].
func ParseCertificatesPEM(pem []byte) ([]*x509.Certificate, error) {
	certs, err := certpem.Certificates(pem)
	if err != nil {
		return nil, fmt.Errorf("pki: parse certificates: %w", err)
	}
	return certs, nil
}

// MarshalCertificatesPEM returns certs as CERTIFICATE blocks in the given order.
func MarshalCertificatesPEM(certs ...*x509.Certificate) []byte {
	return certpem.EncodeCertificates(certs)
}

// ParsePrivateKeyPEM parses a file of one private key: PKCS#8 (PRIVATE KEY), PKCS#1 (RSA PRIVATE KEY)
// or SEC1 (EC PRIVATE KEY, with or without EC PARAMETERS in front). An encrypted key, a second block
// and a key that [CheckPublicKey] refuses are errors; the last wraps [ErrWeakKey]. Input of more than
// 1 MiB or a key of more than 16 KiB gives an error that wraps [spiffe.ErrTooLarge]. Errors do not
// repeat the input.
func ParsePrivateKeyPEM(pem []byte) (crypto.Signer, error) {
	key, err := certpem.PrivateKey(pem)
	if err == nil {
		err = checkKey(key.Public())
	}
	if err != nil {
		return nil, fmt.Errorf("pki: parse private key: %w", err)
	}
	return key, nil
}

// MarshalPrivateKeyPEM returns key in the clear as a PRIVATE KEY block (PKCS#8). A key that lives in
// hardware cannot be exported and is an error.
func MarshalPrivateKeyPEM(key crypto.Signer) ([]byte, error) {
	pem, err := certpem.EncodePrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("pki: marshal private key: %w", err)
	}
	return pem, nil
}
