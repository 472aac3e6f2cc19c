package jwtsvid

import (
	"hash/maphash"
	"sync/atomic"
	"time"
	"weak"

	"github.com/svidkit/svidkit/spiffe"
)

// memory remembers verified tokens, at most as many as it has slots. A token may be in a few slots
// that follow from its hash, so that both a look-up and a replacement touch no others, take no lock
// and make no garbage.
type memory struct {
	seed  maphash.Seed
	slots []atomic.Pointer[memo]
}

// memo is a token that was verified with a bundle. It is worth nothing with any other: a bundle
// never changes, so its address is its generation. The pointer is weak, so that a token which does not
// come again keeps no bundle that nobody has any more; the address of one that is gone is nobody's.
type memo struct {
	hash   uint64
	proof  *Verified
	bundle weak.Pointer[spiffe.Bundle]
}

const (
	ways       = 4       // slots that a token may be in
	longestKey = 4 << 10 // bytes of a token that is remembered
)

func newMemory(count int) *memory {
	return &memory{seed: maphash.MakeSeed(), slots: make([]atomic.Pointer[memo], count)}
}

// lookup returns what is known about token, or nil, and the hash for store.
func (m *memory) lookup(token string) (*memo, uint64) {
	if len(m.slots) == 0 || len(token) > longestKey {
		return nil, 0
	}
	h := maphash.String(m.seed, token)
	for i := range min(ways, len(m.slots)) {
		if e := m.slot(h, i).Load(); e != nil && e.hash == h && e.proof.token() == token {
			return e, h
		}
	}
	return nil, h
}

// store remembers p, in the place of whatever expires first.
func (m *memory) store(h uint64, token string, p *Verified, b *spiffe.Bundle) {
	if len(m.slots) == 0 || len(token) > longestKey {
		return
	}
	var victim *atomic.Pointer[memo]
	var end time.Time
	for i := range min(ways, len(m.slots)) {
		s := m.slot(h, i)
		e := s.Load()
		if e == nil {
			victim = s
			break
		}
		if victim == nil || e.proof.expires.Before(end) {
			victim, end = s, e.proof.expires
		}
	}
	victim.Store(&memo{hash: h, proof: p, bundle: weak.Make(b)})
}

// forget removes e, which has turned out to be worth nothing.
func (m *memory) forget(e *memo) {
	for i := range min(ways, len(m.slots)) {
		m.slot(e.hash, i).CompareAndSwap(e, nil)
	}
}

func (m *memory) slot(h uint64, way int) *atomic.Pointer[memo] {
	return &m.slots[(h%uint64(len(m.slots))+uint64(way))%uint64(len(m.slots))]
}
