// Package store keeps small files, such as the last good trust bundles, in a directory across restarts of a program.
// The files decide which peers are trusted, so no other user may have made the directory or be able to change it.
package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/files"
	"github.com/svidkit/svidkit/internal/files/fileset"
	"github.com/svidkit/svidkit/internal/files/flock"
	"github.com/svidkit/svidkit/internal/files/private"
)

const lockWait = 5 * time.Second

// Store is a directory; [New] makes one. Its methods are safe for concurrent use, also by several processes.
type Store struct {
	path, own string
	warn      func(error)

	mu   sync.Mutex      // held while files are read and written
	told map[string]bool // about the directory
}

// New returns the Store in the directory at path, without opening it. If other users can write to the directory, as to
// an emptyDir of Kubernetes, the files are in a directory with the name own below it. Other users can replace that
// directory; warn is called once to say so.
func New(path, own string, warn func(error)) *Store {
	return &Store{path: path, own: own, warn: warn, told: map[string]bool{}}
}

// Use opens the directory, which it makes if it is missing, and calls f with it while no other call does. The
// directory and those above it must belong to this user or to root, or the error wraps [private.ErrUnsafe].
func (s *Store) Use(f func(*Folder) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	root, err := s.open()
	if err != nil {
		return err
	}
	defer root.Close()
	if lock, err := root.Open("."); err == nil {
		defer lock.Close()
		// Some file systems have none; then two processes have to keep apart by themselves. A process that can open
		// the directory can hold its lock, and ours hold it only while they write a file.
		_, _ = flock.TryLockFor(lock, lockWait)
	}
	return f(&Folder{root})
}

// open opens the directory of the files.
func (s *Store) open() (*os.Root, error) {
	dir, err := s.makeDir(s.path)
	if err != nil {
		return nil, err
	}
	info, err := dir.Stat(".")
	if err == nil && writableByOthers(info) {
		own := filepath.Join(s.path, s.own)
		if err = dir.Close(); err != nil {
			return nil, err
		}
		if dir, err = s.makeDir(own); err != nil {
			return nil, err
		}
		if info, err = dir.Stat("."); err == nil {
			err = private.Check(own, info, private.Options{})
		}
	}
	if err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

func (s *Store) makeDir(path string) (*os.Root, error) {
	return private.MakeDir(path, private.Options{Warn: func(err error) {
		if !s.told[err.Error()] {
			s.told[err.Error()] = true
			s.warn(err)
		}
	}})
}

// writableByOthers is false on Windows, where the bits say nothing.
func writableByOthers(info fs.FileInfo) bool {
	return runtime.GOOS != "windows" && info.Mode().Perm()&0o022 != 0
}

// Folder is the open directory of a [Store].
type Folder struct{ root *os.Root }

// Read returns the contents of a file. It refuses a link, a file of another user, one that other users can write to,
// one of more than limit bytes, and, with keys, one that other users can read.
func (f *Folder) Read(name string, limit int64, keys bool) ([]byte, error) {
	file, err := private.OpenIn(f.root, name, private.Options{Keys: keys})
	if err != nil {
		return nil, err
	}
	defer file.Close() // only read
	if info, err := file.Stat(); err != nil {
		return nil, err
	} else if writableByOthers(info) {
		return nil, fmt.Errorf("%s can be written to by others (%v)", file.Name(), info.Mode())
	}
	return files.ReadAll(file, file.Name(), int(limit))
}

// Write replaces a file, which only this user can read. A crash leaves either the old file or the new one; once Write
// has returned, the new file is durable.
func (f *Folder) Write(name string, data []byte) error {
	return fileset.Replace(f.root, name, fileset.File{Data: data, Mode: 0o600})
}

// Remove deletes a file, if there is one.
func (f *Folder) Remove(name string) error {
	if err := f.root.Remove(name); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
