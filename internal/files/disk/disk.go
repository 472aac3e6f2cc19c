// Package disk changes directories whose files must survive a crash. It is an interface, so that a test can use a disk
// that fails, or that loses changes that were not made durable.
package disk

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
)

// Disk changes directories.
type Disk interface {
	Mkdir(root *os.Root, name string) error          // of mode 0700
	Create(root *os.Root, name string) (File, error) // a new file of mode 0600
	Symlink(root *os.Root, target, name string) error
	SyncDir(root *os.Root, name string) error // makes the names in a directory durable
	Rename(root *os.Root, from, to string) error
	Remove(root *os.Root, name string) error // a file, a link or an empty directory
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

func (OS) Mkdir(root *os.Root, name string) error           { return root.Mkdir(name, 0o700) }
func (OS) Symlink(root *os.Root, target, name string) error { return root.Symlink(target, name) }
func (OS) Rename(root *os.Root, from, to string) error      { return root.Rename(from, to) }
func (OS) Remove(root *os.Root, name string) error          { return root.Remove(name) }
func (OS) RemoveAll(root *os.Root, name string) error       { return root.RemoveAll(name) }

func (OS) Create(root *os.Root, name string) (File, error) {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err // and not a nil *os.File
	}
	return f, nil
}

// SyncDir does nothing on Windows, which cannot, and keeps its own journal of names, and for a directory that may be
// entered and written but not listed.
func (OS) SyncDir(root *os.Root, name string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := root.Open(name)
	if errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
