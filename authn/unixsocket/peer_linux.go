package unixsocket

import (
	"errors"
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

// startOf returns when the process p, the peer of c, was started, or "" if it has ended.
func startOf(c net.Conn, p Peer) (start string) {
	u, ok := c.(*net.UnixConn)
	if !ok || p.PID <= 0 {
		return ""
	}
	sys, err := u.SyscallConn()
	if err != nil {
		return ""
	}
	err = sys.Control(func(fd uintptr) {
		start = started(p.PID)
		handle, err := syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, soPeerPIDFD)
		switch {
		case errors.Is(err, syscall.ENOPROTOOPT): // before Linux 6.5: at least no other user's process may have the PID by now
			if !runsAs(p.PID, p.UID) {
				start = ""
			}
			return
		case err != nil: // the process is gone
			start = ""
			return
		}
		defer syscall.Close(handle)
		// The handle is of the process that has connected, and has no PID once that has ended: if it has one now, it is the
		// process that was looked at.
		info, _ := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", handle))
		if !strings.Contains(string(info), fmt.Sprintf("\nPid:\t%d\n", p.PID)) {
			start = ""
		}
	})
	if err != nil {
		return ""
	}
	return start
}
