// Package verifycache caches verified credentials, so that a repeated credential costs no signature check.
//
// A [Table] does not decide. The value that Find returns was verified once, against one trust bundle and at one time;
// the caller compares it with the present bundle and time.
package verifycache

import (
	"hash/maphash"
	"math"
	"sync/atomic"
)

// ways is the number of places for one credential.
const ways = 4

// Table holds a bounded number of values by their credentials, in sets of a few places. The hash of a credential,
// with a random seed, selects its set. Reads take no lock and write nothing. Two concurrent writes may use the same
// place, which costs one verification later.
type Table[K comparable, V any] struct {
	seed       maphash.Seed
	sets, ways int
	places     atomic.Pointer[[]atomic.Pointer[entry[K, V]]] // nil until the first entry
}

type entry[K comparable, V any] struct {
	key   K
	value V
}

// New returns a table of at most n values; n is positive.
func New[K comparable, V any](n int) *Table[K, V] {
	w := min(n, ways)
	return &Table[K, V]{seed: maphash.MakeSeed(), sets: n / w, ways: w}
}

func (t *Table[K, V]) set(places []atomic.Pointer[entry[K, V]], key K) []atomic.Pointer[entry[K, V]] {
	i := int(maphash.Comparable(t.seed, key)%uint64(t.sets)) * t.ways
	return places[i : i+t.ways]
}

// Find returns the value of a credential.
func (t *Table[K, V]) Find(key K) (value V, ok bool) {
	places := t.places.Load()
	if places == nil {
		return value, false
	}
	set := t.set(*places, key)
	for i := range set {
		if e := set[i].Load(); e != nil && e.key == key {
			return e.value, true
		}
	}
	return value, false
}

// Useless is the lowest worth of an entry.
const Useless = math.MinInt64

// Keep stores the value of a credential: in its own place if it has one, else in a free one, else in place of the
// value with the least worth.
func (t *Table[K, V]) Keep(key K, value V, worth func(old V) int64) {
	if t.places.Load() == nil {
		fresh := make([]atomic.Pointer[entry[K, V]], t.sets*t.ways)
		t.places.CompareAndSwap(nil, &fresh) // or another writer was faster
	}
	set := t.set(*t.places.Load(), key)
	at, least := -1, int64(math.MaxInt64)
	for i := range set {
		old := set[i].Load()
		if old != nil && old.key == key {
			at = i
			break
		}
		w := int64(Useless)
		if old != nil {
			w = worth(old.value)
		}
		if at < 0 || w < least {
			at, least = i, w
		}
	}
	set[at].Store(&entry[K, V]{key, value})
}
