// Package certchain has what caclient and secretcache both ask of the chains that a CA answers
// with, before anything is verified.
package certchain

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"

	"github.com/svidkit/svidkit/internal/certs/certpem"
)

// Limits. Every peer of the workload receives the chain in every handshake.
const (
	maxChain = 16
	maxBytes = 64 << 10 // in DER

	maxRSABits = 8192 // of a key; what fills 64 KiB takes a quarter of a minute to verify with
)

// CheckSize refuses a chain that is empty, has a nil certificate, or has more than 16 certificates, more
// than 64 KiB or an RSA key of more than 8192 bits, which wraps [certpem.ErrTooLarge].
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
	for i, c := range chain {
		size += len(c.Raw)
		if bits := rsaBits(c); bits > maxRSABits {
			return fmt.Errorf("certificate %d has an RSA key of %d bits, the limit is %d: %w", i+1, bits, maxRSABits, certpem.ErrTooLarge)
		}
	}
	if size > maxBytes {
		return fmt.Errorf("%d bytes of certificates, the limit is %d: %w", size, maxBytes, certpem.ErrTooLarge)
	}
	return nil
}

// SelfSigned reports whether c is a root. A CA's certificate for its own name under another key,
// which links an old root to a new one, is not, nor is what [CheckSize] refuses for its key.
func SelfSigned(c *x509.Certificate) bool {
	return c.IsCA && bytes.Equal(c.RawSubject, c.RawIssuer) && rsaBits(c) <= maxRSABits && c.CheckSignatureFrom(c) == nil
}

// rsaBits returns the size of an RSA key, and 0 for other keys.
func rsaBits(c *x509.Certificate) int {
	if k, ok := c.PublicKey.(*rsa.PublicKey); ok {
		return k.N.BitLen()
	}
	return 0
}

// Tidy returns chain as it is presented: the leaf, which is the certificate for key, then each
// certificate after the one that it signed, without self-signed roots, which peers have, and without
// repetitions. CAs send chains with roots, twice, and in any order. What does not fit stays at the end,
// for verification to judge. chain has passed [CheckSize] and is not changed.
func Tidy(chain []*x509.Certificate, key crypto.PublicKey) []*x509.Certificate {
	isLeaf := func(c *x509.Certificate) bool {
		k, ok := c.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
		return ok && k.Equal(key)
	}
	leaf := max(slices.IndexFunc(chain, isLeaf), 0)
	out := []*x509.Certificate{chain[leaf]}
	var rest []*x509.Certificate
	for i, c := range chain {
		if i != leaf && !slices.ContainsFunc(out, c.Equal) && !slices.ContainsFunc(rest, c.Equal) && !SelfSigned(c) {
			rest = append(rest, c)
		}
	}
	for len(rest) > 0 {
		last := out[len(out)-1]
		next := max(0, slices.IndexFunc(rest, func(c *x509.Certificate) bool { return signed(c, last) }))
		out = append(out, rest[next])
		rest = slices.Delete(rest, next, next+1)
	}
	return out
}

// signed reports whether parent says that it signed child; the signature is the verifier's business.
func signed(parent, child *x509.Certificate) bool {
	return bytes.Equal(parent.RawSubject, child.RawIssuer) &&
		(len(child.AuthorityKeyId) == 0 || len(parent.SubjectKeyId) == 0 || bytes.Equal(child.AuthorityKeyId, parent.SubjectKeyId))
}

// Set sorts certificates by their bytes, so that it does not matter where they come from, and drops those that are there
// twice. It works in place.
func Set(certs []*x509.Certificate) []*x509.Certificate {
	slices.SortFunc(certs, func(a, b *x509.Certificate) int { return bytes.Compare(a.Raw, b.Raw) })
	return slices.CompactFunc(certs, func(a, b *x509.Certificate) bool { return bytes.Equal(a.Raw, b.Raw) })
}
