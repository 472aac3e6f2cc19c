package secretcache

import "time"

// Unhurried has m notice a suspension within a minute and not within a second, which makes days of virtual time
// cheap.
func Unhurried(m *Manager) { m.bundles.Tick, m.identities.Tick = time.Minute, time.Minute }
