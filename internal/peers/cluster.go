package peers

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Issuer is the issuer of a Cluster's service account tokens, and their audience if a request names none.
const Issuer = "https://kubernetes.default.svc"

// MaxNodes is how many nodes a Cluster can have.
const MaxNodes = 64

// NodeName returns the name of a node, from 0 to MaxNodes - 1.
func NodeName(n int) string { return fmt.Sprint("node-", n) }

// A Cluster is an API server of Kubernetes with its etcd, on loopback: RBAC decides, nodes have the rights of nodes
// (NodeRestriction), and tokens are bound to pods.
// There are no controllers, so no namespace has an account, and no kubelet, so a pod is a record of one.
type Cluster struct {
	URL string

	dir, admin string // directory, and token of an administrator
	server     *exec.Cmd
	process    *Process
	transport  *http.Transport
}

// NewCluster starts a Cluster that ends with the test, with further flags of the API server.
func NewCluster(t testing.TB, flags ...string) *Cluster {
	t.Helper()
	etcd, server := Program(t, "etcd"), Program(t, "kube-apiserver")
	c := &Cluster{dir: t.TempDir(), admin: rand.Text()}
	ports := FreePorts(t, 3)
	c.URL = "https://" + loopback(ports[2])
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(t, err)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	require.NoError(t, err)
	var nodes strings.Builder // that Node makes
	for n := range MaxNodes {
		fmt.Fprintf(&nodes, "%s,system:node:%s,node-%d,system:nodes\n", c.nodeToken(NodeName(n)), NodeName(n), n)
	}
	for name, data := range map[string][]byte{
		"sa.key":     pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
		"sa.pub":     pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}),
		"tokens.csv": []byte(c.admin + `,admin,1,"system:masters"` + "\n" + nodes.String()),
	} {
		require.NoError(t, os.WriteFile(c.file(name), data, 0o600))
	}
	Start(t, c.file("etcd.log"), exec.Command(etcd, "--data-dir", c.file("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls", listenURL(ports[0]), "--advertise-client-urls", listenURL(ports[0]),
		"--listen-peer-urls", listenURL(ports[1]), "--initial-advertise-peer-urls", listenURL(ports[1]),
		"--initial-cluster", "default="+listenURL(ports[1])))
	c.server = exec.Command(server, "--etcd-servers="+listenURL(ports[0]), "--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1", fmt.Sprint("--secure-port=", ports[2]), "--cert-dir="+c.file("certs"),
		"--service-cluster-ip-range=10.96.0.0/24",
		"--token-auth-file="+c.file("tokens.csv"), "--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", "--endpoint-reconciler-type=none",
		"--service-account-key-file="+c.file("sa.pub"), "--service-account-signing-key-file="+c.file("sa.key"),
		"--service-account-issuer="+Issuer, "--api-audiences="+Issuer, "--disable-admission-plugins=ServiceAccount")
	c.server.Args = append(c.server.Args, flags...)
	c.StartServer(t)
	return c
}

func (c *Cluster) file(name string) string { return filepath.Join(c.dir, name) }

// StartServer starts the API server again after [Cluster.KillServer], and waits until it is ready.
func (c *Cluster) StartServer(t testing.TB) {
	t.Helper()
	cmd := exec.Command(c.server.Path, c.server.Args[1:]...)
	c.process = Start(t, c.file("apiserver.log"), cmd)
	c.process.Ready(t, func() error {
		if c.transport == nil { // it makes its certificate itself
			roots, err := os.ReadFile(c.RootsFile())
			if err != nil {
				return err
			}
			pool := x509.NewCertPool()
			if !pool.AppendCertsFromPEM(roots) {
				return fmt.Errorf("%s has no certificate yet", c.RootsFile())
			}
			c.transport = &http.Transport{
				TLSClientConfig:   &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool},
				ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 16,
			}
		}
		code, answer, err := c.request(c.admin, "GET", "/readyz", nil)
		if err == nil && code != http.StatusOK {
			err = fmt.Errorf("%d: %s", code, answer)
		}
		return err
	})
}

// KillServer kills the API server; etcd stays.
func (c *Cluster) KillServer() { c.process.Kill() }

// RootsFile returns the path of the roots of the API server in PEM.
func (c *Cluster) RootsFile() string { return c.file("certs/apiserver.crt") }

// Client returns a client that sends a token to the API server, as the programs under test need it.
func (c *Cluster) Client(token string) *http.Client {
	return &http.Client{Transport: bearer{token, c.transport}, Timeout: 30 * time.Second}
}

// bearer adds a token.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// Do sends a request as an administrator, and fails the test unless it succeeds. A body that is a string is YAML. The
// answer is read into out, which may be nil.
func (c *Cluster) Do(t testing.TB, method, path string, body, out any) {
	t.Helper()
	code, answer, err := c.request(c.admin, method, path, body)
	require.NoError(t, err)
	require.Equal(t, 2, code/100, "%s %s: %s", method, path, answer)
	if out != nil {
		require.NoError(t, json.Unmarshal(answer, out))
	}
}

