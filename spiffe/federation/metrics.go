package federation

import (
	"io"
	"maps"
	"strings"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter] with the trust bundles, and the endpoints as upstreams. The metrics are:
//
//	svidkit_federation_bundle_present                       by trust_domain: 1 if a bundle is in force, else 0
//	svidkit_federation_bundle_fresh                         by trust_domain: 1 if it is fresh, as in [Status], else 0
//	svidkit_federation_bundle_confirmed_timestamp_seconds   by trust_domain: when the endpoint last answered well
//	svidkit_federation_bundle_failures                      by trust_domain: failed fetches since then
//	svidkit_federation_bundle_refused                       by trust_domain: 1 if a bundle was refused or is held, which
//	                                                        is an alarm for an operator, else 0
//	svidkit_federation_fetches_total                        by outcome, as in the log: new, unchanged, failed and others
//
// There are as many trust domains as relationships, which the operator configures.
func (m *Manager) Report() report.Report {
	all := m.Status()
	r := report.Report{Metrics: func(w io.Writer) error { return m.metrics(all).Write(w) }}
	for _, st := range all {
		b := report.Bundle{TrustDomain: st.TrustDomain.String(), Origin: st.URL, Err: errNotFetched(st.TrustDomain)}
		if st.Bundle != nil {
			b = sourcereport.Bundle(st.Bundle, st.URL)
		}
		r.Bundles = append(r.Bundles, b)
		r.Upstreams = append(r.Upstreams, report.Upstream{
			Name: st.TrustDomain.String() + " at " + st.URL, LastSuccess: st.LastSuccess, NextAttempt: st.NextAttempt,
			Failures: st.Failures, Err: st.Err,
		})
	}
	return r
}

func (m *Manager) metrics(all []Status) *metrics.Set {
	m.mu.Lock()
	counts := maps.Clone(m.outcomes)
	m.mu.Unlock()

	s := new(metrics.Set)
	each := func(name, help string, value func(Status) (float64, bool)) {
		s.Gauges(name, help, func(add metrics.Add) {
			for _, st := range all {
				if v, ok := value(st); ok {
					add(v, "trust_domain", st.TrustDomain.String())
				}
			}
		})
	}
	each("svidkit_federation_bundle_present",
		"Whether a bundle of the trust domain is in force: 1 or 0.",
		func(st Status) (float64, bool) { return metrics.Bool(st.Bundle != nil), true })
	each("svidkit_federation_bundle_fresh",
		"Whether the last attempt has confirmed the bundle, not longer ago than twice the interval: 1 or 0.",
		func(st Status) (float64, bool) { return metrics.Bool(st.Fresh), true })
	each("svidkit_federation_bundle_confirmed_timestamp_seconds",
		"When the endpoint last answered well, in seconds since 1970.",
		func(st Status) (float64, bool) { return metrics.Seconds(st.LastSuccess), !st.LastSuccess.IsZero() })
	each("svidkit_federation_bundle_failures",
		"The number of fetches that have failed since the last that did not.",
		func(st Status) (float64, bool) { return float64(st.Failures), true })
	each("svidkit_federation_bundle_refused",
		"Whether a bundle was refused for its sequence number, or is held: 1 or 0.",
		func(st Status) (float64, bool) { return metrics.Bool(st.Refused != nil), true })
	s.Totals("svidkit_federation_fetches_total", "The number of fetches, by the outcome.", func(add metrics.Add) {
		for _, one := range outcomes {
			add(float64(counts[one]), "outcome", strings.ReplaceAll(one.name, " ", "_"))
		}
	})
	return s
}
