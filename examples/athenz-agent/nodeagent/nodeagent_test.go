package nodeagent_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	ztsclient "github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/examples/athenz-agent/nodeagent"
	"github.com/svidkit/svidkit/examples/athenz-sia/sidecar"
	"github.com/svidkit/svidkit/examples/internal/agentapi"
	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/test/athenztest"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/testkey"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const (
	account   = athenztest.Account
	namespace = athenztest.Namespace
	secret    = athenztest.Secret
)

type object = athenztest.Object

// cluster is a cluster with an agent.
type cluster struct {
	*athenztest.Cluster
	t       testing.TB
	volumes nodeagent.Volumes
	socket  string
	config  nodeagent.Config
	stop    func() // the agent
}

func newCluster(t testing.TB) *cluster {
	t.Helper()
	c, folder := &cluster{Cluster: athenztest.New(t), t: t}, t.TempDir()
	c.volumes, c.socket = nodeagent.Volumes(filepath.Join(folder, "volumes")), filepath.Join(folder, "agent.sock")
	zts := c.ZTS.Endpoint()
	zts.Token = nil
	c.config = nodeagent.Config{
		Volumes: c.volumes, Pods: c.Pods, Signer: c.Signer, ZTS: ztsclient.Options{Endpoint: zts}, Provider: c.Callback(), Suffix: athenztest.Suffix,
		Mapping: c.Mapping(), Logger: c.Logger(), NewKey: twoKeys(),
	}
	c.start()
	return c
}

var secondKey = sync.OnceValues(func() (*rsa.PrivateKey, error) { return rsa.GenerateKey(rand.Reader, 2048) })

// twoKeys returns a function that gives each of two keys by turns, as an RSA key takes long to make.
func twoKeys() func() (*rsa.PrivateKey, error) {
	var given atomic.Int64
	return func() (*rsa.PrivateKey, error) {
		if given.Add(1)%2 == 0 {
			return secondKey()
		}
		return testkey.RSA(), nil
	}
}

// start starts the agent, and stops one that runs.
func (c *cluster) start() {
	c.t.Helper()
	if c.stop != nil {
		c.stop()
	}
	agent := must.Get(nodeagent.New(c.config))(c.t)
	server := &unixsocket.Server{Path: c.socket, Handler: agent}
	require.NoError(c.t, server.Listen())
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.t.Context()))
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(c.t, server.Run(ctx)) })
	c.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	c.t.Cleanup(c.stop)
}

func mountOf(pod string) string {
	return "/var/lib/kubelet/pods/" + pod + "/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity"
}

// mount mounts a volume for a pod and returns the file with its handle.
func (c *cluster) mount(name string) (handleFile string) {
	c.t.Helper()
	mount := mountOf(name)
	handle := must.Get(c.volumes.Add(mount, namespace, name))(c.t)
	secret := must.Get(os.ReadFile(filepath.Join(string(c.volumes), "secret")))(c.t)
	assert.Equal(c.t, agentapi.Handle(secret, mount), handle)
	return filepath.Join(filepath.Dir(c.socket), "volumes", handle, "mount", "id")
}

// pod mounts a volume for a pod and returns the client that is in it.
func (c *cluster) pod(name string) *agentapi.Client {
	c.t.Helper()
	client := must.Get(agentapi.NewClient(c.socket, c.mount(name)))(c.t)
	return client
}

func newAgent(t testing.TB, c *cluster, edit func(*nodeagent.Config)) http.Handler {
	t.Helper()
	cfg := c.config
	if edit != nil {
		edit(&cfg)
	}
	return must.Get(nodeagent.New(cfg))(t)
}

func ecKey(t testing.TB, curve elliptic.Curve) *ecdsa.PrivateKey {
	t.Helper()
	return must.Get(ecdsa.GenerateKey(curve, rand.Reader))(t)
}

