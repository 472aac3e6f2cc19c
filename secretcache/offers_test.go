package secretcache_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A CA that insists on an implausible bundle begins anew after each answer that says something else: the one in force, an older one, or none.
func TestInsistingBeginsAnew(t *testing.T) {
	t.Parallel()
	for name, between := range map[string]func(own, older *spiffe.BundleSet) *spiffe.BundleSet{
		"the one in force": func(_, _ *spiffe.BundleSet) *spiffe.BundleSet { return nil },
		"an older one":     func(_, older *spiffe.BundleSet) *spiffe.BundleSet { return older },
		"none":             func(own, _ *spiffe.BundleSet) *spiffe.BundleSet { return own },
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
			older := set(t, ca.Bundle(), other.Bundle())
			other.Rotate()
			ca.Federate(other.Bundle())
			p := poll(ca)
			m := newManager(t, secretcache.Config{CA: p})
			ready(t, m)
			contents := other.Bundle().Contents()
			contents.Sequence = new(uint64(math.MaxUint64))
			wrong := must.Get(spiffe.NewBundle(other.TrustDomain(), contents))(t)
			all := ca.Bundles().With(wrong)
			inForce := func() bool {
				b, err := m.Bundle(other.TrustDomain())
				return err == nil && b.Equal(wrong)
			}
			for range 3 {
				p.bundles.Store(all)
				time.Sleep(bundleorder.Time - 10*time.Minute)
				require.False(t, inForce())
				p.bundles.Store(between(set(t, ca.Bundle()), older))
				time.Sleep(6 * time.Minute)
				require.False(t, inForce())
			}
			p.bundles.Store(all)
			time.Sleep(bundleorder.Time + 12*time.Minute)
			assert.True(t, inForce(), "it insists")
		})
	}
}

// Once the CA has spoken after a start with bundles of an earlier run, its own order counts as ever: an older bundle takes the place of none.
func TestPreviousIsOver(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		earlier := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())
		older := ca.Bundle()
		ca.Rotate()
		var f bundles
		f.set.Store(set(t, spiffetest.NewCA(t, "partner.test").Bundle()))
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p, Previous: earlier, Federated: &f})
		ready(t, m)
		require.True(t, must.Get(m.Bundle(domain))(t).Equal(ca.Bundle()))
		f.set.Store(set(t, spiffetest.NewCA(t, "partner.test").Bundle()))
		f.changed.Notify()
		p.bundles.Store(set(t, older))
		time.Sleep(10 * time.Minute)
		assert.True(t, must.Get(m.Bundle(domain))(t).Equal(ca.Bundle()), "a rollback")
		assert.ErrorContains(t, status(t, m, domain.ID()).Err, "was seen before")
	})
}
