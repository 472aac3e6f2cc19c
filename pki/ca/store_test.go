package ca_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
)

func newDirStore(t testing.TB) (ca.Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "ca")
	d, err := ca.NewDirStore(dir)
	require.NoError(t, err)
	return d, dir
}

// What every store does.
func TestStores(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(t *testing.T) ca.Store{
		"memory": func(*testing.T) ca.Store { return ca.NewMemoryStore() },
		"folder": func(t *testing.T) ca.Store { d, _ := newDirStore(t); return d },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, s := t.Context(), make(t)
			_, err := s.Load(ctx)
			require.ErrorIs(t, err, ca.ErrNoRecord)
			_, err = s.Save(ctx, ca.NewRecord("1", map[string][]byte{"a": nil}))
			require.ErrorIs(t, err, ca.ErrConflict, "there is nothing to replace")

			data := map[string][]byte{"a.pem": []byte("secret"), "b": {}, "C_d-e": {0, 255, '\n'}}
			v1, err := s.Save(ctx, ca.NewRecord("", data))
			require.NoError(t, err)
			require.NotEmpty(t, v1)
			data["a.pem"][0] = 'X'
			r, err := s.Load(ctx)
			require.NoError(t, err)
			assert.Equal(t, v1, r.Version)
			assert.Equal(t, []string{"C_d-e", "a.pem", "b"}, slices.Sorted(maps.Keys(r.Data())))
			assert.Equal(t, "secret", string(r.Data()["a.pem"]), "it is a copy")
			assert.Equal(t, []byte{0, 255, '\n'}, r.Data()["C_d-e"])
			r.Data()["a.pem"][0] = 'Y'

			for _, version := range []string{"", "other", v1 + "0"} {
				_, err = s.Save(ctx, ca.NewRecord(version, data))
				require.ErrorIs(t, err, ca.ErrConflict, version)
			}
			v2, err := s.Save(ctx, ca.NewRecord(v1, map[string][]byte{"only": []byte("2")}))
			require.NoError(t, err)
			assert.NotEqual(t, v1, v2)
			r, err = s.Load(ctx)
			require.NoError(t, err)
			assert.Equal(t, v2, r.Version)
			assert.Equal(t, map[string][]byte{"only": []byte("2")}, r.Data(), "all of it was replaced")
			_, err = s.Save(ctx, ca.NewRecord(v1, data))
			require.ErrorIs(t, err, ca.ErrConflict, "a version does not come back")

			for _, bad := range []map[string][]byte{
				{"": nil}, {".": nil}, {"..": nil}, {"a/b": nil}, {"../x": nil}, {"a b": nil}, {"ä": nil}, {strings.Repeat("x", 254): nil},
				{"big": make1MiB()}, many(65),
			} {
				_, err = s.Save(ctx, ca.NewRecord(v2, bad))
				require.Error(t, err)
				require.NotErrorIs(t, err, ca.ErrConflict)
			}
			cause := errors.New("enough")
			done, cancel := context.WithCancelCause(ctx)
			cancel(cause)
			_, err = s.Load(done)
			require.ErrorIs(t, err, cause)
			_, err = s.Save(done, ca.NewRecord(v2, data))
			require.ErrorIs(t, err, cause)
			r, err = s.Load(ctx)
			require.NoError(t, err)
			assert.Equal(t, v2, r.Version, "nothing of that was written")
		})
	}
}

func make1MiB() []byte { return make([]byte, 1<<20+1) }

func many(n int) map[string][]byte {
	m := map[string][]byte{}
	for i := range n {
		m[strconv.Itoa(i)] = nil
	}
	return m
}

