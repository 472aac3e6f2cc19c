package caconfig

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// env is an environment.
type env map[string]string

func (e env) get(name string) string { return e[name] }

// parse parses args. With serve it also checks what only a server needs.
func parse(args []string, getenv func(string) string, out io.Writer, serve bool) (*Config, error) {
	fs := flag.NewFlagSet("ca", flag.ContinueOnError)
	fs.Usage = func() {
		fs.SetOutput(out)
		fs.PrintDefaults()
	}
	c, err := Parse(fs, args, getenv)
	if err == nil && serve {
		err = c.check(true)
	}
	return c, err
}

// The defaults are those of Istio's CA and of Linkerd's chart.
func TestDefaults(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.1-7", "IST-3.1-9", "IST-3.2-2", "IST-3.2-3", "IST-3.2-4", "IST-3.2-5", "IST-3.2-6", "IST-3.2-7", "IST-3.2-8",
		"IST-3.2-9", "IST-3.2-21", "IST-3.8-7")
	c := must.Get(parse([]string{"-kubernetes"}, env{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}.get, io.Discard, true))(t)
	assert.Equal(t, "cluster.local", c.CA.TrustDomain.String())
	assert.Equal(t, "/etc/cacerts", c.pluggedIn.Dir)
	assert.Equal(t, "/etc/external-ca-cert/root-cert.pem", c.rootsOfRA)
	assert.Zero(t, c.renew, "without end, as with Istio")
	assert.Empty(t, c.cluster.Audiences, "istio-ca")
	assert.Equal(t, "istio-system", c.namespace)
	assert.Equal(t, "Kubernetes", c.cluster.ClusterID)
	cfg := c.CA
	assert.Equal(t, 24*time.Hour, cfg.DefaultTTL)
	assert.Equal(t, 2160*time.Hour, cfg.MaxTTL)
	assert.Equal(t, 87600*time.Hour, cfg.Rotation.RootTTL)
	assert.False(t, cfg.Rotation.KeepKey)
	assert.Equal(t, time.Hour, cfg.Rotation.CheckInterval)
	assert.False(t, cfg.Rotation.NoJitter)
	assert.InDelta(t, 0.2, cfg.Rotation.GraceRatio, 1e-9)
	assert.False(t, cfg.Rotation.Manual)
	assert.Empty(t, cfg.Rotation.KeyAlgorithm, "ECDSA P-256")
	assert.Equal(t, "ecdsa,rsa,ed25519", cfg.Algorithms.String())
	assert.Equal(t, 24*time.Hour, c.linkerd.Lifetime)
	assert.Equal(t, 20*time.Second, c.linkerd.ClockSkew)
	assert.Equal(t, "linkerd", c.linkerd.Mesh.ControlNamespace)
	assert.False(t, c.mayCreate(), "the store is not a directory of a first start")
	for _, addr := range []string{c.istioAddr, c.linkerdAddr, c.bundleAddr, c.adminAddr} {
		assert.True(t, isLoopback(addr), addr)
	}
}

// Without -kubernetes no file of a relative directory is read, and what is signed lasts an hour.
func TestDevelopmentDefaults(t *testing.T) {
	t.Parallel()
	c := must.Get(parse(nil, env{}.get, io.Discard, true))(t)
	assert.False(t, c.Kubernetes)
	assert.Empty(t, c.pluggedIn.Dir)
	assert.Empty(t, c.rootsOfRA)
	assert.Equal(t, time.Hour, c.CA.DefaultTTL)
	assert.Equal(t, time.Hour, c.CA.MaxTTL)
	assert.Equal(t, time.Hour-20*time.Second, c.linkerd.Lifetime)
	for _, args := range []string{"-max-ttl 61m", "-default-ttl 61m", "-linkerd-ttl 61m", "-max-ttl 48h -default-ttl 10m"} {
		_, err := parse(strings.Fields(args), env{}.get, io.Discard, true)
		require.ErrorContains(t, err, strings.Fields(args)[0], args)
		require.ErrorContains(t, err, ": it is more than an hour", args)
		must.Get(parse(strings.Fields(args), env{}.get, io.Discard, false))(t, "a command takes no tokens: %s", args)
	}
	must.Get(parse([]string{"-max-ttl", "1h", "-linkerd-ttl", "59m"}, env{}.get, io.Discard, true))(t)
}

