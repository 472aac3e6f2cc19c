package federation_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
)

// TestWriteMetrics follows two relationships, of which one endpoint fails.
func TestWriteMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		one, two := federationtest.NewInMemory(t, spiffetest.NewCA(t, "one.test")), federationtest.NewInMemory(t, spiffetest.NewCA(t, "two.test"))
		m := must.Get(federation.New(federation.Config{
			Relationships: []federation.Relationship{one.Relationship(), two.Relationship()}, DialContext: federationtest.Dial(one, two),
		}))(t)
		read := func() map[string]float64 {
			text := must.Get(metricstest.Of(m.Report().Metrics))(t)
			return text.Samples
		}
		s := read()
		assert.Zero(t, s[`svidkit_federation_bundle_present{trust_domain="one.test"}`])
		assert.NotContains(t, s, `svidkit_federation_bundle_confirmed_timestamp_seconds{trust_domain="one.test"}`)

		two.Deny()
		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		synctest.Wait()
		s = read()
		assert.Equal(t, 1., s[`svidkit_federation_bundle_present{trust_domain="one.test"}`])
		assert.Equal(t, 1., s[`svidkit_federation_bundle_fresh{trust_domain="one.test"}`])
		assert.EqualValues(t, began.Unix(), s[`svidkit_federation_bundle_confirmed_timestamp_seconds{trust_domain="one.test"}`])
		assert.Zero(t, s[`svidkit_federation_bundle_present{trust_domain="two.test"}`])
		assert.Equal(t, 1., s[`svidkit_federation_bundle_failures{trust_domain="two.test"}`])
		assert.Equal(t, 1., s[`svidkit_federation_fetches_total{outcome="new"}`])
		assert.Equal(t, 1., s[`svidkit_federation_fetches_total{outcome="failed"}`])

		one.Deny()
		two.Mend()
		time.Sleep(time.Hour)
		s = read()
		assert.Zero(t, s[`svidkit_federation_bundle_fresh{trust_domain="one.test"}`])
		assert.Equal(t, 1., s[`svidkit_federation_bundle_present{trust_domain="one.test"}`], "it stays in force")
		assert.Equal(t, 1., s[`svidkit_federation_bundle_fresh{trust_domain="two.test"}`])
		assert.Equal(t, 2., s[`svidkit_federation_fetches_total{outcome="new"}`])
		assert.Greater(t, s[`svidkit_federation_fetches_total{outcome="failed"}`], 3.)
		cancel()
		require.NoError(t, <-done)
	})
}
