package readme_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/readme"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestReadme compiles the Go snippets of README.md, as they stand.
func TestReadme(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root, err := filepath.Abs("../../..")
	require.NoError(t, err)
	files, err := readme.Snippets(root)
	require.NoError(t, err)

	// The files are laid over places in the module, so that nothing is written to the tree.
	dir := t.TempDir()
	replace, packages := map[string]string{}, []string{"vet", "-overlay", filepath.Join(dir, "overlay.json")}
	for name, text := range files {
		file := filepath.Join(dir, filepath.Base(name))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		replace[filepath.Join(root, "internal", "test", "readme", filepath.FromSlash(name))] = file
		packages = append(packages, "./internal/test/readme/"+path.Dir(name))
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	cmd := exec.Command("go", packages...)
	cmd.Dir = root
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}
