//go:build unix

package main

import (
	"math"
	"net"
	"syscall"
)

// usableDescriptors returns how many descriptors of the process accepted connections may have.
func usableDescriptors() (n int, known bool) {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil || r.Cur <= 0 {
		return 0, false
	}
	return usableOf(int(min(uint64(r.Cur), math.MaxInt32))), true
}

// descriptor returns the descriptor of a connection. The system gives out the lowest free one.
func descriptor(c net.Conn) (fd int, known bool) {
	s, ok := c.(syscall.Conn)
	if !ok {
		return 0, false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return 0, false
	}
	err = raw.Control(func(n uintptr) { fd = int(n) })
	return fd, err == nil
}
