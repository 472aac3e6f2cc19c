package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// config is what the flags and the environment say.
type config struct {
	// The CA.
	trustDomain   spiffe.TrustDomain
	rootDir       string // of a plugged-in CA
	stateDir      string // of our own
	defaultTTL    time.Duration
	maxTTL        time.Duration
	rootTTL       time.Duration
	checkInterval time.Duration
	grace         int // percent
	jitter        bool
	rsaBits       int // of the root; 0: ECDSA P-256
	keepKey       bool
	constrain     bool
	multiRoot     bool
	backdate      time.Duration
	refreshHint   time.Duration
	propagation   time.Duration

	// Who may ask, and for what.
	kubernetes    bool
	kubeAPI       string
	namespace     string
	cluster       string
	audiences     list
	nodeAccounts  list
	cacerts       bool
	keepDNSNames  bool
	linkerdNS     string
	linkerdTTL    time.Duration
	linkerdSkew   time.Duration
	anyAudience   bool
	externalCA    string
	signer        string
	signerDomain  string
	externalRoots string

	// Limits and the record.
	concurrent, queue int
	rate, callerRate  float64
	auditLog          string
	auditSize         int64

	// Where to listen; empty: nowhere.
	istioAddr, linkerdAddr, bundleAddr, adminAddr string
	linkerdPlaintext                              bool
	dnsNames                                      list

	command
}

// command is what to do instead of serving.
type command struct {
	demo    bool
	status  bool
	once    string    // file with a signing request; - for standard input
	jwt     string    // audience
	id      spiffe.ID // for once and jwt; zero without them
	ttl     time.Duration
	rotate  bool
	taint   string
	revoke  string
	audit   string // audit log to verify; - for standard input
	verbose bool
}

// The values of EXTERNAL_CA.
const kubernetesRA = "ISTIOD_RA_KUBERNETES_API"

// environment are the variables that Istio's CA has, and the flags that mean the same. A flag wins.
var environment = []struct{ variable, flag string }{
	{"TRUST_DOMAIN", "trust-domain"},
	{"ROOT_CA_DIR", "root-ca-dir"},
	{"DEFAULT_WORKLOAD_CERT_TTL", "default-ttl"},
	{"MAX_WORKLOAD_CERT_TTL", "max-ttl"},
	{"CITADEL_SELF_SIGNED_CA_CERT_TTL", "root-ttl"},
	{"CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL", "root-check-interval"},
	{"CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE", "root-grace-percent"},
	{"CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR", "root-jitter"},
	{"CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE", "rsa-bits"},
	{"USE_CACERTS_FOR_SELF_SIGNED_CA", "use-cacerts"},
	{"ISTIO_MULTIROOT_MESH", "multi-root"},
	{"TOKEN_AUDIENCES", "token-audiences"},
	{"CA_TRUSTED_NODE_ACCOUNTS", "trusted-node-accounts"},
	{"CLUSTER_ID", "cluster-id"},
	{"POD_NAMESPACE", "namespace"},
	{"EXTERNAL_CA", "external-ca"},
	{"K8S_SIGNER", "k8s-signer"},
	{"CERT_SIGNER_DOMAIN", "cert-signer-domain"},
}

