package limit

import (
	"sync"
	"time"
)

// Uses counts the uses of things that end, such as tokens. Each has a hash and an owner. It remembers a thing until it
// has ended, and is safe for concurrent use.
type Uses[K comparable] struct {
	shares *Shares[K]

	mu    sync.Mutex
	seen  map[[32]byte]*used[K]
	swept time.Time
}

type used[K comparable] struct {
	owner K
	until time.Time
	times int
}

// NewUses returns Uses that remember so many things in total, and of each owner, as [NewShares] says.
func NewUses[K comparable](total, each int) *Uses[K] {
	return &Uses[K]{shares: NewShares[K](total, each), seen: map[[32]byte]*used[K]{}}
}

// Count counts a use of a thing that ends at until, and returns how many there were. The error is an [*Error] if one
// more thing is too many; then it is not remembered.
func (u *Uses[K]) Count(thing [32]byte, owner K, until time.Time) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.seen[thing]
	if s == nil {
		u.sweep(time.Now())
		if err := u.shares.Take(owner, 1); err != nil {
			return 0, err
		}
		s = &used[K]{owner: owner, until: until}
		u.seen[thing] = s
	}
	s.times++
	return s.times, nil
}

// sweep forgets things that have ended, at most once a second; u.mu is held.
func (u *Uses[K]) sweep(now time.Time) {
	if now.Sub(u.swept) < time.Second {
		return
	}
	u.swept = now
	for thing, s := range u.seen {
		if now.After(s.until) {
			delete(u.seen, thing)
			u.shares.Give(s.owner, 1)
		}
	}
}
