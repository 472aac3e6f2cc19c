package secretcache

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Report implements [report.Reporter]. It reports the identities, the default one first, the trust bundles, and the
// CA, under the CAName of its Config, as the upstream. A default identity without a SPIFFE ID has the name "default".
// The metrics are:
//
//	svidkit_secretcache_identities                             by state: valid, expired, or missing before the first
//	svidkit_secretcache_identity_start_timestamp_seconds       by identity: when its certificate begins to be valid
//	svidkit_secretcache_identity_end_timestamp_seconds         by identity: when it ends
//	svidkit_secretcache_identity_attempt_timestamp_seconds     by identity: when the next attempt begins
//	svidkit_secretcache_identity_failing_timestamp_seconds     by identity: the first failed attempt in a row
//	svidkit_secretcache_identity_failures                      by identity: failed attempts in a row
//	svidkit_secretcache_bundles_failures                       likewise for the trust bundles
//	svidkit_secretcache_bundles_confirmed_timestamp_seconds    when the CA last said what they are
//	svidkit_secretcache_bundles_watched                        1 while the CA tells of new ones by itself, else 0
//	svidkit_secretcache_attempts_total                         by kind and outcome, good or failed
//
// The label identity is the SPIFFE ID of an identity of the Manager, or the name of a credential. The default
// identity and the first 999 others, ordered by ID, have their own samples; all count in
// svidkit_secretcache_identities.
func (m *Manager) Report() report.Report {
	ca := strings.TrimSpace("CA " + m.cfg.CAName)
	var bundles spiffe.BundleSource = m
	if t := m.trust.Load(); t != nil {
		bundles = t.set
	}
	r := sourcereport.Of(nil, bundles, ca, m.domain())
	identities, roots, attempts := m.states()
	if !m.hasFirst() {
		if m.trust.Load() == nil {
			r.NotReady = m.notReady(m.roots, nil)
		}
	} else if h := m.first.held.Load(); h != nil {
		identities[0].ChainEnd = certchain.End(h.own.Chain())
		if !m.trust.Load().anchors(h.roots[:1]) { // the root is published before the certificate
			const orphaned = "no peer that has the trust bundle accepts the identity %s, whose root has left it"
			r.NotReady = fmt.Errorf(orphaned, m.label(m.first))
		}
	} else {
		r.NotReady = m.notReady(m.first, nil)
	}
	r.Identities, r.Attempts = identities, attempts
	up := report.Upstream{Name: ca}
	for _, i := range identities {
		include(&up, report.Upstream{LastSuccess: i.LastSuccess, NextAttempt: i.Renewal, Failures: i.Failures,
			Since: i.Since, Err: i.Err})
	}
	include(&up, roots)
	r.Upstreams = []report.Upstream{up}
	r.Metrics = func(w io.Writer) error { return m.metrics(identities, roots).Write(w) }
	return r
}

// include adds the attempts for one entry to the CA's attempts.
func include(up *report.Upstream, one report.Upstream) {
	up.LastSuccess = slices.MaxFunc([]time.Time{up.LastSuccess, one.LastSuccess}, time.Time.Compare)
	if one.Err == nil {
		return
	}
	up.Failures, up.Err = max(up.Failures, one.Failures), cmp.Or(up.Err, one.Err)
	up.Since = earlier(up.Since, one.Since)
	up.NextAttempt = earlier(up.NextAttempt, one.NextAttempt)
}

// earlier returns the earlier of two times, of which a zero one is not known.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

// states returns the states of the identities, the default one first, and of the trust bundles: when the CA last
// confirmed them, when the Manager asks again (zero while the CA announces them), and the number of failures. It also
// returns the last attempts.
func (m *Manager) states() (identities []report.Identity, roots report.Upstream, attempts []report.Attempt) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.hasFirst() {
		identities = append(identities, m.state(m.first))
	}
	for _, v := range m.names.Range {
		if e := v.(*entry); e != m.first {
			identities = append(identities, m.state(e))
		}
	}
	roots = report.Upstream{Failures: m.roots.Failures(), Err: m.roots.err(), Since: m.roots.since}
	if at := m.counts.confirmed.Load(); at != 0 {
		roots.LastSuccess = time.Unix(0, at)
	}
	if !m.watching {
		roots.NextAttempt = m.bundles.Next(m.roots)
	}
	return identities, roots, slices.Clone(m.tried)
}

// state returns the state of an identity. The caller holds mu.
func (m *Manager) state(e *entry) report.Identity {
	i := report.Identity{Name: e.name(), Own: e == m.first, Renewal: m.loopOf(e).Next(e), Failures: e.Failures(),
		Since: e.since, Err: e.err()}
	if h := e.held.Load(); h != nil {
		i.NotBefore, i.NotAfter, i.LastSuccess, i.Certificate = h.notBefore, h.notAfter, h.received, h.leaf
	}
	return i
}