// flags returns the flags with the defaults of Istio's CA and Linkerd's identity service, where they
// have them.
func (c *config) flags(out io.Writer) *flag.FlagSet {
	fs := flag.NewFlagSet("ca", flag.ContinueOnError)
	fs.SetOutput(out)
	const day = 24 * time.Hour

	fs.TextVar(&c.trustDomain, "trust-domain", spiffe.MustParseTrustDomain("cluster.local"), "trust `domain` that is served")
	fs.StringVar(&c.rootDir, "root-ca-dir", "./etc/cacerts", "`folder` of a plugged-in CA; without files in it we make a CA of our own")
	fs.StringVar(&c.stateDir, "state-dir", "", "`folder` for our own CA, the audit log and the roots in PEM; set to nothing: a temporary one (default: one in the user's home for each trust domain)")
	fs.DurationVar(&c.defaultTTL, "default-ttl", day, "lifetime of a certificate whose request names none, or -max-ttl if that is less")
	fs.DurationVar(&c.maxTTL, "max-ttl", 90*day, "longest lifetime that may be asked for")
	fs.DurationVar(&c.rootTTL, "root-ttl", 3650*day, "lifetime of a self-signed root")
	fs.DurationVar(&c.checkInterval, "root-check-interval", time.Hour, "time between two looks at the end of the root, with -keep-key; 0 or less: the root is replaced by -rotate only")
	fs.IntVar(&c.grace, "root-grace-percent", 20, "`percent` of a root's life that are left when it is replaced, 1 to 50")
	fs.BoolVar(&c.jitter, "root-jitter", true, "look for the first time after a random part of the interval")
	fs.IntVar(&c.rsaBits, "rsa-bits", 0, "`size` of an RSA key for new roots: 2048, 3072 or 4096; 0: ECDSA P-256")
	fs.BoolVar(&c.keepKey, "keep-key", false, "renew the root with its own key, as Istio does, instead of a rotation in four steps")
	fs.BoolVar(&c.constrain, "constrain", false, "new roots may vouch for their own trust domain only (critical name constraints)")
	fs.BoolVar(&c.multiRoot, "multi-root", false, "the roots of a plugged-in CA may change while we run")
	fs.DurationVar(&c.backdate, "backdate", 2*time.Minute, "how far certificates are dated back, for peers whose clocks are slow")
	fs.DurationVar(&c.refreshHint, "refresh-hint", 5*time.Minute, "how often consumers should fetch the bundle")
	fs.DurationVar(&c.propagation, "propagation", 0, "how long a new root is in the bundle before it signs (default five times -refresh-hint, or -default-ttl with Istio's API, whose agents learn of roots when they renew)")

	fs.BoolVar(&c.kubernetes, "kubernetes", false, "keep the CA in a Secret and believe the service account tokens of this cluster")
	fs.StringVar(&c.kubeAPI, "kubernetes-api", "", "`URL` of the API server, such as that of kubectl proxy (default: that of the pod we run in)")
	fs.StringVar(&c.namespace, "namespace", "istio-system", "`namespace` of the Secret, and in our own name")
	fs.StringVar(&c.cluster, "cluster-id", "Kubernetes", "`name` of our cluster, as callers give it")
	fs.Var(&c.audiences, "token-audiences", "`audiences` of tokens for Istio's API (default istio-ca)")
	fs.Var(&c.nodeAccounts, "trusted-node-accounts", "service `accounts` (namespace/name,…) that may ask for the workloads of their node")
	fs.BoolVar(&c.cacerts, "use-cacerts", false, "keep our own CA in the Secret cacerts instead of istio-ca-secret")
	fs.BoolVar(&c.keepDNSNames, "keep-dns-names", false, "a caller with a certificate keeps its DNS names, as with Istio")
	fs.StringVar(&c.linkerdNS, "linkerd-namespace", "linkerd", "`namespace` of Linkerd's control plane, which is part of names")
	fs.DurationVar(&c.linkerdTTL, "linkerd-ttl", day, "lifetime of certificates for Linkerd, or what -max-ttl leaves if that is less")
	fs.DurationVar(&c.linkerdSkew, "linkerd-clock-skew", 20*time.Second, "how far certificates for Linkerd are dated back, and forward")
	fs.BoolVar(&c.anyAudience, "linkerd-any-audience", false, "take tokens for any audience from Linkerd's proxies, if their cluster has no others")
	fs.StringVar(&c.externalCA, "external-ca", "", "who signs instead of us: nobody, or "+kubernetesRA)
	fs.StringVar(&c.signer, "k8s-signer", "", "`name` of the signer with -external-ca")
	fs.StringVar(&c.signerDomain, "cert-signer-domain", "", "`domain` of the signers that a request may choose from")
	fs.StringVar(&c.externalRoots, "external-roots", "./etc/external-ca-cert/root-cert.pem", "`file` with the roots of the signers, with -external-ca")

	fs.IntVar(&c.concurrent, "concurrent", 64, "signings at the same time, audit record included; 0: no limit")
	fs.IntVar(&c.queue, "queue", 1024, "how many more wait")
	fs.Float64Var(&c.rate, "rate", 0, "signings per `second`; 0: no limit")
	fs.Float64Var(&c.callerRate, "caller-rate", 10, "signings per `second` for each caller; 0: no limit")
	fs.StringVar(&c.auditLog, "audit-log", "", "`file` for the audit log, or none (default: in -state-dir)")
	fs.Int64Var(&c.auditSize, "audit-size", 100<<20, "`bytes` at which the audit log begins a new file; 0: never")

	fs.StringVar(&c.istioAddr, "istio-addr", "127.0.0.1:15012", "`address` of Istio's API; empty: none")
	fs.StringVar(&c.linkerdAddr, "linkerd-addr", "127.0.0.1:8080", "`address` of Linkerd's API; empty: none")
	fs.BoolVar(&c.linkerdPlaintext, "linkerd-plaintext", false, "serve Linkerd's API without TLS, for the proxy beside us that ends it")
	fs.StringVar(&c.bundleAddr, "bundle-addr", "127.0.0.1:8443", "`address` of the bundle endpoint; empty: none")
	fs.StringVar(&c.adminAddr, "admin-addr", "127.0.0.1:15014", "`address` of metrics and health, without TLS; empty: none")
	fs.Var(&c.dnsNames, "dns-names", "further `names` in our own certificate")

	fs.BoolVar(&c.demo, "demo", false, "show all of it in a few seconds, and end")
	fs.BoolVar(&c.status, "status", false, "print the state of the CA, and end")
	fs.StringVar(&c.once, "once", "", "sign the request in the `file` (- for standard input) for -id, print the chain, and end")
	fs.StringVar(&c.jwt, "jwt", "", "print a JWT-SVID of -id for the `audience`, and end")
	fs.TextVar(&c.id, "id", spiffe.ID{}, "`SPIFFE ID` for -once and -jwt")
	fs.DurationVar(&c.ttl, "ttl", 0, "lifetime for -once and -jwt (default that of the CA)")
	fs.BoolVar(&c.rotate, "rotate", false, "prepare a new root, and end; servers on the same store follow")
	fs.StringVar(&c.taint, "taint", "", "say that the key with the `serial` number or key ID may be stolen, and end")
	fs.StringVar(&c.revoke, "revoke", "", "take the key with the `serial` number or key ID out of the bundle now, and end")
	fs.StringVar(&c.audit, "verify-audit", "", "verify the audit log in the `file` (- for standard input), and end")
	fs.BoolVar(&c.verbose, "v", false, "log more")
	for _, e := range environment {
		f := fs.Lookup(e.flag)
		f.Usage += " [" + e.variable + "]"
	}
	return fs
}

