package secretcache

import (
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Status is the state of one identity, or of the trust bundles, at one moment. It has no secrets.
type Status struct {
	// ID is the identity. An ID without a path, that of the trust domain, stands for the bundles; the zero ID for the
	// default identity if that is a credential.
	ID spiffe.ID

	// NotBefore is when the current certificate begins to be valid, and NotAfter when it or something in its verified
	// chain ends. They are zero before the first, and for the bundles.
	NotBefore, NotAfter time.Time

	// LastSuccess is when the current certificate was received, or the CA last said what the bundles are; zero before
	// the first.
	LastSuccess time.Time

	// NextAttempt is when Run will try to renew. It is zero while an attempt is under way, and for
	// bundles while the CA tells of new ones by itself.
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
	defer m.mu.Unlock()
	entries := []*entry{m.first, m.roots}
	for _, v := range m.names.Range {
		if e := v.(*entry); e != m.first {
			entries = append(entries, e)
		}
	}
	slices.SortFunc(entries[2:], func(a, b *entry) int { return strings.Compare(a.id.String(), b.id.String()) })
	all := make([]Status, len(entries))
	for i, e := range entries {
		all[i] = m.status(e)
	}
	return all
}

// status returns the state of e. The caller holds mu.
func (m *Manager) status(e *entry) Status {
	s := Status{ID: e.id, Failures: e.Failures(), Err: e.err()}
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
