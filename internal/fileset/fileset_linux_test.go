package fileset

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// The modes hold under any umask, and a folder with the setgid bit hands on its group.
func TestFolderSetgid(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.Chown(dir, -1, 1), os.Chmod(dir, 0o750|fs.ModeSetgid)); err != nil {
		t.Skip("not in the group")
	}
	f, err := Open(dir, Options{Program: "test"})
	require.NoError(t, err)
	defer f.Close()
	_, err = f.Write(map[string]File{"key": {[]byte("one"), 0o640}})
	require.NoError(t, err)
	for name, mode := range map[string]fs.FileMode{"key": 0o640, currentLink: 0o755 | fs.ModeDir | fs.ModeSetgid} {
		info, err := os.Stat(filepath.Join(dir, name))
		require.NoError(t, err)
		assert.Equal(t, mode, info.Mode(), name)
		assert.Equal(t, 1, int(info.Sys().(*syscall.Stat_t).Gid), name)
	}
}
