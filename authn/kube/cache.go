package kube

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/svidkit/svidkit/internal/memory"
)

// maxCached is how many answers a cache keeps. Only tokens that the API server found good get in.
const maxCached = 4096

// cache remembers good answers for a short time. It keeps no token, only hashes of them. The nil cache
// remembers nothing.
type cache struct {
	keep    time.Duration
	entries *memory.Table[cached]
}

type cached struct {
	key     [sha256.Size]byte
	account Account
	until   time.Time
}

func newCache(keep time.Duration) *cache { return &cache{keep, memory.New[cached](maxCached)} }

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
	e := c.entries.Find(binary.BigEndian.Uint64(key[:]), func(e *cached) bool { return e.key == key })
	if e == nil || !time.Now().Before(e.until) {
		return nil, false
	}
	a := e.account // the caller's
	return &a, true
}

// put remembers a, unless the end of its token is unknown or has come. It replaces the answer that ends
// first.
func (c *cache) put(key [sha256.Size]byte, a *Account) {
	if c == nil || a.NotAfter.IsZero() {
		return
	}
	now := time.Now()
	left := min(c.keep, a.NotAfter.Sub(now.Round(0))) // by the wall clock, as tokens are dated by it
	if left <= 0 {
		return
	}
	e := &cached{key, *a, now.Add(left)}
	c.entries.Keep(binary.BigEndian.Uint64(key[:]), e, func(old *cached) int64 {
		if old.key == key {
			return memory.Older
		}
		return old.until.UnixNano()
	})
}
