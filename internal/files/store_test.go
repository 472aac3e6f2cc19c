package files_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/test/must"
)

func newStore(t *testing.T, path string) *store.Store {
	return store.New(path, "own", func(err error) { t.Error(err) })
}

func writeIn(t *testing.T, s *store.Store, name, text string) {
	t.Helper()
	require.NoError(t, s.Use(func(f *store.Folder) error { return f.Write(name, []byte(text)) }))
}

func readIn(s *store.Store, name string, limit int64, keys bool) (text string, err error) {
	err = s.Use(func(f *store.Folder) error {
		data, err := f.Read(name, limit, keys)
		text = string(data)
		return err
	})
	return text, err
}

func TestStore(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "a", "b")
	s := newStore(t, path)
	assert.NoDirExists(t, path, "New does nothing")
	require.ErrorIs(t, must.Err(readIn(s, "file", 100, false)), fs.ErrNotExist)
	require.NoError(t, os.WriteFile(filepath.Join(path, "file.new"), []byte("of a crash"), 0o600))
	for _, text := range []string{"one", "", "three"} {
		writeIn(t, s, "file", text)
		assert.Equal(t, text, must.Get(readIn(s, "file", 5, true))(t))
	}
	assert.NoFileExists(t, filepath.Join(path, "file.new"))
	require.ErrorContains(t, must.Err(readIn(s, "file", 4, false)), "has more than 4 bytes")
	remove := func() error { return s.Use(func(f *store.Folder) error { return f.Remove("file") }) }
	require.NoError(t, remove())
	require.NoError(t, remove(), "there is none")
	fault := errors.New("fault")
	require.ErrorIs(t, s.Use(func(*store.Folder) error { return fault }), fault)
	if runtime.GOOS == "windows" {
		return
	}
	writeIn(t, s, "file", "text")
	assert.Equal(t, fs.FileMode(0o600), must.Get(os.Stat(filepath.Join(path, "file")))(t).Mode())
	for mode, keys := range map[fs.FileMode]bool{0o640: true, 0o604: true, 0o620: false, 0o602: false} {
		require.NoError(t, os.Chmod(filepath.Join(path, "file"), mode))
		require.Error(t, must.Err(readIn(s, "file", 100, keys)), "%v", mode)
	}
}

// In a directory that others can write to nothing is believed but what is in a directory of our own.
func TestStoreWritableByOthers(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("the bits say nothing there")
	}
	open := t.TempDir()
	require.NoError(t, os.Chmod(open, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(open, "file"), []byte("of another"), 0o600))
	var warned []error
	s := store.New(open, "own", func(err error) { warned = append(warned, err) })
	require.ErrorIs(t, must.Err(readIn(s, "file", 100, false)), fs.ErrNotExist)
	writeIn(t, s, "file", "ours")
	assert.FileExists(t, filepath.Join(open, "own", "file"))
	require.Len(t, warned, 1, "once")
	require.ErrorIs(t, warned[0], private.ErrUnsafe)
	require.NoError(t, os.Chmod(filepath.Join(open, "own"), 0o777))
	require.ErrorIs(t, must.Err(readIn(s, "file", 100, false)), private.ErrUnsafe)
}

// Several stores of one directory, as several processes have them, do not get into each other's way.
func TestStoresConcurrent(t *testing.T) {
	t.Parallel()
	path := t.TempDir()
	var writers sync.WaitGroup
	for n := range 4 {
		s := newStore(t, path)
		writers.Go(func() {
			for i := range 20 {
				text := fmt.Sprintf("%d of %d", i, n)
				assert.NoError(t, s.Use(func(f *store.Folder) error {
					if err := f.Write("file", []byte(text)); err != nil {
						return err
					}
					got, err := f.Read("file", 100, false)
					assert.Equal(t, text, string(got))
					return err
				}))
			}
		})
	}
	writers.Wait()
}
