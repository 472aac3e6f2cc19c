package secretcache

import (
	"slices"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Status is the state of one identity, or of the trust bundles, at one moment. It has no secrets.
type Status struct {
	// ID is the identity. An ID without a path, that of the trust domain, stands for the bundles.
	ID spiffe.ID

	// NotAfter is when the current certificate or something in its verified chain ends. It is zero
	// before the first, and for the bundles.
	NotAfter time.Time

	// NextAttempt is when Run will try to renew. It is zero while an attempt is under way.
	NextAttempt time.Time

	// Failures counts the failed attempts since the last that did not fail; Err is the last failure,
	// or nil.
	Failures int
	Err      error
}

// Status returns the state of everything, for health checks and diagnosis: the default identity
// first, then the bundles, then what was added, in the order of the IDs.
func (m *Manager) Status() []Status {
	m.mu.Lock()
	wall := time.Now()
	now := m.ticks.advance(wall)
	all := []Status{{}, m.roots.status(now, wall)}
	for _, v := range m.names.Range {
		if e := v.(*entry); e == m.first {
			all[0] = e.status(now, wall)
		} else {
			all = append(all, e.status(now, wall))
		}
	}
	m.mu.Unlock()
	slices.SortFunc(all[2:], func(a, b Status) int { return a.ID.Compare(b.ID) })
	return all
}

// status returns the state of e. The caller holds the Manager's mu.
func (e *entry) status(now time.Duration, wall time.Time) Status {
	s := Status{ID: e.id, Failures: e.failures, Err: e.err()}
	if h := e.held.Load(); h != nil {
		s.NotAfter = h.notAfter
	}
	if !e.busy {
		s.NextAttempt = wall.Round(0).Add(max(e.due-now, 0))
	}
	return s
}