// An issuer whose tokens prove callers takes the place of the secret, and of the limits that go with it.
func TestDevelopment(t *testing.T) {
	t.Parallel()
	inPod := env{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
	const rule = `{"issuer":"https://a.test","audiences":["a"]}`
	for _, tc := range []struct {
		args []string
		env  env
		want bool
	}{
		{nil, nil, true},
		{[]string{"-jwt-rule", rule}, nil, false},
		{nil, env{"JWT_RULE": rule}, false},
		{[]string{"-kubernetes"}, nil, false},
		{[]string{"-token-issuer", "https://a.test"}, nil, false},
		{[]string{"-own-token", "/a"}, nil, false},
		{[]string{"-token-issuer", "https://a.test"}, inPod, true},
		{[]string{"-own-token", "/a"}, inPod, true},
		{[]string{"-audience", "a"}, nil, true},
		{[]string{"-trusted-gateway-cidr", "10.0.0.0/8"}, nil, true},
		{[]string{"-jwt-rule", rule}, inPod, false},
	} {
		c := must.Get(parse(tc.args, tc.env.get, io.Discard, false))(t)
		assert.Equal(t, tc.want, c.Development(), tc.args)
		assert.Equal(t, tc.want && c.inCluster, c.check(true) != nil, "in development mode it does not run in a pod: %q", tc.args)
		if !tc.want && !c.Kubernetes {
			assert.Empty(t, c.linkerdAddr)
			assert.Equal(t, 2160*time.Hour, c.CA.MaxTTL)
			assert.NoError(t, must.Err(parse(append(tc.args, "-istio-addr", ":15012"), tc.env.get, io.Discard, true)))
		}
	}
}

// -renew-by-certificate is a duration, or one of two words.
func TestRenewByCertificate(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]renewal{"off": -1, "unlimited": 0, "720h": renewal(720 * time.Hour)} {
		c := must.Get(parse([]string{"-renew-by-certificate", text}, env{}.get, io.Discard, true))(t)
		assert.Equal(t, want, c.renew)
		assert.Equal(t, text, strings.Replace(c.renew.String(), "h0m0s", "h", 1))
	}
	for _, text := range []string{"", "0", "-1h", "never", "30d", "1ms"} {
		_, err := parse([]string{"-renew-by-certificate", text}, env{}.get, io.Discard, true)
		require.ErrorContains(t, err, "-renew-by-certificate", text)
	}
	ra := []string{"-kubernetes", "-external-ca", kubernetesRA, "-k8s-signer", "example.com/mesh", "-renew-by-certificate"}
	require.ErrorContains(t, must.Err(parse(append(ra, "720h"), env{}.get, io.Discard, false)), "-renew-by-certificate")
	must.Get(parse(append(ra, "off"), env{}.get, io.Discard, false))(t)
}

// A CA is made in the default directory if that is empty, and elsewhere if the operator says so.
func TestMayCreate(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	may := func(args ...string) bool {
		return must.Get(parse(args, env{}.get, io.Discard, false))(t).mayCreate()
	}
	elsewhere := t.TempDir()
	assert.True(t, may(), "there is no directory yet")
	assert.False(t, may("-create=false"))
	assert.False(t, may("-state-dir", elsewhere), "it may be a volume that is not mounted")
	assert.True(t, may("-state-dir", elsewhere, "-create"))
	assert.False(t, may("-kubernetes"), "the Secret may have been deleted")
	assert.True(t, may("-kubernetes", "-create"))
	dir := filepath.Join(os.Getenv("XDG_STATE_HOME"), "svidkit-ca", "cluster.local")
	require.NoError(t, os.MkdirAll(filepath.Join(dir, "ca"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "token-secret"), []byte("x"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "audit.jsonl"), nil, 0o600))
	assert.True(t, may(), "a start that failed")
	for _, name := range []string{"root-cert.pem", "tokens", "audit.jsonl.1", filepath.Join("ca", "record.json")} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600))
		assert.False(t, may(), name)
		assert.True(t, may("-create"), name)
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "audit.jsonl"), []byte("{}\n"), 0o600))
	assert.False(t, may(), "something was signed here")
}

// variables returns the variables of the environment by their flags.
func variables() map[string]string {
	all := make(map[string]string)
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	new(Config).define(fs)
	fs.VisitAll(func(f *flag.Flag) {
		if name := variable(f); name != "" {
			all[f.Name] = name
		}
	})
	return all
}

