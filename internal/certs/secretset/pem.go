package secretset

import (
	"cmp"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/pki"
)

// KeyPair returns the secret of a certificate chain, leaf first, and its key, in PEM from elsewhere, and when the
// certificate begins to be valid, which may be in the future. One that has expired is an error.
func KeyPair(name string, certsPEM, keyPEM []byte) (secret *pki.Secret, from time.Time, err error) {
	if secret, err = pki.NewSecretPEM(name, certsPEM, keyPEM, nil, time.Time{}); err != nil {
		return nil, from, err
	}
	if Expired(secret) {
		return nil, from, fmt.Errorf("the certificate has expired at %s", stamp(secret.NotAfter()))
	}
	chainPEM, _, _ := secret.KeyPair()
	block, _ := pem.Decode(chainPEM) // as NewSecretPEM has written it
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, from, err
	}
	return secret, leaf.NotBefore, nil
}

// NotYet is the error for a certificate that is valid from a later time on.
func NotYet(from time.Time) error {
	return fmt.Errorf("the certificate is valid from %s on; compare the clocks", stamp(from))
}

// Expired reports whether s is a certificate that has expired.
func Expired(s *pki.Secret) bool { return !s.NotAfter().IsZero() && !time.Now().Before(s.NotAfter()) }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Roots returns the secret of the roots in data that can be used, and what is wrong with the others. Damaged PEM is an
// error: it may be half of a file.
func Roots(name string, data []byte) (secret *pki.Secret, note, err error) {
	if err := certpem.Check(data, certpem.MaxInput, certpem.MaxCertificates); err != nil {
		return nil, nil, err
	}
	var skipped error
	var roots []byte
	blocks, bad := 0, 0
	for rest := data; ; blocks++ {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		one := pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})
		if _, err := pki.NewSecretPEM("root", nil, nil, one, time.Time{}); err != nil {
			bad++
			skipped = cmp.Or(skipped, fmt.Errorf("certificate %d: %w", blocks+1, errors.Unwrap(err)))
			continue
		}
		roots = append(roots, one...)
	}
	switch {
	case certpem.Blocks(data) != blocks:
		return nil, nil, errors.New("a PEM block is damaged")
	case len(roots) == 0:
		return nil, nil, cmp.Or(skipped, errors.New("there is no certificate in PEM"))
	case bad > 0:
		note = fmt.Errorf("%d of %d certificates are left out: %w", bad, blocks, skipped)
	}
	secret, err = pki.NewSecretPEM(name, nil, nil, roots, time.Time{})
	return secret, note, err
}
