package caclient

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Check tests the answer of a CA, so that nothing bad replaces what works: chain must have
//
//   - at most 16 certificates and 64 KiB in DER, the leaf first, and only CA certificates after it;
//   - a leaf with the public key of csr, and with id as its one SPIFFE ID;
//   - a leaf that is an X.509-SVID: not a CA, with the key usage of a leaf (X5-32 to X5-40);
//   - a path from the leaf to a root in the bundle of id's own trust domain, valid at now (X5-31).
//
// What csr asks for is not looked at: id is the caller's. Names beside the ID are the CA's choice.
// The error is an [*Error] with the code [BadAnswer]; it wraps a [*spiffe.VerifyError] where the
// verification failed.
func Check(chain []*x509.Certificate, csr *pki.CSR, id spiffe.ID, bundles spiffe.BundleSource, now time.Time) error {
	if err := check(chain, csr, id, bundles, now); err != nil {
		return &Error{Op: "check", Code: BadAnswer, Err: fmt.Errorf("certificate for %q: %w", id, err)}
	}
	return nil
}

func check(chain []*x509.Certificate, csr *pki.CSR, id spiffe.ID, bundles spiffe.BundleSource, now time.Time) error {
	if err := certchain.CheckSize(chain); err != nil {
		return err
	}
	for i, c := range chain[1:] {
		if !c.BasicConstraintsValid || !c.IsCA {
			return fmt.Errorf("certificate %d of %d is not a CA, and the leaf comes first", i+2, len(chain))
		}
	}
	switch {
	case csr == nil:
		return errors.New("there is no request to compare it with")
	case id.IsZero():
		return fmt.Errorf("expected ID: %w", spiffe.ErrZero)
	case !pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()):
		return errors.New("the leaf's public key is not that of the request")
	}
	got, err := spiffe.IDFromCertificate(chain[0])
	if err != nil {
		return err
	}
	if got != id {
		return fmt.Errorf("the leaf is for %q", got)
	}
	v, err := spiffe.NewVerifier(bundles, spiffe.AllowIDs(id), &spiffe.VerifierOptions{Now: func() time.Time { return now }})
	if err != nil {
		return err
	}
	_, err = v.VerifyChain(chain, spiffe.AnyRole)
	return err
}

// tidy returns chain as CA promises it: the leaf, which is the certificate for csr's key, then each
// certificate after the one that it signed, without self-signed roots (peers have those) and
// without repetitions. CAs send chains with roots, twice, and in any order. What does not fit stays
// at the end, for Check to judge. chain has passed CheckSize and is not changed.
func tidy(chain []*x509.Certificate, csr *pki.CSR) []*x509.Certificate {
	isLeaf := func(c *x509.Certificate) bool { return pki.PublicKeysEqual(c.PublicKey, csr.PublicKey()) }
	leaf := max(slices.IndexFunc(chain, isLeaf), 0)
	out := []*x509.Certificate{chain[leaf]}
	var rest []*x509.Certificate
	for i, c := range chain {
		same := func(o *x509.Certificate) bool { return bytes.Equal(o.Raw, c.Raw) }
		if i != leaf && !slices.ContainsFunc(out, same) && !slices.ContainsFunc(rest, same) && !certchain.SelfSigned(c) {
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

// signed reports whether parent says that it signed child; the signature is Check's business.
func signed(parent, child *x509.Certificate) bool {
	return bytes.Equal(parent.RawSubject, child.RawIssuer) &&
		(len(child.AuthorityKeyId) == 0 || len(parent.SubjectKeyId) == 0 || bytes.Equal(child.AuthorityKeyId, parent.SubjectKeyId))
}