// TestSystem takes a pod through its life.
func TestSystem(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-1-1", "ATH-1-2", "ATH-1-3", "ATH-1-4", "ATH-1-5", "ATH-2-1", "ATH-2-8", "ATH-7.1-1", "ATH-7.1-3", "ATH-7.1-4",
		"ATH-7.1-6", "ATH-7.1-11", "ATH-7.2-1", "ATH-7.2-2", "ATH-7.2-3", "ATH-7.2-4", "ATH-7.2-5", "ATH-7.2-6", "ATH-9-3", "ATH-9-6", "ATH-9-8",
		"ATH-9-9", "ATH-9-10", "ATH-11.1-4", "ATH-11.1-8", "ATH-12-2", "ATH-18-5")
	c := newCluster(t)
	pod := c.pod("web-0")

	// The signing key is rotated: the public key first.
	next := ecKey(t, elliptic.P256())
	c.Keys.AddPublic(t, "v2", next)
	first := must.Get(pod.Init(t.Context()))(t)
	leaf := first.Credential.Leaf()
	assert.Equal(t, "media.sports.frontend", leaf.Subject.CommonName)
	assert.Equal(t, []string{"frontend.media-sports.svc.cluster.local", "web-0.instanceid.athenz.svc.cluster.local"}, leaf.DNSNames)
	require.Len(t, leaf.IPAddresses, 1)
	assert.Equal(t, "10.1.2.3", leaf.IPAddresses[0].String())
	require.Len(t, leaf.URIs, 1)
	assert.Equal(t, "spiffe://media.sports/sa/frontend", leaf.URIs[0].String())
	key, ok := leaf.PublicKey.(*rsa.PublicKey)
	require.True(t, ok)
	assert.Equal(t, 2048, key.N.BitLen())
	require.Len(t, first.Roots, 1)
	assert.True(t, first.Roots[0].Equal(c.CA.Root()))
	ntoken, err := athenz.VerifyServiceToken(t.Context(), first.Token(), func(_ context.Context, owner athenzname.Service, id string) (crypto.PublicKey, error) {
		assert.Equal(t, "sys.auth.zts", owner.String())
		assert.Equal(t, "0", id)
		return c.ZTS.PublicKey(), nil
	})
	require.NoError(t, err)
	assert.Equal(t, "media.sports.frontend", ntoken.Service.String())

	require.ErrorContains(t, must.Err(pod.Init(t.Context())), "answers 403", "a second init")

	second := must.Get(pod.Refresh(t.Context(), first.Credential))(t)
	assert.NotEqual(t, leaf.PublicKey, second.Credential.Leaf().PublicKey)

	// The answer was lost: the certificate before is good once more, and again.
	again := must.Get(pod.Refresh(t.Context(), first.Credential))(t)
	again = must.Get(pod.Refresh(t.Context(), again.Credential))(t)

	// One that was superseded twice would revoke the instance for good: the agent does not show it to ZTS.
	before := c.ZTS.Requests()
	for _, old := range []*pki.Credential{first.Credential, second.Credential} {
		require.ErrorContains(t, must.Err(pod.Refresh(t.Context(), old)), "superseded")
	}
	assert.Equal(t, before, c.ZTS.Requests())
	assert.False(t, c.ZTS.Revoked(cafake.AthenzInstance(c.ZTS.Fake)))

	c.Keys.Add(t, "v2", next)
	require.NoError(t, os.Remove(filepath.Join(c.Keys.Public, secret+".v1")))
	c.Put("web-1", nil)
	must.Get(c.pod("web-1").Init(t.Context()))(t)

	// The agent is restarted, and knows all that it has to.
	c.start()
	require.ErrorContains(t, must.Err(pod.Refresh(t.Context(), first.Credential)), "superseded")
	last := must.Get(pod.Refresh(t.Context(), again.Credential))(t)

	// The pod ends, and is gone.
	c.Put("web-0", func(o object) { o["status"].(object)["phase"] = "Succeeded" })
	require.ErrorContains(t, must.Err(pod.Refresh(t.Context(), last.Credential)), "answers 500")
	assert.Contains(t, c.Log.String(), "its phase is Succeeded")
	c.Remove("web-0")
	require.ErrorContains(t, must.Err(pod.Refresh(t.Context(), last.Credential)), "answers 500")
	require.ErrorContains(t, must.Err(c.pod("web-0").Init(t.Context())), "the kubelet does not know the pod")

	// Nothing that is secret is in a log or in a file.
	secrets := []string{"eyJ", "PRIVATE KEY", "MII", ";s="}
	for _, s := range secrets {
		assert.NotContains(t, c.Log.String(), s)
	}
	require.NoError(t, filepath.WalkDir(filepath.Dir(c.socket), func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		for _, s := range secrets {
			assert.NotContains(t, string(data), s, path)
		}
		return err
	}))
}

// TestLongPrincipal has one that is too long for a common name: ZTS would not refresh what has none.
func TestLongPrincipal(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	long := strings.Repeat("a", 60)
	c.ZTS.Change(func(r *cafake.ZTSRules) { r.Services = append(r.Services, "media.sports."+long) })
	c.Put("web-0", func(o object) { o["spec"].(object)["serviceAccountName"] = long })
	require.ErrorContains(t, must.Err(c.pod("web-0").Init(t.Context())), "the pod cannot have an identity")
	assert.Contains(t, c.Log.String(), "a common name 64 at most")
	c.Put("web-0", func(o object) { o["spec"].(object)["serviceAccountName"] = long[:51] })
	c.ZTS.Change(func(r *cafake.ZTSRules) { r.Services = append(r.Services, "media.sports."+long[:51]) })
	assert.Len(t, must.Get(c.pod("web-0").Init(t.Context()))(t).Credential.Leaf().Subject.CommonName, 64)
	_, err := c.pod("gone-0").Init(t.Context())
	var told interface {
		Retryable() (time.Duration, bool)
	}
	require.ErrorAs(t, err, &told)
	_, retry := told.Retryable()
	assert.True(t, retry, "the kubelet may not know it yet")
}

// call asks an agent without a socket.
func call(t testing.TB, agent http.Handler, method, path string, body any) (int, string) {
	t.Helper()
	data, ok := body.(string)
	if !ok && body != nil {
		data = string(must.Get(json.Marshal(body))(t))
	}
	w := httptest.NewRecorder()
	agent.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(data)))
	return w.Code, w.Body.String()
}

// given is an answer as its bytes are.
type given struct {
	Token string `json:"ntoken"`
	Key   string `json:"keyPEM"`
	Cert  string `json:"certPEM"`
	CA    string `json:"caCertPEM"`
}

func decode(t testing.TB, text string) []byte {
	t.Helper()
	return must.Get(base64.StdEncoding.DecodeString(text))(t)
}

