package caserver

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/internal/caservice"
	"github.com/svidkit/svidkit/spiffe"
)

// health returns the health of the CA, if it reports any.
func (s *Server) health() (h ca.Health, ok bool) {
	if a, is := s.opts.CA.(interface{ Health() ca.Health }); is {
		return a.Health(), true
	}
	return h, false
}

// ready returns why a caller should ask another replica: this one has no certificate for its ports, or would not
// sign. A missing or unfit store is no reason while the CA still signs, as all replicas share it; nor is a limit, as
// the others are busy too.
func (s *Server) ready() error {
	h, _ := s.health()
	if svid, err := s.opts.Identity.SVID(); h.Signing == nil && (err != nil || time.Now().After(svid.NotAfter())) {
		return errors.New("the server has no valid certificate: the CA does not sign")
	}
	return h.Signing
}

// writeHealth writes the faults, for operators. If until is set or there is a fault, it also writes until when the CA
// signs.
func (s *Server) writeHealth(w io.Writer, until bool) {
	h, ok := s.health()
	if !ok {
		return
	}
	for _, part := range []struct {
		name string
		err  error
	}{{"signing", h.Signing}, {"store", h.Store}, {"audit", h.Audit}, {"root", h.Root}, {"keys", h.Keys}} {
		if part.err != nil {
			fmt.Fprintf(w, "%s: %v\n", part.name, part.err)
			until = true
		}
	}
	if until && h.Signing == nil && !h.Until.IsZero() { // a registration authority has no end
		fmt.Fprintf(w, "signs until %s if nothing changes\n", h.Until.UTC().Format(time.RFC3339))
	}
}

// newMetrics returns the metrics of the CA itself. The APIs' metrics have Istio's and Linkerd's names.
func (s *Server) newMetrics() *metrics.Set {
	m := new(metrics.Set)
	s.signer.results = m.Counters("svidkit_ca_signatures_total",
		"The number of requests to the CA for a certificate, by the result.", "result",
		append(slices.Sorted(maps.Values(kinds)), "signed", "failed")...)
	for _, g := range []struct {
		name, help string
		value      func(ca.Health) float64
	}{
		{"svidkit_ca_signing", "Whether the CA signs: 1, or 0 for a root out of its time, a store that has not " +
			"answered for too long, an audit log that cannot be written, or a custodian of its keys that does not sign.",
			func(h ca.Health) float64 { return up(h.Signing) }},
		{"svidkit_ca_store_up", "Whether the store of the CA answers: 1 or 0.",
			func(h ca.Health) float64 { return up(h.Store) }},
		{"svidkit_ca_audit_up", "Whether the audit log can be written: 1 or 0.",
			func(h ca.Health) float64 { return up(h.Audit) }},
		{"svidkit_ca_root_up", "Whether the root that signs is in order: 1, or 0 for one that is tainted or " +
			"should have been replaced.", func(h ca.Health) float64 { return up(h.Root) }},
		{"svidkit_ca_keys_up", "Whether the custodian of the private keys signs: 1, also without one, or 0.",
			func(h ca.Health) float64 { return up(h.Keys) }},
		{"svidkit_ca_store_synced_timestamp_seconds",
			"When the store of the CA answered last, in seconds since 1970.",
			func(h ca.Health) float64 { return metrics.Seconds(h.Synced) }},
		{"svidkit_ca_signing_end_timestamp_seconds", "When the CA signs no more if nothing changes, " +
			"in seconds since 1970.",
			func(h ca.Health) float64 { return metrics.Seconds(h.Until) }},
	} {
		m.Gauge(g.name, g.help, func() (float64, bool) {
			h, ok := s.health()
			v := g.value(h)
			// A registration authority has no times.
			return v, ok && (v != 0 || !strings.HasSuffix(g.name, "_timestamp_seconds"))
		})
	}
	s.identityMetrics(m)
	root := func(name, help string, at func(*x509.Certificate) time.Time) {
		m.Gauge(name, help, func() (float64, bool) { return s.newestRoot(at) })
	}
	root("svidkit_ca_root_start_timestamp_seconds", "When the newest root in the bundle began to be valid, "+
		"in seconds since 1970.", func(c *x509.Certificate) time.Time { return c.NotBefore })
	root("svidkit_ca_root_end_timestamp_seconds", "When the newest root in the bundle expires, "+
		"in seconds since 1970.", func(c *x509.Certificate) time.Time { return c.NotAfter })
	return m
}

// identityMetrics adds the metrics of the server itself.
func (s *Server) identityMetrics(m *metrics.Set) {
	// As in package health, so that services, agents and CAs can share alerts and graphs.
	const partLabel, part = "part", "ca"
	m.Gauges("svidkit_ready", "Whether the CA is ready: 1, or 0 if callers should ask another replica.",
		func(add metrics.Add) {
			add(up(s.ready()), partLabel, part)
		})
	own := func(name, help string, at func(*x509.Certificate) time.Time) {
		m.Gauges("svidkit_identity_"+name+"_timestamp_seconds", "When the SVID of the server "+help+", in seconds "+
			"since 1970.", func(add metrics.Add) {
			if svid, err := s.opts.Identity.SVID(); err == nil {
				add(metrics.Seconds(at(svid.Leaf())), partLabel, part, "identity", svid.ID().String())
			}
		})
	}
	own("start", "begins to be valid", func(c *x509.Certificate) time.Time { return c.NotBefore })
	own("end", "expires", func(c *x509.Certificate) time.Time { return c.NotAfter })
}

// newestRoot returns a time of the newest root in the bundle.
func (s *Server) newestRoot(at func(*x509.Certificate) time.Time) (float64, bool) {
	var newest *x509.Certificate
	if b := s.opts.CA.Bundle(); b != nil {
		for c := range b.X509Authorities() {
			if newest == nil || c.NotBefore.After(newest.NotBefore) {
				newest = c
			}
		}
	}
	if newest == nil {
		return 0, false
	}
	return metrics.Seconds(at(newest)), true
}

func up(err error) float64 { return metrics.Bool(err == nil) }

// counter counts the requests to a CA by their result.
type counter struct {
	ca.Signer
	results map[string]*metrics.Counter
}

// kinds are the failures that have their own counters.
var kinds = map[error]string{
	ca.ErrLimit: "limit", ca.ErrAudit: "audit", spiffe.ErrNotReady: "not_ready", ca.ErrCSR: "csr", ca.ErrTTL: "ttl",
	ca.ErrIdentity: "identity",
}

// Sign implements [ca.Signer].
func (c *counter) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := c.Signer.Sign(ctx, r)
	result := "signed"
	if err != nil {
		result = cmp.Or(kinds[caservice.Kind(err)], "failed")
	}
	c.results[result].Inc()
	return chain, err
}
