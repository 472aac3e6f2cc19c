package istioagent

import (
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/files/private"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/settings"
	"github.com/svidkit/svidkit/spiffe"
)

// The values of CA_PROVIDER with a special meaning. Every other value is a CA with Istio's API.
const (
	googleCA  = "GoogleCA"
	googleCAS = "GoogleCAS"
	gke       = "GkeWorkloadCertificate"
)

type redacted = redact.Text

// Config configures an [Agent]. [FromEnvironment] creates one from the variables of Istio's agent; the exported
// fields have no variable.
type Config struct {
	redacted // headers may have tokens

	// Root is the directory for relative paths, in variables and in defaults such as TokenFile. Empty means the
	// working directory, as with Istio's agent.
	Root string

	// AllowFiles are the files and directories that Envoy may name, as in file-cert:CERT~KEY, in addition to the
	// files of the identity. [FromEnvironment] sets etc/certs and the directories of Istio's gateways in etc/istio.
	AllowFiles []string

	// TokenFile is the file with the token for the CA and the control plane: var/run/secrets/tokens/istio-token.
	TokenFile string

	// Envoy configures the Envoy beside the agent.
	Envoy Envoy

	// Origin is where the identity comes from: "socket", "files" or "ca". Socket is the path at which Envoy finds the
	// secrets. [Choose] sets both.
	Origin, Socket string

	// Logger gets the origin (Info), and the logs of the parts. Nil means no logs.
	Logger *slog.Logger

	// The files of the identity, set by Choose. With a CA, only roots may be set: it is served as ROOTCA in place of
	// the CA's roots. why is the reason for the origin.
	cert, key, roots, why string

	v                                     *settings.Values
	trustDomain                           spiffe.TrustDomain
	inPod                                 bool
	clusterID                             string
	outputCerts                           string // a directory
	mountedCert, mountedKey, mountedRoots string
	identityProvider                      string // in the audience of exchanged tokens
	keyAlgorithm                          string
	postQuantum                           bool
	proxy                                 proxyConfig
	notes, unused                         []string // for the log, as warnings and as information

	clients  []*http.Client                               // of the Agent
	requests *requests                                    // of the Agent, to the CA
	urls     struct{ service, exchange, metadata string } // of Google, for tests; empty means the real ones
	kube     struct {                                     // the API server, for tests; empty means the pod's
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
	crlFile     = "./var/run/secrets/istio/crl/ca-crl.pem"

	dialTimeout = 5 * time.Second // as Istio's agent

	certName, keyName, rootsName = "cert-chain.pem", "key.pem", "root-cert.pem"
)

var gateways = []string{
	"./etc/istio/ingressgateway-certs", "./etc/istio/ingressgateway-ca-certs", "./etc/istio/egressgateway-certs",
	"./etc/istio/egressgateway-ca-certs",
}

// text returns the value of a variable.
func (c *Config) text(variable string) string { return c.v.Text(variable) }

// note adds a warning for the log.
func (c *Config) note(text string) { c.notes = append(c.notes, text) }

// path returns name as an absolute path, below Root if it is relative.
func (c *Config) path(name string) string {
	if !filepath.IsAbs(name) {
		name = filepath.Join(c.Root, name)
	}
	if abs, err := filepath.Abs(name); err == nil { // it fails only without a working directory
		return abs
	}
	return name
}

// xdsSocket is the path of the socket for ADS.
func (c *Config) xdsSocket() string { return c.path(filepath.Join(c.Envoy.Dir, "XDS")) }

// own returns the directories whose files are never the workload's input.
func (c *Config) own() (dirs []string) {
	for _, dir := range []string{c.outputCerts, c.text("PROV_CERT")} {
		if dir != "" && !slices.Contains(dirs, c.path(dir)) {
			dirs = append(dirs, c.path(dir))
		}
	}
	return dirs
}

// isOwn reports whether dir is such a directory, by any path.
func (c *Config) isOwn(dir string) bool {
	return slices.ContainsFunc(c.own(), func(own string) bool { return own == dir || private.Same(own, dir) })
}

// isFile reports whether there is a nonempty regular file. Relative names are below Root.
func (c *Config) isFile(name string) bool {
	info, err := os.Stat(c.path(name))
	return err == nil && info.Mode().IsRegular() && info.Size() > 0
}

// timing returns the grace ratio and the jitter for package secretcache, whose renewals start earlier by a random
// part of the jitter, never later. ratio and spread are those of Istio's agent.
func timing(ratio, spread float64) (grace, jitter float64) {
	const margin, least = 0.01, 1e-9
	clamp := func(r float64) float64 { return min(max(r, margin), 1-margin) }
	grace = clamp(ratio - spread)
	return grace, max(clamp(ratio+spread)-grace, least)
}

// plaintext reports whether an address has Istio's port without TLS.
func plaintext(address string) bool { return strings.HasSuffix(address, ":15010") }
