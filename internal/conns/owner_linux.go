package conns

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
)

// Constants of sock_diag(7).
const (
	netlinkSockDiag   = 4
	sockDiagByFamily  = 20
	sizeHeader        = 16 // nlmsghdr
	sizeRequest       = sizeHeader + 56
	offsetUID         = sizeHeader + 64 // of inet_diag_msg
	offsetInode       = sizeHeader + 68
	ownerTimeoutMicro = 100_000
)

// owner returns the user of the program at the other side of a TCP connection from this machine. It reports false for
// other connections, if the kernel does not say, and if that program has already closed its side.
func owner(c net.Conn) (uid uint32, known bool) {
	here, ok := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	if !ok || !ok2 {
		return 0, false
	}
	s, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, netlinkSockDiag)
	if err != nil {
		return 0, false
	}
	defer syscall.Close(s)
	if syscall.SetsockoptTimeval(s, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO,
		&syscall.Timeval{Usec: ownerTimeoutMicro}) != nil {
		return 0, false
	}
	if syscall.Sendto(s, ownerRequest(there.AddrPort(), here.AddrPort()), 0,
		&syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}) != nil {
		return 0, false
	}
	answer := make([]byte, 512)
	n, _, err := syscall.Recvfrom(s, answer, 0)
	if err != nil || n < offsetInode+4 || binary.NativeEndian.Uint16(answer[4:]) != sockDiagByFamily {
		return 0, false
	}
	// A socket without a program has no inode, and claims to be root's.
	return binary.NativeEndian.Uint32(answer[offsetUID:]), binary.NativeEndian.Uint32(answer[offsetInode:]) != 0
}

// ownerRequest asks for the one socket that connects from to to.
func ownerRequest(from, to netip.AddrPort) []byte {
	b := make([]byte, sizeRequest)
	binary.NativeEndian.PutUint32(b[0:], sizeRequest)
	binary.NativeEndian.PutUint16(b[4:], sockDiagByFamily)
	binary.NativeEndian.PutUint16(b[6:], syscall.NLM_F_REQUEST)
	family, src, dst := byte(syscall.AF_INET), from.Addr().Unmap(), to.Addr().Unmap()
	if src.Is6() {
		family = syscall.AF_INET6
	}
	b[16], b[17] = family, syscall.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[20:], 0xffffffff) // in any state
	binary.BigEndian.PutUint16(b[24:], from.Port())
	binary.BigEndian.PutUint16(b[26:], to.Port())
	copy(b[28:44], src.AsSlice())
	copy(b[44:60], dst.AsSlice())
	copy(b[64:72], "\xff\xff\xff\xff\xff\xff\xff\xff") // whatever its cookie
	return b
}
