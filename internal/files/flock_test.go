package files_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/test/must"
)

// A lock belongs to the open file, so that two that are open stand in for two processes.
func TestFlock(t *testing.T) {
	t.Parallel()
	if !flock.Supported {
		t.Skip("no flock on this system")
	}
	path := filepath.Join(t.TempDir(), "lock")
	open := func() *os.File {
		f := must.Get(os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600))(t)
		t.Cleanup(func() { f.Close() })
		return f
	}
	try := func(f *os.File) bool {
		return must.Get(flock.TryLock(f))(t)
	}
	a, b := open(), open()
	require.NoError(t, flock.Lock(a))
	assert.False(t, try(b))
	require.NoError(t, flock.Unlock(a))
	assert.True(t, try(b))
	assert.False(t, try(a))
	done := make(chan error, 1)
	go func() { done <- flock.Lock(a) }()
	require.NoError(t, b.Close())
	require.NoError(t, <-done)

	require.NoError(t, a.Close())
	require.Error(t, must.Err(flock.TryLock(a)))
	require.Error(t, flock.Lock(a))
}
