package linkerd

import (
	"crypto/x509"
	"time"
)

// Event is something that an operator wants to see: [*IssuedLeafCertificate], [*IssuerUpdated] or
// [*IssuerValidationFailed]. In a cluster they become events of Kubernetes, with the name of the type
// as their reason.
type Event interface{ event() }

// IssuedLeafCertificate says that a certificate was issued and is being sent. It belongs to the
// service account.
type IssuedLeafCertificate struct {
	Name        Name
	NotAfter    time.Time
	Fingerprint [32]byte // SHA-256 of the certificate in DER
}

// IssuerUpdated says that another certificate signs than before. It belongs to the certifier.
type IssuerUpdated struct {
	Issuer *x509.Certificate // shared: must not be changed
}

// IssuerValidationFailed says that nothing was issued because the certificate that signs does not
// verify against the trust anchors of the moment. It is a warning, and belongs to the certifier.
type IssuerValidationFailed struct {
	Identity string // as it was asked for: not verified; at most 253 bytes
	Err      error
}

func (*IssuedLeafCertificate) event()  {}
func (*IssuerUpdated) event()          {}
func (*IssuerValidationFailed) event() {}
