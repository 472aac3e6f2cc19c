package main

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

// Of the folders above the socket doctor names the one that this user may not pass: a remedy for another one changes nothing.
func TestDoctorNamesTheClosedFolder(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("there are no modes")
	}
	base := must.Get(os.MkdirTemp("", "doc"))(t)
	folders := []string{base, filepath.Join(base, "run"), filepath.Join(base, "run", "spire"), filepath.Join(base, "run", "spire", "agent")}
	require.NoError(t, os.MkdirAll(folders[3], 0o755))
	open := func() {
		for _, f := range folders {
			require.NoError(t, os.Chmod(f, 0o755))
		}
	}
	t.Cleanup(func() { open(); _ = os.RemoveAll(base) })
	for _, closed := range folders {
		open()
		cmd := started(t, "doctor", "-json", "-socket", "unix://"+filepath.Join(folders[3], "api.sock"))
		mode := os.FileMode(0o700)
		if !unprivileged(cmd) {
			mode = 0o600 // closed for its owner as well
		}
		require.NoError(t, os.Chmod(closed, mode))
		out, err := cmd.Output()
		require.Error(t, err)
		step := steps(t, outcome{out: string(out)})["socket"]
		assert.Equal(t, "let this user pass the folder: chmod o+x "+closed, step.Remedy, "%s", out)
		assert.Contains(t, step.Detail, closed+" has mode 0")
	}
}
