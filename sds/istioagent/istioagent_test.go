package istioagent

import (
	"bytes"
	"context"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const wait = time.Minute // for what happens in milliseconds

var web = spiffe.MustParseID("spiffe://example.org/ns/shop/sa/web")

// control is a control plane's CA: Istio's API over TLS, which takes one token, and the certificates that it has issued.
type control struct {
	authority *ca.Authority
	addr      string
	tokens    atomic.Int64 // calls that were proven by the token
	rejected  atomic.Int64 // calls without a good one
	cluster   atomic.Value // the header ClusterID of the last of them
	open      atomic.Int64 // connections
	stop      func()       // until start
}

func (c *control) Authenticate(r *http.Request) (*authn.Caller, error) {
	c.cluster.Store(r.Header.Get("ClusterID") + " " + r.Header.Get("X-Mesh"))
	token, err := authn.Bearer(r)
	if err != nil || token != "good-token" {
		c.rejected.Add(1)
		return nil, fmt.Errorf("no good token: %w", authn.ErrRefused)
	}
	c.tokens.Add(1)
	return &authn.Caller{ID: web, Method: "test"}, nil
}

func newControl(t *testing.T) *control {
	t.Helper()
	c := &control{authority: must.Get(ca.New(ca.Config{TrustDomain: web.TrustDomain()}))(t), addr: "127.0.0.1:0"}
	c.start(t)
	t.Cleanup(func() { c.stop() })
	return c
}

// start starts the server, at the same address as before.
func (c *control) start(t *testing.T) {
	t.Helper()
	l := must.Get(net.Listen("tcp", c.addr))(t)
	c.addr = l.Addr().String()
	ready := make(chan struct{})
	id := spiffe.MustParseID("spiffe://example.org/ns/istio-system/sa/istiod")
	identity := caservertest.Identity(t, c.authority, id, pki.IPSAN(net.IPv4(127, 0, 0, 1)), pki.DNSSAN("istiod.example.org"))
	server := must.Get(caserver.New(caserver.Options{
		CA: c.authority, TrustDomain: id.TrustDomain(), Identity: identity,
		Istio: &istioca.Options{Authenticator: c}, Ready: func() { close(ready) },
	}))(t)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- server.Run(ctx, caserver.Listeners{Istio: memconn.Counting{Listener: l, Open: &c.open}})
	}()
	<-ready
	c.stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-done)
		assert.NoError(t, identity.Close())
	})
}

// root is a directory with what a pod has mounted.
func (c *control) root(t *testing.T) string {
	t.Helper()
	root := folder(t)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte("good-token\n"))
	write(t, root, "var/run/secrets/istio/root-cert.pem", c.authority.Bundle().MarshalPEM())
	return root
}

const pod = "TRUST_DOMAIN=example.org POD_NAMESPACE=shop SERVICE_ACCOUNT=web MINIMUM_DRAIN_DURATION=0s PROXY_XDS_VIA_AGENT=false PROXY_XDS_DEBUG_VIA_AGENT=false ECC_SIGNATURE_ALGORITHM=ECDSA "

// startAgent runs an Agent in the background, and waits until it is ready.
func startAgent(ctx context.Context, cfg Config) (*Agent, error) {
	cfg, err := Choose(ctx, cfg)
	if err != nil {
		return nil, err
	}
	a, err := New(cfg)
	if err != nil {
		return nil, err
	}
	a.ran.Store(true)
	return lifecycle.Started(ctx, a, &a.life, a.work)
}

// start starts an agent, which ends with the test.
func start(t *testing.T, cfg Config) *Agent {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	a := must.Get(startAgent(ctx, cfg))(t)
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// run runs an agent, which need not become ready, until the test ends.
func run(t *testing.T, cfg Config) *Agent {
	t.Helper()
	a := must.Get(New(must.Get(Choose(t.Context(), cfg))(t)))(t)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-done)
	})
	return a
}

// get asks the agent for a page.
func get(t *testing.T, h http.Handler, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

// watch returns the next secrets that a socket has, as long as the test wants them.
func watch(t *testing.T, socket string, names ...string) func() *pki.Secret {
	t.Helper()
	client := sds.UnixClient(socket)
	ctx, cancel := context.WithCancel(t.Context())
	secrets := make(chan *pki.Secret)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for s, err := range sds.NewClient(client, "http://localhost").Watch(ctx, names...) {
			if err != nil {
				continue
			}
			select {
			case secrets <- s:
			case <-ctx.Done():
			}
		}
	}()
	t.Cleanup(func() { cancel(); <-done; client.CloseIdleConnections() })
	return func() *pki.Secret {
		t.Helper()
		select {
		case s := <-secrets:
			return s
		case <-time.After(wait):
			require.FailNow(t, "no secret came")
			return nil
		}
	}
}

func serial(t *testing.T, s *pki.Secret) string {
	t.Helper()
	chain, _, ok := s.KeyPair()
	require.True(t, ok)
	return must.Get(pki.ParseCertificatesPEM(chain))(t)[0].SerialNumber.String()
}

