package workloadserver

import (
	"math/rand/v2"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// patience bounds the waits after a failed check, and after half of the life of an identity.
var patience = renew.Patience{Impatient: 30 * time.Second, Longest: 30 * time.Second, Wish: time.Minute}

// nextCheck returns how long a stream waits until it checks for changes without a notification, and a served identity
// that has expired, if any. It checks when half of the life of a served identity is over, because its source should
// have renewed it by then; repeatedly after that, until there is a new identity; after a failed check; and every five
// minutes, for everything without a lifetime.
func nextCheck(ids []Identity, failures int, failure error, now time.Time) (wait time.Duration, expired spiffe.ID) {
	u := rand.Float64()
	wait = renew.Poll(renew.UsualPoll, renew.Shortest, renew.Longest, u)
	if failure != nil {
		wait = min(wait, patience.Wait(renew.NewFailure(failures, failure), 0, 0, u))
	}
	for _, id := range ids {
		end := certchain.End(id.SVID.Chain())
		life, left := end.Sub(id.SVID.Leaf().NotBefore), end.Sub(now)
		if left > life/2 {
			wait = min(wait, left-life/2)
			continue
		}
		wait = min(wait, patience.Wait(renew.Failure{Times: 10}, life, left, u))
		if left <= 0 {
			expired = id.SVID.ID()
		}
	}
	return max(wait, renew.Shortest), expired
}
