package caclient

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// check tests the answer of a CA, so that a bad one replaces no working certificate. chain must have
//
//   - at most 16 certificates and 64 KiB in DER, the leaf first, and only CA certificates after it;
//   - a leaf with the public key of csr, of the form that want expects: [pki.ExpectID] for an X.509-SVID, which is
//     not a CA and has the ID as its one SPIFFE ID and the key usage of a leaf (X509-SVID section 5.2);
//   - a path from the leaf to a root in the bundle of want's own trust domain, valid now;
//   - extended key usages, if there are any on that path, that permit the role (X509-SVID section 4.4).
//
// The error is an [*Error] of the kind [ErrBadAnswer]; it wraps a [*spiffe.VerifyError] if the verification failed.
func (c *client) check(chain []*x509.Certificate, csr *pki.CSR, want pki.Expectation,
	bundles spiffe.BundleSource) error {
	err := checkForm(chain, csr)
	if err == nil {
		_, err = want.Verify(chain, bundles, c.opts.Role, time.Now())
	}
	if err != nil {
		return &Error{Op: "check", Kind: ErrBadAnswer, Err: fmt.Errorf("certificate for %q: %w", want, err)}
	}
	return nil
}

func checkForm(chain []*x509.Certificate, csr *pki.CSR) error {
	if err := certchain.CheckSize(chain); err != nil {
		return err
	}
	for i, c := range chain[1:] {
		if !c.BasicConstraintsValid || !c.IsCA {
			return fmt.Errorf("certificate %d of %d is not a CA, and the leaf comes first", i+2, len(chain))
		}
	}
	if !pki.PublicKeysEqual(chain[0].PublicKey, csr.PublicKey()) {
		return errors.New("the leaf's public key is not that of the request")
	}
	return nil
}
