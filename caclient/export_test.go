package caclient

import (
	"crypto/x509"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Check is the check of every answer.
func Check(chain []*x509.Certificate, csr *pki.CSR, want pki.Expectation, bundles spiffe.BundleSource) error {
	return (&client{opts: Options{Role: spiffe.BothRoles}}).check(chain, csr, want, bundles)
}
