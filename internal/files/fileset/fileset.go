// Package fileset writes files that belong together, such as a private key with its certificates, to a directory.
//
//	f, err := fileset.Open("/run/identity", fileset.Options{Program: "this program"})
//	if err != nil { … }
//	defer f.Close()
//	changed, err := f.Write(map[string]fileset.File{"key.pem": {key, 0o600}, "cert.pem": {certs, 0o644}})
//
// The directory and those above it must belong to this user or to root, by the rules of package private. One process
// at a time has it open. Files that are there already are not written again.
//
// # Two layouts
//
// Links: each version of the files is in a directory of its own, and the name of each file is a link through "..data",
// which is replaced by one rename. So at every moment, after a crash too, the names lead to files of one version.
// The previous version stays for readers that are between two files.
//
// Plain files, for readers that expect them: all files are written and made durable in a directory beside them, which
// gets the name "..next"; that commits the set. Then each file is moved to its name by a rename, in a fixed order. A
// reader never sees a part of a file, but between two renames, and after a crash there, it can see files of two
// versions. The next Open finishes what was committed.
//
// [Replace] is for a single file.
package fileset

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/files/disk"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
)

// Further names in a directory, besides the files. Kubernetes volumes use them too, and programs that watch files know
// them.
const (
	currentLink = "..data"  // leads to the directory of the version that counts
	nextFolder  = "..next"  // has the plain files that are still to be moved to their names
	versionMark = "..v-"    // begins the name of the directory of a version
	draftMark   = "..draft" // begins the name of a link that is going to replace another
	lockName    = "..lock"
)

// lockWait is how long Open waits for a process that is about to release the directory.
const lockWait = 500 * time.Millisecond

// File is the contents of a file and its mode, which holds whatever the umask is.
type File struct {
	Data []byte
	Mode fs.FileMode
}

// Options says how a directory is written.
type Options struct {
	// Program is what errors call the program that writes.
	Program string

	// Plain writes plain files, not links.
	Plain bool

	// Last are the names of the plain files that are moved last, in this order. The others come before, sorted.
	Last []string

	// Warn, if set, is called with the reason why a directory that other users can write to is not safe, and the
	// directory is accepted.
	Warn func(error)
}

// Folder is an open directory with a set of files. It is not safe for concurrent use.
type Folder struct {
	path   string
	o      Options
	root   *os.Root
	disk   disk.Disk
	lock   *os.File
	unsure bool // the last write may not be durable
}

// Open opens a directory, which it makes with mode 0755 if it is missing. It finishes a set that an earlier process
// has committed.
func Open(path string, o Options) (*Folder, error) { return openOn(disk.OS{}, path, o) }

