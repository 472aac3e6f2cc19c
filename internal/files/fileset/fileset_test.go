package fileset

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// Readers that spin while the directory is written see each name at all times, and never two files of different versions.
func TestFolderReaders(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := t.TempDir()
	f := must.Get(Open(dir, Options{Program: "test"}))(t)
	defer f.Close()
	var version atomic.Int64
	write := func() {
		n := []byte(strconv.FormatInt(version.Load()+1, 10))
		require.True(t, must.Get(f.Write(map[string]File{"cert": {n, 0o644}, "key": {n, 0o600}}))(t))
		version.Add(1)
	}
	write()
	var over atomic.Bool
	var read atomic.Int64
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			open := func(name string) (string, bool) {
				before := version.Load()
				data, err := os.ReadFile(filepath.Join(dir, name))
				if errors.Is(err, fs.ErrNotExist) && version.Load()-before > 1 {
					return "", false // two versions later the directory that the name led to is gone
				}
				return string(data), assert.NoError(t, err)
			}
			for !over.Load() && !t.Failed() {
				key, ok1 := open("key")
				cert, ok2 := open("cert")
				again, ok3 := open("key")
				if ok1 && ok2 && ok3 && key == again { // numbers are not used twice: the certificate was read while this key was there
					assert.Equal(t, key, cert)
					read.Add(1)
				}
			}
		})
	}
	for end := time.Now().Add(time.Duration(rounds.Of(1)) * 75 * time.Millisecond); time.Now().Before(end) && !t.Failed(); {
		write()
	}
	over.Store(true)
	readers.Wait()
	t.Log(read.Load(), "pairs of", version.Load(), "versions")
	assert.Greater(t, read.Load(), int64(10))
	assert.Len(t, must.Get(os.ReadDir(dir))(t), 6, "two files, the link, two versions, and the lock")
}

// What is there already is not written again, and what a crash has left is removed.
func TestFolderAgain(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f := must.Get(Open(dir, Options{Program: "test"}))(t)
	defer f.Close()
	files := map[string]File{"key": {[]byte("one"), 0o600}}
	write := func(want bool) {
		t.Helper()
		assert.Equal(t, want, must.Get(f.Write(files))(t))
	}
	write(true)
	write(false)
	files["key"] = File{[]byte("one"), 0o640}
	write(runtime.GOOS != "windows") // another mode is a change
	require.NoError(t, os.Mkdir(filepath.Join(dir, versionMark+"unfinished"), 0o700))
	require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, draftMark+"unfinished")))
	require.NoError(t, os.Remove(filepath.Join(dir, "key")))
	write(true) // the name was gone
	require.NoDirExists(t, filepath.Join(dir, versionMark+"unfinished"))
	require.ErrorIs(t, must.Err(os.Lstat(filepath.Join(dir, draftMark+"unfinished"))), fs.ErrNotExist)
	require.NoError(t, os.Remove(filepath.Join(dir, currentLink)))
	write(true) // the link was gone
	require.NoError(t, os.WriteFile(filepath.Join(dir, "other"), []byte("mine"), 0o600))
	files = map[string]File{"cert": {[]byte("two"), 0o644}}
	write(true)
	_, err := os.Lstat(filepath.Join(dir, "key"))
	require.ErrorIs(t, err, fs.ErrNotExist, "a file that is not asked for any more")
	data := must.Get(os.ReadFile(filepath.Join(dir, "other")))(t)
	assert.Equal(t, "mine", string(data), "a file of another program stays")
}