// TestFromCA has a pod's agent: the identity by a token, served by SDS, renewed and pushed.
func TestFromCA(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.5-2", "IST-6.3-6", "IST-6.5-1", "IST-8.1-1", "IST-8.1-5", "IST-8.2-5", "IST-9.1-6",
		"IST-9.1-7", "IST-9.2-1", "IST-9.2-5", "IST-9.2-12", "IST-9.2-13", "IST-9.2-26", "IST-9.2-27", "IST-9.6-1", "IST-9.7-1", "IST-9.7-2")
	c := newControl(t)
	root := c.root(t)
	dead(t, filepath.Join(root, workloadSocket)) // of an agent that was killed
	cfg := config(t, root, pod+"CA_ADDR="+c.addr+" SECRET_TTL=3s SECRET_GRACE_PERIOD_RATIO=0.9 ISTIO_META_CLUSTER_ID=c1 CA_HEADER_X-Mesh=m1")
	a := start(t, cfg)
	assert.Equal(t, fromCA, a.cfg.Origin)
	assert.Equal(t, filepath.Join(root, workloadSocket), a.cfg.Socket)
	assert.Equal(t, "c1 m1", c.cluster.Load())
	svid := must.Get(a.identity.SVID())(t)
	assert.Equal(t, web, svid.ID())
	assert.InDelta(t, 3*time.Second, time.Until(svid.NotAfter()), float64(2*time.Second))

	next := watch(t, a.cfg.Socket, "default")
	first := serial(t, next())
	assert.NotEqual(t, first, serial(t, next()), "it is renewed")
	chain := watch(t, a.cfg.Socket, "ROOTCA")()
	roots, ok := chain.Roots()
	require.True(t, ok)
	assert.Equal(t, c.authority.Bundle().MarshalPEM(), roots)
	assert.Positive(t, c.tokens.Load())

	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code, text)
	code, text = get(t, a, "/healthz/live")
	assert.Equal(t, http.StatusOK, code, text)
	for _, path := range []string{"/metrics", "/stats/prometheus"} {
		code, text = get(t, a, path)
		assert.Equal(t, http.StatusOK, code)
		assert.Contains(t, text, `istio_agent_cert_expiry_seconds{part="agent",resource_name="default"}`)
		assert.Contains(t, text, "istio_agent_startup_duration_seconds")
		assert.Contains(t, text, "svidkit_sds_streams")
		must.Get(metricstest.Page(text))(t)
		assert.Regexp(t, `istio_agent_num_outgoing_requests\{part="agent",request_type="csr"\} [1-9]`, text)
		assert.Contains(t, text, `istio_agent_num_failed_outgoing_requests{part="agent",request_type="csr"} 0`)
		assert.Contains(t, text, `istio_agent_num_outgoing_retries{part="agent",request_type="csr"} 0`)
		assert.Regexp(t, `istio_agent_outgoing_latency\{part="agent",request_type="csr"\} [0-9.]+`, text)
	}
	var names []string
	for name := range a.Parts() {
		names = append(names, name)
	}
	assert.Equal(t, []string{"origin", "identity", "files", "sds"}, names)
	assert.Equal(t, os.ModeSocket|0o600, must.Get(os.Stat(a.cfg.Socket))(t).Mode())
	require.NoError(t, a.Close())
	require.ErrorIs(t, must.Err(os.Stat(a.cfg.Socket)), os.ErrNotExist, "the socket is gone")
	require.Error(t, a.Run(t.Context()), "an agent runs once")
	require.ErrorIs(t, a.Ready(t.Context()), spiffe.ErrNotReady)
}

// TestMachine is a virtual machine: it begins with a token, and goes on with what it has written, over a restart and
// without the token.
func TestMachine(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.3-4", "IST-6.6-1", "IST-6.6-2", "IST-7.4-1", "IST-7.4-2", "IST-7.9-1", "IST-7.9-2", "IST-9.2-9", "IST-9.2-10")
	c := newControl(t)
	root := folder(t)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte("good-token"))
	write(t, root, "certs/root-cert.pem", c.authority.Bundle().MarshalPEM())
	require.NoError(t, os.Chmod(filepath.Join(root, "certs"), 0o700))
	cfg := config(t, root, pod+"CA_ADDR="+c.addr+" PROV_CERT=./certs OUTPUT_CERTS={root}/certs SECRET_TTL=1h")
	a := start(t, cfg)
	assert.Positive(t, c.tokens.Load(), "proven by the token")
	output := func(name string) []byte {
		return must.Get(os.ReadFile(filepath.Join(root, "certs", name)))(t)
	}
	svid := must.Get(a.identity.SVID())(t)
	require.Eventually(t, func() bool {
		data, _ := os.ReadFile(filepath.Join(root, "certs/cert-chain.pem"))
		return bytes.Equal(data, pki.MarshalCertificatesPEM(svid.Chain()...))
	}, wait, 5*time.Millisecond)
	must.Get(pki.ParsePrivateKeyPEM(output("key.pem")))(t)
	assert.Equal(t, c.authority.Bundle().MarshalPEM(), output("root-cert.pem"))
	for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
		assert.Equal(t, os.FileMode(0o600), must.Get(os.Stat(filepath.Join(root, "certs", name)))(t).Mode(), name)
	}
	require.NoError(t, a.Close())
	before, rejected := c.tokens.Load(), c.rejected.Load()

	require.NoError(t, os.Remove(filepath.Join(root, "var/run/secrets/tokens/istio-token")))
	again := start(t, cfg)
	assert.Equal(t, fromCA, again.cfg.Origin, "its own output is no input: %s", again.cfg)
	renewed := must.Get(again.identity.SVID())(t)
	assert.Equal(t, web, renewed.ID())
	assert.NotEqual(t, svid.Leaf().SerialNumber, renewed.Leaf().SerialNumber, "it is new")
	assert.Equal(t, before, c.tokens.Load(), "proven by the certificate")
	assert.Equal(t, rejected, c.rejected.Load())
}

