package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// config is what the flags and the environment say.
type config struct {
	ca        ca.Config // of the CA itself
	grace     int       // percent
	keepKey   bool
	istio     ca.IstioRotation // with keepKey
	jitter    bool
	pluggedIn ca.PluggedIn
	stateDir  string
	auditLog  string
	auditSize int64

	kubernetes            bool
	cluster               caserver.Kubernetes
	namespace             string
	cacerts, keepDNSNames bool
	external              ra.Config
	externalCA, rootsOfRA string

	linkerd          linkerd.Options
	linkerdPlaintext bool
	dnsNames         []string
	self             spiffe.ID // of the server

	istioAddr, linkerdAddr, bundleAddr, adminAddr string // empty: not served

	command  string // what to do instead of serving: the name of its flag
	argument string // of the command
	id       spiffe.ID
	ttl      time.Duration
	verbose  bool
}

// account is the service account in the identity of the server.
const account = "svidkit-ca"

// kubernetesRA is the one value of EXTERNAL_CA.
const kubernetesRA = "ISTIOD_RA_KUBERNETES_API"

// commands are the flags that say what to do instead of serving.
var commands = []string{"demo", "status", "once", "jwt", "rotate", "taint", "revoke", "verify-audit"}

// flags returns the flags. The defaults are those of Istio's CA and of Linkerd's identity service, where
// they have them. A usage that ends with a name in brackets is that of a flag which the environment can
// set: the variable that configures Istio's CA.
func (c *config) flags(out io.Writer) *flag.FlagSet {
	fs := flag.NewFlagSet("ca", flag.ContinueOnError)
	fs.SetOutput(out)
	const day = 24 * time.Hour

	fs.TextVar(&c.ca.TrustDomain, "trust-domain", spiffe.MustParseTrustDomain("cluster.local"), "trust `domain` of the CA [TRUST_DOMAIN]")
	fs.StringVar(&c.pluggedIn.Dir, "root-ca-dir", "./etc/cacerts", "`folder` of a plugged-in CA; without files in it the CA is self-signed [ROOT_CA_DIR]")
	fs.StringVar(&c.stateDir, "state-dir", "", "`folder` of the self-signed CA, the audit log and the roots in PEM; empty: a temporary one (default: one in the user's home for each trust domain)")
	fs.DurationVar(&c.ca.DefaultTTL, "default-ttl", day, "lifetime of a certificate whose request names none, or -max-ttl if that is less [DEFAULT_WORKLOAD_CERT_TTL]")
	fs.DurationVar(&c.ca.MaxTTL, "max-ttl", 90*day, "longest lifetime that a request may name [MAX_WORKLOAD_CERT_TTL]")
	fs.DurationVar(&c.ca.Rotation.RootTTL, "root-ttl", 3650*day, "lifetime of a self-signed root [CITADEL_SELF_SIGNED_CA_CERT_TTL]")
	fs.DurationVar(&c.istio.CheckInterval, "root-check-interval", time.Hour, "time between two checks of the root's lifetime, with -keep-key; 0 or less: only -rotate replaces the root [CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL]")
	fs.IntVar(&c.grace, "root-grace-percent", 20, "`percent` of a root's lifetime that are left when it is replaced, 1 to 50 [CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE]")
	fs.BoolVar(&c.jitter, "root-jitter", true, "make the first check after a random part of the interval [CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR]")
	fs.Func("rsa-bits", "`size` of an RSA key for new roots: 2048, 3072 or 4096; 0: ECDSA P-256 [CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE]", c.setKeySize)
	fs.BoolVar(&c.keepKey, "keep-key", false, "renew the root with its own key, as Istio does, instead of a rotation in four steps")
	fs.BoolVar(&c.ca.Rotation.Constrain, "constrain", false, "restrict new roots to the trust domain (critical name constraints)")
	fs.BoolVar(&c.pluggedIn.MultiRoot, "multi-root", false, "allow the roots of a plugged-in CA to change while the server runs [ISTIO_MULTIROOT_MESH]")
	fs.DurationVar(&c.ca.Backdate, "backdate", 2*time.Minute, "how far certificates are dated back, for peers whose clocks are slow")
	fs.DurationVar(&c.ca.RefreshHint, "refresh-hint", 5*time.Minute, "how often consumers should fetch the bundle")
	fs.DurationVar(&c.ca.Rotation.Propagation, "propagation", 0, "how long a new root is in the bundle before it signs (default five times -refresh-hint, or -default-ttl with Istio's API, whose agents learn of roots when they renew)")

	fs.BoolVar(&c.kubernetes, "kubernetes", false, "keep the CA in a Secret and authenticate callers by the service account tokens of the cluster")
	fs.StringVar(&c.cluster.API.APIServer, "kubernetes-api", "", "`URL` of the API server, such as that of kubectl proxy (default: that of the cluster of this pod)")
	fs.StringVar(&c.namespace, "namespace", "istio-system", "`namespace` of the Secret, and in the identity of the server [POD_NAMESPACE]")
	fs.StringVar(&c.cluster.ClusterID, "cluster-id", "Kubernetes", "`name` of the cluster, as callers give it [CLUSTER_ID]")
	fs.Func("token-audiences", "`audiences` of tokens for Istio's API (default istio-ca) [TOKEN_AUDIENCES]", list(&c.cluster.Audiences))
	fs.Func("trusted-node-accounts", "service `accounts` (namespace/name,…) that may ask for the workloads of their node [CA_TRUSTED_NODE_ACCOUNTS]", list(&c.cluster.NodeAccounts))
	fs.BoolVar(&c.cacerts, "use-cacerts", false, "keep the self-signed CA in the Secret cacerts instead of istio-ca-secret [USE_CACERTS_FOR_SELF_SIGNED_CA]")
	fs.BoolVar(&c.keepDNSNames, "keep-dns-names", false, "let a caller with a certificate keep its DNS names, as Istio does")
	fs.StringVar(&c.linkerd.Mesh.ControlNamespace, "linkerd-namespace", "linkerd", "`namespace` of Linkerd's control plane, which is part of names")
	fs.DurationVar(&c.linkerd.Lifetime, "linkerd-ttl", day, "lifetime of certificates for Linkerd, or what -max-ttl leaves if that is less")
	fs.DurationVar(&c.linkerd.ClockSkew, "linkerd-clock-skew", 20*time.Second, "how far certificates for Linkerd are dated back, and forward")
	fs.BoolVar(&c.cluster.LinkerdAnyAudience, "linkerd-any-audience", false, "take tokens for any audience from Linkerd's proxies, if their cluster has no others")
	fs.StringVar(&c.externalCA, "external-ca", "", "CA that signs instead of this one: "+kubernetesRA+", or empty for none [EXTERNAL_CA]")
	fs.StringVar(&c.external.Signer, "k8s-signer", "", "`name` of the signer with -external-ca [K8S_SIGNER]")
	fs.StringVar(&c.external.SignerDomain, "cert-signer-domain", "", "`domain` of the signers that a request may choose from [CERT_SIGNER_DOMAIN]")
	fs.StringVar(&c.rootsOfRA, "external-roots", "./etc/external-ca-cert/root-cert.pem", "`file` with the roots of the signers, with -external-ca")

	fs.IntVar(&c.ca.Limits.Concurrent, "concurrent", 64, "signings at the same time, audit record included; 0: no limit")
	fs.IntVar(&c.ca.Limits.Queue, "queue", 1024, "how many more wait")
	fs.Float64Var(&c.ca.Limits.Rate, "rate", 0, "signings per `second`; 0: no limit")
	fs.Float64Var(&c.ca.Limits.CallerRate, "caller-rate", 10, "signings per `second` for each caller; 0: no limit")
	fs.StringVar(&c.auditLog, "audit-log", "", "`file` for the audit log, or none (default: in -state-dir)")
	fs.Int64Var(&c.auditSize, "audit-size", 100<<20, "`bytes` at which the audit log begins a new file; 0: never")

	fs.StringVar(&c.istioAddr, "istio-addr", "127.0.0.1:15012", "`address` of Istio's API; empty: none")
	fs.StringVar(&c.linkerdAddr, "linkerd-addr", "127.0.0.1:8080", "`address` of Linkerd's API; empty: none")
	fs.BoolVar(&c.linkerdPlaintext, "linkerd-plaintext", false, "serve Linkerd's API without TLS, for a proxy in the same pod that terminates it")
	fs.StringVar(&c.bundleAddr, "bundle-addr", "127.0.0.1:8443", "`address` of the bundle endpoint; empty: none")
	fs.StringVar(&c.adminAddr, "admin-addr", "127.0.0.1:15014", "`address` of metrics and health, without TLS; empty: none")
	fs.Func("dns-names", "further `names` in the certificate of the server", list(&c.dnsNames))

	fs.Bool("demo", false, "show all of it in a few seconds, and end")
	fs.Bool("status", false, "print the state of the CA, and end")
	fs.String("once", "", "sign the request in the `file` (- for standard input) for -id, print the chain, and end")
	fs.String("jwt", "", "print a JWT-SVID of -id for the `audience`, and end")
	fs.TextVar(&c.id, "id", spiffe.ID{}, "`SPIFFE ID` for -once and -jwt")
	fs.DurationVar(&c.ttl, "ttl", 0, "lifetime for -once and -jwt (default that of the CA)")
	fs.Bool("rotate", false, "prepare a new root, and end; servers on the same store follow")
	fs.String("taint", "", "say that the key with the `serial` number or key ID may be stolen, and end")
	fs.String("revoke", "", "take the key with the `serial` number or key ID out of the bundle now, and end")
	fs.String("verify-audit", "", "verify the audit log in the `file` (- for standard input), and end")
	fs.BoolVar(&c.verbose, "v", false, "log more")
	return fs
}