func openOn(d disk.Disk, path string, o Options) (*Folder, error) {
	root, err := openRoot(path, o, private.MakeDir)
	if err != nil {
		return nil, err
	}
	f := &Folder{path: path, o: o, root: root, disk: d}
	if err = f.takeLock(); err == nil {
		err = f.finish()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openRoot opens a directory that no other user can write to. It refuses one like /tmp, which has the sticky bit and
// is writable for all, because other users could take the names in it; Options.Warn accepts it.
func openRoot(path string, o Options, open func(string, private.Options) (*os.Root, error)) (*os.Root, error) {
	root, err := open(path, private.Options{Mode: 0o755, Warn: o.Warn})
	if err != nil {
		return nil, err
	}
	info, err := root.Stat(".")
	if err == nil && private.HasOwner(info) && info.Mode()&fs.ModeSticky != 0 && info.Mode().Perm()&0o022 != 0 {
		err = fmt.Errorf("%s: %w: it has mode %04o, so that all users can make files in it; choose a directory in "+
			"it, such as %q",
			path, private.ErrUnsafe, info.Mode().Perm(), filepath.Join(path, "identity"))
		if o.Warn != nil {
			o.Warn(err)
			err = nil
		}
	}
	if err != nil {
		root.Close()
		return nil, err
	}
	return root, nil
}

// takeLock locks a file that only this user can open. Any process that can open a file can hold its lock forever.
func (f *Folder) takeLock() (err error) {
	if f.lock, err = f.root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return err
	}
	got, err := flock.TryLockFor(f.lock, lockWait)
	if err == nil && !got {
		return fmt.Errorf("another program writes to %s", f.path)
	}
	if f.o.Plain { // not all file systems can
		return nil
	}
	return err
}

// Close closes the directory. The files stay.
func (f *Folder) Close() error {
	var err error
	if f.lock != nil {
		err = f.lock.Close()
	}
	return errors.Join(err, f.root.Close())
}

// Check returns an error if the path no longer leads to this directory, or is no longer safe.
func (f *Folder) Check() error {
	root, err := openRoot(f.path, f.o, private.OpenDir)
	if err != nil {
		return err
	}
	defer root.Close()
	now, err := root.Stat(".")
	if err != nil {
		return err
	}
	have, err := f.root.Stat(".")
	if err == nil && !os.SameFile(now, have) {
		err = fmt.Errorf("%s is another directory by now", f.path)
	}
	return err
}

// Write makes files the contents of the directory, and reports whether that changed anything. After an error the old
// files are in force or, if changed is true, the new ones; the next Write or Open moves files that are not at their
// names yet.
func (f *Folder) Write(files map[string]File) (changed bool, err error) {
	if err := f.finish(); err != nil {
		return false, err
	}
	if !f.unsure && f.holds(files) {
		return false, nil
	}
	if err := f.checkNames(files); err != nil {
		return false, err
	}
	before, _ := f.root.Readlink(currentLink) // "" at first
	version := versionMark + rand.Text()
	f.unsure = true
	if err := f.writeVersion(version, files); err != nil {
		_ = f.disk.RemoveAll(f.root, version) // otherwise the next Write does it
		return false, err
	}
	if f.o.Plain {
		err = f.disk.Rename(f.root, version, nextFolder)
	} else {
		err = f.link(version, currentLink)
	}
	if err != nil {
		_ = f.disk.RemoveAll(f.root, version)
		return false, err
	}
	// From here on the new version counts.
	if f.o.Plain {
		version, before = "", ""
		err = f.finish()
	} else {
		err = f.linkNames(files)
	}
	if err != nil {
		return true, err
	}
	f.unsure = false
	return true, f.tidy(files, version, before)
}

// checkNames refuses anything at the name of a file that must not be replaced.
func (f *Folder) checkNames(files map[string]File) error {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		info, err := f.root.Lstat(name)
		link := err == nil && info.Mode()&fs.ModeSymlink != 0
		if err == nil && !link && !(f.o.Plain && info.Mode().IsRegular()) {
			return fmt.Errorf("%s is there and was not made by %s: remove it, or choose another name",
				filepath.Join(f.path, name), f.o.Program)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// holds reports whether the files are there already.
func (f *Folder) holds(files map[string]File) bool {
	in := f.root
	if !f.o.Plain {
		current, err := f.root.OpenRoot(currentLink)
		if err != nil {
			return false
		}
		defer current.Close()
		names, err := fs.ReadDir(current.FS(), ".")
		if err != nil || len(names) != len(files) {
			return false
		}
		in = current
	}
	for name, want := range files {
		if !f.o.Plain {
			if target, err := f.root.Readlink(name); err != nil || target != currentLink+"/"+name {
				return false
			}
		}
		if !has(in, name, want) {
			return false
		}
	}
	return true
}

// has reports whether a file of this user or root has the contents and the mode.
func has(in *os.Root, name string, want File) bool {
	file, err := private.OpenIn(in, name, private.Options{})
	if err != nil {
		return false
	}
	defer file.Close() // only read
	info, err := file.Stat()
	if err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != want.Mode {
		return false
	}
	have, err := io.ReadAll(io.LimitReader(file, int64(len(want.Data))+1))
	return err == nil && bytes.Equal(have, want.Data)
}

// writeVersion writes the files of a version, and makes them durable.
func (f *Folder) writeVersion(version string, files map[string]File) error {
	if err := f.disk.Mkdir(f.root, version); err != nil {
		return f.named("", err)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := create(f.disk, f.root, filepath.Join(version, name), files[name]); err != nil {
			return f.named(name, err)
		}
	}
	if !f.o.Plain {
		info, err := f.root.Stat(version)
		if err != nil {
			return err
		}
		if err := f.root.Chmod(version, 0o755|info.Mode()&fs.ModeSetgid); err != nil {
			return err
		}
	}
	return errors.Join(f.disk.SyncDir(f.root, version), f.disk.SyncDir(f.root, "."))
}

// linkNames makes each name a link to the file in the current version.
func (f *Folder) linkNames(files map[string]File) error {
	for _, name := range slices.Sorted(maps.Keys(files)) {
		target := currentLink + "/" + name
		if have, err := f.root.Readlink(name); err == nil && have == target {
			continue
		}
		if err := f.link(target, name); err != nil {
			return err
		}
	}
	return f.disk.SyncDir(f.root, ".")
}

// link makes name a link to target, replacing any other link.
func (f *Folder) link(target, name string) error {
	draft := draftMark + rand.Text()
	if err := f.disk.Symlink(f.root, target, draft); err != nil {
		return f.named(name, err)
	}
	if err := f.disk.Rename(f.root, draft, name); err != nil {
		return errors.Join(err, f.disk.Remove(f.root, draft))
	}
	return nil
}

// finish moves the plain files of a committed set to their names.
func (f *Folder) finish() error {
	if !f.o.Plain {
		return nil
	}
	path := filepath.Join(f.path, nextFolder)
	info, err := f.root.Lstat(nextFolder)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory, and was not made by %s: remove it", path, f.o.Program)
	}
	if err := private.Check(path, info, private.Options{Keys: true}); err != nil {
		return err
	}
	entries, err := fs.ReadDir(f.root.FS(), nextFolder)
	if err != nil {
		return err
	}
	if err := f.disk.SyncDir(f.root, "."); err != nil { // the commit, before a file is moved
		return err
	}
	order := func(e fs.DirEntry) int { return slices.Index(f.o.Last, e.Name()) } // -1 for the others, which are sorted
	slices.SortStableFunc(entries, func(a, b fs.DirEntry) int { return cmp.Compare(order(a), order(b)) })
	for _, entry := range entries {
		if err := f.disk.Rename(f.root, filepath.Join(nextFolder, entry.Name()), entry.Name()); err != nil {
			return err
		}
	}
	if err := errors.Join(f.disk.SyncDir(f.root, "."), f.disk.SyncDir(f.root, nextFolder)); err != nil {
		return err
	}
	return f.disk.Remove(f.root, nextFolder)
}

// named returns err with name instead of a temporary name: programs log a lasting failure once, by its text.
func (f *Folder) named(name string, err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		err = e.Err
	} else if e, ok := errors.AsType[*os.LinkError](err); ok {
		err = e.Err
	}
	return fmt.Errorf("write %s: %w", filepath.Join(f.path, name), err)
}

// tidy removes links to files that are gone, all versions but the last two, and remains of a crash.
func (f *Folder) tidy(files map[string]File, current, before string) error {
	entries, err := fs.ReadDir(f.root.FS(), ".")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name := entry.Name()
		link := entry.Type()&fs.ModeSymlink != 0
		_, wanted := files[name]
		switch {
		case strings.HasPrefix(name, versionMark) && name != current && name != before,
			strings.HasPrefix(name, draftMark):
			err = f.disk.RemoveAll(f.root, name)
		case link && name == currentLink && f.o.Plain: // of the other layout
			err = f.disk.Remove(f.root, name)
		case link && !wanted:
			if target, linkErr := f.root.Readlink(name); linkErr == nil && target == currentLink+"/"+name {
				err = f.disk.Remove(f.root, name)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Replace replaces or makes the file name in root. A crash leaves either the old file or the new one; once Replace has
// returned, the new file is durable. A link at the name is replaced and not followed. Only one caller at a time may
// replace a file.
func Replace(root *os.Root, name string, file File) error {
	return replace(disk.OS{}, root, name, file)
}

func replace(d disk.Disk, root *os.Root, name string, file File) error {
	draft := name + ".new"
	if err := d.Remove(root, draft); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a crash
		return err
	}
	err := create(d, root, draft, file)
	if err == nil {
		err = d.Rename(root, draft, name)
	}
	if err != nil {
		_ = d.Remove(root, draft) // the next call tries again
		return err
	}
	return d.SyncDir(root, ".")
}

// create makes a new file, and its contents durable.
func create(d disk.Disk, root *os.Root, name string, file File) error {
	out, err := d.Create(root, name)
	if err != nil {
		return err
	}
	_, err = out.Write(file.Data)
	return errors.Join(err, out.Chmod(file.Mode), out.Sync(), out.Close())
}
