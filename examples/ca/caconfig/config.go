// Package caconfig configures, opens and serves a certificate authority, by flags and by the environment variables of
// Istio's CA. A program defines its own flags in the same flag set:
//
//	flags := flag.NewFlagSet("my-ca", flag.ContinueOnError)
//	config, err := caconfig.Parse(flags, os.Args[1:], os.Getenv)
//	…
//	err = config.Serve(ctx, slog.Default(), func(a *caconfig.Authority, at caserver.Listeners) {
//		fmt.Println("Istio's API:", at.Istio.Addr(), "CA:", a.Where)
//	})
//
// The program examples/ca uses it; its -help lists the flags.
//
// # Rights
//
// In a cluster the program's service account needs the rights in the comments of packages pki/ca/kubesecret and
// authn/kube. With -root-configmap it also needs these, in a ClusterRole, with the flag's name:
//
//	rules:
//	- {apiGroups: [""], resources: [namespaces], verbs: [list, watch]}
//	- {apiGroups: [""], resources: [configmaps], verbs: [create]}
//	- {apiGroups: [""], resources: [configmaps], resourceNames: [istio-ca-root-cert], verbs: [list, watch, patch]}
package caconfig

import (
	"cmp"
	"context"
	"crypto"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/examples/internal/program"
	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// Config is the parsed configuration of a CA. [Parse] makes one. It is not safe for concurrent use.
type Config struct {
	CA         ca.Config // without Auditor and Logger
	ServerID   spiffe.ID // in the server's certificate
	Kubernetes bool      // a cluster's API server authenticates callers
	ExternalCA string    // signs instead of this CA; empty for none

	// StateDir is the state directory. RootsFile, in it, holds the roots in PEM, and Serve keeps it up to date. Both
	// are empty if Serve must create a temporary directory. AuditLog is a file, or "none".
	StateDir, RootsFile, AuditLog string

	// SecretFile is a file in StateDir. It holds the secret that tokens begin with in development mode (see
	// package devtoken), and outlives restarts. Beside it Serve writes agent.env, the environment variables
	// of an agent on this machine: the address and the roots of the CA, and the identity demo/web.
	SecretFile string

	Custody Custody // of private keys

	flags              *flag.FlagSet
	inCluster          bool // this process runs in a pod
	grace              int  // percent
	jitter             bool
	pluggedIn          ca.PluggedIn
	create, replaceOwn bool
	shorten            bool
	temporary          bool            // Serve created StateDir
	given              map[string]bool // flags set by the arguments or the environment
	// Page returns the handler for / of -admin-addr; it lives until its context is done. Nil means none.
	Page func(context.Context, *Authority) (http.Handler, error)
	// Pods is Pods of [caserver.Options], for a CA of its own in a cluster.
	Pods func(ca.Signer) (caserver.Part, error)

	cluster               kubernetes
	namespace             string
	cacerts, keepDNSNames bool
	external              ra.Config
	rootsOfRA             string
	linkerd               linkerd.Options
	linkerdPlaintext      bool
	linkerdEvents         bool
	dnsNames              []string
	callers               callers
	renew                 renewal
	clusterOptions

	istioAddr, linkerdAddr, bundleAddr, adminAddr string // not served if empty
	oidc                                          struct{ issuer, algorithm, addr, cert, key string }
}

const (
	account      = "svidkit-ca"               // service account in the server's identity
	kubernetesRA = "ISTIOD_RA_KUBERNETES_API" // the only value of EXTERNAL_CA

	tooShort    = "it is less than a second"
	negative    = "it is negative"
	trusting    = "the name in any token with the secret of the server is trusted"
	notLoopback = "not on loopback (127.0.0.1, ::1 or localhost); without -kubernetes and -jwt-rule, " + trusting
	tooLong     = "it is more than an hour, which is the limit without -kubernetes and -jwt-rule, as " + trusting
	noPort      = "it is not HOST:PORT, such as localhost:15012 or :15012"

	developmentTTL = time.Hour // the longest lifetime in development mode
)

// ErrUsage reports a wrong flag, or a wrong variable that sets one; programs exit with status 2 for it. Errors of
// [Parse] wrap it, except [flag.ErrHelp], and so do errors of [Config.Open] and [Config.Serve] about flags.
var ErrUsage = errors.New("usage")

// usageError is an ErrUsage with its own text.
type usageError struct{ error }

func (e usageError) Unwrap() error        { return e.error }
func (e usageError) Is(target error) bool { return target == ErrUsage }

// misused returns an error about a flag.
func misused(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// Development reports whether the server runs in development mode: without Kubernetes and without a token issuer it
// trusts the name in any token that begins with the server's secret.
func (c *Config) Development() bool {
	return !c.Kubernetes && c.callers.rule == nil && (c.inCluster || c.callers.issuer == "" && !c.given["own-token"])
}

// define defines the flags in fs. Where Istio's CA or Linkerd's identity service has a default, the flag has the
// same. A usage that ends with a name in brackets names the environment variable of Istio's CA that sets the flag.
func (c *Config) define(fs *flag.FlagSet) {
	const day = 24 * time.Hour
	rootCA, rootsOfRA := "", "" // a relative directory could belong to another user
	if c.inCluster {
		rootCA, rootsOfRA = "/etc/cacerts", "/etc/external-ca-cert/root-cert.pem"
	}

	fs.TextVar(&c.CA.TrustDomain, "trust-domain", spiffe.MustParseTrustDomain("cluster.local"),
		"trust `domain` of the CA [TRUST_DOMAIN]")
	fs.StringVar(&c.pluggedIn.Dir, "root-ca-dir", rootCA, "`directory` of a plugged-in CA "+
		"(default none or, in a pod, /etc/cacerts if there are files in it; else the CA is self-signed) [ROOT_CA_DIR]")
	fs.BoolVar(&c.replaceOwn, "replace-own-ca", false,
		"sign with the CA in -root-ca-dir although there is one in -state-dir, whose root clients trust")
	fs.BoolVar(&c.create, "create", false, "make a self-signed CA if the store has none (without this flag: only "+
		"in the default -state-dir, if that is empty) [CA_CREATE]")
	fs.StringVar(&c.StateDir, "state-dir", "",
		"`directory` of the self-signed CA, the audit log and the roots in PEM; "+
			"empty: a temporary one (default: one in the user's home for each trust domain)")
	fs.DurationVar(&c.CA.DefaultTTL, "default-ttl", day,
		"`lifetime` of a certificate whose request names none, or -max-ttl if that is less "+
			"[DEFAULT_WORKLOAD_CERT_TTL]")
	fs.DurationVar(&c.CA.MaxTTL, "max-ttl", 90*day,
		"longest `lifetime` that a request may name; without -kubernetes one hour [MAX_WORKLOAD_CERT_TTL]")
	fs.BoolVar(&c.shorten, "shorten-ttl", false,
		"grant -max-ttl to a request for Istio's API that names more, instead of refusing it (default true without "+
			"-kubernetes and -jwt-rule)")
	fs.DurationVar(&c.CA.Rotation.RootTTL, "root-ttl", 3650*day,
		"`lifetime` of a self-signed root [CITADEL_SELF_SIGNED_CA_CERT_TTL]")
	fs.DurationVar(&c.CA.Rotation.CheckInterval, "root-check-interval", time.Hour, "`time` between two checks of the "+
		"root's lifetime, with -keep-key; 0 or less: only -rotate replaces the root "+
		"[CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL]")
	fs.IntVar(&c.grace, "root-grace-percent", 20,
		"`percent` of a root's lifetime that are left when it is replaced, 1 to 50 "+
			"[CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE]")
	fs.BoolVar(&c.jitter, "root-jitter", true,
		"make the first check after a random part of the interval [CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR]")
	fs.Func("rsa-bits", "`size` of an RSA key for new roots: 2048, 3072 or 4096; 0: ECDSA P-256 "+
		"[CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE]", c.setKeySize)
	fs.Func("root-keys", "`keys` of the roots: ecdsa-p256, ecdsa-p384, rsa-2048, rsa-3072, rsa-4096, ml-dsa-44 or "+
		"ml-dsa-65; or two with a comma, one of ML-DSA, each for the leaves of its kind. Another kind than before joins, "+
		"and the one that is not named retires, in the four steps of a rotation, while a server runs (default ecdsa-p256, "+
		"or RSA with -rsa-bits)", func(text string) (err error) {
		c.CA.Rotation.KeyAlgorithm, err = program.Keys(text)
		return err
	})
	fs.BoolVar(&c.CA.Rotation.KeepKey, "keep-key", false,
		"renew the root with its own key, as Istio does, instead of a rotation in four steps")
	fs.BoolVar(&c.CA.Rotation.Constrain, "constrain", false,
		"restrict new roots to the trust domain (critical name constraints)")
	program.Algorithms(fs, &c.CA.Algorithms, "are certified, and that certificates of callers by -client-roots have")
	fs.BoolVar(&c.CA.EmptySubject, "empty-subject", false, "leave the subject of leaves empty, instead of O=svidkit")
	fs.BoolVar(&c.pluggedIn.MultiRoot, "multi-root", false,
		"allow the roots of a plugged-in CA to change while the server runs [ISTIO_MULTIROOT_MESH]")
	fs.DurationVar(&c.CA.Backdate, "backdate", 2*time.Minute,
		"`duration`: how far certificates are dated back, for peers whose clocks are slow")
	fs.DurationVar(&c.CA.RefreshHint, "refresh-hint", 5*time.Minute,
		"`duration`: how often consumers should fetch the bundle")
	fs.DurationVar(&c.CA.Rotation.Propagation, "propagation", 0,
		"`duration`: how long a new root is in the bundle before it signs (default five times -refresh-hint, or "+
			"-default-ttl with Istio's API, whose agents learn of roots when they renew)")

	fs.BoolVar(&c.Kubernetes, "kubernetes", false,
		"keep the CA in a Secret and authenticate callers by the service account tokens of the cluster")
	fs.StringVar(&c.cluster.API.APIServer, "kubernetes-api", "",
		"`URL` of the API server, such as that of kubectl proxy (default: that of the cluster of this pod)")
	fs.StringVar(&c.namespace, "namespace", "istio-system",
		"`namespace` of the Secret, and in the identity of the server [POD_NAMESPACE]")
	fs.StringVar(&c.cluster.ClusterID, "cluster-id", "Kubernetes",
		"`name` of the cluster, as callers give it [CLUSTER_ID]")
	fs.Func("token-audiences", "`audiences` of tokens for Istio's API (default istio-ca) [TOKEN_AUDIENCES]",
		list(&c.cluster.Audiences))
	fs.Func("trusted-node-accounts", "service `accounts` (namespace/name,…) that may ask for the workloads of "+
		"their node [CA_TRUSTED_NODE_ACCOUNTS]", list(&c.cluster.NodeAccounts))
	c.defineCluster(fs)
	fs.BoolVar(&c.cacerts, "use-cacerts", false,
		"keep the self-signed CA in the Secret cacerts instead of istio-ca-secret [USE_CACERTS_FOR_SELF_SIGNED_CA]")
	c.defineCallers(fs)
	fs.Func("renew-by-certificate", "for how long a caller of Istio's API may renew with the certificate that it "+
		"has, "+
		"since it was last proven by a token: a `duration`, off, or unlimited (default unlimited, as virtual "+
		"machines of Istio do)", c.renew.set)
	fs.BoolVar(&c.keepDNSNames, "keep-dns-names", false,
		"let a caller with a certificate keep its DNS names, as Istio does")
	fs.StringVar(&c.linkerd.Mesh.ControlNamespace, "linkerd-namespace", "linkerd",
		"`namespace` of Linkerd's control plane, which is part of names")
	fs.DurationVar(&c.linkerd.Lifetime, "linkerd-ttl", day,
		"`lifetime` of certificates for Linkerd, or what -max-ttl leaves if that is less")
	fs.DurationVar(&c.linkerd.ClockSkew, "linkerd-clock-skew", 20*time.Second,
		"`duration`: how far certificates for Linkerd are dated back, and forward")
	fs.BoolVar(&c.cluster.LinkerdAnyAudience, "linkerd-any-audience", false,
		"take tokens for any audience from Linkerd's proxies, if their cluster has no others")
	fs.BoolVar(&c.linkerdEvents, "linkerd-events", true,
		"report what happens at Linkerd's API as events of the cluster, with -kubernetes")
	fs.StringVar(&c.ExternalCA, "external-ca", "",
		"CA that signs instead of this one: "+kubernetesRA+", or empty for none [EXTERNAL_CA]")
	fs.StringVar(&c.external.Signer, "k8s-signer", "", "`name` of the signer with -external-ca [K8S_SIGNER]")
	fs.StringVar(&c.external.SignerDomain, "cert-signer-domain", "",
		"`domain` of the signers that a request may choose from [CERT_SIGNER_DOMAIN]")
	fs.StringVar(&c.rootsOfRA, "external-roots", rootsOfRA,
		"`file` with the roots of the signers, with -external-ca (default in a pod "+
			"/etc/external-ca-cert/root-cert.pem)")

	fs.IntVar(&c.CA.Limits.Concurrent, "concurrent", 64,
		"`number` of signings at the same time, audit record included; 0: no limit")
	fs.IntVar(&c.CA.Limits.Queue, "queue", 1024, "`number` of those that wait")
	fs.DurationVar(&c.CA.Limits.QueueTime, "queue-time", 50*time.Millisecond,
		"`duration`: how long one of them should "+
			"wait: beyond that, requests are told when to come back; 0: no limit")
	fs.Float64Var(&c.CA.Limits.Rate, "rate", 0, "signings per `second`; 0: no limit")
	fs.Float64Var(&c.CA.Limits.CallerRate, "caller-rate", 10, "signings per `second` for each caller; 0: no limit")
	fs.StringVar(&c.AuditLog, "audit-log", "",
		"`file` for the audit log, or none (default: in -state-dir); SIGHUP reopens it, as logrotate wants")

	fs.StringVar(&c.istioAddr, "istio-addr", "127.0.0.1:15012", "`address` of Istio's API; empty: none")
	fs.StringVar(&c.linkerdAddr, "linkerd-addr", "127.0.0.1:8080", "`address` of Linkerd's API; empty: none")
	fs.BoolVar(&c.linkerdPlaintext, "linkerd-plaintext", false,
		"serve Linkerd's API without TLS, for a proxy in the same pod that terminates it")
	fs.StringVar(&c.bundleAddr, "bundle-addr", "127.0.0.1:8443", "`address` of the bundle endpoint; empty: none")
	fs.StringVar(&c.oidc.issuer, "oidc-issuer", "",
		"`URL` of this CA as an issuer of OpenID Connect, for verifiers that do not know SPIFFE: it is in all "+
			"tokens, as iss; empty: none")
	fs.StringVar(&c.oidc.algorithm, "jwt-algorithm", "ES256",
		"`algorithm` of new keys for tokens: ES256, ES384, ES512, RS256, which all clouds take, ML-DSA-44 or ML-DSA-65")
	fs.StringVar(&c.oidc.addr, "oidc-addr", "",
		"`address` of the documents of -oidc-issuer, to which its URL or a proxy leads; empty: they are published "+
			"otherwise, by svid bundle oidc")
	fs.StringVar(&c.oidc.cert, "oidc-cert", "",
		"`file` with the certificates for -oidc-addr (default the one of the bundle endpoint, which a proxy can "+
			"verify)")
	fs.StringVar(&c.oidc.key, "oidc-key", "", "`file` with the key for -oidc-cert")
	fs.StringVar(&c.adminAddr, "admin-addr", "127.0.0.1:15014",
		"`address` of metrics and health, without TLS; empty: none")
	fs.Func("dns-names", "further `names` in the certificate of the server [ISTIOD_CUSTOM_HOST]", list(&c.dnsNames))
	c.Custody.define(fs)
	if define := c.Custody.kinds.Flags; define != nil {
		define(fs)
	}
}

// variable returns the environment variable that sets f, or "".
func variable(f *flag.Flag) string {
	_, name, _ := strings.Cut(f.Usage, " [")
	return strings.TrimSuffix(name, "]")
}

// Parse defines a CA's flags in fs, which must have flag.ContinueOnError and may have the program's own flags. It
// sets each flag of fs whose usage ends with a variable's name in brackets from that variable, and then sets flags
// from args, which win. An error is one line that names the flag and its variable, and wraps [ErrUsage]. After -help
// the error is [flag.ErrHelp], and fs.Usage has printed the flags.
func Parse(fs *flag.FlagSet, args []string, getenv func(string) string) (*Config, error) {
	return Kinds{}.Parse(fs, args, getenv)
}

// Parse is [Parse] for a program with these kinds.
func (k Kinds) Parse(fs *flag.FlagSet, args []string, getenv func(string) string) (*Config, error) {
	custodians := map[string]CustodianKind{"openbao": openBao}
	maps.Copy(custodians, k.Custodians)
	k.Custodians = custodians
	c := &Config{flags: fs, Custody: Custody{kinds: k}, inCluster: getenv("KUBERNETES_SERVICE_HOST") != "",
		clusterOptions: clusterOptions{getenv: getenv}}
	c.define(fs)
	usage := fs.Usage
	fs.Usage = func() {} // otherwise package flag prints all flags with each error
	fs.SetOutput(io.Discard)
	err := c.parse(args, getenv)
	fs.Usage = usage
	switch {
	case errors.Is(err, flag.ErrHelp):
		fs.Usage()
		return nil, err
	case err != nil:
		return nil, misused("%w; -help lists the flags", err)
	}
	return c, nil
}

// parse sets the flags and the values that follow from them.
func (c *Config) parse(args []string, getenv func(string) string) (err error) {
	fs := c.flags
	fs.VisitAll(func(f *flag.Flag) {
		if name := variable(f); name != "" && getenv(name) != "" {
			if bad := fs.Set(f.Name, getenv(name)); bad != nil {
				err = cmp.Or(err, fmt.Errorf("%s=%q in the environment: %w", name, getenv(name),
					program.Unparsed(f, bad)))
			}
		}
	})
	if err = cmp.Or(err, fs.Parse(args)); err != nil {
		return program.Explain(fs, err)
	}
	if fs.NArg() > 0 {
		return fmt.Errorf("%q is not understood; flags begin with a hyphen", fs.Arg(0))
	}
	c.linkerd.Mesh.TrustDomain = c.CA.TrustDomain.String()
	c.given = make(map[string]bool)
	fs.Visit(func(f *flag.Flag) { c.given[f.Name] = true })
	if !c.caServer {
		c.istioAddr, c.linkerdAddr = "", ""
	}
	if !c.given["state-dir"] {
		c.StateDir = defaultStateDir(c.CA.TrustDomain)
	}
	if !c.Development() && !c.Kubernetes && !c.given["linkerd-addr"] {
		c.linkerdAddr = ""
	}
	if !c.given["max-ttl"] && c.Development() {
		if c.CA.MaxTTL = developmentTTL; c.given["default-ttl"] { // Serve refuses a longer one
			c.CA.MaxTTL = max(c.CA.MaxTTL, c.CA.DefaultTTL)
		}
		if c.given["linkerd-ttl"] {
			c.CA.MaxTTL = max(c.CA.MaxTTL, c.linkerd.Lifetime+c.linkerd.ClockSkew)
		}
	}
	usual := c.CA.MaxTTL // at most
	if c.Development() {
		usual = min(usual, developmentTTL)
	}
	if !c.given["default-ttl"] {
		c.CA.DefaultTTL = min(c.CA.DefaultTTL, usual)
	}
	if !c.given["shorten-ttl"] {
		c.shorten = c.Development()
	}
	if !c.given["linkerd-ttl"] {
		c.linkerd.Lifetime = min(c.linkerd.Lifetime, usual-c.linkerd.ClockSkew)
	}
	if c.CA.Rotation.Propagation == 0 {
		c.CA.Rotation.Propagation = 5 * min(c.CA.RefreshHint, math.MaxInt64/5)
		// Otherwise a root would not live long enough.
		if c.istioAddr != "" && c.CA.DefaultTTL < c.CA.Rotation.RootTTL/2-c.CA.DefaultTTL {
			c.CA.Rotation.Propagation = max(c.CA.Rotation.Propagation, c.CA.DefaultTTL)
		}
	}
	if err := c.check(false); err != nil {
		return err
	}
	c.setStateDir(c.StateDir)
	if strings.HasPrefix(c.cluster.API.APIServer, "http:") {
		c.cluster.API.HTTPClient = &http.Client{} // such as kubectl proxy, which authenticates us
	}
	c.CA.Rotation.GraceRatio = float64(c.grace) / 100
	c.CA.Rotation.Manual = c.CA.Rotation.CheckInterval <= 0
	c.CA.Rotation.CheckInterval, c.CA.Rotation.NoJitter = max(c.CA.Rotation.CheckInterval, 0), !c.jitter
	// A token key signs for longer than the distribution of its successor takes.
	c.CA.JWT = &ca.JWTConfig{
		Issuer: c.oidc.issuer, Algorithm: c.oidc.algorithm, KeyTTL: max(30*24*time.Hour,
			3*min(c.CA.Rotation.Propagation, math.MaxInt64/3)),
	}
	c.cluster.TrustDomain = c.CA.TrustDomain
	c.ServerID, _ = c.CA.TrustDomain.WorkloadID("ns", c.namespace, "sa", account) // checked
	c.CA.Limits.CallerBurst = int(10 * c.CA.Limits.CallerRate)
	return nil
}

// setStateDir sets the state directory and the files in it. An empty dir sets nothing.
func (c *Config) setStateDir(dir string) {
	if c.StateDir = dir; dir != "" {
		c.SecretFile = filepath.Join(dir, "token-secret")
		c.RootsFile, c.AuditLog = filepath.Join(dir, "root-cert.pem"), cmp.Or(c.AuditLog,
			filepath.Join(dir, "audit.jsonl"))
	}
}

// check returns an error for the first wrong flag. If serve is set, it also checks what only a server needs.
func (c *Config) check(serve bool) error {
	_, noMesh := c.linkerd.Mesh.Certifier()
	_, noID := c.CA.TrustDomain.WorkloadID("ns", c.namespace, "sa", account)
	badRule, badGateways := c.callers.check(c.CA.TrustDomain)
	key, badNames := pki.NewKey("ecdsa-p256")
	if badNames == nil {
		_, badNames = pki.NewCSR(key, pki.CSROptions{SANs: c.names()})
	}
	var badIssuer error
	if c.oidc.issuer != "" {
		badIssuer = jws.CheckIssuer(c.oidc.issuer)
	}
	var badAlgorithm error
	switch alg := c.oidc.algorithm; alg {
	case "ES256", "ES384", "ES512", "RS256":
	case "ML-DSA-44", "ML-DSA-65":
		badAlgorithm = program.MLDSA(strings.ToLower(alg))
	default:
		badAlgorithm = errors.New("it is none of ES256, ES384, ES512, RS256, ML-DSA-44 and ML-DSA-65")
	}
	badStore := ""
	if c.given["store"] { // also an empty one, as of a variable of the shell that is not set
		badStore = c.Custody.setStore(c.Custody.storeURL)
	}
	for name := range c.given {
		if strings.HasPrefix(name, "store-") && !c.given["store"] {
			badStore = "name a database, as -" + name + " is for one"
		}
	}
	linkerdTTL := c.given["linkerd-ttl"]
	exposes := func(addr string) bool { return serve && c.Development() && addr != "" && !isLoopback(addr) }
	for _, rule := range []struct {
		flag   string
		wrong  bool
		reason any
	}{
		{"max-ttl", c.CA.MaxTTL < time.Second, tooShort},
		{"default-ttl", serve && c.Development() && c.CA.DefaultTTL > developmentTTL, tooLong},
		{"linkerd-ttl", serve && linkerdTTL && c.Development() && c.linkerd.Lifetime > developmentTTL, tooLong},
		{"max-ttl", serve && c.Development() && c.CA.MaxTTL > developmentTTL && !linkerdTTL, tooLong},
		{"renew-by-certificate", c.renew > 0 && c.ExternalCA != "",
			"with -external-ca it is off or unlimited: what the " +
				"signers of a cluster sign does not say when a caller was last proven by a token"},
		{"default-ttl", c.CA.DefaultTTL < time.Second, tooShort},
		{"default-ttl", c.CA.DefaultTTL > c.CA.MaxTTL, "it is more than -max-ttl"},
		{"linkerd-clock-skew", c.linkerd.ClockSkew <= 0, "it is not more than 0"},
		{"linkerd-ttl", linkerdTTL && c.linkerd.Lifetime < time.Second, tooShort},
		{"linkerd-ttl", linkerdTTL && c.linkerd.Lifetime > c.CA.MaxTTL-c.linkerd.ClockSkew,
			"with -linkerd-clock-skew it is more than -max-ttl"},
		{"max-ttl", serve && !linkerdTTL && c.linkerdAddr != "" && c.linkerd.Lifetime < time.Second,
			"without -linkerd-clock-skew it leaves less than a second for certificates of Linkerd's API; " +
				"-linkerd-addr= serves without that API"},
		{"root-ttl", c.CA.Rotation.RootTTL < time.Second, tooShort},
		{"root-ttl", c.ExternalCA == "" && c.CA.Rotation.Propagation >= c.CA.Rotation.RootTTL/2-c.CA.DefaultTTL,
			fmt.Sprintf("it is not more than twice -propagation (%v) and -default-ttl (%v) together, so that a "+
				"root could not "+
				"be replaced in time", c.CA.Rotation.Propagation, c.CA.DefaultTTL)},
		{"root-grace-percent", c.grace < 1 || c.grace > 50, "it is not from 1 to 50"},
		{"backdate", c.CA.Backdate < time.Second, tooShort},
		{"refresh-hint", c.CA.RefreshHint < time.Second, tooShort},
		{"refresh-hint", c.CA.RefreshHint%time.Second != 0, "it is not a number of whole seconds"},
		{"propagation", c.CA.Rotation.Propagation < 0, negative},
		{"concurrent", c.CA.Limits.Concurrent < 0, negative},
		{"queue", c.CA.Limits.Queue < 0, negative},
		{"queue-time", c.CA.Limits.QueueTime < 0, negative},
		{"rate", !(c.CA.Limits.Rate >= 0), negative}, // also refuses NaN
		{"caller-rate", !(c.CA.Limits.CallerRate >= 0), negative},
		{"external-ca", c.ExternalCA != "" && c.ExternalCA != kubernetesRA, "there is only " + kubernetesRA},
		{"external-ca", c.ExternalCA != "" && !c.Kubernetes, "it needs -kubernetes"},
		{"k8s-signer", c.ExternalCA != "" && c.external.Signer+c.external.SignerDomain == "",
			"with -external-ca, name a signer here, or the domain of several in -cert-signer-domain"},
		{"custodian", c.ExternalCA != "" && c.Custody.Any(), "with -external-ca the keys are those of the cluster"},
		{"store", badStore != "", badStore},
		{"store", c.ExternalCA != "" && c.Custody.store != nil, "with -external-ca there is no store"},
		{"root-configmap", c.rootConfigMap != "" && !c.Kubernetes, "it needs -kubernetes"},
		{"root-configmap", c.rootConfigMap != "" && !kube.ValidName(c.rootConfigMap),
			"no ConfigMap can have this name"},
		{"remote-cluster", len(c.cluster.Remotes) > 0 && !c.Kubernetes, "it needs -kubernetes"},
		{"remote-cluster", c.cluster.Remotes[c.cluster.ClusterID].APIServer != "",
			"one has the name in -cluster-id, which is the cluster of the server itself"},
		{"tls-cert", (c.tlsCert == "") != (c.tlsKey == ""), "-tls-cert and -tls-key belong together"},
		{"oidc-issuer", badIssuer != nil, badIssuer},
		{"oidc-issuer", c.oidc.issuer != "" && c.ExternalCA != "", "the signers of a cluster sign no tokens"},
		{"root-keys", c.given["root-keys"] && c.given["rsa-bits"],
			"-rsa-bits (CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE) is for the same; name the size here, as in rsa-3072"},
		{"jwt-algorithm", badAlgorithm != nil, badAlgorithm},
		{"oidc-addr", c.oidc.addr != "" && c.oidc.issuer == "", "it needs -oidc-issuer"},
		{"oidc-cert", (c.oidc.cert == "") != (c.oidc.key == ""), "-oidc-cert and -oidc-key belong together"},
		{"oidc-cert", c.oidc.cert != "" && c.oidc.addr == "", "it is for -oidc-addr"},
		{"wait", c.wait < 0, negative},
		{"kubernetes-api", c.cluster.API.APIServer != "" && !c.Kubernetes, "it needs -kubernetes"},
		{"trusted-node-accounts", len(c.cluster.NodeAccounts) > 0 && !c.Kubernetes,
			"it needs -kubernetes, which knows what runs on a node"},
		{"trusted-node-accounts", slices.ContainsFunc(c.cluster.NodeAccounts, notAccount),
			"an account is not namespace/name"},
		{"linkerd-addr", serve && !c.Development() && !c.Kubernetes && c.linkerdAddr != "",
			"it needs -kubernetes, whose API server knows the tokens of Linkerd's proxies"},
		{"jwt-rule", badRule != nil, badRule},
		{"trusted-gateway-cidr", badGateways != nil, badGateways},
		{"trusted-gateway-cidr", c.callers.gateways != nil && c.renew != 0,
			"with it -renew-by-certificate is unlimited: a " +
				"gateway does not say when the holder of a certificate was last proven by a token"},
		{"namespace", noID != nil, noID},
		{"dns-names", badNames != nil, badNames},
		{"linkerd-addr", serve && noMesh != nil && c.linkerdAddr != "",
			fmt.Sprintf("%v; set this flag to nothing to serve without Linkerd", noMesh)},
		{"kubernetes", serve && c.inCluster && c.Development(),
			"this process runs in a cluster, so set this flag: without it, " + trusting},
		{"istio-addr", noAddress(c.istioAddr), noPort},
		{"linkerd-addr", noAddress(c.linkerdAddr), noPort},
		{"bundle-addr", noAddress(c.bundleAddr), noPort},
		{"oidc-addr", noAddress(c.oidc.addr), noPort},
		{"admin-addr", noAddress(c.adminAddr), noPort},
		{"istio-addr", exposes(c.istioAddr), notLoopback},
		{"linkerd-addr", exposes(c.linkerdAddr), notLoopback},
		{"bundle-addr", exposes(c.bundleAddr), notLoopback},
		{"oidc-addr", exposes(c.oidc.addr), notLoopback},
		{"admin-addr", exposes(c.adminAddr), notLoopback},
	} {
		if rule.wrong {
			name := rule.flag
			if v := variable(c.flags.Lookup(name)); v != "" {
				name += " (" + v + ")"
			}
			return misused("-%s: %v", name, rule.reason)
		}
	}
	return nil
}

// notAccount reports whether text is no service account's name.
func notAccount(text string) bool {
	namespace, name, _ := strings.Cut(text, "/")
	return namespace == "" || name == "" || strings.Contains(name, "/")
}

// defaultStateDir returns the trust domain's directory in the user's home, or "" without a home.
func defaultStateDir(td spiffe.TrustDomain) string {
	dir := os.Getenv("XDG_STATE_HOME")
	if !filepath.IsAbs(dir) {
		home, _ := os.UserHomeDir() // empty without a home
		dir = filepath.Join(home, ".local", "state")
	}
	// "." and ".." are valid trust domains, but not directories of their own.
	if !filepath.IsAbs(dir) || strings.Trim(td.String(), ".") == "" {
		return ""
	}
	return filepath.Join(dir, "svidkit-ca", td.String())
}

// list returns a flag's setter for values between commas.
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

// setKeySize sets the key algorithm of new roots.
func (c *Config) setKeySize(bits string) (err error) {
	algorithms := map[string]string{"0": "", "2048": "rsa-2048", "3072": "rsa-3072", "4096": "rsa-4096"}
	var ok bool
	if c.CA.Rotation.KeyAlgorithm, ok = algorithms[bits]; !ok {
		err = errors.New("none of 2048, 3072 and 4096, nor 0 for ECDSA")
	}
	return err
}

// newKey makes a key for the server: of ECDSA, or of a kind that is certified.
func (c *Config) newKey() (key crypto.Signer, err error) {
	for _, name := range []string{"ecdsa-p256", "ml-dsa-65", "ml-dsa-44", "rsa-2048", "ed25519"} {
		if key, err = pki.NewKey(name); err == nil && c.CA.Algorithms.Check(key.Public()) == nil {
			break
		}
	}
	return key, err
}

// renewal bounds how long a caller may renew by certificates alone: 0 means no limit, a negative value never.
type renewal time.Duration

func (r *renewal) set(text string) error {
	switch text {
	case "off":
		*r = -1
		return nil
	case "unlimited":
		*r = 0
		return nil
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		return errors.New("it is neither off nor unlimited, and " + program.BadDuration)
	}
	if d < time.Second {
		return errors.New(tooShort)
	}
	*r = renewal(d)
	return nil
}

// String returns the flag's text.
func (r renewal) String() string {
	switch {
	case r < 0:
		return "off"
	case r == 0:
		return "unlimited"
	}
	return time.Duration(r).String()
}

// noAddress reports whether a non-empty address lacks a port.
func noAddress(addr string) bool {
	_, _, err := net.SplitHostPort(addr)
	return addr != "" && err != nil
}