// Each variable of Istio's CA says the same as its flag, and a flag wins.
func TestEnvironment(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.1-9", "IST-3.2-1", "IST-3.2-2", "IST-3.2-3", "IST-3.2-4", "IST-3.2-5", "IST-3.2-6", "IST-3.2-7", "IST-3.2-8", "IST-3.2-9",
		"IST-3.2-11", "IST-3.2-14", "IST-3.2-15", "IST-3.2-16", "IST-3.2-17", "IST-3.2-19", "IST-3.2-20", "IST-3.2-21", "IST-3.2-22",
		"IST-3.2-23", "IST-3.3-1")
	for variable, tc := range map[string]struct {
		value string
		want  any
		get   func(c *Config) any
	}{
		"TRUST_DOMAIN":                                          {"example.org", "example.org", func(c *Config) any { return c.CA.TrustDomain.String() }},
		"ROOT_CA_DIR":                                           {"/etc/ca", "/etc/ca", func(c *Config) any { return c.pluggedIn.Dir }},
		"DEFAULT_WORKLOAD_CERT_TTL":                             {"90m", 90 * time.Minute, func(c *Config) any { return c.CA.DefaultTTL }},
		"MAX_WORKLOAD_CERT_TTL":                                 {"48h", 48 * time.Hour, func(c *Config) any { return c.CA.MaxTTL }},
		"CITADEL_SELF_SIGNED_CA_CERT_TTL":                       {"8760h", 8760 * time.Hour, func(c *Config) any { return c.CA.Rotation.RootTTL }},
		"CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL":          {"30m", 30 * time.Minute, func(c *Config) any { return c.CA.Rotation.CheckInterval }},
		"CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE": {"35", 0.35, func(c *Config) any { return c.CA.Rotation.GraceRatio }},
		"CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR":           {"false", true, func(c *Config) any { return c.CA.Rotation.NoJitter }},
		"CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE":                   {"3072", "rsa-3072", func(c *Config) any { return c.CA.Rotation.KeyAlgorithm }},
		"USE_CACERTS_FOR_SELF_SIGNED_CA":                        {"true", true, func(c *Config) any { return c.cacerts }},
		"ISTIO_MULTIROOT_MESH":                                  {"true", true, func(c *Config) any { return c.pluggedIn.MultiRoot }},
		"TOKEN_AUDIENCES":                                       {"a, b", []string{"a", "b"}, func(c *Config) any { return c.cluster.Audiences }},
		"CA_TRUSTED_NODE_ACCOUNTS":                              {"istio-system/ztunnel,kube-system/x", []string{"istio-system/ztunnel", "kube-system/x"}, func(c *Config) any { return c.cluster.NodeAccounts }},
		"ENABLE_CA_SERVER":                                      {"false", "", func(c *Config) any { return c.istioAddr + c.linkerdAddr }},
		"CA_CREATE":                                             {"true", true, func(c *Config) any { return c.mayCreate() }},
		"CA_WAIT":                                               {"20m", 20 * time.Minute, func(c *Config) any { return c.wait }},
		"PILOT_CA_CERT_CONFIGMAP":                               {"roots", "roots", func(c *Config) any { return c.rootConfigMap }},
		"ISTIOD_CUSTOM_HOST":                                    {"ca.test, b.test", []string{"ca.test", "b.test"}, func(c *Config) any { return c.dnsNames }},
		"CLUSTER_ID":                                            {"c1", "c1", func(c *Config) any { return c.cluster.ClusterID }},
		"POD_NAMESPACE":                                         {"mesh", "mesh", func(c *Config) any { return c.namespace }},
		"EXTERNAL_CA":                                           {"ISTIOD_RA_KUBERNETES_API", "ISTIOD_RA_KUBERNETES_API", func(c *Config) any { return c.ExternalCA }},
		"K8S_SIGNER":                                            {"example.com/mesh", "example.com/mesh", func(c *Config) any { return c.external.Signer }},
		"JWT_RULE": {`{"issuer":"https://oidc.example.org","jwks_uri":"https://keys.example.org/jwks","audiences":["istio-ca"]}`,
			rule{Issuer: "https://oidc.example.org", JWKSURI: "https://keys.example.org/jwks", Audiences: []string{"istio-ca"}}, func(c *Config) any { return *c.callers.rule }},
		"JWT_POLICY":           {"first-party-jwt", true, func(c *Config) any { return c.callers.firstParty }},
		"TOKEN_ISSUER":         {"https://oidc.example.org", "https://oidc.example.org", func(c *Config) any { return c.callers.issuer }},
		"AUDIENCE":             {"istio-ca", "istio-ca", func(c *Config) any { return c.callers.audience }},
		"TRUSTED_GATEWAY_CIDR": {"10.0.0.0/16, 2001:db8::/32", "[10.0.0.0/16 2001:db8::/32]", func(c *Config) any { return fmt.Sprint(c.callers.gateways) }},
		"CERT_SIGNER_DOMAIN":   {"example.com", "example.com", func(c *Config) any { return c.external.SignerDomain }},
	} {
		e := env{variable: tc.value, "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
		if variable == "EXTERNAL_CA" {
			e["K8S_SIGNER"] = "example.com/mesh"
		}
		c := must.Get(parse([]string{"-kubernetes"}, e.get, io.Discard, true))(t, variable)
		assert.Equal(t, tc.want, tc.get(c), variable)
	}
	assert.Len(t, variables(), 28)
	c, err := parse([]string{"-kubernetes", "-max-ttl", "5h", "-trust-domain=b.test"}, env{"MAX_WORKLOAD_CERT_TTL": "48h", "TRUST_DOMAIN": "a.test"}.get, io.Discard, true)
	require.NoError(t, err)
	assert.Equal(t, 5*time.Hour, c.CA.MaxTTL)
	assert.Equal(t, 5*time.Hour, c.CA.DefaultTTL, "which was not given")
	assert.Equal(t, 5*time.Hour-20*time.Second, c.linkerd.Lifetime)
	assert.Equal(t, "b.test", c.CA.TrustDomain.String())

	c = must.Get(parse(nil, env{"CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL": "0"}.get, io.Discard, true))(t)
	assert.True(t, c.CA.Rotation.Manual, "as with Istio, this switches the rotator off")
}