// variable returns the name of the environment variable that sets f, or nothing.
func variable(f *flag.Flag) string {
	_, name, _ := strings.Cut(f.Usage, " [")
	return strings.TrimSuffix(name, "]")
}

// parse reads the environment, then the flags. An error names the flag and its variable.
func parse(args []string, getenv func(string) string, out io.Writer) (*config, error) {
	c := new(config)
	fs := c.flags(out)
	var err error
	fs.VisitAll(func(f *flag.Flag) {
		if name := variable(f); name != "" && getenv(name) != "" {
			if bad := fs.Set(f.Name, getenv(name)); bad != nil {
				err = cmp.Or(err, fmt.Errorf("%s=%q in the environment: %w", name, getenv(name), bad))
			}
		}
	})
	if err = cmp.Or(err, fs.Parse(args)); err != nil {
		return nil, err
	}
	if fs.NArg() > 0 {
		return nil, fmt.Errorf("%q is not understood; flags begin with a hyphen", fs.Arg(0))
	}
	c.linkerd.Mesh.TrustDomain = c.ca.TrustDomain.String()
	given := make(map[string]bool)
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	if !given["state-dir"] {
		c.stateDir = defaultStateDir(c.ca.TrustDomain)
	}
	if !given["default-ttl"] {
		c.ca.DefaultTTL = min(c.ca.DefaultTTL, c.ca.MaxTTL)
	}
	if !given["linkerd-ttl"] {
		c.linkerd.Lifetime = min(c.linkerd.Lifetime, c.ca.MaxTTL-c.linkerd.ClockSkew)
	}
	for _, name := range commands {
		if f := fs.Lookup(name); f.Value.String() != f.DefValue {
			if c.command != "" {
				return nil, fmt.Errorf("-%s and -%s: only one command at a time", c.command, name)
			}
			c.command, c.argument = name, f.Value.String()
		}
	}
	if name, reason := c.check(getenv); name != "" {
		if v := variable(fs.Lookup(name)); v != "" {
			name += " (" + v + ")"
		}
		return nil, fmt.Errorf("-%s: %s", name, reason)
	}
	c.complete()
	return c, nil
}