func TestRecordsDoNotPrint(t *testing.T) {
	t.Parallel()
	r := ca.NewRecord("7", map[string][]byte{"key": []byte("hunter2")})
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%d", "%x", "%q"} {
		for _, v := range []any{r, &r, struct{ R ca.Record }{r}} {
			s := fmt.Sprintf(verb, v)
			for _, leak := range []string{"hunter2", "104 117", "68756e74"} {
				assert.NotContains(t, s, leak, verb)
			}
		}
	}
	b, err := json.Marshal(r)
	require.NoError(t, err)
	assert.JSONEq(t, `{"Version":"7"}`, string(b))
	assert.Equal(t, `ca.Record("7", 1 items)`, r.String())
}

// Many writers add one to a number, and no addition is lost.
func TestNoLostUpdate(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ca")
	shared := ca.NewMemoryStore()
	for name, open := range map[string]func() ca.Store{
		"memory": func() ca.Store { return shared },
		"folder": func() ca.Store { d, err := ca.NewDirStore(dir); assert.NoError(t, err); return d },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const writers, each = 4, 15
			var wg sync.WaitGroup
			for range writers {
				s := open()
				wg.Go(func() {
					for done := 0; done < each; {
						r, err := s.Load(t.Context())
						n := 0
						if !errors.Is(err, ca.ErrNoRecord) {
							if !assert.NoError(t, err) {
								return
							}
							n, _ = strconv.Atoi(string(r.Data()["n"]))
						}
						_, err = s.Save(t.Context(), ca.NewRecord(r.Version, map[string][]byte{"n": []byte(strconv.Itoa(n + 1))}))
						if err == nil {
							done++
						} else if !assert.ErrorIs(t, err, ca.ErrConflict) {
							return
						}
					}
				})
			}
			wg.Wait()
			r, err := open().Load(t.Context())
			require.NoError(t, err)
			assert.Equal(t, strconv.Itoa(writers*each), string(r.Data()["n"]))
		})
	}
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
	v, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("x")}))
	require.NoError(t, err)
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
	assert.Equal(t, []string{"", "/CURRENT", "/lock", "/" + v, "/" + v + "/key"}, names)

	for _, tt := range []struct {
		path string
		mode os.FileMode
		back os.FileMode
	}{
		{dir, 0o750, 0o700}, {dir, 0o701, 0o700}, {dir, 0o777, 0o700},
		{filepath.Join(dir, "CURRENT"), 0o644, 0o600}, {filepath.Join(dir, v, "key"), 0o640, 0o600}, {filepath.Join(dir, v, "key"), 0o602, 0o600},
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
	_, err = d.Load(t.Context())
	require.NoError(t, err)
}

func TestNewDirStoreRefuses(t *testing.T) {
	t.Parallel()
	_, err := ca.NewDirStore("")
	assert.ErrorContains(t, err, "name of a folder")
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = ca.NewDirStore(file)
	assert.ErrorContains(t, err, "folder of the store")
	d, err := ca.NewDirStore(filepath.Join(file, "below"))
	if err == nil { // a file is in the way
		_, err = d.Save(t.Context(), ca.NewRecord("", map[string][]byte{}))
	}
	assert.Error(t, err)
}

