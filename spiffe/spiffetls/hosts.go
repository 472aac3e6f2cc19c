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

// hosts holds a client's policies by address. It never changes.
type hosts map[hostport]spiffe.PolicySource

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

// newHosts returns the policies of a [Config].
func newHosts(policies map[string]spiffe.PolicySource) (hosts, error) {
	if policies == nil {
		return nil, nil
	}
	if len(policies) == 0 {
		return nil, errors.New("Config.Hosts has no host")
	}
	h := make(hosts, len(policies))
	for _, key := range slices.Sorted(maps.Keys(policies)) {
		at, err := keyOf(key)
		if err == nil {
			err = spiffe.CheckPolicySource(policies[key])
		}
		if err != nil {
			return nil, fmt.Errorf("hosts: %q: %w", key, err)
		}
		h[at] = policies[key]
	}
	return h, nil
}

// keyOf parses a key of Hosts. A key that no address could match is an error.
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
	n, err := strconv.ParseUint(at.port, 10, 16)
	if at.port != "" && (err != nil || n == 0 || strconv.FormatUint(n, 10) != at.port) {
		return at, fmt.Errorf("the port is %.20q, want 1 to 65535", at.port)
	}
	return at, nil
}

// policy returns the policy for an address.
func (h hosts) policy(at hostport) (spiffe.PolicySource, error) {
	if allow, ok := h[at]; ok {
		return allow, nil
	}
	if allow, ok := h[hostport{host: at.host}]; ok {
		return allow, nil
	}
	return nil, fmt.Errorf("%.300q is no known host: %w; add it to Hosts", at.String(), spiffe.ErrDenied)
}

// known returns an error for an address without a policy. Without hosts all addresses are known.
func (h hosts) known(addr string) error {
	if h == nil {
		return nil
	}
	if _, err := h.policy(addressOf(addr)); err != nil {
		return fmt.Errorf("spiffetls: dial: %w", err)
	}
	return nil
}

// allow checks a server against the policy for its address. The error is a [*spiffe.VerifyError].
func (h hosts) allow(at hostport, id spiffe.ID) error {
	if at == (hostport{}) {
		return &spiffe.VerifyError{Stage: "policy", ID: id, Err: fmt.Errorf(
			"the address that was dialled is not known, and the policy depends on it: %w", spiffe.ErrDenied)}
	}
	allow, err := h.policy(at)
	if err == nil {
		err = allow.Policy().Check(id)
	}
	if err != nil {
		return &spiffe.VerifyError{Stage: "policy", ID: id, Err: err}
	}
	return nil
}

// sessionsAt keeps the sessions of one address apart from those of other addresses with the same host, or with the
// same ServerName by configuration.
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