// A handle is not to be had without the secret of the node, which nobody but its owner reads, and one of a pod that was deleted
// gives nothing to or from the next pod of its name.
func TestHandles(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newCluster(t)
	uid := "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"
	agent := newAgent(t, c, func(cfg *nodeagent.Config) {
		kubelet := cfg.Pods
		cfg.Pods = func(ctx context.Context, ns, name string) (*athenz.Pod, error) {
			pod, err := kubelet(ctx, ns, name)
			if err == nil {
				pod.UID = uid
			}
			return pod, err
		}
	})
	mount := mountOf(uid)
	handle := must.Get(c.volumes.Add(mount, namespace, "web-0"))(t)
	again := must.Get(c.volumes.Add(mount, namespace, "web-0"))(t)
	assert.Equal(t, handle, again, "after a restart of the driver, too")
	info := must.Get(os.Stat(filepath.Join(string(c.volumes), "secret")))(t)
	if runtime.GOOS != "windows" {
		assert.EqualValues(t, 0o600, info.Mode().Perm())
	}

	// What the attacker knows is the path.
	sum := sha256.Sum256([]byte(mount))
	code, text := call(t, agent, http.MethodPost, "/v1/init/"+base64.RawURLEncoding.EncodeToString(sum[:]), nil)
	assert.Equal(t, http.StatusBadRequest, code, text)
	elsewhere := must.Get(nodeagent.Volumes(filepath.Join(t.TempDir(), "volumes")).Add(mount, namespace, "web-0"))(t)
	assert.NotEqual(t, handle, elsewhere, "another node has another secret")

	uid = "00000000-2a49-4a8e-8f6c-2d7b6f0a1c22" // the pod was deleted, and there is another one of its name
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusForbidden, code, text)
	assert.Contains(t, text, "of a pod that was deleted")
	uid = "6f9c7a34-2a49-4a8e-8f6c-2d7b6f0a1c22"
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusOK, code, text)

	require.NoError(t, c.volumes.Remove(mount))
	code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusBadRequest, code)
	require.NoError(t, os.WriteFile(filepath.Join(string(c.volumes), "secret"), []byte("short"), 0o600))
	require.ErrorContains(t, must.Err(c.volumes.Add(mount, namespace, "web-0")), "the secret of the node has 5 bytes, not 32")
}

