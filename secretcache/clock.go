package secretcache

import (
	"sync/atomic"
	"time"
)

// longestSleep bounds every sleep of the scheduler. Timers stand still while the machine is
// suspended, certificates do not.
const longestSleep = time.Minute

// ticks is the scheduler's time. It never goes back, so that a wall clock that is put back does not
// move the next attempt into the far future, and it leaps when the wall clock does, so that a
// machine that wakes up sees at once what is due. It needs a lock around it.
type ticks struct {
	last time.Time
	sum  time.Duration
}

// advance returns the scheduler's time at now.
func (t *ticks) advance(now time.Time) time.Duration {
	t.sum += elapsed(now.Sub(t.last), now.Round(0).Sub(t.last.Round(0)))
	t.last = now
	return t.sum
}

// elapsed returns how much time has passed if the monotonic clock and the wall clock say this. The
// wall clock is believed when it leaps ahead, and not when it merely drifts.
func elapsed(mono, wall time.Duration) time.Duration {
	if wall > mono+time.Second {
		return wall
	}
	return max(mono, 0)
}

// wallClock tells readers the wall time for the price of the monotonic clock, which is half of that
// of time.Now. It compares the two clocks again when a tenth of a second has passed: this is how
// long an expired certificate may be taken for a good one after the machine was suspended.
type wallClock struct {
	epoch    time.Time    // set once, as base is
	base     int64        // epoch in nanoseconds since 1970
	skew     atomic.Int64 // nanoseconds by which the wall clock ran ahead of the monotonic one since epoch
	compared atomic.Int64 // when, in nanoseconds since epoch
}

// unixNano returns the time as nanoseconds since 1970.
func (c *wallClock) unixNano() int64 {
	since := int64(time.Since(c.epoch))
	if uint64(since-c.compared.Load()) > uint64(100*time.Millisecond) { // also if it is negative
		c.skew.Store(time.Now().UnixNano() - c.base - since)
		c.compared.Store(since)
	}
	return c.base + since + c.skew.Load()
}
