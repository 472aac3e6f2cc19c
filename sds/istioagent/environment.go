package istioagent

import (
	"cmp"
	_ "embed"
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
	"github.com/svidkit/svidkit/spiffe"
)

// variables are the variables of Istio's agent: a line each in variables.tsv, sorted by origin.
var variables = settings.Table{
	Prefixes: []string{
		"CA_", "XDS_", "PROXY_XDS_", "PILOT_CERT_", "PROV_CERT", "OUTPUT_CERT", "FILE_MOUNTED_", "CREDENTIAL_",
		"SECRET_GRACE_", "SECRET_TTL",
	},
	Variables: readVariables(),
}

// variablesText has the columns name, form, default, origin and what the variable is for. The origin is document (the
// document of Istio's agent), implied (what the agent reads beside that) or injected (what the injector writes). A
// form may have the values that are allowed, as in text=A,B, and a secret is a text that is not in errors. A variable
// that is accepted and has no effect begins its last column with "not used: ".
//
//go:embed variables.tsv
var variablesText string

var checks = map[string]func(value string) error{
	"PILOT_CERT_PROVIDER": checkCertProvider, "PROXY_XDS_DEBUG_VIA_AGENT_PORT": checkPort,
	"TRUST_DOMAIN":                  checkTrustDomain,
	"WORKLOAD_IDENTITY_SOCKET_FILE": checkSocketFile,
	"PROXY_CONFIG":                  checkProxyConfig,
	"ENVOY_STATUS_PORT":             checkPort, "ENVOY_PROMETHEUS_PORT": checkPort,
}

func readVariables() (rows []settings.Variable) {
	for line := range strings.Lines(variablesText) {
		column := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		v := settings.Variable{Name: column[0], Default: column[2], Origin: column[3], Check: checks[column[0]]}
		v.Doc, v.Unused = strings.CutPrefix(column[4], "not used: ")
		form, choices, limited := strings.Cut(column[1], "=")
		if limited {
			v.Choices = strings.Split(choices, ",")
		}
		if v.Secret = form == "secret"; !v.Secret {
			for v.Form.String() != form {
				v.Form++
			}
		}
		rows = append(rows, v)
	}
	return rows
}

// WriteHelp writes the purpose of each environment variable, for a program's -h, or as a Markdown table.
func WriteHelp(w io.Writer, markdown bool) error { return variables.Write(w, markdown) }