func TestAgentWire(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-2", "ATH-7.1-3", "ATH-7.1-4", "ATH-7.1-6", "ATH-7.1-7", "ATH-7.1-8", "ATH-7.1-9", "ATH-7.1-10", "ATH-7.1-11", "ATH-7.1-12", "ATH-7.1-13",
		"ATH-7.2-1", "ATH-7.2-4", "ATH-7.2-7", "ATH-7.3-2", "ATH-7.3-3", "ATH-7.3-4", "ATH-9-1", "ATH-18-3", "ATH-18-4")
	c := newCluster(t)
	agent := newAgent(t, c, func(cfg *nodeagent.Config) { cfg.NewKey = nil })
	const mount = "/var/lib/kubelet/pods/0001/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity"
	require.NoError(t, os.MkdirAll(string(c.volumes), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(string(c.volumes), "secret"), bytes.Repeat([]byte("s"), 32), 0o600))
	handle := must.Get(c.volumes.Add(mount, namespace, "web-0"))(t)
	require.Equal(t, "aoSDTiI74P5DMy1IC9WGaWpMruZ0e_feah971sgD8fI", handle, "HMAC-SHA256 of the path with the secret")
	folder := filepath.Join(filepath.Dir(c.socket), "volumes", handle)
	data := must.Get(os.ReadFile(filepath.Join(folder, "data.json")))(t)
	assert.JSONEq(t, `{"namespace":"media-sports","name":"web-0"}`, string(data))
	data = must.Get(os.ReadFile(filepath.Join(folder, "mount", "id")))(t)
	assert.Equal(t, handle, string(data))

	code, text := call(t, agent, http.MethodPost, "/v1/refresh/"+handle, object{})
	assert.Equal(t, http.StatusBadRequest, code, "a refresh before init: %s", text)

	w := httptest.NewRecorder()
	agent.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "http://socket.path/v1/init/"+handle, nil))
	require.Equal(t, http.StatusOK, w.Code, w.Body)
	assert.Equal(t, "application/json", w.Header().Get("Content-Type"))
	var first given
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &first))
	assert.True(t, strings.HasPrefix(first.Token, "v=S1;d=media.sports;n=frontend;"))
	key, cert := decode(t, first.Key), decode(t, first.Cert)
	block, rest := pem.Decode(key)
	require.NotNil(t, block)
	assert.Empty(t, rest)
	assert.Equal(t, "RSA PRIVATE KEY", block.Type)
	private := must.Get(x509.ParsePKCS1PrivateKey(block.Bytes))(t)
	assert.Equal(t, 2048, private.N.BitLen())
	certs := must.Get(pki.ParseCertificatesPEM(cert))(t)
	assert.True(t, private.PublicKey.Equal(certs[0].PublicKey))
	assert.Equal(t, string(pki.MarshalCertificatesPEM(c.CA.Root())), string(decode(t, first.CA)))

	data = must.Get(os.ReadFile(filepath.Join(folder, "context.json")))(t)
	var known struct {
		Domain, Service, ProviderService, InstanceID string
		SANNames                                     []string
		SANIPs                                       []net.IP
		SANURIs                                      []*url.URL
	}
	require.NoError(t, json.Unmarshal(data, &known))
	assert.Equal(t, []string{"media.sports", "frontend", "k8s.admin.athenz-callback", "web-0"}, []string{known.Domain, known.Service, known.ProviderService, known.InstanceID})
	assert.Equal(t, certs[0].DNSNames, known.SANNames)
	assert.Equal(t, "10.1.2.3", known.SANIPs[0].String())
	assert.Equal(t, "spiffe://media.sports/sa/frontend", known.SANURIs[0].String())

	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusForbidden, code)
	assert.Contains(t, text, "given already")

	// Fields in base64, and in plain PEM.
	agent = newAgent(t, c, nil)
	code, text = call(t, agent, http.MethodPost, "/v1/refresh/"+handle, object{"keyPEM": key, "certPEM": cert})
	require.Equal(t, http.StatusOK, code, text)
	var second given
	require.NoError(t, json.Unmarshal([]byte(text), &second))
	assert.NotEqual(t, first.Key, second.Key)
	code, text = call(t, agent, http.MethodPost, "/v1/refresh/"+handle, object{"keyPEM": string(decode(t, second.Key)), "certPEM": string(decode(t, second.Cert))})
	require.Equal(t, http.StatusOK, code, text)
	var third given
	require.NoError(t, json.Unmarshal([]byte(text), &third))

	before := c.ZTS.Requests()
	own := object{"keyPEM": third.Key, "certPEM": third.Cert}
	other := c.ZTS.Credential("media.sports.backend")
	otherCert, otherKey := must.Get2(other.MarshalPEM())(t)
	for name, body := range map[string]any{
		"nothing": "", "noise": "x", "a list": "[]", "no fields": "{}", "numbers": `{"keyPEM":1,"certPEM":2}`, "not base64": `{"keyPEM":"?","certPEM":"?"}`,
		"two values": `{} {}`, "no key": object{"certPEM": third.Cert}, "no certificate": object{"keyPEM": third.Key},
		"another's key":      object{"keyPEM": first.Key, "certPEM": third.Cert},
		"the first":          object{"keyPEM": first.Key, "certPEM": first.Cert},
		"another service's":  object{"keyPEM": otherKey, "certPEM": otherCert},
		"more than it takes": object{"keyPEM": third.Key, "certPEM": third.Cert, "x": strings.Repeat("x", 2<<20)},
	} {
		code, text := call(t, agent, http.MethodPost, "/v1/refresh/"+handle, body)
		assert.Equal(t, http.StatusBadRequest, code, "%s: %s", name, text)
		assert.NotContains(t, text, "PRIVATE KEY")
	}
	for _, bad := range []string{
		strings.Repeat("A", 43), strings.Repeat("A", 42), strings.Repeat("A", 44), handle + "=", handle[:42], "x", "..", "%2e%2e", "..%2f..%2f" + handle, "a/b", handle[:42] + "N",
	} {
		for _, op := range []string{"init", "refresh"} {
			code, text := call(t, agent, http.MethodPost, "/v1/"+op+"/"+bad, own)
			assert.Contains(t, []int{http.StatusBadRequest, http.StatusNotFound, http.StatusTemporaryRedirect}, code, "%s: %s", bad, text)
		}
	}
	for _, name := range []string{"short", strings.Repeat("x", 43) + "=", "a.b"} { // a directory that is no volume
		dir := filepath.Join(filepath.Dir(folder), name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "data.json"), []byte(`{"namespace":"media-sports","name":"web-0"}`), 0o600))
		code, text := call(t, agent, http.MethodPost, "/v1/init/"+name, nil)
		assert.Equal(t, http.StatusBadRequest, code, "%s: %s", name, text)
	}
	assert.Equal(t, before, c.ZTS.Requests(), "ZTS sees nothing of it")
	for path, want := range map[string]int{"/v1/init/": 404, "/v1/other/" + handle: 404, "/init/" + handle: 404} {
		code, _ := call(t, agent, http.MethodPost, path, nil)
		assert.Equal(t, want, code, path)
	}
	code, _ = call(t, agent, http.MethodGet, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusMethodNotAllowed, code)
	code, text = call(t, agent, http.MethodGet, "/healthz", nil)
	assert.Equal(t, "200 ok", fmt.Sprint(code, " ", text))

	// An identity that has expired, as after a long outage, is none that a second init would take from the pod.
	data = must.Get(os.ReadFile(filepath.Join(folder, "context.json")))(t)
	var stored object
	require.NoError(t, json.Unmarshal(data, &stored))
	assert.Equal(t, certs[0].NotAfter.Year(), must.Get(time.Parse(time.RFC3339, stored["Expires"].(string)))(t).Year())
	stored["Expires"] = time.Now().Add(-time.Second)
	data = must.Get(json.Marshal(stored))(t)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "context.json"), data, 0o600))
	c.Keys.Add(t, "v4", athenztest.RSAKey()) // or the document of this second was used
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusOK, code, text)
	code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusForbidden, code)

	// What is known of a volume is damaged: no file's path, with the handle in it, is told or logged.
	require.NoError(t, os.WriteFile(filepath.Join(folder, "context.json"), []byte("x"), 0o666)) // a wrong mode
	require.NoError(t, os.Chmod(filepath.Join(folder, "context.json"), 0o666))                  // a wrong mode
	for _, op := range []string{"init", "refresh"} {
		code, text = call(t, agent, http.MethodPost, "/v1/"+op+"/"+handle, own)
		assert.GreaterOrEqual(t, code, 400)
		assert.NotContains(t, text, handle)
	}
	assert.Contains(t, c.Log.String(), "not safe from other users")
	assert.NotContains(t, c.Log.String(), handle)

	// A volume that is mounted again begins anew; one that is gone is gone.
	must.Get(c.volumes.Add(mount, namespace, "web-0"))(t)
	c.Keys.Add(t, "v5", athenztest.RSAKey()) // or the document of this second was used
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusOK, code, text)
	connect := filepath.Join(folder, "mount", "connect") // where the driver mounts the directory of the socket
	require.NoError(t, os.MkdirAll(connect, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(connect, "agent.sock"), nil, 0o600))
	require.Error(t, c.volumes.Remove(mount))
	require.FileExists(t, filepath.Join(connect, "agent.sock"), "what is mounted is not deleted")
	require.NoError(t, os.Remove(filepath.Join(connect, "agent.sock")))
	require.NoError(t, c.volumes.Remove(mount))
	require.NoError(t, c.volumes.Remove(mount))
	code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusBadRequest, code)
	require.ErrorIs(t, must.Err(os.Stat(folder)), os.ErrNotExist, "and is not made by asking")
}

// zts is a connection to ZTS that answers with what the test says.
type zts func(*http.Request) (*http.Response, error)

func (z zts) RoundTrip(r *http.Request) (*http.Response, error) { return z(r) }

