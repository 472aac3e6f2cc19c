package ca_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
)

// plugIn writes the files of a CA to a directory below a directory of the test.
func plugIn(t *testing.T, mode os.FileMode) (dir string, files map[string][]byte) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "above", "cacerts")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	files = newOffline(t).files(t, 1000*time.Hour)
	for name, b := range files {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		require.NoError(t, os.Chmod(path, mode))
	}
	return dir, files
}

// Files that another user has made or can change do not become the CA.
func TestLoadRefusesFilesOfOthers(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	for _, tc := range []struct {
		name    string
		do      func(dir string) error
		command string // that helps, with the path below the directory
	}{
		{"the directory can be written to by all", func(dir string) error { return os.Chmod(dir, 0o777) }, "chmod o-w "},
		{"the directory above", func(dir string) error { return os.Chmod(filepath.Dir(dir), 0o777) }, "chmod o-w /.."},
		{"the root", func(dir string) error { return os.Chmod(filepath.Join(dir, "root-cert.pem"), 0o666) }, "chmod o-w /root-cert.pem"},
		{"the key", func(dir string) error { return os.Chmod(filepath.Join(dir, "ca-key.pem"), 0o777) }, "chmod o-w /ca-key.pem"},
		{"another user's directory", func(dir string) error { return os.Chown(dir, 54321, -1) }, "chown 0 "},
		{"another user's directory above", func(dir string) error { return os.Chown(filepath.Dir(dir), 54321, -1) }, "chown 0 /.."},
		{"another user's root", func(dir string) error { return os.Chown(filepath.Join(dir, "root-cert.pem"), 54321, -1) }, "chown 0 /root-cert.pem"},
		{"another group's directory", func(dir string) error { return os.Chown(dir, -1, 54321) }, "chmod g-w "},
		{"another user's link", func(dir string) error {
			path := filepath.Join(dir, "ca-cert.pem")
			err := os.Rename(path, path+".real")
			if err == nil {
				err = os.Symlink("ca-cert.pem.real", path)
			}
			if err == nil {
				err = os.Lchown(path, 54321, -1)
			}
			return err
		}, "chown -h 0 /ca-cert.pem"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			if strings.Contains(tc.name, "another") && os.Geteuid() != 0 {
				t.Skip("gives files to another user, which takes root")
			}
			dir, _ := plugIn(t, 0o644)
			require.NoError(t, os.Chmod(dir, 0o775))
			must.Get(tryLoadFrom(t.Context(), ca.PluggedIn{Dir: dir}))(t)
			require.NoError(t, tc.do(dir))
			_, err := tryLoadFrom(t.Context(), ca.PluggedIn{Dir: dir})
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.NotErrorIs(t, err, os.ErrNotExist, "which would make another CA")
			require.NotContains(t, err.Error(), "\n")
			require.Equal(t, 1, strings.Count(err.Error(), "not safe"), "once, not for each file: %v", err)
			command, below, _ := strings.Cut(tc.command, " /")
			assert.ErrorContains(t, err, fmt.Sprintf("run: %s %q", strings.TrimSpace(command), filepath.Join(dir, below)))
		})
	}
}

// While the authority runs, too.
func TestReloadRefusesFilesOfOthers(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	dir, files := plugIn(t, 0o600)
	a := must.Get(tryLoadFrom(t.Context(), ca.PluggedIn{Dir: dir}))(t)
	run(t, a)
	before := a.Signer()
	for name, b := range newOffline(t).files(t, 1000*time.Hour) {
		if name == "ca-key.pem" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), b, 0o600))
			require.NoError(t, os.Chmod(filepath.Join(dir, name), 0o666))
		}
	}
	require.Eventually(t, func() bool { return a.Status().SyncError != nil }, time.Minute, 10*time.Millisecond)
	require.ErrorIs(t, a.Status().SyncError, ca.ErrUnfit)
	assert.Equal(t, before, a.Signer())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca-key.pem"), files["ca-key.pem"], 0o600))
	require.NoError(t, os.Chmod(filepath.Join(dir, "ca-key.pem"), 0o600))
	require.Eventually(t, func() bool { return a.Status().SyncError == nil }, time.Minute, 10*time.Millisecond)
}

// A key that all users can read is complained of, unless it is in a volume of Kubernetes.
func TestLoadComplainsOfReadableKeys(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	load := func(dir string) string {
		var log bytes.Buffer
		a, err := tryLoadFrom(t.Context(), ca.PluggedIn{Dir: dir}, func(c *ca.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
		require.NoError(t, err)
		must.Get(a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web}))(t)
		return log.String()
	}
	dir, _ := plugIn(t, 0o644)
	log := load(dir)
	require.Equal(t, 1, strings.Count(log, "other users can read the private key"), "%s", log)
	assert.Contains(t, log, "chmod 0600")
	assert.Contains(t, log, "ca-key.pem")
	dir, _ = plugIn(t, 0o640)
	assert.NotContains(t, load(dir), "other users can read the private key")

	// As a Secret is mounted: files of root with mode 0644 behind links, in a directory with mode 1777.
	volume, files := plugIn(t, 0o644)
	require.NoError(t, os.Mkdir(filepath.Join(volume, "..2026_11_22_10_00_00.1"), 0o755))
	require.NoError(t, os.Symlink("..2026_11_22_10_00_00.1", filepath.Join(volume, "..data")))
	for name := range files {
		require.NoError(t, os.Rename(filepath.Join(volume, name), filepath.Join(volume, "..data", name)))
		require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(volume, name)))
	}
	require.NoError(t, os.Chmod(volume, 0o777|os.ModeSticky))
	assert.NotContains(t, load(volume), "other users can read the private key")
}
