package istioagent

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The values of Config.Provider with a meaning of their own. Every other one is a CA with Istio's API.
const (
	googleCA  = "GoogleCA"
	googleCAS = "GoogleCAS"
	gke       = "GkeWorkloadCertificate"
)

type redacted = redact.Text

// Config configures an [Agent]. [FromEnvironment] makes one; a program that makes its own sets at least the identity and
// the CA. [New] copies it. Each comment has the variables of Istio's agent for the field.
type Config struct {
	redacted // headers may have tokens

	// Root is the folder to which relative paths are relative, those of the variables and those that have no variable,
	// such as var/run/secrets/tokens/istio-token. Empty means the working directory, as with Istio's agent.
	Root string

	// TrustDomain, Namespace and ServiceAccount are the identity to ask the CA for: TRUST_DOMAIN, POD_NAMESPACE and
	// SERVICE_ACCOUNT. With files, they are not needed.
	TrustDomain               spiffe.TrustDomain
	Namespace, ServiceAccount string

	// Pod and Address are the name and the IP address of the pod, for the bootstrap: POD_NAME and INSTANCE_IP. Metadata is
	// that of the node in the bootstrap: ISTIO_META_.
	Pod, Address string
	Metadata     map[string]string

	// InPod says that the process runs in a pod: KUBERNETES_SERVICE_HOST is set. Then the files of OutputCerts have the mode
	// 0644, and every client of the sockets can have the Secrets of the pod's namespace: see SocketMode.
	InPod bool

	// Provider is the kind of CA: CA_PROVIDER. GoogleCA and GoogleCAS are Google's Certificate Authority Service,
	// GkeWorkloadCertificate means the files of GKE, and everything else a CA with Istio's API.
	Provider string

	// CAAddress is HOST:PORT of the CA, or the CA pool of Google's service: CA_ADDR. Empty means Discovery. With port
	// 15010 the connection has no TLS.
	CAAddress string

	// CARoots and XDSRoots are files with the roots that vouch for the CA and for the control plane, or SYSTEM for those
	// of the host: CA_ROOT_CA and XDS_ROOT_CA. Empty means that CertProvider and ProvCert decide, as in Istio's agent, and
	// for the control plane FileMounted and MountedRoots, too.
	CARoots, XDSRoots string

	// CertProvider is PILOT_CERT_PROVIDER.
	CertProvider string

	// ServerName is what the certificate of the control plane is for, if CAAddress is empty: ISTIOD_SAN.
	ServerName string

	// CAHeader and XDSHeader are metadata for calls: CA_HEADER_ and XDS_HEADER_.
	CAHeader, XDSHeader http.Header

	// ClusterID is the name of the cluster, and CertSigner that of the signer: ISTIO_META_CLUSTER_ID and
	// ISTIO_META_CERT_SIGNER.
	ClusterID, CertSigner string

	// ProvCert is a folder with cert-chain.pem, key.pem and root-cert.pem for the connections to the CA and the control
	// plane: PROV_CERT. The certificate is presented while there is one that has not expired.
	ProvCert string

	// OutputCerts is a folder to which the identity and its roots are written at each change: OUTPUT_CERTS. The files have
	// the names of ProvCert and the mode 0600, or 0644 in a pod.
	OutputCerts string

	// FileMounted says that the identity is in MountedCert, MountedKey and MountedRoots, and that there is no CA:
	// FILE_MOUNTED_CERTS, ISTIO_META_TLS_CLIENT_CERT_CHAIN, _KEY and _ROOT_CERT. Empty ones mean those in etc/certs.
	FileMounted                           bool
	MountedCert, MountedKey, MountedRoots string

	// AllowFiles are the files and folders that names of secrets such as file-cert:CERT~KEY may be of, beside those of the
	// identity. Nil means those of [FromEnvironment]: etc/certs and the folders of Istio's gateways in etc/istio.
	AllowFiles []string

	// Fetcher is where the token comes from: CREDENTIAL_FETCHER_TYPE. JWT, or nothing, is TokenFile; GoogleComputeEngine is
	// the metadata server.
	Fetcher string

	// TokenFile has the token. Empty means var/run/secrets/tokens/istio-token, as in Istio's agent, which has no variable for it.
	TokenFile string

	// IdentityProvider is the provider in the audience of exchanged tokens, with the provider GoogleCA:
	// CREDENTIAL_IDENTITY_PROVIDER, or GKE_CLUSTER_URL.
	IdentityProvider string

	// TTL is the lifetime to ask for: SECRET_TTL. 0 means the CA's default.
	TTL time.Duration

	// GraceRatio is the part of the lifetime that is left when renewal starts, and Jitter is added to it or taken from it
	// at random: SECRET_GRACE_PERIOD_RATIO and SECRET_GRACE_PERIOD_RATIO_JITTER, from 0 to 1. A renewal never starts in the
	// first or the last hundredth of the lifetime, so that 0 still renews before the end, and 1 does not ask the CA
	// without a pause.
	GraceRatio, Jitter float64

	// Key is the algorithm of private keys: WORKLOAD_RSA_KEY_SIZE, ECC_SIGNATURE_ALGORITHM and ECC_CURVE. Empty means
	// ECDSA P-256.
	Key pki.KeyAlgorithm

	// PKCS8Key says that Envoy and the files of OutputCerts get the key in PKCS #8: PKCS8_KEY. Otherwise an RSA key is in
	// PKCS #1 and an ECDSA key in SEC 1, unless the identity comes from files.
	PKCS8Key bool

	// AllowTLS12 lets connections to the CA and the control plane use TLS 1.2: COMPLIANCE_POLICY.
	AllowTLS12 bool

	// SocketFile is the name of the workload socket: WORKLOAD_IDENTITY_SOCKET_FILE. Empty means "socket". With another
	// name there has to be a live socket. SocketMode is the mode of the sockets of this agent; 0 means 0600, for an Envoy of
	// the same user. A process that can connect can have all secrets.
	SocketFile string
	SocketMode fs.FileMode

	// XDS says that ADS is forwarded: PROXY_XDS_VIA_AGENT. Discovery is HOST:PORT of the control plane, ConfigPath the
	// folder of the socket, and XDSPlaintext says that the connection has no TLS: discoveryAddress, configPath and
	// controlPlaneAuthPolicy in PROXY_CONFIG. Empty means istiod.istio-system.svc:15012 and etc/istio/proxy.
	XDS                   bool
	Discovery, ConfigPath string
	XDSPlaintext          bool

	// DebugAddress is HOST:PORT on loopback at which debug requests are forwarded, with XDS, as in
	// [xdsproxy.Handler.ServeDebug]: 127.0.0.1:15004 with PROXY_XDS_DEBUG_VIA_AGENT. Empty means none.
	DebugAddress string

	// GRPCBootstrap is a file that Run writes, with XDS, for gRPC programs that use xDS without a proxy:
	// GRPC_XDS_BOOTSTRAP. It names the files of OutputCerts. Empty means none.
	GRPCBootstrap string

	// Drain is how long the agent goes on serving after it was told to stop, so that an Envoy can drain:
	// MINIMUM_DRAIN_DURATION.
	Drain time.Duration

	// Notes are about variables that have no effect, or are unknown. Run logs them as warnings.
	Notes []string

	// Logger gets the choice (Info), and what the parts log. Nil means no logs.
	Logger *slog.Logger

	clients  []*http.Client                               // of the Agent
	requests *requests                                    // of the Agent, to the CA
	urls     struct{ service, exchange, metadata string } // of Google, for tests; empty means the real ones
	kube     struct {                                     // the API server, for tests; empty means that of the pod
		server string
		client *http.Client
	}
	otherGone time.Duration // for tests; 0 means the constant
}