// configure has an agent use z.
func (z zts) configure(cfg *nodeagent.Config) { cfg.ZTS.HTTPClient = &http.Client{Transport: z} }

// certifier is ZTS that answers a CSR with what sign returns for it.
func certifier(sign func(context.Context, *pki.CSR) ([]*x509.Certificate, error)) zts {
	return func(r *http.Request) (*http.Response, error) {
		var asked struct{ CSR string }
		_ = json.NewDecoder(r.Body).Decode(&asked)
		csr, err := pki.ParseCSRPEM([]byte(asked.CSR))
		if err != nil {
			return nil, err
		}
		chain, err := sign(r.Context(), csr)
		if err != nil {
			return nil, err
		}
		w := httptest.NewRecorder()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(object{"x509Certificate": string(pki.MarshalCertificatesPEM(chain...))})
		return w.Result(), nil
	}
}

// TestAgentFailures has each party of the agent fail; none of what it says is told to the pod.
func TestAgentFailures(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-10", "ATH-7.1-12", "ATH-7.1-13", "ATH-7.2-2", "ATH-7.2-3")
	c := newCluster(t)
	away := errors.New("a secret reason")
	other, _ := c.CA.Certificate("/other")
	answers := func(chain []*x509.Certificate, err error) func(*nodeagent.Config) {
		return certifier(func(context.Context, *pki.CSR) ([]*x509.Certificate, error) { return chain, err }).configure
	}
	pods := func(edit func(*athenz.Pod)) func(*nodeagent.Config) {
		return func(cfg *nodeagent.Config) {
			kubelet := cfg.Pods
			cfg.Pods = func(ctx context.Context, ns, name string) (*athenz.Pod, error) {
				pod, err := kubelet(ctx, ns, name)
				if err == nil {
					edit(pod)
				}
				return pod, err
			}
		}
	}
	var wg sync.WaitGroup
	for name, v := range map[string]struct {
		edit func(*nodeagent.Config)
		code int
	}{
		"no kubelet": {func(cfg *nodeagent.Config) {
			cfg.Pods = func(context.Context, string, string) (*athenz.Pod, error) { return nil, away }
		}, 500},
		"no pod": {func(cfg *nodeagent.Config) {
			cfg.Pods = func(context.Context, string, string) (*athenz.Pod, error) { return nil, athenz.ErrNoPod }
		}, 400},
		"a namespace without a domain":  {pods(func(p *athenz.Pod) { p.Namespace = "k8s-admin-x" }), 500},
		"an account that is no service": {pods(func(p *athenz.Pod) { p.ServiceAccount = "a.b" }), 500},
		"no signer": {func(cfg *nodeagent.Config) {
			cfg.Signer = func(context.Context, athenz.PodSubject) (string, error) { return "", away }
		}, 500},
		"no ZTS":     {answers(nil, away), 500},
		"no chain":   {answers(nil, nil), 500},
		"other leaf": {answers(other, nil), 500},
		"other names": {certifier(func(ctx context.Context, csr *pki.CSR) ([]*x509.Certificate, error) {
			return c.CA.Certify(ctx, csr, []pki.SAN{pki.DNSSAN("backend.media-sports.svc.cluster.local")}, time.Hour)
		}).configure, 500},
		"no key": {func(cfg *nodeagent.Config) {
			cfg.NewKey = func() (*rsa.PrivateKey, error) { return nil, away }
		}, 500},
		"no SPIFFE ID": {func(cfg *nodeagent.Config) {
			cfg.SPIFFE = func(athenzname.Service, *athenz.Pod) (spiffe.ID, error) { return spiffe.ID{}, away }
		}, 500},
		"another's SPIFFE ID": {func(cfg *nodeagent.Config) {
			cfg.SPIFFE = func(athenzname.Service, *athenz.Pod) (spiffe.ID, error) {
				return spiffe.ParseID("spiffe://media.sports/sa/root")
			}
		}, 500},
		// What the provider refuses, of which only the log has the reason.
		"another address": {pods(func(p *athenz.Pod) { p.IP = p.IP.Next() }), 500},
		"another account": {pods(func(p *athenz.Pod) { p.ServiceAccount = "backend" }), 500},
		"another pod":     {pods(func(p *athenz.Pod) { p.Name = "web-9" }), 500},
	} {
		handle := must.Get(c.volumes.Add("/"+name, namespace, "web-0"))(t)
		agent := newAgent(t, c, v.edit)
		wg.Go(func() { // all at once, as a refusal takes a second
			code, text := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
			assert.Equal(t, v.code, code, "%s: %s", name, text)
			assert.NotContains(t, text, "secret", name)
			assert.NotContains(t, text, "{", name)
		})
	}
	wg.Wait()
	for name, pod := range map[string]func(object){
		"no address": func(o object) { o["status"].(object)["podIP"] = "" },
		"failed":     func(o object) { o["status"].(object)["phase"] = "Failed" },
		"deleted":    func(o object) { o["metadata"].(object)["deletionTimestamp"] = "2026-01-01T00:00:00Z" },
	} {
		c.Put("bad-0", pod)
		handle := must.Get(c.volumes.Add("/bad", namespace, "bad-0"))(t)
		code, text := call(t, newAgent(t, c, nil), http.MethodPost, "/v1/init/"+handle, nil)
		assert.GreaterOrEqual(t, code, 400, name)
		assert.Contains(t, text, "the pod", name)
	}
}

const timeout = 2 * time.Second

// slowDisk is the source of the roots of ZTS. If the answer is to be lost, a goroutine holds the lock of the volume's
// directory from then on until the agent has given up.
type slowDisk struct {
	spiffe.BundleSource
	lose   *atomic.Bool
	volume *store.Store
}

