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
	_, err := json.Marshal(r)
	assert.ErrorContains(t, err, "private keys")
}

// Many writers add one to a number, and no addition is lost.
func TestNoLostUpdate(t *testing.T) {
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
		assert.ErrorContains(t, err, fmt.Sprintf("has mode %04o, so that others may get at the keys of the CA; run: chmod %04o %q", tt.mode, tt.back, tt.path))
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

// What a crash can leave lying about does not matter, and goes with the next save.
func TestDirStoreLeftovers(t *testing.T) {
	t.Parallel()
	d, dir := newDirStore(t)
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "v-0123"), 0o700)) // of a first save that did not come to its end
	require.NoError(t, os.Chmod(dir, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "v-0123", "key"), []byte("torn"), 0o600))
	_, err := d.Load(t.Context())
	require.ErrorIs(t, err, ca.ErrNoRecord)
	v, err := d.Save(t.Context(), ca.NewRecord("", map[string][]byte{"key": []byte("1")}))
	require.NoError(t, err)
	assert.NoDirExists(t, filepath.Join(dir, "v-0123"))

	require.NoError(t, os.Mkdir(filepath.Join(dir, "v-4567"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "v-4567", "key"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tmp-CURRENT"), []byte("v-45"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "notes.txt"), []byte("of the operator"), 0o600))
	r, err := d.Load(t.Context())
	require.NoError(t, err)
	assert.Equal(t, v, r.Version)
	_, err = d.Save(t.Context(), ca.NewRecord(v, map[string][]byte{"key": []byte("2")}))
	require.NoError(t, err)
	for _, gone := range []string{"v-4567", "tmp-CURRENT", v} {
		_, err := os.Lstat(filepath.Join(dir, gone))
		assert.ErrorIs(t, err, os.ErrNotExist, gone)
	}
	assert.FileExists(t, filepath.Join(dir, "notes.txt"), "not ours")
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