// TestKeyForms has the forms of keys, for Envoy and in files.
func TestKeyForms(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-9.2-18", "IST-9.2-19", "IST-7.5-3", "IST-2.1-12", "IST-2.3-3", "IST-2.3-4", "IST-2.3-5")
	c := newControl(t)
	files := spiffetest.NewCA(t, "example.org")
	rsa := strings.Replace(pod, "ECC_SIGNATURE_ALGORITHM=ECDSA ", "", 1)
	for _, test := range []struct{ environ, want string }{
		{rsa, "RSA PRIVATE KEY"},
		{pod, "EC PRIVATE KEY"},
		{pod + "ECC_CURVE=P384", "EC PRIVATE KEY"},
		{pod + "PKCS8_KEY=false", "EC PRIVATE KEY"},
		{pod + "PKCS8_KEY=true", "PRIVATE KEY"},
		{pod + "FILES", "PRIVATE KEY"}, // of files
		{rsa + "PKCS8_KEY=true WORKLOAD_RSA_KEY_SIZE=2048", "PRIVATE KEY"},
	}[:min(7, rounds.Of(6))] {
		t.Run(test.environ, func(t *testing.T) {
			t.Parallel()
			root := c.root(t)
			environ, withFiles := strings.CutSuffix(test.environ, "FILES")
			if withFiles {
				writeSVID(t, root, credentials, files, files.SVID("/ns/shop/sa/web"))
			}
			a := start(t, config(t, root, environ+" CA_ADDR="+c.addr+" OUTPUT_CERTS=out"))
			svid := must.Get(a.identity.SVID())(t)
			matches := func(keyPEM []byte) {
				block, rest := pem.Decode(keyPEM)
				require.NotNil(t, block)
				assert.Empty(t, rest)
				assert.Equal(t, test.want, block.Type)
				key := must.Get(pki.ParsePrivateKeyPEM(keyPEM))(t)
				assert.True(t, pki.PublicKeysEqual(svid.Leaf().PublicKey, key.Public()))
			}
			for _, name := range []string{"default", web.String()} {
				s := must.Get(fetch(t, a.cfg.Socket, name))(t) // as it is on the wire
				assert.Equal(t, name, s.GetName())
				assert.Equal(t, pki.MarshalCertificatesPEM(svid.Chain()...), s.GetTlsCertificate().GetCertificateChain().GetInlineBytes())
				matches(s.GetTlsCertificate().GetPrivateKey().GetInlineBytes())
			}
			var key []byte
			require.Eventually(t, func() bool {
				key, _ = os.ReadFile(filepath.Join(root, "out/key.pem"))
				return len(key) > 0
			}, wait, 5*time.Millisecond)
			matches(key)
			roots, ok := watch(t, a.cfg.Socket, "ROOTCA")().Roots()
			assert.True(t, ok)
			assert.NotEmpty(t, roots)
		})
	}
}

// startInPod starts an agent in a pod, whose API server is api.
func startInPod(t *testing.T, c *control, api *kubetest.Server, log *lines) *Agent {
	t.Helper()
	cfg := config(t, c.root(t), pod+"CA_ADDR="+c.addr)
	cfg.inPod, cfg.kube.server, cfg.kube.client = true, api.URL(), api.Client()
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	return start(t, cfg)
}

// TestGateway has the Secrets of a gateway's namespace, at the workload socket, which nothing is read of before one is
// asked for.
func TestGateway(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.2-6")
	c := newControl(t)
	api := kubetest.Start(t)
	shop := spiffetest.NewCA(t, "shop.example")
	put := func(namespace, name string) *spiffe.SVID {
		svid := shop.SVID("/" + name)
		certs, key, err := svid.MarshalPEM()
		require.NoError(t, err)
		api.Put("/api/v1/namespaces/"+namespace+"/secrets/"+name, map[string]any{"data": map[string][]byte{"tls.crt": certs, "tls.key": key, "ca.crt": shop.Bundle().MarshalPEM()}})
		return svid
	}
	first := put("shop", "site")
	put("other", "site")
	var log lines
	a := startInPod(t, c, api, &log)
	for _, name := range []string{"default", "ROOTCA"} { // of a sidecar
		watch(t, a.cfg.Socket, name)()
	}
	_, text := get(t, a, "/metrics")
	assert.Empty(t, api.Requests(), "a sidecar does not ask")
	assert.NotContains(t, text, "kubesecrets")

	next := watch(t, a.cfg.Socket, "kubernetes://site")
	assert.Equal(t, first.Leaf().SerialNumber.String(), serial(t, next()))
	second := put("shop", "site")
	assert.Equal(t, second.Leaf().SerialNumber.String(), serial(t, next()))
	assert.Equal(t, second.Leaf().SerialNumber.String(), serial(t, watch(t, a.cfg.Socket, "kubernetes://shop/site")()))
	roots, ok := watch(t, a.cfg.Socket, "kubernetes://shop/site-cacert")().Roots()
	require.True(t, ok)
	assert.Equal(t, shop.Bundle().MarshalPEM(), roots)
	_, text = get(t, a, "/metrics")
	assert.Contains(t, text, `svidkit_kubesecrets_up{part="kubernetes"} 1`)

	absent(t, a.cfg.Socket, "kubernetes://other/site")
	for _, r := range api.Requests() {
		assert.Equal(t, "/api/v1/namespaces/shop/secrets", r.Path, "no other namespace is read")
	}
	assert.NotContains(t, log.String(), "level=WARN")
}

