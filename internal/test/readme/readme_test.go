package readme_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/readme"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestReadme compiles the Go snippets of README.md.
func TestReadme(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	source, err := readme.Source(root)
	require.NoError(t, err)

	// The file is laid over a place in the module, so that nothing is written to the tree.
	dir := t.TempDir()
	file, overlay := filepath.Join(dir, "snippets.go"), filepath.Join(dir, "overlay.json")
	require.NoError(t, os.WriteFile(file, []byte(source), 0o600))
	at := filepath.Join(root, "internal", "test", "readme", "snippets", "snippets.go")
	require.NoError(t, os.WriteFile(overlay, fmt.Appendf(nil, `{"Replace":{%q:%q}}`, at, file), 0o600))
	cmd := exec.Command("go", "build", "-overlay", overlay, "./internal/test/readme/snippets")
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", out, source)
}
