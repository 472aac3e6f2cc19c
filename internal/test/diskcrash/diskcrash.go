// Package diskcrash says what a machine that crashes can leave of what a program has written to a directory by a
// disk.Disk.
package diskcrash

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/svidkit/svidkit/internal/files/disk"
)

// ErrFault is what a [Journal] fails with.
var ErrFault = errors.New("diskcrash: a fault of the disk")

// Write is one change of a directory.
type Write struct {
	// "mkdir", "create", "write", "sync", "symlink", "syncdir", "rename", "remove", or "saved" by Saved
	Op       string
	Name, To string
	Data     []byte
	Save     int
}

// Journal is a disk that remembers what was done to it, makes nothing durable, and fails when it is told to.
type Journal struct {
	disk.OS
	Writes []Write
	Fail   func(Write) bool // nil: never
}

// Saved notes that a program was told that what it has written by then is durable.
func (j *Journal) Saved(save int) { j.Writes = append(j.Writes, Write{Op: "saved", Save: save}) }

func (j *Journal) note(w Write) error {
	if j.Fail != nil && j.Fail(w) {
		return ErrFault
	}
	j.Writes = append(j.Writes, w)
	return nil
}

func (j *Journal) do(w Write, f func() error) error {
	if err := j.note(w); err != nil {
		return err
	}
	return f()
}

// Mkdir is Mkdir of a Disk.
func (j *Journal) Mkdir(root *os.Root, name string) error {
	return j.do(Write{Op: "mkdir", Name: name}, func() error { return j.OS.Mkdir(root, name) })
}

// Create is Create of a Disk.
func (j *Journal) Create(root *os.Root, name string) (disk.File, error) {
	if err := j.note(Write{Op: "create", Name: name}); err != nil {
		return nil, err
	}
	f, err := j.OS.Create(root, name)
	if err != nil {
		return nil, err
	}
	return &journalFile{f, j, name}, nil
}

// Symlink is Symlink of a Disk.
func (j *Journal) Symlink(root *os.Root, target, name string) error {
	return j.do(Write{Op: "symlink", Name: name, To: target}, func() error { return j.OS.Symlink(root, target, name) })
}

// SyncDir is SyncDir of a Disk.
func (j *Journal) SyncDir(_ *os.Root, name string) error {
	return j.note(Write{Op: "syncdir", Name: name})
}

// Rename is Rename of a Disk.
func (j *Journal) Rename(root *os.Root, from, to string) error {
	return j.do(Write{Op: "rename", Name: from, To: to}, func() error { return j.OS.Rename(root, from, to) })
}

// Remove is Remove of a Disk.
func (j *Journal) Remove(root *os.Root, name string) error {
	if _, err := root.Lstat(name); err != nil {
		return err
	}
	return j.do(Write{Op: "remove", Name: name}, func() error { return j.OS.Remove(root, name) })
}

// RemoveAll is RemoveAll of a Disk.
func (j *Journal) RemoveAll(root *os.Root, name string) error {
	return j.do(Write{Op: "remove", Name: name}, func() error { return j.OS.RemoveAll(root, name) })
}

type journalFile struct {
	disk.File
	j    *Journal
	name string
}

func (f *journalFile) Write(b []byte) (int, error) {
	if err := f.j.note(Write{Op: "write", Name: f.name, Data: bytes.Clone(b)}); err != nil {
		return 0, err
	}
	return f.File.Write(b)
}

func (f *journalFile) Sync() error { return f.j.note(Write{Op: "sync", Name: f.name}) }

// inode is a file, a directory or a link of a machine.
type inode struct {
	names, durableNames map[string]*inode // of a directory; nil for others
	link                string            // of a link
	data, durable       []byte
}

func newFolder() *inode { return &inode{names: map[string]*inode{}, durableNames: map[string]*inode{}} }

// name is a change of one name.
type name struct {
	in   *inode
	name string
	to   *inode // nil: it is gone
}

// machine is a directory in memory that knows what of it would survive a crash.
type machine struct {
	root *inode
	// changes that are there after a crash as a whole or not at all, since their directory was made durable
	pending [][]name
}

// find returns the directory that a path is in, and the last part of the path.
func (m *machine) find(path string) (in *inode, last string) {
	parts := strings.Split(filepath.ToSlash(path), "/")
	in = m.root
	for _, part := range parts[:len(parts)-1] {
		in = in.names[part]
	}
	return in, parts[len(parts)-1]
}

func set(names map[string]*inode, name string, to *inode) {
	if to == nil {
		delete(names, name)
	} else {
		names[name] = to
	}
}

