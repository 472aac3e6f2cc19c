package fileset

import (
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/diskcrash"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

var names = []string{"cert", "key", "roots"}

func options(plain bool) Options {
	return Options{Program: "test", Plain: plain, Last: []string{"key", "cert"}}
}

func set(version int) map[string]File {
	data := []byte(strconv.Itoa(version))
	return map[string]File{"cert": {data, 0o644}, "key": {data, 0o600}, "roots": {data, 0o644}}
}

func open(t testing.TB, dir string, plain bool) *Folder {
	t.Helper()
	return must.Get(Open(dir, options(plain)))(t)
}

func write(t testing.TB, f *Folder, version int) {
	t.Helper()
	require.True(t, must.Get(f.Write(set(version)))(t))
}

// versions returns what the files have, in the order of names.
func versions(t testing.TB, dir string) (have []string) {
	t.Helper()
	for _, name := range names {
		have = append(have, string(must.Get(os.ReadFile(filepath.Join(dir, name)))(t)))
	}
	return have
}

func all(version int) []string { return slices.Repeat([]string{strconv.Itoa(version)}, len(names)) }

// list returns the names in a directory.
func list(t testing.TB, dir string) (have []string) {
	t.Helper()
	for _, e := range must.Get(os.ReadDir(dir))(t) {
		have = append(have, e.Name())
	}
	return have
}

// Plain files are regular, have their modes, and have no company but that of the lock, which other users cannot open.
func TestPlain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "made")
	f := open(t, dir, true)
	write(t, f, 1)
	write(t, f, 2)
	require.Equal(t, all(2), versions(t, dir))
	require.Equal(t, append([]string{lockName}, names...), list(t, dir))
	if info, err := os.Lstat(filepath.Join(dir, lockName)); runtime.GOOS != "windows" {
		require.NoError(t, err)
		require.EqualValues(t, 0o600, info.Mode())
	}
	for name, file := range set(2) {
		info := must.Get(os.Lstat(filepath.Join(dir, name)))(t)
		require.True(t, info.Mode().IsRegular())
		if runtime.GOOS != "windows" {
			require.Equal(t, file.Mode, info.Mode().Perm(), name)
		}
	}
	before := stat(t, dir)
	changed := must.Get(f.Write(set(2)))(t)
	require.False(t, changed)
	require.NoError(t, f.Close())
	f = open(t, dir, true)
	defer f.Close()
	changed = must.Get(f.Write(set(2)))(t)
	require.False(t, changed, "after a restart")
	require.Equal(t, before, stat(t, dir))
}

// stat returns the time of the last change of each file.
func stat(t testing.TB, dir string) (at []time.Time) {
	t.Helper()
	for _, name := range names {
		at = append(at, must.Get(os.Stat(filepath.Join(dir, name)))(t).ModTime())
	}
	return at
}

