package istioagent

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The origins of variables: the document of Istio's agent, what it reads beside that, and what the injector writes.
const (
	document = "document"
	implied  = "implied"
	injected = "injected"
)

// variables are those of Istio's agent.
var variables = settings.Table{
	Prefixes: []string{"CA_", "XDS_", "PROXY_XDS_", "PILOT_CERT_", "PROV_CERT", "OUTPUT_CERT", "FILE_MOUNTED_", "CREDENTIAL_", "SECRET_GRACE_", "SECRET_TTL"},
	Variables: []settings.Variable{
		{
			Name: "CA_ADDR", Origin: document,
			Doc: "address of the CA, HOST:PORT, or the CA pool with GoogleCA; without it that of the control plane, " +
				"discoveryAddress in PROXY_CONFIG. Port 15010 has no TLS",
		},
		{
			Name: "CA_PROVIDER", Default: "Citadel", Origin: document,
			Doc: "kind of CA: GoogleCA and GoogleCAS are Google's Certificate Authority Service, " +
				"GkeWorkloadCertificate means files, and everything else a CA with Istio's API",
		},
		{Name: "CA_ROOT_CA", Form: settings.Path, Doc: "file with the roots that vouch for the CA, or SYSTEM for those of the host", Origin: document},
		{Name: "XDS_ROOT_CA", Form: settings.Path, Doc: "the same for the control plane", Origin: document},
		{
			Name: "PILOT_CERT_PROVIDER", Default: "istiod", Check: checkCertProvider, Origin: document,
			Doc: "which file has these roots, if the two above do not say: istiod, k8s.io/SIGNER, custom or none",
		},
		{
			Name: "PROV_CERT", Form: settings.Path, Origin: document,
			Doc: "folder with cert-chain.pem, key.pem and root-cert.pem for the connections to the CA and the control " +
				"plane; never served to Envoy",
		},
		{
			Name: "OUTPUT_CERTS", Form: settings.Path, Origin: document,
			Doc: "folder to which the identity is written at each change, as key.pem, cert-chain.pem and root-cert.pem " +
				"with mode 0600, or 0644 in a pod; never read as the workload's files",
		},
		{Name: "OUTPUT_CERT", Form: settings.Path, Doc: "the same as OUTPUT_CERTS, as one of the documents spells it; if both are set, they have to be the same", Origin: document},
		{Name: "FILE_MOUNTED_CERTS", Form: settings.Bool, Default: "false", Doc: "no CA: the files in ISTIO_META_TLS_CLIENT_* are the identity", Origin: document},
		{
			Name: "CREDENTIAL_FETCHER_TYPE", Default: "JWT", Choices: []string{"JWT", "GoogleComputeEngine"}, Origin: document,
			Doc: "where the token comes from: the file var/run/secrets/tokens/istio-token, or the metadata server",
		},
		{
			Name: "CREDENTIAL_IDENTITY_PROVIDER", Default: "GoogleComputeEngine", Origin: document,
			Doc: "provider in the audience identitynamespace:TRUST-DOMAIN:PROVIDER, for which the token is exchanged " +
				"with GoogleCA",
		},
		{Name: "PROXY_XDS_VIA_AGENT", Form: settings.Bool, Default: "true", Doc: "forward Envoy's other configuration (ADS) from the control plane", Origin: document},
		{
			Name: "PROXY_XDS_DEBUG_VIA_AGENT", Form: settings.Bool, Default: "true", Origin: document,
			Doc: "with PROXY_XDS_VIA_AGENT: forward debug requests (GET /debug/NAME) at 127.0.0.1, port 15004",
		},
		{
			Name: "SECRET_GRACE_PERIOD_RATIO", Form: settings.Ratio, Default: "0.5", Origin: document,
			Doc: "part of the lifetime that is left when renewal starts; 0 and 1 mean the last and the first hundredth",
		},

		{Name: "SECRET_GRACE_PERIOD_RATIO_JITTER", Form: settings.Ratio, Default: "0.01", Doc: "random part of the lifetime by which renewal starts earlier or later", Origin: implied},
		{Name: "PROXY_XDS_DEBUG_VIA_AGENT_PORT", Form: settings.Integer, Default: "15004", Check: checkPort, Doc: "another port for debug requests", Origin: implied},
		{Name: "SECRET_TTL", Form: settings.Duration, Default: "24h", Doc: "lifetime that the CA is asked for", Origin: implied},
		{Name: "TRUST_DOMAIN", Default: "cluster.local", Check: checkTrustDomain, Doc: "trust domain of the identity", Origin: implied},
		{Name: "POD_NAMESPACE", Doc: "namespace in the identity", Origin: implied},
		{Name: "SERVICE_ACCOUNT", Doc: "service account in the identity", Origin: implied},
		{Name: "POD_NAME", Doc: "name of the pod, for the node in the bootstrap", Origin: implied},
		{Name: "INSTANCE_IP", Doc: "address of the pod, for the node in the bootstrap", Origin: implied},
		{Name: "ISTIO_META_CLUSTER_ID", Doc: "name of the cluster, sent as ClusterID", Origin: implied},
		{Name: "CLUSTER_ID", Doc: "the same, if ISTIO_META_CLUSTER_ID is not set", Origin: implied},
		{Name: "ISTIO_META_CERT_SIGNER", Doc: "name of the signer behind the CA", Origin: implied},
		{Name: "ISTIO_META_TLS_CLIENT_CERT_CHAIN", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file with the certificates, else etc/certs/cert-chain.pem", Origin: implied},
		{Name: "ISTIO_META_TLS_CLIENT_KEY", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file with the key, else etc/certs/key.pem", Origin: implied},
		{Name: "ISTIO_META_TLS_CLIENT_ROOT_CERT", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file with the roots, else etc/certs/root-cert.pem", Origin: implied},
		{Name: "ISTIO_META_TLS_SERVER_CERT_CHAIN", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file that Envoy may ask for by name", Origin: implied},
		{Name: "ISTIO_META_TLS_SERVER_KEY", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file that Envoy may ask for by name", Origin: implied},
		{Name: "ISTIO_META_TLS_SERVER_ROOT_CERT", Form: settings.Path, Doc: "with FILE_MOUNTED_CERTS: file that Envoy may ask for by name", Origin: implied},
		{Name: "ISTIO_META_*", Doc: "metadata of the node in the bootstrap", Origin: implied},
		{Name: "CA_HEADER_*", Secret: true, Doc: "metadata for calls of the CA", Origin: implied},
		{Name: "XDS_HEADER_*", Secret: true, Doc: "metadata for streams of the control plane", Origin: implied},
		{Name: "ISTIOD_SAN", Doc: "name in the certificate of the control plane; for the CA only without CA_ADDR", Origin: implied},
		{Name: "GKE_CLUSTER_URL", Doc: "provider in the audience of an exchanged token, if CREDENTIAL_IDENTITY_PROVIDER is not set", Origin: implied},
		{Name: "WORKLOAD_RSA_KEY_SIZE", Form: settings.Integer, Default: "2048", Check: checkRSA, Doc: "bits of RSA keys: 2048, 3072 or 4096", Origin: implied},
		{Name: "ECC_SIGNATURE_ALGORITHM", Choices: []string{"ECDSA"}, Doc: "keys for this algorithm, and not RSA", Origin: implied},
		{Name: "ECC_CURVE", Default: "P256", Choices: []string{"P256", "P384"}, Doc: "curve of these keys", Origin: implied},
		{
			Name: "PKCS8_KEY", Form: settings.Bool, Default: "false", Origin: implied,
			Doc: "give Envoy and OUTPUT_CERTS keys in PKCS #8, and not in PKCS #1 (RSA) or SEC 1 (ECDSA); keys from " +
				"files are always in PKCS #8",
		},
		{
			Name: "COMPLIANCE_POLICY", Choices: []string{"fips-140-2", "fips-140-3", "pqc"}, Origin: implied,
			Doc: "with fips-140-2 connections may have TLS 1.2; the cryptography is that of the build (GOFIPS140); with pqc " +
				"connections have TLS 1.3 with the key exchange X25519MLKEM768 alone",
		},
		{
			Name: "JWT_POLICY", Default: "third-party-jwt", Choices: []string{"third-party-jwt", "first-party-jwt"}, Origin: implied,
			Doc: "kind of token; the second is treated as the first, with a warning, as by Istio's agent",
		},
		{
			Name: "WORKLOAD_IDENTITY_SOCKET_FILE", Default: socketName, Check: checkSocketFile, Origin: implied,
			Doc: "name of the workload socket; with another name a server has to be there",
		},
		{
			Name: "PROXY_CONFIG", Check: checkProxyConfig, Origin: implied,
			Doc: "configuration of the proxy in JSON, or in YAML as in annotations; used are discoveryAddress, configPath, " +
				"controlPlaneAuthPolicy, serviceCluster, binaryPath, customConfigFile, drainDuration, " +
				"terminationDrainDuration, concurrency, statusPort and proxyAdminPort; other fields are named at the start",
		},
		{Name: "GRPC_XDS_BOOTSTRAP", Form: settings.Path, Doc: "file to write for programs with gRPC and without a proxy; without it none is written", Origin: implied},
		{Name: "MINIMUM_DRAIN_DURATION", Form: settings.Duration, Default: "5s", Doc: "how long the agent goes on serving after it was told to stop, unless PROXY_CONFIG has terminationDrainDuration", Origin: implied},
		{
			Name: "KUBERNETES_SERVICE_HOST", Origin: implied,
			Doc: "set in a pod, where files of OUTPUT_CERTS have mode 0644, and Envoy may ask for Secrets of the pod's " +
				"namespace by names such as kubernetes://NAME; with KUBERNETES_SERVICE_PORT the API server that has " +
				"them",
		},
		{Name: "DISABLE_ENVOY", Form: settings.Bool, Default: "false", Doc: withProxy + "start no Envoy; secrets are served, and OUTPUT_CERTS is kept current", Origin: implied},
		{Name: "ENVOY_STATUS_PORT", Form: settings.Integer, Default: "15021", Check: checkPort, Doc: "port in the bootstrap for /healthz/ready", Origin: implied},
		{Name: "ENVOY_PROMETHEUS_PORT", Form: settings.Integer, Default: "15090", Check: checkPort, Doc: "port in the bootstrap for Envoy's /stats/prometheus", Origin: implied},
		{Name: "ISTIO_DELTA_XDS", Form: settings.Bool, Default: "true", Doc: "have Envoy ask for its configuration incrementally", Origin: implied},
		{Name: "ISTIO_CPU_LIMIT", Form: settings.Integer, Doc: withProxy + "threads of Envoy, unless PROXY_CONFIG has concurrency", Origin: injected},
		{Name: "OTEL_RESOURCE_ATTRIBUTES", Doc: withProxy + "Envoy reads it, for traces", Origin: injected},
		{Name: "ISTIO_KUBE_APP_PROBERS", Doc: withProxy + "probes of the application's containers, at /app-health/ of the status port", Origin: injected},
		{Name: "ISTIO_PROMETHEUS_ANNOTATIONS", Doc: withProxy + "where the application's metrics are, which are added to those at the status port", Origin: injected},
		{
			Name: "REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION", Form: settings.Bool, Default: "false", Origin: injected,
			Doc: withProxy + "probe the application on loopback, and not at INSTANCE_IP",
		},

		{
			Name: "FILE_DEBOUNCE_DURATION", Unused: true, Form: settings.Duration, Origin: implied,
			Doc: "files are taken over as soon as they match, and are looked at every five seconds, too",
		},
		{Name: "GRPC_KEEPALIVE_INTERVAL", Unused: true, Form: settings.Duration, Doc: "it is 30s", Origin: implied},
		{Name: "GRPC_KEEPALIVE_TIMEOUT", Unused: true, Form: settings.Duration, Doc: "it is 10s", Origin: implied},
		{Name: "ISTIO_GPRC_MAXSTREAMS", Unused: true, Form: settings.Integer, Doc: "1,000 streams of configuration and 20,000 of secrets may be open", Origin: implied},
		{Name: "ISTIO_GPRC_MAXRECVMSGSIZE", Unused: true, Form: settings.Integer, Doc: "a request has 4 MiB at most", Origin: implied},
		{Name: "USE_EXTERNAL_WORKLOAD_SDS", Unused: true, Form: settings.Bool, Doc: "a live socket is always used; WORKLOAD_IDENTITY_SOCKET_FILE requires one", Origin: implied},
		{Name: "PROXY_CONFIG_XDS_AGENT", Unused: true, Form: settings.Bool, Doc: "trust bundles do not come by xDS: in ROOTCA a root of another CA would vouch for every name of this mesh", Origin: implied},
		{Name: "XDS_AUTH_PROVIDER", Unused: true, Doc: "it has no effect in Istio's agent either", Origin: implied},
		{Name: "EXIT_ON_ZERO_ACTIVE_CONNECTIONS", Unused: true, Form: settings.Bool, Doc: "Envoy is ended when the time for draining is over", Origin: implied},
		{Name: "TERMINATION_DRAIN_DURATION_SECONDS", Unused: true, Form: settings.Integer, Doc: "it is gone from Istio, too: set terminationDrainDuration in PROXY_CONFIG", Origin: implied},
		{Name: "ENVOY_*", Unused: true, Doc: "there is one listener for the state and one for metrics, without TLS; Envoy's log is as it is", Origin: implied},
		{Name: "DNS_*", Unused: true, Doc: noDNS, Origin: implied},
		{Name: "ISTIO_META_DNS_CAPTURE", Unused: true, Form: settings.Bool, Doc: noDNS, Origin: implied},
		{Name: "ISTIO_META_ENABLE_DNS_SERVER", Unused: true, Form: settings.Bool, Doc: noDNS, Origin: implied},
		{Name: "ISTIO_BOOTSTRAP_OVERRIDE", Unused: true, Form: settings.Path, Doc: "nothing is merged into the bootstrap; customConfigFile in PROXY_CONFIG names another", Origin: injected},
		{Name: "HOST_IP", Unused: true, Doc: "nothing in the bootstrap needs it", Origin: injected},
		{Name: "ISTIO_BOOTSTRAP", Unused: true, Form: settings.Path, Doc: "the bootstrap is no template; customConfigFile in PROXY_CONFIG is used as it is", Origin: implied},
		{Name: "BOOTSTRAP_XDS_AGENT", Unused: true, Form: settings.Bool, Doc: "the bootstrap does not come by xDS", Origin: implied},
		{Name: "ISTIO_ENVOY_ENABLE_CORE_DUMP", Unused: true, Form: settings.Bool, Doc: "the limit of the container decides", Origin: implied},
		{Name: "METRICS_LOCALHOST_ACCESS_ONLY", Unused: true, Form: settings.Bool, Doc: "a NetworkPolicy can close the ports of metrics", Origin: implied},
		{Name: "PEER_METADATA_DISCOVERY", Unused: true, Form: settings.Bool, Doc: "the extension is not in the bootstrap", Origin: implied},
		{Name: "PILOT_ENABLE_CA_CRL", Unused: true, Form: settings.Bool, Doc: "lists of revoked certificates are not given to Envoy, which refuses every certificate once a list has ended", Origin: implied},
		{Name: "WASM_*", Unused: true, Doc: noWasm, Origin: implied},
		{Name: "ISTIO_WASM_MAX_BINARY_SIZE_BYTES", Unused: true, Form: settings.Integer, Doc: noWasm, Origin: implied},
		{Name: "ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION", Unused: true, Form: settings.Bool, Doc: noWasm, Origin: implied},
		{Name: "ISTIO_DUAL_STACK", Unused: true, Form: settings.Bool, Doc: "INSTANCE_IP is the one address of the node in the bootstrap", Origin: implied},
		{Name: "ISTIO_ENABLE_HTTP2_PROBING", Unused: true, Form: settings.Bool, Doc: "probes by HTTPS use HTTP/2 where the application has it", Origin: implied},
		{Name: "ENABLE_PROBE_KEEPALIVE_CONNECTIONS", Unused: true, Form: settings.Bool, Doc: "each probe has a connection of its own, as with the kubelet", Origin: implied},
		{Name: "CLOUD_PLATFORM", Unused: true, Doc: noCloud, Origin: implied},
		{Name: "GCE_METADATA_HOST", Unused: true, Doc: "the metadata server is asked at 169.254.169.254", Origin: implied},
		{Name: "GCP_*", Unused: true, Doc: noCloud, Origin: implied},
		{Name: "TOKEN_AUDIENCES", Unused: true, Form: settings.List, Doc: "a CA judges tokens by it; the agent hands on the token that it is given", Origin: implied},
		{Name: "XDS_AUTH", Unused: true, Form: settings.Bool, Doc: noControl, Origin: implied},
		{Name: "XDS_AUTH_PLAINTEXT", Unused: true, Form: settings.Bool, Doc: noControl, Origin: implied},
		{Name: "PILOT_AGENT_MERGE_ENVOY_STATS", Unused: true, Form: settings.Bool, Doc: "with the command proxy Envoy's metrics are always beside the agent's", Origin: implied},
		{Name: "HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED", Unused: true, Form: settings.Bool, Doc: "no runtime flags are in the bootstrap", Origin: implied},
		{Name: "ISTIO_META_ENABLE_SELF_DISCOVERY", Unused: true, Form: settings.Bool, Doc: "no cluster of the workload's own is in the bootstrap", Origin: implied},
		{Name: "OTEL_*", Unused: true, Doc: "the agent sends no traces; Envoy gets the variables of the agent", Origin: implied},
	},
}

const (
	noWasm    = "the agent fetches no WebAssembly modules; Envoy does"
	noCloud   = "the agent asks no cloud where it runs, and the node in the bootstrap has no locality"
	noControl = "it is for the control plane"
)

const noDNS = "there is no DNS proxy: it is no part of identity, and a cluster's names come from the cluster's DNS; a ServiceEntry without an address needs one"

// WriteHelp writes what each environment variable is for, for the -h of a program; as a Markdown table it is for its
// documentation.
func WriteHelp(w io.Writer, markdown bool) error { return variables.Write(w, markdown) }

func checkCertProvider(value string) error {
	switch value {
	case "istiod", "custom", "none":
		return nil
	}
	if signer, ok := strings.CutPrefix(value, "k8s.io/"); ok && signer != "" {
		return nil
	}
	return errors.New("set it to istiod, k8s.io/SIGNER, custom or none")
}

func checkTrustDomain(value string) error {
	if _, err := spiffe.ParseTrustDomain(value); err != nil {
		return fmt.Errorf("set it to a trust domain such as cluster.local: %w", err)
	}
	return nil
}

func checkRSA(value string) error {
	switch value {
	case "2048", "3072", "4096":
		return nil
	}
	return errors.New("set it to 2048, 3072 or 4096")
}

func checkPort(value string) error {
	if port, err := strconv.Atoi(value); err != nil || port == 0 || port > math.MaxUint16 {
		return errors.New("set it to a port, from 1 to 65535")
	}
	return nil
}

func checkSocketFile(value string) error {
	if value != filepath.Base(value) || value == "." || value == ".." {
		return errors.New("set it to the name of a file, without a folder")
	}
	return nil
}

// FromEnvironment returns the configuration in the environment, which is in the form of os.Environ. It opens no file.
// The error has a line for each variable with a bad value. Names that are probably misspelled are in Config.Notes, and what has
// no effect is in Config.Unused.
func FromEnvironment(environ []string) (Config, error) {
	v, err := variables.Read(environ)
	if err != nil {
		return Config{}, err
	}
	proxy := proxyConfig{
		DiscoveryAddress: discovery, ConfigPath: proxyDir, StatusPort: 15020, ProxyAdminPort: 15000, Concurrency: uint32(v.Int("ISTIO_CPU_LIMIT")),
		DrainDuration: duration(45 * time.Second), TerminationDrainDuration: duration(v.Duration("MINIMUM_DRAIN_DURATION")),
	}
	_ = proxy.read(v.Text("PROXY_CONFIG"))                   // checked
	td, _ := spiffe.ParseTrustDomain(v.Text("TRUST_DOMAIN")) // checked
	c := Config{
		redacted: redact.New(fmt.Sprintf("istioagent.Config(%s, namespace %s, service account %s)", td, v.Text("POD_NAMESPACE"), v.Text("SERVICE_ACCOUNT"))),

		AllowFiles: append([]string{mounted}, gateways...), TokenFile: tokenFile,

		trustDomain: td, namespace: v.Text("POD_NAMESPACE"), serviceAccount: v.Text("SERVICE_ACCOUNT"),
		pod: v.Text("POD_NAME"), address: v.Text("INSTANCE_IP"), metadata: v.Prefixed("ISTIO_META_*"),
		inPod:    v.Set("KUBERNETES_SERVICE_HOST"),
		provider: v.Text("CA_PROVIDER"), caAddress: v.Text("CA_ADDR"),
		caRoots: v.Text("CA_ROOT_CA"), xdsRoots: v.Text("XDS_ROOT_CA"), certProvider: v.Text("PILOT_CERT_PROVIDER"),
		serverName: v.Text("ISTIOD_SAN"),
		caHeader:   header(v.Prefixed("CA_HEADER_*")), xdsHeader: header(v.Prefixed("XDS_HEADER_*")),
		clusterID:  cmp.Or(v.Text("ISTIO_META_CLUSTER_ID"), v.Text("CLUSTER_ID")),
		certSigner: v.Text("ISTIO_META_CERT_SIGNER"),
		provCert:   v.Text("PROV_CERT"), outputCerts: cmp.Or(v.Text("OUTPUT_CERTS"), v.Text("OUTPUT_CERT")),
		fileMounted:  v.Bool("FILE_MOUNTED_CERTS"),
		mountedCert:  cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_CERT_CHAIN"), filepath.Join(mounted, certName)),
		mountedKey:   cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_KEY"), filepath.Join(mounted, keyName)),
		mountedRoots: cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_ROOT_CERT"), filepath.Join(mounted, rootsName)),
		fetcher:      v.Text("CREDENTIAL_FETCHER_TYPE"), identityProvider: v.Text("CREDENTIAL_IDENTITY_PROVIDER"),
		ttl: v.Duration("SECRET_TTL"), graceRatio: v.Ratio("SECRET_GRACE_PERIOD_RATIO"),
		jitter:       v.Ratio("SECRET_GRACE_PERIOD_RATIO_JITTER"),
		keyAlgorithm: pki.KeyAlgorithm(fmt.Sprintf("rsa-%d", v.Int("WORKLOAD_RSA_KEY_SIZE"))),
		pkcs8Key:     v.Bool("PKCS8_KEY"),
		allowTLS12:   v.Text("COMPLIANCE_POLICY") == "fips-140-2", postQuantum: v.Text("COMPLIANCE_POLICY") == "pqc",
		socketFile: v.Text("WORKLOAD_IDENTITY_SOCKET_FILE"),
		discovery:  proxy.DiscoveryAddress, grpcBootstrap: v.Text("GRPC_XDS_BOOTSTRAP"),
		drain: time.Duration(proxy.TerminationDrainDuration),
		Envoy: Envoy{
			Disabled: v.Bool("DISABLE_ENVOY"), Path: proxy.BinaryPath, ConfigFile: proxy.CustomConfigFile,
			Dir: proxy.ConfigPath, XDS: v.Bool("PROXY_XDS_VIA_AGENT"),
			AdminPort: int(proxy.ProxyAdminPort), StatusPort: int(proxy.StatusPort),
			DrainTime: time.Duration(proxy.DrainDuration), Concurrency: int(proxy.Concurrency),
			readyPort: v.Int("ENVOY_STATUS_PORT"), metricsPort: v.Int("ENVOY_PROMETHEUS_PORT"),
			cluster: proxy.ServiceCluster, deltaADS: v.Bool("ISTIO_DELTA_XDS"), proxyConfig: proxy.all,
		},
	}
	if c.Envoy.XDS && v.Bool("PROXY_XDS_DEBUG_VIA_AGENT") {
		c.debugAddress = fmt.Sprintf("127.0.0.1:%d", v.Int("PROXY_XDS_DEBUG_VIA_AGENT_PORT"))
	}
	c.xdsPlaintext = proxy.ControlPlaneAuthPolicy == "NONE" || proxy.ControlPlaneAuthPolicy == 0.0
	if v.Text("ECC_SIGNATURE_ALGORITHM") != "" {
		c.keyAlgorithm = map[string]pki.KeyAlgorithm{"P256": pki.ECDSAP256, "P384": pki.ECDSAP384}[v.Text("ECC_CURVE")]
	}
	if v.Set("GKE_CLUSTER_URL") && !v.Set("CREDENTIAL_IDENTITY_PROVIDER") {
		c.identityProvider = v.Text("GKE_CLUSTER_URL")
	}
	if c.fileMounted {
		for _, name := range []string{"CERT_CHAIN", "KEY", "ROOT_CERT"} {
			if file := v.Text("ISTIO_META_TLS_SERVER_" + name); file != "" {
				c.AllowFiles = append(c.AllowFiles, file)
			}
		}
	}
	c.remark(proxy.all, v)
	if v.Text("JWT_POLICY") == "first-party-jwt" {
		c.notes = append(c.notes, "environment variable JWT_POLICY: first-party-jwt is treated as third-party-jwt; mount a token for the CA at "+tokenFile)
	}
	var bad []error
	if v.Set("OUTPUT_CERTS") && v.Set("OUTPUT_CERT") && v.Text("OUTPUT_CERTS") != v.Text("OUTPUT_CERT") {
		bad = append(bad, v.Reject("OUTPUT_CERT", errors.New("OUTPUT_CERTS names another folder, and means the same; leave one of them out")))
	}
	if c.fileMounted && c.provCert != "" {
		bad = append(bad, v.Reject("PROV_CERT", errors.New("with FILE_MOUNTED_CERTS the mounted files are used for the control plane, too; leave one of them out")))
	}
	if c.google() {
		if err := checkPool(c.caAddress); err != nil {
			bad = append(bad, v.Reject("CA_ADDR", err))
		}
	}
	if bad != nil {
		return Config{}, errors.Join(bad...)
	}
	return c, nil
}

// header returns metadata with these names.
func header(values map[string]string) http.Header {
	h := make(http.Header)
	for name, value := range values {
		h.Add(name, value)
	}
	return h
}

// google reports whether the CA is Google's service.
func (c *Config) google() bool {
	return c.provider == googleCA || c.provider == googleCAS || strings.Contains(c.caAddress, "googleapis.com")
}

// checkPool refuses what is not the name of a CA pool.
func checkPool(address string) error {
	parts := strings.Split(address, "/")
	if len(parts) == 6 && parts[0] == "projects" && parts[2] == "locations" && parts[4] == "caPools" {
		return nil
	}
	return errors.New("the service is Google's Certificate Authority Service, as Mesh CA is no more: set it to a pool of the " +
		"Certificate Authority Service, projects/PROJECT/locations/LOCATION/caPools/POOL")
}
