//go:build unix

package private_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

const (
	otherUser  = 54321 // neither root nor the user of a test
	otherGroup = 54322
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("gives files to other users, which takes root")
	}
}

// tempDir returns a directory that no link leads to.
func tempDir(t *testing.T) string {
	t.Helper()
	return must.Get(filepath.EvalSymlinks(t.TempDir()))(t)
}

func mkdir(t *testing.T, mode fs.FileMode, names ...string) string {
	t.Helper()
	dir := filepath.Join(names...)
	require.NoError(t, os.MkdirAll(dir, 0o700))
	require.NoError(t, os.Chmod(dir, mode))
	return dir
}

func write(t *testing.T, mode fs.FileMode, names ...string) string {
	t.Helper()
	path := filepath.Join(names...)
	require.NoError(t, os.WriteFile(path, []byte("content"), 0o600))
	require.NoError(t, os.Chmod(path, mode))
	return path
}

func openDir(path string, o private.Options) error {
	root, err := private.OpenDir(path, o)
	if err == nil {
		err = root.Close()
	}
	return err
}

func openFile(path string, o private.Options) error {
	f, err := private.OpenFile(path, os.O_RDONLY, o)
	if err == nil {
		_, err = io.ReadAll(f)
		err = errors.Join(err, f.Close())
	}
	return err
}

func openIn(dir, name string, o private.Options) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := private.OpenIn(root, name, o)
	if err == nil {
		err = f.Close()
	}
	return err
}

// refused requires a refusal, and that the command of its text mends it.
func refused(t *testing.T, err error, command string) {
	t.Helper()
	must.Fail(t, err, private.ErrUnsafe, "; run: "+command)
}

func TestModes(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		mode             fs.FileMode
		keys, usual      string // the command that helps; empty if it is not refused
		fileKeys, asFile string
	}{
		{mode: 0o700},
		{mode: 0o755, keys: "chmod 0700", fileKeys: "chmod 0600"},
		{mode: 0o750, keys: "chmod 0700", fileKeys: "chmod 0600"},
		{mode: 0o701, keys: "chmod 0700", fileKeys: "chmod 0600"},
		{mode: 0o777, keys: "chmod 0700", usual: "chmod o-w", fileKeys: "chmod 0600", asFile: "chmod o-w"},
		{mode: 0o777 | fs.ModeSticky, keys: "chmod 0700", fileKeys: "chmod 0600", asFile: "chmod o-w"},
		{mode: 0o702, keys: "chmod 0700", usual: "chmod o-w", fileKeys: "chmod 0600", asFile: "chmod o-w"},
	} {
		t.Run(tc.mode.String(), func(t *testing.T) {
			t.Parallel()
			base := tempDir(t)
			dir := mkdir(t, tc.mode, base, "d")
			file := write(t, tc.mode, base, "f")
			require.NoError(t, os.Mkdir(filepath.Join(dir, "below"), 0o700))
			for what, got := range map[string]struct {
				err  error
				want string
				path string
			}{
				"keys directory":     {openDir(dir, private.Options{Keys: true}), tc.keys, dir},
				"folder":             {openDir(dir, private.Options{}), tc.usual, dir},
				"a directory above":  {openDir(filepath.Join(dir, "below"), private.Options{}), tc.usual, dir},
				"above one of keys":  {openDir(filepath.Join(dir, "below"), private.Options{Keys: true}), tc.usual, dir},
				"missing below":      {ignoreMissing(openDir(filepath.Join(dir, "none"), private.Options{})), tc.usual, dir},
				"keys file":          {openFile(file, private.Options{Keys: true}), tc.fileKeys, file},
				"file":               {openFile(file, private.Options{}), tc.asFile, file},
				"file by descriptor": {openIn(base, "f", private.Options{}), tc.asFile, file},
				"keys by descriptor": {openIn(base, "f", private.Options{Keys: true}), tc.fileKeys, file},
			} {
				if tc.mode.Perm()&0o700 == 0 {
					continue
				}
				if got.want == "" {
					assert.NoError(t, got.err, what)
					continue
				}
				if assert.ErrorIs(t, got.err, private.ErrUnsafe, what) {
					assert.ErrorContains(t, got.err, fmt.Sprintf("; run: %s %q", got.want, got.path), what)
					assert.ErrorContains(t, got.err, fmt.Sprintf("mode %04o", tc.mode.Perm()), what)
				}
			}
		})
	}
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// info is a file of a made-up owner.
type info struct {
	fs.FileInfo
	mode fs.FileMode
	stat syscall.Stat_t
}

