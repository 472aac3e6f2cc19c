// Package certchain has the operations on certificate chains that package spiffe shares with packages that obtain,
// load, serve and merge them: limits on the cost of a chain, the order to present it in, the path from a leaf to a
// root for a role, and the end of that path. Its callers decide which ID a chain proves.
package certchain

import (
	"bytes"
	"crypto"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certpem"
)

// Limits on a chain. Every peer of the workload receives it in every handshake.
const (
	MaxChain = 16 // certificates

	// MaxRSABits bounds a key: verifying with a key of 64 KiB takes a quarter of a minute. crypto/tls has the same
	// limit for the leaf.
	MaxRSABits = 8192

	maxBytes = 64 << 10 // of DER in a CA's answer
)

// CheckCost refuses a chain that has a nil certificate, more than 16 certificates or an RSA key of more than 8192
// bits, before anything is verified. The errors for the last two wrap [certpem.ErrTooLarge].
func CheckCost(chain []*x509.Certificate) error {
	switch {
	case len(chain) > MaxChain:
		return fmt.Errorf("%d certificates, the limit is %d: %w", len(chain), MaxChain, certpem.ErrTooLarge)
	case slices.Contains(chain, nil):
		return errors.New("the chain has a nil certificate")
	}
	for i, c := range chain {
		if bits := rsaBits(c); bits > MaxRSABits {
			return fmt.Errorf("certificate %d has an RSA key of %d bits, the limit is %d: %w", i+1, bits, MaxRSABits,
				certpem.ErrTooLarge)
		}
	}
	return nil
}

// CheckSize is [CheckCost] for a CA's answer: it also refuses an empty chain, and a chain of more than 64 KiB with an
// error that wraps [certpem.ErrTooLarge].
func CheckSize(chain []*x509.Certificate) error {
	if len(chain) == 0 {
		return errors.New("the chain is empty")
	}
	if err := CheckCost(chain); err != nil {
		return err
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

// SelfSigned reports whether c is a root. A link certificate, with a CA's own name and another key, is not a root;
// nor is a certificate whose key [CheckCost] refuses.
func SelfSigned(c *x509.Certificate) bool {
	return c.IsCA && bytes.Equal(c.RawSubject, c.RawIssuer) && rsaBits(c) <= MaxRSABits &&
		c.CheckSignatureFrom(c) == nil
}

// rsaBits returns the size of an RSA key, and 0 for other keys, whose size their curve fixes.
func rsaBits(c *x509.Certificate) int {
	if k, ok := c.PublicKey.(*rsa.PublicKey); ok {
		return k.N.BitLen()
	}
	return 0
}

// UnfitAnchor says why cert must not be a trust anchor, or returns "". crypto/x509 trusts every certificate among the
// roots, even a leaf, so only CAs may be there. It also refuses an RSA key that makes verification slow, as the
// authorities of a federated domain may be hostile.
func UnfitAnchor(cert *x509.Certificate) string {
	switch bits := rsaBits(cert); {
	case !cert.BasicConstraintsValid || !cert.IsCA:
		return "not a CA certificate"
	case bits > MaxRSABits:
		return fmt.Sprintf("an RSA key of %d bits, the limit is %d", bits, MaxRSABits)
	}
	return ""
}

// Tidy returns chain as peers expect it: the leaf, which is the certificate for key, then each certificate after the
// one that it signed, without self-signed roots, which peers have, and without duplicates. CAs send roots and
// duplicates, in any order. Certificates that do not fit stay at the end, for verification to refuse. chain has
// passed [CheckSize] and is not changed.
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
		next := max(0, Issuer(rest, last))
		out = append(out, rest[next])
		rest = slices.Delete(rest, next, next+1)
	}
	return out
}

// Issuer returns the index of the certificate that signed child, or -1. Several certificates may share a name, and an
// expired one may share its key with its successor: a valid signature decides first, then validity now, then the
// latest end.
func Issuer(certs []*x509.Certificate, child *x509.Certificate) int {
	best, now := -1, time.Now()
	for i, c := range certs {
		if !bytes.Equal(c.RawSubject, child.RawIssuer) || rsaBits(c) > MaxRSABits ||
			child.CheckSignatureFrom(c) != nil {
			continue
		}
		if valid := InTime(c, now) == nil; best < 0 ||
			valid && (InTime(certs[best], now) != nil || c.NotAfter.After(certs[best].NotAfter)) {
			best = i
		}
	}
	return best
}

// Set sorts certificates by their bytes and drops duplicates, in place, so that the order of their sources does not
// matter.
func Set(certs []*x509.Certificate) []*x509.Certificate {
	slices.SortFunc(certs, func(a, b *x509.Certificate) int { return bytes.Compare(a.Raw, b.Raw) })
	return slices.CompactFunc(certs, func(a, b *x509.Certificate) bool { return bytes.Equal(a.Raw, b.Raw) })
}
