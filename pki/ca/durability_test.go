package ca_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
)

// A write is one change of a folder, as a store made it.
type write struct {
	op       string // "mkdir", "create", "write", "sync", "syncdir", "rename", "remove", or "saved" when a save has returned
	name, to string
	data     []byte
	save     int
}

// journal is a disk that remembers what was done to it, and fails when it is told to.
type journal struct {
	ca.OSDisk
	writes []write
	fail   func(w write) bool // nil: never
}

func (j *journal) note(w write) error {
	if j.fail != nil && j.fail(w) {
		return errFault
	}
	j.writes = append(j.writes, w)
	return nil
}

func (j *journal) Mkdir(root *os.Root, name string) error {
	return errors.Join(j.note(write{op: "mkdir", name: name}), j.OSDisk.Mkdir(root, name))
}

func (j *journal) Create(root *os.Root, name string) (ca.DiskFile, error) {
	if err := j.note(write{op: "create", name: name}); err != nil {
		return nil, err
	}
	f, err := j.OSDisk.Create(root, name)
	return &journalFile{f, j, name}, err
}

func (j *journal) SyncDir(_ *os.Root, name string) error {
	return j.note(write{op: "syncdir", name: name})
}

func (j *journal) Rename(root *os.Root, from, to string) error {
	if err := j.note(write{op: "rename", name: from, to: to}); err != nil {
		return err
	}
	return j.OSDisk.Rename(root, from, to)
}

func (j *journal) RemoveAll(root *os.Root, name string) error {
	if err := j.note(write{op: "remove", name: name}); err != nil {
		return err
	}
	return j.OSDisk.RemoveAll(root, name)
}

type journalFile struct {
	ca.DiskFile
	j    *journal
	name string
}

func (f *journalFile) Write(b []byte) (int, error) {
	if err := f.j.note(write{op: "write", name: f.name, data: bytes.Clone(b)}); err != nil {
		return 0, err
	}
	return f.DiskFile.Write(b)
}

func (f *journalFile) Sync() error { return f.j.note(write{op: "sync", name: f.name}) }

// inode is a file or a folder of a machine.
type inode struct {
	dir           bool
	data, durable []byte
}

// machine is a folder in memory that knows what of it would survive a crash.
type machine struct {
	now     map[string]*inode // by path
	durable map[string]*inode
	pending []change // of names, since their folder was made durable
}

// change is a change of names that is there after a crash as a whole, or not at all.
type change map[string]*inode // nil for a name that is gone

func (m *machine) apply(w write) {
	name := filepath.ToSlash(w.name)
	rename := func(c change) {
		for path, n := range c {
			if n == nil {
				delete(m.now, path)
			} else {
				m.now[path] = n
			}
		}
		m.pending = append(m.pending, c)
	}
	switch w.op {
	case "mkdir":
		rename(change{name: {dir: true}})
	case "create":
		rename(change{name: {}})
	case "write":
		m.now[name].data = append(m.now[name].data, w.data...)
	case "sync":
		m.now[name].durable = m.now[name].data
	case "rename":
		to := filepath.ToSlash(w.to)
		rename(change{name: nil, to: m.now[name]})
	case "remove":
		for _, path := range slices.Sorted(maps.Keys(m.now)) {
			if path == name || strings.HasPrefix(path, name+"/") {
				rename(change{path: nil})
			}
		}
	case "syncdir":
		m.pending = slices.DeleteFunc(m.pending, func(c change) bool {
			in := false
			for path, n := range c {
				if filepath.ToSlash(filepath.Dir(path)) == name {
					in = true
					m.set(m.durable, path, n)
				}
			}
			return in
		})
	}
}

func (m *machine) set(names map[string]*inode, path string, n *inode) {
	if n == nil {
		delete(names, path)
	} else {
		names[path] = n
	}
}

// crash writes what is there after a crash to dir: of the names that were not durable those that keep says, and of the
// contents that were not, everything or nothing.
func (m *machine) crash(t testing.TB, dir string, keep func(n int) bool) {
	names := maps.Clone(m.durable)
	for i, c := range m.pending {
		if keep(i) {
			for path, n := range c {
				m.set(names, path, n)
			}
		}
	}
	for i, path := range slices.Sorted(maps.Keys(names)) { // a folder comes before what is in it
		n, full := names[path], filepath.Join(dir, path)
		if above := filepath.Dir(path); above != "." && names[above] == nil {
			continue // it went with its folder
		}
		if n.dir {
			require.NoError(t, os.Mkdir(full, 0o700))
			continue
		}
		data := n.durable
		if keep(len(m.pending) + i) {
			data = n.data
		}
		require.NoError(t, os.WriteFile(full, data, 0o600))
	}
}

