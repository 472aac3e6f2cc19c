package spiffetls

import (
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
	fits := err == nil && ip.String() == at.host
	if err != nil {
		fits = at.host != "" && !strings.ContainsFunc(at.host, func(r rune) bool {
			return r <= ' ' || r >= 0x7f || strings.ContainsRune("*/?#@[]:", r)
		})
	}
	if _, err := strconv.ParseUint(at.port, 10, 16); at.port != "" && err != nil {
		fits = false
	}
	if !fits || at.String() != key && at.host != key {
		return at, errors.New("want a host, or a host and port, as it is dialled, in lower case and ASCII, " +
			"such as db.example:8443 or [::1]:8443, and not a URL")
	}
	return at, nil
}

// policy returns the policy for an address.
func (h hosts) policy(at hostport) (spiffe.PolicySource, error) {
	if at == (hostport{}) {
		return nil, fmt.Errorf("the address that was dialled is not known, and the policy depends on it: %w",
			spiffe.ErrDenied)
	}
	for _, key := range []hostport{at, {host: at.host}} {
		if allow, ok := h[key]; ok {
			return allow, nil
		}
	}
	return nil, fmt.Errorf("%.300q is no known host: %w; add it to Hosts", at.String(), spiffe.ErrDenied)
}

// known returns an error for an address without a policy. Without hosts all addresses are known.
func (h hosts) known(addr string) error {
	if h == nil {
		return nil
	}
	_, err := h.policy(addressOf(addr))
	return err
}

// allow checks a server against the policy for its address. The error is a [*spiffe.VerifyError].
func (h hosts) allow(at hostport, id spiffe.ID) error {
	allow, err := h.policy(at)
	if err == nil {
		err = allow.Policy().Check(id)
	}
	if err != nil {
		return &spiffe.VerifyError{Stage: "policy", ID: id, Err: err}
	}
	return nil
}
