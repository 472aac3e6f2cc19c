package files_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}

func TestRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name := filepath.Join(dir, "f")
	require.ErrorIs(t, must.Err(files.Read(name, 1024)), fs.ErrNotExist)
	require.NoError(t, os.WriteFile(name, make([]byte, 1024), 0o600))
	got := must.Get(files.Read(name, 1024))(t)
	assert.Equal(t, make([]byte, 1024), got)
	require.NoError(t, os.WriteFile(name, make([]byte, 1025), 0o600))
	require.ErrorContains(t, must.Err(files.Read(name, 1024)), "f has more than 1024 bytes")
	require.ErrorContains(t, must.Err(files.Read(dir, 1024)), "not a regular file")
	require.NoError(t, os.Symlink("f", name+".link"))
	got = must.Get(files.Read(name+".link", 2048))(t)
	assert.Len(t, got, 1025)
}