// Status sends a request as an administrator, and returns the status of the answer.
func (c *Cluster) Status(t testing.TB, method, path string) int {
	t.Helper()
	code, _, err := c.request(c.admin, method, path, nil)
	require.NoError(t, err)
	return code
}

// Send sends a request as an administrator, with a body as for Do, and returns the status and the answer.
func (c *Cluster) Send(method, path string, body any) (int, []byte, error) {
	return c.request(c.admin, method, path, body)
}

func (c *Cluster) request(token, method, path string, body any) (int, []byte, error) {
	var data []byte
	kind := "application/json"
	switch b := body.(type) {
	case nil:
	case string:
		data, kind = []byte(b), "application/yaml"
	default:
		var err error
		if data, err = json.Marshal(body); err != nil {
			return 0, nil, err
		}
	}
	if method == http.MethodPatch {
		kind = "application/merge-patch+json"
	}
	r, err := http.NewRequest(method, c.URL+path, bytes.NewReader(data))
	if err != nil {
		return 0, nil, err
	}
	r.Header.Set("Content-Type", kind)
	response, err := c.Client(token).Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close() // all of it is read
	answer, err := io.ReadAll(response.Body)
	return response.StatusCode, answer, err
}

// Admin returns a client with all rights.
func (c *Cluster) Admin() *http.Client { return c.Client(c.admin) }

// Create creates the objects of a text, which are YAML documents, each with a line of its own, "POST PATH", before it.
func (c *Cluster) Create(t testing.TB, text string) {
	t.Helper()
	for part := range strings.SplitSeq(text, "POST ") {
		if path, body, ok := strings.Cut(strings.TrimSpace(part), "\n"); ok {
			c.Do(t, "POST", path, body, nil)
		}
	}
}

// Account creates a service account, and its namespace if that is not there.
func (c *Cluster) Account(t testing.TB, namespace, name string) {
	t.Helper()
	if c.Status(t, "GET", "/api/v1/namespaces/"+namespace) == http.StatusNotFound {
		c.Create(t, fmt.Sprintf("POST /api/v1/namespaces\n{apiVersion: v1, kind: Namespace, metadata: {name: %s}}",
			namespace))
	}
	c.Create(t, fmt.Sprintf("POST /api/v1/namespaces/%s/serviceaccounts\n{apiVersion: v1, kind: ServiceAccount, "+
		"metadata: {name: %s}}", namespace, name))
}

func (c *Cluster) nodeToken(name string) string { return c.admin + "." + name }

// Node creates the record of a node, of a name that NodeName returns, and returns the token of its kubelet.
func (c *Cluster) Node(t testing.TB, name string) string {
	t.Helper()
	c.Do(t, "POST", "/api/v1/nodes", fmt.Sprintf("{apiVersion: v1, kind: Node, metadata: {name: %s}}", name), nil)
	return c.nodeToken(name)
}

// Pod creates the record of a pod on a node, and returns its UID.
func (c *Cluster) Pod(t testing.TB, namespace, account, name, node string) string {
	t.Helper()
	var o struct{ Metadata struct{ UID string } }
	c.Do(t, "POST", "/api/v1/namespaces/"+namespace+"/pods",
		fmt.Sprintf("{apiVersion: v1, kind: Pod, metadata: {name: %s}, "+
			"spec: {serviceAccountName: %s, nodeName: %s, containers: [{name: main, image: none}]}}",
			name, account, node), &o)
	return o.Metadata.UID
}

// DeletePod deletes a pod at once.
func (c *Cluster) DeletePod(t testing.TB, namespace, name string) {
	t.Helper()
	c.Do(t, "DELETE", "/api/v1/namespaces/"+namespace+"/pods/"+name+"?gracePeriodSeconds=0", nil, nil)
}

// Token requests a token of an account for an hour, bound to a pod unless pod is empty.
func (c *Cluster) Token(t testing.TB, namespace, account, pod string, audiences ...string) string {
	t.Helper()
	type reference struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Name       string `json:"name"`
	}
	type spec struct {
		Audiences []string   `json:"audiences"`
		Seconds   int        `json:"expirationSeconds"`
		Bound     *reference `json:"boundObjectRef,omitempty"`
	}
	request := struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Spec       spec   `json:"spec"`
	}{"authentication.k8s.io/v1", "TokenRequest", spec{Audiences: audiences, Seconds: 3600}}
	if pod != "" {
		request.Spec.Bound = &reference{"v1", "Pod", pod}
	}
	var answer struct{ Status struct{ Token string } }
	c.Do(t, "POST", fmt.Sprintf("/api/v1/namespaces/%s/serviceaccounts/%s/token", namespace, account), &request,
		&answer)
	require.NotEmpty(t, answer.Status.Token)
	return answer.Status.Token
}

// ClientOf returns a client with the token of a service account.
func (c *Cluster) ClientOf(t testing.TB, namespace, account string) *http.Client {
	t.Helper()
	return c.Client(c.Token(t, namespace, account, "", Issuer))
}
