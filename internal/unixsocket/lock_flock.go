//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package unixsocket

import (
	"os"
	"syscall"
)

// lockDir waits for the lock on a folder, which lasts from here to unlock or the end of the process.
// It is held for moments only, and leaves no file behind.
func lockDir(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for {
		if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != syscall.EINTR {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, os.NewSyscallError("flock", err)
	}
	return func() { f.Close() }, nil
}