// One layout takes the place of the other: plain files that of links at once, and links that of plain files when
// these were removed.
func TestLayoutChange(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	f := open(t, dir, false)
	write(t, f, 1)
	write(t, f, 2)
	require.NoError(t, f.Close())
	f = open(t, dir, true)
	write(t, f, 3)
	require.NoError(t, f.Close())
	require.Equal(t, all(3), versions(t, dir))
	require.Equal(t, append([]string{lockName}, names...), list(t, dir))
	f = open(t, dir, false)
	defer f.Close()
	require.ErrorContains(t, must.Err(f.Write(set(4))), "was not made by test: remove it")
	require.Equal(t, all(3), versions(t, dir))
	for _, name := range names {
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	write(t, f, 4)
	require.Equal(t, all(4), versions(t, dir))
}

// stepping is a disk that calls step before a file is made or renamed.
type stepping struct {
	disk.Disk
	step func(string) error
}

func (d stepping) Create(root *os.Root, name string) (disk.File, error) {
	if err := d.step("write " + filepath.Base(name)); err != nil {
		return nil, err
	}
	return d.Disk.Create(root, name)
}

func (d stepping) Rename(root *os.Root, from, to string) error {
	if err := d.step("rename to " + to); err != nil {
		return err
	}
	return d.Disk.Rename(root, from, to)
}

// steps returns the names of the steps of a second write.
func steps(t testing.TB, plain bool) (steps []string) {
	t.Helper()
	f := open(t, t.TempDir(), plain)
	defer f.Close()
	write(t, f, 1)
	f.disk = stepping{f.disk, func(step string) error {
		steps = append(steps, step)
		return nil
	}}
	write(t, f, 2)
	return steps
}

// A step that fails, as on a full disk, leaves a whole set in the directory, the old one if it comes before the commit.
// What was written for nothing is removed, and the next write succeeds.
func TestFailure(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, plain := range []bool{false, true} {
		all1, commit := steps(t, plain), map[bool]string{false: "rename to ..data", true: "rename to ..next"}[plain]
		require.Contains(t, all1, commit)
		if plain {
			require.Equal(t, []string{"rename to roots", "rename to key", "rename to cert"}, all1[len(all1)-3:], "the order of the set")
		}
		for i, fault := range all1 {
			dir := t.TempDir()
			f := open(t, dir, plain)
			write(t, f, 1)
			f.disk = stepping{f.disk, func(step string) error {
				if step == fault {
					return syscall.ENOSPC
				}
				return nil
			}}
			committed := i > slices.Index(all1, commit)
			changed, err := f.Write(set(2))
			require.ErrorIs(t, err, syscall.ENOSPC, fault)
			require.Equal(t, committed, changed, fault)
			if !committed {
				require.Equal(t, all(1), versions(t, dir), fault)
				left := slices.DeleteFunc(list(t, dir), func(name string) bool {
					return slices.Contains(names, name) || name == lockName || name == currentLink
				})
				require.Len(t, left, map[bool]int{false: 1, true: 0}[plain], "%s: the version in use, if there is one", fault)
			}
			f.disk = disk.OS{}
			must.Get(f.Write(set(3)))(t)
			require.Equal(t, all(3), versions(t, dir), fault)
			require.NoError(t, f.Close())
		}
	}
}

// A write that was committed and could not be made durable is made again, although the files are there.
func TestUnsure(t *testing.T) {
	t.Parallel()
	f := open(t, t.TempDir(), true)
	defer f.Close()
	write(t, f, 1)
	f.unsure = true
	write(t, f, 1)
	require.False(t, must.Get(f.Write(set(1)))(t))
}

// Readers that spin while plain files are written see no part of a file, and never certificates without their key or
// a key without its roots: what they read in this order never gets older. A follower, by the rule of two equal
// readings, takes no set with files of two versions, and in the end the last one.
func TestPlainReaders(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := t.TempDir()
	f := must.Get(openOn(&diskcrash.Journal{}, dir, options(true)))(t) // which waits for no disk
	defer f.Close()
	write(t, f, 1)

	ctx, cancel := context.WithCancel(t.Context())
	var readers sync.WaitGroup
	defer readers.Wait()
	defer cancel()
	// The machine may stand still between two of the moves for longer than readers wait between theirs.
	const still = 80 * time.Millisecond
	var began atomic.Pointer[time.Time] // the moves
	var stalled, idle atomic.Bool
	f.disk = stepping{f.disk, func(step string) error {
		if now := time.Now(); step == "rename to roots" {
			began.Store(&now)
		}
		return nil
	}}
	var read, mixed, taken atomic.Int64
	var last atomic.Int64
	for range 2 {
		readers.Go(func() {
			for ctx.Err() == nil && !t.Failed() {
				if idle.Load() {
					time.Sleep(time.Millisecond)
				}
				var have []int
				for _, name := range []string{"cert", "key", "roots"} {
					data, err := os.ReadFile(filepath.Join(dir, name))
					n, numErr := strconv.Atoi(string(data))
					if !assert.NoError(t, errors.Join(err, numErr)) {
						return
					}
					have = append(have, n)
				}
				assert.True(t, slices.IsSorted(have), "cert, key and roots are %v", have)
				read.Add(1)
				if have[0] != have[2] {
					mixed.Add(1)
				}
			}
		})
	}
	paths := make([]string, len(names))
	for i, name := range names {
		paths[i] = filepath.Join(dir, name)
	}
	follower := follow.New(paths, func(_ context.Context, files follow.Files) error {
		have := string(files[paths[0]].Data)
		if at := began.Load(); stalled.Load() || at != nil && time.Since(*at) > still {
			t.Log("the machine stood still")
		} else {
			for _, path := range paths {
				assert.Equal(t, have, string(files[path].Data), "a mixed set was taken")
			}
		}
		n, err := strconv.Atoi(have)
		taken.Add(1)
		last.Store(int64(n))
		return err
	}, &follow.Options{Open: func(path string) (*os.File, error) {
		return private.OpenFile(path, os.O_RDONLY, private.Options{})
	}})
	require.NoError(t, follower.Read(ctx))
	readers.Go(func() { _ = follower.Run(ctx) })

	version := 1
	for end := time.Now().Add(time.Duration(rounds.Of(1)) * 150 * time.Millisecond); time.Now().Before(end) && !t.Failed(); {
		idle.Store(false)
		for range 1 + rand.IntN(6) {
			version++
			write(t, f, version)
			if at := began.Load(); time.Since(*at) > still {
				stalled.Store(true)
			}
			began.Store(nil) // after that, for a follower that looks at both
		}
		idle.Store(true)
		time.Sleep(rand.N(250 * time.Millisecond))
	}
	require.Eventually(t, func() bool { return last.Load() == int64(version) }, time.Minute, time.Millisecond)
	t.Logf("%d versions, %d sets read, %d of them mixed, %d taken", version, read.Load(), mixed.Load(), taken.Load())
	assert.Greater(t, read.Load(), int64(10))
}

// Links and directories that are put into the place of our files are not followed, and not written to.
func TestLinkAttacks(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("links need rights there")
	}
	victim := filepath.Join(t.TempDir(), "victim")
	require.NoError(t, os.WriteFile(victim, []byte("mine"), 0o600))
	for _, plain := range []bool{false, true} {
		dir := t.TempDir()
		for _, name := range append([]string{"key.new"}, names...) {
			require.NoError(t, os.Symlink(victim, filepath.Join(dir, name)))
		}
		f := open(t, dir, plain)
		write(t, f, 1)
		require.Equal(t, all(1), versions(t, dir))
		require.NoError(t, f.Close())

		require.NoError(t, os.Remove(filepath.Join(dir, "key")))
		require.NoError(t, os.Mkdir(filepath.Join(dir, "key"), 0o700))
		f = open(t, dir, plain)
		require.ErrorContains(t, must.Err(f.Write(set(2))), "key is there and was not made by test")
		require.NoError(t, f.Close())
	}

	dir := t.TempDir()
	outside := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(outside, "key"), []byte("planted"), 0o600))
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, nextFolder)))
	require.ErrorContains(t, must.Err(Open(dir, options(true))), "..next is not a directory")
	require.NoError(t, os.Remove(filepath.Join(dir, nextFolder)))
	require.NoError(t, os.Mkdir(filepath.Join(dir, nextFolder), 0o755))
	require.NoError(t, os.Chmod(filepath.Join(dir, nextFolder), 0o755))
	_, err := Open(dir, options(true))
	require.ErrorContains(t, err, "not safe from other users", "a directory that is not like ours")
	require.NoError(t, os.Remove(filepath.Join(dir, nextFolder)))

	_ = os.Remove(filepath.Join(dir, lockName))
	require.NoError(t, os.Symlink(victim, filepath.Join(dir, lockName)))
	require.Error(t, must.Err(Open(dir, options(false))))
	require.Equal(t, "mine", string(must.Get(os.ReadFile(victim))(t)))
}