// parse reads the environment, then the flags. What is malformed is an error that names the variable
// or the flag.
func parse(args []string, getenv func(string) string, out io.Writer) (*config, error) {
	c := new(config)
	fs := c.flags(out)
	fromEnv := make(map[string]string) // flag to variable
	for _, e := range environment {
		value := getenv(e.variable)
		if value == "" {
			continue
		}
		if err := fs.Set(e.flag, value); err != nil {
			return nil, fmt.Errorf("%s=%q in the environment: %w", e.variable, value, err)
		}
		fromEnv[e.flag] = e.variable
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("%q is not understood; flags begin with a hyphen", fs.Arg(0))
	}
	given := make(map[string]bool)
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if !given["state-dir"] {
		c.stateDir = defaultStateDir(c.trustDomain)
	}
	if !given["default-ttl"] {
		c.defaultTTL = min(c.defaultTTL, c.maxTTL)
	}
	if !given["linkerd-ttl"] {
		c.linkerdTTL = min(c.linkerdTTL, c.maxTTL-c.linkerdSkew)
	}
	if bad, reason := c.check(given, getenv); bad != "" {
		for _, e := range environment {
			if e.flag == bad {
				bad += " (" + e.variable + ")"
			}
		}
		return nil, fmt.Errorf("-%s: %s", bad, reason)
	}
	c.complete()
	return c, nil
}