// fetch asks a socket for a secret, once.
func fetch(t *testing.T, socket, name string) (*envoysds.Secret, error) {
	t.Helper()
	client := sds.UnixClient(socket)
	defer client.CloseIdleConnections()
	request := must.Get(proto.Marshal(&envoysds.DiscoveryRequest{ResourceNames: []string{name}}))(t)
	answer, err := grpchttp.NewClient(client, "http://localhost", 1<<20).Unary(t.Context(), "/envoy.service.secret.v3.SecretDiscoveryService/FetchSecrets", nil, request)
	if err != nil {
		return nil, err
	}
	var response envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(answer, &response))
	require.Len(t, response.GetResources(), 1)
	var s envoysds.Secret
	require.NoError(t, proto.Unmarshal(response.GetResources()[0].GetValue(), &s))
	return &s, nil
}

// absent checks that a socket has no secret of a name.
func absent(t *testing.T, socket, name string) {
	t.Helper()
	require.ErrorContains(t, must.Err(fetch(t, socket, name)), name)
}

// TestGatewayRefused has a service account without rights: the identity is served, and the Secrets come with the rights.
func TestGatewayRefused(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newControl(t)
	api := kubetest.Start(t)
	var may atomic.Bool
	api.Faults(func(*http.Request) *kubetest.Fault {
		if may.Load() {
			return nil
		}
		return &kubetest.Fault{Code: http.StatusForbidden, Reason: "Forbidden", Message: "secrets is forbidden"}
	})
	shop := spiffetest.NewCA(t, "shop.example")
	svid := shop.SVID("/site")
	certs, key, err := svid.MarshalPEM()
	require.NoError(t, err)
	api.Put("/api/v1/namespaces/shop/secrets/site", map[string]any{"data": map[string][]byte{"tls.crt": certs, "tls.key": key}})
	var log lines
	a := startInPod(t, c, api, &log)
	next := watch(t, a.cfg.Socket, "kubernetes://site")
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "list and watch") }, wait, 5*time.Millisecond)
	assert.NotEmpty(t, serial(t, watch(t, a.cfg.Socket, "default")()))
	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code, text)
	may.Store(true)
	assert.Equal(t, svid.Leaf().SerialNumber.String(), serial(t, next()))
}

// TestNoGateway has no Secrets outside of a pod, and in one that does not say where its API server is.
func TestNoGateway(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	for _, environ := range []string{"", "KUBERNETES_SERVICE_HOST=10.96.0.1"} {
		a := start(t, config(t, c.root(t), pod+"CA_ADDR="+c.addr+" "+environ))
		absent(t, a.cfg.Socket, "kubernetes://site")
		require.NoError(t, a.Close())
	}
}

// TestOutputInPod has the modes of a pod.
func TestOutputInPod(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.9-1", "IST-7.9-2", "IST-9.2-42")
	c := newControl(t)
	root := c.root(t)
	a := start(t, config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS=./out KUBERNETES_SERVICE_HOST=10.96.0.1 SECRET_TTL=3s SECRET_GRACE_PERIOD_RATIO=0.9"))
	next := func(before []byte) (chain []byte) {
		require.Eventually(t, func() bool {
			chain, _ = os.ReadFile(filepath.Join(root, "out/cert-chain.pem"))
			return len(chain) > 0 && !bytes.Equal(chain, before)
		}, wait, 5*time.Millisecond)
		return chain
	}
	first := next(nil)
	next(first) // without a subscriber
	for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
		assert.Equal(t, os.FileMode(0o644), must.Get(os.Stat(filepath.Join(root, "out", name)))(t).Mode(), name)
	}
	entries := must.Get(os.ReadDir(filepath.Join(root, "out")))(t)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "..") { // such as the files of the next version, for a moment
			assert.True(t, e.Type().IsRegular(), e.Name())
		}
	}
	_, text := get(t, a, "/metrics")
	assert.Contains(t, text, `part="outputs"`)
}

// TestFiles has files, which are followed, and stay in use when they are gone.
func TestFiles(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.4-1", "IST-7.4-2", "IST-7.4-4", "IST-7.8-2", "IST-8.2-4")
	c := newControl(t)
	root := c.root(t)
	authority := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, credentials, authority, authority.SVID("/ns/shop/sa/files"))
	a := start(t, config(t, root, pod+"CA_ADDR="+c.addr))
	assert.Equal(t, fromFiles, a.cfg.Origin)
	assert.Equal(t, "/ns/shop/sa/files", must.Get(a.identity.SVID())(t).ID().Path())
	next := watch(t, a.cfg.Socket, "default")
	first := serial(t, next())

	byName := watch(t, a.cfg.Socket, "file-cert:"+a.cfg.cert+"~"+a.cfg.key)
	assert.Equal(t, first, serial(t, byName()), "the same by the names of its files")

	changed := a.identity.Changed()
	writeSVID(t, root, credentials, authority, authority.SVID("/ns/shop/sa/files"))
	second := serial(t, next())
	assert.NotEqual(t, first, second)
	<-changed

	require.NoError(t, os.RemoveAll(filepath.Join(root, credentials)))
	assert.Equal(t, second, serial(t, watch(t, a.cfg.Socket, "default")()), "to a new client, too")
	time.Sleep(100 * time.Millisecond)
	assert.Zero(t, c.tokens.Load()+c.rejected.Load(), "the CA is not asked")
	code, _ := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code)
}

