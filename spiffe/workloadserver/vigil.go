package workloadserver

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// vigil decides when a stream checks for changes without a notification: when half of the life of a served identity is
// over, because its source should have renewed it by then; repeatedly after that, until there is a new identity; after
// a failed check; and every five minutes, for everything without a lifetime.
type vigil struct {
	ids      []Identity
	lives    []life // of ids
	times    int    // checks after half of a life that found no new identity
	failures int    // in a row
	failure  error
}

// life is from the start of an identity to the end of the certificate in its chain that expires first.
type life struct{ begin, end time.Time }

// seen records the served identities after a successful check.
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

// failed records a failed check.
func (w *vigil) failed(err error) {
	w.failures++
	w.failure = err
}

// wait returns how long to wait from now, and a served identity that has expired, if any.
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
