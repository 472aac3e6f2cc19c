package istioca

import (
	"crypto/x509"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
)

type serverMetrics struct {
	set                                             metrics.Set
	requests, unauthenticated, badCSR, noID, issued *metrics.Counter
	failed                                          map[string]*metrics.Counter // by label
}

func newMetrics(s *Server) *serverMetrics {
	m := new(serverMetrics)
	m.requests = m.set.Counter("citadel_server_csr_count", "The number of CSRs received by the server.")
	m.unauthenticated = m.set.Counter("citadel_server_authentication_failure_count", "The number of authentication failures.")
	m.badCSR = m.set.Counter("citadel_server_csr_parsing_err_count", "The number of requests with a CSR that could not be read.")
	m.noID = m.set.Counter("citadel_server_id_extraction_err_count", "The number of requests for which no identity could be decided.")
	m.failed = m.set.Counters("citadel_server_csr_sign_err_count", "The number of errors while signing a CSR.", "error",
		"CSR_ERROR", "TTL_ERROR", "CA_NOT_READY", "CERT_GEN_ERROR", "ID_ERROR", "LIMIT_ERROR", "AUDIT_ERROR", "UNKNOWN")
	m.issued = m.set.Counter("citadel_server_success_cert_issuance_count", "The number of certificates issued.")
	expiry := func(name, what string, of func() *x509.Certificate) {
		read := func(value func(time.Time) float64) func() (float64, bool) {
			return func() (float64, bool) {
				c := of()
				if c == nil {
					return 0, false
				}
				return value(c.NotAfter), true
			}
		}
		m.set.Gauge(name+"_timestamp", "When "+what+" expires, in seconds since 1970.", read(func(end time.Time) float64 { return float64(end.Unix()) }))
		m.set.Gauge(name+"_seconds", "The seconds until "+what+" expires; negative after that.", read(func(end time.Time) float64 { return time.Until(end).Seconds() }))
	}
	expiry("citadel_server_root_cert_expiry", "the first root", s.root)
	expiry("citadel_server_cert_chain_expiry", "the intermediate that signs", func() *x509.Certificate {
		if t := s.tail.Load(); t != nil {
			return t.signer
		}
		return nil
	})
	return m
}

// root returns the first root, or nil if none is known.
func (s *Server) root() *x509.Certificate {
	if b := s.opts.Signer.Bundle(); b != nil {
		for c := range b.X509Authorities() {
			return c
		}
	}
	if t := s.tail.Load(); t != nil {
		return t.root
	}
	return nil
}
