// Package disk is how folders are changed whose files have to survive a crash: by an interface, so that a test can have a
// disk that fails, and that loses what was not made durable.
package disk

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
)

// Disk changes folders.
type Disk interface {
	Mkdir(root *os.Root, name string) error
	Create(root *os.Root, name string) (File, error) // a new file of mode 0600
	Symlink(root *os.Root, target, name string) error
	SyncDir(root *os.Root, name string) error // makes the names in a folder durable
	Rename(root *os.Root, from, to string) error
	Remove(root *os.Root, name string) error // a file, a link or an empty folder
	RemoveAll(root *os.Root, name string) error
}

// File is a new file.
type File interface {
	io.WriteCloser
	Chmod(mode fs.FileMode) error
	Sync() error // makes the contents durable
}

// OS is the disk of the machine.
type OS struct{}

// Mkdir makes a folder of mode 0700.
func (OS) Mkdir(root *os.Root, name string) error { return root.Mkdir(name, 0o700) }

// Create makes a file that is not there.
func (OS) Create(root *os.Root, name string) (File, error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err // and not a nil *os.File
	}
	return f, nil
}

// Symlink makes name a link to target.
func (OS) Symlink(root *os.Root, target, name string) error { return root.Symlink(target, name) }

// SyncDir does nothing on Windows, which cannot, and keeps its own journal of names.
func (OS) SyncDir(root *os.Root, name string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := root.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Rename moves a file, a folder or a link, in the place of what is at its new name.
func (OS) Rename(root *os.Root, from, to string) error { return root.Rename(from, to) }

// Remove removes a file, a link or an empty folder.
func (OS) Remove(root *os.Root, name string) error { return root.Remove(name) }

// RemoveAll removes what is at a name, if anything is.
func (OS) RemoveAll(root *os.Root, name string) error { return root.RemoveAll(name) }