// What a crash has left unfinished, and what a save has replaced, goes with the next save. Nothing else does.
func TestDirStoreLeftovers(t *testing.T) {
	t.Parallel()
	d, dir := newDirStore(t)
	put := func(names ...string) {
		path := filepath.Join(append([]string{dir}, names...)...)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(names[0]), 0o600))
	}
	begin := func(version string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "tmp-CURRENT"), []byte(version+"\n"), 0o600))
	}
	put("v-0123", "key") // of a first save that did not come to its end
	begin("v-0123")
	_, err := d.Load(t.Context())
	require.ErrorIs(t, err, ca.ErrNoRecord)
	v1, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
	require.NoError(t, err)
	assert.NoDirExists(t, filepath.Join(dir, "v-0123"))

	put("v-4567", "key")
	begin("v-4567")
	put("v-89ab", "key") // of a backup, perhaps
	put("notes.txt")
	r, err := d.Load(t.Context())
	require.NoError(t, err)
	assert.Equal(t, v1, r.Version)
	v2, err := d.Save(t.Context(), ca.NewRecord(v1, map[string][]byte{"key": []byte("2")}))
	require.NoError(t, err)
	for _, gone := range []string{"v-4567", "tmp-CURRENT", v1} {
		_, err := os.Lstat(filepath.Join(dir, gone))
		assert.ErrorIs(t, err, os.ErrNotExist, gone)
	}
	assert.FileExists(t, filepath.Join(dir, "notes.txt"), "not ours")
	assert.FileExists(t, filepath.Join(dir, "v-89ab", "key"), "no save has replaced it")

	// A crash came before the old version was removed.
	put(v1, "key")
	put("tmp-CURRENT") // garbage
	_, err = d.Save(t.Context(), ca.NewRecord(v2, map[string][]byte{"key": []byte("3")}))
	require.NoError(t, err)
	assert.NoDirExists(t, filepath.Join(dir, v1))
	assert.NoDirExists(t, filepath.Join(dir, v2))
	assert.NoFileExists(t, filepath.Join(dir, "tmp-CURRENT"))
}

// A folder whose pointer is lost is not an empty one: nothing is made, nothing is removed, and Open ends at once.
func TestDirStoreLostPointer(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(current string) error{
		"missing": os.Remove,
		"empty":   func(current string) error { return os.WriteFile(current, nil, 0o600) },
		"blank":   func(current string) error { return os.WriteFile(current, []byte("\n"), 0o600) },
		"zeros":   func(current string) error { return os.WriteFile(current, make([]byte, 88), 0o600) }, // as file systems leave it
		"garbage": func(current string) error { return os.WriteFile(current, []byte("../v-1\n"), 0o600) },
		"wrong":   func(current string) error { return os.WriteFile(current, []byte("v-0123\n"), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, dir := newDirStore(t)
			create := func(c *ca.Config) { c.Create = true }
			a := open(t, d, create)
			root := a.Roots()[0].ID
			before, err := d.Load(t.Context())
			require.NoError(t, err)
			require.NoError(t, lose(filepath.Join(dir, "CURRENT")))

			_, err = d.Load(t.Context())
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.NotErrorIs(t, err, ca.ErrNoRecord)
			require.ErrorContains(t, err, "recover the newest version that is complete")
			for _, version := range []string{"", before.Version, "v-0123"} {
				_, err = d.Save(t.Context(), ca.NewRecord(version, map[string][]byte{"key": nil}))
				require.Error(t, err, version)
				require.NotContains(t, err.Error(), "ca: load", "said twice")
			}
			_, err = tryOpen(t.Context(), d, create)
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.FileExists(t, filepath.Join(dir, before.Version, "ca-key.pem"))

			r, err := ca.RecoverDirStore(t.Context(), dir, false)
			require.NoError(t, err)
			assert.Equal(t, before.Version, r.Version)
			assert.Equal(t, root, r.Root)
			assert.Contains(t, r.String(), root)
			assert.Empty(t, r.Left)
			_, err = d.Load(t.Context())
			require.ErrorIs(t, err, ca.ErrUnfit, "it was only a look")
			again, err := ca.RecoverDirStore(t.Context(), dir, true)
			require.NoError(t, err)
			assert.Equal(t, r, again)
			after, err := d.Load(t.Context())
			require.NoError(t, err)
			assert.Equal(t, before.Data(), after.Data())
			assert.Equal(t, root, open(t, d).Roots()[0].ID)
			_, err = ca.RecoverDirStore(t.Context(), dir, true)
			require.ErrorContains(t, err, "nothing to recover")
		})
	}
}