func (i info) Mode() fs.FileMode { return i.mode }
func (i info) IsDir() bool       { return i.mode.IsDir() }
func (i info) Sys() any          { return &i.stat }

func TestCheckJudgesTheDescriptor(t *testing.T) {
	t.Parallel()
	own, group := uint32(os.Geteuid()), uint32(os.Getegid())
	for _, tc := range []struct {
		what       string
		mode       fs.FileMode
		uid, gid   uint32
		keys       bool
		want       string // empty if it is fine
		acceptable bool   // with Warn
	}{
		{what: "ours", mode: 0o600, uid: own, gid: group, keys: true},
		{what: "root's", mode: 0o600, uid: 0, gid: 0, keys: true},
		{what: "root's directory of a Kubernetes Secret", mode: fs.ModeDir | fs.ModeSticky | 0o777, uid: 0, gid: 0},
		{what: "root's file of a Kubernetes Secret", mode: 0o644, uid: 0, gid: 0},
		{what: "root's directory with the fsGroup of this process", mode: fs.ModeDir | fs.ModeSetgid | 0o775, uid: 0, gid: group},
		{what: "a file in it", mode: 0o660, uid: own, gid: group},
		{what: "the group of root", mode: 0o664, uid: 0, gid: 0},
		{what: "another user's file", mode: 0o600, uid: otherUser, gid: group, want: "the file belongs to user 54321"},
		{what: "another user's keys", mode: 0o600, uid: otherUser, gid: group, keys: true, want: "the file belongs to user 54321"},
		{what: "another user's directory", mode: fs.ModeDir | 0o700, uid: otherUser, gid: group, want: "the directory belongs to user 54321"},
		{what: "another user's sticky directory", mode: fs.ModeDir | fs.ModeSticky | 0o777, uid: otherUser, gid: 0, want: "the directory belongs to user 54321"},
		{what: "writable by another group", mode: 0o664, uid: 0, gid: otherGroup, want: "chmod g-w", acceptable: true},
		{what: "a directory writable by another group", mode: fs.ModeDir | fs.ModeSetgid | 0o775, uid: 0, gid: otherGroup, want: "chmod g-w", acceptable: true},
		{what: "writable by all and another group", mode: 0o666, uid: own, gid: otherGroup, want: "chmod go-w", acceptable: true},
		{what: "an emptyDir", mode: fs.ModeDir | 0o777, uid: 0, gid: 0, want: "chmod o-w", acceptable: true},
		{what: "a directory of keys that others list", mode: fs.ModeDir | 0o750, uid: own, gid: group, keys: true, want: "chmod 0700"},
		{what: "a file of keys that our group reads", mode: 0o640, uid: own, gid: group, keys: true, want: "chmod 0600"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			t.Parallel()
			i := info{mode: tc.mode, stat: syscall.Stat_t{Uid: tc.uid, Gid: tc.gid}}
			err := private.Check("/some/path", i, private.Options{Keys: tc.keys})
			var warned []error
			lenient := private.Check("/some/path", i, private.Options{Keys: tc.keys, Warn: func(err error) { warned = append(warned, err) }})
			if tc.want == "" {
				require.NoError(t, err)
				require.NoError(t, lenient)
				require.Empty(t, warned)
				return
			}
			must.Fail(t, err, private.ErrUnsafe, tc.want, `/some/path`)
			if !tc.acceptable {
				require.ErrorIs(t, lenient, private.ErrUnsafe)
				require.Empty(t, warned)
				return
			}
			require.NoError(t, lenient)
			require.Equal(t, []error{err}, warned)
		})
	}
	unknown := must.Get(fs.Stat(fstest.MapFS{"f": {}}, "f"))(t)
	require.ErrorIs(t, private.Check("/x", unknown, private.Options{}), private.ErrUnsafe, "an unknown owner")
}

