package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/flock"
	"github.com/svidkit/svidkit/internal/private"
)

// The names in a folder beside those of the files. They are those of the volumes of Kubernetes, which programs that
// follow files know.
const (
	currentLink = "..data"  // leads to the folder of the version that counts
	versionMark = "..v-"    // begins the name of such a folder
	draftMark   = "..draft" // begins the name of a link that is going to replace another
	lockName    = "..lock"
)

// lockWait is how long a folder may be in use by a process that is about to end.
const lockWait = 500 * time.Millisecond

// file is the contents of a file and its mode.
type file struct {
	data []byte
	mode fs.FileMode
}

// folder is a folder with files that belong together: each version of them is in a folder of its own, the name of each
// file is a link through "..data", and that is replaced by a rename. So at every moment, after a crash too, the
// names lead to files of one version. The version before stays until the next, for readers that are between two files.
type folder struct {
	root *os.Root
	lock *os.File
}

// openFolder opens a folder, after making it with mode 0755 if it is not there. Other users must not be able to write
// to it. One process at a time has it.
func openFolder(path string) (*folder, error) {
	root, err := private.MakeDir(path, private.Options{Mode: 0o755})
	if err != nil {
		return nil, err
	}
	lock, err := root.OpenFile(lockName, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		root.Close()
		return nil, err
	}
	f := &folder{root, lock}
	got, err := flock.TryLock(lock)
	for end := time.Now().Add(lockWait); err == nil && !got && time.Now().Before(end); got, err = flock.TryLock(lock) {
		time.Sleep(lockWait / 50)
	}
	if err == nil && !got {
		err = fmt.Errorf("another svid writes to %s", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Close closes the folder. What was written stays.
func (f *folder) Close() error { return errors.Join(f.lock.Close(), f.root.Close()) }

// write makes files the contents of the folder, and reports whether that changed anything.
func (f *folder) write(files map[string]file) (changed bool, err error) {
	if f.holds(files) {
		return false, nil
	}
	names := slices.Sorted(maps.Keys(files))
	for _, name := range names {
		info, err := f.root.Lstat(name)
		if err == nil && info.Mode()&fs.ModeSymlink == 0 {
			return false, fmt.Errorf("%s is there and was not made by svid: remove it, or choose another name", filepath.Join(f.root.Name(), name))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	before, _ := f.root.Readlink(currentLink) // "" at first
	version := versionMark + rand.Text()
	if err := f.writeVersion(version, files); err != nil {
		return false, errors.Join(err, f.root.RemoveAll(version))
	}
	if err := f.link(version, currentLink); err != nil { // from here on the new version counts
		return false, errors.Join(err, f.root.RemoveAll(version))
	}
	for _, name := range names {
		target := currentLink + "/" + name
		if have, err := f.root.Readlink(name); err == nil && have == target {
			continue
		}
		if err := f.link(target, name); err != nil {
			return true, err
		}
	}
	if err := syncFolder(f.root, "."); err != nil {
		return true, err
	}
	return true, f.tidy(files, version, before)
}

// holds reports whether the files are there already.
func (f *folder) holds(files map[string]file) bool {
	current, err := f.root.OpenRoot(currentLink)
	if err != nil {
		return false
	}
	defer current.Close()
	names, err := fs.ReadDir(current.FS(), ".")
	if err != nil || len(names) != len(files) {
		return false
	}
	for name, want := range files {
		have, err := current.ReadFile(name)
		info, statErr := current.Stat(name)
		target, linkErr := f.root.Readlink(name)
		if err != nil || statErr != nil || linkErr != nil || !bytes.Equal(have, want.data) || target != currentLink+"/"+name {
			return false
		}
		if runtime.GOOS != "windows" && info.Mode().Perm() != want.mode {
			return false
		}
	}
	return true
}

// writeVersion writes the files of a version, and makes them durable. The modes hold whatever the umask is.
func (f *folder) writeVersion(version string, files map[string]file) error {
	if err := f.root.Mkdir(version, 0o700); err != nil {
		return err
	}
	for name, one := range files {
		out, err := f.root.OpenFile(filepath.Join(version, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		_, err = out.Write(one.data)
		if err := errors.Join(err, out.Chmod(one.mode), out.Sync(), out.Close()); err != nil {
			return err
		}
	}
	info, err := f.root.Stat(version)
	if err != nil {
		return err
	}
	if err := f.root.Chmod(version, 0o755|info.Mode()&fs.ModeSetgid); err != nil {
		return err
	}
	return errors.Join(syncFolder(f.root, version), syncFolder(f.root, "."))
}

// link makes name a link to target, in the place of another.
func (f *folder) link(target, name string) error {
	draft := draftMark + rand.Text()
	if err := f.root.Symlink(target, draft); err != nil {
		return err
	}
	if err := f.root.Rename(draft, name); err != nil {
		return errors.Join(err, f.root.Remove(draft))
	}
	return nil
}

// tidy removes links to files that are no more, and all versions but the two.
func (f *folder) tidy(files map[string]file, current, before string) error {
	entries, err := fs.ReadDir(f.root.FS(), ".")
	if err != nil {
		return err
	}
	for _, entry := range entries {
		name := entry.Name()
		_, wanted := files[name]
		switch {
		case strings.HasPrefix(name, versionMark) && name != current && name != before, strings.HasPrefix(name, draftMark):
			err = f.root.RemoveAll(name)
		case entry.Type()&fs.ModeSymlink != 0 && !wanted:
			if target, linkErr := f.root.Readlink(name); linkErr == nil && target == currentLink+"/"+name {
				err = f.root.Remove(name)
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// syncFolder makes the names in a folder durable. Windows cannot, and keeps its own journal of names.
func syncFolder(root *os.Root, name string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	dir, err := root.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
