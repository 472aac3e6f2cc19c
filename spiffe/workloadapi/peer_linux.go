package workloadapi

import (
	"net"
	"syscall"
)

// peer asks the kernel who is on the other side of a Unix socket.
func peer(c net.Conn) (Caller, bool) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return Caller{}, false
	}
	sys, err := u.SyscallConn()
	if err != nil {
		return Caller{}, false
	}
	var cred *syscall.Ucred
	var failed error
	err = sys.Control(func(fd uintptr) {
		cred, failed = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err != nil || failed != nil {
		return Caller{}, false
	}
	return Caller{PID: int(cred.Pid), UID: int(cred.Uid), GID: int(cred.Gid)}, true
}
