//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package ca

import (
	"errors"
	"os"
	"syscall"
)

// tryLockFile takes the lock on f, which lasts until f is closed or the process ends, and reports
// whether it was free.
func tryLockFile(f *os.File) (bool, error) {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return true, nil
		case errors.Is(err, syscall.EWOULDBLOCK):
			return false, nil
		case !errors.Is(err, syscall.EINTR):
			return false, os.NewSyscallError("flock", err)
		}
	}
}
