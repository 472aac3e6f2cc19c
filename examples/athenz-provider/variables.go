package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
)

const athenzs, cluster, here = "Athenz", "cluster configuration", "this program" // where names come from

var variables = []variable{
	{"PROVIDER_SERVICE", "", "name of the provider's service, such as k8s.admin.athenz-callback; required", athenzs, isService},
	{"DNS_SUFFIX", "svc.cluster.local", "suffix of the provider's DNS names", athenzs, isDNSName},
	{"ADMIN_DOMAIN", "", "domain of the system namespaces: kube-system is ADMIN_DOMAIN.kube-system", cluster, isDomain},
	{"SYSTEM_NAMESPACES", "", "system namespaces beside those that begin with kube-, with commas between", cluster, areLabels},
	{
		"SPIFFE_TRUST_DOMAIN", "", "trust domain of SPIFFE IDs with a namespace, spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.SERVICE; " +
			"not set: spiffe://DOMAIN/sa/SERVICE", here, isTrustDomain,
	},
	{"PROVIDER_ADDR", ":4443", "address of the callback that ZTS calls, or off", here, isAddr},
	{"SIGNING_ADDR", ":4444", "address of the signing service that the nodes call, or off", here, isAddr},
	{"CERT_FILE", "", "certificate with its intermediates, in PEM, whose common name is PROVIDER_SERVICE; required without SERVICE_KEY_DIR", here, nil},
	{"KEY_FILE", "", "its key, in PEM; required without SERVICE_KEY_DIR", here, nil},
	{
		"SERVICE_KEY_DIR", "", "folder with service.key, the key that PROVIDER_SERVICE has registered at Athenz, in PEM, and service.version, its ID, " +
			"such as /var/tls/athenz/private: the certificate is obtained from ZTS with it, and renewed, in the place of CERT_FILE and KEY_FILE", athenzs, nil,
	},
	{"ZTS_ENDPOINT", "", "URL of ZTS, without a path; required with SERVICE_KEY_DIR", cluster, isAPI},
	{"SERVER_CA_CERT", "", "file of the CA certificates of ZTS itself, in PEM; required with PROVIDER_ADDR or SERVICE_KEY_DIR", athenzs, nil},
	{"SERVICE_CA_CERT", "", "file of the CA certificates of what ZTS issues, and of the nodes, in PEM; required", cluster, nil},
	{"ZTS_NAME", "", "common name of ZTS, such as zts.example.cloud; required with PROVIDER_ADDR", here, isCommonName},
	{"NODE_NAMES", "", "common names of the nodes that may have documents signed, such as k8s.admin.k8s-node, with commas between; required with SIGNING_ADDR", here, isCommonName},
	{"KUBERNETES_API", "", "URL of the API server; not set: that of the cluster that the program runs in", here, isAPI},
	{
		"USED_DOCUMENTS", "", "ConfigMap, as NAMESPACE/NAME, in which the replicas of the provider note which documents were used; " +
			"not set: each replica remembers that by itself", here, isObject,
	},
	{"PRIVATE_KEY_DIR", "/var/keys/private", "folder of the private keys, in PEM, one file for each version: SECRET_NAME.v1 and so on", here, nil},
	{"PUBLIC_KEY_DIR", "/var/keys/public", "folder of the public keys, likewise", here, nil},
	{"SECRET_NAME", "athenz-init-secret", "name of the key", here, isDNSName},
	{"TOKEN_EXPIRY", "5m", "lifetime of a document, at most 15m", athenzs, isExpiry},
	{"HEALTH_ADDR", "127.0.0.1:9080", "address of /ready, /live and /metrics, or off", here, isAddr},
	{"LOG_LEVEL", "info", "least level of what is logged: debug, info, warn, error", athenzs, oneOf("debug", "info", "warn", "error")},
}

func isCommonName(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.TrimSpace(name); name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, ": ") {
			return errors.New("set it to a common name in lower case, such as k8s.admin.k8s-node")
		}
	}
	return nil
}

func isExpiry(s string) error {
	if d, err := time.ParseDuration(s); err != nil || d < time.Second || d > 15*time.Minute {
		return errors.New("set it to a time from 1s to 15m")
	}
	return nil
}

func isObject(s string) error {
	if namespace, name, _ := strings.Cut(s, "/"); !isLabel(namespace) || isDNSName(name) != nil {
		return errors.New("set it to the namespace and the name of a ConfigMap, such as athenz/used-documents")
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

// isAPI lets http through for an address of this machine.
func isAPI(s string) error {
	u, err := url.Parse(s)
	if err != nil || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return errors.New("set it to a URL without a path, such as https://kubernetes.default.svc")
	}
	if ip, err := netip.ParseAddr(u.Hostname()); u.Scheme != "https" && (u.Scheme != "http" || err != nil || !ip.IsLoopback()) {
		return errors.New("set it to an https URL; http is for addresses of this machine, such as 127.0.0.1")
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
