package jwtsvid

import "time"

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

// KeepAtMost makes c keep at most n entries.
func KeepAtMost(c *Cache, n int) { c.most = n }

// LetFetch gives each attempt of c this much time.
func LetFetch(c *Cache, d time.Duration) { c.timeout = d }

// Entries returns how many sets of audiences c has an entry for.
func Entries(c *Cache) int { return len(*c.entries.Load()) }

// Token returns the token that was verified.
func Token(p *Verified) string { return p.token() }

// Locked calls f while c is locked against writers.
func Locked(c *Cache, f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// ValidateHeader validates the token in the values of an "Authorization" header.
func ValidateHeader(v *Validator, values []string) (*Verified, error) {
	return v.validateHeader(values)
}