// A value that is malformed is an error that names its variable.
func TestMalformedEnvironment(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.2-15", "IST-3.8-1")
	for variable, values := range map[string][]string{
		"TRUST_DOMAIN":                                          {"Example.org", "a b", "spiffe://", "x/y"},
		"DEFAULT_WORKLOAD_CERT_TTL":                             {"24", "1d", "x", "0s", "-1h", "500ms", "2161h"},
		"MAX_WORKLOAD_CERT_TTL":                                 {"90d", "", "0", "-1s", "1ns"},
		"CITADEL_SELF_SIGNED_CA_CERT_TTL":                       {"ten years", "0"},
		"CITADEL_SELF_SIGNED_ROOT_CERT_CHECK_INTERVAL":          {"hourly", "1"},
		"CITADEL_SELF_SIGNED_ROOT_CERT_GRACE_PERIOD_PERCENTILE": {"0", "51", "20%", "0.2", "-1"},
		"CITADEL_ENABLE_JITTER_FOR_ROOT_CERT_ROTATOR":           {"yes", "2"},
		"CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE":                   {"1024", "2047", "8192", "-2048", "x"},
		"USE_CACERTS_FOR_SELF_SIGNED_CA":                        {"maybe"},
		"ISTIO_MULTIROOT_MESH":                                  {"maybe"},
		"TOKEN_AUDIENCES":                                       {",", "a,,b", " "},
		"CA_TRUSTED_NODE_ACCOUNTS":                              {"ztunnel", "/ztunnel", "istio-system/", "a/b/c", "a/b,", "a/b,c"},
		"JWT_RULE":                                              {"istio", "[]", `{"issuer":1}`, `{"issuer":"https://a.test"} x`, `{"issuer":"https://a.test","jwks":"{}"}`, `{"issuer":"https://a.test","fromHeaders":[]}`},
		"JWT_POLICY":                                            {"second-party-jwt", "FIRST-PARTY-JWT", "none"},
		"TRUSTED_GATEWAY_CIDR":                                  {"10.0.0.1", "10.0.0.0/33", "gateway", "10.0.0.0/8,", ",", "10.0.0.0/8,x"},
		"EXTERNAL_CA":                                           {"ISTIOD_RA_ISTIO_API", "istiod_ra_kubernetes_api", "ISTIOD_RA_KUBERNETES_API"},
	} {
		for _, value := range values {
			if value == "" {
				continue // unset
			}
			_, err := parse([]string{"-kubernetes"}, env{variable: value}.get, io.Discard, true)
			want := variable
			if value == kubernetesRA {
				want = "K8S_SIGNER" // which is missing then
			}
			require.ErrorContains(t, err, want, value)
		}
	}
	_, err := parse(nil, env{"EXTERNAL_CA": kubernetesRA}.get, io.Discard, true)
	require.ErrorContains(t, err, "EXTERNAL_CA")
	require.ErrorContains(t, err, "-kubernetes")
	_, err = parse(nil, env{"CA_TRUSTED_NODE_ACCOUNTS": "a/b"}.get, io.Discard, true)
	require.ErrorContains(t, err, "CA_TRUSTED_NODE_ACCOUNTS")
}