// TestHalfPair waits for the other file of a pair, and does not ask the CA.
func TestHalfPair(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	authority := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, credentials, authority, authority.SVID("/ns/shop/sa/files"))
	key := filepath.Join(root, credentials, "key.pem")
	require.NoError(t, os.Rename(key, key+".later"))
	cfg := config(t, root, pod+"CA_ADDR="+c.addr)
	a := run(t, cfg)
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := a.Ready(short)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Contains(t, err.Error(), "key.pem")
	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "key.pem")
	code, _ = get(t, a, "/healthz/live")
	assert.Equal(t, http.StatusOK, code, "a restart would not help")
	require.NoError(t, os.Rename(key+".later", key))
	long, cancelLong := context.WithTimeout(t.Context(), wait)
	defer cancelLong()
	require.NoError(t, a.Ready(long))
	assert.Zero(t, c.tokens.Load()+c.rejected.Load())
}

// TestOutputByLink has credentials that are links to the agent's own output, by which it would never renew its identity.
func TestOutputByLink(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	root := folder(t)
	authority := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, "out", authority, authority.SVID("/ns/shop/sa/web"))
	for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
		link := filepath.Join(root, credentials, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(link), 0o755))
		require.NoError(t, os.Symlink(filepath.Join(root, "out", name), link))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := startAgent(ctx, config(t, root, pod+"OUTPUT_CERTS=out"))
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	assert.Contains(t, err.Error(), filepath.Join(root, "out"))
}

// TestMounted has FILE_MOUNTED_CERTS.
func TestMounted(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.8-4", "IST-9.2-11")
	root := folder(t)
	authority := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, "mnt", authority, authority.SVID("/ns/shop/sa/files"))
	a := start(t, config(t, root, `MINIMUM_DRAIN_DURATION=0s PROXY_XDS_DEBUG_VIA_AGENT=false FILE_MOUNTED_CERTS=true ISTIO_META_TLS_CLIENT_CERT_CHAIN={root}/mnt/cert-chain.pem
		ISTIO_META_TLS_CLIENT_KEY=mnt/key.pem ISTIO_META_TLS_CLIENT_ROOT_CERT=mnt/root-cert.pem`))
	svid := must.Get(a.identity.SVID())(t)
	assert.Equal(t, "/ns/shop/sa/files", svid.ID().Path())
	name := fmt.Sprintf("file-cert:%s~%s", a.cfg.cert, a.cfg.key)
	assert.Equal(t, svid.Leaf().SerialNumber.String(), serial(t, watch(t, a.cfg.Socket, name)()))
}

// TestLiveSocket has the server of another program, which is left alone.
func TestLiveSocket(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-8.2-1")
	root := folder(t)
	socket := filepath.Join(root, workloadSocket)
	serve(t, socket)
	write(t, root, "etc/istio/config/mesh", []byte("defaultConfig: {}"))
	var log lines
	cfg := config(t, root, pod+"OUTPUT_CERTS=./out")
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	a := start(t, cfg)
	assert.Equal(t, fromSocket, a.cfg.Origin)
	assert.Nil(t, a.identity)
	assert.Contains(t, log.String(), "OUTPUT_CERTS has no effect")
	assert.Contains(t, log.String(), "etc/istio/config/mesh is not read")
	code, _ := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code)
	var bootstrap bytes.Buffer
	require.NoError(t, a.Bootstrap(&bootstrap))
	assert.Contains(t, bootstrap.String(), socket)
	require.NoError(t, a.Close())
	require.NoError(t, must.Err(os.Stat(socket)), "the socket is not this agent's")
}

// TestOtherAgentDrains starts an agent while the one before drains: it has the socket as long as that answers, survives a short
// absence, and ends when it has gone. Started again, it serves.
func TestOtherAgentDrains(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, pod+"MINIMUM_DRAIN_DURATION=0s CA_ADDR="+c.addr)
	cfg.otherGone = 2 * time.Second
	before := start(t, cfg)
	ended := make(chan error, 1)
	next := must.Get(Choose(t.Context(), cfg))(t)
	require.Equal(t, fromSocket, next.Origin)
	a := must.Get(New(next))(t)
	go func() { ended <- a.Run(t.Context()) }()
	require.NoError(t, before.Close())
	time.Sleep(time.Second)
	again := start(t, cfg) // as another program that was away for a second
	select {
	case err := <-ended:
		require.NoError(t, err, "it was away for a second")
	case <-time.After(2 * time.Second):
	}
	require.NoError(t, again.Close())
	select {
	case err := <-ended:
		require.ErrorContains(t, err, "no server has answered there for 2s")
	case <-time.After(20 * time.Second):
		require.Fail(t, "it goes on although its socket has no server")
	}
	assert.Equal(t, fromCA, start(t, cfg).cfg.Origin)
}

