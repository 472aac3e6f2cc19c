package files_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/follow"
	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func openFile(path string) (*os.File, error) {
	return private.OpenFile(path, os.O_RDONLY, private.Options{})
}

const patience = time.Minute // for a slow machine

// pair is what the tests follow: two files that belong together if they hold the same word.
type pair struct {
	dir      string
	follower *follow.Follower
	now      atomic.Pointer[string] // what was taken last
	taken    atomic.Int32
}

var errMismatch = errors.New("the files do not belong together")

func (p *pair) take(_ context.Context, files follow.Files) error {
	a, okA := files[p.path("a")]
	b, okB := files[p.path("b")]
	switch {
	case !okA || !okB:
		return fs.ErrNotExist
	case !bytes.Equal(a.Data, b.Data):
		return errMismatch
	}
	p.taken.Add(1)
	p.now.Store(new(string(a.Data)))
	return nil
}

func (p *pair) path(name string) string { return filepath.Join(p.dir, name) }

// newPair returns a pair in a new directory of the host, after write has put something there.
func newPair(t testing.TB, poll time.Duration, write func(dir string)) *pair {
	t.Helper()
	p := &pair{dir: t.TempDir()}
	write(p.dir)
	p.follower = follow.New([]string{p.path("a"), p.path("b")}, p.take, &follow.Options{Open: openFile, Poll: poll})
	require.NoError(t, p.follower.Read(t.Context()))
	return p
}

// run follows until the test is over.
func run(t testing.TB, f *follow.Follower) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
}

func (p *pair) await(t testing.TB, word string) {
	t.Helper()
	require.Eventually(t, func() bool { return *p.now.Load() == word }, patience, time.Millisecond, "waiting for %q", word)
	require.Eventually(t, func() bool { _, err := p.follower.Status(); return err == nil }, patience, time.Millisecond)
}

func (p *pair) awaitRefusal(t testing.TB, want error, word string) {
	t.Helper()
	require.Eventually(t, func() bool { _, err := p.follower.Status(); return errors.Is(err, want) }, patience, time.Millisecond, "waiting for %v", want)
	require.Equal(t, word, *p.now.Load(), "the last good ones stay")
}

func write(t testing.TB, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
}

func both(t testing.TB, word string) func(dir string) {
	return func(dir string) {
		write(t, filepath.Join(dir, "a"), word)
		write(t, filepath.Join(dir, "b"), word)
	}
}

