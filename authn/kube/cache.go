package kube

import (
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"
)

// maxCached is how many answers a cache keeps. Only tokens that the API server found good get in.
const maxCached = 4096

// cache remembers good answers for a short time. It keeps no token: only hashes of them. The nil
// cache remembers nothing.
type cache struct {
	keep time.Duration

	mu      sync.Mutex
	entries map[[sha256.Size]byte]cached
}

type cached struct {
	account Account
	until   time.Time
}

func newCache(keep time.Duration) *cache {
	return &cache{keep: keep, entries: map[[sha256.Size]byte]cached{}}
}

// cacheKey tells apart every token with every list of audiences.
func cacheKey(token string, audiences []string) [sha256.Size]byte {
	h := sha256.New()
	for _, s := range append([]string{token}, audiences...) {
		_, _ = h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(s)))) // a hash does not fail
		_, _ = h.Write([]byte(s))
	}
	return [sha256.Size]byte(h.Sum(nil))
}

func (c *cache) get(key [sha256.Size]byte) (*Account, bool) {
	if c == nil {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.entries[key]
	if !ok || !time.Now().Before(e.until) {
		return nil, false
	}
	return &e.account, true
}

// put remembers a, unless nobody knows when its token ends.
func (c *cache) put(key [sha256.Size]byte, a *Account) {
	if c == nil || a.NotAfter.IsZero() {
		return
	}
	now := time.Now()
	until := now.Add(c.keep)
	if left := a.NotAfter.Sub(now.Round(0)); left < c.keep { // by the wall clock, as tokens are dated by it
		until = now.Add(left)
	}
	if !until.After(now) {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, known := c.entries[key]; !known && len(c.entries) >= maxCached {
		c.evict(now)
	}
	c.entries[key] = cached{*a, until}
}

// evict makes room: what is over goes, or else anything.
func (c *cache) evict(now time.Time) {
	for key, e := range c.entries {
		if !now.Before(e.until) {
			delete(c.entries, key)
		}
	}
	for key := range c.entries {
		if len(c.entries) < maxCached {
			return
		}
		delete(c.entries, key)
	}
}
