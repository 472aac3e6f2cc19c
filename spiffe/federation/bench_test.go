package federation_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Reading allocates nothing.
func TestAllocations(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates too")
	}
	m := manyRelationships(t, 100)
	require.NoError(t, m.Set(spiffetest.NewCA(t, "td-7").Bundle()))
	td := spiffe.MustParseTrustDomain("td-7")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := m.Bundle(td); err != nil {
			t.Error(err)
		}
		m.Bundles()
	}))
}

func manyRelationships(tb testing.TB, n int) *federation.Manager {
	tb.Helper()
	cfg := federation.Config{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("refused")
	}}
	for i := range n {
		cfg.Relationships = append(cfg.Relationships, federation.Relationship{
			TrustDomain: spiffe.MustParseTrustDomain(fmt.Sprint("td-", i)), URL: "https://a.test/bundle", Profile: federation.Web{},
		})
	}
	return newManager(tb, cfg)
}

// What it costs to look after 1,000 relationships for an hour in which every fetch fails at once:
// scheduling, without the network.
func TestScheduling(t *testing.T) {
	rounds.Slow(t)
	if rounds.Race {
		t.Skip("60,000 attempts")
	}
	start := time.Now()
	fetches := 0
	synctest.Test(t, func(t *testing.T) {
		m := manyRelationships(t, 1000)
		running(t, m)
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, s := range m.Status() {
			assert.True(t, s.Failures >= 54 && s.Failures <= 62, "%d", s.Failures)
			fetches += s.Failures
		}
	})
	t.Logf("%v for each of %d attempts", time.Since(start)/time.Duration(fetches), fetches)
}