func TestOwners(t *testing.T) {
	t.Parallel()
	needRoot(t)
	base := tempDir(t)
	give := func(path string) string {
		require.NoError(t, os.Lchown(path, otherUser, -1))
		return path
	}
	folder := give(mkdir(t, 0o755, base, "folder"))
	below := mkdir(t, 0o700, folder, "below")
	write(t, 0o600, folder, "file")
	file := give(write(t, 0o600, base, "file"))
	ours := write(t, 0o600, base, "ours")
	link := filepath.Join(base, "link")
	require.NoError(t, os.Symlink(ours, link))
	give(link)
	dirLink := filepath.Join(base, "dirlink")
	own := mkdir(t, 0o700, base, "own")
	require.NoError(t, os.Symlink(own, dirLink))
	give(dirLink)
	for _, o := range []private.Options{{}, {Keys: true}, {Warn: func(err error) { t.Error(err) }}} {
		refused(t, openDir(folder, o), fmt.Sprintf("chown 0 %q", folder))
		refused(t, openDir(below, o), fmt.Sprintf("chown 0 %q", folder))
		refused(t, openFile(filepath.Join(folder, "file"), o), fmt.Sprintf("chown 0 %q", folder))
		refused(t, openFile(file, o), fmt.Sprintf("chown 0 %q", file))
		refused(t, openIn(base, "file", o), fmt.Sprintf("chown 0 %q", file))
		refused(t, openFile(link, o), fmt.Sprintf("chown -h 0 %q", link))
		refused(t, openDir(dirLink, o), fmt.Sprintf("chown -h 0 %q", dirLink))
		_, err := private.MakeDir(filepath.Join(folder, "new"), o)
		refused(t, err, fmt.Sprintf("chown 0 %q", folder))
		assert.NoDirExists(t, filepath.Join(folder, "new"), "nothing is made before the directory above is judged")
		_, err = private.OpenFile(filepath.Join(folder, "new"), os.O_CREATE|os.O_RDWR, o)
		refused(t, err, fmt.Sprintf("chown 0 %q", folder))
		assert.NoFileExists(t, filepath.Join(folder, "new"))
	}
	require.ErrorContains(t, openFile(file, private.Options{}), fmt.Sprintf(`run: chown 0 %q`, file))
	named := private.Options{Owners: []int{otherUser + 1, otherUser}}
	for _, path := range []string{filepath.Join(folder, "file"), file, link} {
		require.NoError(t, openFile(path, named))
		require.NoError(t, must.Get(private.OpenGiven(path, true, nil, named))(t).Close())
	}
	require.NoError(t, openDir(below, named))
	require.NoError(t, openDir(dirLink, named))
	require.NoError(t, openIn(base, "file", named))
	named.Owners = named.Owners[:1]
	refused(t, openFile(file, named), "chown ")
	require.NoError(t, os.Chown(folder, 0, otherGroup))
	require.NoError(t, os.Chmod(folder, 0o775))
	refused(t, openDir(below, private.Options{}), fmt.Sprintf("chmod g-w %q", folder))
	require.NoError(t, os.Chmod(folder, 0o775|fs.ModeSticky))
	require.NoError(t, openDir(below, private.Options{}), "the group cannot replace what is in it")
}

// A directory of root that all may write to, without sticky bit, is what an emptyDir of Kubernetes is.
func TestEmptyDir(t *testing.T) {
	t.Parallel()
	volume := mkdir(t, 0o777, tempDir(t), "volume")
	for _, path := range []string{volume, filepath.Join(volume, "sub"), filepath.Join(volume, "sub", "sub")} {
		_, err := private.MakeDir(path, private.Options{})
		refused(t, err, fmt.Sprintf("chmod o-w %q", volume))
		var warned []error
		root, err := private.MakeDir(path, private.Options{Warn: func(err error) { warned = append(warned, err) }})
		require.NoError(t, err)
		require.NoError(t, root.Close())
		require.Len(t, warned, 1, "once: %v", warned)
		refused(t, warned[0], fmt.Sprintf("chmod o-w %q", volume))
	}
}

// The volume of a Secret: links that are swapped, in a directory of root that all may write to, with sticky bit.
func TestSecretVolume(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	volume := mkdir(t, 0o777|fs.ModeSticky, tempDir(t), "cacerts")
	version := func(n int) string { return fmt.Sprintf("..2026_%d", n) }
	swap := func(n int) {
		mkdir(t, 0o755, volume, version(n))
		write(t, 0o644, volume, version(n), "ca.pem")
		require.NoError(t, os.Symlink(version(n), filepath.Join(volume, "..data_tmp")))
		require.NoError(t, os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")))
		if n > 0 {
			require.NoError(t, os.RemoveAll(filepath.Join(volume, version(n-1))))
		}
	}
	swap(0)
	require.NoError(t, os.Symlink("..data/ca.pem", filepath.Join(volume, "ca.pem")))
	done, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				swap(n)
			}
		}
	}()
	for end := time.Now().Add(time.Duration(rounds.Of(75)) * time.Millisecond); time.Now().Before(end); {
		if !assert.NoError(t, openFile(filepath.Join(volume, "ca.pem"), private.Options{})) {
			break
		}
	}
	close(stop)
	<-done
}

