package witsvid

import (
	"crypto/sha256"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// replays remembers used proofs, each until no validator would accept it. It forgets none early: when it is full for
// an ID, a further proof is refused.
//
// It holds each + each/2 proofs. The share of an ID depends on how much is free: it may have at most twice as much as
// is left after it. So a single ID can take each, there is always space for others, and the more IDs try to take it
// all, the less each gets.
type replays struct {
	each int

	mu    sync.Mutex
	used  map[proofHash]struct{}
	ids   map[spiffe.ID]*account
	ends  map[int64][]usedProof // by when they can be forgotten, in units of bucket
	swept int64                 // everything before this is forgotten
}

// proofHash is a hash, because a peer chooses the name of a proof freely.
type proofHash [16]byte

// account counts the remembered proofs of an ID.
type account struct {
	id   spiffe.ID
	held int
}

type usedProof struct {
	proof proofHash
	of    *account
}

// bucket is the resolution of the ends, in seconds.
const bucket = 8

func newReplays(each int) *replays {
	return &replays{
		each: each, used: map[proofHash]struct{}{}, ids: map[spiffe.ID]*account{}, ends: map[int64][]usedProof{},
	}
}

// use records that a proof of id was used. name is its "jti". owner is a value that only the holder of one key can
// have, so that no peer uses up the names of another. end is when the proof can be forgotten.
func (r *replays) use(id spiffe.ID, owner, name string, now, end time.Time) (fresh, full bool) {
	sum := sha256.Sum256([]byte(owner + name)) // owner is a hash in base64url, always of one length
	proof := proofHash(sum[:16])
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.used[proof]; ok {
		return false, false
	}
	r.sweep(now)
	of := r.ids[id]
	if of == nil {
		of = &account{id: id}
	}
	if twiceFree := 3*r.each - 2*(len(r.used)+1); of.held+1 > twiceFree {
		return false, true
	}
	of.held++
	r.ids[id] = of
	r.used[proof] = struct{}{}
	at := end.Unix()/bucket + 1
	r.ends[at] = append(r.ends[at], usedProof{proof, of})
	return true, false
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
			if p.of.held--; p.of.held == 0 {
				delete(r.ids, p.of.id)
			}
		}
		delete(r.ends, end)
	}
}
