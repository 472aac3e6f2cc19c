package secretcache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestWriteMetrics follows a Manager from before its start, over an outage, to the end of its certificate.
func TestWriteMetrics(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		web, db := spiffe.MustParseID("spiffe://example.org/web"), spiffe.MustParseID("spiffe://example.org/db")
		m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca}))(t)
		require.NoError(t, m.Add(db))
		read := func() map[string]float64 {
			return must.Get(metricstest.Of(m.Report().Metrics))(t).Samples
		}
		s := read()
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="missing"}`])
		assert.NotContains(t, s, `svidkit_secretcache_bundles_confirmed_timestamp_seconds`)
		assert.NotContains(t, s, `svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/web"}`)

		began := time.Now()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		synctest.Wait()
		svid := must.Get(m.SVID())(t)
		s = read()
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="valid"}`])
		assert.EqualValues(t, svid.NotAfter().Unix(), s[`svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/web"}`])
		assert.Contains(t, s, `svidkit_secretcache_identity_end_timestamp_seconds{identity="spiffe://example.org/db"}`)
		assert.Equal(t, 2., s[`svidkit_secretcache_attempts_total{kind="certificate",outcome="good"}`])
		assert.Equal(t, 1., s[`svidkit_secretcache_attempts_total{kind="bundles",outcome="good"}`])
		assert.EqualValues(t, began.Unix(), s[`svidkit_secretcache_bundles_confirmed_timestamp_seconds`])
		assert.Equal(t, 1., s[`svidkit_secretcache_bundles_watched`], "the CA has a watch")

		const of = `_timestamp_seconds{identity="spiffe://example.org/web"}`
		assert.EqualValues(t, svid.Leaf().NotBefore.Unix(), s[`svidkit_secretcache_identity_start`+of])
		next := s[`svidkit_secretcache_identity_attempt`+of]
		assert.Greater(t, next, float64(began.Unix()))
		assert.Less(t, next, float64(svid.NotAfter().Unix()))
		assert.NotContains(t, s, `svidkit_secretcache_identity_failing`+of)

		ca.FailNext(-1, errors.New("down"))
		time.Sleep(2 * time.Hour)
		s = read()
		assert.InDelta(t, next, s[`svidkit_secretcache_identity_failing`+of], 1, "it fails since the attempt that was due")
		assert.Greater(t, s[`svidkit_secretcache_identity_attempt`+of], float64(time.Now().Unix()))
		assert.Equal(t, 2., s[`svidkit_secretcache_identities{state="expired"}`])
		assert.Zero(t, s[`svidkit_secretcache_identities{state="valid"}`])
		assert.Positive(t, s[`svidkit_secretcache_identity_failures{identity="spiffe://example.org/web"}`])
		assert.Greater(t, s[`svidkit_secretcache_attempts_total{kind="certificate",outcome="failed"}`], 10.)

		ca.FailNext(0, nil)
		time.Sleep(time.Hour)
		assert.NotContains(t, read(), `svidkit_secretcache_identity_failing`+of)
		cancel()
		require.NoError(t, <-done)

		// What is cut short is no failure.
		ca.Delay(time.Hour)
		m = must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca}))(t)
		ctx, cancel = context.WithCancel(t.Context())
		go func() { done <- m.Run(ctx) }()
		time.Sleep(time.Second)
		cancel()
		require.NoError(t, <-done)
		for key, v := range read() {
			assert.False(t, strings.HasPrefix(key, "svidkit_secretcache_attempts_total") && v != 0, key)
		}
	})
}

// TestWriteMetricsBounded: the samples of a Manager with very many identities are bounded, the sums are not.
func TestWriteMetricsBounded(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	m, err := secretcache.New(secretcache.Config{Expect: pki.ExpectDNSName(td, "web.test"), CA: spiffetest.NewCA(t, "example.org")})
	require.NoError(t, err)
	for i := range 1500 {
		require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w%04d", i))))
	}
	text := must.Get(metricstest.Of(m.Report().Metrics))(t)
	assert.Equal(t, 1501., text.Samples[`svidkit_secretcache_identities{state="missing"}`])
	assert.Contains(t, text.Samples, `svidkit_secretcache_identity_failures{identity="spiffe://example.org/w0998"}`)
	assert.NotContains(t, text.Samples, `svidkit_secretcache_identity_failures{identity="spiffe://example.org/w0999"}`)
	assert.Less(t, len(text.Samples), 2020)
}
