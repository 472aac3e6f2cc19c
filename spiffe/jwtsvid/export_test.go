package jwtsvid

import "time"

// Pure functions of times and a random number, for tables.
var (
	RenewAfter = renewAfter
	RetryAfter = retryAfter
)

// Collide has v remember a token under the hash of another one, and reports whether that is then taken
// for the first.
func Collide(v *Validator, known *Verified, other string) bool {
	_, h := v.memory.lookup(other)
	v.memory.store(h, known.Token(), known, nil)
	m, _ := v.memory.lookup(other)
	return m != nil
}

// PutBack makes the token for an audience look as it does when the clock was put back since it came.
func PutBack(c *Cache, d time.Duration, audience string) {
	e, _ := c.entry([]string{audience})
	c.mu.Lock()
	defer c.mu.Unlock()
	st := *e.state.Load()
	st.received = st.received.Add(d)
	e.state.Store(&st)
	e.asked.Add(int64(d))
}

// Locked calls f while c is locked against writers.
func Locked(c *Cache, f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}
