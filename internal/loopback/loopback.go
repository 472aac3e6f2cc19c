// Package loopback tells requests that are for this machine from those of a page of another site in a browser on it,
// whose own name was made to lead to loopback (DNS rebinding). The Host of such a request is that name.
package loopback

import (
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Reached reports whether a request came in at a loopback address. A request whose server does not say so, such as one
// on a Unix socket, did not.
func Reached(r *http.Request) bool {
	at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// Host reports whether a host, with or without a port, is an address, or localhost. No name leads to these but their own.
func Host(host string) bool {
	name := Name(host)
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil || strings.EqualFold(name, "localhost")
}

// Name returns a host without its port.
func Name(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return host
}
