package token

import (
	"time"
	"weak"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
)

const longestKept = 4 << 10 // bytes of a cached token

// Memory caches verified tokens, each with a value and the trust that verified it: a bundle, or an issuer's key set.
// A T never changes, so its address identifies its generation. The Memory holds it by a weak pointer, so that old
// ones can be freed. The nil Memory caches nothing.
type Memory[T, V any] struct {
	table *verifycache.Table[string, kept[T, V]]
}

type kept[T, V any] struct {
	value V
	trust weak.Pointer[T]
	ends  time.Time
}

// NewMemory returns a Memory of at most n tokens; n is positive.
func NewMemory[T, V any](n int) *Memory[T, V] {
	return &Memory[T, V]{verifycache.New[string, kept[T, V]](n)}
}

// Find returns the cached value of a token, and the trust that verified it, which the caller compares with the one in
// force. It does not allocate.
func (m *Memory[T, V]) Find(token string) (value V, trust *T, ok bool) {
	if m == nil || len(token) > longestKept {
		return value, nil, false
	}
	k, ok := m.table.Find(token)
	if !ok {
		return value, nil, false
	}
	trust = k.trust.Value()
	return k.value, trust, trust != nil
}

// Keep caches a token, replacing a token whose trust is gone or the token that ends first. The token must not be part
// of a larger string, which would stay in memory too. Tokens of more than 4 KiB are not cached.
func (m *Memory[T, V]) Keep(token string, value V, trust *T, ends time.Time) {
	if m == nil || len(token) > longestKept {
		return
	}
	m.table.Keep(token, kept[T, V]{value, weak.Make(trust), ends}, func(old kept[T, V]) int64 {
		if old.trust.Value() == nil {
			return verifycache.Useless
		}
		return old.ends.Unix()
	})
}