// Flags that are wrong, or do not go together.
func TestBadFlags(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ args, want string }{
		{"-nonsense", "nonsense"},
		{"csr.pem", "csr.pem"},
		{"-namespace a/b", "-namespace"},
		{"-trust-domain my_domain", "-linkerd-addr"},
		{"-linkerd-namespace a.b", "-linkerd-addr"},
		{"-dns-names a..b", "-dns-names"},
		{"-kubernetes-api http://127.0.0.1:8001", "-kubernetes-api"},
		{"-trusted-node-accounts a/b", "-trusted-node-accounts"},
		{"-concurrent -1", "-concurrent"},
		{"-queue -1", "-queue"},
		{"-rate -1", "-rate"},
		{"-caller-rate NaN", "-caller-rate"},
		{"-propagation -1s", "-propagation"},
		{"-linkerd-clock-skew 0", "-linkerd-clock-skew"},
		{"-oidc-issuer http://oidc.example.org", "-oidc-issuer: the scheme"},
		{"-oidc-issuer https://oidc.example.org/", "-oidc-issuer: \"https://oidc.example.org/\" is no URL of an issuer"},
		{"-oidc-issuer https://oidc.example.org -oidc-addr here", "-oidc-addr"},
		{"-oidc-addr 127.0.0.1:0", "-oidc-addr: it needs -oidc-issuer"},
		{"-oidc-issuer https://oidc.example.org -oidc-cert a -oidc-key b", "-oidc-cert: it is for -oidc-addr"},
		{"-oidc-issuer https://oidc.example.org -oidc-addr 127.0.0.1:0 -oidc-cert a", "-oidc-cert and -oidc-key belong together"},
		{"-oidc-issuer https://oidc.example.org -kubernetes -external-ca ISTIOD_RA_KUBERNETES_API -k8s-signer example.org/a", "-oidc-issuer: the signers of a cluster sign no tokens"},
		{"-jwt-algorithm PS256", "-jwt-algorithm: it is none of"},
		{"-root-keys ed25519", `-root-keys: "ed25519" is none of ecdsa-p256`},
		{"-root-keys ml-dsa-87", "-root-keys"},
		{"-root-keys ecdsa-p256,rsa-2048", "-root-keys: of two, one is of ML-DSA, and the other is not"},
		{"-root-keys rsa-2048, -algorithms ecdsa", `-root-keys: "" is none of`},
		{"-root-keys rsa-2048 -rsa-bits 2048", "-root-keys: -rsa-bits (CITADEL_SELF_SIGNED_CA_RSA_KEY_SIZE) is for the same"},
		{"-algorithms ecdsa,ecdsa", "-algorithms: spiffe: invalid algorithms"},
		{"-algorithms ecdsa-p256", "-algorithms"},
		{"-kubernetes -linkerd-ttl 2160h", "-linkerd-ttl"},
		{"-backdate 0", "-backdate"},
		{"-refresh-hint 10ms", "-refresh-hint"},
		{"-refresh-hint 1500ms", "-refresh-hint: it is not a number of whole seconds"},
		{"-root-ttl 2h", "-root-ttl (CITADEL_SELF_SIGNED_CA_CERT_TTL): it is not more than twice -propagation (25m0s) and -default-ttl (1h0m0s) together"},
		{"-kubernetes -root-ttl 100h -propagation 30h", "-root-ttl (CITADEL_SELF_SIGNED_CA_CERT_TTL): it is not more than twice -propagation (30h0m0s)"},
		{"-refresh-hint 2000000h", "-root-ttl"},
		{"-kubernetes -max-ttl 15s", "-max-ttl (MAX_WORKLOAD_CERT_TTL): without -linkerd-clock-skew it leaves less than a second for certificates of Linkerd's API; -linkerd-addr= serves"},
		{"-kubernetes -max-ttl 15s -linkerd-ttl 10s", "-linkerd-ttl: with -linkerd-clock-skew it is more than -max-ttl"},
		{"-kubernetes -linkerd-addr= -linkerd-ttl 1ms", "-linkerd-ttl: it is less than a second"},
		{"-trusted-gateway-cidr 10.0.0.0/8 -renew-by-certificate off", "-trusted-gateway-cidr"},
		{"-trusted-gateway-cidr 10.0.0.0/8 -renew-by-certificate 720h", "-trusted-gateway-cidr"},
		{`-jwt-rule {"issuer":"https://a.test","audiences":["a"]} -linkerd-addr 127.0.0.1:0`, "-linkerd-addr"},
		{"-token-issuer https://a.test -linkerd-addr 127.0.0.1:0", "-linkerd-addr"},
	} {
		_, err := parse(strings.Fields(tc.args), env{}.get, io.Discard, true)
		require.ErrorContains(t, err, tc.want, tc.args)
		require.ErrorIs(t, err, ErrUsage, tc.args)
	}
	for _, args := range []string{
		"-kubernetes -max-ttl 15s -linkerd-addr=", // no certificate is for Linkerd
		"-kubernetes -default-ttl 480h",           // and so a new key for tokens is distributed for 480h
		"-kubernetes -rate 1e3 -queue 0",
	} {
		c := must.Get(parse(strings.Fields(args), env{}.get, io.Discard, true))(t, args)
		must.Get(ca.New(c.CA))(t, args)
	}
}

// Each error is one line, says what is wrong, and where help is. Nothing else is printed.
func TestMessages(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args string
		env  env
		want string
	}{
		{"-nonsense", nil, "there is no flag -nonsense"},
		{"-max-ttl", nil, "flag needs an argument: -max-ttl"},
		{"-max-ttl 90d", nil, `invalid value "90d" for flag -max-ttl: it is not a number with a unit, such as 90m or 24h, which is a day; -help lists the flags`},
		{"-refresh-hint 24", nil, `invalid value "24" for flag -refresh-hint: it is not a number with a unit, such as 90m or 24h`},
		{"", env{"MAX_WORKLOAD_CERT_TTL": "90d"}, `MAX_WORKLOAD_CERT_TTL="90d" in the environment: it is not a number with a unit, such as 90m or 24h`},
		{"-istio-addr localhost", nil, "-istio-addr: it is not HOST:PORT, such as localhost:15012 or :15012"},
		{"-queue x", nil, `invalid value "x" for flag -queue: it is not a whole number, such as 10`},
		{"-queue 99999999999999999999", nil, `for flag -queue: value out of range`},
		{"-caller-rate abc", nil, `invalid value "abc" for flag -caller-rate: it is not a number, such as 10 or 0.5`},
		{"-create=maybe", nil, `invalid boolean value "maybe" for -create: it is neither true nor false`},
		{"", env{"ISTIO_MULTIROOT_MESH": "maybe"}, `ISTIO_MULTIROOT_MESH="maybe" in the environment: it is neither true nor false`},
		{"-trust-domain A_B", nil, "-trust-domain"},
		{"csr.pem", nil, `"csr.pem" is not understood`},
		{"-default-ttl 1ms", nil, "-default-ttl (DEFAULT_WORKLOAD_CERT_TTL): it is less than a second"},
	} {
		var out strings.Builder
		_, err := parse(strings.Fields(tc.args), tc.env.get, &out, true)
		require.ErrorContains(t, err, tc.want, tc.args)
		assert.NotContains(t, err.Error(), "\n")
		assert.ErrorIs(t, err, ErrUsage)
		if _, parseErr := parse(strings.Fields(tc.args), tc.env.get, &out, false); parseErr != nil {
			assert.True(t, strings.HasSuffix(parseErr.Error(), "; -help lists the flags"), parseErr)
		}
		assert.Empty(t, out.String(), tc.args)
	}
}

