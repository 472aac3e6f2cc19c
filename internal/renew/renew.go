// Package renew decides when certificates, trust bundles, tokens and streams are obtained again.
//
// [RenewAt] and [Poll] compute the next attempt from lifetimes and refresh hints. [Backoff] and [Patience] compute
// the wait after a failure from the number of failures, the life that remains and what the server asked for. A [Loop]
// holds any number of entries, starts the attempts that are due, and wakes the goroutines that wait for them.
//
// The arithmetic is pure: functions of times and of one random number in [0,1). A [Loop] has one goroutine,
// [Loop.Run], and one more for each attempt under way; an entry that waits costs neither a goroutine nor a timer.
//
// # When something is due
//
// The time of a [Loop] is the sum of what [Elapsed] returns between two looks at the clock. It advances with the
// monotonic clock, so a wall clock that is set back postpones nothing; [Loop.SetBack] handles credentials that are not
// valid yet after that. When the wall clock leaps ahead, as after a suspension, it leaps too, so that a machine that
// resumes finds what is due within a second. Timers stand still during a suspension, so [Loop.Run], [Sleep] and [Wait]
// look at both clocks a little more than once a second: once for each Loop, however many entries it has.
package renew

import (
	"cmp"
	"context"
	"iter"
	"sync/atomic"
	"time"
)

// leap is how far the wall clock must run ahead of the monotonic clock to count as a leap: less is drift, or a
// correction by NTP.
const leap = time.Second

// Elapsed returns how much time has passed from since to now, which are both readings of [time.Now].
// It is never negative.
func Elapsed(since, now time.Time) time.Duration {
	return elapsed(now.Sub(since), now.Round(0).Sub(since.Round(0)))
}

// elapsed returns how much time has passed if the monotonic clock and the wall clock say this.
func elapsed(mono, wall time.Duration) time.Duration {
	if wall > mono+leap {
		return wall
	}
	return max(mono, 0)
}

// clock is the time of a Loop.
type clock struct {
	read       func() (mono, wall time.Time) // nil for the clocks of the machine
	mono, wall time.Time                     // of the last look; wall has no monotonic reading
	sum        time.Duration
	tick       time.Duration // of wait; 0 for the usual one
	back       bool          // the wall clock was set back, which the user of the clock unsets
}

func (c *clock) advance() time.Duration {
	read := c.read
	if read == nil {
		read = machine
	}
	mono, wall := read()
	if !c.mono.IsZero() {
		c.sum += elapsed(mono.Sub(c.mono), wall.Sub(c.wall))
		c.back = c.back || wall.Sub(c.wall) < mono.Sub(c.mono)-leap
	}
	c.mono, c.wall = mono, wall
	return c.sum
}

// machine reads both clocks.
func machine() (mono, wall time.Time) {
	now := time.Now()
	return now, now.Round(0)
}

// Sleep returns nil after d, or the cause of ctx if that is done before.
func Sleep(ctx context.Context, d time.Duration) error {
	Wait(ctx, d, nil)
	return context.Cause(ctx)
}

// Wait returns after d, when ctx is done, or when wake, which may be nil, is closed.
func Wait(ctx context.Context, d time.Duration, wake <-chan struct{}) { new(clock).wait(ctx, d, wake) }

func (c *clock) wait(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	start, tick := c.advance(), cmp.Or(c.tick, usualTick)
	if d <= 0 { // with -race, Go 1.26 crashes when two goroutines of a synctest bubble ask expired timers at once
		return
	}
	t := time.NewTimer(min(d, tick))
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
			return
		case <-t.C:
		}
		left := d - (c.advance() - start)
		if left <= 0 || c.back {
			c.back = false
			return
		}
		t.Reset(min(left, tick))
	}
}

// Signal tells any number of goroutines that something has changed. The zero Signal is ready to use.
type Signal struct {
	ch atomic.Pointer[chan struct{}]
}

// Changed returns a channel that is closed by the next call of [Signal.Notify]. A reader must take it before it reads
// the state, so that it misses no change.
func (s *Signal) Changed() <-chan struct{} {
	for {
		if p := s.ch.Load(); p != nil {
			return *p
		}
		fresh := make(chan struct{})
		s.ch.CompareAndSwap(nil, &fresh)
	}
}

// Notify closes the channel that [Signal.Changed] returned. The caller must publish the new state first.
func (s *Signal) Notify() {
	if p := s.ch.Swap(nil); p != nil {
		close(*p)
	}
}

// Follow yields what current returns, and then each different value that it returns after changed,
// until ctx is done. A loop body that is slow skips to the newest value. The zero T is not yielded.
func Follow[T comparable](ctx context.Context, changed func() <-chan struct{}, current func() T) iter.Seq[T] {
	return func(yield func(T) bool) {
		var last, zero T
		for ctx.Err() == nil {
			news := changed()
			if v := current(); v != last {
				last = v
				if v != zero && !yield(v) {
					return
				}
				continue
			}
			select {
			case <-ctx.Done():
			case <-news:
			}
		}
	}
}
