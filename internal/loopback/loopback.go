// Package loopback tells requests that are for this machine from those of a page of another site in a browser on it,
// whose own name was made to lead to loopback (DNS rebinding). The Host of such a request is that name.
package loopback

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
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

// OtherSite reports whether the browser that sends a request says that it is because of a page of another site, or of
// another port: such a page can make requests for localhost, too, and does not get the answers. Old browsers say it by
// the Origin alone, and of some requests only. Clients that are no browsers say nothing.
func OtherSite(r *http.Request) bool {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	if site == "" && origin != "" {
		u, err := url.Parse(origin)
		return err != nil || u.Host != r.Host
	}
	return site != "" && site != "same-origin" && site != "none"
}

// Local returns nil for a request of a program on this machine, for what others must not ask for, and otherwise why it is
// refused. A request on a Unix socket has no addresses, and is left to the permissions of the socket.
func Local(r *http.Request) error {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil { // a Unix socket has none
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
			return errors.New("this is for clients on the same host")
		}
	}
	switch _, network := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); {
	case network && !Reached(r): // a proxy of the pod may pass on what comes from outside
		return errors.New("this is served over loopback only; listen at 127.0.0.1")
	case !Host(r.Host):
		return errors.New("the Host of the request is not an address or localhost")
	case OtherSite(r):
		return errors.New("this is not for other sites")
	}
	return nil
}

// Name returns a host without its port.
func Name(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		return name
	}
	return host
}