// TestSocketInUse ends when another program takes the socket after the choice.
func TestSocketInUse(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, pod+"CA_ADDR="+c.addr)
	choice := must.Get(Choose(t.Context(), cfg))(t)
	serve(t, choice.Socket)
	a := must.Get(New(choice))(t)
	require.ErrorIs(t, a.Run(t.Context()), unixsocket.ErrInUse)
	require.ErrorIs(t, a.Ready(t.Context()), unixsocket.ErrInUse)
	code, text := get(t, a, "/healthz/live")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "in use", "only a restart helps, and it says why")
}

// TestOutage has a CA that is away: the identity is served until it ends, then liveness fails, and when the CA is back
// the agent has a new one.
func TestOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.4-3", "IST-9.7-2")
	c := newControl(t)
	root := c.root(t)
	a := start(t, config(t, root, pod+"CA_ADDR="+c.addr+" SECRET_TTL=2s"))
	c.stop()
	svid := must.Get(a.identity.SVID())(t)
	for time.Until(svid.NotAfter()) > 200*time.Millisecond {
		code, text := get(t, a, "/healthz/live")
		require.Equal(t, http.StatusOK, code, text)
		code, text = get(t, a, "/healthz/ready")
		require.Equal(t, http.StatusOK, code, text)
		time.Sleep(50 * time.Millisecond)
		svid = must.Get(a.identity.SVID())(t)
	}
	time.Sleep(time.Until(svid.NotAfter()) + 10*time.Millisecond)
	for _, path := range []string{"/healthz/live", "/healthz/ready"} {
		code, text := get(t, a, path)
		assert.Equal(t, http.StatusServiceUnavailable, code, path)
		assert.Contains(t, text, "expired")
	}
	_, text := get(t, a, "/metrics")
	assert.Regexp(t, `istio_agent_num_failed_outgoing_requests\{part="agent",request_type="csr"\} [1-9]`, text)
	assert.Regexp(t, `istio_agent_cert_expiry_seconds\{part="agent",resource_name="default"\} -`, text)
	c.start(t)
	require.Eventually(t, func() bool {
		code, _ := get(t, a, "/healthz/live")
		return code == http.StatusOK
	}, wait, 20*time.Millisecond)
	_, text = get(t, a, "/metrics")
	assert.Regexp(t, `istio_agent_num_outgoing_retries\{part="agent",request_type="csr"\} [1-9]`, text)
}

// TestDrain serves on while it drains, and is not ready any more.
func TestDrain(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-9.2-38")
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, pod+"CA_ADDR="+c.addr)
	cfg.proxy.TerminationDrainDuration = duration(300 * time.Millisecond)
	choice := must.Get(Choose(t.Context(), cfg))(t)
	a := must.Get(New(choice))(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	require.NoError(t, a.Ready(t.Context()))
	begun := time.Now()
	stop()
	require.Eventually(t, func() bool {
		code, text := get(t, a, "/healthz/ready")
		return code == http.StatusServiceUnavailable && strings.Contains(text, "draining or ending")
	}, wait, time.Millisecond)
	require.NoError(t, must.Err(fetch(t, choice.Socket, "default")), "a proxy that drains can still connect")
	code, _ := get(t, a, "/healthz/live")
	assert.Equal(t, http.StatusOK, code)
	require.NoError(t, <-done)
	assert.GreaterOrEqual(t, time.Since(begun), time.Duration(cfg.proxy.TerminationDrainDuration))
	require.Eventually(t, func() bool { return c.open.Load() == 0 }, wait, 5*time.Millisecond, "it leaves no connection to the CA")
	ended := make(chan error, 1)
	go func() { ended <- a.Ready(context.Background()) }()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, spiffe.ErrNotReady)
	case <-time.After(wait):
		require.Fail(t, "Ready waits for an agent that has ended")
	}
}