func (s slowDisk) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if busy := make(chan struct{}); s.lose.Load() {
		go func() {
			_ = s.volume.Use(func(*store.Folder) error {
				close(busy)
				time.Sleep(timeout + timeout/4)
				return nil
			})
		}()
		<-busy
	}
	return s.BundleSource.Bundle(td)
}

// TestAgentLateAnswer writes to a slow disk. An answer that comes too late is a failure and not an empty success, and
// the certificate before the one that ZTS was shown is shown no more.
func TestAgentLateAnswer(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	c := newCluster(t)
	var lose atomic.Bool
	handle := must.Get(c.volumes.Add("/late", namespace, "web-0"))(t)
	volume := store.New(filepath.Join(string(c.volumes), handle), "", nil)
	c.config.ZTS.Roots = slowDisk{c.config.ZTS.Roots, &lose, volume}
	agent := newAgent(t, c, nil)
	late := newAgent(t, c, func(cfg *nodeagent.Config) { cfg.Timeout = timeout })
	var held []object
	ask := func(agent http.Handler, op string, body any, want int) string {
		t.Helper()
		code, text := call(t, agent, http.MethodPost, "/v1/"+op+"/"+handle, body)
		require.Equal(t, want, code, text)
		if code == http.StatusOK {
			var g given
			require.NoError(t, json.Unmarshal([]byte(text), &g))
			held = append(held, object{"keyPEM": g.Key, "certPEM": g.Cert})
		}
		return text
	}
	ask(agent, "init", nil, http.StatusOK)
	ask(agent, "refresh", held[0], http.StatusOK)
	lose.Store(true)
	assert.Contains(t, ask(late, "refresh", held[1], http.StatusInternalServerError), "too late")
	lose.Store(false)
	assert.Contains(t, ask(agent, "refresh", held[0], http.StatusBadRequest), "superseded")
	ask(agent, "refresh", held[1], http.StatusOK)
	ask(agent, "refresh", held[2], http.StatusOK)
	instance := cafake.AthenzInstance(c.ZTS.Fake)
	instance.ID = "web-0"
	assert.False(t, c.ZTS.Revoked(instance))
}

// lost is a client that is gone before it has its answer.
type lost struct{ http.ResponseWriter }

func (lost) FlushError() error { return errors.New("broken pipe") }

// TestAgentAnswerLost has the first answer lost: the pod may ask again, once.
func TestAgentAnswerLost(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-11", "ATH-7.2-8")
	c := newCluster(t)
	agent := newAgent(t, c, nil)
	handle := must.Get(c.volumes.Add("/lost", namespace, "web-0"))(t)
	agent.ServeHTTP(lost{httptest.NewRecorder()}, httptest.NewRequest(http.MethodPost, "/v1/init/"+handle, nil))
	c.Keys.Add(t, "v5", athenztest.RSAKey()) // or the document of this second was used

	// Of many at once one is given it.
	var wg sync.WaitGroup
	var ok, forbidden, others atomic.Int32
	for range 5 {
		wg.Go(func() {
			switch code, _ := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil); code {
			case http.StatusOK:
				ok.Add(1)
			case http.StatusForbidden:
				forbidden.Add(1)
			default:
				others.Add(1)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, []int32{1, 4, 0}, []int32{ok.Load(), forbidden.Load(), others.Load()})

	// A pod that asks too often waits, and others do not.
	agent = newAgent(t, c, func(cfg *nodeagent.Config) {
		cfg.Signer = func(context.Context, athenz.PodSubject) (string, error) { return "", errors.New("away") }
	})
	codes := map[int]int{}
	often := must.Get(c.volumes.Add("/often", namespace, "web-0"))(t)
	seldom := must.Get(c.volumes.Add("/seldom", namespace, "web-0"))(t)
	for range 20 {
		code, _ := call(t, agent, http.MethodPost, "/v1/init/"+often, nil)
		codes[code]++
	}
	assert.Equal(t, 20, codes[500]+codes[429], codes)
	assert.GreaterOrEqual(t, codes[500], 10, "a slow machine is given more")
	assert.Positive(t, codes[429])
	code, _ := call(t, agent, http.MethodPost, "/v1/init/"+seldom, nil)
	assert.Equal(t, 500, code)
}

// virtualConfig is that of an agent without sockets, for tests in virtual time: all of its pods run, and have the address
// 10.1.2.3.
func virtualConfig(t testing.TB, ca *spiffetest.CA) nodeagent.Config {
	t.Helper()
	return nodeagent.Config{
		Volumes: nodeagent.Volumes(filepath.Join(t.TempDir(), "volumes")), Provider: athenzname.Service{Domain: "k8s.admin", Name: "callback"}, Suffix: athenztest.Suffix,
		ZTS: ztsclient.Options{Endpoint: caclient.Endpoint{
			URL: "https://zts.example", TrustDomain: ca.TrustDomain(), Roots: ca.Bundles()}}, NewKey: twoKeys(),
		Pods: func(_ context.Context, namespace, name string) (*athenz.Pod, error) {
			ip := netip.MustParseAddr("10.1.2.3")
			return &athenz.Pod{Namespace: namespace, Name: name, ServiceAccount: account, IP: ip, IPs: []netip.Addr{ip}, Phase: "Running"}, nil
		},
		Signer: func(context.Context, athenz.PodSubject) (string, error) { return "x.y.z", nil },
	}
}

// TestAgentFailuresHoldNothing has more pods fail at ZTS than the agent serves at once. Their waits for the next second, in
// which they get another document, are theirs alone.
func TestAgentFailuresHoldNothing(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		cfg, begun := virtualConfig(t, spiffetest.NewCA(t, "athenz.example")), time.Now()
		var mu sync.Mutex
		waited := map[string]time.Duration{}
		cfg.Signer = func(_ context.Context, s athenz.PodSubject) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			waited[s.Pod] = time.Since(begun)
			return "x.y.z", nil
		}
		zts(func(*http.Request) (*http.Response, error) { return nil, errors.New("no consent") }).configure(&cfg)
		agent := must.Get(nodeagent.New(cfg))(t)
		var wg sync.WaitGroup
		for n := range 10 {
			pod := fmt.Sprintf("web-%d", n)
			handle := must.Get(cfg.Volumes.Add("/"+pod, namespace, pod))(t)
			wg.Go(func() {
				code, _ := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
				assert.Equal(t, http.StatusInternalServerError, code)
				assert.GreaterOrEqual(t, time.Since(begun), time.Second, "the second for another document")
			})
		}
		wg.Wait()
		assert.Len(t, waited, 10)
		for pod, d := range waited {
			assert.Zero(t, d, pod)
		}
	})
}

