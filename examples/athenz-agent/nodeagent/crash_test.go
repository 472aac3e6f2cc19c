package nodeagent_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/internal/test/must"
)

// Wherever the end of a volume is interrupted, there is no volume that the agent knows and whose pod has not had its identity yet: that would be
// given once more. What is left goes at the next try.
func TestVolumesRemovedInPart(t *testing.T) {
	t.Parallel()
	for _, stuck := range []string{"data.json", "data.json.new", "context.json", "context.json.new", "mount/id", "mount/connect"} {
		v := nodeagent.Volumes(t.TempDir())
		handle := must.Get(v.Add("/crash", namespace, "web-0"))(t)
		dir := filepath.Join(string(v), handle)
		there := func(name string) bool {
			_, err := os.Lstat(filepath.Join(dir, name))
			return err == nil
		}
		require.True(t, there("data.json"))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "context.json"), []byte("{}"), 0o600)) // the pod has had its identity
		require.NoError(t, os.RemoveAll(filepath.Join(dir, stuck)))
		require.NoError(t, os.MkdirAll(filepath.Join(dir, stuck, "x"), 0o700)) // which ends the removal there
		require.Error(t, v.Remove("/crash"), stuck)
		assert.False(t, there("data.json") && !there("context.json"), "%s: the pod may take its identity again", stuck)
		assert.True(t, there("mount"), "%s: what the pod has mounted goes last", stuck)
		require.NoError(t, os.Remove(filepath.Join(dir, stuck, "x")))
		require.NoError(t, v.Remove("/crash"), stuck)
		require.NoDirExists(t, dir)
		require.NoError(t, v.Remove("/crash"), "it is forgotten")
	}
}
