//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

// Package flock locks files against other processes, where the system has flock. A lock belongs to the open file: it
// ends with [Unlock], when the file is closed, and when the process ends.
package flock

import (
	"errors"
	"os"
	"syscall"
)

// Supported says whether locks do anything on this system.
const Supported = true

// Lock waits for the lock on f.
func Lock(f *os.File) error { return flock(f, syscall.LOCK_EX) }

// TryLock takes the lock on f, and reports whether it was free.
func TryLock(f *os.File) (bool, error) {
	err := flock(f, syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return false, nil
	}
	return err == nil, err
}

// Unlock releases the lock on f.
func Unlock(f *os.File) error { return flock(f, syscall.LOCK_UN) }

func flock(f *os.File, how int) error {
	for {
		err := syscall.Flock(int(f.Fd()), how)
		if err != syscall.EINTR {
			return os.NewSyscallError("flock", err)
		}
	}
}
