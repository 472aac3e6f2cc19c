//go:build !unix

package unixsocket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// maxPath is the longest path of a socket in bytes.
const maxPath = 107

// refused reports whether err is ECONNREFUSED, by Winsock's number too.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.Errno(10061))
}

// listenUnix makes a socket in the directory dir, which is root; its mode has no meaning here.
func listenUnix(root *os.Root, dir, name string, _ fs.FileMode) (net.Listener, fs.FileInfo, error) {
	l, err := net.Listen("unix", dir+name)
	if err != nil {
		return nil, nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // Run removes the socket if it is its own
	own, err := root.Lstat(name)
	if err != nil {
		l.Close()
		return nil, nil, err
	}
	return l, own, nil
}