// TestAgentLostRefresh has the answer to a refresh be lost, and the certificate before expire in the outage that follows: the
// pod has nothing, and may ask for a first identity again. One that has the new certificate may not.
func TestAgentLostRefresh(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-11")
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "athenz.example")
		ca.EditTemplates(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(time.Hour) })
		cfg := virtualConfig(t, ca)
		certifier(func(ctx context.Context, csr *pki.CSR) ([]*x509.Certificate, error) {
			return ca.Certify(ctx, csr, csr.SANs(), time.Hour)
		}).configure(&cfg)
		agent := must.Get(nodeagent.New(cfg))(t)
		handle := must.Get(cfg.Volumes.Add("/web-0", namespace, "web-0"))(t)
		code, text := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
		for _, arrives := range []bool{false, true} {
			require.Equal(t, http.StatusOK, code, text)
			var g given
			require.NoError(t, json.Unmarshal([]byte(text), &g))
			body := must.Get(json.Marshal(object{"keyPEM": g.Key, "certPEM": g.Cert}))(t)
			time.Sleep(50 * time.Minute)
			code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
			require.Equal(t, http.StatusForbidden, code)
			w := httptest.NewRecorder()
			if arrives {
				agent.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/refresh/"+handle, bytes.NewReader(body)))
			} else {
				agent.ServeHTTP(lost{w}, httptest.NewRequest(http.MethodPost, "/v1/refresh/"+handle, bytes.NewReader(body)))
			}
			require.Equal(t, http.StatusOK, w.Code, w.Body)
			code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
			assert.Equal(t, http.StatusForbidden, code, "the first is good still")
			time.Sleep(15 * time.Minute)
			code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
			if arrives {
				assert.Equal(t, http.StatusForbidden, code)
			} else {
				assert.Equal(t, http.StatusOK, code, text)
			}
		}
	})
}

// TestAgentNewAddress has the sandbox of a pod be made anew, and with it the address. The next certificate has it.
func TestAgentNewAddress(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newCluster(t)
	pod := c.pod("web-0")
	first, err := pod.Init(t.Context())
	require.NoError(t, err)
	// A kubelet that is away, or does not know the address yet: the next refresh has it.
	c.Put("web-0", func(o object) { o["status"] = object{"phase": "Running", "podIP": "10.1.2.100"} })
	kubelet := c.config.Pods
	for _, pods := range []athenz.PodSource{
		func(context.Context, string, string) (*athenz.Pod, error) { return nil, errors.New("away") },
		func(context.Context, string, string) (*athenz.Pod, error) { return new(athenz.Pod), nil },
	}[:min(2, rounds.Of(1))] {
		c.config.Pods = pods
		c.start()
		require.ErrorContains(t, must.Err(pod.Refresh(t.Context(), first.Credential)), "answers 500")
	}
	c.config.Pods = kubelet
	c.start()
	second := must.Get(pod.Refresh(t.Context(), first.Credential))(t)
	require.Len(t, second.Credential.Leaf().IPAddresses, 1)
	assert.Equal(t, "10.1.2.100", second.Credential.Leaf().IPAddresses[0].String())
	assert.False(t, c.ZTS.Revoked(cafake.AthenzInstance(c.ZTS.Fake)))
}

// TestSidecarAfterReboot has a node be rebooted: its volumes are mounted again, and the files of the pod are still there. The
// sidecar does not wait for the end of a certificate that the agent refreshes no more.
func TestSidecarAfterReboot(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	c, dir := newCluster(t), t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	start := func(folder string) *sidecar.Sidecar {
		t.Helper()
		s := must.Get(sidecar.Start(ctx, sidecar.Config{Socket: c.socket, HandleFile: c.mount("web-0"), Files: sidecar.Files{
			KeyFile: filepath.Join(folder, "key"), CertificateFile: filepath.Join(folder, "cert"), RootsFile: filepath.Join(folder, "roots"),
		}}))(t)
		return s
	}
	present := func(s *sidecar.Sidecar) *x509.Certificate {
		t.Helper()
		return must.Get(s.Identity())(t).Credential.Leaf()
	}
	s := start(filepath.Join(dir, "tls"))
	first := present(s)
	require.NoError(t, s.Close())
	require.NoError(t, os.CopyFS(filepath.Join(dir, "before"), os.DirFS(filepath.Join(dir, "tls"))))
	c.Keys.Add(t, "v2", athenztest.RSAKey()) // or the document of this second was used
	s = start(filepath.Join(dir, "tls"))
	for {
		changed := s.Changed()
		if !present(s).Equal(first) {
			break
		}
		require.NoError(t, s.Report().Upstreams[0].Err, "the attempt is to succeed")
		select {
		case <-changed:
		case <-ctx.Done():
			require.FailNow(t, "no new identity")
		}
	}
	require.NoError(t, s.Close())

	// An agent that knows of a newer certificate than the pod has gives no first one, and the present one stays.
	secret := must.Get(os.ReadFile(filepath.Join(string(c.volumes), "secret")))(t)
	handle := agentapi.Handle(secret, mountOf("web-0"))
	s, err := sidecar.Start(ctx, sidecar.Config{Socket: c.socket, HandleFile: filepath.Join(string(c.volumes), handle, "mount", "id"), Files: sidecar.Files{
		KeyFile: filepath.Join(dir, "before", "key"), CertificateFile: filepath.Join(dir, "before", "cert"), RootsFile: filepath.Join(dir, "before", "roots"),
	}})
	require.NoError(t, err)
	for failures := 0; failures == 0; {
		changed := s.Changed()
		agent := s.Report().Upstreams[0]
		if failures, err = agent.Failures, agent.Err; failures == 0 {
			<-changed
		}
	}
	require.ErrorContains(t, err, "superseded")
	assert.True(t, present(s).Equal(first))
	require.NoError(t, s.Close())
}

