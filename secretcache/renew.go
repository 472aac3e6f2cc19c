package secretcache

import (
	"errors"
	"time"
)

// The waits. Those that depend on a lifetime are in the functions below.
const (
	shortestWait  = 50 * time.Millisecond // between two attempts of whatever kind
	usualWait     = time.Second           // the first back-off of certificates that live for minutes and more
	longestWait   = 30 * time.Minute      // between two attempts while there is something to serve
	impatientWait = 30 * time.Second      // between two attempts while there is nothing to serve
	longestWish   = time.Hour             // that the CA can ask of us while there is nothing to serve

	longestLife = 100 * 365 * 24 * time.Hour // before a renewal: durations end after 292 years, certificates need not

	defaultPoll  = 5 * time.Minute // for a bundle without a refresh hint (FED-8, BND-22)
	shortestPoll = time.Second     // wins over a shorter hint (BND-21)
	longestPoll  = 24 * time.Hour  // a root that was withdrawn must not live on for the length of a typing error
)

// renewAt returns when to replace a certificate that we received at received and that is valid
// from notBefore to notAfter. Life counts from when we received it, as CAs backdate notBefore;
// grace and jitter are fractions of that life, and u, in [0,1), is the random number. The result
// is never after notAfter, and never sooner after received than shortestWait.
func renewAt(received, notBefore, notAfter time.Time, grace, jitter, u float64) time.Time {
	start := received
	if notBefore.After(start) {
		start = notBefore
	}
	life := max(notAfter.Sub(start), 0)
	left := time.Duration(min(grace+jitter*u, 1) * float64(life))
	at := notAfter.Add(-left)
	if soonest := received.Add(shortestWait); at.Before(soonest) {
		return soonest
	}
	return at
}

// refusal is what a failure means for the next attempt.
type refusal struct {
	times int           // failures in a row, this one included
	wish  time.Duration // the CA's own; 0 means none
	final bool          // the CA said that asking again will not help
}

// asked reads the CA's wish from err.
func asked(err error) (wish time.Duration, final bool) {
	e, ok := errors.AsType[interface {
		error
		Retryable() (time.Duration, bool)
	}](err)
	if !ok {
		return 0, false
	}
	after, again := e.Retryable()
	return max(after, 0), !again
}

// retryIn returns how long to wait after a failure: exponential, with full jitter from u in [0,1).
// What is being renewed lived for life (0 if there was nothing) and has left to live (0 or less if
// it ended).
//
// While there is something left, the wait is at most 4 % of it, so that an outage ends for us before
// another 5 % of it are gone. The shortest wait is a second, or less for lives of less than
// 500 seconds. A final refusal goes to the long waits at once. A wish that is longer than our wait
// wins, with up to a tenth more so that those who were told the same come one by one, up to half of
// what is left.
func retryIn(r refusal, life, left time.Duration, u float64) time.Duration {
	low := usualWait
	if life > 0 {
		low = max(min(usualWait, life/500), shortestWait)
	}
	high, longest := impatientWait, longestWish
	switch {
	case left > 0:
		high, longest = min(left/25, longestWait), left/2
	case life > 0:
		high = min(impatientWait, life/4)
	}
	return r.wait(low, max(high, low), longest, u)
}

// wait grows from low to high with the failures, and is the CA's wish if that is longer, but not
// longer than longest.
func (r refusal) wait(low, high, longest time.Duration, u float64) time.Duration {
	if r.final {
		low = max(low, high/2)
	} else {
		high = min(high, low<<min(r.times, 16)) // low is at most seconds: no overflow
	}
	wait := between(low, high, u)
	if r.wish > wait {
		wish := min(r.wish, longest)
		wait = max(wait, min(between(wish, wish+wish/10, u), longest))
	}
	return wait
}

// pollIn returns when to ask for the bundles again: after the bundle's refresh hint, give or take
// a tenth (FED-7).
func pollIn(hint time.Duration, ok bool, u float64) time.Duration {
	if !ok {
		hint = defaultPoll
	}
	hint = max(min(hint, longestPoll), shortestPoll)
	return between(hint-hint/10, hint+hint/10, u)
}

// pollAgainIn returns when to ask for the bundles again after a failure. With a bundle in hand the
// waits grow to the usual interval, without one to half a minute.
func pollAgainIn(r refusal, poll time.Duration, have bool, u float64) time.Duration {
	if have {
		return r.wait(usualWait, max(poll, usualWait), longestWish, u)
	}
	return r.wait(usualWait, impatientWait, longestWish, u)
}

// attemptTime returns how long an attempt may take when what is being renewed has left to live: a
// hundredth of that, but not more than timeout and not less than a sixth of it.
func attemptTime(timeout, left time.Duration) time.Duration {
	if left <= 0 {
		return timeout
	}
	return min(timeout, max(left/100, timeout/6))
}

// between returns a + u·(b-a).
func between(a, b time.Duration, u float64) time.Duration {
	return a + time.Duration(u*float64(b-a))
}