// Replace leaves one file, and keeps to the directory.
func TestReplace(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	root := must.Get(os.OpenRoot(dir))(t)
	defer root.Close()
	for _, mode := range []fs.FileMode{0o600, 0o644} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "a.new"), []byte("of a crash"), 0o600))
		require.NoError(t, Replace(root, "a", File{[]byte(mode.String()), mode}))
		require.Equal(t, mode.String(), string(must.Get(os.ReadFile(filepath.Join(dir, "a")))(t)))
		require.Equal(t, []string{"a"}, list(t, dir))
		if runtime.GOOS != "windows" {
			require.Equal(t, mode, must.Get(os.Stat(filepath.Join(dir, "a")))(t).Mode())
		}
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "b"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "b", "c"), nil, 0o600))
	require.Error(t, Replace(root, "b", File{[]byte("b"), 0o600}))
	require.Equal(t, []string{"a", "b"}, list(t, dir), "no draft stays")
	require.Error(t, Replace(root, "../d", File{nil, 0o600}))
}

// A directory in which all users can make files is refused, with the sticky bit too, unless the caller accepts it.
func TestFolderOfAll(t *testing.T) {
	t.Parallel()
	if runtime.GOOS == "windows" {
		t.Skip("modes are others there")
	}
	for _, mode := range []fs.FileMode{0o777, 0o777 | fs.ModeSticky} {
		dir := t.TempDir()
		require.NoError(t, os.Chmod(dir, mode))
		_, err := Open(dir, options(true))
		require.ErrorContains(t, err, "not safe from other users")
		require.True(t, strings.Contains(err.Error(), "chmod") || strings.Contains(err.Error(), "choose a directory in it"), err)
		var told []error
		o := options(true)
		o.Warn = func(err error) { told = append(told, err) }
		f := must.Get(Open(dir, o))(t)
		require.Len(t, told, 1)
		write(t, f, 1)
		require.NoError(t, f.Check())
		require.NoError(t, f.Close())

		require.NoError(t, os.Chmod(dir, 0o755))
		f = open(t, dir, true)
		require.NoError(t, f.Check())
		require.NoError(t, os.Chmod(dir, mode))
		require.Error(t, f.Check(), "it is not safe any more")
		require.NoError(t, os.Chmod(dir, 0o755))
		require.NoError(t, os.Rename(dir, dir+".old"))
		require.ErrorIs(t, f.Check(), fs.ErrNotExist)
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.ErrorContains(t, f.Check(), "another directory")
		require.NoError(t, f.Close())
	}
}

// One process at a time writes.
func TestOneWriter(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, plain := range []bool{false, true} {
		dir := t.TempDir()
		f := open(t, dir, plain)
		if runtime.GOOS != "windows" {
			require.ErrorContains(t, must.Err(Open(dir, options(plain))), "another program writes to "+dir)
		}
		require.NoError(t, f.Close())
		f = open(t, dir, plain)
		require.NoError(t, f.Close())
	}
}

// A user who can read the directory can lock it, as with flock(1). That stops no write, of plain files or links.
func TestLockOfAnother(t *testing.T) {
	t.Parallel()
	if !flock.Supported {
		t.Skip("there are no locks of files")
	}
	for _, plain := range []bool{true, false} {
		dir := t.TempDir()
		other := must.Get(os.Open(dir))(t)
		defer other.Close()
		require.True(t, must.Get(flock.TryLock(other))(t))
		f := open(t, dir, plain)
		write(t, f, 1)
		_, err := Open(dir, options(plain))
		require.ErrorContains(t, err, "another program writes to", "one of ours still counts")
		require.NoError(t, f.Close())
	}
}
