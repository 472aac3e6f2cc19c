package jwtsvid

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
