package secretcache

import (
	"cmp"
	"io"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter] with the identities, the default one first, the trust bundles, and the CA as the
// upstream. The name of the default identity is "default" if it is no SPIFFE ID. The metrics are:
//
//	svidkit_secretcache_identities                            by state: valid, expired, or missing before the first
//	svidkit_secretcache_identity_end_timestamp_seconds        by identity: when its certificate ends
//	svidkit_secretcache_identity_failures                     by identity: failed attempts in a row
//	svidkit_secretcache_bundles_failures                      likewise for the trust bundles
//	svidkit_secretcache_bundles_confirmed_timestamp_seconds   when the CA last said what they are
//	svidkit_secretcache_bundles_watched                       1 while the CA tells of new ones by itself, else 0
//	svidkit_secretcache_attempts_total                        by kind, certificate or bundles, and outcome, good or failed
//
// The label identity is the SPIFFE ID of an identity of the Manager, or the name of a credential. The default
// identity and the first 999 others, in the order of their IDs, have samples of their own; all count in
// svidkit_secretcache_identities.
func (m *Manager) Report() report.Report {
	const ca = "CA"
	var bundles spiffe.BundleSource = m
	if t := m.trust.Load(); t != nil {
		bundles = t.set
	}
	r := sourcereport.Of(nil, bundles, ca, m.domain())
	all := m.statuses()
	up := report.Upstream{Name: ca}
	r.Identities = make([]report.Identity, 0, len(all)-1)
	for i, st := range all {
		if st.LastSuccess.After(up.LastSuccess) {
			up.LastSuccess = st.LastSuccess
		}
		if st.Err != nil {
			up.Failures = max(up.Failures, st.Failures)
			up.Err = cmp.Or(up.Err, st.Err)
			up.NextAttempt = sooner(up.NextAttempt, st.NextAttempt)
		}
		if i != rootsIndex {
			r.Identities = append(r.Identities, st.identity(i == 0))
		}
	}
	r.Upstreams = []report.Upstream{up}
	if h := m.first.held.Load(); h != nil {
		r.Identities[0].ChainEnd = certchain.End(h.chain())
	} else {
		r.NotReady = m.notReady(m.first, nil)
	}
	r.Metrics = func(w io.Writer) error { return m.metrics(all).Write(w) }
	return r
}

// sooner returns the earlier of two times, of which a zero one is none.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// status is the state of one identity, or of the trust bundles, at one moment.
type status struct {
	ID spiffe.ID // without a path, that of the trust domain, for the bundles; zero for a default identity that is a credential

	NotBefore, NotAfter time.Time // of the certificate; NotAfter may be that of one above it; zero before the first, and for the bundles

	LastSuccess time.Time // when the certificate was received, or the CA last said what the bundles are; zero before the first
	NextAttempt time.Time // zero while one is under way, and for bundles while the CA tells of new ones by itself
	Failures    int       // since the last that did not fail
	Err         error     // of the last, or nil
}

// rootsIndex is where the trust bundles are in the list of [Manager.statuses].
const rootsIndex = 1

// statuses returns the state of everything: the default identity first, then the bundles, then what was added, in no order.
func (m *Manager) statuses() []status {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []status{m.status(m.first), m.status(m.roots)}
	for _, v := range m.names.Range {
		if e := v.(*entry); e != m.first {
			all = append(all, m.status(e))
		}
	}
	return all
}

// status returns the state of e. The caller holds mu.
func (m *Manager) status(e *entry) status {
	s := status{ID: e.id, Failures: e.Failures(), Err: e.err()}
	if h := e.held.Load(); h != nil {
		s.NotBefore, s.NotAfter, s.LastSuccess = h.notBefore, h.notAfter, h.received
	}
	if at := m.counts.confirmed.Load(); at != 0 && e == m.roots {
		s.LastSuccess = time.Unix(0, at)
	}
	if e != m.roots || !m.watching {
		s.NextAttempt = m.loopOf(e).Next(e)
	}
	return s
}

func (s *status) identity(own bool) report.Identity {
	name := "default"
	if !s.ID.IsZero() {
		name = s.ID.String()
	}
	return report.Identity{
		Name: name, Own: own, NotBefore: s.NotBefore, NotAfter: s.NotAfter, LastSuccess: s.LastSuccess,
		Renewal: s.NextAttempt, Failures: s.Failures, Err: s.Err,
	}
}