// TestVolumesAfterCrash has the agent be killed while it writes: the driver can still forget the volume.
func TestVolumesAfterCrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := nodeagent.Volumes(dir)
	for _, draft := range []string{"context.json.new", "data.json.new"} {
		handle := must.Get(v.Add("/crash", namespace, "web-0"))(t)
		require.NoError(t, os.WriteFile(filepath.Join(dir, handle, draft), []byte("{"), 0o600))
		require.NoError(t, v.Remove("/crash"), draft)
		require.NoDirExists(t, filepath.Join(dir, handle))
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for name, edit := range map[string]func(*nodeagent.Config){
		"no provider":  func(cfg *nodeagent.Config) { cfg.Provider = athenzname.Service{} },
		"no volumes":   func(cfg *nodeagent.Config) { cfg.Volumes = "" },
		"no pods":      func(cfg *nodeagent.Config) { cfg.Pods = nil },
		"no signer":    func(cfg *nodeagent.Config) { cfg.Signer = nil },
		"no ZTS":       func(cfg *nodeagent.Config) { cfg.ZTS.URL = "" },
		"no roots":     func(cfg *nodeagent.Config) { cfg.ZTS.Roots, cfg.ZTS.RootsFile = nil, "" },
		"a proof":      func(cfg *nodeagent.Config) { cfg.ZTS.TokenFile = "/token" },
		"no suffix":    func(cfg *nodeagent.Config) { cfg.Suffix = "" },
		"a suffix":     func(cfg *nodeagent.Config) { cfg.Suffix = ".x" },
		"no domain":    func(cfg *nodeagent.Config) { cfg.ZTS.TrustDomain = spiffe.TrustDomain{} },
		"admin domain": func(cfg *nodeagent.Config) { cfg.Mapping.AdminDomain = "A" },
		"timeout":      func(cfg *nodeagent.Config) { cfg.Timeout = -1 },
	} {
		cfg := c.config
		edit(&cfg)
		require.ErrorContains(t, must.Err(nodeagent.New(cfg)), "nodeagent: new: ", name)
	}
	for _, args := range [][3]string{{"relative", "ns", "pod"}, {"/x", "", "pod"}, {"/x", "ns", ""}, {"/x", "a/b", "pod"}, {"/x", "ns", "../x"}} {
		require.ErrorContains(t, must.Err(c.volumes.Add(args[0], args[1], args[2])), "nodeagent: add volume: ")
	}
}

func FuzzAgentRefresh(f *testing.F) {
	c := newCluster(f)
	agent := newAgent(f, c, nil)
	handle := must.Get(c.volumes.Add("/fuzz", namespace, "web-0"))(f)
	code, text := call(f, agent, http.MethodPost, "/v1/init/"+handle, nil)
	require.Equal(f, http.StatusOK, code, text)
	f.Add(`{"keyPEM":"","certPEM":""}`)
	f.Add(`{"keyPEM":"-----BEGIN","certPEM":"LS0t"}`)
	f.Add(text[:len(text)-1])
	f.Fuzz(func(t *testing.T, body string) {
		if code, text := call(t, agent, http.MethodPost, "/v1/refresh/"+handle, body); code != http.StatusBadRequest && code != http.StatusTooManyRequests {
			t.Fatalf("%d %s", code, text)
		}
	})
}

// Wherever the end of a volume is interrupted, there is no volume that the agent knows and whose pod has not had its identity yet: that would be
// given once more. What is left goes at the next try.
func TestVolumesRemovedInPart(t *testing.T) {
	t.Parallel()
	for _, stuck := range []string{"data.json", "data.json.new", "context.json", "context.json.new", "mount/id", "mount/connect"} {
		v := nodeagent.Volumes(t.TempDir())
		dir := filepath.Join(string(v), must.Get(v.Add("/crash", namespace, "web-0"))(t))
		there := func(name string) bool {
			_, err := os.Lstat(filepath.Join(dir, name))
			return err == nil
		}
		require.True(t, there("data.json"))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "context.json"), []byte("{}"), 0o600)) // the pod has had its identity
		require.NoError(t, os.RemoveAll(filepath.Join(dir, stuck)))
		require.NoError(t, os.MkdirAll(filepath.Join(dir, stuck, "x"), 0o700)) // which ends the removal there
		require.Error(t, v.Remove("/crash"), stuck)
		assert.False(t, there("data.json") && !there("context.json"), "%s: the pod may take its identity again", stuck)
		assert.True(t, there("mount"), "%s: what the pod has mounted goes last", stuck)
		require.NoError(t, os.Remove(filepath.Join(dir, stuck, "x")))
		require.NoError(t, v.Remove("/crash"), stuck)
		require.NoDirExists(t, dir)
		require.NoError(t, v.Remove("/crash"), "it is forgotten")
	}
}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	m.Run()
}
