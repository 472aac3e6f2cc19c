package caclient

import (
	"crypto/x509"
	"errors"
	"fmt"
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
//   - a path from the leaf to a root in the bundle of id's own trust domain, valid at now (X5-31);
//   - extended key usages, if there are any on that path, with which a workload can serve and dial
//     (X5-39): see [spiffe.BothRoles], and [Options] for a CA that certifies one role only.
//
// What csr asks for is not looked at: id is the caller's. Names beside the ID are the CA's choice.
// The error is an [*Error] of the kind [ErrBadAnswer]; it wraps a [*spiffe.VerifyError] where the
// verification failed.
func Check(chain []*x509.Certificate, csr *pki.CSR, id spiffe.ID, bundles spiffe.BundleSource, now time.Time) error {
	return checkFor(spiffe.BothRoles, chain, csr, id, bundles, now)
}

func checkFor(role spiffe.Role, chain []*x509.Certificate, csr *pki.CSR, id spiffe.ID, bundles spiffe.BundleSource, now time.Time) error {
	if err := check(role, chain, csr, id, bundles, now); err != nil {
		return &Error{Op: "check", Kind: ErrBadAnswer, Err: fmt.Errorf("certificate for %q: %w", id, err)}
	}
	return nil
}

func check(role spiffe.Role, chain []*x509.Certificate, csr *pki.CSR, id spiffe.ID, bundles spiffe.BundleSource, now time.Time) error {
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
	_, err = v.VerifyChain(chain, role)
	return err
}
