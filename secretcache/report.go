package secretcache

import (
	"cmp"
	"fmt"
	"io"
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
		identities[0].ChainEnd = certchain.End(h.chain())
		if !m.trust.Load().anchors(h.anchor) { // the anchor is published before the certificate
			const orphaned = "no peer that has the trust bundle accepts the identity %s, whose root has left it"
			r.NotReady = fmt.Errorf(orphaned, m.label(m.first))
		}
	} else {
		r.NotReady = m.notReady(m.first, nil)
	}
	r.Identities, r.Attempts = identities, attempts
	up := report.Upstream{Name: ca}
	for i := range identities {
		one := &identities[i]
		attempted(&up, one.LastSuccess, one.Renewal, one.Failures, one.Since, one.Err)
	}
	attempted(&up, roots.LastSuccess, roots.NextAttempt, roots.Failures, roots.Since, roots.Err)
	r.Upstreams = []report.Upstream{up}
	r.Metrics = func(w io.Writer) error { return m.metrics(identities, roots).Write(w) }
	return r
}

// attempted adds the attempts for one entry to the CA's attempts.
func attempted(up *report.Upstream, success, next time.Time, failures int, since time.Time, err error) {
	if success.After(up.LastSuccess) {
		up.LastSuccess = success
	}
	if err == nil {
		return
	}
	up.Failures = max(up.Failures, failures)
	up.Err = cmp.Or(up.Err, err)
	if up.Since.IsZero() || since.Before(up.Since) {
		up.Since = since
	}
	if !next.IsZero() && (up.NextAttempt.IsZero() || next.Before(up.NextAttempt)) {
		up.NextAttempt = next
	}
}

// states returns the states of the identities, the default one first, and of the trust bundles: when the CA last
// confirmed them, when the Manager asks again (zero while the CA announces them), and the number of failures. It also
// returns the last attempts.
func (m *Manager) states() (identities []report.Identity, roots report.Upstream, attempts []report.Attempt) {
	m.mu.Lock()
	defer m.mu.Unlock()
	identities = make([]report.Identity, 0, m.reported)
	if m.hasFirst() {
		identities = append(identities, m.state(m.first))
		identities[0].Own = true
		if m.first.id.IsZero() {
			identities[0].Name = "default"
		}
	}
	for _, v := range m.names.Range {
		if e := v.(*entry); e != m.first {
			identities = append(identities, m.state(e))
		}
	}
	m.reported = len(identities)
	roots = report.Upstream{Failures: m.roots.Failures(), Err: m.roots.err()}
	if roots.Err != nil {
		roots.Since = m.roots.since
	}
	if at := m.counts.confirmed.Load(); at != 0 {
		roots.LastSuccess = time.Unix(0, at)
	}
	if !m.watching {
		roots.NextAttempt = m.bundles.Next(m.roots)
	}
	return identities, roots, m.history.all()
}

// state returns the state of an identity. The caller holds mu.
func (m *Manager) state(e *entry) report.Identity {
	i := report.Identity{Name: e.id.String(), Renewal: m.loopOf(e).Next(e), Failures: e.Failures(), Err: e.err()}
	if h := e.held.Load(); h != nil {
		i.NotBefore, i.NotAfter, i.LastSuccess, i.Certificate = h.notBefore, h.notAfter, h.received, h.leaf
	}
	if i.Err != nil {
		i.Since = e.since
	}
	return i
}
