// Package loopback recognizes requests from programs on this machine. A page of another site in a browser on this
// machine can also send requests to loopback: for localhost, or for the site's own name, if its DNS points to
// loopback (DNS rebinding). Such a request has the site's name as its Host, or another Origin.
package loopback

import (
	"errors"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// Reached reports whether a request arrived at a loopback address. It is false if unknown, as on a Unix socket.
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

// OtherSite reports whether a browser says that a page of another site, or of another port, caused the request: such
// a page can send requests to localhost, but does not see the answers. Old browsers say it only in the Origin of some
// requests. Other clients never say it.
func OtherSite(r *http.Request) bool {
	site, origin := r.Header.Get("Sec-Fetch-Site"), r.Header.Get("Origin")
	if site == "" && origin != "" {
		u, err := url.Parse(origin)
		return err != nil || u.Host != r.Host
	}
	return site != "" && site != "same-origin" && site != "none"
}

// Local returns nil for a request from a program on this machine, and otherwise the reason to refuse it. Requests on
// a Unix socket are accepted, as the permissions of the socket decide.
func Local(r *http.Request) error {
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil { // a Unix socket has no address
		if ip, err := netip.ParseAddr(host); err != nil || !ip.IsLoopback() {
			return errors.New("this is for clients on the same host")
		}
	}
	switch _, network := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); {
	case network && !Reached(r): // a proxy in the pod may forward outside requests
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