// version makes a directory as the kubelet does, and swaps the link "..data" to it.
func version(t testing.TB, dir, name, word string) {
	t.Helper()
	require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
	both(t, word)(filepath.Join(dir, name))
	require.NoError(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
	require.NoError(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
}

func onlyUnix(t testing.TB) {
	if runtime.GOOS == "windows" {
		t.Skip("symbolic links and renames of open files need rights on Windows")
	}
}

// Each way to replace files is noticed by a notification alone (an hour is never polled in a test), and by
// polling alone.
func TestFollowChanges(t *testing.T) {
	t.Parallel()
	onlyUnix(t)
	for name, change := range map[string]struct {
		before func(t testing.TB, dir string) // nil means files in the directory itself
		change func(t testing.TB, dir string)
	}{
		"written in place": {change: func(t testing.TB, dir string) { both(t, "new")(dir) }},
		"renamed": {change: func(t testing.TB, dir string) {
			for _, name := range []string{"a", "b"} {
				write(t, filepath.Join(dir, name+".tmp"), "new")
				require.NoError(t, os.Rename(filepath.Join(dir, name+".tmp"), filepath.Join(dir, name)))
			}
		}},
		"deleted and written again": {change: func(t testing.TB, dir string) {
			require.NoError(t, os.Remove(filepath.Join(dir, "a")))
			require.NoError(t, os.Remove(filepath.Join(dir, "b")))
			both(t, "new")(dir)
		}},
		"..data swapped": {
			before: func(t testing.TB, dir string) {
				version(t, dir, "..1", "old")
				for _, name := range []string{"a", "b"} {
					require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
				}
			},
			change: func(t testing.TB, dir string) { version(t, dir, "..2", "new") },
		},
		"written in place behind links": {
			before: func(t testing.TB, dir string) {
				version(t, dir, "..1", "old")
				for _, name := range []string{"a", "b"} {
					require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
				}
			},
			change: func(t testing.TB, dir string) { both(t, "new")(filepath.Join(dir, "..1")) },
		},
		"same size and time": {change: func(t testing.TB, dir string) {
			info := must.Get(os.Stat(filepath.Join(dir, "a")))(t)
			both(t, "dlo")(dir)
			for _, name := range []string{"a", "b"} {
				require.NoError(t, os.Chtimes(filepath.Join(dir, name), info.ModTime(), info.ModTime()))
			}
		}},
	} {
		for how, poll := range map[string]time.Duration{"notified": time.Hour, "polled": 10 * time.Millisecond} {
			t.Run(name+"/"+how, func(t *testing.T) {
				t.Parallel()
				before := change.before
				if before == nil {
					before = func(t testing.TB, dir string) { both(t, "old")(dir) }
				}
				p := newPair(t, poll, func(dir string) { before(t, dir) })
				run(t, p.follower)
				require.Eventually(t, func() bool { at, _ := p.follower.Status(); return !at.IsZero() }, patience, time.Millisecond)
				time.Sleep(50 * time.Millisecond) // for the watches to be in place
				change.change(t, p.dir)
				word := "new"
				if name == "same size and time" {
					word = "dlo"
				}
				p.await(t, word)
				assert.EqualValues(t, 2, p.taken.Load())
			})
		}
	}
}

func TestFollowKeepsTheLastGoodFiles(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	p := newPair(t, time.Hour, both(t, "one"))
	dir := p.dir
	run(t, p.follower)
	time.Sleep(50 * time.Millisecond)

	write(t, p.path("b"), "two") // only the second half
	p.awaitRefusal(t, errMismatch, "one")
	write(t, p.path("a"), "two")
	p.await(t, "two")

	require.NoError(t, os.Remove(p.path("a")))
	p.awaitRefusal(t, fs.ErrNotExist, "two")
	write(t, p.path("a"), "two")
	p.await(t, "two")
	assert.EqualValues(t, 2, p.taken.Load(), "what has come back is not new")

	// A file that cannot be read is refused before take sees it.
	write(t, p.path("b"), string(bytes.Repeat([]byte("x"), 1<<20+1)))
	require.Eventually(t, func() bool {
		_, err := p.follower.Status()
		return err != nil && assert.ObjectsAreEqual(fmt.Sprintf("%s has more than 1048576 bytes", p.path("b")), err.Error())
	}, patience, time.Millisecond)
	require.NoError(t, os.Remove(p.path("b")))
	require.NoError(t, os.Mkdir(p.path("b"), 0o700))
	require.Eventually(t, func() bool {
		_, err := p.follower.Status()
		return err != nil && err.Error() == p.path("b")+" is not a regular file"
	}, patience, time.Millisecond)
	require.NoError(t, os.Remove(p.path("b")))
	both(t, "three")(dir)
	p.await(t, "three")
}

// A watch survives that the directory is replaced.
func TestFollowFolderReplaced(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	p := newPair(t, 300*time.Millisecond, both(t, "one"))
	dir := p.dir
	run(t, p.follower)
	for n := range 5 {
		word := fmt.Sprint("word", n)
		require.NoError(t, os.Rename(dir, fmt.Sprint(dir, n)))
		require.NoError(t, os.Mkdir(dir, 0o700))
		both(t, word)(dir)
		p.await(t, word)
	}
}

// Readers never see two halves, however often the files are replaced.
func TestFollowNoTornPairs(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	p := newPair(t, time.Hour, both(t, "0"))
	run(t, p.follower)
	dir := p.dir
	versions := rounds.Of(5)
	for n := range versions {
		word := fmt.Sprint(n)
		write(t, filepath.Join(dir, "a"), word)
		time.Sleep(time.Duration(n%5) * 30 * time.Millisecond)
		write(t, filepath.Join(dir, "b"), word)
		time.Sleep(20 * time.Millisecond)
	}
	p.await(t, fmt.Sprint(versions-1))
}

// memory is a file system whose files are replaced at once.
type memory struct{ now atomic.Pointer[fstest.MapFS] }

func (m *memory) Open(name string) (fs.File, error) { return m.now.Load().Open(name) }

func (m *memory) put(files map[string]string) {
	next := fstest.MapFS{}
	if was := m.now.Load(); was != nil {
		next = maps.Clone(*was)
	}
	for name, text := range files {
		next[name] = &fstest.MapFile{Data: []byte(text), Mode: 0o600, ModTime: time.Now()}
	}
	m.now.Store(&next)
}

func TestFollowOtherFileSystem(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := new(memory)
		m.put(map[string]string{"a": "one", "other": "x"})
		var got []string
		var refuse atomic.Pointer[error]
		refuse.Store(new(error(nil)))
		var log bytes.Buffer
		f := follow.New([]string{"a", "b"}, func(_ context.Context, files follow.Files) error {
			got = append(got, fmt.Sprintf("%s %d", must.Get(fs.ReadFile(files, "a"))(t), len(files)))
			return *refuse.Load()
		}, &follow.Options{FS: m, Poll: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, f.Read(t.Context()))
		run(t, f)
		wait := func(d time.Duration) { time.Sleep(d); synctest.Wait() }
		wait(10 * time.Second)
		assert.Equal(t, []string{"one 1"}, got)
		assert.WithinDuration(t, time.Now(), must.Get(f.Status())(t), time.Second)

		m.put(map[string]string{"a": "one", "other": "y"}) // touched, and another file
		wait(2 * time.Second)
		assert.Len(t, got, 1)
		m.put(map[string]string{"b": ""}) // an empty file is not a missing one
		wait(2 * time.Second)
		assert.Equal(t, []string{"one 1", "one 2"}, got)

		// What was refused is tried again after a minute, and logged once.
		notYet := errors.New("not yet valid")
		refuse.Store(&notYet)
		m.put(map[string]string{"a": "two"})
		wait(2 * time.Second)
		_, err := f.Status()
		require.Equal(t, notYet, err)
		assert.Len(t, got, 3)
		wait(50 * time.Second)
		assert.Len(t, got, 3)
		wait(12 * time.Second)
		assert.Len(t, got, 4)
		assert.Equal(t, 1, bytes.Count(log.Bytes(), []byte("not yet valid")))
		refuse.Store(new(error(nil)))
		wait(61 * time.Second)
		assert.Len(t, got, 5)
		must.Get(f.Status())(t)

		// A writer that never rests does not keep the files from being read.
		n := len(got)
		for range 100 {
			m.put(map[string]string{"a": time.Now().String()})
			time.Sleep(90 * time.Millisecond)
		}
		synctest.Wait()
		assert.InDelta(t, n+1, len(got), 1)
		assert.Greater(t, len(got), n)
	})
}

// Files that are written one after the other are read when that has come to its end.
func TestFollowWaitsForTheLastFile(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.10-9")
	synctest.Test(t, func(t *testing.T) {
		m := new(memory)
		m.put(map[string]string{"a": "old", "b": "old", "c": "old"})
		var taken []string
		f := follow.New([]string{"a", "b", "c"}, func(_ context.Context, files follow.Files) error {
			taken = append(taken, string(files["a"].Data)+string(files["b"].Data)+string(files["c"].Data))
			return nil
		}, &follow.Options{FS: m, Poll: 10 * time.Millisecond})
		require.NoError(t, f.Read(t.Context()))
		run(t, f)
		time.Sleep(time.Second)
		for _, name := range []string{"a", "b", "c"} {
			m.put(map[string]string{name: "new"})
			time.Sleep(90 * time.Millisecond)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []string{"oldoldold", "newnewnew"}, taken)
	})
}

// changing is a file system whose file is another one at each reading.
type changing struct{ n int }

func (c *changing) Open(name string) (fs.File, error) {
	c.n++
	return fstest.MapFS{name: {Data: fmt.Append(nil, c.n), Mode: 0o600}}.Open(name)
}

func TestFollowRead(t *testing.T) {
	t.Parallel()
	cause := errors.New("enough")
	done, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	never := func(context.Context, follow.Files) error { t.Error("taken"); return nil }
	require.ErrorIs(t, follow.New([]string{filepath.Join(t.TempDir(), "a")}, never, &follow.Options{Open: openFile}).Read(done), cause)
	require.ErrorContains(t, follow.New([]string{t.TempDir()}, never, &follow.Options{Open: openFile}).Read(t.Context()), "is not a regular file")

	synctest.Test(t, func(t *testing.T) {
		// Two readings have to agree.
		m, reads := new(memory), 0
		m.put(map[string]string{"a": "half"})
		var taken string
		f := follow.New([]string{"a"}, func(_ context.Context, files follow.Files) error {
			taken = string(files["a"].Data)
			return nil
		}, &follow.Options{FS: opens(func(name string) (fs.File, error) {
			if reads++; reads == 2 {
				m.put(map[string]string{"a": "whole"})
			}
			return m.Open(name)
		})})
		require.NoError(t, f.Read(t.Context()))
		assert.Equal(t, "whole", taken)

		// Files that change all the time are read as they are, and no stop is forgotten.
		start := time.Now()
		f = follow.New([]string{"a"}, func(context.Context, follow.Files) error { return nil }, &follow.Options{FS: &changing{}})
		require.NoError(t, f.Read(t.Context()))
		assert.Equal(t, 2*time.Second, time.Since(start))
		ctx, cancel := context.WithTimeoutCause(t.Context(), 300*time.Millisecond, cause)
		defer cancel()
		require.ErrorIs(t, f.Read(ctx), cause)
	})
}

type opens func(string) (fs.File, error)

func (o opens) Open(name string) (fs.File, error) { return o(name) }

// With Each, a file that cannot be read is given to take with the reason, and the others are not held up. What take has
// accepted before is given to it again when it comes back after an error, as it may have taken a part of what came between.
func TestFollowEach(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := new(memory)
		m.put(map[string]string{"a": "one", "b": "good"})
		var got []string
		take := func(_ context.Context, files follow.Files) error {
			got = append(got, string(files["a"].Data))
			if err := files["b"].Err; err != nil {
				_, fsErr := fs.ReadFile(files, "b")
				assert.Equal(t, err, fsErr)
				return err
			}
			return nil
		}
		f := follow.New([]string{"a", "b"}, take, &follow.Options{FS: m, Poll: time.Second, Each: true, MaxSize: 5})
		require.NoError(t, f.Read(t.Context()))
		run(t, f)
		wait := func() { time.Sleep(2 * time.Second); synctest.Wait() }
		m.put(map[string]string{"a": "two", "b": "too long"})
		wait()
		require.EqualError(t, must.Err(f.Status()), "b has more than 5 bytes")
		m.put(map[string]string{"a": "three", "b": "too long"})
		wait()
		m.put(map[string]string{"a": "one", "b": "good"})
		wait()
		assert.Equal(t, []string{"one", "two", "three", "one"}, got)
		must.Get(f.Status())(t)
		time.Sleep(time.Hour)
		assert.Len(t, got, 4)
	})
}

