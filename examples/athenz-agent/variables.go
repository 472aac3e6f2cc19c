package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
)

const athenzs, cluster, here = "Athenz", "cluster configuration", "this program" // where names come from

var variables = []variable{
	{"PROVIDER_SERVICE", "", "name of the provider's service, such as k8s.admin.athenz-callback; required", athenzs, isService},
	{"DNS_SUFFIX", "svc.cluster.local", "suffix of the provider's DNS names", athenzs, isDNSName},
	{"ADMIN_DOMAIN", "", "domain of the system namespaces: kube-system is ADMIN_DOMAIN.kube-system", cluster, isDomain},
	{"SYSTEM_NAMESPACES", "", "system namespaces beside those that begin with kube-, with commas between", cluster, areLabels},
	{"ZTS_ENDPOINT", "", "URL of ZTS, without a path; required", cluster, isHTTPS},
	{"SERVER_CA_CERT", "", "file of the CA certificates of ZTS itself, in PEM; required", athenzs, nil},
	{"SERVICE_CA_CERT", "", "file of the CA certificates of what ZTS issues, and of the nodes, in PEM; required", cluster, nil},
	{
		"SPIFFE_TRUST_DOMAIN", "", "trust domain of SPIFFE IDs with a namespace, spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.SERVICE; " +
			"not set: spiffe://DOMAIN/sa/SERVICE", here, isTrustDomain,
	},
	{"SIGNING_ENDPOINT", "", "URL of the signing service, without a path; required", here, isHTTPS},
	{"CERT_FILE", "", "certificate of the node with its intermediates, in PEM; required", here, nil},
	{"KEY_FILE", "", "key of the node, in PEM; required", here, nil},
	{"KUBELET_ENDPOINT", "https://127.0.0.1:10250", "URL of the kubelet's API", here, isAPI},
	{"VOLUMES_DIR", "/var/athenz/volumes", "folder with a folder for each volume", here, nil},
	{"AGENT_SOCKET", "/var/athenz/agent/agent.sock", "Unix socket that is mounted into pods", here, isAbsolute},
	{"HEALTH_ADDR", "127.0.0.1:9080", "address of /ready, /live and /metrics, or off", here, isAddr},
	{"LOG_LEVEL", "info", "least level of what is logged: debug, info, warn, error", athenzs, oneOf("debug", "info", "warn", "error")},
}

func isAbsolute(s string) error {
	if !filepath.IsAbs(s) {
		return errors.New("set it to a path that begins with a slash")
	}
	return nil
}

func isService(s string) error {
	if _, err := athenzname.ParseService(s); err != nil {
		return errors.New("set it to the name of a service with its domain in lower case, such as k8s.admin.athenz-callback")
	}
	return nil
}

func isDNSName(s string) error {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return errors.New("set it to a DNS name, such as svc.cluster.local")
		}
	}
	return nil
}

// isLabel reports whether s is a label of a DNS name, which is the name of a namespace, too.
func isLabel(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && s[0] != '-' && s[len(s)-1] != '-'
}

func isDomain(s string) error {
	if _, err := (athenzname.Mapping{AdminDomain: s}).Domain("kube-system"); err != nil {
		return errors.New("set it to a domain in lower case, such as k8s.admin")
	}
	return nil
}

func areLabels(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if !isLabel(strings.TrimSpace(name)) {
			return errors.New("set it to names of namespaces with commas between")
		}
	}
	return nil
}

func isTrustDomain(s string) error {
	if _, err := spiffe.ParseTrustDomain(s); err != nil {
		return errors.New("set it to the name of a trust domain, such as athenz.io")
	}
	return nil
}

// isAPI is isHTTPS that lets http through for an address of this machine.
func isAPI(s string) error {
	if u, err := url.Parse(s); err == nil && u.Scheme == "http" {
		if ip, err := netip.ParseAddr(u.Hostname()); err == nil && ip.IsLoopback() {
			return nil
		}
	}
	if err := isHTTPS(s); err != nil {
		return fmt.Errorf("%w; http is for addresses of this machine, such as 127.0.0.1", err)
	}
	return nil
}

func isHTTPS(s string) error {
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return errors.New("set it to an https URL without a path, such as https://zts.athenz.svc:4443")
	}
	return nil
}

const off = "off" // in the place of an address

func isAddr(s string) error {
	_, port, err := net.SplitHostPort(s)
	if n, bad := strconv.ParseUint(port, 10, 16); s != off && (err != nil || bad != nil || n > 65535) {
		return errors.New("set it to HOST:PORT with a number for the port, such as 127.0.0.1:9080, or to off")
	}
	return nil
}

// oneOf returns a check for choices.
func oneOf(choices ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(choices, s) {
			return fmt.Errorf("set it to one of %s", strings.Join(choices, ", "))
		}
		return nil
	}
}