// complete fills in the defaults that follow from others.
func (c *config) complete() {
	if len(c.audiences) == 0 {
		c.audiences = list{"istio-ca"}
	}
	if c.auditLog == "" && c.stateDir != "" {
		c.auditLog = filepath.Join(c.stateDir, "audit.jsonl")
	}
	if c.propagation == 0 {
		c.propagation = 5 * c.refreshHint
		if c.istioAddr != "" && c.defaultTTL < c.rootTTL/2-c.defaultTTL { // else a root would not live long enough
			c.propagation = max(c.propagation, c.defaultTTL)
		}
	}
}

// check returns the flag that is wrong, and why.
func (c *config) check(given map[string]bool, getenv func(string) string) (bad, reason string) {
	for _, d := range []struct {
		flag string
		d    time.Duration
	}{
		{"max-ttl", c.maxTTL}, {"default-ttl", c.defaultTTL}, {"linkerd-ttl", c.linkerdTTL},
		{"root-ttl", c.rootTTL}, {"backdate", c.backdate}, {"refresh-hint", c.refreshHint},
	} {
		if d.d < time.Second {
			return d.flag, fmt.Sprintf("%v is less than a second", d.d)
		}
	}
	switch {
	case c.defaultTTL > c.maxTTL:
		return "default-ttl", fmt.Sprintf("%v is more than the longest lifetime %v", c.defaultTTL, c.maxTTL)
	case c.linkerdTTL > c.maxTTL-c.linkerdSkew:
		return "linkerd-ttl", fmt.Sprintf("%v and -linkerd-clock-skew %v are more than the longest lifetime %v", c.linkerdTTL, c.linkerdSkew, c.maxTTL)
	case c.grace < 1 || c.grace > 50:
		return "root-grace-percent", fmt.Sprintf("%d is not from 1 to 50", c.grace)
	case !slices.Contains([]int{0, 2048, 3072, 4096}, c.rsaBits):
		return "rsa-bits", fmt.Sprintf("%d is none of 2048, 3072 and 4096, nor 0 for ECDSA", c.rsaBits)
	case c.externalCA != "" && c.externalCA != kubernetesRA:
		return "external-ca", fmt.Sprintf("%q is not known; there is %s", c.externalCA, kubernetesRA)
	case c.externalCA != "" && !c.kubernetes:
		return "external-ca", "this needs -kubernetes"
	case c.externalCA != "" && c.signer == "" && c.signerDomain == "":
		return "k8s-signer", "with -external-ca, name a signer here, or the domain of several in -cert-signer-domain"
	case c.kubeAPI != "" && !c.kubernetes:
		return "kubernetes-api", "this needs -kubernetes"
	case given["trusted-node-accounts"] && !c.kubernetes:
		return "trusted-node-accounts", "this needs -kubernetes, which knows what runs on a node"
	case c.concurrent < 0 || c.queue < 0:
		return "concurrent", "neither this nor -queue may be negative"
	case !(c.rate >= 0) || !(c.callerRate >= 0):
		return "rate", "neither this nor -caller-rate may be negative"
	case c.linkerdSkew <= 0:
		return "linkerd-clock-skew", "this has to be more than 0"
	case c.propagation < 0:
		return "propagation", "this is negative"
	case c.auditSize < 0:
		return "audit-size", "this is negative"
	case (c.once != "" || c.jwt != "") == c.id.IsZero():
		return "id", "-once and -jwt need a SPIFFE ID, and nothing else does"
	case c.ttl < 0:
		return "ttl", "this is negative"
	case c.ttl > 0 && c.once == "" && c.jwt == "":
		return "ttl", "this is for -once and -jwt; a server has -default-ttl and -max-ttl"
	}
	// What the server needs is looked at before there is a CA that it could not serve.
	if _, err := c.trustDomain.KubernetesID(c.namespace, account); err != nil {
		return "namespace", err.Error()
	}
	for _, account := range c.nodeAccounts {
		if namespace, name, ok := strings.Cut(account, "/"); !ok || namespace == "" || name == "" || strings.Contains(name, "/") {
			return "trusted-node-accounts", fmt.Sprintf("%q is not namespace/name", account)
		}
	}
	commands := 0
	for _, is := range []bool{c.demo, c.status, c.once != "", c.jwt != "", c.rotate, c.taint != "", c.revoke != ""} {
		if is {
			commands++
		}
	}
	if commands > 1 {
		return "demo", "only one of -demo, -status, -once, -jwt, -rotate, -taint and -revoke at a time"
	}
	if c.stateDir == "" && commands > 0 && !c.demo {
		return "state-dir", "this user has no home folder, so name a folder"
	}
	if err := c.checkNames(); err != nil {
		return "dns-names", err.Error()
	}
	if c.demo || commands == 0 && c.linkerdAddr != "" {
		if _, err := c.mesh(); err != nil {
			return "linkerd-addr", fmt.Sprintf("there are no names for Linkerd (%v); set this flag to nothing to do without", err)
		}
	}
	if !c.kubernetes && commands == 0 {
		return c.checkDeveloper(getenv)
	}
	return "", ""
}