// Of files that are too large together the largest are left out, and the others are read.
func TestFollowTotal(t *testing.T) {
	t.Parallel()
	m := new(memory)
	var got string
	take := func(_ context.Context, files follow.Files) error {
		got = ""
		for _, path := range slices.Sorted(maps.Keys(files)) {
			if err := files[path].Err; err != nil {
				assert.ErrorContains(t, err, path+" has ")
				assert.Nil(t, files[path].Data)
				continue
			}
			got += path
		}
		return nil
	}
	f := follow.New([]string{"a", "b", "c", "d", "a"}, take, &follow.Options{FS: m, Each: true, MaxTotal: 10})
	for _, c := range []struct{ a, b, c, d, want string }{
		{"1", "22", "333", "4444", "abcd"},
		{"1", "22", "333", "44444", "abc"},
		{"55555", "22", "333", "1", "bcd"},
		{"4444", "4444", "4444", "1", "bcd"}, // the first of them
		{"666666", "666666", "1", "666666", "cd"},
		{strings.Repeat("x", 100), strings.Repeat("y", 100), "1", "2", "cd"},
		{"1", "22", "333", "4444", "abcd"},
	} {
		m.put(map[string]string{"a": c.a, "b": c.b, "c": c.c, "d": c.d})
		require.NoError(t, f.Read(t.Context()))
		assert.Equal(t, c.want, got)
	}
}

