package istioca

import (
	"cmp"
	"crypto/x509"
	"maps"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

type serverMetrics struct {
	metrics.Set
	requests, unauthenticated, badCSR, noID, issued *metrics.Counter
	failed                                          map[string]*metrics.Counter // by label
}

// labels are the signer failures that have their own counters.
var labels = map[error]string{
	ca.ErrCSR: "CSR_ERROR", ca.ErrTTL: "TTL_ERROR", spiffe.ErrNotReady: "CA_NOT_READY",
	ca.ErrGeneration: "CERT_GEN_ERROR",
	ca.ErrIdentity:   "ID_ERROR", ca.ErrLimit: "LIMIT_ERROR", ca.ErrAudit: "AUDIT_ERROR",
}

const unknownLabel = "UNKNOWN"

func label(err error) string { return cmp.Or(labels[caservice.Kind(err)], unknownLabel) }

func (m *serverMetrics) init(s *Server) {
	m.requests = m.Counter("citadel_server_csr_count", "The number of CSRs received by the server.")
	m.unauthenticated = m.Counter("citadel_server_authentication_failure_count",
		"The number of authentication failures.")
	m.badCSR = m.Counter("citadel_server_csr_parsing_err_count",
		"The number of requests with a CSR that could not be read.")
	m.noID = m.Counter("citadel_server_id_extraction_err_count",
		"The number of requests for which no identity could be decided.")
	m.failed = m.Counters("citadel_server_csr_sign_err_count", "The number of errors while signing a CSR.", "error",
		append(slices.Sorted(maps.Values(labels)), unknownLabel)...)
	m.issued = m.Counter("citadel_server_success_cert_issuance_count", "The number of certificates issued.")
	left := func(end time.Time) float64 { return time.Until(end).Seconds() }
	m.expiry("citadel_server_root_cert_expiry_timestamp", "When the first root expires, in seconds since 1970.",
		s.root, metrics.Seconds)
	m.expiry("citadel_server_root_cert_expiry_seconds", "The seconds until the first root expires; "+
		"negative after that.", s.root, left)
	m.expiry("citadel_server_cert_chain_expiry_timestamp", "When the intermediate that signs expires, "+
		"in seconds since 1970.", s.intermediate.Load, metrics.Seconds)
	m.expiry("citadel_server_cert_chain_expiry_seconds", "The seconds until the intermediate that signs expires; "+
		"negative after that.", s.intermediate.Load, left)
}

// expiry adds a gauge about the end of a certificate, which may be nil.
func (m *serverMetrics) expiry(name, help string, certificate func() *x509.Certificate,
	value func(end time.Time) float64) {
	m.Gauge(name, help, func() (float64, bool) {
		if c := certificate(); c != nil {
			return value(c.NotAfter), true
		}
		return 0, false
	})
}

// root returns the first root, or nil if none is known.
func (s *Server) root() *x509.Certificate {
	if b := s.opts.Signer.Bundle(); b != nil {
		for c := range b.X509Authorities() {
			return c
		}
	}
	return nil
}
