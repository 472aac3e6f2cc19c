//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package auditlog

import (
	"os"
	"syscall"
)

func (f osFile) Lock() (unlock func(), err error) {
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX)
		if err == nil {
			return func() { _ = syscall.Flock(int(f.Fd()), syscall.LOCK_UN) }, nil
		}
		if err != syscall.EINTR {
			return nil, os.NewSyscallError("flock", err)
		}
	}
}

func (osFileSystem) Rename(_ file, from, to string) error { return os.Rename(from, to) }

func (osFileSystem) SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
