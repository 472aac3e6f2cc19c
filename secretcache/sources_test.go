package secretcache_test

import (
	"testing"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A Manager keeps what every source of identities and of bundles promises, also when it has renewed.
func TestPromisesOfSources(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		ca.Federate(other.Bundle())
		m := newManager(t, secretcache.Config{CA: ca})
		ready(t, m)
		check := func() {
			spiffetest.TestSVIDSource(t, func(testing.TB) spiffe.SVIDSource { return m })
			spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
				return m, []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}
			})
		}
		check()
		changed := m.Changed()
		ca.Rotate()
		<-changed
		check()
	})
}