func TestRecoverDirStore(t *testing.T) {
	t.Parallel()
	state := func(authority string, revision int) map[string][]byte {
		return map[string][]byte{"svidkit-state.json": fmt.Appendf(nil, `{"authority":%q,"revision":%d}`, authority, revision)}
	}
	// saved returns a folder, and the name of a version in it for each of the data.
	saved := func(t *testing.T, all ...map[string][]byte) (dir string, names []string) {
		_, dir = newDirStore(t)
		for i, data := range all {
			other, err := ca.NewDirStore(filepath.Join(t.TempDir(), "ca"))
			require.NoError(t, err)
			name, err := other.Save(t.Context(), ca.NewRecord("", data))
			require.NoError(t, err)
			require.NoError(t, os.MkdirAll(dir, 0o700))
			from := strings.TrimSuffix(strings.TrimPrefix(fmt.Sprint(other), "ca.DirStore("), ")")
			require.NoError(t, os.Rename(filepath.Join(from, name), filepath.Join(dir, name)))
			at := time.Unix(int64(1000+i), 0)
			require.NoError(t, os.Chtimes(filepath.Join(dir, name), at, at))
			names = append(names, name)
		}
		return dir, names
	}
	recovers := func(t *testing.T, dir, want string) ca.Recovery {
		r, err := ca.RecoverDirStore(t.Context(), dir, true)
		require.NoError(t, err)
		require.Equal(t, want, r.Version)
		d, err := ca.NewDirStore(dir)
		require.NoError(t, err)
		got, err := d.Load(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, got.Version)
		return r
	}
	t.Run("the highest revision", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("a", 12), state("a", 4))
		r := recovers(t, dir, names[1])
		assert.Contains(t, r.String(), "revision 12")
		require.Len(t, r.Left, 2)
		for _, name := range names {
			assert.DirExists(t, filepath.Join(dir, name), "nothing is removed")
		}
	})
	t.Run("damaged ones are left", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("a", 12), state("a", 13))
		require.NoError(t, os.WriteFile(filepath.Join(dir, names[1], "svidkit-state.json"), []byte(`{"authority":"a","revision":14}`), 0o600))
		require.NoError(t, os.Remove(filepath.Join(dir, names[2], "svidkit-state.json")))
		r := recovers(t, dir, names[0])
		require.Len(t, r.Left, 2)
		assert.Contains(t, strings.Join(r.Left, "\n"), "damaged")
	})
	t.Run("one that was being written is the last choice", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("a", 4))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "tmp-CURRENT"), []byte(names[1]+"\n"), 0o600))
		recovers(t, dir, names[0])
	})
	t.Run("the present one is damaged", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("a", 4))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "CURRENT"), []byte(names[1]+"\n"), 0o600))
		require.NoError(t, os.Remove(filepath.Join(dir, names[1], "svidkit-state.json")))
		recovers(t, dir, names[0])
	})
	t.Run("of two CAs", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("b", 4))
		_, err := ca.RecoverDirStore(t.Context(), dir, true)
		require.ErrorIs(t, err, ca.ErrUnfit)
		require.ErrorContains(t, err, "different CAs")
		require.NoError(t, os.Rename(filepath.Join(dir, names[1]), filepath.Join(filepath.Dir(dir), "away")))
		recovers(t, dir, names[0])
	})
	t.Run("of an older release", func(t *testing.T) {
		t.Parallel()
		dir, names := saved(t, state("a", 3), state("a", 4), map[string][]byte{"x": nil})
		for i, name := range names {
			require.NoError(t, os.Rename(filepath.Join(dir, name), filepath.Join(dir, fmt.Sprintf("v-%032x", i))))
		}
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("v-%032x", 1), "svidkit-state.json"), []byte(`{"auth`), 0o600))
		r := recovers(t, dir, fmt.Sprintf("v-%032x", 0))
		require.Len(t, r.Left, 2)
	})
	t.Run("nothing to take", func(t *testing.T) {
		t.Parallel()
		for _, all := range [][]map[string][]byte{nil, {{"x": nil}}} {
			dir, names := saved(t, all...)
			require.NoError(t, os.MkdirAll(dir, 0o700))
			for _, name := range names {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name, "y"), nil, 0o600))
			}
			_, err := ca.RecoverDirStore(t.Context(), dir, true)
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.NoFileExists(t, filepath.Join(dir, "CURRENT"))
		}
		_, err := ca.RecoverDirStore(t.Context(), filepath.Join(t.TempDir(), "none"), true)
		require.ErrorIs(t, err, os.ErrNotExist)
		_, err = ca.RecoverDirStore(t.Context(), "", true)
		require.Error(t, err)
	})
}