// complete fills in what follows from other flags.
func (c *config) complete() {
	if c.auditLog == "" && c.stateDir != "" {
		c.auditLog = filepath.Join(c.stateDir, "audit.jsonl")
	}
	if strings.HasPrefix(c.cluster.API.APIServer, "http:") {
		c.cluster.API.HTTPClient = &http.Client{} // such as kubectl proxy, which authenticates us
	}
	if c.ca.Rotation.Propagation == 0 {
		c.ca.Rotation.Propagation = 5 * c.ca.RefreshHint
		if c.istioAddr != "" && c.ca.DefaultTTL < c.ca.Rotation.RootTTL/2-c.ca.DefaultTTL { // else a root would not live long enough
			c.ca.Rotation.Propagation = max(c.ca.Rotation.Propagation, c.ca.DefaultTTL)
		}
	}
	c.ca.Rotation.GraceRatio = float64(c.grace) / 100
	c.ca.Rotation.Manual = c.istio.CheckInterval <= 0
	c.istio.CheckInterval, c.istio.NoJitter = max(c.istio.CheckInterval, 0), !c.jitter
	if c.keepKey {
		c.ca.Rotation.Istio = &c.istio
	}
	c.ca.JWT = &ca.JWTConfig{}
	c.self, _ = c.ca.TrustDomain.KubernetesID(c.namespace, account) // checked
	c.ca.Limits.CallerBurst = int(10 * c.ca.Limits.CallerRate)
}

