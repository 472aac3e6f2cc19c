package spiffetls

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// Hosts is a client's policy by address: it says which servers may answer where. With one policy for all addresses,
// every server that it allows could answer for every other. Pass it as the policy of [Transport] or [NewDialer]:
//
//	spiffetls.Hosts{
//		"billing.example:8443": spiffe.AllowIDs(billing),
//		"db.example":           spiffe.AllowIDs(db), // any port
//	}
//
// A key is a dialled host and port, such as "[::1]:8443", or a host alone, for the ports without a key of their own.
// Names are in lower case and in ASCII; a dialled name in upper case is the same name, and one with a dot at the end is
// another. There are no wildcards. An address without a policy is refused before it is dialled, with an error that
// wraps [spiffe.ErrDenied].
//
// A connection or resumed session is used only for the host and port for which it was made. The policy is asked again
// whenever something is sent; if it no longer allows the server, nothing is sent and the connection is closed.
//
// The map is copied; the policies in it may be live. As a policy by itself it allows no peer, because servers,
// [ClientConfig] and a [spiffe.Verifier] do not know the dialled address. See [HostsFunc] for addresses that are not
// known when the program starts.
type Hosts map[string]spiffe.PolicySource

// Policy implements [spiffe.PolicySource]. It returns the zero Policy, which allows no peer.
func (Hosts) Policy() spiffe.Policy { return spiffe.Policy{} }

// HostsFunc is [Hosts] as a function that returns the policy for a host and port. The host is in lower case and without
// brackets; the port is empty if none was given to [Dialer.Handshake].
//
// The function is called for every connection, and again whenever something is sent, and must not block. An error, or
// no policy, refuses the server. An error that wraps [spiffe.ErrDenied] says that the host is unknown; other errors,
// such as that of a registry that is down, end no open connection.
func HostsFunc(policy func(host, port string) (spiffe.PolicySource, error)) spiffe.PolicySource {
	return hostsFunc(policy)
}

type hostsFunc func(host, port string) (spiffe.PolicySource, error)

// Policy implements [spiffe.PolicySource].
func (hostsFunc) Policy() spiffe.Policy { return spiffe.Policy{} }

// hostport is an address. The host has no brackets.
type hostport struct{ host, port string }

// addressOf splits a dialled address, which may have no port.
func addressOf(addr string) hostport {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(addr, "["), "]")
	}
	return hostport{strings.ToLower(host), port}
}

func (a hostport) String() string {
	if a.port == "" {
		return a.host
	}
	return net.JoinHostPort(a.host, a.port)
}

// hostsOf returns the function for a policy that depends on the address, or nil for other policies.
func hostsOf(allow spiffe.PolicySource) (hostsFunc, error) {
	switch allow := allow.(type) {
	case hostsFunc:
		if allow == nil {
			return nil, errors.New("the HostsFunc is nil")
		}
		return allow, nil
	case Hosts:
		table := make(map[hostport]spiffe.PolicySource, len(allow))
		for _, key := range slices.Sorted(maps.Keys(allow)) {
			at, err := keyOf(key)
			if err == nil {
				err = spiffe.CheckPolicySource(allow[key])
			}
			if _, nested := allow[key].(interface{ byHost() }); nested && err == nil {
				err = errors.New("the policy for a host cannot be a Hosts or HostsFunc itself")
			}
			if err != nil {
				return nil, fmt.Errorf("hosts: %q: %w", key, err)
			}
			table[at] = allow[key]
		}
		if len(table) == 0 {
			return nil, errors.New("Hosts has no host")
		}
		return func(host, port string) (spiffe.PolicySource, error) {
			if allow, ok := table[hostport{host, port}]; ok {
				return allow, nil
			}
			return table[hostport{host, ""}], nil
		}, nil
	}
	return nil, nil
}

func (Hosts) byHost()     {}
func (hostsFunc) byHost() {}

// keyOf parses a key of [Hosts]. A key that no address could match is an error.
func keyOf(key string) (hostport, error) {
	at := addressOf(key)
	ip, err := netip.ParseAddr(at.host)
	switch {
	case strings.Contains(key, "://"):
		return at, errors.New("want a host, or a host and port, such as db.example:8443, and not a URL")
	case at.host == "" || strings.ContainsAny(at.host, "*/?#@[] ") || err != nil && strings.Contains(at.host, ":"):
		return at, errors.New("want a host, or a host and port, such as db.example:8443")
	case err == nil && ip.String() != at.host:
		return at, fmt.Errorf("write the address as %s", ip)
	case at.String() != key && at.host != key:
		return at, fmt.Errorf("write it as %s", at)
	case strings.ContainsFunc(at.host, func(r rune) bool { return r >= 0x80 }):
		return at, errors.New("write the name in ASCII, as it is in DNS (xn--…)")
	}
	if n, err := strconv.ParseUint(at.port, 10, 16); at.port != "" && (err != nil || n == 0 || strconv.FormatUint(n, 10) != at.port) {
		return at, fmt.Errorf("the port is %.20q, want 1 to 65535", at.port)
	}
	return at, nil
}

// policyAt returns the policy for an address.
func (e *endpoint) policyAt(at hostport) (spiffe.PolicySource, error) {
	allow, err := e.hosts(at.host, at.port)
	switch {
	case err != nil:
		return nil, fmt.Errorf("the policy for %.300q: %w", at.String(), err)
	case allow == nil:
		return nil, fmt.Errorf("%.300q is no known host: %w; add it to Hosts", at.String(), spiffe.ErrDenied)
	}
	return allow, nil
}

// allowAt asks the policy for an address about a server. The error is a [*spiffe.VerifyError].
func (e *endpoint) allowAt(at hostport, id spiffe.ID) error {
	if at == (hostport{}) {
		return &spiffe.VerifyError{Stage: "policy", ID: id, Err: fmt.Errorf("the address that was dialled is not known, and the policy depends on it: %w", spiffe.ErrDenied)}
	}
	allow, err := e.policyAt(at)
	if err == nil {
		err = allow.Policy().Check(id)
	}
	if err != nil {
		return &spiffe.VerifyError{Stage: "policy", ID: id, Err: err}
	}
	return nil
}

// holds returns a function that reports whether the server of an open connection is still allowed at its
// address. As in a [Governor], a HostsFunc that fails decides nothing.
func (e *endpoint) holds(at hostport, id spiffe.ID) func() error {
	allowed := func() error { return e.allowAt(at, id) }
	if allow, err := e.policyAt(at); e.fixedHosts && err == nil { // it never changes, and what it returns may
		allowed = func() error {
			if err := allow.Policy().Check(id); err != nil {
				return &spiffe.VerifyError{Stage: "policy", ID: id, Err: err}
			}
			return nil
		}
	}
	return func() error {
		if err := allowed(); err != nil && !undecided(err) {
			return err
		}
		return nil
	}
}

// sessionsAt keeps the sessions of one address apart from those of others, which may have the same host, or the same
// ServerName by configuration.
type sessionsAt struct {
	tls.ClientSessionCache
	at string
}

// Get implements [tls.ClientSessionCache].
func (s sessionsAt) Get(key string) (*tls.ClientSessionState, bool) {
	return s.ClientSessionCache.Get(s.at + " " + key)
}

// Put implements [tls.ClientSessionCache].
func (s sessionsAt) Put(key string, cs *tls.ClientSessionState) {
	s.ClientSessionCache.Put(s.at+" "+key, cs)
}