// What belongs to another user is refused, by descriptor, and Open does not try again.
func TestDirStoreOwners(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	if os.Geteuid() != 0 {
		t.Skip("gives files to another user, which takes root")
	}
	for _, of := range []string{"", "above", "CURRENT", "lock", "version", "key"} {
		t.Run(of, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "above", "ca")
			d, err := ca.NewDirStore(dir)
			require.NoError(t, err)
			version, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
			require.NoError(t, err)
			path := filepath.Join(dir, of)
			switch of {
			case "above":
				path = filepath.Dir(dir)
			case "version":
				path = filepath.Join(dir, version)
			case "key":
				path = filepath.Join(dir, version, "key")
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
			if of != "version" && of != "key" { // a save does not read them
				require.ErrorIs(t, serr, ca.ErrUnfit)
				require.ErrorContains(t, serr, fmt.Sprintf("run: chown 0 %q", path))
			}
		})
	}
}

// A folder that is damaged is an error, and never taken for an empty one.
func TestDirStoreDamaged(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(t *testing.T, dir, version string){
		"the version is gone": func(t *testing.T, dir, version string) {
			require.NoError(t, os.RemoveAll(filepath.Join(dir, version)))
		},
		"CURRENT is empty": func(t *testing.T, dir, _ string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "CURRENT"), nil, 0o600))
		},
		"CURRENT leads away": func(t *testing.T, dir, _ string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "CURRENT"), []byte("../v-1\n"), 0o600))
		},
		"CURRENT names something else": func(t *testing.T, dir, _ string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "CURRENT"), []byte("lock\n"), 0o600))
		},
		"CURRENT is a folder": func(t *testing.T, dir, _ string) {
			require.NoError(t, os.Remove(filepath.Join(dir, "CURRENT")))
			require.NoError(t, os.Mkdir(filepath.Join(dir, "CURRENT"), 0o700))
		},
		"a file is a folder": func(t *testing.T, dir, version string) {
			require.NoError(t, os.Mkdir(filepath.Join(dir, version, "sub"), 0o700))
		},
		"a file is too large": func(t *testing.T, dir, version string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, version, "key"), make1MiB(), 0o600))
		},
		"a file has a strange name": func(t *testing.T, dir, version string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, version, "a b"), nil, 0o600))
		},
		"a file leads away": func(t *testing.T, dir, version string) {
			onlyUnix(t)
			outside := filepath.Join(filepath.Dir(dir), "outside")
			require.NoError(t, os.WriteFile(outside, []byte("x"), 0o600))
			require.NoError(t, os.Symlink(outside, filepath.Join(dir, version, "link")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, dir := newDirStore(t)
			version, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
			require.NoError(t, err)
			damage(t, dir, version)
			_, err = d.Load(t.Context())
			require.Error(t, err)
			assert.NotErrorIs(t, err, ca.ErrNoRecord)
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
	_, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
	require.NoError(t, err)
	unlock := holdLock(t, filepath.Join(dir, "lock"))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = d.Save(ctx, ca.NewRecord("", map[string][]byte{}))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.ErrorContains(t, err, "another process has the lock")
	_, err = d.Load(t.Context())
	require.NoError(t, err, "reading needs no lock")
	unlock()
	_, err = d.Save(t.Context(), ca.NewRecord("", map[string][]byte{}))
	require.ErrorIs(t, err, ca.ErrConflict)
}
