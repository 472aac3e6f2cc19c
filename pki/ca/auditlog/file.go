package auditlog

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
)

// fileSystem is what a Log needs of the operating system. There is one, and a broken one in tests.
type fileSystem interface {
	// OpenFile opens a file for appending and reading, and creates it with the mode 0600. It calls warn with what
	// other users can change.
	OpenFile(path string, warn func(error)) (file, error)
	SyncDir(dir string) error

	// Probe says whether n more bytes can be written next to the file at path.
	Probe(path string, n int) error
}

type file interface {
	io.ReaderAt
	io.WriteCloser
	Sync() error
	Stat() (fs.FileInfo, error)
	Lock() (unlock func(), err error) // against other processes, waiting for them
}

type osFileSystem struct{}

func (osFileSystem) OpenFile(path string, warn func(error)) (file, error) {
	f, err := private.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE, private.Options{Warn: warn})
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

// Probe writes to a file of its own, as what is in the log stays there. If it may not create one, or another process
// has one, it finds nothing wrong.
func (osFileSystem) Probe(path string, n int) error {
	path += ".probe"
	_ = os.Remove(path) // of a crash
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, n))
	return errors.Join(err, f.Close(), os.Remove(path))
}

// SyncDir does nothing on systems where a directory may not be open for that.
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

// lockTime is how long another process may have the lock. It needs it for one write; a process that may read the file
// can hold it for any time.
const lockTime = 10 * time.Second

// Lock does nothing on systems without flock.
func (f osFile) Lock() (unlock func(), err error) {
	begin := time.Now()
	for wait := 100 * time.Microsecond; ; wait = min(2*wait, 5*time.Millisecond) {
		ok, err := flock.TryLock(f.File)
		switch {
		case err != nil:
			return nil, err
		case ok:
			return func() { _ = flock.Unlock(f.File) }, nil
		case time.Since(begin) > lockTime:
			return nil, fmt.Errorf("another process holds its lock for more than %v; end that process", lockTime)
		}
		time.Sleep(wait)
	}
}
