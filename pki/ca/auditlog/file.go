package auditlog

import (
	"io"
	"io/fs"
	"os"

	"github.com/svidkit/svidkit/internal/flock"
)

// fileSystem is what a Log needs of the operating system. There is one, and a broken one in tests.
type fileSystem interface {
	OpenFile(path string) (file, error) // for appending and reading; created with the mode 0600
	Stat(path string) (fs.FileInfo, error)
	Rename(f file, from, to string) error // f is open at from
	SyncDir(dir string) error
}

type file interface {
	io.ReaderAt
	io.WriteCloser
	Sync() error
	Stat() (fs.FileInfo, error)
	Lock() (unlock func(), err error) // against other processes, waiting for them
}

type osFileSystem struct{}

func (osFileSystem) OpenFile(path string) (file, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFileSystem) Stat(path string) (fs.FileInfo, error) { return os.Stat(path) }

// Rename closes the file first where it is not known that the system renames one that is open, as
// Windows does not.
func (osFileSystem) Rename(f file, from, to string) error {
	if !flock.Supported {
		if err := f.Close(); err != nil {
			return err
		}
	}
	return os.Rename(from, to)
}

// SyncDir does nothing where it is not known that a folder can be opened for that.
func (osFileSystem) SyncDir(dir string) error {
	if !flock.Supported {
		return nil
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

type osFile struct{ *os.File }

// Lock does nothing on systems without flock.
func (f osFile) Lock() (unlock func(), err error) {
	if err := flock.Lock(f.File); err != nil {
		return nil, err
	}
	return func() { _ = flock.Unlock(f.File) }, nil
}