// record is what the save of that number writes.
func savedRecord(version string, save int) ca.Record {
	return ca.NewRecord(version, map[string][]byte{"key": fmt.Appendf(nil, "secret %d", save), "svidkit-state.json": fmt.Appendf(nil, `{"authority":"a","revision":%d}`, save)})
}

const lastSave = 3

// history has a store make some saves, one of which turns back, and returns what it did to its folder.
func saveHistory(t testing.TB) []write {
	dir := filepath.Join(t.TempDir(), "ca")
	j := &journal{}
	inner, err := ca.NewDirStore(dir)
	require.NoError(t, err)
	s := ca.OnDisk(inner, j)
	version := ""
	for save := 1; save <= lastSave; save++ {
		if save == 2 {
			ctx, cancel := context.WithCancel(t.Context())
			j.fail = func(w write) bool {
				if w.op == "sync" && strings.HasSuffix(w.name, "svidkit-state.json") {
					cancel()
				}
				return false
			}
			_, err := s.Save(ctx, savedRecord(version, 99))
			require.ErrorIs(t, err, context.Canceled)
			j.fail = nil
		}
		version, err = s.Save(t.Context(), savedRecord(version, save))
		require.NoError(t, err)
		j.writes = append(j.writes, write{op: "saved", save: save})
	}
	return j.writes
}

// fastDir returns a folder that is in memory where the system has one.
func fastDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "svidkit")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// survives returns what is wrong with the folder that a machine leaves when it crashes after each write, whatever it has
// made durable of its own accord, and nil if nothing is. Of the choices that leave one thing out, or keep one alone, it looks
// at one in each step, another one after each write.
func survives(t testing.TB, writes []write, step int) error {
	m := &machine{now: map[string]*inode{}, durable: map[string]*inode{}}
	saved, states, base := 0, 0, fastDir(t)
	for i, w := range writes {
		if w.op == "saved" {
			saved = w.save
		} else {
			m.apply(w)
		}
		choices := len(m.pending) + len(m.now)
		try := func(keep func(n int) bool) error {
			states++
			dir := filepath.Join(base, "ca")
			require.NoError(t, os.RemoveAll(dir))
			require.NoError(t, os.Mkdir(dir, 0o700))
			m.crash(t, dir, keep)
			if err := goesOn(t, dir, saved); err != nil {
				return fmt.Errorf("after write %d (%s %s), with %d saves: %w", i, w.op, w.name, saved, err)
			}
			return nil
		}
		seed := rand.New(rand.NewPCG(uint64(i), 1))
		if err := errors.Join(try(func(int) bool { return false }), try(func(int) bool { return true })); err != nil {
			return err
		}
		for only := i % step; only < choices; only += step {
			if err := errors.Join(try(func(n int) bool { return n == only }), try(func(n int) bool { return n != only })); err != nil {
				return err
			}
		}
		for range 4 {
			bits := seed.Uint64()
			if err := try(func(n int) bool { return bits>>(n%64)&1 == 1 }); err != nil {
				return err
			}
		}
	}
	if states < 10*len(writes)/step {
		return fmt.Errorf("only %d states were looked at", states)
	}
	return nil
}

