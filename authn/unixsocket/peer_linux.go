package unixsocket

import (
	"net"
	"syscall"
)

// peerOf asks the kernel which process is on the other side of a Unix socket.
func peerOf(c net.Conn) (Peer, bool) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return Peer{}, false
	}
	sys, err := u.SyscallConn()
	if err != nil {
		return Peer{}, false
	}
	var cred *syscall.Ucred
	var failed error
	err = sys.Control(func(fd uintptr) {
		cred, failed = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err != nil || failed != nil {
		return Peer{}, false
	}
	return Peer{UID: cred.Uid, GID: cred.Gid, PID: cred.Pid}, true
}