func TestLinks(t *testing.T) {
	t.Parallel()
	base := tempDir(t)
	file := write(t, 0o600, mkdir(t, 0o700, base, "a", "b"), "file")
	link := func(target string, names ...string) string {
		path := filepath.Join(append([]string{base}, names...)...)
		require.NoError(t, os.Symlink(target, path))
		return path
	}
	for _, path := range []string{
		link(file, "absolute"), link("a/b/file", "relative"), link("./a//b/../b/file", "dots"), link("../../absolute", "a", "b", "chain"),
		filepath.Join(link("a/b", "dir"), "file"), base + "/dir/../b/file",
	} {
		require.NoError(t, openFile(path, private.Options{}), path)
	}
	link("loop2", "loop1")
	require.ErrorIs(t, openFile(link("loop1", "loop2"), private.Options{}), syscall.ELOOP)
	require.ErrorIs(t, openFile(link("nothing", "dangling"), private.Options{}), fs.ErrNotExist)
	require.ErrorIs(t, openFile(filepath.Join(file, "below"), private.Options{}), syscall.ENOTDIR)
	require.ErrorContains(t, openIn(base, "relative", private.Options{}), "not a regular file")
	f, err := private.OpenFile(filepath.Join(base, "dangling"), os.O_CREATE|os.O_RDWR, private.Options{})
	require.NoError(t, err, "as open(2) does")
	require.NoError(t, f.Close())
	assert.FileExists(t, filepath.Join(base, "nothing"))
	// A link leads through a directory that others can change.
	bad := mkdir(t, 0o777, base, "bad")
	refused(t, openFile(link(write(t, 0o600, bad, "file"), "into"), private.Options{}), fmt.Sprintf("chmod o-w %q", bad))
}

func TestSpecialFiles(t *testing.T) {
	t.Parallel()
	base := tempDir(t)
	pipe := filepath.Join(base, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, err := range []error{openFile(pipe, private.Options{}), openIn(base, "pipe", private.Options{}), openFile(base, private.Options{}), openIn(filepath.Dir(base), filepath.Base(base), private.Options{})} {
		require.ErrorContains(t, err, "not a regular file", "and nothing waits for a writer")
	}
	file := write(t, 0o600, base, "file")
	require.ErrorContains(t, openDir(file, private.Options{}), "not a directory")
	require.Error(t, openDir("", private.Options{}))
	require.ErrorIs(t, openIn(base, "none", private.Options{}), fs.ErrNotExist)
	require.ErrorIs(t, openDir(filepath.Join(base, "none", "none"), private.Options{}), fs.ErrNotExist)
}

func TestMakeDir(t *testing.T) {
	t.Parallel()
	base := tempDir(t)
	for _, tc := range []struct{ mode, want fs.FileMode }{{0, 0o700}, {0o755, 0o755}, {0o770, 0o770}} {
		dir := filepath.Join(base, tc.want.String(), "a", "b")
		var synced []string
		root := must.Get(private.MakeDirSync(dir, private.Options{Mode: tc.mode}, func(dir string) error {
			synced = append(synced, dir)
			return nil
		}))(t)
		info := must.Get(root.Stat("."))(t)
		assert.Equal(t, tc.want, info.Mode().Perm())
		require.NoError(t, root.Close())
		assert.Equal(t, []string{base, filepath.Join(base, tc.want.String()), filepath.Dir(dir)}, synced, "each directory with a new name is made durable")
		require.NoError(t, os.Chmod(dir, 0o711))
		root = must.Get(private.MakeDir(dir, private.Options{Mode: tc.mode}))(t)
		info = must.Get(root.Stat("."))(t)
		assert.Equal(t, fs.FileMode(0o711), info.Mode().Perm(), "one that is there is left as it is")
		require.NoError(t, root.Close())
	}
	fault := errors.New("the disk is broken")
	_, err := private.MakeDirSync(filepath.Join(base, "c"), private.Options{}, func(string) error { return fault })
	require.ErrorIs(t, err, fault)
	require.NoError(t, must.Get(private.MakeDir(filepath.Join(base, "d"), private.Options{Keys: true}))(t).Close())
}

func TestRelativePaths(t *testing.T) {
	dir := tempDir(t)
	t.Chdir(dir)
	require.NoError(t, must.Get(private.MakeDir("x/y", private.Options{}))(t).Close())
	assert.DirExists(t, filepath.Join(dir, "x", "y"))
	require.NoError(t, os.Chmod("x", 0o777))
	refused(t, openDir("./x/y", private.Options{}), fmt.Sprintf("chmod o-w %q", filepath.Join(dir, "x")))
	require.NoError(t, openDir(".", private.Options{}))
}

func TestConcurrentMakeDir(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(tempDir(t), strings.Repeat("x/", 20))
	errs := make(chan error)
	for range 8 {
		go func() {
			root, err := private.MakeDir(dir, private.Options{})
			if err == nil {
				err = root.Close()
			}
			errs <- err
		}()
	}
	for range 8 {
		require.NoError(t, <-errs)
	}
}

func TestOpenFileCreates(t *testing.T) {
	t.Parallel()
	path := filepath.Join(tempDir(t), "log")
	for range 2 {
		f := must.Get(private.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, private.Options{Keys: true}))(t)
		must.Get(f.WriteString("x"))(t)
		require.NoError(t, f.Close())
	}
	assert.Equal(t, "xx", string(must.Get(os.ReadFile(path))(t)))
	assert.Equal(t, fs.FileMode(0o600), must.Get(os.Stat(path))(t).Mode())
	_, err := private.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, private.Options{})
	require.ErrorIs(t, err, fs.ErrExist)
}

