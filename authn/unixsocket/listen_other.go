//go:build !unix

package unixsocket

import (
	"errors"
	"io/fs"
	"net"
	"syscall"
)

// maxPath is the longest path of a socket in bytes.
const maxPath = 107

// refused also knows the number that Winsock uses.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.Errno(10061))
}

// listenUnix makes a socket; its mode has no meaning here.
func listenUnix(path string, _ fs.FileMode) (net.Listener, error) {
	l, err := net.Listen("unix", path)
	if err == nil {
		l.(*net.UnixListener).SetUnlinkOnClose(false) // Run removes it, if it is its own
	}
	return l, err
}
