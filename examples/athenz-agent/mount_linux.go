package main

import (
	"errors"
	"os"
	"syscall"
)

// bind mounts a directory read-only at a second path.
func bind(folder, path string) error {
	err := syscall.Mount(folder, path, "", syscall.MS_BIND, "")
	if err == nil {
		err = syscall.Mount("", path, "", syscall.MS_BIND|syscall.MS_REMOUNT|
			syscall.MS_RDONLY|syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, "")
	}
	return os.NewSyscallError("mount "+folder+" at "+path, err)
}

// unbind unmounts the path. It is no error if nothing is mounted there.
func unbind(path string) error {
	const noFollow = 8 // UMOUNT_NOFOLLOW
	err := syscall.Unmount(path, noFollow)
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return os.NewSyscallError("unmount "+path, err)
}