// check returns the first flag that is wrong, and why. What only the server needs is checked before a CA is
// made that could not be served.
func (c *config) check(getenv func(string) string) (name, reason string) {
	serve, sign := c.command == "", c.command == "once" || c.command == "jwt"
	_, noMesh := c.linkerd.Mesh.Certifier()
	_, noID := c.ca.TrustDomain.KubernetesID(c.namespace, account)
	key, badNames := pki.NewKey(pki.ECDSAP256)
	if badNames == nil {
		_, badNames = pki.NewCSR(key, pki.CSROptions{SANs: c.names()})
	}
	for _, rule := range []struct {
		flag   string
		wrong  bool
		reason any
	}{
		{"max-ttl", c.ca.MaxTTL < time.Second, tooShort},
		{"default-ttl", c.ca.DefaultTTL < time.Second, tooShort},
		{"default-ttl", c.ca.DefaultTTL > c.ca.MaxTTL, "it is more than -max-ttl"},
		{"linkerd-ttl", c.linkerd.Lifetime < time.Second, tooShort},
		{"linkerd-ttl", c.linkerd.Lifetime > c.ca.MaxTTL-c.linkerd.ClockSkew, "with -linkerd-clock-skew it is more than -max-ttl"},
		{"linkerd-clock-skew", c.linkerd.ClockSkew <= 0, "it is not more than 0"},
		{"root-ttl", c.ca.Rotation.RootTTL < time.Second, tooShort},
		{"root-grace-percent", c.grace < 1 || c.grace > 50, "it is not from 1 to 50"},
		{"backdate", c.ca.Backdate < time.Second, tooShort},
		{"refresh-hint", c.ca.RefreshHint < time.Second, tooShort},
		{"propagation", c.ca.Rotation.Propagation < 0, negative},
		{"concurrent", c.ca.Limits.Concurrent < 0, negative},
		{"queue", c.ca.Limits.Queue < 0, negative},
		{"rate", !(c.ca.Limits.Rate >= 0), negative}, // or NaN
		{"caller-rate", !(c.ca.Limits.CallerRate >= 0), negative},
		{"audit-size", c.auditSize < 0, negative},
		{"external-ca", c.externalCA != "" && c.externalCA != kubernetesRA, "there is only " + kubernetesRA},
		{"external-ca", c.externalCA != "" && !c.kubernetes, "it needs -kubernetes"},
		{"k8s-signer", c.externalCA != "" && c.external.Signer+c.external.SignerDomain == "", "with -external-ca, name a signer here, or the domain of several in -cert-signer-domain"},
		{"kubernetes-api", c.cluster.API.APIServer != "" && !c.kubernetes, "it needs -kubernetes"},
		{"trusted-node-accounts", len(c.cluster.NodeAccounts) > 0 && !c.kubernetes, "it needs -kubernetes, which knows what runs on a node"},
		{"trusted-node-accounts", slices.ContainsFunc(c.cluster.NodeAccounts, notAccount), "an account is not namespace/name"},
		{"id", sign == c.id.IsZero(), "-once and -jwt need a SPIFFE ID, and nothing else does"},
		{"ttl", c.ttl < 0, negative},
		{"ttl", c.ttl > 0 && !sign, "it is for -once and -jwt; a server has -default-ttl and -max-ttl"},
		{"state-dir", c.stateDir == "" && !serve && c.command != "demo", "this user has no home folder, so name a folder"},
		{"namespace", noID != nil, noID},
		{"dns-names", badNames != nil, badNames},
		{"linkerd-addr", noMesh != nil && (c.command == "demo" || serve && c.linkerdAddr != ""), fmt.Sprintf("%v; set this flag to nothing to serve without Linkerd", noMesh)},
		{"kubernetes", serve && !c.kubernetes && getenv("KUBERNETES_SERVICE_HOST") != "", "this process runs in a cluster, so set this flag: without it, " + trusting},
		{"istio-addr", c.exposes(c.istioAddr), notLoopback},
		{"linkerd-addr", c.exposes(c.linkerdAddr), notLoopback},
		{"bundle-addr", c.exposes(c.bundleAddr), notLoopback},
		{"admin-addr", c.exposes(c.adminAddr), notLoopback},
	} {
		if rule.wrong {
			return rule.flag, fmt.Sprint(rule.reason)
		}
	}
	return "", ""
}

