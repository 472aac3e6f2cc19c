package spiffe_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

func TestBundleSet(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.5-2")
	bundle := func(td string, seq uint64) *spiffe.Bundle {
		return mustBundle(t, spiffe.MustParseTrustDomain(td), spiffe.BundleContents{Sequence: &seq})
	}
	a, b, c := bundle("a.test", 1), bundle("b.test", 1), bundle("c.test", 1)
	set := must.Get(spiffe.NewBundleSet(c, a))(t)
	all := func(s *spiffe.BundleSet) []*spiffe.Bundle { return slices.Collect(s.All()) }
	assert.Equal(t, []*spiffe.Bundle{a, c}, all(set), "sorted")
	assert.Equal(t, 2, set.Len())
	for range set.All() { // may be left early
		break
	}

	got := must.Get(set.Bundle(a.TrustDomain()))(t)
	assert.Same(t, a, got)
	got, err := set.Bundle(b.TrustDomain())
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	require.EqualError(t, err, `spiffe: trust domain "b.test": no trust bundle for this trust domain`)
	assert.Nil(t, got)

	// Changes make new sets.
	a2 := bundle("a.test", 2)
	with := set.With(b)
	assert.Equal(t, []*spiffe.Bundle{a, b, c}, all(with))
	assert.Equal(t, []*spiffe.Bundle{a2, b, c}, all(with.With(a2)))
	assert.Equal(t, []*spiffe.Bundle{a, c}, all(set), "the first set is as it was")

	other := must.Get(spiffe.NewBundleSet(bundle("a.test", 1), bundle("c.test", 1)))(t)
	assert.True(t, set.Equal(other))
	assert.False(t, set.Equal(with))
	assert.False(t, set.Equal(other.With(a2)))
	otherNames := must.Get(spiffe.NewBundleSet(b, bundle("c.test", 1)))(t)
	assert.False(t, set.Equal(otherNames))
	assert.False(t, set.Equal(nil))
	assert.True(t, (*spiffe.BundleSet)(nil).Equal(nil))

	var zero spiffe.BundleSet
	empty := must.Get(spiffe.NewBundleSet())(t)
	assert.Zero(t, zero.Len())
	assert.True(t, zero.Equal(empty))
	assert.Empty(t, all(&zero))
	assert.Equal(t, []*spiffe.Bundle{a}, all(zero.With(a)))
	_, err = zero.Bundle(a.TrustDomain())
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
}

func TestNewBundleSetRefuses(t *testing.T) {
	t.Parallel()
	b := mustBundle(t, bundleTD, spiffe.BundleContents{})
	_, err := spiffe.NewBundleSet(b, nil)
	require.EqualError(t, err, "spiffe: bundle set: bundle 2 is nil")
	_, err = spiffe.NewBundleSet(b, mustBundle(t, bundleTD, spiffe.BundleContents{}))
	require.EqualError(t, err, `spiffe: bundle set: two bundles of trust domain "example.org"`)
	set := must.Get(spiffe.NewBundleSet(b))(t)
	assert.Panics(t, func() { set.With(nil) })
}