// order posts to the agent as a program on this host does, but for what edit changes.
func order(t *testing.T, h http.Handler, path string, edit func(*http.Request)) (int, http.Header) {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, path, nil)
	r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 15020}))
	r.RemoteAddr, r.Host = "127.0.0.1:1234", "localhost:15020"
	if edit != nil {
		edit(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	assert.NotEmpty(t, w.Body.String())
	assert.Equal(t, w.Code == http.StatusOK, w.Flushed, "it is sent before the program ends")
	return w.Code, w.Header()
}

// TestOrders has /drain, after which the agent serves and is not ready, and /quitquitquit, which ends it.
func TestOrders(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-9.6-3")
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, pod+"CA_ADDR="+c.addr)
	cfg.proxy.TerminationDrainDuration = duration(300 * time.Millisecond)
	var log lines
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	choice := must.Get(Choose(t.Context(), cfg))(t)
	a := must.Get(New(choice))(t)
	paths := []string{"/drain", "/quitquitquit"}
	for _, path := range paths {
		code, _ := order(t, a, path, nil)
		assert.Equal(t, http.StatusServiceUnavailable, code, "%s before Run", path)
	}
	done := make(chan error, 1)
	go func() { done <- a.Run(t.Context()) }()
	require.NoError(t, a.Ready(t.Context()))
	for name, test := range map[string]struct {
		edit func(*http.Request)
		code int
	}{
		"GET":                 {func(r *http.Request) { r.Method = http.MethodGet }, 405},
		"HEAD":                {func(r *http.Request) { r.Method = http.MethodHead }, 405},
		"PUT":                 {func(r *http.Request) { r.Method = http.MethodPut }, 405},
		"another host":        {func(r *http.Request) { r.RemoteAddr = "10.0.0.9:1234" }, 403},
		"another host's name": {func(r *http.Request) { r.Host = "evil.test:15020" }, 403},
		"no name":             {func(r *http.Request) { r.Host = "" }, 403},
		"on another address": {func(r *http.Request) {
			*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 15020}))
		}, 403},
		"a page of another site":  {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 403},
		"a page of another port":  {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-site") }, 403},
		"Origin":                  {func(r *http.Request) { r.Header.Set("Origin", "http://evil.test") }, 403},
		"Origin null":             {func(r *http.Request) { r.Header.Set("Origin", "null") }, 403},
		"Origin of another port":  {func(r *http.Request) { r.Header.Set("Origin", "http://localhost:8080") }, 403},
		"GET and another host":    {func(r *http.Request) { r.Method, r.RemoteAddr = http.MethodGet, "10.0.0.9:1" }, 403},
		"another host by address": {func(r *http.Request) { r.RemoteAddr, r.Host = "[2001:db8::1]:1", "[::1]:15020" }, 403},
	} {
		for _, path := range paths {
			code, header := order(t, a, path, test.edit)
			assert.Equal(t, test.code, code, "%s: %s", path, name)
			assert.Equal(t, test.code == 405, header.Get("Allow") == "POST", "%s: %s", path, name)
		}
	}
	code, text := get(t, a, "/healthz/ready")
	require.Equal(t, http.StatusOK, code, text)

	for range 2 {
		code, _ = order(t, a, "/drain", func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-origin") })
		assert.Equal(t, http.StatusOK, code)
	}
	code, text = get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, "draining")
	require.ErrorIs(t, a.Ready(t.Context()), spiffe.ErrNotReady)
	time.Sleep(time.Duration(cfg.proxy.TerminationDrainDuration))
	require.NoError(t, must.Err(fetch(t, choice.Socket, "default")), "it has not ended")
	select {
	case err := <-done:
		require.Fail(t, "it has ended", "%v", err)
	default:
	}

	code, _ = order(t, a, "/quitquitquit", func(r *http.Request) { r.RemoteAddr, r.Host = "[::1]:1", "127.0.0.1" })
	assert.Equal(t, http.StatusOK, code)
	require.NoError(t, <-done)
	assert.Contains(t, log.String(), `"istioagent: the agent ends" drain=0s`, "it has had its time for draining")
	assert.Equal(t, 3, strings.Count(log.String(), "a program on this host has asked for"), "two times /drain, and /quitquitquit")
	assert.NoFileExists(t, choice.Socket)
	require.ErrorIs(t, a.Ready(t.Context()), spiffe.ErrNotReady)
	code, _ = order(t, a, "/quitquitquit", nil)
	assert.Equal(t, http.StatusOK, code, "it has ended already")
}

// TestQuit has /quitquitquit without /drain before it: an Envoy gets its time for draining.
func TestQuit(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	c := newControl(t)
	cfg := config(t, c.root(t), pod+"CA_ADDR="+c.addr)
	cfg.proxy.TerminationDrainDuration = duration(300 * time.Millisecond)
	a := start(t, cfg)
	begun := time.Now()
	code, _ := order(t, a, "/quitquitquit", nil)
	assert.Equal(t, http.StatusOK, code)
	require.Eventually(t, func() bool {
		code, _ := get(t, a, "/healthz/ready")
		return code == http.StatusServiceUnavailable
	}, wait, time.Millisecond)
	require.NoError(t, must.Err(fetch(t, a.cfg.Socket, "default")), "a proxy that drains can still connect")
	require.NoError(t, a.Close())
	assert.GreaterOrEqual(t, time.Since(begun), time.Duration(cfg.proxy.TerminationDrainDuration))
	assert.NoFileExists(t, a.cfg.Socket)
}

// TestSocketGone has sockets to which no Envoy can connect, which is not ready: one of this agent that was removed, and
// one of another program that has died.
func TestSocketGone(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	a := start(t, config(t, c.root(t), pod+"CA_ADDR="+c.addr))
	code, text := get(t, a, "/healthz/ready")
	require.Equal(t, http.StatusOK, code, text)
	require.NoError(t, os.Remove(a.cfg.Socket))
	code, text = get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, a.cfg.Socket)

	root := folder(t)
	socket := filepath.Join(root, workloadSocket)
	serve(t, socket)
	a = start(t, config(t, root, pod))
	code, text = get(t, a, "/healthz/ready")
	require.Equal(t, http.StatusOK, code, text)
	require.NoError(t, os.Remove(socket))
	dead(t, socket)
	code, text = get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code)
	assert.Contains(t, text, socket)
}

