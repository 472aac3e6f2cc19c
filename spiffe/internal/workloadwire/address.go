package workloadwire

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"runtime"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/internal/redact"
)

// Address says where an API is served: on a Unix socket or by TCP.
type Address struct{ Network, Target string }

// String returns the address as a URI, in the form with "//".
func (a Address) String() string {
	if a.Network == "tcp" {
		return "tcp://" + a.Target
	}
	return (&url.URL{Scheme: "unix", Path: "/" + strings.TrimPrefix(a.Target, "/")}).String()
}

// ParseAddress parses for a package the value of the environment variable env: the address of a Workload API (SPIFFE
// Workload Endpoint, section 4), or with isName that of a Broker API (SPIFFE Broker Endpoint, section 4). The scheme may
// be in upper case, and the path percent-encoded, as in any URI. Without isName, host names are refused: unlike an IP
// address, a name does not say which network protects the server. The error suggests a valid address of a socket if it
// is clear which one was meant.
func ParseAddress(pkg, s, env string, isName func(host string) bool) (Address, error) {
	a, err := readAddress(s, env, isName)
	if err == nil {
		return a, nil
	}
	err = fmt.Errorf("%s: address %q: %w", pkg, redact.Clip(s, 128), err)
	if corrected := correctAddress(s); corrected != "" {
		err = fmt.Errorf("%w; write %s", err, corrected)
	}
	return Address{}, err
}

func readAddress(s, env string, isName func(host string) bool) (Address, error) {
	u, err := url.Parse(s)
	switch {
	case s == "":
		return Address{}, errors.New("it is empty; configure one, or set " + env +
			" to something like unix:///run/spire/agent/public/api.sock")
	case err != nil || u.Scheme == "":
		return Address{}, errors.New(`it is no URI with the scheme "unix" or "tcp"`)
	case u.User != nil || strings.ContainsAny(s, "?#"):
		return Address{}, errors.New("user information, a query and a fragment are not allowed")
	}
	switch u.Scheme {
	case "unix":
		return readUnix(u)
	case "tcp":
		return readTCP(u, isName)
	case "npipe":
		return Address{}, errors.New("named pipes are not in the standard; have the server listen on a Unix socket, " +
			"which Windows has too, or on a loopback port")
	}
	return Address{}, fmt.Errorf(`the scheme is %q, not "unix" or "tcp"`, redact.Clip(u.Scheme, 32))
}

func readUnix(u *url.URL) (Address, error) {
	target := u.Path
	switch {
	case u.Host != "":
		return Address{}, fmt.Errorf("%q is in the place of a host, because a path begins with a slash of its own",
			redact.Clip(u.Host, 64))
	case target == "" || target[0] != '/':
		return Address{}, errors.New("it has no absolute path; abstract sockets are not in the standard")
	case target[len(target)-1] == '/':
		return Address{}, errors.New("the path has no name of a socket at its end")
	case strings.IndexByte(target, 0) >= 0:
		return Address{}, errors.New("the path has a zero byte")
	}
	if runtime.GOOS == "windows" && len(target) > 2 && target[2] == ':' {
		target = target[1:] // a drive, as in unix:///C:/run/a.sock
	}
	return Address{"unix", target}, nil
}

func readTCP(u *url.URL, isName func(host string) bool) (Address, error) {
	ap, err := netip.ParseAddrPort(u.Host)
	host, port, _ := net.SplitHostPort(u.Host)
	n, errPort := strconv.ParseUint(port, 10, 16)
	switch {
	case u.Path != "":
		return Address{}, errors.New("nothing may follow the port, not even a slash")
	case isName != nil && err != nil && isName(host) && n > 0 && errPort == nil:
		return Address{"tcp", strings.ToLower(u.Host)}, nil
	case err != nil || ap.Port() == 0 || ap.Addr().Zone() != "":
		return Address{}, errors.New(`after "tcp://" it needs an IP address without a zone (of a Broker API, a DNS name ` +
			"will do), and a port from 1 to 65535; an IPv6 address is in brackets")
	}
	return Address{"tcp", ap.String()}, nil
}

// correctAddress returns the address of a Unix socket that s was probably meant to be, or "".
func correctAddress(s string) string {
	s = strings.Trim(s, " \t\r\n\"'")
	rest, unix := strings.CutPrefix(s, "unix:")
	if !unix && !strings.HasPrefix(s, "/") {
		return ""
	}
	rest = strings.TrimLeft(strings.TrimPrefix(strings.TrimPrefix(rest, "//"), "localhost"), "/")
	a, err := readAddress("unix:///"+rest, "", nil)
	if err != nil || strings.HasPrefix(rest, "@") { // an abstract socket
		return ""
	}
	return a.String()
}