// In development mode the server listens on loopback only, and does not run in a pod.
func TestDevelopmentModeListensOnLoopbackOnly(t *testing.T) {
	t.Parallel()
	_, err := parse(nil, env{"KUBERNETES_SERVICE_HOST": "10.0.0.1"}.get, io.Discard, true)
	require.ErrorContains(t, err, "-kubernetes")
	require.ErrorContains(t, err, "trusted")
	for _, flag := range []string{"-istio-addr", "-linkerd-addr", "-bundle-addr", "-admin-addr"} {
		for _, addr := range []string{"127.0.0.1", "8080", "localhost", "[::1]"} {
			for _, mode := range []string{"-kubernetes", "-kubernetes=false"} {
				_, err := parse([]string{mode, flag, addr}, env{}.get, io.Discard, true)
				require.ErrorContains(t, err, flag+": it is not HOST:PORT", addr)
			}
		}
		for _, addr := range []string{":8080", "0.0.0.0:8080", "[::]:8080", "192.0.2.1:8080", "example.org:8080"} {
			require.ErrorContains(t, must.Err(parse([]string{flag, addr}, env{}.get, io.Discard, true)), flag, addr)
			must.Get(parse([]string{"-kubernetes", flag, addr}, env{}.get, io.Discard, true))(t)
		}
		for _, addr := range []string{"", "127.0.0.2:0", "[::1]:1", "localhost:8080"} {
			must.Get(parse([]string{flag, addr}, env{}.get, io.Discard, true))(t, addr)
		}
	}
}

// Each trust domain has a directory of its own, so that one CA is not in the way of another.
func TestStateDir(t *testing.T) {
	t.Setenv("XDG_STATE_HOME", t.TempDir())
	dirs := make(map[string]bool)
	for _, td := range []string{"cluster.local", "example.org", "a", "a.b"} {
		c := must.Get(parse([]string{"-trust-domain", td}, env{}.get, io.Discard, true))(t)
		dirs[c.StateDir] = true
		require.Equal(t, filepath.Join(os.Getenv("XDG_STATE_HOME"), "svidkit-ca", td), c.StateDir)
		require.Equal(t, filepath.Join(c.StateDir, "audit.jsonl"), c.AuditLog)
	}
	require.Len(t, dirs, 4)
	for _, td := range []string{".", ".."} {
		c := must.Get(parse([]string{"-trust-domain", td, "-linkerd-addr="}, env{}.get, io.Discard, true))(t)
		require.Empty(t, c.StateDir, "it would be the directory of others")
	}
	c := must.Get(parse([]string{"-state-dir="}, env{}.get, io.Discard, true))(t)
	require.Empty(t, c.StateDir, "a temporary one was asked for")
}

// The list of flags names everything that can be set.
func TestHelp(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	_, err := parse([]string{"-help"}, env{}.get, &out, false)
	require.ErrorIs(t, err, flag.ErrHelp)
	require.NotErrorIs(t, err, ErrUsage)
	assert.Regexp(t, `(?m)^  -caller-rate second\n.*\(default 10\)$`, out.String())
	assert.NotContains(t, out.String(), "(default 0)")
	for flag, variable := range variables() {
		assert.Regexp(t, `-`+flag+`\b.*\n.*\[`+variable+`\]`, out.String())
	}
}

// In development mode a name of loopback that leads elsewhere is refused when the port is open.
func TestPortBeyondLoopback(t *testing.T) {
	t.Parallel()
	c := must.Get(parse([]string{"-state-dir", t.TempDir()}, env{}.get, io.Discard, true))(t)
	for _, kubernetes := range []bool{false, true} {
		c.Kubernetes = kubernetes
		l, err := c.listen("Istio's API", "istio-addr", "0.0.0.0:0") // as the address of localhost may be
		if kubernetes {
			require.NoError(t, err)
			require.NoError(t, l.Close())
			continue
		}
		require.ErrorContains(t, err, "not on loopback")
		require.Nil(t, l)
	}
}

