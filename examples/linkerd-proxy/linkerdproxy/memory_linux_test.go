package linkerdproxy_test

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// The key is in the store, which is a folder in memory, and in no file elsewhere. Without a store there is no file at all, and with
// one there is none after the start: the key does not change.
func TestKeyReachesNoDisk(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "LNK-9-8")
	if !programtest.Sealed(t) {
		return
	}
	s := newService(t, time.Hour)
	store, elsewhere := t.TempDir(), t.TempDir()
	require.NoError(t, os.Chdir(elsewhere))
	require.NoError(t, os.Setenv("TMPDIR", elsewhere))
	often := func(c *linkerdproxy.Config) { c.MinRefresh, c.MaxRefresh = 100*time.Millisecond, 200*time.Millisecond }
	stored := certified(t, s, web, often, func(c *linkerdproxy.Config) { c.Dir = store })
	assert.Empty(t, must.Get(os.ReadDir(elsewhere))(t))

	cfg := config(t, web, s.ca.Bundle().MarshalPEM())
	often(&cfg)
	programtest.Seal(t, 0)
	without := must.Get(linkerdproxy.NewWith(cfg, s))(t)
	run(t, without)
	require.NoError(t, without.Ready(t.Context()))
	for _, id := range []*linkerdproxy.Identity{stored, without} {
		first := must.Get(id.Credential())(t)
		require.Eventually(t, func() bool {
			c, err := id.Credential()
			return err == nil && c != first
		}, time.Minute, 10*time.Millisecond, "it is renewed")
	}
}
