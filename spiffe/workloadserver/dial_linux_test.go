package workloadserver_test

import (
	"net"
	"os"
	"runtime"
	"syscall"
)

// dialAs connects to a socket as another user, which takes root.
func dialAs(uid int, path string) (c net.Conn, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock it: the thread is of the other user, and ends with the goroutine
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			err = errno
			return
		}
		var fd int
		if fd, err = syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
			return
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close()
		if err = syscall.Connect(fd, &syscall.SockaddrUnix{Name: path}); err == nil {
			c, err = net.FileConn(f)
		}
	}()
	<-done
	return c, err
}
