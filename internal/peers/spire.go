package peers

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// SPIREOptions are what tests choose of a SPIRE. Zero values mean the defaults.
type SPIREOptions struct {
	TrustDomain string // default example.org

	// SVIDTTL is the lifetime of both kinds of SVIDs: one minute by default. SPIRE backdates certificates by ten
	// seconds, and renews a certificate near the half of that longer life.
	SVIDTTL time.Duration

	// CATTL is the lifetime of the server's CA and of its key for JWT-SVIDs, by default an hour. The server prepares
	// the next one after a half of it and changes to that after five sixths, checking every ten seconds.
	CATTL time.Duration

	// Profile is that of the server's bundle endpoint, https_spiffe or https_web. Without one there is no endpoint.
	Profile string

	// Interval is the time after which the server and the agent look for changes: a second by default.
	Interval time.Duration

	AgentConfig string // lines for the section "agent" of its configuration
}

// SPIRE is a server of SPIRE on loopback and its agent. Both keep their state in files, so that each can be killed and
// started again; the agent then goes on without a new join token, as it has its SVID, which lives as long as the CA
// lets it.
type SPIRE struct {
	TrustDomain   spiffe.TrustDomain
	AgentSocket   string // the Workload API and SDS
	ServerSocket  string // the server's own API
	BundleURL     string // of the bundle endpoint
	Server, Agent *Process

	serverProgram, agentProgram string

	dir string
	web *pki.Issuer // of certificates for websites, which the server trusts
}

// The folder "server" has all state of the server.
var spireConfig = template.Must(template.New("").Parse(`
{{define "server"}}
server {
	bind_address = "127.0.0.1"
	bind_port = "{{.Port}}"
	socket_path = "{{.Dir}}/server.sock"
	trust_domain = "{{.TrustDomain}}"
	data_dir = "{{.Dir}}/server"
	default_x509_svid_ttl = "{{.SVIDTTL}}"
	default_jwt_svid_ttl = "{{.SVIDTTL}}"
	agent_ttl = "{{.CATTL}}"
	ca_ttl = "{{.CATTL}}"
	experimental { cache_reload_interval = "{{.Interval}}" }
{{if .Profile}}
	federation {
		bundle_endpoint {
			address = "127.0.0.1"
			port = {{.BundlePort}}
			refresh_hint = "60s"
			profile "{{.Profile}}" {
{{if eq .Profile "https_web"}}
				serving_cert_file {
					cert_file_path = "{{.Dir}}/web.pem"
					key_file_path = "{{.Dir}}/web.key"
					file_sync_interval = "1h"
				}
{{end}}
			}
		}
	}
{{end}}
}
plugins {
	DataStore "sql" {
		plugin_data {
			database_type = "sqlite3"
			connection_string = "{{.Dir}}/server/entries.sqlite3"
		}
	}
	NodeAttestor "join_token" { plugin_data {} }
	KeyManager "disk" { plugin_data { keys_path = "{{.Dir}}/server/keys.json" } }
}
{{end}}
{{define "agent"}}
agent {
	data_dir = "{{.Dir}}/agent"
	server_address = "127.0.0.1"
	server_port = "{{.Port}}"
	socket_path = "{{.Dir}}/agent.sock"
	trust_domain = "{{.TrustDomain}}"
	insecure_bootstrap = true
	experimental { sync_interval = "{{.Interval}}" }
	{{.AgentConfig}}
}
plugins {
	NodeAttestor "join_token" { plugin_data {} }
	KeyManager "disk" { plugin_data { directory = "{{.Dir}}/agent" } }
	WorkloadAttestor "unix" {
		plugin_data {
			discover_workload_path = true
			workload_size_limit = -1
		}
	}
}
{{end}}`))

