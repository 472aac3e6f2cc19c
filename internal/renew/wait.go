package renew

import (
	"cmp"
	"iter"
	"time"

	"github.com/svidkit/svidkit/internal/retry"
)

const (
	// Shortest is the least time between two attempts of any kind.
	Shortest = 50 * time.Millisecond

	// Longest is the longest time until an attempt. A time.Duration ends after 292 years; a certificate may live
	// longer.
	Longest = 100 * 365 * 24 * time.Hour

	// UsualPoll is the interval for a bundle without a refresh hint, as the SPIFFE standards suggest.
	UsualPoll = 5 * time.Minute
)

// RenewAt returns when to replace a credential that was received at received and is valid from notBefore to notAfter.
// Its life counts from the receipt, because an authority may backdate notBefore; grace is the fraction of that life
// that is left at the renewal, and jitter the largest further fraction that u, in [0,1), makes it earlier. The result
// is at most notAfter, but at least [Shortest] after received.
func RenewAt(received, notBefore, notAfter time.Time, grace, jitter, u float64) time.Time {
	start := received
	if notBefore.After(start) {
		start = notBefore
	}
	life := max(notAfter.Sub(start), 0)
	left := time.Duration(min(grace+jitter*u, 1) * float64(life))
	at := notAfter.Add(-left)
	if soonest := received.Add(Shortest); at.Before(soonest) {
		return soonest
	}
	return at
}

// Poll returns how long to wait before the next fetch of something with the refresh hint: hint within the bounds low
// and high, give or take a tenth. The result is within the bounds too; if they leave no room, chance adds up to a
// tenth of low. u is in [0,1).
func Poll(hint, low, high time.Duration, u float64) time.Duration {
	hint = max(min(hint, high), low)
	return between(max(hint-hint/10, low), min(hint+hint/10, max(high, low+low/10)), u)
}

// Failure describes a failed attempt, to decide when to make the next one.
type Failure struct {
	Times int           // failures in a row, this one included
	Wish  time.Duration // how long the server asked its clients to wait; 0 if it did not
	Final bool          // the server said that a retry will not help
}

// NewFailure returns the Failure of err, the given number of failures in a row: see [retry.After].
func NewFailure(times int, err error) Failure {
	wish, advice := retry.After(err)
	return Failure{Times: times, Wish: wish, Final: advice == retry.Never}
}

// Backoff bounds the waits between failed attempts. The wait after the first failure is drawn from
// Low to First; then the upper end doubles until it is High.
type Backoff struct {
	Low, First, High time.Duration
	Wish             time.Duration // the longest wait that a server may ask for
}

// Wait returns how long to wait after f. The wait is exponential with jitter from u, in [0,1). After a final refusal
// it is at once in the upper half of the longest waits. A longer wish of the server wins, with up to a tenth more, so
// that clients with the same wish come one by one.
func (b Backoff) Wait(f Failure, u float64) time.Duration {
	high := max(b.High, b.Low)
	low := b.Low
	if f.Final {
		low = max(low, high/2)
	} else if n := min(max(f.Times, 1)-1, 16); b.First < high>>n {
		high = max(b.First<<n, low)
	}
	wait := between(low, high, u)
	if f.Wish > wait {
		wish := min(f.Wish, b.Wish)
		wait = max(wait, min(between(wish, wish+wish/10, u), b.Wish))
	}
	return wait
}

// Patience bounds the waits for something with a lifetime.
type Patience struct {
	Low       time.Duration // the shortest wait; less for lives under 500 times Low; 0 means a second
	Impatient time.Duration // the longest wait while there is nothing to serve
	Longest   time.Duration // the longest wait while there is
	Wish      time.Duration // the longest wait that a server may ask for while nothing expires
}

// Wait returns how long to wait after f. life is the whole lifetime of the current credential, 0 if there is none;
// left is the rest of it, 0 or less after its end.
//
// While left is positive, the wait is at most 4 % of it, so that a client recovers from an outage before another 5 %
// of it has passed. A wish is granted up to half of left.
func (p Patience) Wait(f Failure, life, left time.Duration, u float64) time.Duration {
	low := cmp.Or(p.Low, time.Second)
	if life > 0 {
		low = max(min(low, life/500), Shortest)
	}
	b := Backoff{Low: low, First: 2 * low, High: p.Impatient, Wish: p.Wish}
	switch {
	case left > 0:
		b.High, b.Wish = min(left/25, p.Longest), left/2
	case life > 0:
		b.High = min(p.Impatient, life/4)
	}
	return b.Wait(f, u)
}

// WaitEndless is Wait for something that does not expire, such as a trust bundle. A wish is granted up to p.Wish.
func (p Patience) WaitEndless(f Failure, u float64) time.Duration {
	low := cmp.Or(p.Low, time.Second)
	return Backoff{Low: low, First: 2 * low, High: p.Longest, Wish: p.Wish}.Wait(f, u)
}

// NextEnd returns the first of ends that is after now or, if none is, the last of them. It is zero if there are
// none. Zero times do not count.
func NextEnd(now time.Time, ends iter.Seq[time.Time]) time.Time {
	var next, last time.Time
	for end := range ends {
		if end.After(last) {
			last = end
		}
		if end.After(now) && (next.IsZero() || end.Before(next)) {
			next = end
		}
	}
	return cmp.Or(next, last)
}

// AttemptTime returns how long an attempt may take when the current credential has left to live: a hundredth of left,
// but at most timeout and at least a sixth of timeout. So an attempt that hangs leaves time for the next.
func AttemptTime(timeout, left time.Duration) time.Duration {
	if left <= 0 {
		return timeout
	}
	return min(timeout, max(left/100, timeout/6))
}

// between returns a + u·(b-a).
func between(a, b time.Duration, u float64) time.Duration {
	return a + time.Duration(u*float64(b-a))
}
