package istioca

import (
	"crypto/x509"
	"errors"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

type serverMetrics struct {
	metrics.Set
	requests, unauthenticated, badCSR, noID, issued *metrics.Counter
	failed                                          map[string]*metrics.Counter // by label
}

// labels are the signer failures that have their own counters.
var labels = []struct {
	err   error
	label string
}{
	{ca.ErrCSR, "CSR_ERROR"}, {ca.ErrTTL, "TTL_ERROR"}, {spiffe.ErrNotReady, "CA_NOT_READY"},
	{ca.ErrGeneration, "CERT_GEN_ERROR"},
	{ca.ErrIdentity, "ID_ERROR"}, {ca.ErrLimit, "LIMIT_ERROR"}, {ca.ErrAudit, "AUDIT_ERROR"},
}

const unknownLabel = "UNKNOWN"

func label(err error) string {
	for _, l := range labels {
		if errors.Is(err, l.err) {
			return l.label
		}
	}
	return unknownLabel
}

func (m *serverMetrics) init(s *Server) {
	m.requests = m.Counter("citadel_server_csr_count", "The number of CSRs received by the server.")
	m.unauthenticated = m.Counter("citadel_server_authentication_failure_count",
		"The number of authentication failures.")
	m.badCSR = m.Counter("citadel_server_csr_parsing_err_count",
		"The number of requests with a CSR that could not be read.")
	m.noID = m.Counter("citadel_server_id_extraction_err_count",
		"The number of requests for which no identity could be decided.")
	values := []string{unknownLabel}
	for _, l := range labels {
		values = append(values, l.label)
	}
	m.failed = m.Counters("citadel_server_csr_sign_err_count", "The number of errors while signing a CSR.", "error",
		values...)
	m.issued = m.Counter("citadel_server_success_cert_issuance_count", "The number of certificates issued.")
	m.expiry("citadel_server_root_cert_expiry_", "the first root expires", s.root)
	m.expiry("citadel_server_cert_chain_expiry_", "the intermediate that signs expires", s.intermediate.Load)
}

// expiry adds two gauges about the end of a certificate, which may be nil.
func (m *serverMetrics) expiry(name, what string, certificate func() *x509.Certificate) {
	add := func(name, help string, value func(end time.Time) float64) {
		m.Gauge(name, help, func() (float64, bool) {
			if c := certificate(); c != nil {
				return value(c.NotAfter), true
			}
			return 0, false
		})
	}
	add(name+"timestamp", "When "+what+", in seconds since 1970.", metrics.Seconds)
	add(name+"seconds", "The seconds until "+what+"; negative after that.", func(end time.Time) float64 {
		return time.Until(end).Seconds()
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