const (
	discovery   = "istiod.istio-system.svc:15012"
	istiodName  = "istiod.istio-system.svc"
	socketName  = "socket"
	socketDir   = "./var/run/secrets/workload-spiffe-uds"
	credentials = "./var/run/secrets/workload-spiffe-credentials"
	mounted     = "./etc/certs"
	tokenFile   = "./var/run/secrets/tokens/istio-token"
	podRoots    = "./var/run/secrets/istio/root-cert.pem"
	proxyDir    = "./etc/istio/proxy"
	meshFile    = "./etc/istio/config/mesh"

	dialTimeout, pingInterval, pingTimeout = 5 * time.Second, 30 * time.Second, 10 * time.Second // as Istio's agent

	certName, keyName, rootsName = "cert-chain.pem", "key.pem", "root-cert.pem"
)

var gateways = []string{
	"./etc/istio/ingressgateway-certs", "./etc/istio/ingressgateway-ca-certs", "./etc/istio/egressgateway-certs", "./etc/istio/egressgateway-ca-certs",
}

// withDefaults returns the configuration with the defaults filled in, and copies of what it shares.
func (c Config) withDefaults() Config {
	c.SocketFile, c.SocketMode = cmp.Or(c.SocketFile, socketName), cmp.Or(c.SocketMode, 0o600)
	c.TokenFile = cmp.Or(c.TokenFile, tokenFile)
	c.Discovery, c.ConfigPath = cmp.Or(c.Discovery, discovery), cmp.Or(c.ConfigPath, proxyDir)
	c.MountedCert = cmp.Or(c.MountedCert, filepath.Join(mounted, certName))
	c.MountedKey = cmp.Or(c.MountedKey, filepath.Join(mounted, keyName))
	c.MountedRoots = cmp.Or(c.MountedRoots, filepath.Join(mounted, rootsName))
	if c.AllowFiles == nil {
		c.AllowFiles = append([]string{mounted}, gateways...)
	}
	c.AllowFiles, c.Notes = slices.Clone(c.AllowFiles), slices.Clone(c.Notes)
	c.CAHeader, c.XDSHeader = c.CAHeader.Clone(), c.XDSHeader.Clone()
	c.requests = new(requests)
	c.Logger = ratelog.Patient(c.Logger)
	return c
}

