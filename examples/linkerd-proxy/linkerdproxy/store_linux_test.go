package linkerdproxy_test

import (
	"log/slog"
	"os"
	"strings"
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

// mountedAt returns the type of the file system of a path, as the kernel lists it.
func mountedAt(t *testing.T, path string) (kind string) {
	t.Helper()
	mounts := must.Get(os.ReadFile("/proc/self/mounts"))(t)
	best := ""
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if at := strings.TrimSuffix(f[1], "/") + "/"; strings.HasPrefix(path+"/", at) && len(at) >= len(best) {
			best, kind = at, f[2]
		}
	}
	return kind
}

// The proxy looks what is mounted at its store, and warns once if that is a disk: not for each certificate, and not if it is memory.
func TestStoreInMemory(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-9-7", "LNK-9-8")
	memory, err := os.MkdirTemp("/dev/shm", "linkerdproxy")
	if err != nil {
		t.Skip("there is no directory in memory: " + err.Error())
	}
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(memory)) })
	require.Equal(t, "tmpfs", mountedAt(t, memory))
	for _, dir := range []string{memory, t.TempDir()} {
		warnings := 1
		if mountedAt(t, dir) == "tmpfs" {
			warnings = 0
		}
		var log lockedBuffer
		s := newService(t, time.Hour)
		id := certified(t, s, web, func(c *linkerdproxy.Config) {
			c.Dir, c.Logger = dir, slog.New(slog.NewTextHandler(&log, nil))
			c.MinRefresh, c.MaxRefresh = 100*time.Millisecond, 100*time.Millisecond
		})
		first := must.Get(id.Credential())(t)
		eventually(t, func() bool {
			c, err := id.Credential()
			return err == nil && c != first
		}, "it is renewed")
		assert.Equal(t, warnings, strings.Count(log.String(), "the store is not in memory"), dir)
		assert.Equal(t, warnings, strings.Count(log.String(), "level=WARN"), log.String())
	}
}

// The key is in the store, which is a directory in memory, and in no file elsewhere. Without a store there is no file at all, and with
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