// checkNames finds out whether there can be a certificate with the further names.
func (c *config) checkNames() error {
	if len(c.dnsNames) == 0 {
		return nil
	}
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		return err
	}
	var names []pki.SAN
	for _, name := range c.dnsNames {
		names = append(names, pki.DNSSAN(name))
	}
	_, err = pki.NewCSR(key, pki.CSROptions{SANs: names})
	return err
}

// checkDeveloper refuses to believe everybody anywhere but on a developer's own machine.
func (c *config) checkDeveloper(getenv func(string) string) (bad, reason string) {
	if getenv("KUBERNETES_SERVICE_HOST") != "" {
		return "kubernetes", "this process runs in a cluster, so set this flag: without it, callers are believed whatever they say"
	}
	for _, l := range []struct{ flag, addr string }{
		{"istio-addr", c.istioAddr}, {"linkerd-addr", c.linkerdAddr}, {"bundle-addr", c.bundleAddr}, {"admin-addr", c.adminAddr},
	} {
		if l.addr != "" && !isLoopback(l.addr) {
			return l.flag, fmt.Sprintf("%q is not on loopback (127.0.0.1, ::1 or localhost); without -kubernetes, callers are believed whatever they say", l.addr)
		}
	}
	return "", ""
}

func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	return host == "localhost" || net.ParseIP(host).IsLoopback()
}

// algorithm returns what kind of key new roots have.
func (c *config) algorithm() pki.KeyAlgorithm {
	switch c.rsaBits {
	case 2048:
		return pki.RSA2048
	case 3072:
		return pki.RSA3072
	case 4096:
		return pki.RSA4096
	}
	return pki.ECDSAP256
}

// defaultStateDir is a folder of the user's, one for each trust domain, as a CA serves only one; empty
// for who has none.
func defaultStateDir(td spiffe.TrustDomain) string {
	if strings.Trim(td.String(), ".") == "" {
		return "" // "." and ".." are trust domains, and no folders of their own
	}
	name := filepath.Join("svidkit-ca", td.String())
	if dir := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, name)
	}
	if home, err := os.UserHomeDir(); err == nil && filepath.IsAbs(home) {
		return filepath.Join(home, ".local", "state", name)
	}
	return ""
}

// list is a flag with values between commas. Setting it again replaces it.
type list []string

func (l *list) String() string { return strings.Join(*l, ",") }

func (l *list) Set(text string) error {
	*l = nil
	for item := range strings.SplitSeq(text, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			return errors.New("an item of the list is empty")
		}
		*l = append(*l, item)
	}
	return nil
}
