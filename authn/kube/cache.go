package kube

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

// maxCached is how many answers a cache keeps.
const maxCached = 4096

// cache keeps answers about tokens for a short time, by hashes of the tokens. The nil cache keeps nothing.
type cache struct {
	keep    time.Duration
	entries *verifycache.Table[[sha256.Size]byte, cached]
}

type cached struct {
	account Account
	err     error // in the place of an account; it has no token in it
	until   time.Time
}

func newCache(keep time.Duration) *cache {
	return &cache{keep, verifycache.New[[sha256.Size]byte, cached](maxCached)}
}

// cacheKey tells apart every token with every list of audiences.
func cacheKey(token string, audiences []string) [sha256.Size]byte {
	var room [2048]byte // for the usual, so that a token that comes again costs no memory for it
	text := append(binary.BigEndian.AppendUint64(room[:0], uint64(len(token))), token...)
	for _, s := range audiences {
		text = append(binary.BigEndian.AppendUint64(text, uint64(len(s))), s...)
	}
	return sha256.Sum256(text)
}

// get returns the cached answer, if there is one.
func (c *cache) get(key [sha256.Size]byte) (a *Account, err error, ok bool) { //nolint:revive // the answer, which may be an error
	if c == nil {
		return nil, nil, false
	}
	e, ok := c.entries.Find(key)
	if !ok || !time.Now().Before(e.until) {
		return nil, nil, false
	}
	if e.err != nil {
		return nil, e.err, true
	}
	account := e.account // the caller's
	return &account, nil, true
}

// put caches the answer until end; a zero or past end caches nothing. A full cache drops the answer that ends first.
func (c *cache) put(key [sha256.Size]byte, a Account, err error, end time.Time) {
	if c == nil || end.IsZero() {
		return
	}
	now := time.Now()
	left := min(c.keep, end.Round(0).Sub(now.Round(0))) // by the wall clock, as tokens are dated by it
	if left <= 0 {
		return
	}
	c.entries.Keep(key, cached{a, err, now.Add(left)}, func(old cached) int64 { return old.until.UnixNano() })
}
