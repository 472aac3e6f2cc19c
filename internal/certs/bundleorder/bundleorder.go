// Package bundleorder decides whether a trust bundle from an authenticated publisher replaces the one in force.
//
// Sequence numbers order bundles, and a lower one never replaces a higher one (SPIFFE Trust Domain and Bundle section
// 4.1.1). So a number that is far too high would keep out every later bundle, and a bundle without a number would
// lose the order. A momentary mistake of an endpoint must cause neither. A bundle that [Doubt] doubts is held: the
// bundle in force stays until an operator decides, or until the publisher has repeated its answer for long enough
// ([Answers], [Time]), because publishers do restart or lose their counters.
//
// # Plausible numbers
//
// A publisher counts, or takes its number from a clock. For a counter, a step of at most [MaxStep] is plausible. Two
// numbers that are both times since 1970, in seconds, milliseconds, microseconds or nanoseconds, may be any time
// apart, if the later one is not more than [MaxAhead] in the future. No other step is plausible, so the first clock
// number after a counter that started at 1 is held too. No number over [MaxNumber] is plausible, unless it is a step
// from the one in force.
package bundleorder

import (
	"fmt"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Bounds of plausible numbers, and of the repetition that overrides them.
const (
	// MaxStep is the largest step of a counter. A publisher that changes its bundle once an hour takes more than a
	// year to count so far.
	MaxStep = 10_000

	// MaxAhead is how far in the future a number that is a time may be.
	MaxAhead = 24 * time.Hour

	// MaxNumber is higher than any clock number before the year 2116.
	MaxNumber = 1 << 62

	// Answers is how many equal answers in a row prevail, if at least Time passes from the first to the last.
	Answers = 3
	Time    = 30 * time.Minute
)

// Doubt says why next is not a plausible successor of have, or returns "". A nil have means that no bundle is in
// force. Doubt does not look for lower numbers: [spiffe.Bundle.Supersedes] does.
func Doubt(have, next *spiffe.Bundle, now time.Time) string {
	n, numbered := next.Sequence()
	last, was := uint64(0), false
	if have != nil {
		last, was = have.Sequence()
	}
	switch {
	case was && !numbered && empty(next) && !empty(have):
		return fmt.Sprintf("it has no authorities and no sequence number, "+
			"and the bundle in force has authorities and number %d", last)
	case was && !numbered:
		return fmt.Sprintf("it has no sequence number, and the bundle in force has %d", last)
	case was && n == last && empty(next) && !empty(have):
		return fmt.Sprintf("it has no authorities, "+
			"and the bundle in force has the same sequence number, %d, and authorities", last)
	case was && (n <= last || n-last <= MaxStep || times(last, n, now)):
		return ""
	case was:
		return fmt.Sprintf("its sequence number is %d, and the bundle in force has %d: the step is too large", n, last)
	case numbered && n > MaxNumber:
		return fmt.Sprintf("its sequence number is %d, which is too high for a counter and for a clock", n)
	}
	return ""
}

// times reports whether both numbers are times of one unit, and n is not far in the future.
func times(last, n uint64, now time.Time) bool {
	const first = 1_000_000_000 // in seconds: 2001
	latest := now.Add(MaxAhead).Unix()
	if latest < first {
		return false // the clock is not set
	}
	for _, unit := range []uint64{1, 1e3, 1e6, 1e9} {
		if last >= first*unit && n >= first*unit && n <= uint64(latest)*unit {
			return true
		}
	}
	return false
}

func empty(b *spiffe.Bundle) bool {
	c := b.Contents()
	return len(c.X509Authorities)+len(c.JWTAuthorities)+len(c.WITAuthorities) == 0
}

// Offers keeps a publisher's held bundle. The zero Offers is ready to use. It is not safe for concurrent use.
type Offers struct {
	held  *spiffe.Bundle // the newest
	first time.Time
	times int
}

// Judge records an answer and decides whether next replaces have. prevailed reports that next replaces have although
// it was held. The error says why next does not replace have; the caller adds the operator's remedy.
func (o *Offers) Judge(have, next *spiffe.Bundle, now time.Time) (prevailed bool, err error) {
	doubt := Doubt(have, next, now)
	if doubt == "" {
		o.Forget()
		return false, nil
	}
	if o.held == nil || !next.Supersedes(o.held) || Doubt(o.held, next, now) != "" && !next.Equal(o.held) {
		*o = Offers{first: now}
	}
	o.held, o.times = next, o.times+1
	if o.times >= Answers && now.Sub(o.first) >= Time {
		o.Forget()
		return true, nil
	}
	return false, fmt.Errorf("the bundle is held: %s (answer %d; "+
		"it prevails if the publisher repeats it %d times in %v)", doubt, o.times, Answers, Time)
}

// Held returns the held bundle, or nil.
func (o *Offers) Held() *spiffe.Bundle { return o.held }

// Forget ends the hold: the publisher has confirmed the bundle in force, or an operator has decided.
func (o *Offers) Forget() { *o = Offers{} }
