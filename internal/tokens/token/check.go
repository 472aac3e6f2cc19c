package token

import (
	"errors"
	"fmt"
	"time"
	"weak"

	"github.com/svidkit/svidkit/internal/tokens/verifycache"
	"github.com/svidkit/svidkit/spiffe"
)

// The bounds of the options of a validator.
const (
	DefaultLeeway = time.Minute
	MaxLeeway     = 2 * time.Minute

	remembered = 1000 // tokens
)

// Checker checks tokens against the bundles and the time. Its Memory caches a verified token with a value of its
// package, a V.
type Checker[V any] struct {
	*Kind
	*Memory[spiffe.Bundle, V]
	bundles spiffe.BundleSource
	Leeway  time.Duration // the allowed difference between clocks
	Now     func() time.Time
}

// NewChecker returns a Checker. A nil leeway or now means the default.
func NewChecker[V any](
	k *Kind, bundles spiffe.BundleSource, leeway *time.Duration, now func() time.Time,
) (*Checker[V], error) {
	c := &Checker[V]{Kind: k, bundles: bundles, Leeway: DefaultLeeway, Now: now}
	if leeway != nil {
		c.Leeway = *leeway
	}
	if now == nil {
		c.Now = time.Now
	}
	switch {
	case bundles == nil:
		return nil, errors.New("no bundle source")
	case c.Leeway < 0 || c.Leeway > MaxLeeway:
		return nil, fmt.Errorf("the leeway is %v, not from 0 to %v", c.Leeway, MaxLeeway)
	}
	c.Memory = NewMemory[spiffe.Bundle, V](remembered)
	return c, nil
}

// Bundle returns the bundle of a trust domain, and checks that the source returned the right one.
func (c *Checker[V]) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, *Error) {
	b, err := c.bundles.Bundle(td)
	if err == nil && b == nil {
		err = fmt.Errorf("the bundle source returned no bundle and no error: %w", spiffe.ErrUnknownTrustDomain)
	}
	switch {
	case errors.Is(err, spiffe.ErrUnknownTrustDomain):
		return nil, &Error{Kind: c.Kind, Reason: "unknown trust domain", Rule: c.Kind.Bundle, Err: err}
	case err != nil:
		return nil, &Error{Kind: c.Kind, Reason: BundleSource, Err: err}
	case b.TrustDomain() != td:
		return nil, c.Refuse(BundleSource, c.Kind.Bundle,
			"the bundle source was asked for %q and returned the bundle of %q", td, b.TrustDomain())
	}
	return b, nil
}

// InTime compares a token or proof of kind k with the time, within the leeway. A zero notBefore means none.
func (c *Checker[V]) InTime(k *Kind, expires, notBefore, now time.Time) *Error {
	switch {
	case !now.Before(expires.Add(c.Leeway)):
		return k.Refuse(Expired, k.Expires, "it ended at %s", Stamp(expires))
	case !notBefore.IsZero() && now.Add(c.Leeway).Before(notBefore):
		return k.Refuse("not yet valid", k.NotBefore, "it begins at %s", Stamp(notBefore))
	}
	return nil
}

// Stamp formats a time for an error.
func Stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Recall returns the cached value of a token. It counts only with ok, if the token was verified with the source's
// present bundle. The error comes from the source, and is about the token of this value.
func (c *Checker[V]) Recall(token string) (value V, ok bool, e *Error) {
	value, old, ok := c.Find(token)
	if !ok {
		return value, false, nil
	}
	b, e := c.Bundle(old.TrustDomain())
	return value, b == old, e
}

const longestKept = 8 << 10 // bytes of a cached token

// Memory caches verified tokens, each with a value and the trust that verified it: a bundle, or an issuer's key set.
// A T never changes, so its address identifies its generation. The Memory holds it by a weak pointer, so that old
// ones can be freed.
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
	if len(token) > longestKept {
		return value, nil, false
	}
	k, _ := m.table.Find(token)
	trust = k.trust.Value() // nil without an entry
	return k.value, trust, trust != nil
}

// Keep caches a token, replacing a token whose trust is gone or the token that ends first. The token must not be part
// of a larger string, which would stay in memory too. Tokens of more than 8 KiB are not cached.
func (m *Memory[T, V]) Keep(token string, value V, trust *T, ends time.Time) {
	if len(token) > longestKept {
		return
	}
	m.table.Keep(token, kept[T, V]{value, weak.Make(trust), ends}, func(old kept[T, V]) int64 {
		if old.trust.Value() == nil {
			return verifycache.Useless
		}
		return old.ends.Unix()
	})
}