// Set replaces the paths: take gets the files at the new ones, which are no news, soon, and also those that it has had if
// it is called with the same paths. With Each, a file that does not exist is given with the reason.
func TestFollowSet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := new(memory)
		m.put(map[string]string{"a": "same", "b": "same"})
		var got []string
		take := func(_ context.Context, files follow.Files) error {
			var line strings.Builder
			for _, path := range slices.Sorted(maps.Keys(files)) {
				line.WriteString(path + ":" + string(files[path].Data) + " ")
				if err := files[path].Err; err != nil {
					assert.ErrorIs(t, err, fs.ErrNotExist)
					line.WriteString("missing ")
				}
			}
			got = append(got, line.String())
			return nil
		}
		f := follow.New(nil, take, &follow.Options{FS: m, Poll: time.Hour, Each: true})
		f.Set([]string{"a"}) // before Run
		run(t, f)
		wait := func() { time.Sleep(time.Second); synctest.Wait() }
		wait()
		paths := []string{"b"}
		f.Set(paths)
		paths[0] = "x" // it was copied
		wait()
		f.Set([]string{"b"})
		f.Set([]string{"b"})
		wait()
		f.Set([]string{"b", "c"})
		wait()
		f.Set(nil)
		wait()
		wait()
		assert.Equal(t, []string{"a:same ", "b:same ", "b:same ", "b:same c: missing ", ""}, got)
	})
}