// NewSPIRE starts a server and an agent, which end with the test.
func NewSPIRE(t testing.TB, o SPIREOptions) *SPIRE {
	t.Helper()
	if o.TrustDomain == "" {
		o.TrustDomain = "example.org"
	}
	if o.SVIDTTL == 0 {
		o.SVIDTTL = time.Minute
	}
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	if o.CATTL == 0 {
		o.CATTL = time.Hour
	}
	s := &SPIRE{TrustDomain: spiffe.MustParseTrustDomain(o.TrustDomain), serverProgram: Program(t, "spire-server"),
		agentProgram: Program(t, "spire-agent")}
	var err error
	s.dir, err = os.MkdirTemp("", "spire") // shorter than that of the test, for the addresses of sockets
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(s.dir) })
	s.ServerSocket, s.AgentSocket = s.path("server.sock"), s.path("agent.sock")
	ports := FreePorts(t, 2)
	s.BundleURL = "https://" + loopback(ports[1])
	s.newWeb(t)
	for _, section := range []string{"server", "agent"} {
		require.NoError(t, os.Mkdir(s.path(section), 0o700))
		var text bytes.Buffer
		require.NoError(t, spireConfig.ExecuteTemplate(&text, section, struct {
			SPIREOptions
			Dir              string
			Port, BundlePort int
		}{o, s.dir, ports[0], ports[1]}))
		require.NoError(t, os.WriteFile(s.path(section+".conf"), text.Bytes(), 0o600))
	}
	s.StartServer(t)
	var token struct{ Value string }
	s.decode(t, &token, "token", "generate", "-spiffeID", s.ID("/node").String())
	s.startAgent(t, "-joinToken", token.Value)
	return s
}

// StartServer starts the server again, which has ended, and waits until it listens.
func (s *SPIRE) StartServer(t testing.TB) {
	t.Helper()
	cmd := exec.Command(s.serverProgram, "run", "-config", s.path("server.conf"))
	cmd.Env = append(os.Environ(), "SSL_CERT_FILE="+s.path("roots.pem")) // of the bundle endpoints of others
	s.Server = Start(t, s.path("server.log"), cmd)
	s.Server.Ready(t, func() error { return dialUnix(s.ServerSocket) })
}

// StartAgent starts the agent again, which has ended, and waits until it listens.
func (s *SPIRE) StartAgent(t testing.TB) { t.Helper(); s.startAgent(t) }

func (s *SPIRE) startAgent(t testing.TB, args ...string) {
	t.Helper()
	s.Agent = Start(t, s.path("agent.log"),
		exec.Command(s.agentProgram, append([]string{"run", "-config", s.path("agent.conf")}, args...)...))
	s.Agent.Ready(t, func() error { return dialUnix(s.AgentSocket) })
}

func dialUnix(path string) error {
	c, err := net.Dial("unix", path)
	if err == nil {
		_ = c.Close() // it was there
	}
	return err
}

func (s *SPIRE) path(name string) string { return filepath.Join(s.dir, name) }

// WorkloadAPI returns the address of the Workload API.
func (s *SPIRE) WorkloadAPI() string { return "unix://" + s.AgentSocket }

// ID returns an ID of the trust domain.
func (s *SPIRE) ID(path string) spiffe.ID {
	return spiffe.MustParseID(s.TrustDomain.ID().String() + path)
}

// ServerCLI runs a command of the server's program, such as "entry", "show", with the address of the server. The test
// fails if the command does.
func (s *SPIRE) ServerCLI(t testing.TB, args ...string) string {
	t.Helper()
	out, err := cli(s.serverProgram, s.ServerSocket, args)
	require.NoError(t, err)
	return out
}

// TryServerCLI is ServerCLI for a command that may fail.
func (s *SPIRE) TryServerCLI(args ...string) (string, error) {
	return cli(s.serverProgram, s.ServerSocket, args)
}

// AgentCLI runs a command of the agent's program, such as "api", "fetch", "x509", with the address of the Workload
// API.
func (s *SPIRE) AgentCLI(args ...string) (string, error) {
	return cli(s.agentProgram, s.AgentSocket, args)
}

func cli(program, socket string, args []string) (string, error) {
	out, err := exec.Command(program, append(args, "-socketPath", socket)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", filepath.Base(program), strings.Join(args, " "), err, tail(out))
	}
	return string(out), nil
}

func (s *SPIRE) decode(t testing.TB, out any, args ...string) {
	t.Helper()
	text := s.ServerCLI(t, append(args, "-output", "json")...)
	require.NoError(t, json.Unmarshal([]byte(text), out), "%s", text)
}

// Register registers a workload with a path, by default each process of this user: the arguments are more flags of
// "spire-server entry create", of which -selector replaces that. The agent knows the entry within two seconds.
func (s *SPIRE) Register(t testing.TB, path string, flags ...string) spiffe.ID {
	t.Helper()
	if !strings.Contains(strings.Join(flags, " "), "-selector") {
		flags = append(flags, "-selector", fmt.Sprint("unix:uid:", os.Getuid()))
	}
	s.ServerCLI(t, append([]string{"entry", "create", "-parentID", s.ID("/node").String(), "-spiffeID",
		s.ID(path).String()}, flags...)...)
	return s.ID(path)
}

