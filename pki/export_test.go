package pki

import (
	"crypto"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"slices"
	"time"
)

// Errors that no caller has to tell from others.
var (
	ErrOutlivesIssuer        = errOutlivesIssuer
	ErrCRL                   = errCRL
	ErrCSR                   = errCSR
	ErrSAN                   = errSAN
	ErrUnreadableTrustDomain = errUnreadable
)

// MarshalSANValue returns the value of an extension.
func MarshalSANValue(sans ...SAN) ([]byte, error) {
	der, err := marshalSANs(sans)
	return der, named(err)
}

// ParseSANValue reads the value of an extension.
func ParseSANValue(der []byte) ([]SAN, error) {
	sans, err := parseSANs(der)
	return sans, named(err)
}

func named(err error) error {
	if err != nil {
		err = fmt.Errorf("pki: %w", err)
	}
	return err
}

// CheckCRL verifies that a list is of ca.
func CheckCRL(list *x509.RevocationList, ca *x509.Certificate) error {
	if err := checkCRL(list, ca); err != nil {
		return fmt.Errorf("pki: %w: %w", errCRL, err)
	}
	return nil
}

// ParseCRLsPEM reads lists.
func ParseCRLsPEM(data []byte) ([]*x509.RevocationList, error) {
	crls, err := parseCRLs(data)
	if err != nil {
		return nil, fmt.Errorf("pki: %w: %w", errCRL, err)
	}
	return crls, nil
}

// CRLs returns the lists.
func (b *KeyCertBundle) CRLs() []*x509.RevocationList { return slices.Clone(b.crls) }

// MarshalCRLsPEM returns lists as X509 CRL blocks in the given order.
func MarshalCRLsPEM(crls ...*x509.RevocationList) []byte {
	var out []byte
	for _, c := range crls {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: c.Raw})...)
	}
	return out
}

// KeyCertPEM is what ReadKeyCertBundle reads.
type KeyCertPEM = keyCertPEM

// ParseKeyCertBundle is what ReadKeyCertBundle does with it.
func ParseKeyCertBundle(p KeyCertPEM, now time.Time) (*KeyCertBundle, error) {
	return finish(parseKeyCertBundle(p, now))
}

// NewSelfSigned makes the certificate of a root.
func NewSelfSigned(key crypto.Signer, o CertificateOptions) (*x509.Certificate, error) {
	root, err := NewRoot(key, o)
	if err != nil {
		return nil, err
	}
	return root.Certificate(), nil
}
