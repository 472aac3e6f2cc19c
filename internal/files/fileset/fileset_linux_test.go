package fileset

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// The modes hold under any umask, and a directory with the setgid bit hands on its group.
func TestFolderSetgid(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := errors.Join(os.Chown(dir, -1, 1), os.Chmod(dir, 0o750|fs.ModeSetgid)); err != nil {
		t.Skip("not in the group")
	}
	f := must.Get(Open(dir, Options{Program: "test"}))(t)
	defer f.Close()
	must.Get(f.Write(map[string]File{"key": {[]byte("one"), 0o640}}))(t)
	for name, mode := range map[string]fs.FileMode{"key": 0o640, currentLink: 0o755 | fs.ModeDir | fs.ModeSetgid} {
		info := must.Get(os.Stat(filepath.Join(dir, name)))(t)
		assert.Equal(t, mode, info.Mode(), name)
		assert.Equal(t, 1, int(info.Sys().(*syscall.Stat_t).Gid), name)
	}
}

const crashStep, crashDir = "SVIDKIT_FILESET_STEP", "SVIDKIT_FILESET_DIR" // of the process that TestCrash starts

// A process that is killed at any step leaves one version with links. With plain files it leaves each file whole, and
// the next Open, which has no data of its own, leaves one version: the new one if it was committed.
func TestCrash(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	if dir := os.Getenv(crashDir); dir != "" {
		plain, at, _ := strings.Cut(os.Getenv(crashStep), ":")
		f := open(t, dir, plain == "true")
		f.disk = stepping{f.disk, func(step string) error {
			if step == at {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			return nil
		}}
		_, _ = f.Write(set(2))
		t.Fatal("still alive")
	}
	for _, plain := range []bool{false, true} {
		all1, commit := steps(t, plain), map[bool]string{false: "rename to ..data", true: "rename to ..next"}[plain]
		for i, step := range all1 {
			dir := t.TempDir()
			f := open(t, dir, plain)
			write(t, f, 1)
			require.NoError(t, f.Close())
			cmd := exec.Command(os.Args[0], "-test.run=^TestCrash$")
			cmd.Env = append(os.Environ(), crashDir+"="+dir, crashStep+"="+strconv.FormatBool(plain)+":"+step)
			out, err := cmd.CombinedOutput()
			require.EqualError(t, err, "signal: killed", "%s", out)
			want := all(1)
			if i > slices.Index(all1, commit) {
				want = all(2)
			}
			have := versions(t, dir)
			if !plain {
				require.Equal(t, want, have, step)
			}
			f = open(t, dir, plain)
			require.Equal(t, want, versions(t, dir), "%s: before: %v", step, have)
			write(t, f, 3)
			require.NoError(t, f.Close())
			require.Equal(t, all(3), versions(t, dir))
			for _, name := range list(t, dir) {
				require.False(t, strings.HasPrefix(name, draftMark) || name == nextFolder || plain && strings.HasPrefix(name, "..") && name != lockName, "%s leaves %s", step, name)
			}
		}
	}
}

// A disk that is full or read-only leaves the files from before, and works again when it is neither.
func TestDisk(t *testing.T) {
	t.Parallel()
	for _, plain := range []bool{false, true} {
		dir := t.TempDir()
		if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=64k,mode=755"); err != nil {
			t.Skip("may not mount:", err)
		}
		t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, syscall.MNT_DETACH)) }) // a process of another test may be about to begin
		f := open(t, dir, plain)
		write(t, f, 1)
		big := set(2)
		big["roots"] = File{make([]byte, 128<<10), 0o644}
		changed, err := f.Write(big)
		require.ErrorIs(t, err, syscall.ENOSPC)
		require.False(t, changed)
		require.Equal(t, all(1), versions(t, dir))
		require.ErrorContains(t, err, filepath.Join(dir, "roots"))
		_, again := f.Write(big)
		require.EqualError(t, again, err.Error(), "logs tell a failure that stays by its text")
		write(t, f, 3)
		require.Equal(t, all(3), versions(t, dir))
		require.NoError(t, f.Close())

		require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
		f, err = Open(dir, options(plain))
		if err == nil { // it has nothing to write there
			changed = must.Get(f.Write(set(3)))(t)
			require.False(t, changed)
			_, err = f.Write(set(4))
			require.ErrorContains(t, err, dir)
			_, again := f.Write(set(4))
			require.EqualError(t, again, err.Error())
			require.NoError(t, f.Close())
		}
		require.ErrorIs(t, err, syscall.EROFS)
		require.Equal(t, all(3), versions(t, dir))
		require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", syscall.MS_REMOUNT, "size=64k,mode=755"))
		f = open(t, dir, plain)
		write(t, f, 4)
		require.NoError(t, f.Close())
	}
}

// A directory of another user, a set that another user has put there, and a file of another user that has the same
// contents are not taken.
func TestForeignOwner(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	dir := t.TempDir()
	f := open(t, dir, true)
	write(t, f, 1)
	require.NoError(t, os.Chown(filepath.Join(dir, "roots"), 54321, -1))
	write(t, f, 1) // it could change under our name
	require.NoError(t, f.Close())

	next := filepath.Join(dir, nextFolder)
	require.NoError(t, os.Mkdir(next, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(next, "roots"), []byte("planted"), 0o644))
	require.NoError(t, os.Chown(next, 54321, -1))
	require.ErrorContains(t, must.Err(Open(dir, options(true))), "belongs to user 54321")
	require.Equal(t, all(1), versions(t, dir))
	require.NoError(t, os.RemoveAll(next))

	require.NoError(t, os.Chown(dir, 54321, -1))
	for _, plain := range []bool{false, true} {
		require.ErrorContains(t, must.Err(Open(dir, options(plain))), "run: chown 0")
	}
}
