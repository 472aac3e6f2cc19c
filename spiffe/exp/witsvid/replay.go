package witsvid

import (
	"crypto/sha256"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// replays remembers used proofs, each until no validator would accept it. It forgets none early: when it is full for
// a holder, a further proof is refused.
//
// It holds each + each/2 proofs. The share of a holder depends on how much is free: a key may have at most twice as
// much as is left after it, and an ID, with all its keys, at most four times. So if there is only one key, it can
// take each, and one ID a fifth more. There is always space for others, and the more holders try to take it all, the
// less each gets.
type replays struct {
	each int

	mu    sync.Mutex
	used  map[replayKey]struct{}
	keys  map[keyName]*account
	ids   map[spiffe.ID]int     // how many proofs of each are remembered
	ends  map[int64][]usedProof // by when they can be forgotten, in units of bucket
	swept int64                 // everything before this is forgotten
}

// replayKey is a hash, because a peer chooses the name freely.
type replayKey [16]byte

// keyName is the name of the account of one key of an ID.
type keyName struct {
	id  spiffe.ID
	key replayKey
}

// account counts the remembered proofs of one key.
type account struct {
	name keyName
	held int
}

type usedProof struct {
	proof replayKey
	key   *account
}

// bucket is the resolution of the ends, in seconds.
const bucket = 8

func newReplays(each int) *replays {
	return &replays{
		each: each, used: map[replayKey]struct{}{}, keys: map[keyName]*account{},
		ids: map[spiffe.ID]int{}, ends: map[int64][]usedProof{},
	}
}

// use records that h has used a proof. name is its "jti". owner is a value that only the holder of one key can have,
// so that no peer uses up the names of another. end is when the proof can be forgotten.
func (r *replays) use(h *holder, owner, name string, now, end time.Time) (fresh, full bool) {
	sum := sha256.New()
	sum.Write([]byte(owner)) // a hash in base64url, always of one length
	sum.Write([]byte(name))
	proof := replayKey(sum.Sum(nil)[:16])
	by := keyName{h.id, h.thumbprint}

	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.used[proof]; ok {
		return false, false
	}
	if !r.room(by) {
		if r.sweep(now); !r.room(by) {
			return false, true
		}
	}
	if at := now.Unix() / bucket; at > r.swept {
		r.sweep(now)
	}
	key := r.keys[by]
	if key == nil {
		key = &account{name: by}
		r.keys[by] = key
	}
	key.held++
	r.ids[by.id]++
	r.used[proof] = struct{}{}
	at := end.Unix()/bucket + 1
	r.ends[at] = append(r.ends[at], usedProof{proof, key})
	return true, false
}

// room reports whether one more proof of a holder may be remembered.
func (r *replays) room(by keyName) bool {
	ofKey, ofID := 1, r.ids[by.id]+1
	if a := r.keys[by]; a != nil {
		ofKey += a.held
	}
	twice := 3*r.each - 2*(len(r.used)+1) // the free space, twice, as the capacity is three halves of each
	return ofKey <= twice && ofID <= 2*twice
}

// sweep forgets expired proofs. There are few buckets, as no proof lasts long.
func (r *replays) sweep(now time.Time) {
	at := now.Unix() / bucket
	if at == r.swept {
		return
	}
	r.swept = at
	for end, proofs := range r.ends {
		if end > at {
			continue
		}
		for _, p := range proofs {
			delete(r.used, p.proof)
			by := p.key.name
			if p.key.held--; p.key.held == 0 {
				delete(r.keys, by)
			}
			if r.ids[by.id]--; r.ids[by.id] == 0 {
				delete(r.ids, by.id)
			}
		}
		delete(r.ends, end)
	}
}
