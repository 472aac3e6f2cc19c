package ca_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest/storetest"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
)

func newDirStore(t testing.TB) (ca.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ca")
	d := must.Get(ca.NewDirStore(dir))(t)
	return d, dir
}

// What every store does.
func TestStores(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Place {
			t.Parallel()
			shared := ca.NewMemoryStore()
			var cut atomic.Pointer[func()]
			var down atomic.Int32 // a fault
			return storetest.Place{
				Open: func() (ca.Store, error) {
					return &faultStore{Store: shared, decide: func(op string) (fault, time.Duration) {
						if op != "save" {
							return fault(down.Load()), 0
						}
						if meanwhile := cut.Swap(nil); meanwhile != nil {
							(*meanwhile)()
							return after, 0
						}
						return fault(down.Load()), 0
					}}, nil
				},
				Cut:   func(meanwhile func()) { cut.Store(&meanwhile) },
				Break: func() func() { down.Store(int32(before)); return func() { down.Store(int32(fine)) } },
				Hang:  func() func() { down.Store(int32(hang)); return func() { down.Store(int32(fine)) } },
			}
		})
	})
	t.Run("folder", func(t *testing.T) {
		t.Parallel()
		storetest.Run(t, func(t *testing.T) storetest.Place {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "ca")
			file := filepath.Join(dir, "record.json")
			move := func(from, to string) { require.NoError(t, os.Rename(from, to)) }
			write := func(b []byte) { require.NoError(t, os.WriteFile(file, b, 0o600)) }
			return storetest.Place{
				Open:   func() (ca.Store, error) { return ca.NewDirStore(dir) },
				Remove: func() func() { move(dir, dir+".away"); return func() { move(dir+".away", dir) } },
				Dump: func() func() {
					b := must.Get(os.ReadFile(file))(t)
					return func() { write(b) }
				},
				Damage: func() {
					write(bytes.Replace(must.Get(os.ReadFile(file))(t), []byte("svidkit-"), []byte("svidkjt-"), 1))
				},
			}
		})
	})
}

func onlyUnix(t *testing.T) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no file modes")
	}
}

func TestDirStoreIsPrivate(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	d, dir := newDirStore(t)
	_, err := os.Stat(dir)
	require.ErrorIs(t, err, os.ErrNotExist, "nothing is made before it is needed")
	v := must.Get(d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("x")})))(t)
	var names []string
	require.NoError(t, filepath.Walk(dir, func(path string, info os.FileInfo, err error) error {
		require.NoError(t, err)
		names = append(names, strings.TrimPrefix(path, dir))
		want := os.FileMode(0o600)
		if info.IsDir() {
			want = 0o700
		}
		assert.Equal(t, want, info.Mode().Perm(), path)
		return nil
	}))
	assert.Equal(t, []string{"", "/lock", "/record.json"}, names)

	for _, tt := range []struct {
		path string
		mode os.FileMode
		back os.FileMode
	}{
		{dir, 0o750, 0o700}, {dir, 0o701, 0o700}, {dir, 0o777, 0o700},
		{filepath.Join(dir, "record.json"), 0o644, 0o600}, {filepath.Join(dir, "record.json"), 0o602, 0o600},
	} {
		require.NoError(t, os.Chmod(tt.path, tt.mode))
		_, err := d.Load(t.Context())
		assert.ErrorContains(t, err, fmt.Sprintf("has mode %04o, so that others may get at the keys; run: chmod %04o %q", tt.mode, tt.back, tt.path))
		assert.NotErrorIs(t, err, ca.ErrNoRecord, "which would make a second CA")
		if tt.path == dir {
			_, err = d.Save(t.Context(), ca.NewRecord(v, map[string][]byte{"key": []byte("y")}))
			assert.ErrorContains(t, err, "chmod 0700")
			_, err = ca.NewDirStore(dir)
			assert.ErrorContains(t, err, "chmod 0700")
		}
		require.NoError(t, os.Chmod(tt.path, tt.back))
	}
	must.Get(d.Load(t.Context()))(t)
}