// The kernel is asked: it refuses to make a directory durable that is on no disk.
func TestSyncDirReachesTheKernel(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	require.ErrorIs(t, private.SyncDir("/proc"), syscall.EINVAL)
}

// The private key that another program puts into place may be readable for groups of this process, and in a volume of Kubernetes
// for all.
func TestCheckKeyFile(t *testing.T) {
	t.Parallel()
	base := tempDir(t)
	check := func(path string) error {
		f := must.Get(private.OpenFile(path, os.O_RDONLY, private.Options{}))(t)
		defer f.Close()
		return private.CheckKeyFile(path, f)
	}
	for mode, command := range map[fs.FileMode]string{
		0o600: "", 0o400: "", 0o640: "", 0o440: "", 0o644: "chmod o=", 0o604: "chmod o=", 0o601: "chmod o=", 0o444: "chmod o=",
	} {
		path := write(t, mode, base, fmt.Sprintf("key%o", mode))
		if command == "" {
			require.NoError(t, check(path), "%v", mode)
		} else {
			refused(t, check(path), fmt.Sprintf("%s %q", command, path))
		}
		require.NoError(t, check(write(t, mode, mkdir(t, 0o755, base, fmt.Sprintf("..2026_%o", mode)), "key")), "in a volume")
	}
	if os.Geteuid() != 0 {
		t.Skip("gives files to another group, which takes root")
	}
	for mode, command := range map[fs.FileMode]string{0o600: "", 0o640: "chmod g=", 0o644: "chmod go="} {
		path := write(t, mode, base, fmt.Sprintf("group%o", mode))
		require.NoError(t, os.Chown(path, -1, 54321))
		if command == "" {
			require.NoError(t, check(path))
		} else {
			refused(t, check(path), fmt.Sprintf("%s %q", command, path))
		}
	}
}

// What another program has put into place is read unless it is in a directory that this program writes to.
func TestOpenGiven(t *testing.T) {
	t.Parallel()
	base := tempDir(t)
	given, own := mkdir(t, 0o755, base, "given"), mkdir(t, 0o755, base, "own")
	gone := filepath.Join(base, "gone")
	open := func(path string, key bool) error {
		f, err := private.OpenGiven(path, key, []string{gone, own}, private.Options{Warn: func(error) {}})
		if err == nil {
			err = f.Close()
		}
		return err
	}
	require.NoError(t, open(write(t, 0o644, given, "cert.pem"), false))
	require.NoError(t, open(write(t, 0o600, given, "key.pem"), true))
	require.ErrorIs(t, open(filepath.Join(given, "none.pem"), false), fs.ErrNotExist)
	require.ErrorIs(t, open(filepath.Join(gone, "cert.pem"), false), fs.ErrNotExist)
	refused(t, open(write(t, 0o644, given, "shown.pem"), true), "chmod ")
	refused(t, open(write(t, 0o666, given, "all.pem"), false), "chmod ") // a Warn excuses directories alone

	mine := write(t, 0o600, own, "cert.pem")
	require.NoError(t, os.Symlink(mine, filepath.Join(given, "link.pem")))
	require.NoError(t, os.Symlink(own, filepath.Join(base, "alias")))
	for _, path := range []string{mine, filepath.Join(given, "link.pem"), filepath.Join(base, "alias", "cert.pem")} {
		require.ErrorContains(t, open(path, false), "to which this program writes", path)
	}
}

func TestHasOwner(t *testing.T) {
	t.Parallel()
	assert.True(t, private.HasOwner(must.Get(os.Stat(t.TempDir()))(t)))
	assert.False(t, private.HasOwner(must.Get(fstest.MapFS{"f": {}}.Stat("f"))(t)))
}
