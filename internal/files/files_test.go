package files_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files"
)

func TestRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name := filepath.Join(dir, "f")
	_, err := files.Read(name, 1024)
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.NoError(t, os.WriteFile(name, make([]byte, 1024), 0o600))
	got, err := files.Read(name, 1024)
	require.NoError(t, err)
	assert.Equal(t, make([]byte, 1024), got)
	require.NoError(t, os.WriteFile(name, make([]byte, 1025), 0o600))
	_, err = files.Read(name, 1024)
	require.ErrorContains(t, err, "f has more than 1024 bytes")
	_, err = files.Read(dir, 1024)
	require.ErrorContains(t, err, "not a regular file")
	require.NoError(t, os.Symlink("f", name+".link"))
	got, err = files.Read(name+".link", 2048)
	require.NoError(t, err)
	assert.Len(t, got, 1025)
}
