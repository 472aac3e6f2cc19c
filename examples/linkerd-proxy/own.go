package main

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
)

// listens records a port of the proxy itself. The proxy forwards nothing to it.
func (p *proxy) listens(l net.Listener) {
	if at, ok := l.Addr().(*net.TCPAddr); ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.own == nil {
			p.own = map[int]bool{}
		}
		p.own[at.Port] = true
	}
}

// elsewhere is the Control of a [net.Dialer]. It refuses the proxy's ports at this machine's addresses: a request
// there would return, and open another connection each time.
func (p *proxy) elsewhere(_, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil // not TCP
	}
	p.mu.Lock()
	own := p.own[int(at.Port())]
	p.mu.Unlock()
	if own && local(at.Addr().Unmap()) {
		return errors.New("the address is that of the proxy itself")
	}
	return nil
}

// local reports whether an address belongs to this machine.
func local(ip netip.Addr) bool {
	if ip.IsLoopback() || ip.IsUnspecified() {
		return true
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return true
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if have, ok := netip.AddrFromSlice(n.IP); ok && have.Unmap() == ip.WithZone("") {
				return true
			}
		}
	}
	return false
}