// TestOutputBeforeReady has files for a program that waits until the agent is ready, and reads them then.
func TestOutputBeforeReady(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	start(t, config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS=out"))
	for _, name := range []string{"cert-chain.pem", "key.pem", "root-cert.pem"} {
		assert.FileExists(t, filepath.Join(root, "out", name))
	}

	// What cannot be written is said by readiness, and an Envoy has its secrets all the same.
	root = c.root(t)
	write(t, root, "file", []byte("no directory"))
	a := start(t, config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS=file"))
	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusServiceUnavailable, code, text)
	assert.Contains(t, text, "outputs: not ready: the files do not have the identity yet: ")
	code, text = get(t, a, "/healthz/live")
	assert.Equal(t, http.StatusOK, code, text)
	assert.NoError(t, must.Err(fetch(t, a.cfg.Socket, "default")))
}

// TestOutputFolderByLink has OUTPUT_CERTS at a link to a directory in which files count as the workload's: what the agent has
// written there is not its input after a restart.
func TestOutputFolderByLink(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	require.NoError(t, os.MkdirAll(filepath.Join(root, "etc/certs"), 0o755))
	require.NoError(t, os.Symlink("etc/certs", filepath.Join(root, "out")))
	for range 2 {
		a := start(t, config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS=out"))
		assert.Equal(t, fromCA, a.cfg.Origin, "%s", a.cfg)
		assert.FileExists(t, filepath.Join(root, "etc/certs/cert-chain.pem"))
		require.NoError(t, a.Close())
	}
}

// TestRefused has a CA that refuses for good, which Start says at once.
func TestRefused(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte("stolen-token"))
	cfg := config(t, root, pod+"CA_ADDR="+c.addr)
	_, err := startAgent(t.Context(), cfg)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, caclient.ErrUnauthenticated)
	assert.NotContains(t, err.Error(), "stolen-token")
}

// What an operator has to change is in the error: the file and the variable of wrong roots, a directory that nothing is in, and
// the variable of the lifetime, beside the one that the CA grants.
func TestWhatToChange(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	wrong := spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM()
	for name, tt := range map[string]struct {
		environ string
		want    []string
		soon    bool // the agent ends
	}{
		"mounted roots":    {"", []string{"var/run/secrets/istio/root-cert.pem do not vouch for the server at " + c.addr, "CA_ROOT_CA"}, false},
		"named roots":      {"CA_ROOT_CA=other.pem", []string{"/other.pem do not vouch", "CA_ROOT_CA"}, false},
		"roots of host":    {"CA_ROOT_CA=SYSTEM", []string{"SYSTEM do not vouch", "CA_ROOT_CA"}, false},
		"no directory":     {"PROV_CERT=nothere", []string{`PROV_CERT is "nothere"`, "no such directory"}, true},
		"output directory": {"PROV_CERT=nothere OUTPUT_CERTS=nothere", []string{`PROV_CERT is "nothere"`, "no such directory"}, true},
		"lifetime":         {"CA_ROOT_CA=good.pem SECRET_TTL=2400h", []string{"2400h0m0s was asked for, the longest is 2160h0m0s", "SECRET_TTL is 2400h0m0s"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := c.root(t)
			write(t, root, "var/run/secrets/istio/root-cert.pem", wrong)
			write(t, root, "other.pem", wrong)
			write(t, root, "good.pem", c.authority.Bundle().MarshalPEM())
			limit := wait
			if !tt.soon {
				limit = 2 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			_, err := startAgent(ctx, config(t, root, pod+"CA_ADDR="+c.addr+" "+tt.environ))
			for _, text := range tt.want {
				require.ErrorContains(t, err, text)
			}
			require.Equal(t, tt.soon, ctx.Err() == nil)
		})
	}
}

// TestBadConfig has what Start refuses before it does anything.
func TestBadConfig(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ environ, want string }{
		{"", "POD_NAMESPACE"},
		{"POD_NAMESPACE=shop", "SERVICE_ACCOUNT"},
		{"POD_NAMESPACE=a/b SERVICE_ACCOUNT=web", "POD_NAMESPACE"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_PROVIDER=GoogleCA CA_ADDR=meshca.googleapis.com:443", `CA_ADDR "meshca.googleapis.com:443"`},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ADDR=privateca.googleapis.com", "caPools/"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web", "CA_ROOT_CA"}, // there is no file with roots
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web PILOT_CERT_PROVIDER=none", "PILOT_CERT_PROVIDER is none"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web PILOT_CERT_PROVIDER=custom", "etc/certs/root-cert.pem"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ROOT_CA=/nowhere", "/nowhere"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ROOT_CA=SYSTEM", "XDS_ROOT_CA"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ROOT_CA=SYSTEM CA_ADDR=ca", "HOST:PORT"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ROOT_CA=SYSTEM CA_HEADER_authorization=secret", "uthorization"},
		{"POD_NAMESPACE=shop SERVICE_ACCOUNT=web CA_ROOT_CA=SYSTEM XDS_ROOT_CA=SYSTEM XDS_HEADER_authorization=secret", "uthorization"},
	} {
		root := folder(t)
		_, err := startAgent(t.Context(), config(t, root, c.environ))
		if c.want == "CA_ROOT_CA" {
			assert.ErrorContains(t, err, root)
		}
		if assert.ErrorContains(t, err, c.want, c.environ) {
			assert.NotContains(t, err.Error(), "=secret")
		}
	}
	require.ErrorContains(t, must.Err(New(config(t, folder(t), pod))), "Choose")
}

func TestNothingPrints(t *testing.T) {
	t.Parallel()
	cfg := config(t, folder(t), pod+"CA_HEADER_x-key=hunter2 CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1")
	a := must.Get(New(chosen(cfg, fromCA)))(t)
	t.Cleanup(func() { _ = a.Close() })
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "cfg", cfg, "agent", a)
	assert.NotContains(t, log.String()+fmt.Sprintf("%v %+v %#v %s %v %+v %#v", cfg, cfg, cfg, cfg, a, a, a), "hunter2")
}

// lines is a log that may be read meanwhile.
type lines = logtest.Buffer