func TestNewDirStoreRefuses(t *testing.T) {
	t.Parallel()
	_, err := ca.NewDirStore("")
	assert.ErrorContains(t, err, "name of a directory")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = ca.NewDirStore(file)
	assert.ErrorContains(t, err, "directory of the store")
	d, err := ca.NewDirStore(filepath.Join(file, "below"))
	if err == nil { // a file is in the way
		_, err = d.Save(t.Context(), ca.NewRecord("", map[string][]byte{}))
	}
	assert.Error(t, err)
}

// What could not be read again is not written.
func TestDirStoreTooLarge(t *testing.T) {
	t.Parallel()
	d, dir := newDirStore(t)
	err := must.Err(d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": make([]byte, 2<<20)})))
	require.ErrorContains(t, err, "the limit is 2097152")
	require.NoFileExists(t, filepath.Join(dir, "record.json"))
}

// What a crash has left unfinished goes with the next save. Nothing else does.
func TestDirStoreLeftovers(t *testing.T) {
	t.Parallel()
	d, dir := newDirStore(t)
	begun := filepath.Join(dir, "tmp-record.json")
	require.NoError(t, os.Mkdir(dir, 0o700))
	version := ""
	for range 2 {
		require.NoError(t, os.WriteFile(begun, []byte(`{"version"`), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o600))
		version = must.Get(d.Save(t.Context(), ca.NewRecord(version, map[string][]byte{"key": []byte("1")})))(t)
		require.NoFileExists(t, begun)
		require.FileExists(t, filepath.Join(dir, "notes.txt"), "not ours")
	}
}

// A directory of an earlier layout is refused and left as it is: no new CA is made beside the old one.
func TestDirStoreEarlierLayout(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"CURRENT", "v-1"} {
		d, dir := newDirStore(t)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("v-1\n"), 0o600))
		require.ErrorIs(t, must.Err(d.Load(t.Context())), ca.ErrUnfit, name)
		require.NotErrorIs(t, must.Err(d.Load(t.Context())), ca.ErrNoRecord, name)
		require.ErrorIs(t, must.Err(d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": nil}))), ca.ErrUnfit, name)
		require.ErrorIs(t, must.Err(tryOpen(t.Context(), d, func(c *ca.Config) { c.Create = true })), ca.ErrUnfit, name)
		require.FileExists(t, filepath.Join(dir, name))
		require.NoFileExists(t, filepath.Join(dir, "record.json"))
	}
}

// What belongs to another user is refused, by descriptor, and Open does not try again.
func TestDirStoreOwners(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	if os.Geteuid() != 0 {
		t.Skip("gives files to another user, which takes root")
	}
	for _, of := range []string{"", "above", "record.json", "lock"} {
		t.Run(of, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "above", "ca")
			d := must.Get(ca.NewDirStore(dir))(t)
			version, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
			require.NoError(t, err)
			path := filepath.Join(dir, of)
			if of == "above" {
				path = filepath.Dir(dir)
			}
			require.NoError(t, os.Chown(path, 54321, -1))
			_, lerr := d.Load(t.Context())
			_, serr := d.Save(t.Context(), ca.NewRecord(version, map[string][]byte{"key": []byte("2")}))
			if of != "lock" { // a load needs none
				require.ErrorIs(t, lerr, ca.ErrUnfit)
				require.ErrorContains(t, lerr, fmt.Sprintf("run: chown 0 %q", path))
				_, err = tryOpen(t.Context(), d)
				require.ErrorIs(t, err, ca.ErrUnfit)
			}
			require.ErrorIs(t, serr, ca.ErrUnfit)
			require.ErrorContains(t, serr, fmt.Sprintf("run: chown 0 %q", path))
		})
	}
}

