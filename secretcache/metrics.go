package secretcache

import (
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/spiffe/report"
)

// counts count a Manager's work since New.
type counts struct {
	certificates, bundles struct{ good, failed atomic.Uint64 } // attempts

	// confirmed is when the CA last confirmed the bundles, in nanoseconds since 1970; 0 for never.
	confirmed atomic.Int64
}

// count counts an attempt for e.
func (m *Manager) count(e *entry, err error) {
	c := &m.counts.certificates
	if e == m.roots {
		c = &m.counts.bundles
	}
	if err != nil {
		c.failed.Add(1)
		return
	}
	c.good.Add(1)
	if e == m.roots {
		m.confirmed()
	}
}

// confirmed records that the CA has just confirmed the bundles.
func (m *Manager) confirmed() { m.counts.confirmed.Store(time.Now().UnixNano()) }

// maxListed is how many identities have their own samples.
const maxListed = 1000

var instants = []struct {
	name, help string
	at         func(report.Identity) time.Time
}{
	{"start", "the certificate of the identity begins to be valid",
		func(i report.Identity) time.Time { return i.NotBefore }},
	{"end", "the certificate of the identity, or something in its verified chain, ends",
		func(i report.Identity) time.Time { return i.NotAfter }},
	{"attempt", "the next attempt to obtain a certificate for the identity begins",
		func(i report.Identity) time.Time { return i.Renewal }},
	{"failing", "the first of the failed attempts since the last good one was",
		func(i report.Identity) time.Time { return i.Since }},
}

func (m *Manager) metrics(all []report.Identity, bundles report.Upstream) *metrics.Set {
	identities := slices.Clone(all)
	rest := identities
	if m.hasFirst() {
		identities[0].Name, rest = m.label(m.first), identities[1:]
	}
	slices.SortFunc(rest, func(a, b report.Identity) int { return strings.Compare(a.Name, b.Name) })
	s := new(metrics.Set)
	addStates(s, identities)
	listed := identities[:min(len(identities), maxListed)]
	for _, t := range instants {
		name := "svidkit_secretcache_identity_" + t.name + "_timestamp_seconds"
		help := "When " + t.help + ", in seconds since 1970."
		s.Gauges(name, help, func(add metrics.Add) {
			for _, i := range listed {
				if at := t.at(i); !at.IsZero() {
					add(metrics.Seconds(at), "identity", i.Name)
				}
			}
		})
	}
	s.Gauges("svidkit_secretcache_identity_failures",
		"The number of attempts to obtain a certificate for the identity that have failed "+
			"since the last that did not.", func(add metrics.Add) {
			for _, i := range listed {
				add(float64(i.Failures), "identity", i.Name)
			}
		})
	m.addCA(s, bundles)
	return s
}

// addStates adds the number of identities by the state of their certificate.
func addStates(s *metrics.Set, identities []report.Identity) {
	var valid, expired, missing float64
	now := time.Now()
	for i := range identities {
		switch end := identities[i].NotAfter; {
		case end.IsZero():
			missing++
		case now.Before(end):
			valid++
		default:
			expired++
		}
	}
	s.Gauges("svidkit_secretcache_identities", "The number of identities, by the state of their certificate.",
		func(add metrics.Add) {
			add(valid, "state", "valid")
			add(expired, "state", "expired")
			add(missing, "state", "missing")
		})
}

// addCA adds the metrics of the CA: the trust bundles, and all attempts.
func (m *Manager) addCA(s *metrics.Set, bundles report.Upstream) {
	m.mu.Lock()
	watching := m.watching
	m.mu.Unlock()
	s.Gauges("svidkit_secretcache_bundles_failures",
		"The number of attempts to get the trust bundles that have failed since the last that did not.",
		func(add metrics.Add) { add(float64(bundles.Failures)) })
	s.Gauges("svidkit_secretcache_bundles_confirmed_timestamp_seconds",
		"When the CA last said what the trust bundles are, in seconds since 1970.", func(add metrics.Add) {
			if at := m.counts.confirmed.Load(); at != 0 {
				add(metrics.Seconds(time.Unix(0, at)))
			}
		})
	s.Gauges("svidkit_secretcache_bundles_watched",
		"Whether the CA tells of new trust bundles by itself: 1, or 0 while it is asked.",
		func(add metrics.Add) { add(metrics.Bool(watching)) })
	s.Totals("svidkit_secretcache_attempts_total",
		"The number of attempts to obtain something of the CA, by what it was and the outcome.",
		func(add metrics.Add) {
			add(float64(m.counts.certificates.good.Load()), "kind", "certificate", "outcome", "good")
			add(float64(m.counts.certificates.failed.Load()), "kind", "certificate", "outcome", "failed")
			add(float64(m.counts.bundles.good.Load()), "kind", "bundles", "outcome", "good")
			add(float64(m.counts.bundles.failed.Load()), "kind", "bundles", "outcome", "failed")
		})
}
