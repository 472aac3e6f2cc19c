package secretset

import (
	"cmp"
	"encoding/pem"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/pki"
)

// KeyPair returns the secret for a certificate chain, leaf first, and its key, both in PEM. A certificate that is not
// valid now is an error.
func KeyPair(name string, certsPEM, keyPEM []byte) (*pki.Secret, error) {
	secret, err := pki.NewSecretPEM(name, certsPEM, keyPEM, nil, time.Time{})
	if err == nil {
		_, err = InTime(secret)
	}
	if err != nil {
		return nil, err
	}
	return secret, nil
}

// InTime returns an error if s is a certificate that is not valid now, and when it becomes valid.
func InTime(s *pki.Secret) (from time.Time, err error) {
	chainPEM, _, ok := s.KeyPair()
	if !ok {
		return from, nil
	}
	chain, err := certpem.Certificates(chainPEM)
	if err != nil {
		return from, err
	}
	return chain[0].NotBefore, certchain.InTime(chain[0], time.Now())
}

// Expired reports whether s is a certificate that has expired.
func Expired(s *pki.Secret) bool { return !s.NotAfter().IsZero() && !time.Now().Before(s.NotAfter()) }

// Roots returns the secret with the usable roots in data, and a note that says what is wrong with the others. Damaged
// PEM is an error: the file may be incomplete.
func Roots(name string, data []byte) (secret *pki.Secret, note, err error) {
	blocks, err := certpem.Read(data, certpem.MaxCertificates)
	if err != nil {
		return nil, nil, err
	}
	var skipped error
	var roots []byte
	bad := 0
	for i, block := range blocks {
		one := pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes})
		if _, err := pki.NewSecretPEM("root", nil, nil, one, time.Time{}); err != nil {
			bad++
			skipped = cmp.Or(skipped, fmt.Errorf("certificate %d: %w", i+1, errors.Unwrap(err)))
			continue
		}
		roots = append(roots, one...)
	}
	switch {
	case len(roots) == 0:
		return nil, nil, cmp.Or(skipped, errors.New("there is no certificate in PEM"))
	case bad > 0:
		note = fmt.Errorf("%d of %d certificates are left out: %w", bad, len(blocks), skipped)
	}
	secret, err = pki.NewSecretPEM(name, nil, nil, roots, time.Time{})
	return secret, note, err
}
