// Package delivery has the file names of a credential directory in the draft SPIFFE Filesystem Delivery
// (spiffe/spiffe#376).
package delivery

import (
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

const (
	// Variable of the environment names the directory.
	Variable = "SPIFFE_CREDENTIAL_FOLDER"

	// Credential is the file with the private key, and then the certificates, in PEM.
	Credential = "credential-bundle.private-key.x509.pem"

	suffix = ".spiffe-trust-bundle.x509.pem"
)

// Bundle returns the name of the file with the authorities of a trust domain, in PEM.
func Bundle(td spiffe.TrustDomain) string { return td.String() + suffix }

// TrustDomain returns the trust domain in the name of a bundle file, and whether name is one.
func TrustDomain(name string) (td spiffe.TrustDomain, ok bool) {
	prefix, ok := strings.CutSuffix(name, suffix)
	td, err := spiffe.ParseTrustDomain(prefix)
	return td, ok && err == nil && td.String() == prefix // which an ID is not
}
