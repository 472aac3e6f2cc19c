package unixsocket

import (
	"fmt"
	"net"
	"os"
	"strings"
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

const soPeerPIDFD = 77 // of Linux 6.5, on all architectures that Go has

// isPeer reports whether the process that has connected lives and has the PID.
func isPeer(c *net.UnixConn, pid int32) (is bool) {
	sys, err := c.SyscallConn()
	if err != nil {
		return false
	}
	_ = sys.Control(func(fd uintptr) {
		handle, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, soPeerPIDFD)
		if err != nil {
			return
		}
		defer syscall.Close(handle)
		info, _ := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", handle)) // -1 once it has ended
		is = strings.Contains(string(info), fmt.Sprintf("\nPid:\t%d\n", pid))
	})
	return is
}
