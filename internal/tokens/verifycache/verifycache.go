// Package verifycache remembers verified credentials, so that a repeated one costs no signature check.
//
// A [Table] decides nothing. The entry that Find returns was verified once, against one trust bundle and at one time;
// the caller compares the present bundle and time.
package verifycache

import (
	"hash/maphash"
	"iter"
	"math"
	"sync/atomic"
)

// ways is how many places one credential may take.
const ways = 4

// Table holds a bounded number of entries, in sets of a few places. The hash of a credential selects its
// set. Reads take no lock and write nothing. Two concurrent writes may take the same place, which costs
// one verification later.
type Table[E any] struct {
	Seed maphash.Seed // to hash credentials with

	sets, ways int
	places     atomic.Pointer[[]atomic.Pointer[E]] // nil until the first entry
}

// New returns a table of at most n entries; n is positive.
func New[E any](n int) *Table[E] {
	w := min(n, ways)
	return &Table[E]{Seed: maphash.MakeSeed(), sets: n / w, ways: w}
}

// set returns the places of the credential with this hash.
func (t *Table[E]) set(places []atomic.Pointer[E], hash uint64) []atomic.Pointer[E] {
	i := int(hash%uint64(t.sets)) * t.ways
	return places[i : i+t.ways]
}

// Find returns the entry with this hash for which is reports true, or nil. Different credentials may have the same
// hash, so is must compare them whole.
func (t *Table[E]) Find(hash uint64, is func(*E) bool) *E {
	places := t.places.Load()
	if places == nil {
		return nil
	}
	set := t.set(*places, hash)
	for i := range set {
		if e := set[i].Load(); e != nil && is(e) {
			return e
		}
	}
	return nil
}

// Keep stores e for the credential with this hash, in the place of the entry with the least worth. An entry for the
// same credential has the worth Older and is replaced first; a free place comes next.
func (t *Table[E]) Keep(hash uint64, e *E, worth func(old *E) int64) {
	if t.places.Load() == nil {
		fresh := make([]atomic.Pointer[E], t.sets*t.ways)
		t.places.CompareAndSwap(nil, &fresh) // or another writer was faster
	}
	set := t.set(*t.places.Load(), hash)
	at, least := 0, int64(math.MaxInt64)
	for i := range set {
		w := int64(Older + 1)
		if old := set[i].Load(); old != nil {
			w = worth(old)
		}
		if w < least {
			at, least = i, w
		}
	}
	set[at].Store(e)
}

// All loops over the entries.
func (t *Table[E]) All() iter.Seq[*E] {
	return func(yield func(*E) bool) {
		places := t.places.Load()
		if places == nil {
			return
		}
		for i := range *places {
			if e := (*places)[i].Load(); e != nil && !yield(e) {
				return
			}
		}
	}
}

// Older is less than any other worth.
const Older = math.MinInt64
