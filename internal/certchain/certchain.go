// Package certchain has what caclient and secretcache both ask of the chains that a CA answers
// with, before anything is verified.
package certchain

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	"github.com/svidkit/svidkit/internal/certpem"
)

// Limits. Every peer of the workload receives the chain in every handshake.
const (
	maxChain = 16
	maxBytes = 64 << 10 // in DER
)

// CheckSize refuses a chain that is empty, has a nil certificate, or has more than 16 certificates
// or 64 KiB, which wraps [certpem.ErrTooLarge].
func CheckSize(chain []*x509.Certificate) error {
	switch {
	case len(chain) == 0:
		return errors.New("the chain is empty")
	case len(chain) > maxChain:
		return fmt.Errorf("%d certificates, the limit is %d: %w", len(chain), maxChain, certpem.ErrTooLarge)
	case slices.Contains(chain, nil):
		return errors.New("the chain has a nil certificate")
	}
	size := 0
	for _, c := range chain {
		size += len(c.Raw)
	}
	if size > maxBytes {
		return fmt.Errorf("%d bytes of certificates, the limit is %d: %w", size, maxBytes, certpem.ErrTooLarge)
	}
	return nil
}

// SelfSigned reports whether c is a root. A CA's certificate for its own name under another key,
// which links an old root to a new one, is not.
func SelfSigned(c *x509.Certificate) bool {
	return c.IsCA && bytes.Equal(c.RawSubject, c.RawIssuer) && c.CheckSignatureFrom(c) == nil
}