func TestCommandHasNoSecrets(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, ""},
		{[]string{"/usr/bin/ca"}, "ca"},
		{[]string{"ca", "-taint", "1f", "-state-dir=/x"}, "ca -taint 1f -state-dir=/x"},
		{[]string{"ca", "-api-token", "hunter2", "-rotate"}, "ca -api-token … -rotate"},
		{[]string{"ca", "--API-Token=hunter2", "-rotate"}, "ca --API-Token=… -rotate"},
		{[]string{"ca", "-password=", "-v"}, "ca -password=… -v"},
		{[]string{"ca", "-client-secret", "-rotate"}, "ca -client-secret -rotate"},
		{[]string{"ca", "-credentials", "hunter2", "hunter"}, "ca -credentials … hunter"},
		{[]string{"ca", "-server", "https://me:hunter2@host/x"}, "ca -server https://…@host/x"},
		{[]string{"ca", "-server=https://hunter2@host"}, "ca -server=https://…@host"},
		{[]string{"ca", "-a=https://x:y@h/1,http://b@h,ftp://h/p@q,://@"}, "ca -a=https://…@h/1,http://…@h,ftp://h/p@q,://…@"},
		{[]string{"ca", "bad\xff"}, "ca bad\uFFFD"},
		{[]string{"ca", strings.Repeat("ä", 2000)}, "ca " + strings.Repeat("ä", 510) + "…"},
	} {
		assert.Equal(t, tc.want, command(tc.args))
	}
}

func TestCurrentActor(t *testing.T) {
	t.Parallel()
	a := currentActor()
	assert.Equal(t, must.Get(os.Hostname())(t), a.Host)
	if runtime.GOOS != "windows" {
		assert.Equal(t, strconv.Itoa(os.Getuid()), a.UID)
	}
	assert.True(t, strings.HasPrefix(a.Command, filepath.Base(os.Args[0])), a.Command)
}

func TestParseJWTPolicy(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"": false, "third-party-jwt": false, "first-party-jwt": true} {
		assert.Equal(t, want, must.Get(parseJWTPolicy(text))(t), text)
	}
	for _, text := range []string{"none", "first-party-jwt ", "FIRST-PARTY-JWT", "third-party"} {
		require.ErrorContains(t, must.Err(parseJWTPolicy(text)), "neither third-party-jwt nor first-party-jwt")
	}
}

// TestRecord has a client that has gone before the event is recorded, and more of them than are reported.
func TestRecord(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	r := newRecorder(nil, "linkerd", slog.New(slog.NewTextHandler(&log, nil)))
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	failed := linkerd.Event{Reason: "IssuerValidationFailed", Warning: true, Message: "x"}
	r.record(gone, failed)
	require.Len(t, r.queue, 1)
	assert.Empty(t, log.String())
	for range 100 {
		r.record(t.Context(), failed)
	}
	assert.Len(t, r.queue, 25)
	assert.Contains(t, log.String(), "there are too many")
	r.record(t.Context(), linkerd.Event{Reason: "IssuedLeafCertificate", Namespace: "n", ServiceAccount: "a"})
	assert.Len(t, r.queue, 26, "of another object")
}

// A second workload that is granted less than it asks for is seen in the log.
func TestShortenedAreNamed(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	l := lifetimes{time.Hour, true, ratelog.New(slog.New(slog.NewTextHandler(&log, nil)), 0)}
	for range 5 {
		for _, name := range []string{"/web", "/db"} {
			r := ca.Request{ID: spiffe.MustParseID("spiffe://example.org" + name), TTL: 2 * time.Hour}
			must.Get(l.grant(t.Context(), granted{t: t}, r))(t)
			assert.Contains(t, log.String(), "id="+r.ID.String())
		}
	}
	assert.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
}

type granted struct {
	ca.Signer
	t *testing.T
}

func (g granted) Sign(_ context.Context, r ca.Request) ([]*x509.Certificate, error) {
	assert.Equal(g.t, time.Hour, r.TTL)
	return nil, nil
}