// A directory that is damaged is an error, and never taken for an empty one: nothing is made, nothing is removed, and Open
// ends at once.
func TestDirStoreDamaged(t *testing.T) {
	t.Parallel()
	write := func(change func([]byte) []byte) func(t *testing.T, file string) {
		return func(t *testing.T, file string) {
			require.NoError(t, os.WriteFile(file, change(must.Get(os.ReadFile(file))(t)), 0o600))
		}
	}
	is := func(text string) func(t *testing.T, file string) {
		return write(func([]byte) []byte { return []byte(text) })
	}
	for name, damage := range map[string]func(t *testing.T, file string){
		"empty":          is(""),
		"zeros":          is(strings.Repeat("\x00", 88)), // as file systems leave it
		"null":           is("null"),
		"an object":      is("{}"),
		"without a hash": is(`{"version":"1","data":{"key":"MQ=="}}`),
		"half":           write(func(b []byte) []byte { return b[:len(b)/2] }),
		"too large":      write(func(b []byte) []byte { return append(b, make([]byte, 2<<20)...) }),
		"another item":   write(func(b []byte) []byte { return bytes.Replace(b, []byte(`"key"`), []byte(`"kex"`), 1) }),
		"a directory": func(t *testing.T, file string) {
			require.NoError(t, os.Remove(file))
			require.NoError(t, os.Mkdir(file, 0o700))
		},
		"a link": func(t *testing.T, file string) {
			onlyUnix(t)
			require.NoError(t, os.Rename(file, file+".away"))
			require.NoError(t, os.Symlink(file+".away", file))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, dir := newDirStore(t)
			version := must.Get(d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")})))(t)
			file := filepath.Join(dir, "record.json")
			damage(t, file)
			before, _ := os.ReadFile(file)
			for _, v := range []string{"", version} {
				require.Error(t, must.Err(d.Save(t.Context(), ca.NewRecord(v, map[string][]byte{"key": nil}))))
			}
			err := must.Err(d.Load(t.Context()))
			require.Error(t, err)
			require.NotErrorIs(t, err, ca.ErrNoRecord)
			after, _ := os.ReadFile(file)
			require.Equal(t, before, after)
			if len(before) > 0 && name != "a link" && name != "too large" || name == "empty" {
				require.ErrorIs(t, err, ca.ErrUnfit)
				require.ErrorContains(t, err, "restore the directory from a backup")
				require.ErrorIs(t, must.Err(tryOpen(t.Context(), d, func(c *ca.Config) { c.Create = true })), ca.ErrUnfit)
			}
		})
	}
}

// A Save that waits for the lock stops waiting when its context is done.
func TestDirStoreLock(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("looks at flock")
	}
	d, dir := newDirStore(t)
	must.Get(d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")})))(t)
	unlock := holdLock(t, filepath.Join(dir, "lock"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err := d.Save(ctx, ca.NewRecord("", map[string][]byte{}))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "another process has the lock")
	_, err = d.Load(t.Context())
	require.NoError(t, err, "reading needs no lock")
	unlock()
	_, err = d.Save(t.Context(), ca.NewRecord("", map[string][]byte{}))
	require.ErrorIs(t, err, ca.ErrConflict)
}

// announcing is a store whose Watch hands its function to the test.
type announcing struct {
	ca.Store
	changed chan func()
}

func (s *announcing) Watch(ctx context.Context, changed func()) {
	s.changed <- changed
	<-ctx.Done()
}

// Run reads each change that the store announces at once, and not only every 30 seconds.
func TestRunReadsAnnouncedChanges(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := &announcing{ca.NewMemoryStore(), make(chan func(), 1)}
		a, other := open(t, store), open(t, store.Store)
		stop := run(t, a)
		defer stop()
		changed := <-store.changed
		for n := 2; n <= 5; n++ {
			if n%2 == 0 {
				must.Get(other.Rotate(t.Context()))(t)
			} else { // takes the root that does not sign yet away
				must.Get(other.Revoke(t.Context(), other.Roots()[1].ID, false))(t)
			}
			synctest.Wait()
			require.NotEqual(t, serials(other), serials(a), "not yet announced")
			changed()
			synctest.Wait()
			require.Equal(t, serials(other), serials(a), "change %d", n)
		}
	})
}
