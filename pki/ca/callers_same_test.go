package ca_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// The bundle of callers stays the same value while it has the same keys, also when a successor begins to sign: verifiers remember by it.
func TestCallerBundleStaysTheSame(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Rotation: ca.Rotation{Propagation: time.Hour}})
		require.NoError(t, err)
		old := a.Status().Roots[0].ID
		_, err = a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: spiffe.MustParseID("spiffe://example.org/web"), TTL: 6 * time.Hour})
		require.NoError(t, err) // so that the root stays in the bundle
		require.NoError(t, a.Taint(t.Context(), old))
		before := a.CallerBundle()
		require.Len(t, before.Contents().X509Authorities, 1)
		active := func() (id string) {
			for _, k := range a.Status().Roots {
				if k.Phase == "active" {
					id = k.ID
				}
			}
			return id
		}
		time.Sleep(59 * time.Minute)
		require.Equal(t, old, active())
		assert.Same(t, before, a.CallerBundle())
		time.Sleep(2 * time.Minute)
		require.NotEqual(t, old, active())
		require.Len(t, a.Bundle().Contents().X509Authorities, 2)
		assert.Same(t, before, a.CallerBundle())
	})
}
