//go:build go1.27

package source_test

import (
	"context"
	"crypto/x509"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/spiffe"
)

// standing is a source with one snapshot, or none.
type standing struct{ snap *spiffe.Snapshot }

func (s standing) Snapshot() (*spiffe.Snapshot, error) {
	if s.snap == nil {
		return nil, errAway
	}
	return s.snap, nil
}

func (s standing) SVID() (*spiffe.SVID, error) {
	if s.snap == nil {
		return nil, errAway
	}
	return s.snap.SVID()
}

func (s standing) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if s.snap == nil {
		return nil, errAway
	}
	return s.snap.Bundle(td)
}

func (s standing) Ready(ctx context.Context) error {
	if s.snap == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return nil
}

func (standing) Changed() <-chan struct{} { return nil }
func (standing) Close() error             { return nil }
func (standing) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// TestQuantumStored: an identity of ML-DSA with the longest chain, and the roots of both kinds, are there in an outage.
func TestQuantumStored(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	synctest.Test(t, func(t *testing.T) {
		svid, own := quantum.Chain(t, 16)
		roots := append(slices.Collect(own.X509Authorities()), quantum.Root(t, "ecdsa-p256").Certificate())
		snap := spiffe.NewSnapshot(svid, must.Get(spiffe.NewBundleSet(quantum.Bundle(t, roots...)))(t))
		dir := filepath.Join(t.TempDir(), "store")
		live := lastGood(t, dir, standing{snap})
		during(t, live, func() { assert.False(t, statusOf(live).Saved.IsZero()) })
		restarted := lastGood(t, dir, standing{})
		during(t, restarted, func() {
			require.NoError(t, statusOf(restarted).Refused)
			got := must.Get(restarted.SVID())(t)
			assert.Len(t, got.Chain(), 16)
			assert.True(t, got.Leaf().Equal(svid.Leaf()))
			assert.Len(t, slices.Collect(must.Get(restarted.Bundle(quantum.TrustDomain))(t).X509Authorities()), 2)
		})
	})
}

// TestQuantumAlternativeStored: peers that accept nothing but ML-DSA accept a program that starts in an outage.
func TestQuantumAlternativeStored(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	synctest.Test(t, func(t *testing.T) {
		classical, mldsa := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, quantum.Algorithm)
		first := quantum.SVID(t, classical, "ecdsa-p256", "web")
		other := quantum.SVID(t, mldsa, quantum.Algorithm, "web")
		both := must.Get(first.WithAlternative(other))(t)
		bundles := func(roots ...*x509.Certificate) *spiffe.BundleSet {
			return must.Get(spiffe.NewBundleSet(quantum.Bundle(t, roots...)))(t)
		}
		dir := filepath.Join(t.TempDir(), "store")
		for i, c := range []struct {
			live, restarted *spiffe.SVID
			bundles         *spiffe.BundleSet
		}{
			{both, both, bundles(classical.Certificate(), mldsa.Certificate())},
			{first, first, bundles(classical.Certificate(), mldsa.Certificate())},
			{both, first, bundles(classical.Certificate())}, // peers refuse the alternative
			{other, other, bundles(classical.Certificate(), mldsa.Certificate())},
		} {
			live := lastGood(t, dir, standing{spiffe.NewSnapshot(c.live, c.bundles)})
			during(t, live, func() { assert.False(t, statusOf(live).Saved.IsZero()) })
			restarted := lastGood(t, dir, standing{})
			during(t, restarted, func() {
				got := must.Get(restarted.SVID())(t)
				assert.True(t, got.Leaf().Equal(c.restarted.Leaf()), i)
				require.Equal(t, c.restarted.Alternative() != nil, got.Alternative() != nil, i)
				if want := c.restarted.Alternative(); want != nil {
					assert.True(t, got.Alternative().Leaf().Equal(want.Leaf()), i)
				}
			})
		}
	})
}
