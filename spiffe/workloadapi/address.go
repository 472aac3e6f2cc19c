package workloadapi

import (
	"fmt"
	"net/netip"
	"net/url"
	"runtime"
	"strings"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/redact"
)

// address says where a Workload API is served.
type address struct{ network, target string }

// addressError says why an address was refused, and suggests a valid one.
type addressError struct {
	input, reason string
	corrected     string // a valid address, or "" if it is not clear what was meant
}

func (e *addressError) Error() string {
	s := fmt.Sprintf("workloadapi: address %q: %s", redact.Clip(e.input, 128), e.reason)
	if e.corrected != "" {
		s += "; write " + e.corrected
	}
	return s
}

// parseAddress parses the address of a Workload API in the form of the SPIFFE Workload Endpoint standard, section 4.
// The scheme may be in upper case, and the path percent-encoded, as in any URI. Host names are refused: unlike an IP
// address, a name does not say which network protects the server. The error is an *addressError.
func parseAddress(s string) (address, error) {
	a, reason := readAddress(s)
	if reason != "" {
		return address{}, &addressError{s, reason, correctAddress(s)}
	}
	return a, nil
}

// String returns the address as a URI, in the form with "//".
func (a address) String() string {
	switch {
	case a.network == "tcp":
		return "tcp://" + a.target
	case a.target[0] != '/': // a drive
		return "unix:///" + escapePath(a.target)
	}
	return "unix://" + escapePath(a.target)
}

// readAddress returns the reason why s is refused, or "".
func readAddress(s string) (a address, reason string) {
	scheme, rest, _ := strings.Cut(s, ":")
	switch {
	case s == "":
		return a, "it is empty; configure one, or set " + SocketEnv +
			" to something like unix:///run/spire/agent/public/api.sock"
	case strings.TrimSpace(s) != s:
		return a, "there is white space around it"
	case unquoted(s) != s:
		return a, "there are quotes around it, which are no part of the value"
	case scheme == s || !isScheme(scheme):
		return a, `there is no scheme; it is "unix" or "tcp"`
	}
	switch strings.ToLower(scheme) {
	case "unix":
		return readUnix(rest)
	case "tcp":
		return readTCP(rest)
	case "npipe":
		return a, "named pipes are not in the standard, and Go's standard library does not speak to them; " +
			"have the server listen on a Unix socket, which Windows has too, or on a loopback port"
	case "unix-abstract":
		return a, noAbstract
	}
	return a, fmt.Sprintf(`the scheme is %q, not "unix" or "tcp"`, redact.Clip(scheme, 32))
}

// unquoted returns s without the quotes that an env file or a template left around it.
func unquoted(s string) string {
	if n := len(s); n > 1 && s[0] == s[n-1] && (s[0] == '"' || s[0] == '\'') {
		return s[1 : n-1]
	}
	return s
}

func isScheme(s string) bool {
	for i := range len(s) {
		c := s[i] | 0x20
		if letter := 'a' <= c && c <= 'z'; !letter && (i == 0 || !strings.ContainsRune("0123456789+-.", rune(s[i]))) {
			return false
		}
	}
	return s != "" && s != "localhost"
}

const noAbstract = "abstract sockets are not in the standard, and have no permissions; have the server listen on " +
	"a path"

// readUnix parses rest, the text after "unix:".
func readUnix(rest string) (a address, reason string) {
	host, path := "", rest
	if after, ok := strings.CutPrefix(rest, "//"); ok {
		host, _, _ = strings.Cut(after, "/")
		path = after[len(host):]
	}
	target, err := url.PathUnescape(path)
	switch {
	case isAbstract(rest):
		return a, noAbstract
	case strings.ContainsAny(rest, "?#"):
		return a, "a query or fragment is not allowed"
	case host != "":
		return a, fmt.Sprintf("%q is in the place of a host, because a path begins with a slash of its own",
			redact.Clip(host, 64))
	case path == "":
		return a, "there is no path"
	case path[0] != '/':
		return a, "the path is relative"
	case path[len(path)-1] == '/':
		return a, "the path has no name of a socket at its end"
	case err != nil:
		return a, "the path has a percent sign that is not followed by two hexadecimal digits"
	case strings.IndexByte(target, 0) >= 0:
		return a, "the path has a zero byte"
	case escapePath(path) != strings.ReplaceAll(path, "%", "%25"):
		return a, "the path has characters that a URI writes percent-encoded"
	}
	if runtime.GOOS == "windows" && len(target) > 2 && target[2] == ':' {
		target = target[1:] // a drive, as in unix:///C:/run/a.sock
	}
	return address{"unix", target}, ""
}

// isAbstract reports whether rest, the text after "unix:", names an abstract socket. Tools write these with @ or %00.
func isAbstract(rest string) bool {
	rest = strings.TrimPrefix(rest, "//")
	return strings.HasPrefix(rest, "@") || strings.HasPrefix(rest, "%00") || strings.HasPrefix(rest, "\x00")
}

// escapePath percent-encodes the bytes that RFC 3986 reserves or forbids in a path.
func escapePath(s string) string {
	const plain = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,;=:@/"
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c < utf8.RuneSelf && strings.IndexByte(plain, c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// readTCP parses rest, the text after "tcp:".
func readTCP(rest string) (a address, reason string) {
	after, ok := strings.CutPrefix(rest, "//")
	ap, err := netip.ParseAddrPort(after)
	switch {
	case !ok:
		return a, `"//" is missing after the scheme`
	case strings.ContainsAny(after, "/?#"):
		return a, "nothing may follow the port, not even a slash"
	case strings.Contains(after, "@"):
		return a, "user information is not allowed"
	case err != nil || ap.Port() == 0:
		return a, "it has no IP address and port from 1 to 65535; an IPv6 address is in brackets, and an IPv4 " +
			"address and a name are not"
	case ap.Addr().Zone() != "":
		return a, "the IP address has a zone"
	}
	return address{"tcp", ap.String()}, ""
}

// correctAddress returns the Unix socket address that s was probably meant to be, or "".
func correctAddress(s string) string {
	s = strings.TrimSpace(unquoted(strings.TrimSpace(s)))
	rest, unix := strings.CutPrefix(s, "unix:")
	if isAbstract(rest) || !unix && !strings.HasPrefix(s, "/") {
		return ""
	}
	rest = strings.TrimPrefix(strings.TrimPrefix(rest, "//"), "localhost")
	a, reason := readAddress("unix:///" + strings.TrimLeft(rest, "/"))
	if reason != "" {
		return ""
	}
	return a.String()
}