func checkCertProvider(value string) error {
	signer, ok := strings.CutPrefix(value, "k8s.io/")
	if ok && signer != "" || value == "istiod" || value == "custom" || value == "none" {
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

func checkPort(value string) error {
	if port, err := strconv.Atoi(value); err != nil || port == 0 || port > math.MaxUint16 {
		return errors.New("set it to a port, from 1 to 65535")
	}
	return nil
}

func checkSocketFile(value string) error {
	if value != filepath.Base(value) || value == "." || value == ".." {
		return errors.New("set it to the name of a file, without a directory")
	}
	return nil
}

// FromEnvironment returns the configuration in the environment, in the form of os.Environ. It opens no file. The
// error has a line for each variable with a bad value. The Agent logs names that are probably misspelled as warnings,
// and variables without effect as information.
func FromEnvironment(environ []string) (Config, error) {
	v, err := variables.Read(environ)
	if err != nil {
		return Config{}, err
	}
	proxy := proxyConfig{
		DiscoveryAddress: discovery, ConfigPath: proxyDir, StatusPort: 15020, ProxyAdminPort: 15000,
		Concurrency:              uint32(v.Int("ISTIO_CPU_LIMIT")),
		DrainDuration:            duration(45 * time.Second),
		TerminationDrainDuration: duration(v.Duration("MINIMUM_DRAIN_DURATION")),
	}
	_ = proxy.read(v.Text("PROXY_CONFIG")) // the table has checked it
	if err := conflict(v); err != nil {
		return Config{}, err
	}
	c := newConfig(v, &proxy)
	c.remark(proxy.all, v)
	if v.Text("JWT_POLICY") == "first-party-jwt" {
		c.note("environment variable JWT_POLICY: first-party-jwt is treated as third-party-jwt; " +
			"mount a token for the CA at " + tokenFile)
	}
	return c, nil
}

// newConfig returns the settings of the variables and of PROXY_CONFIG.
func newConfig(v *settings.Values, proxy *proxyConfig) Config {
	td, _ := spiffe.ParseTrustDomain(v.Text("TRUST_DOMAIN")) // the table has checked it
	c := Config{
		redacted: redact.New(fmt.Sprintf("istioagent.Config(%s, namespace %s, service account %s)", td,
			v.Text("POD_NAMESPACE"), v.Text("SERVICE_ACCOUNT"))),

		AllowFiles: append([]string{mounted}, gateways...), TokenFile: tokenFile,

		v: v, trustDomain: td, inPod: v.Set("KUBERNETES_SERVICE_HOST"),
		clusterID:        cmp.Or(v.Text("ISTIO_META_CLUSTER_ID"), v.Text("CLUSTER_ID")),
		outputCerts:      cmp.Or(v.Text("OUTPUT_CERTS"), v.Text("OUTPUT_CERT")),
		mountedCert:      cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_CERT_CHAIN"), filepath.Join(mounted, certName)),
		mountedKey:       cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_KEY"), filepath.Join(mounted, keyName)),
		mountedRoots:     cmp.Or(v.Text("ISTIO_META_TLS_CLIENT_ROOT_CERT"), filepath.Join(mounted, rootsName)),
		identityProvider: v.Text("CREDENTIAL_IDENTITY_PROVIDER"),
		keyAlgorithm:     fmt.Sprintf("rsa-%d", v.Int("WORKLOAD_RSA_KEY_SIZE")),
		postQuantum:      v.Text("COMPLIANCE_POLICY") == "pqc",
		proxy:            *proxy,
		Envoy: Envoy{
			Disabled: v.Bool("DISABLE_ENVOY"), Path: proxy.BinaryPath, ConfigFile: proxy.CustomConfigFile,
			Dir: proxy.ConfigPath, XDS: v.Bool("PROXY_XDS_VIA_AGENT"),
			AdminPort: int(proxy.ProxyAdminPort), StatusPort: int(proxy.StatusPort),
			DrainTime: time.Duration(proxy.DrainDuration), Concurrency: int(proxy.Concurrency),
		},
	}
	if v.Text("ECC_SIGNATURE_ALGORITHM") != "" {
		c.keyAlgorithm = map[string]string{"P256": "ecdsa-p256", "P384": "ecdsa-p384"}[v.Text("ECC_CURVE")]
	}
	if v.Set("GKE_CLUSTER_URL") && !v.Set("CREDENTIAL_IDENTITY_PROVIDER") {
		c.identityProvider = v.Text("GKE_CLUSTER_URL")
	}
	if v.Bool("FILE_MOUNTED_CERTS") {
		for _, name := range []string{"CERT_CHAIN", "KEY", "ROOT_CERT"} {
			if file := v.Text("ISTIO_META_TLS_SERVER_" + name); file != "" {
				c.AllowFiles = append(c.AllowFiles, file)
			}
		}
	}
	return c
}

// conflict returns an error if two variables contradict each other.
func conflict(v *settings.Values) error {
	if v.Set("OUTPUT_CERTS") && v.Set("OUTPUT_CERT") && v.Text("OUTPUT_CERTS") != v.Text("OUTPUT_CERT") {
		return v.Reject("OUTPUT_CERT", errors.New("OUTPUT_CERTS names another directory, and means the same; "+
			"leave one of them out"))
	}
	if v.Bool("FILE_MOUNTED_CERTS") && v.Text("PROV_CERT") != "" {
		return v.Reject("PROV_CERT", errors.New("with FILE_MOUNTED_CERTS the mounted files are used for the control "+
			"plane, too; leave one of them out"))
	}
	return nil
}

// header returns the metadata in variables with these names.
func (c *Config) header(names string) http.Header {
	h := make(http.Header)
	for name, value := range c.v.Prefixed(names) {
		h.Add(name, value)
	}
	return h
}

// google reports whether the CA is Google's service.
func (c *Config) google() bool {
	provider := c.text("CA_PROVIDER")
	return provider == googleCA || provider == googleCAS || strings.Contains(c.text("CA_ADDR"), "googleapis.com")
}
