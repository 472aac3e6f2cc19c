package workloadapi

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"runtime"
	"strings"

	"github.com/svidkit/svidkit/internal/redact"
)

// address says where a Workload API is served.
type address struct{ network, target string }

// String returns the address as a URI, in the form with "//".
func (a address) String() string {
	if a.network == "tcp" {
		return "tcp://" + a.target
	}
	return (&url.URL{Scheme: "unix", Path: "/" + strings.TrimPrefix(a.target, "/")}).String()
}

// parseAddress parses the address of a Workload API in the form of the SPIFFE Workload Endpoint standard, section 4.
// The scheme may be in upper case, and the path percent-encoded, as in any URI. Host names are refused: unlike an IP
// address, a name does not say which network protects the server. The error suggests a valid address of a socket if
// it is clear which one was meant.
func parseAddress(s string) (address, error) {
	a, err := readAddress(s)
	if err == nil {
		return a, nil
	}
	err = fmt.Errorf("workloadapi: address %q: %w", redact.Clip(s, 128), err)
	if corrected := correctAddress(s); corrected != "" {
		err = fmt.Errorf("%w; write %s", err, corrected)
	}
	return address{}, err
}

func readAddress(s string) (address, error) {
	u, err := url.Parse(s)
	switch {
	case s == "":
		return address{}, errors.New("it is empty; configure one, or set " + SocketEnv +
			" to something like unix:///run/spire/agent/public/api.sock")
	case err != nil || u.Scheme == "":
		return address{}, errors.New(`it is no URI with the scheme "unix" or "tcp"`)
	case u.User != nil || strings.ContainsAny(s, "?#"):
		return address{}, errors.New("user information, a query and a fragment are not allowed")
	}
	switch u.Scheme {
	case "unix":
		return readUnix(u)
	case "tcp":
		return readTCP(u)
	case "npipe":
		return address{}, errors.New("named pipes are not in the standard; have the server listen on a Unix socket, " +
			"which Windows has too, or on a loopback port")
	}
	return address{}, fmt.Errorf(`the scheme is %q, not "unix" or "tcp"`, redact.Clip(u.Scheme, 32))
}

func readUnix(u *url.URL) (address, error) {
	target := u.Path
	switch {
	case u.Host != "":
		return address{}, fmt.Errorf("%q is in the place of a host, because a path begins with a slash of its own",
			redact.Clip(u.Host, 64))
	case target == "" || target[0] != '/':
		return address{}, errors.New("it has no absolute path; abstract sockets are not in the standard")
	case target[len(target)-1] == '/':
		return address{}, errors.New("the path has no name of a socket at its end")
	case strings.IndexByte(target, 0) >= 0:
		return address{}, errors.New("the path has a zero byte")
	}
	if runtime.GOOS == "windows" && len(target) > 2 && target[2] == ':' {
		target = target[1:] // a drive, as in unix:///C:/run/a.sock
	}
	return address{"unix", target}, nil
}

func readTCP(u *url.URL) (address, error) {
	ap, err := netip.ParseAddrPort(u.Host)
	switch {
	case u.Path != "":
		return address{}, errors.New("nothing may follow the port, not even a slash")
	case err != nil || ap.Port() == 0 || ap.Addr().Zone() != "":
		return address{}, errors.New(`after "tcp://" it needs an IP address without a zone, and a port from 1 to ` +
			"65535; an IPv6 address is in brackets")
	}
	return address{"tcp", ap.String()}, nil
}

// correctAddress returns the address of a Unix socket that s was probably meant to be, or "".
func correctAddress(s string) string {
	s = strings.Trim(s, " \t\r\n\"'")
	rest, unix := strings.CutPrefix(s, "unix:")
	if !unix && !strings.HasPrefix(s, "/") {
		return ""
	}
	rest = strings.TrimLeft(strings.TrimPrefix(strings.TrimPrefix(rest, "//"), "localhost"), "/")
	a, err := readAddress("unix:///" + rest)
	if err != nil || strings.HasPrefix(rest, "@") { // an abstract socket
		return ""
	}
	return a.String()
}
