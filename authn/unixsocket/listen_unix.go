//go:build unix

package unixsocket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// maxPath is the longest path of a socket in bytes; a zero byte follows it.
const maxPath = len(syscall.RawSockaddrUnix{}.Path) - 1

func refused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// backlog is how many connections may wait to be accepted, within the limit of the system. The
// constant in package syscall is 128, and more clients than that reconnect at once when an agent restarts.
const backlog = 4096

// listenUnix makes a socket with that mode. Connections are refused until listen is called, so no client
// connects while the mode is still what the umask made of it.
func listenUnix(path string, mode fs.FileMode) (net.Listener, error) {
	syscall.ForkLock.RLock()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fd)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // the listener has a copy
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	err = os.Chmod(path, mode)
	if err == nil {
		err = os.NewSyscallError("listen", syscall.Listen(fd, backlog))
	}
	var l net.Listener
	if err == nil {
		l, err = net.FileListener(f)
	}
	if err != nil {
		_ = os.Remove(path) // ours: bind made it
		return nil, err
	}
	return l, nil
}
