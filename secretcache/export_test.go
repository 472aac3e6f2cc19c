package secretcache

import (
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Unhurried has m notice a suspension within a minute and not within a second, which makes days of virtual time
// cheap.
func Unhurried(m *Manager) { m.bundles.Tick, m.identities.Tick = time.Minute, time.Minute }

// SetClock has m plan by these clocks, at which it looks once in tick. It is called before Run.
func SetClock(m *Manager, tick time.Duration, read func() (mono, wall time.Time)) {
	m.bundles.Tick, m.identities.Tick = tick, tick
	m.bundles.SetClock(read)
	m.identities.SetClock(read)
}

// Leap moves the dates of all that m holds by d into the past, which is what a wall clock that leaps ahead by d means
// for them. A bubble of testing/synctest has no clock that leaps.
func Leap(m *Manager, d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, v := range m.names.Range {
		e := v.(*entry)
		if h := e.held.Load(); h != nil {
			moved := *h
			moved.received, moved.notBefore, moved.notAfter = h.received.Add(-d), h.notBefore.Add(-d), h.notAfter.Add(-d)
			e.held.Store(&moved)
		}
	}
}

// Pace is the arithmetic of a Manager with cfg, for a certificate that was received at received and ends at notAfter:
// when it is renewed, and how long the Manager waits after a failure while it has left to live. u is in [0,1).
func Pace(cfg Config) (renewAt func(received, notAfter time.Time, u float64) time.Time, retryAfter func(failures int, life, left time.Duration, u float64) time.Duration) {
	cfg.GraceRatio, cfg.Jitter = cfg.timing()
	renewAt = func(received, notAfter time.Time, u float64) time.Time {
		return cfg.renewAt(&held{received: received, notBefore: received, notAfter: notAfter}, u)
	}
	retryAfter = func(failures int, life, left time.Duration, u float64) time.Duration {
		received := time.Unix(0, 0)
		return (&held{received: received, notAfter: received.Add(life)}).retryAfter(renew.Failure{Times: failures}, left, u)
	}
	return renewAt, retryAfter
}

// Status is the state of one identity, or of the trust bundles, whose ID is that of the trust domain.
type Status struct {
	ID                                            spiffe.ID
	NotBefore, NotAfter, LastSuccess, NextAttempt time.Time
	Failures                                      int
	Err                                           error
}

// Status returns the state of everything, as reports tell it: the default identity first, then the bundles, then what was
// added, in the order of the IDs.
func (m *Manager) Status() (all []Status) {
	identities, roots, _ := m.states()
	for k, i := range identities {
		id, _ := spiffe.ParseID(i.Name) // zero for a credential
		all = append(all, Status{id, i.NotBefore, i.NotAfter, i.LastSuccess, i.Renewal, i.Failures, i.Err})
		if k == 0 {
			all = append(all, Status{m.roots.id, time.Time{}, time.Time{}, roots.LastSuccess, roots.NextAttempt, roots.Failures, roots.Err})
		}
	}
	slices.SortFunc(all[2:], func(a, b Status) int { return strings.Compare(a.ID.String(), b.ID.String()) })
	return all
}
