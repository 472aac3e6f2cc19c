package workloadapi

import (
	"fmt"
	"net/netip"
	"net/url"
	"runtime"
	"strconv"
	"strings"
	"unicode/utf8"
)

// address says where a Workload API is served.
type address struct{ network, target string }

// addressError says why an address was refused, and what was probably meant.
type addressError struct {
	input     string
	reason    string
	corrected string // a valid address, or "" if there is no telling
}

func (e *addressError) Error() string {
	in, cut := e.input, ""
	if len(in) > 128 {
		in, cut = in[:128], "…"
	}
	s := fmt.Sprintf("workloadapi: address %q%s: %s", in, cut, e.reason)
	if e.corrected != "" {
		s += "; write " + e.corrected
	}
	return s
}

// parseAddress parses the address of a Workload API as the standard has it (WEP-11 to WEP-13). The scheme
// may be in upper case, and the path percent-encoded, as in any URI. Host names are refused, as a name
// is not a place that the network protects. On Windows the path may begin with a drive. The error is an
// *addressError.
func parseAddress(s string) (address, error) {
	a, e := guessAddress(s)
	if e == nil {
		return a, nil
	}
	e.input = s
	for range 5 { // a guess may have another mistake
		c, bad := guessAddress(e.corrected)
		if bad == nil {
			e.corrected = c.String()
			return address{}, e
		}
		e.corrected = bad.corrected
	}
	e.corrected = ""
	return address{}, e
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

// guessAddress returns an error whose corrected address is a guess, and may have mistakes of its own.
func guessAddress(s string) (address, *addressError) {
	if s == "" {
		return address{}, &addressError{reason: "it is empty; configure one, or set " + SocketEnv + " to something like unix:///run/spire/agent/public/api.sock"}
	}
	if t := strings.TrimSpace(s); t != s {
		return address{}, &addressError{reason: "there is white space around it", corrected: t}
	}
	scheme, rest, ok := strings.Cut(s, ":")
	if !ok || !isScheme(scheme) {
		return address{}, noScheme(s)
	}
	switch strings.ToLower(scheme) {
	case "unix":
		return parseUnix(rest)
	case "tcp":
		return parseTCP(rest)
	case "npipe":
		return address{}, &addressError{reason: "named pipes are not in the standard, and Go's standard library does not speak to them; have the server listen on a Unix socket, which Windows has too, or on a loopback port"}
	case "unix-abstract":
		return address{}, &addressError{reason: "abstract sockets are not in the standard, and have no permissions; use a path"}
	case "localhost":
		return address{}, &addressError{reason: `there is no scheme; it is "unix" or "tcp"`, corrected: "tcp://127.0.0.1:" + rest}
	}
	return address{}, &addressError{reason: fmt.Sprintf(`the scheme is %q, not "unix" or "tcp"`, clip(scheme, 32)), corrected: "tcp:" + rest}
}

func isScheme(s string) bool {
	for i := range len(s) {
		c := s[i] | 0x20
		if letter := 'a' <= c && c <= 'z'; !letter && (i == 0 || !strings.ContainsRune("0123456789+-.", rune(s[i]))) {
			return false
		}
	}
	return s != ""
}

func noScheme(s string) *addressError {
	e := &addressError{reason: `there is no scheme; it is "unix" or "tcp"`}
	switch _, err := netip.ParseAddrPort(s); {
	case err == nil:
		e.corrected = "tcp://" + s
	case strings.HasPrefix(s, "/"):
		e.corrected = "unix://" + s
	case strings.Contains(s, "/"):
		e.corrected = "unix:///" + s
	}
	return e
}

// parseUnix parses what comes after "unix:".
func parseUnix(rest string) (address, *addressError) {
	refuse := func(reason, corrected string) (address, *addressError) {
		return address{}, &addressError{reason: reason, corrected: corrected}
	}
	if i := strings.IndexAny(rest, "?#"); i >= 0 {
		return refuse("a query or fragment is not allowed", "unix:"+rest[:i])
	}
	path := rest
	if after, ok := strings.CutPrefix(rest, "//"); ok {
		host := after
		if i := strings.IndexByte(after, '/'); i >= 0 {
			host, path = after[:i], after[i:]
		} else {
			path = ""
		}
		switch {
		case host == "localhost":
			return refuse("a host is not allowed", "unix://"+path)
		case host != "":
			return refuse(fmt.Sprintf("%q is in the place of a host, because a path begins with a slash of its own", clip(host, 64)), "unix:///"+after)
		}
	}
	switch {
	case path == "":
		return refuse("there is no path", "")
	case path[0] != '/':
		return refuse("the path is relative", "unix:///"+path)
	case path[len(path)-1] == '/':
		return refuse("the path has no name of a socket at its end", "")
	}
	target, err := url.PathUnescape(path)
	switch {
	case err != nil:
		return refuse("the path has a percent sign that is not followed by two hexadecimal digits", "unix://"+escapePath(path))
	case strings.IndexByte(target, 0) >= 0:
		return refuse("the path has a zero byte", "")
	case !isPath(path):
		return refuse("the path has characters that a URI writes percent-encoded", "unix://"+escapePath(target))
	}
	if runtime.GOOS == "windows" && len(target) > 2 && target[2] == ':' {
		target = target[1:] // a drive, as in unix:///C:/run/a.sock
	}
	return address{"unix", target}, nil
}

const unreserved = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"

// isPathByte reports whether RFC 3986 lets c stand for itself in a path.
func isPathByte(c byte) bool {
	return c < utf8.RuneSelf && strings.IndexByte(unreserved+"!$&'()*+,;=:@/", c) >= 0
}

func isPath(s string) bool {
	for i := range len(s) {
		if s[i] != '%' && !isPathByte(s[i]) {
			return false
		}
	}
	return true
}

func escapePath(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; isPathByte(c) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// parseTCP parses what comes after "tcp:".
func parseTCP(rest string) (address, *addressError) {
	refuse := func(reason, corrected string) (address, *addressError) {
		if corrected != "" {
			corrected = "tcp://" + corrected
		}
		return address{}, &addressError{reason: reason, corrected: corrected}
	}
	after, ok := strings.CutPrefix(rest, "//")
	if !ok {
		return refuse(`"//" is missing after the scheme`, strings.TrimLeft(rest, "/"))
	}
	if i := strings.IndexAny(after, "/?#"); i >= 0 {
		return refuse("nothing may follow the port, not even a slash", after[:i])
	}
	if i := strings.LastIndexByte(after, '@'); i >= 0 {
		return refuse("user information is not allowed", after[i+1:])
	}
	colon := strings.LastIndexByte(after, ':')
	if colon < 0 || strings.HasSuffix(after, "]") {
		return refuse("there is no port", "")
	}
	host, port := after[:colon], after[colon+1:]
	inside, bracket := strings.CutPrefix(host, "[")
	if bracket {
		if inside, ok = strings.CutSuffix(inside, "]"); !ok {
			return refuse("the bracket is not closed", "")
		}
	}
	ip, err := netip.ParseAddr(inside)
	switch {
	case inside == "":
		return refuse("there is no host", "")
	case inside == "localhost":
		return refuse("the host is a name, and has to be an IP address", "127.0.0.1:"+port)
	case err != nil:
		return refuse("the host is not an IP address", "")
	case ip.Zone() != "":
		return refuse("the IP address has a zone", "")
	case ip.Is4() && bracket:
		return refuse("an IPv4 address has no brackets", inside+":"+port)
	case !ip.Is4() && !bracket:
		return refuse("an IPv6 address needs brackets", "["+inside+"]:"+port)
	}
	for i := range len(port) {
		if port[i] < '0' || port[i] > '9' {
			return refuse("the port is not a number", "")
		}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return refuse("the port is not a number from 1 to 65535", "")
	}
	return address{"tcp", netip.AddrPortFrom(ip, uint16(n)).String()}, nil
}