// check says what is wrong whatever the identity comes from.
func (c *Config) check() error {
	switch {
	case c.FileMounted && c.ProvCert != "":
		return errors.New("both FileMounted (FILE_MOUNTED_CERTS) and ProvCert (PROV_CERT) are set: the mounted files are used for the control plane, too; leave one of them out")
	case c.SocketFile != filepath.Base(c.SocketFile) || c.SocketFile == "." || c.SocketFile == "..":
		return fmt.Errorf("SocketFile (WORKLOAD_IDENTITY_SOCKET_FILE) is %q, and has to be the name of a file without a folder", c.SocketFile)
	case math.IsNaN(c.GraceRatio) || c.GraceRatio < 0 || c.GraceRatio > 1 || math.IsNaN(c.Jitter) || c.Jitter < 0 || c.Jitter > 1:
		return fmt.Errorf("GraceRatio is %v and Jitter %v, and both have to be from 0 to 1", c.GraceRatio, c.Jitter)
	case c.TTL < 0 || c.Drain < 0:
		return fmt.Errorf("TTL is %v and Drain %v, and neither may be negative", c.TTL, c.Drain)
	case c.DebugAddress != "" && !loopbackAddress(c.DebugAddress):
		return fmt.Errorf("DebugAddress is %q, and has to be a loopback address with a port, such as 127.0.0.1:15004", c.DebugAddress)
	case c.Fetcher != "" && c.Fetcher != "JWT" && c.Fetcher != "GoogleComputeEngine":
		return fmt.Errorf("the field Fetcher (CREDENTIAL_FETCHER_TYPE) is %q, and has to be JWT or GoogleComputeEngine", c.Fetcher)
	}
	return nil
}

// path returns a path as it is used: absolute, and below Root if it is relative.
func (c *Config) path(name string) string {
	if !filepath.IsAbs(name) {
		name = filepath.Join(c.Root, name)
	}
	if abs, err := filepath.Abs(name); err == nil { // it fails without a working directory
		return abs
	}
	return name
}

// socket is the path of the workload socket, and xdsSocket that of ADS.
func (c *Config) socket() string    { return c.path(filepath.Join(socketDir, c.SocketFile)) }
func (c *Config) xdsSocket() string { return c.path(filepath.Join(c.ConfigPath, "XDS")) }

// own are the folders whose files are not the workload's input.
func (c *Config) own() (dirs []string) {
	for _, dir := range []string{c.OutputCerts, c.ProvCert} {
		if dir != "" && !slices.Contains(dirs, c.path(dir)) {
			dirs = append(dirs, c.path(dir))
		}
	}
	return dirs
}

// isOwn reports whether a folder is one of those, by whatever path.
func (c *Config) isOwn(dir string) bool {
	info, err := os.Stat(dir)
	return slices.ContainsFunc(c.own(), func(own string) bool {
		if err != nil || own == dir {
			return own == dir
		}
		other, err := os.Stat(own)
		return err == nil && os.SameFile(info, other)
	})
}

// isFile reports whether there is a regular file that is not empty, by the rules of relative paths.
func (c *Config) isFile(name string) bool {
	info, err := os.Stat(c.path(name))
	return err == nil && info.Mode().IsRegular() && info.Size() > 0
}

// variable is what the functions of package istioca read of the environment.
func (c *Config) variable(name string) string {
	switch name {
	case "CA_ROOT_CA":
		return c.CARoots
	case "XDS_ROOT_CA":
		return c.XDSRoots
	case "PILOT_CERT_PROVIDER":
		return c.CertProvider
	case "PROV_CERT":
		return c.ProvCert
	case "FILE_MOUNTED_CERTS":
		if c.FileMounted {
			return "true"
		}
	case "ISTIO_META_TLS_CLIENT_ROOT_CERT":
		return c.MountedRoots
	}
	return ""
}

// timing returns the grace ratio and the jitter of package secretcache, whose renewals start earlier by a random part
// of the jitter, never later.
func (c *Config) timing() (grace, jitter float64) {
	const margin, least = 0.01, 1e-9
	clamp := func(r float64) float64 { return min(max(r, margin), 1-margin) }
	grace = clamp(c.GraceRatio - c.Jitter)
	return grace, max(clamp(c.GraceRatio+c.Jitter)-grace, least)
}

// plaintext reports whether an address is that of Istio's port without TLS.
func plaintext(address string) bool { return strings.HasSuffix(address, ":15010") }

// loopbackAddress reports whether an address is an IP address of loopback, with a port.
func loopbackAddress(address string) bool {
	at, err := netip.ParseAddrPort(address)
	return err == nil && at.Addr().IsLoopback()
}
