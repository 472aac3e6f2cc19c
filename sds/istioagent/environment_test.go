package istioagent

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
)

func TestDefaults(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.2-2", "IST-9.2-12", "IST-9.2-13", "IST-9.2-14", "IST-9.2-17", "IST-9.2-21", "IST-9.2-22", "IST-9.2-44", "IST-9.5-1",
		"IST-1.1-7")
	c := must.Get(FromEnvironment(nil))(t)
	assert.Equal(t, "cluster.local", c.trustDomain.String())
	assert.Equal(t, 24*time.Hour, c.v.Duration("SECRET_TTL"))
	assert.InDelta(t, 0.5, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO"), 0)
	assert.InDelta(t, 0.01, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO_JITTER"), 0)
	assert.Equal(t, "rsa-2048", c.keyAlgorithm)
	assert.Equal(t, "istiod.istio-system.svc:15012", c.proxy.DiscoveryAddress)
	assert.Equal(t, "socket", c.text("WORKLOAD_IDENTITY_SOCKET_FILE"))
	assert.Equal(t, duration(5*time.Second), c.proxy.TerminationDrainDuration)
	assert.True(t, c.Envoy.XDS)
	assert.True(t, c.v.Bool("PROXY_XDS_DEBUG_VIA_AGENT"))
	assert.Equal(t, 15004, c.v.Int("PROXY_XDS_DEBUG_VIA_AGENT_PORT"))
	assert.False(t, c.v.Bool("FILE_MOUNTED_CERTS"))
	assert.False(t, c.inPod)
	assert.False(t, c.v.Bool("PKCS8_KEY"))
	assert.Contains(t, c.AllowFiles, "./etc/certs")
	assert.Empty(t, c.notes)
	same := must.Get(FromEnvironment([]string{"JWT_POLICY=third-party-jwt"}))(t)
	same.v = c.v
	assert.Equal(t, c, same, "it is the default")
	var help strings.Builder
	require.NoError(t, WriteHelp(&help, true))
	assert.Contains(t, help.String(), "\n| `JWT_POLICY` | text | `third-party-jwt` |")
}

// TestEnvironment has what an injected sidecar, a machine and a pod with mounted files have, and each variable.
func TestEnvironment(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.2-21", "IST-9.2-44")
	for _, c := range []struct {
		name    string
		environ string
		check   func(*testing.T, Config)
	}{
		{"sidecar", `JWT_POLICY=third-party-jwt PILOT_CERT_PROVIDER=istiod CA_ADDR=istiod.istio-system.svc:15012 POD_NAME=web-1 POD_NAMESPACE=shop
			INSTANCE_IP=10.0.0.1 SERVICE_ACCOUNT=web PROXY_CONFIG={} ISTIO_META_CLUSTER_ID=Kubernetes TRUST_DOMAIN=example.org KUBERNETES_SERVICE_HOST=10.96.0.1
			HOST_IP=10.1.0.1 ISTIO_META_MESH_ID=m1 ISTIO_CPU_LIMIT=2 GOMEMLIMIT=1073741824 GOMAXPROCS=2`, func(t *testing.T, c Config) {
			assert.Equal(t, []string{"example.org", "shop", "web", "web-1", "10.0.0.1", "Kubernetes"},
				[]string{c.trustDomain.String(), c.text("POD_NAMESPACE"), c.text("SERVICE_ACCOUNT"), c.text("POD_NAME"), c.text("INSTANCE_IP"), c.clusterID})
			assert.True(t, c.inPod)
			assert.Equal(t, map[string]string{"MESH_ID": "m1"}, c.v.Prefixed("ISTIO_META_*"))
			assert.Empty(t, c.notes)
		}},
		{"machine", `CA_ADDR=istiod.example.org:15012 PROV_CERT=./etc/certs OUTPUT_CERTS=./etc/certs CREDENTIAL_FETCHER_TYPE=GoogleComputeEngine CLUSTER_ID=c2
			PILOT_CERT_PROVIDER=custom SECRET_TTL=1h CA_HEADER_X-One=1 XDS_HEADER_two=2 ISTIOD_SAN=istiod.example.org`, func(t *testing.T, c Config) {
			assert.Equal(t, []string{"istiod.example.org:15012", "./etc/certs", "./etc/certs", "GoogleComputeEngine", "c2", "custom", "istiod.example.org"},
				[]string{c.text("CA_ADDR"), c.text("PROV_CERT"), c.outputCerts, c.text("CREDENTIAL_FETCHER_TYPE"), c.clusterID, c.text("PILOT_CERT_PROVIDER"), c.text("ISTIOD_SAN")})
			assert.Equal(t, time.Hour, c.v.Duration("SECRET_TTL"))
			assert.Equal(t, "1", c.header("CA_HEADER_*").Get("x-one"))
			assert.Equal(t, "2", c.header("XDS_HEADER_*").Get("two"))
		}},
		{"mounted", `FILE_MOUNTED_CERTS=true ISTIO_META_TLS_CLIENT_CERT_CHAIN=/a ISTIO_META_TLS_CLIENT_KEY=/b ISTIO_META_TLS_CLIENT_ROOT_CERT=/c
			ISTIO_META_TLS_SERVER_KEY=/d`, func(t *testing.T, c Config) {
			assert.True(t, c.v.Bool("FILE_MOUNTED_CERTS"))
			assert.Equal(t, []string{"/a", "/b", "/c"}, []string{c.mountedCert, c.mountedKey, c.mountedRoots})
			assert.Contains(t, c.AllowFiles, "/d")
		}},
		{"roots", `CA_ROOT_CA=SYSTEM XDS_ROOT_CA=/x.pem PILOT_CERT_PROVIDER=k8s.io/example.org`, func(t *testing.T, c Config) {
			assert.Equal(t, []string{"SYSTEM", "/x.pem", "k8s.io/example.org"}, []string{c.text("CA_ROOT_CA"), c.text("XDS_ROOT_CA"), c.text("PILOT_CERT_PROVIDER")})
		}},
		{"keys", `ECC_SIGNATURE_ALGORITHM=ECDSA`, func(t *testing.T, c Config) { assert.Equal(t, "ecdsa-p256", c.keyAlgorithm) }},
		{"larger keys", `ECC_SIGNATURE_ALGORITHM=ECDSA ECC_CURVE=P384`, func(t *testing.T, c Config) { assert.Equal(t, "ecdsa-p384", c.keyAlgorithm) }},
		{"RSA", `WORKLOAD_RSA_KEY_SIZE=4096`, func(t *testing.T, c Config) { assert.Equal(t, "rsa-4096", c.keyAlgorithm) }},
		{"at the end", `SECRET_GRACE_PERIOD_RATIO=0 SECRET_GRACE_PERIOD_RATIO_JITTER=0`, func(t *testing.T, c Config) {
			assert.Zero(t, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO"))
			assert.Zero(t, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO_JITTER"))
		}},
		{"at once", `SECRET_GRACE_PERIOD_RATIO=1`, func(t *testing.T, c Config) { assert.InDelta(t, 1, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO"), 0) }},
		{"proxy config", `PROXY_CONFIG={"discoveryAddress":"cp.example.org:15010","configPath":"/x","controlPlaneAuthPolicy":"NONE","concurrency":2}`, func(t *testing.T, c Config) {
			assert.Equal(t, "cp.example.org:15010", c.proxy.DiscoveryAddress)
			assert.Equal(t, "/x", c.Envoy.Dir)
			assert.Equal(t, "NONE", c.proxy.ControlPlaneAuthPolicy)
		}},
		{"no proxy", `PROXY_XDS_VIA_AGENT=false`, func(t *testing.T, c Config) {
			assert.False(t, c.Envoy.XDS)
		}},
		{"tokens for the API server", `JWT_POLICY=first-party-jwt`, func(t *testing.T, c Config) {
			require.Len(t, c.notes, 1)
			assert.Contains(t, c.notes[0], "JWT_POLICY: first-party-jwt is treated as third-party-jwt")
		}},
		{"misspelled", `TRUSTDOMAIN=x SECRET_GRACE_RATIO=1 PATH=/bin KUBERNETES_SERVICE_PORT=443 PROXY_CONFG={} PROXY_CONFIG={"discoveryAdress":"x","status_port":1}`, func(t *testing.T, c Config) {
			require.Len(t, c.notes, 5)
			assert.Contains(t, c.notes[0], "PROXY_CONFG (perhaps PROXY_CONFIG): the agent has none of that name")
			assert.Contains(t, c.notes[1], "SECRET_GRACE_RATIO:")
			assert.Contains(t, c.notes[2], "TRUSTDOMAIN (perhaps TRUST_DOMAIN): the agent has none of that name")
			assert.Contains(t, c.notes[3], `there is no field "discoveryAdress"; there is discoveryAddress`)
			assert.Contains(t, c.notes[4], `there is no field "status_port"; there is statusPort`)
		}},
		{"any other provider", `CA_PROVIDER=Mine`, func(t *testing.T, c Config) { assert.Equal(t, "Mine", c.text("CA_PROVIDER")) }},
		{"Google", `CA_PROVIDER=GoogleCA CA_ADDR=projects/p/locations/l/caPools/c GKE_CLUSTER_URL=https://gke.example.org`, func(t *testing.T, c Config) {
			assert.Equal(t, "https://gke.example.org", c.identityProvider)
		}},
		{"PKCS #8", `PKCS8_KEY=true`, func(t *testing.T, c Config) {
			assert.True(t, c.v.Bool("PKCS8_KEY"))
			assert.Empty(t, c.notes)
		}},
		{"older name of the output", `OUTPUT_CERT=/x OUTPUT_CERTS=/x`, func(t *testing.T, c Config) { assert.Equal(t, "/x", c.outputCerts) }},
		{"older name of the output alone", `OUTPUT_CERT=/x`, func(t *testing.T, c Config) {
			assert.Equal(t, "/x", c.outputCerts)
			assert.Empty(t, c.notes)
		}},
		{"post-quantum", `COMPLIANCE_POLICY=pqc`, func(t *testing.T, c Config) {
			assert.True(t, c.postQuantum)
			assert.False(t, c.text("COMPLIANCE_POLICY") == "fips-140-2")
		}},
		{"no Envoy", `DISABLE_ENVOY=true`, func(t *testing.T, c Config) { assert.True(t, c.Envoy.Disabled) }},
		{"drain by the proxy's configuration", `MINIMUM_DRAIN_DURATION=30s PROXY_CONFIG={"terminationDrainDuration":"2s"}`, func(t *testing.T, c Config) {
			assert.Equal(t, duration(2*time.Second), c.proxy.TerminationDrainDuration)
		}},
		{"Envoy", `PROXY_CONFIG={"concurrency":3,"drainDuration":"7s","statusPort":0,"proxyAdminPort":15001,"binaryPath":"/b","serviceCluster":"c"} ISTIO_CPU_LIMIT=2 ENVOY_STATUS_PORT=15121`,
			func(t *testing.T, c Config) {
				e := c.Envoy
				assert.Equal(t, []any{3, 7 * time.Second, 0, 15001, 15121, 15090, "/b", "c"}, []any{e.Concurrency, e.DrainTime, e.StatusPort, e.AdminPort, c.v.Int("ENVOY_STATUS_PORT"), c.v.Int("ENVOY_PROMETHEUS_PORT"), e.Path, c.proxy.ServiceCluster})
			}},
		{"processors", `ISTIO_CPU_LIMIT=2`, func(t *testing.T, c Config) { assert.Equal(t, 2, c.Envoy.Concurrency) }},
		{"without effect", `DNS_PROXY_ADDR=x HOST_IP=10.0.0.2 TERMINATION_DRAIN_DURATION_SECONDS=7 ISTIO_BOOTSTRAP_OVERRIDE=/x ISTIO_BOOTSTRAP=/x BOOTSTRAP_XDS_AGENT=true PROXY_CONFIG={"holdApplicationUntilProxyStarts":true,"proxyMetadata":{"A":"b"},"tracing":{},"future":1}`, func(t *testing.T, c Config) {
			assert.Empty(t, c.notes)
			for _, name := range []string{"DNS_PROXY_ADDR", "HOST_IP", "TERMINATION_DRAIN", "ISTIO_BOOTSTRAP_OVERRIDE ", "ISTIO_BOOTSTRAP ", "BOOTSTRAP_XDS_AGENT", "holdApplicationUntilProxyStarts", "proxyMetadata", "tracing", `"future"`} {
				assert.Contains(t, strings.Join(c.unused, "\n"), name)
			}
			assert.Len(t, c.unused, 10, "each once")
		}},
		{"FIPS", `COMPLIANCE_POLICY=fips-140-2`, func(t *testing.T, c Config) { assert.True(t, c.text("COMPLIANCE_POLICY") == "fips-140-2") }},
		{"drain", `MINIMUM_DRAIN_DURATION=1m WORKLOAD_IDENTITY_SOCKET_FILE=other.sock`, func(t *testing.T, c Config) {
			assert.Equal(t, duration(time.Minute), c.proxy.TerminationDrainDuration)
			assert.Equal(t, "other.sock", c.text("WORKLOAD_IDENTITY_SOCKET_FILE"))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.check(t, must.Get(FromEnvironment(strings.Fields(c.environ)))(t))
		})
	}
}

func TestBadEnvironment(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.5-4", "IST-6.6-4", "IST-2.1-7", "IST-2.1-13", "IST-2.7-4")
	for _, line := range []string{
		"TRUST_DOMAIN=Example.org", "TRUST_DOMAIN=spiffe://", "SECRET_TTL=1d", "SECRET_TTL=-1h", "SECRET_GRACE_PERIOD_RATIO=1.5",
		"SECRET_GRACE_PERIOD_RATIO=NaN", "SECRET_GRACE_PERIOD_RATIO_JITTER=-0.01", "FILE_MOUNTED_CERTS=yes", "PROXY_XDS_VIA_AGENT=on",
		"CREDENTIAL_FETCHER_TYPE=Mock", "PILOT_CERT_PROVIDER=kubernetes", "PILOT_CERT_PROVIDER=k8s.io/", "WORKLOAD_RSA_KEY_SIZE=1024",
		"WORKLOAD_RSA_KEY_SIZE=big", "ECC_SIGNATURE_ALGORITHM=ED25519", "ECC_CURVE=P521", "COMPLIANCE_POLICY=pq", "PKCS8_KEY=yes", "JWT_POLICY=none",
		"WORKLOAD_IDENTITY_SOCKET_FILE=a/b", "WORKLOAD_IDENTITY_SOCKET_FILE=..", "PROXY_CONFIG=[]", "PROXY_CONFIG=concurrency: many", "PROXY_CONFIG=drainDuration: 5",
		"PROXY_CONFIG=terminationDrainDuration: -1s", "PROXY_CONFIG=statusPort: 70000", "ENVOY_STATUS_PORT=70000", "ENVOY_STATUS_PORT=0",
		"MINIMUM_DRAIN_DURATION=5", "CA_ROOT_CA=a\x00b",
		"PROXY_XDS_DEBUG_VIA_AGENT=maybe", "PROXY_XDS_DEBUG_VIA_AGENT_PORT=0", "PROXY_XDS_DEBUG_VIA_AGENT_PORT=65536",
	} {
		_, err := FromEnvironment([]string{line})
		name, _, _ := strings.Cut(line, "=")
		if assert.ErrorContains(t, err, "environment variable "+name) {
			assert.Contains(t, err.Error(), "set it to", line)
		}
	}

	_, err := FromEnvironment([]string{"FILE_MOUNTED_CERTS=true", "PROV_CERT=/x"})
	require.ErrorContains(t, err, "PROV_CERT")
	_, err = FromEnvironment([]string{"OUTPUT_CERT=/x", "OUTPUT_CERTS=/y"})
	require.ErrorContains(t, err, "OUTPUT_CERTS names another directory")
	require.ErrorContains(t, must.Err(FromEnvironment([]string{"PROXY_CONFIG=a: 1\nb: [\n"})), "line 2:")

	_, err = FromEnvironment([]string{"SECRET_TTL=x", "ECC_CURVE=y", "TRUST_DOMAIN=Z"})
	assert.Len(t, strings.Split(err.Error(), "\n"), 3, "all of them at once")
}

// TestDocumentTable holds that the variables of the document are all there.
func TestDocumentTable(t *testing.T) {
	t.Parallel()
	var table strings.Builder
	require.NoError(t, WriteHelp(&table, true))
	for _, name := range []string{
		"CA_ADDR", "CA_PROVIDER", "PROV_CERT", "OUTPUT_CERTS", "FILE_MOUNTED_CERTS", "CREDENTIAL_FETCHER_TYPE", "CREDENTIAL_IDENTITY_PROVIDER",
		"PROXY_XDS_VIA_AGENT", "PROXY_XDS_DEBUG_VIA_AGENT", "XDS_ROOT_CA", "CA_ROOT_CA", "PILOT_CERT_PROVIDER", "SECRET_GRACE_PERIOD_RATIO",
	} {
		assert.Regexp(t, "(?m)^\\| `"+name+"` .* document \\|$", table.String())
	}
}

// TestIstioVariables holds that each variable that Istio's agent reads is used, or named at the start with the reason.
func TestIstioVariables(t *testing.T) {
	t.Parallel()
	names := must.Get(os.ReadFile("testdata/variables.txt"))(t)
	var table strings.Builder
	require.NoError(t, WriteHelp(&table, true))
	for name := range strings.Lines(string(names)) {
		name = strings.TrimSpace(name)
		if strings.HasPrefix(name, "#") || strings.Contains(table.String(), "\n| `"+name+"` | ") && !strings.Contains(table.String(), "\n| `"+name+"` | text |  | not used") {
			continue
		}
		c, err := FromEnvironment([]string{name + "=1"})
		require.NoError(t, err, name)
		assert.Empty(t, c.notes, "%s is no slip", name)
		if assert.Len(t, c.unused, 1, name) {
			assert.Regexp(t, "^environment variable "+name+" is not used: .{10}", c.unused[0])
		}
	}
}

// The variables of the Services of a pod's namespace are no configuration, whatever the Services are called.
func TestServiceLinks(t *testing.T) {
	t.Parallel()
	var links []string
	for _, service := range []string{"ENVOY_STATUS", "ENVOY_PROMETHEUS", "CA", "XDS_HEADER", "PROXY_XDS_DEBUG_VIA_AGENT"} {
		links = append(links, service+"_SERVICE_HOST=10.0.0.1", service+"_SERVICE_PORT=80", service+"_SERVICE_PORT_HTTP=80", service+"_PORT=tcp://10.0.0.1:80",
			service+"_PORT_80_TCP=tcp://10.0.0.1:80", service+"_PORT_80_TCP_PROTO=tcp", service+"_PORT_80_TCP_PORT=80", service+"_PORT_80_TCP_ADDR=10.0.0.1")
	}
	assert.Equal(t, must.Get(FromEnvironment(nil))(t), must.Get(FromEnvironment(links))(t))
}

func FuzzFromEnvironment(f *testing.F) {
	f.Add("PROXY_CONFIG={\"controlPlaneAuthPolicy\":0}", "CA_PROVIDER=GoogleCA")
	f.Add("TRUST_DOMAIN=a", "CA_HEADER_x=1")
	f.Add("ISTIO_META_=", "PROXY_CONFIG={\"discoveryAddress\":1}")
	f.Fuzz(func(t *testing.T, one, two string) {
		c, err := FromEnvironment([]string{one, two})
		if err == nil {
			require.False(t, c.trustDomain.IsZero())
			require.True(t, c.v.Ratio("SECRET_GRACE_PERIOD_RATIO") >= 0 && c.v.Ratio("SECRET_GRACE_PERIOD_RATIO") <= 1)
		}
	})
}
