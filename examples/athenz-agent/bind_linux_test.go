package main

import (
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What a pod has at the path of its volume is for reading and for nothing else: no program runs from there, and no device and no set user counts. Both
// mounts of a volume are so, and nothing of them is left.
func TestBindNarrow(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount")
	}
	dir := t.TempDir()
	folder, path := filepath.Join(dir, "folder"), filepath.Join(dir, "path")
	require.NoError(t, os.Mkdir(folder, 0o755))
	require.NoError(t, os.Mkdir(path, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(folder, "id"), []byte("handle"), 0o644))
	type seen struct {
		skip                string
		bound, again, ended error
		options             []string
		write               error
		after               string
	}
	result := make(chan seen)
	go func() {
		var s seen
		defer func() { result <- s }()
		runtime.LockOSThread() // and it ends with this goroutine, with its mounts
		if err := syscall.Unshare(syscall.CLONE_NEWNS); err != nil {
			s.skip = "there is no mount namespace: " + err.Error()
			return
		}
		if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
			s.skip = "mounts cannot be made private: " + err.Error()
			return
		}
		mounted := func() string {
			info, _ := os.ReadFile("/proc/thread-self/mountinfo")
			for line := range strings.Lines(string(info)) {
				if fields := strings.Fields(line); len(fields) > 5 && fields[4] == path {
					return fields[5]
				}
			}
			return ""
		}
		if s.bound = bind(folder, path); s.bound != nil {
			return
		}
		s.options = strings.Split(mounted(), ",")
		s.write = os.WriteFile(filepath.Join(path, "id"), []byte("other"), 0o644)
		s.ended, s.again = unbind(path), unbind(path)
		s.after = mounted()
	}()
	s := <-result
	if s.skip != "" {
		t.Skip(s.skip)
	}
	require.NoError(t, s.bound)
	for _, want := range []string{"ro", "nosuid", "nodev", "noexec"} {
		assert.True(t, slices.Contains(s.options, want), "%s is not in %q", want, s.options)
	}
	assert.ErrorIs(t, s.write, syscall.EROFS)
	assert.NoError(t, s.ended)
	assert.NoError(t, s.again, "nothing there is no error")
	assert.Empty(t, s.after)
}
