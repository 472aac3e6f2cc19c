package spiffe

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
)

// BundleSet is a set of bundles, at most one for each trust domain. It never changes and is safe
// for concurrent use: [BundleSet.With] returns a new set, which shares the bundles. Bundles of
// different domains are never merged. It is a [BundleSource]. The zero BundleSet is empty.
type BundleSet struct{ m map[TrustDomain]*Bundle }

// NewBundleSet returns a set of the given bundles. A nil bundle and a second bundle of one trust
// domain are errors.
func NewBundleSet(bundles ...*Bundle) (*BundleSet, error) {
	m := make(map[TrustDomain]*Bundle, len(bundles))
	for i, b := range bundles {
		if b == nil {
			return nil, fmt.Errorf("spiffe: bundle set: bundle %d is nil", i+1)
		}
		if m[b.td] != nil {
			return nil, fmt.Errorf("spiffe: bundle set: two bundles of trust domain %q", b.td)
		}
		m[b.td] = b
	}
	return &BundleSet{m: m}, nil
}

// Bundle returns the bundle of td, or an error that wraps [ErrUnknownTrustDomain]; see
// [BundleSource].
func (s *BundleSet) Bundle(td TrustDomain) (*Bundle, error) {
	b := s.m[td]
	if b == nil {
		return nil, errUnknownTrustDomain(td)
	}
	return b, nil
}

// All loops over the bundles, sorted by trust domain.
func (s *BundleSet) All() iter.Seq[*Bundle] {
	return func(yield func(*Bundle) bool) {
		byName := func(a, b TrustDomain) int { return strings.Compare(a.name, b.name) }
		for _, td := range slices.SortedFunc(maps.Keys(s.m), byName) {
			if !yield(s.m[td]) {
				return
			}
		}
	}
}

// Len returns the number of bundles.
func (s *BundleSet) Len() int { return len(s.m) }

// With returns a set that also holds b, which replaces another bundle of its trust domain. It panics if
// b is nil.
func (s *BundleSet) With(b *Bundle) *BundleSet {
	if b == nil {
		panic("spiffe: BundleSet.With needs a bundle")
	}
	m := make(map[TrustDomain]*Bundle, len(s.m)+1)
	maps.Copy(m, s.m)
	m[b.td] = b
	return &BundleSet{m: m}
}

// Equal reports whether both sets have the same trust domains with equal bundles; see [Bundle.Equal].
func (s *BundleSet) Equal(other *BundleSet) bool {
	if s == nil || other == nil {
		return s == other
	}
	return maps.EqualFunc(s.m, other.m, (*Bundle).Equal)
}
