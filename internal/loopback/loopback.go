// Package loopback recognizes requests of programs on this machine. A page of another site in a browser on this
// machine can send requests to loopback, too: for localhost, or for the site's own name, made to lead to
// loopback (DNS rebinding). Such a request has that name as its Host, or another Origin.
package loopback

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// Reached reports whether a request came in at a loopback address. It is false if the server does not say, as
// on a Unix socket.
func Reached(r *http.Request) bool {
	at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && at.IP.IsLoopback()
}

// Host reports whether a host, with or without a port, is an IP address or localhost, which DNS cannot redirect.
func Host(host string) bool {
	name := Name(host)
	_, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil || strings.EqualFold(name, "localhost")
}

// OtherSite reports whether a browser says that a page of another site, or of another port, has caused the
// request: such a page can send requests to localhost, but does not see the answers. Old browsers say it only
// by the Origin of some requests. Other clients never say it.
func OtherSite(r *http.Request) bool {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	if site == "" && origin != "" {
		u, err := url.Parse(origin)
		return err != nil || u.Host != r.Host
	}
	return site != "" && site != "same-origin" && site != "none"
}

// Local returns nil for a request of a program on this machine, and otherwise why it is refused: for what only
// such programs may ask for. A request on a Unix socket is accepted, as the permissions of the socket decide.
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
