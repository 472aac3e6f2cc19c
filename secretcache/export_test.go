package secretcache

import "time"

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
