package readme_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/readme"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// TestReadme compiles the Go snippets of README.md, as they stand.
func TestReadme(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root := must.Get(filepath.Abs("../../.."))(t)
	files := must.Get(readme.Snippets(root))(t)

	// The files are laid over places in the module, so that nothing is written to the tree.
	dir := t.TempDir()
	flag := "-overlay=" + filepath.Join(dir, "overlay.json")
	build, test := []string{"build", flag, "-o", dir + string(filepath.Separator)}, []string{"test", "-c", "-vet=off", flag, "-o", dir}
	replace := map[string]string{}
	for name, text := range files {
		file := filepath.Join(dir, filepath.Base(name))
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		replace[filepath.Join(root, "internal", "test", "readme", filepath.FromSlash(name))] = file
		if at := "./internal/test/readme/" + path.Dir(name); strings.HasSuffix(name, "_test.go") {
			test = append(test, at)
		} else {
			build = append(build, at)
		}
	}
	overlay := must.Get(json.Marshal(map[string]any{"Replace": replace}))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "overlay.json"), overlay, 0o600))
	for _, args := range [][]string{build, test} {
		cmd := exec.Command("go", args...)
		cmd.Dir = root
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %v: %s", args, out)
	}
}