func (m *machine) change(c ...name) {
	for _, n := range c {
		set(n.in.names, n.name, n.to)
	}
	m.pending = append(m.pending, c)
}

func (m *machine) apply(w Write) {
	in, last := m.find(w.Name)
	switch w.Op {
	case "mkdir":
		m.change(name{in, last, newFolder()})
	case "create":
		m.change(name{in, last, &inode{}})
	case "symlink":
		m.change(name{in, last, &inode{link: w.To}})
	case "write":
		f := in.names[last]
		f.data = append(slices.Clip(f.data), w.Data...)
	case "sync":
		f := in.names[last]
		f.durable = f.data
	case "rename":
		to, newName := m.find(w.To)
		m.change(name{in, last, nil}, name{to, newName, in.names[last]})
	case "remove":
		if in.names[last] != nil {
			m.change(name{in, last, nil})
		}
	case "syncdir":
		folder := m.root
		if w.Name != "." {
			folder = in.names[last]
		}
		m.pending = slices.DeleteFunc(m.pending, func(c []name) bool {
			if !slices.ContainsFunc(c, func(n name) bool { return n.in == folder }) {
				return false
			}
			for _, n := range c {
				set(n.in.durableNames, n.name, n.to)
			}
			return true
		})
	}
}

// choices is how many things keep of crash is asked for, at least.
func (m *machine) choices() int { return len(m.pending) + len(m.root.names) + 4 }

// crash returns what makes dir what it is after a crash, and a text of that: of the names that were not durable those
// that keep says, and of the contents that were not, everything or nothing.
func (m *machine) crash(dir string, keep func(n int) bool) (text string, write []func() error) {
	after := map[*inode]map[string]*inode{} // of the directories that kept changes are in
	for i, c := range m.pending {
		if !keep(i) {
			continue
		}
		for _, n := range c {
			if after[n.in] == nil {
				after[n.in] = maps.Clone(n.in.durableNames)
			}
			set(after[n.in], n.name, n.to)
		}
	}
	asked := len(m.pending)
	var list func(dir string, folder *inode)
	list = func(dir string, folder *inode) {
		names := after[folder]
		if names == nil {
			names = folder.durableNames
		}
		for _, name := range slices.Sorted(maps.Keys(names)) {
			n, path := names[name], filepath.Join(dir, name)
			switch {
			case n.names != nil:
				text += fmt.Sprintf("%q/", path)
				write = append(write, func() error { return os.Mkdir(path, 0o700) })
				list(path, n)
			case n.link != "":
				text += fmt.Sprintf("%q>%q", path, n.link)
				write = append(write, func() error { return os.Symlink(n.link, path) })
			default:
				data := n.durable
				if keep(asked) {
					data = n.data
				}
				asked++
				text += fmt.Sprintf("%q=%q", path, data)
				write = append(write, func() error { return os.WriteFile(path, data, 0o600) })
			}
		}
	}
	list(dir, m.root)
	return text, write
}

// Survives returns what is wrong with the directory that a machine leaves when it crashes after each write, whatever
// it has made durable of its own accord, and nil if nothing is. Check says what is wrong with a directory after the
// saves that it is told of. Of the choices that leave one thing out, or keep one alone, Survives looks at one in each
// step, another one after each write. Of states that are alike, check is told of the first.
func Survives(t testing.TB, writes []Write, step int, check func(dir string, saved int) error) error {
	m := &machine{root: newFolder()}
	saved, states, base, seen := 0, 0, fastDir(t), map[string]bool{}
	for i, w := range writes {
		if w.Op == "saved" {
			saved = w.Save
		} else {
			m.apply(w)
		}
		try := func(keep func(n int) bool) error {
			states++
			dir := filepath.Join(base, "folder")
			text, write := m.crash(dir, keep)
			if text = fmt.Sprint(saved, text); seen[text] {
				return nil
			}
			seen[text] = true
			err := errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o700))
			for _, f := range write {
				err = errors.Join(err, f())
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := check(dir, saved); err != nil {
				return fmt.Errorf("after write %d (%s %s), with %d saves: %w", i, w.Op, w.Name, saved, err)
			}
			return nil
		}
		seed := rand.New(rand.NewPCG(uint64(i), 1))
		if err := errors.Join(try(func(int) bool { return false }), try(func(int) bool { return true })); err != nil {
			return err
		}
		for only := i % step; only < m.choices(); only += step {
			if err := errors.Join(try(func(n int) bool { return n == only }),
				try(func(n int) bool { return n != only })); err != nil {
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

// fastDir returns a directory that is in memory where the system has one.
func fastDir(t testing.TB) string {
	dir, err := os.MkdirTemp("/dev/shm", "svidkit")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