// notAccount reports whether text is not the name of a service account.
func notAccount(text string) bool {
	namespace, name, _ := strings.Cut(text, "/")
	return namespace == "" || name == "" || strings.Contains(name, "/")
}

// exposes reports whether a server in development mode would listen on addr beyond its own machine.
func (c *config) exposes(addr string) bool {
	return c.command == "" && !c.kubernetes && addr != "" && !isLoopback(addr)
}

const (
	tooShort    = "it is less than a second"
	negative    = "it is negative"
	trusting    = "the name in any token is trusted"
	notLoopback = "not on loopback (127.0.0.1, ::1 or localhost); without -kubernetes, " + trusting
)

func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}

// defaultStateDir returns a folder of the user's for the trust domain, or nothing for a user without home.
func defaultStateDir(td spiffe.TrustDomain) string {
	dir, err := os.UserHomeDir()
	if state := os.Getenv("XDG_STATE_HOME"); filepath.IsAbs(state) {
		dir = state
	} else if err == nil && filepath.IsAbs(dir) {
		dir = filepath.Join(dir, ".local", "state")
	} else {
		return ""
	}
	if strings.Trim(td.String(), ".") == "" { // "." and ".." are trust domains, but not folders of their own
		return ""
	}
	return filepath.Join(dir, "svidkit-ca", td.String())
}

// list returns what sets a flag with values between commas.
func list(to *[]string) func(string) error {
	return func(text string) error {
		*to = strings.Split(text, ",")
		for i, item := range *to {
			if (*to)[i] = strings.TrimSpace(item); (*to)[i] == "" {
				return errors.New("an item of the list is empty")
			}
		}
		return nil
	}
}

// setKeySize sets the kind of key that new roots have.
func (c *config) setKeySize(bits string) (err error) {
	algorithms := map[string]pki.KeyAlgorithm{"0": pki.ECDSAP256, "2048": pki.RSA2048, "3072": pki.RSA3072, "4096": pki.RSA4096}
	var ok bool
	if c.ca.Rotation.KeyAlgorithm, ok = algorithms[bits]; !ok {
		err = errors.New("none of 2048, 3072 and 4096, nor 0 for ECDSA")
	}
	return err
}
