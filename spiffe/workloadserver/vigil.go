package workloadserver

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// vigil decides when a stream looks again although it was told of no change: when half of the life of an identity that
// it serves is over, because its source should have renewed it by then; repeatedly after that, until there is another
// identity; after a look that failed; and every five minutes, for everything that has no lifetime.
type vigil struct {
	ids      []Identity
	lives    []life // of ids
	times    int    // looks after the middle of a life that have found the same identities
	failures int    // in a row
	failure  error
}

// life is when an identity begins and when the first certificate of its chain ends.
type life struct{ begin, end time.Time }

// seen takes note of the identities that are served.
func (w *vigil) seen(ids []Identity) {
	w.failures, w.failure = 0, nil
	if slices.Equal(ids, w.ids) {
		return
	}
	w.ids, w.lives, w.times = ids, w.lives[:0], 0
	for _, id := range ids {
		l := life{id.SVID.Leaf().NotBefore, id.SVID.NotAfter()}
		for _, c := range id.SVID.Chain()[1:] {
			if c.NotAfter.Before(l.end) {
				l.end = c.NotAfter
			}
		}
		w.lives = append(w.lives, l)
	}
}

// failed takes note of a look that has failed.
func (w *vigil) failed(err error) {
	w.failures++
	w.failure = err
}

// wait returns how long to wait from now, and an identity that is served although it has expired.
func (w *vigil) wait(now time.Time) (wait time.Duration, expired spiffe.ID) {
	u := rand.Float64()
	wait = renew.Poll(renew.UsualPoll, renew.Shortest, renew.Longest, u)
	if w.failure != nil {
		wait = min(wait, patience.Wait(renew.NewFailure(w.failures, w.failure), 0, 0, u))
	}
	aged := false
	for i, l := range w.lives {
		life, left := l.end.Sub(l.begin), l.end.Sub(now)
		if young := left - life/2; young > 0 {
			wait = min(wait, young)
			continue
		}
		aged = true
		wait = min(wait, patience.Wait(renew.Failure{Times: w.times + 1}, life, left, u))
		if left <= 0 {
			expired = w.ids[i].SVID.ID()
		}
	}
	if aged {
		w.times++
	}
	return max(wait, renew.Shortest), expired
}