// Bundle returns the trust bundle that the server has.
func (s *SPIRE) Bundle(t testing.TB) *spiffe.Bundle {
	t.Helper()
	b, err := spiffe.ParseBundle(s.TrustDomain, []byte(s.ServerCLI(t, "bundle", "show", "-format", "spiffe")))
	require.NoError(t, err)
	return b
}

// LocalAuthority does a step of a rotation, in this order: prepare, activate, taint, revoke. The kind is x509 or jwt.
// When x509 is tainted, it waits until the agent has replaced its own certificate, which revoke would make useless. If
// workloads have certificates of the tainted CA, the agent drops them and may deny an identity until it has others.
func (s *SPIRE) LocalAuthority(t testing.TB, kind, step string) {
	t.Helper()
	args := []string{"localauthority", kind, step}
	if state := map[string]string{"activate": "prepared", "taint": "old", "revoke": "old"}[step]; state != "" {
		var all map[string]json.RawMessage
		s.decode(t, &all, "localauthority", kind, "show")
		var authority struct {
			ID string `json:"authority_id"`
		}
		require.NoError(t, json.Unmarshal(all[state], &authority), "%s", all)
		args = append(args, "-authorityID", authority.ID)
	}
	own := s.agentSerial(t)
	s.ServerCLI(t, args...)
	if kind == "x509" && step == "taint" {
		require.Eventually(t, func() bool { return s.agentSerial(t) != own }, 30*time.Second, 200*time.Millisecond)
	}
}

// agentSerial returns the serial number of the agent's own certificate.
func (s *SPIRE) agentSerial(t testing.TB) string {
	t.Helper()
	var list struct {
		Agents []struct {
			Serial string `json:"x509svid_serial_number"`
		}
	}
	s.decode(t, &list, "agent", "list")
	require.Len(t, list.Agents, 1)
	return list.Agents[0].Serial
}

// Backup copies the state of the server, and returns what replaces the state by that copy. Each starts it again.
func (s *SPIRE) Backup(t testing.TB) (restore func()) {
	t.Helper()
	replace := func(name, by string) {
		s.Server.Stop()
		require.NoError(t, os.RemoveAll(s.path(name)))
		require.NoError(t, os.CopyFS(s.path(name), os.DirFS(s.path(by))))
		s.StartServer(t)
	}
	replace("backup", "server")
	return func() { t.Helper(); replace("server", "backup") }
}

// newWeb makes the CA for websites which the server trusts, and the certificate of its own endpoint.
func (s *SPIRE) newWeb(t testing.TB) {
	t.Helper()
	now := time.Now()
	var err error
	s.web, err = pki.NewRoot(newKey(t), pki.CertificateOptions{NotBefore: now.Add(-time.Hour),
		NotAfter: now.Add(24 * time.Hour)})
	require.NoError(t, err)
	own := s.WebCertificate(t)
	keyPEM, err := pki.MarshalPrivateKeyPEM(own.PrivateKey.(crypto.Signer))
	require.NoError(t, err)
	for name, data := range map[string][]byte{"roots.pem": pki.MarshalCertificatesPEM(s.web.Certificate()),
		"web.pem": pki.MarshalCertificatesPEM(own.Leaf), "web.key": keyPEM} {
		require.NoError(t, os.WriteFile(s.path(name), data, 0o600))
	}
}

// WebCertificate returns a certificate for 127.0.0.1, which the server trusts for bundle endpoints by https_web.
func (s *SPIRE) WebCertificate(t testing.TB) *tls.Certificate {
	t.Helper()
	key := newKey(t)
	leaf, err := s.web.Issue(pki.CertificateOptions{PublicKey: key.Public(), CommonName: "bundles",
		SANs: []pki.SAN{pki.IPSAN(net.IPv4(127, 0, 0, 1))}, NotBefore: s.web.Certificate().NotBefore,
		NotAfter: s.web.Certificate().NotAfter})
	require.NoError(t, err)
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
}

// WebRoots returns the roots of the certificate of the bundle endpoint by https_web.
func (s *SPIRE) WebRoots() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(s.web.Certificate())
	return pool
}