// A pair of -tls-cert that cannot be used now, as its life is over or has not begun, does not take the place of the one that is presented; the one after it does. At the
// start it is refused.
func TestServerCertificateOutOfTime(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	host := spiffetest.NewCA(t, "server.test")
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	write := func(certName string, change func(*x509.Certificate)) {
		chain, private := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{certName}; change(c) })
		require.NoError(t, os.WriteFile(key, must.Get(pki.MarshalPrivateKeyPEM(private))(t), 0o600))
		require.NoError(t, os.WriteFile(cert, pki.MarshalCertificatesPEM(chain...), 0o600))
	}
	ended := func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Minute)
	}
	write("first.test", func(*x509.Certificate) {})
	l := new(logs)
	_, at := serve(t, l, env{}.get, "-tls-cert", cert, "-tls-key", key)
	presented := func() string {
		conn, err := tls.Dial("tcp", at.Istio.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}) // to look
		require.NoError(t, err)
		defer conn.Close()
		return strings.Join(conn.ConnectionState().PeerCertificates[0].DNSNames, ",")
	}
	require.Equal(t, "first.test", presented())
	write("ended.test", ended)
	require.Eventually(t, func() bool {
		return strings.Contains(l.String(), cert+": the certificate has expired at ")
	}, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	write("early.test", func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(time.Hour), time.Now().Add(2*time.Hour)
	})
	require.Eventually(t, func() bool { return strings.Contains(l.String(), cert+": the certificate is valid from ") }, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	data := must.Get(os.ReadFile(cert))(t)
	require.NoError(t, os.WriteFile(cert, append(data, "-----BEGIN CERTIFICATE-----\nMIIB\n"...), 0o600))
	require.Eventually(t, func() bool { return strings.Contains(l.String(), cert+": 1 damaged PEM block") }, time.Minute, 10*time.Millisecond, "%s", l)
	require.Equal(t, "first.test", presented())
	write("third.test", func(*x509.Certificate) {})
	require.Eventually(t, func() bool { return presented() == "third.test" }, time.Minute, 20*time.Millisecond)

	write("ended.test", ended)
	_, _, err := followTLS(t.Context(), "-tls-cert", cert, key, l.logger())
	require.ErrorContains(t, err, "-tls-cert: ")
	require.ErrorContains(t, err, "has expired at")
}

// Roots go into no namespace that is being deleted, and a ConfigMap that another replica has written since it was read is not written over.
func TestRootConfigMapOfOthers(t *testing.T) {
	t.Parallel()
	api := kubetest.Start(t)
	api.Put("/api/v1/namespaces/ending", map[string]any{"metadata": map[string]any{"deletionTimestamp": time.Now().UTC().Format(time.RFC3339)}})
	api.Put("/api/v1/namespaces/prod", map[string]any{"metadata": map[string]any{}})
	at := func(ns string) string { return "/api/v1/namespaces/" + ns + "/configmaps/roots" }
	write := func(roots string) {
		api.Put(at("prod"), map[string]any{"metadata": map[string]any{}, "data": map[string]string{"root-cert.pem": roots}})
	}
	write("old")
	var raced atomic.Bool
	api.Faults(func(r *http.Request) *kubetest.Fault {
		if r.Method == http.MethodPatch && raced.CompareAndSwap(false, true) {
			write("of another replica")
		}
		return nil
	})
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")}))(t)
	c, err := parse([]string{"-kubernetes", "-kubernetes-api", api.URL(), "-root-configmap", "roots"}, env{}.get, new(bytes.Buffer), true)
	require.NoError(t, err)
	c.cluster.API.HTTPClient = api.Client()
	l := new(logs)
	stop := must.Get(c.handOutRoots(t.Context(), a, 50*time.Millisecond, l.logger()))(t)
	defer stop()
	var o struct{ Data map[string]string }
	require.Eventually(t, func() bool {
		return api.Get(at("prod"), &o) && o.Data["root-cert.pem"] == string(a.Bundle().MarshalPEM())
	}, time.Minute, 10*time.Millisecond, "%s", l)
	var codes []int
	for _, r := range api.Requests() {
		require.NotContains(t, r.Path, "/ending/", "%+v", r)
		if r.Method == http.MethodPatch {
			codes = append(codes, r.Code)
		}
	}
	require.Equal(t, []int{http.StatusConflict, http.StatusOK}, codes)
	require.NotContains(t, l.String(), "level=WARN", "another replica is no failure")
}

func TestUnverifiedIssuer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.4-6")
	file := filepath.Join(t.TempDir(), "token")
	token := func(claims string) string {
		return "eyJhbGciOiJFUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".AAAA"
	}
	for text, want := range map[string]string{
		token(`{"iss":"https://a.test","aud":["first","second"],"exp":1}`) + "\n": "",
		token(`{"iss":"https://a.test","aud":"first"}`):                           "",
		token(`{"aud":"first"}`):                                                  "names no issuer",
		token(`{"iss":5,"aud":"first"}`):                                          "names no issuer",
		token(`{"iss":"https://a.test"}`):                                         "names no audience",
		token(`{"iss":"https://a.test","aud":[""]}`):                              "names no audience",
		token(`{"iss":"https://a.test","aud":[1,"first"]}`):                       "names no audience",
		"":                                "no JWT",
		"a.b.c":                           "no JWT",
		token(strings.Repeat("x", 1<<20)): "has more than",
	} {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		issuer, audience, err := unverifiedIssuer(file)
		if want != "" {
			must.Fail(t, err, want)
			continue
		}
		require.NoError(t, err, text)
		assert.Equal(t, []string{"https://a.test", "first"}, []string{issuer, audience})
	}
	_, _, err := unverifiedIssuer(filepath.Dir(file))
	require.Error(t, err)
}