// goesOn checks a folder after a crash: its record is the last that a save has returned for, or the one after that, and an
// authority can go on with it.
func goesOn(t testing.TB, dir string, saved int) error {
	inner, err := ca.NewDirStore(dir)
	if err != nil {
		return err
	}
	s := ca.OnDisk(inner, &journal{}) // which does not wait for a disk
	have := -1
	r, err := s.Load(t.Context())
	switch {
	case errors.Is(err, ca.ErrNoRecord):
		have = 0
	case err != nil:
		return err
	default:
		for _, save := range []int{saved, saved + 1} {
			if maps.EqualFunc(r.Data(), savedRecord("", save).Data(), bytes.Equal) {
				have = save
			}
		}
	}
	if have != saved && have != saved+1 {
		return fmt.Errorf("it has %q (%v)", r.Data(), err)
	}
	for range 2 {
		version, err := s.Save(t.Context(), savedRecord(r.Version, 100))
		if err != nil {
			return fmt.Errorf("the save after it: %w", err)
		}
		if r, err = s.Load(t.Context()); err != nil || r.Version != version || string(r.Data()["key"]) != "secret 100" {
			return fmt.Errorf("after the save after it there is %q (%w)", r.Data(), err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 3 {
		return fmt.Errorf("CURRENT, lock and one version are to be left, there are %v (%w)", entries, err)
	}
	return nil
}

// Whatever a crash of the machine leaves of what was not made durable, the store has the old record or the new one, and
// the new one once the save has returned.
func TestDirStoreSurvivesCrashes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	onlyUnix(t)
	step := max(1, 4/rounds.Of(1))
	if *long {
		step = 1
	}
	require.NoError(t, survives(t, saveHistory(t), step))
}

// The test before notices when a store leaves out one of its kinds of fsync, or commits before them.
func TestDirStoreCrashesAreNoticed(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	onlyUnix(t)
	writes := saveHistory(t)
	kinds := map[string][]int{} // of what makes something durable, by what it is for
	for i, w := range writes {
		switch {
		case w.op == "sync" && w.name == "tmp-CURRENT":
			kinds["the name of the version that is begun"] = append(kinds["the name of the version that is begun"], i)
		case w.op == "sync":
			kinds["the items"] = append(kinds["the items"], i)
		case w.op == "syncdir" && w.name != ".":
			kinds["the names of the items"] = append(kinds["the names of the items"], i)
		case w.op == "syncdir":
			after := writes[i-1]
			what := map[string]string{"sync": "the file with that name", "syncdir": "the name of the version", "rename": "the commit", "remove": "what is removed"}[after.op]
			kinds[what] = append(kinds[what], i)
		}
	}
	require.Len(t, kinds, 7, "%v", kinds)
	for what, at := range kinds {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var without []write
			for i, w := range writes {
				if !slices.Contains(at, i) {
					without = append(without, w)
				}
			}
			err := survives(t, without, 1)
			require.Error(t, err)
			t.Log(err)
		})
	}
	t.Run("commit first", func(t *testing.T) {
		t.Parallel()
		early := slices.Clone(writes)
		for i, w := range early {
			if w.op == "rename" { // to where the version is not durable yet
				before := i - 2
				require.Equal(t, "syncdir", early[before].op)
				copy(early[before+1:i+1], early[before:i])
				early[before] = w
				break
			}
		}
		err := survives(t, early, 1)
		require.Error(t, err)
		t.Log(err)
	})
}

// A disk that fails at any one write leaves the old record or the new one, and the store goes on when the disk does.
func TestDirStoreDiskFails(t *testing.T) {
	t.Parallel()
	for n := 0; ; n++ {
		dir := filepath.Join(t.TempDir(), "ca")
		inner, err := ca.NewDirStore(dir)
		require.NoError(t, err)
		j := &journal{}
		s := ca.OnDisk(inner, j)
		first, err := s.Save(t.Context(), savedRecord("", 1))
		require.NoError(t, err)
		left := n
		j.fail = func(write) bool { left--; return left == -1 }
		_, err = s.Save(t.Context(), savedRecord(first, 2))
		committed := err == nil
		if left >= 0 {
			require.NoError(t, err)
			require.Greater(t, n, 10, "it writes more often")
			return
		}
		r, lerr := s.Load(t.Context())
		require.NoError(t, lerr, "write %d failed: %v", n, err)
		if committed || r.Version != first {
			require.Equal(t, savedRecord("", 2).Data(), r.Data())
		} else {
			require.ErrorIs(t, err, errFault)
			require.Equal(t, savedRecord("", 1).Data(), r.Data())
		}
		require.NoError(t, goesOn(t, dir, int(r.Data()["key"][len("secret ")]-'0')), "write %d", n)
	}
}

// The kernel is asked: it refuses to make a folder durable that is on no disk.
func TestSyncDirReachesTheKernel(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc")
	}
	root, err := os.OpenRoot("/proc")
	require.NoError(t, err)
	defer root.Close()
	require.ErrorIs(t, ca.OSDisk{}.SyncDir(root, "."), syscall.EINVAL)
}
