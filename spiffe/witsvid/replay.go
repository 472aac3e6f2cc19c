package witsvid

import (
	"crypto/sha256"
	"sync"
	"time"
)

// replays remembers which proofs were used, each until no validator would accept it. The number is bounded:
// when all places are taken, none is forgotten early, and further proofs are refused.
type replays struct {
	places int

	mu    sync.Mutex
	used  map[replayKey]struct{}
	ends  map[int64][]replayKey // by when they can be forgotten, in units of bucket
	swept int64                 // all before this is forgotten
}

// replayKey is a hash, because a peer chooses the name freely.
type replayKey [16]byte

// bucket is how finely the ends are told apart, in seconds.
const bucket = 8

func newReplays(places int) *replays {
	return &replays{places: places, used: map[replayKey]struct{}{}, ends: map[int64][]replayKey{}}
}

// use notes that a proof was used. The name is its "jti" or "nonce", the holder something that only the
// holder of one key can have, so that no peer uses up the names of another; end is when the proof can
// be forgotten.
func (r *replays) use(holder, name string, now, end time.Time) (fresh, full bool) {
	h := sha256.New()
	h.Write([]byte(holder)) // a hash in base64url, always of one length
	h.Write([]byte(name))
	key := replayKey(h.Sum(nil)[:16])

	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.used[key]; ok {
		return false, false
	}
	if len(r.used) >= r.places {
		if r.sweep(now); len(r.used) >= r.places {
			return false, true
		}
	}
	if at := now.Unix() / bucket; at > r.swept {
		r.sweep(now)
	}
	r.used[key] = struct{}{}
	at := end.Unix()/bucket + 1
	r.ends[at] = append(r.ends[at], key)
	return true, false
}

// sweep forgets what is over. There are few buckets, as no proof lasts long.
func (r *replays) sweep(now time.Time) {
	at := now.Unix() / bucket
	if at == r.swept {
		return
	}
	r.swept = at
	for end, keys := range r.ends {
		if end > at {
			continue
		}
		for _, k := range keys {
			delete(r.used, k)
		}
		delete(r.ends, end)
	}
}
