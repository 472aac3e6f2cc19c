//go:build unix

package unixsocket_test

import (
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// In a directory that all users may write, another process puts a link to a file in the place of everything that
// appears. The mode of that file stays what it is.
func TestSwappedPath(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	require.NoError(t, os.Chmod(dir, 0o777))
	victim := filepath.Join(dir, "victim")
	require.NoError(t, os.WriteFile(victim, []byte("key"), 0o600))
	outside := filepath.Join(socketDir(t), "victim")
	require.NoError(t, os.WriteFile(outside, []byte("key"), 0o600))
	path := filepath.Join(dir, "s")

	var stop atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop.Store(true)
	away := socketDir(t)
	for _, target := range []string{victim, outside} {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				if os.Rename(path, filepath.Join(away, "s")) == nil {
					_ = os.Symlink(target, path)
				}
				if i%20 != 0 {
					continue
				}
				entries, _ := os.ReadDir(dir)
				for _, e := range entries {
					if name := filepath.Join(dir, e.Name()); strings.HasPrefix(e.Name(), ".") && os.Rename(name, filepath.Join(away, e.Name())) == nil {
						_ = os.Symlink(filepath.Dir(target), name)
					}
				}
			}
		})
	}
	listened := 0
	for range rounds.Of(rounds.Of(25)) {
		s := &unixsocket.Server{Path: path, Handler: says(""), SocketMode: 0o666}
		if s.Listen() == nil {
			listened++
			require.NoError(t, s.CloseListener())
		}
		for _, file := range []string{victim, outside} {
			require.Equal(t, fs.FileMode(0o600), mode(t, file), "%s got the mode of the socket", file)
		}
		_ = os.Remove(path)
	}
	assert.NotZero(t, listened)
}

// The directory belongs to this user or to root. A volume of Kubernetes, which is root's and which all users may write, is
// worth a warning.
func TestFolderOfAnother(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("takes root")
	}
	parent := socketDir(t)
	dir := filepath.Join(parent, "d")
	for name, test := range map[string]struct {
		at   string
		uid  int
		mode fs.FileMode
		want string
	}{
		"the directory":        {dir, 65534, 0o700, "belongs to user 65534"},
		"a directory above it": {parent, 65534, 0o755, "belongs to user 65534"},
		"a volume":             {dir, 0, 0o777, ""},
		"fsGroup":              {dir, 0, 0o775 | fs.ModeSetgid, ""},
	} {
		require.NoError(t, os.MkdirAll(dir, 0o700))
		gid := 0
		if name == "fsGroup" {
			gid = 2000
		}
		require.NoError(t, os.Chown(test.at, test.uid, gid))
		require.NoError(t, os.Chmod(test.at, test.mode))
		var log lines
		s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: says("hello"), Logger: log.logger()}
		err := s.Listen()
		if test.want != "" {
			require.ErrorContains(t, err, test.want, name)
			assert.ErrorContains(t, err, "chown", name)
			assert.Empty(t, log.with(""), name)
		} else {
			require.NoError(t, err, name)
			assert.Len(t, log.with("may replace the socket"), 1, name)
			require.NoError(t, s.CloseListener())
		}
		require.NoError(t, os.RemoveAll(dir))
		require.NoError(t, os.Chown(parent, 0, 0))
		require.NoError(t, os.Chmod(parent, 0o700))
	}
}

// Making a socket leaves nothing else in its directory, whether it succeeds or not, and ".." behind a link is what the
// system says it is.
func TestNothingLeft(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700))
	require.NoError(t, os.Symlink("a/b", filepath.Join(dir, "link")))
	path := dir + "/link/../s"
	serve(t, &unixsocket.Server{Path: path, Handler: says("hello")})
	assert.Equal(t, "hello", hears(t, path, true))
	require.ErrorIs(t, (&unixsocket.Server{Path: path, Handler: says("")}).Listen(), unixsocket.ErrInUse)
	entries := must.Get(os.ReadDir(filepath.Join(dir, "a")))(t)
	require.Len(t, entries, 2)
	assert.Equal(t, "s", entries[1].Name())
	assert.ErrorContains(t, (&unixsocket.Server{Path: dir + "/", Handler: says("")}).Listen(), "ends in a slash")
}

// A server that does not take part in the lock keeps a socket that it makes between the check and the link.
func TestNotReplaced(t *testing.T) {
	t.Parallel()
	dir := socketDir(t)
	path := filepath.Join(dir, "s")
	l := must.Get(net.Listen("unix", path))(t)
	defer l.Close()
	require.ErrorIs(t, unixsocket.ListenUnix(t, dir, "s"), fs.ErrExist)
	require.NoError(t, must.Get(net.Dial("unix", path))(t).Close())
	assert.Len(t, must.Get(os.ReadDir(dir))(t), 1)
}

// The modes are the ones asked for, neither more nor less, whatever the umask. The umask belongs to
// the process, so this test runs alone.
func TestUmask(t *testing.T) {
	for _, umask := range []int{0, 0o777} {
		path := filepath.Join(socketDir(t), "s")
		old := syscall.Umask(umask)
		s := &unixsocket.Server{Path: path, Handler: says(""), SocketMode: 0o660}
		err := s.Listen()
		syscall.Umask(old)
		require.NoError(t, err)
		assert.Equal(t, fs.ModeSocket|0o660, mode(t, path), "umask %o", umask)
		require.NoError(t, s.CloseListener())
	}
}
