package athenz_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/athenzname"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// call asks an agent without a socket.
func call(t testing.TB, agent http.Handler, method, path string, body any) (int, string) {
	t.Helper()
	data, ok := body.(string)
	if !ok && body != nil {
		text, err := json.Marshal(body)
		require.NoError(t, err)
		data = string(text)
	}
	w := httptest.NewRecorder()
	agent.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(data)))
	return w.Code, w.Body.String()
}

func newAgent(t testing.TB, c *cluster, edit func(*athenz.AgentConfig)) *athenz.Agent {
	t.Helper()
	cfg := c.config
	if edit != nil {
		edit(&cfg)
	}
	a, err := athenz.NewAgent(cfg)
	require.NoError(t, err)
	return a
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
	data, err := base64.StdEncoding.DecodeString(text)
	require.NoError(t, err)
	return data
}

func TestAgentWire(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-2", "ATH-7.1-3", "ATH-7.1-4", "ATH-7.1-6", "ATH-7.1-7", "ATH-7.1-8", "ATH-7.1-9", "ATH-7.1-10", "ATH-7.1-11", "ATH-7.1-12", "ATH-7.1-13",
		"ATH-7.2-1", "ATH-7.2-4", "ATH-7.2-7", "ATH-7.3-2", "ATH-7.3-3", "ATH-7.3-4", "ATH-9-1", "ATH-18-3", "ATH-18-4")
	c := newCluster(t)
	agent := newAgent(t, c, nil)
	const mount = "/var/lib/kubelet/pods/0001/volumes/athenz.kubernetes.io~athenz-volume-driver/sia-identity"
	handle, err := c.volumes.Add(mount, namespace, "web-0")
	require.NoError(t, err)
	require.Equal(t, "2NQvz4NpzBUBD11ctzX1R0juEuo1s6XqK6w1L6sUreM", handle, "the vector")
	folder := filepath.Join(filepath.Dir(c.socket), "volumes", handle)
	data, err := os.ReadFile(filepath.Join(folder, "data.json"))
	require.NoError(t, err)
	assert.JSONEq(t, `{"namespace":"media-sports","name":"web-0"}`, string(data))
	data, err = os.ReadFile(filepath.Join(folder, "mount", "id"))
	require.NoError(t, err)
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
	private, err := x509.ParsePKCS1PrivateKey(block.Bytes)
	require.NoError(t, err)
	assert.Equal(t, 2048, private.N.BitLen())
	certs, err := pki.ParseCertificatesPEM(cert)
	require.NoError(t, err)
	assert.True(t, private.PublicKey.Equal(certs[0].PublicKey))
	assert.Equal(t, string(pki.MarshalCertificatesPEM(c.ca.Root())), string(decode(t, first.CA)))

	data, err = os.ReadFile(filepath.Join(folder, "context.json"))
	require.NoError(t, err)
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
	code, text = call(t, agent, http.MethodPost, "/v1/refresh/"+handle, object{"keyPEM": key, "certPEM": cert})
	require.Equal(t, http.StatusOK, code, text)
	var second given
	require.NoError(t, json.Unmarshal([]byte(text), &second))
	assert.NotEqual(t, first.Key, second.Key)
	code, text = call(t, agent, http.MethodPost, "/v1/refresh/"+handle, object{"keyPEM": string(decode(t, second.Key)), "certPEM": string(decode(t, second.Cert))})
	require.Equal(t, http.StatusOK, code, text)
	var third given
	require.NoError(t, json.Unmarshal([]byte(text), &third))

	before := c.zts.Requests()
	own := object{"keyPEM": third.Key, "certPEM": third.Cert}
	other := c.zts.Credential("media.sports.backend")
	otherCert, otherKey, err := other.MarshalPEM()
	require.NoError(t, err)
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
	for _, name := range []string{"short", strings.Repeat("x", 43) + "=", "a.b"} { // a folder that is no volume
		dir := filepath.Join(filepath.Dir(folder), name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "data.json"), []byte(`{"namespace":"media-sports","name":"web-0"}`), 0o600))
		code, text := call(t, agent, http.MethodPost, "/v1/init/"+name, nil)
		assert.Equal(t, http.StatusBadRequest, code, "%s: %s", name, text)
	}
	assert.Equal(t, before, c.zts.Requests(), "ZTS sees nothing of it")
	for path, want := range map[string]int{"/v1/init/": 404, "/v1/other/" + handle: 404, "/init/" + handle: 404} {
		code, _ := call(t, agent, http.MethodPost, path, nil)
		assert.Equal(t, want, code, path)
	}
	code, _ = call(t, agent, http.MethodGet, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusMethodNotAllowed, code)
	code, text = call(t, agent, http.MethodGet, "/healthz", nil)
	assert.Equal(t, "200 ok", fmt.Sprint(code, " ", text))

	// An identity that has expired, as after a long outage, is none that a second init would take from the pod.
	data, err = os.ReadFile(filepath.Join(folder, "context.json"))
	require.NoError(t, err)
	var stored object
	require.NoError(t, json.Unmarshal(data, &stored))
	assert.Equal(t, certs[0].NotAfter.Year(), must2(time.Parse(time.RFC3339, stored["Expires"].(string))).Year())
	stored["Expires"] = time.Now().Add(-time.Second)
	data, err = json.Marshal(stored)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(folder, "context.json"), data, 0o600))
	c.keys.add(t, "v4", rsaKey()) // or the document of this second was used
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusOK, code, text)
	code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusForbidden, code)

	// What is known of a volume is damaged: no file's path, with the handle in it, is told or logged.
	require.NoError(t, os.WriteFile(filepath.Join(folder, "context.json"), []byte("x"), 0o666)) //nolint:gosec // a wrong mode
	require.NoError(t, os.Chmod(filepath.Join(folder, "context.json"), 0o666))                  //nolint:gosec // a wrong mode
	for _, op := range []string{"init", "refresh"} {
		code, text = call(t, agent, http.MethodPost, "/v1/"+op+"/"+handle, own)
		assert.GreaterOrEqual(t, code, 400)
		assert.NotContains(t, text, handle)
	}
	assert.Contains(t, c.log.String(), "not safe from other users")
	assert.NotContains(t, c.log.String(), handle)

	// A volume that is mounted again begins anew; one that is gone is gone.
	_, err = c.volumes.Add(mount, namespace, "web-0")
	require.NoError(t, err)
	c.keys.add(t, "v5", rsaKey()) // or the document of this second was used
	code, text = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusOK, code, text)
	connect := filepath.Join(folder, "mount", "connect") // where the driver mounts the folder of the socket
	require.NoError(t, os.MkdirAll(connect, 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(connect, "agent.sock"), nil, 0o600))
	require.Error(t, c.volumes.Remove(mount))
	require.FileExists(t, filepath.Join(connect, "agent.sock"), "what is mounted is not deleted")
	require.NoError(t, os.Remove(filepath.Join(connect, "agent.sock")))
	require.NoError(t, c.volumes.Remove(mount))
	require.NoError(t, c.volumes.Remove(mount))
	code, _ = call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
	assert.Equal(t, http.StatusBadRequest, code)
	_, err = os.Stat(folder)
	require.ErrorIs(t, err, os.ErrNotExist, "and is not made by asking")
}

// fixedCA is ZTS that answers with what the test says.
type fixedCA struct {
	chain []*x509.Certificate
	set   *spiffe.BundleSet
	err   error
}

func (f *fixedCA) Sign(context.Context, *pki.CSR, time.Duration) ([]*x509.Certificate, error) {
	return f.chain, f.err
}

func (f *fixedCA) FetchBundles(context.Context) (*spiffe.BundleSet, error) { return f.set, nil }

func (f *fixedCA) ServiceToken() string { return "" }

// TestAgentFailures has each party of the agent fail; none of what it says is told to the pod.
func TestAgentFailures(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-10", "ATH-7.1-12", "ATH-7.1-13", "ATH-7.2-2", "ATH-7.2-3", "ATH-1-6")
	c := newCluster(t)
	away := errors.New("a secret reason")
	other, _ := c.ca.Certificate("/other")
	answers := func(f *fixedCA) func(*athenz.AgentConfig) {
		f.set = c.ca.Bundles()
		return func(cfg *athenz.AgentConfig) {
			cfg.CA = func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
				assert.NotContains(t, fmt.Sprintf("%v %+v %#v %s", r, r, r, &r), "eyJ")
				return f, nil
			}
		}
	}
	pods := func(edit func(*athenz.Pod)) func(*athenz.AgentConfig) {
		return func(cfg *athenz.AgentConfig) {
			kubelet := cfg.Pods
			cfg.Pods = podFunc(func(ctx context.Context, ns, name string) (*athenz.Pod, error) {
				pod, err := kubelet.Pod(ctx, ns, name)
				if err == nil {
					edit(pod)
				}
				return pod, err
			})
		}
	}
	var wg sync.WaitGroup
	for name, v := range map[string]struct {
		edit func(*athenz.AgentConfig)
		code int
	}{
		"no kubelet": {func(cfg *athenz.AgentConfig) {
			cfg.Pods = podFunc(func(context.Context, string, string) (*athenz.Pod, error) { return nil, away })
		}, 500},
		"no pod": {func(cfg *athenz.AgentConfig) {
			cfg.Pods = podFunc(func(context.Context, string, string) (*athenz.Pod, error) { return nil, athenz.ErrNoPod })
		}, 400},
		"a namespace without a domain":  {pods(func(p *athenz.Pod) { p.Namespace = "k8s-admin-x" }), 500},
		"an account that is no service": {pods(func(p *athenz.Pod) { p.ServiceAccount = "a.b" }), 500},
		"no signer": {func(cfg *athenz.AgentConfig) {
			cfg.Signer = signFunc(func(context.Context, athenz.PodSubject) (string, error) { return "", away })
		}, 500},
		"no ZTS":     {answers(&fixedCA{err: away}), 500},
		"no chain":   {answers(&fixedCA{}), 500},
		"nil":        {answers(&fixedCA{chain: []*x509.Certificate{nil}}), 500},
		"other leaf": {answers(&fixedCA{chain: other}), 500},
		"no CA": {func(cfg *athenz.AgentConfig) {
			cfg.CA = func(athenz.AgentRequest) (athenz.InstanceCA, error) { return nil, away }
		}, 500},
		"no SPIFFE ID": {func(cfg *athenz.AgentConfig) {
			cfg.SPIFFE = func(athenzname.Service, *athenz.Pod) (spiffe.ID, error) { return spiffe.ID{}, away }
		}, 500},
		"another's SPIFFE ID": {func(cfg *athenz.AgentConfig) {
			cfg.SPIFFE = func(athenzname.Service, *athenz.Pod) (spiffe.ID, error) {
				return spiffe.ParseID("spiffe://media.sports/sa/root")
			}
		}, 500},
		// What the provider refuses, of which only the log has the reason.
		"another address": {pods(func(p *athenz.Pod) { p.IP = p.IP.Next() }), 500},
		"another account": {pods(func(p *athenz.Pod) { p.ServiceAccount = "backend" }), 500},
		"another pod":     {pods(func(p *athenz.Pod) { p.Name = "web-9" }), 500},
	} {
		handle, err := c.volumes.Add("/"+name, namespace, "web-0")
		require.NoError(t, err)
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
		c.put("bad-0", pod)
		handle, err := c.volumes.Add("/bad", namespace, "bad-0")
		require.NoError(t, err)
		code, text := call(t, newAgent(t, c, nil), http.MethodPost, "/v1/init/"+handle, nil)
		assert.GreaterOrEqual(t, code, 400, name)
		assert.Contains(t, text, "the pod", name)
	}
}

// slowCA is a ZTS whose answers come, if they are to be lost, when the agent waits no more.
type slowCA struct {
	athenz.InstanceCA
	lose *atomic.Bool
}

func (s slowCA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	set, err := s.InstanceCA.FetchBundles(context.WithoutCancel(ctx))
	if s.lose.Load() {
		<-ctx.Done()
	}
	return set, err
}

// TestAgentLateAnswer has ZTS be slow. An answer that comes too late is a failure and not an empty success, and the
// certificate before the one that ZTS was shown is shown no more.
func TestAgentLateAnswer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	c := newCluster(t)
	var lose atomic.Bool
	agent := newAgent(t, c, func(cfg *athenz.AgentConfig) {
		ca := cfg.CA
		cfg.CA = func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
			next, err := ca(r)
			return slowCA{next, &lose}, err
		}
	})
	late := newAgent(t, c, func(cfg *athenz.AgentConfig) {
		ca := cfg.CA
		cfg.Timeout = time.Second
		cfg.CA = func(r athenz.AgentRequest) (athenz.InstanceCA, error) {
			next, err := ca(r)
			return slowCA{next, &lose}, err
		}
	})
	handle, err := c.volumes.Add("/late", namespace, "web-0")
	require.NoError(t, err)
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
	ask(late, "refresh", held[1], http.StatusInternalServerError)
	lose.Store(false)
	assert.Contains(t, ask(agent, "refresh", held[0], http.StatusBadRequest), "superseded")
	ask(agent, "refresh", held[1], http.StatusOK)
	ask(agent, "refresh", held[2], http.StatusOK)
	instance := cafake.AthenzInstance(c.zts.Fake)
	instance.ID = "web-0"
	assert.False(t, c.zts.Revoked(instance))
}

type signFunc func(context.Context, athenz.PodSubject) (string, error)

func (f signFunc) SignDocument(ctx context.Context, s athenz.PodSubject) (string, error) {
	return f(ctx, s)
}

// lost is a client that is gone before it has its answer.
type lost struct{ http.ResponseWriter }

func (lost) FlushError() error { return errors.New("broken pipe") }

// TestAgentAnswerLost has the first answer lost: the pod may ask again, once.
func TestAgentAnswerLost(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-11", "ATH-7.2-8")
	c := newCluster(t)
	agent := newAgent(t, c, nil)
	handle, err := c.volumes.Add("/lost", namespace, "web-0")
	require.NoError(t, err)
	agent.ServeHTTP(lost{httptest.NewRecorder()}, httptest.NewRequest(http.MethodPost, "/v1/init/"+handle, nil))
	c.keys.add(t, "v5", rsaKey()) // or the document of this second was used

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
	agent = newAgent(t, c, func(cfg *athenz.AgentConfig) {
		cfg.Signer = signFunc(func(context.Context, athenz.PodSubject) (string, error) { return "", errors.New("away") })
	})
	codes := map[int]int{}
	for _, mount := range []string{"/often", "/seldom"} {
		if handle, err = c.volumes.Add(mount, namespace, "web-0"); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			if mount == "/often" || i == 0 {
				code, _ := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
				codes[code]++
			}
		}
	}
	assert.Equal(t, map[int]int{500: 11, 429: 10}, codes)
}

// virtualConfig is that of an agent without sockets, for tests in virtual time: all of its pods run, and have the address
// 10.1.2.3.
func virtualConfig(t testing.TB, ca athenz.InstanceCA) athenz.AgentConfig {
	t.Helper()
	return athenz.AgentConfig{
		Volumes: athenz.NewVolumes(filepath.Join(t.TempDir(), "volumes")), Provider: athenzname.Service{Domain: "k8s.admin", Name: "callback"}, Suffix: suffix,
		TrustDomain: spiffe.MustParseTrustDomain("athenz.example"),
		Pods: podFunc(func(_ context.Context, namespace, name string) (*athenz.Pod, error) {
			ip := netip.MustParseAddr("10.1.2.3")
			return &athenz.Pod{Namespace: namespace, Name: name, ServiceAccount: account, IP: ip, IPs: []netip.Addr{ip}, Phase: "Running"}, nil
		}),
		Signer: signFunc(func(context.Context, athenz.PodSubject) (string, error) { return "x.y.z", nil }),
		CA:     func(athenz.AgentRequest) (athenz.InstanceCA, error) { return ca, nil },
	}
}

// TestAgentFailuresHoldNothing has more pods fail at ZTS than the agent serves at once. Their waits for the next second, in
// which they get another document, are theirs alone.
func TestAgentFailuresHoldNothing(t *testing.T) {
	t.Parallel()
	cfg := virtualConfig(t, &fixedCA{err: errors.New("no consent")})
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		var mu sync.Mutex
		waited := map[string]time.Duration{}
		cfg.Signer = signFunc(func(_ context.Context, s athenz.PodSubject) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			waited[s.Pod] = time.Since(begun)
			return "x.y.z", nil
		})
		agent, err := athenz.NewAgent(cfg)
		require.NoError(t, err)
		var wg sync.WaitGroup
		for n := range 10 {
			pod := fmt.Sprintf("web-%d", n)
			handle, err := cfg.Volumes.Add("/"+pod, namespace, pod)
			require.NoError(t, err)
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

// certifier is ZTS that signs what it is asked to.
type certifier struct{ *spiffetest.CA }

func (c certifier) Sign(ctx context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	return c.Certify(ctx, csr, csr.SANs(), time.Hour)
}

func (certifier) ServiceToken() string { return "" }

// TestAgentLostRefresh has the answer to a refresh be lost, and the certificate before expire in the outage that follows: the
// pod has nothing, and may ask for a first identity again. One that has the new certificate may not.
func TestAgentLostRefresh(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-11")
	cfg := virtualConfig(t, nil)
	synctest.Test(t, func(t *testing.T) {
		ca := newTestCA(t)
		ca.EditTemplates(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(time.Hour) })
		cfg.CA = func(athenz.AgentRequest) (athenz.InstanceCA, error) { return certifier{ca}, nil }
		agent, err := athenz.NewAgent(cfg)
		require.NoError(t, err)
		for _, arrives := range []bool{false, true} {
			handle, err := cfg.Volumes.Add(fmt.Sprintf("/%v", arrives), namespace, "web-0")
			require.NoError(t, err)
			code, text := call(t, agent, http.MethodPost, "/v1/init/"+handle, nil)
			require.Equal(t, http.StatusOK, code, text)
			var g given
			require.NoError(t, json.Unmarshal([]byte(text), &g))
			body, err := json.Marshal(object{"keyPEM": g.Key, "certPEM": g.Cert})
			require.NoError(t, err)
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
	t.Parallel()
	c := newCluster(t)
	pod := c.pod("web-0")
	first, err := pod.Init(t.Context())
	require.NoError(t, err)
	c.put("web-0", func(o object) { o["status"] = object{"phase": "Running", "podIP": "10.1.2.99"} })
	second, err := pod.Refresh(t.Context(), first.Credential)
	require.NoError(t, err)
	require.Len(t, second.Credential.Leaf().IPAddresses, 1)
	assert.Equal(t, "10.1.2.99", second.Credential.Leaf().IPAddresses[0].String())

	// A kubelet that is away, or does not know the address yet: the next refresh has it.
	c.put("web-0", func(o object) { o["status"] = object{"phase": "Running", "podIP": "10.1.2.100"} })
	kubelet := c.config.Pods
	for _, pods := range []podFunc{
		func(context.Context, string, string) (*athenz.Pod, error) { return nil, errors.New("away") },
		func(context.Context, string, string) (*athenz.Pod, error) { return new(athenz.Pod), nil },
		kubelet.Pod,
	} {
		c.config.Pods = pods
		c.start()
		if first, err = pod.Refresh(t.Context(), second.Credential); err != nil {
			require.ErrorContains(t, err, "answers 500")
		}
	}
	require.NoError(t, err)
	assert.Equal(t, "10.1.2.100", first.Credential.Leaf().IPAddresses[0].String())
	assert.False(t, c.zts.Revoked(cafake.AthenzInstance(c.zts.Fake)))
}

// TestSidecarAfterReboot has a node be rebooted: its volumes are mounted again, and the files of the pod are still there. The
// sidecar does not wait for the end of a certificate that the agent refreshes no more.
func TestSidecarAfterReboot(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	c := newCluster(t)
	first, err := c.pod("web-0").Init(t.Context())
	require.NoError(t, err)
	c.keys.add(t, "v2", rsaKey()) // or the document of this second was used
	again := c.pod("web-0")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := athenz.StartSidecar(ctx, athenz.SidecarConfig{Agent: again, Identity: first})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	for {
		changed := s.Changed()
		i := must(t, s)
		if !i.Credential.Leaf().Equal(first.Credential.Leaf()) {
			break
		}
		require.NoError(t, s.Report().Upstreams[0].Err, "the attempt is to succeed")
		select {
		case <-changed:
		case <-ctx.Done():
			require.FailNow(t, "no new identity")
		}
	}

	// An agent that knows of a newer certificate than the pod has gives no first one, and the present one stays.
	require.NoError(t, s.Close())
	s, err = athenz.StartSidecar(ctx, athenz.SidecarConfig{Agent: again, Identity: first})
	require.NoError(t, err)
	for failures := 0; failures == 0; {
		changed := s.Changed()
		agent := s.Report().Upstreams[0]
		if failures, err = agent.Failures, agent.Err; failures == 0 {
			<-changed
		}
	}
	require.ErrorContains(t, err, "superseded")
	assert.Same(t, first, must(t, s))
	require.NoError(t, s.Close())
}

// TestVolumesAfterCrash has the agent be killed while it writes: the driver can still forget the volume.
func TestVolumesAfterCrash(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	v := athenz.NewVolumes(dir)
	for _, draft := range []string{"context.json.new", "data.json.new"} {
		handle, err := v.Add("/crash", namespace, "web-0")
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, handle, draft), []byte("{"), 0o600))
		require.NoError(t, v.Remove("/crash"), draft)
		require.NoDirExists(t, filepath.Join(dir, handle))
	}
}

func TestNewAgentRefuses(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	for name, edit := range map[string]func(*athenz.AgentConfig){
		"no provider":  func(cfg *athenz.AgentConfig) { cfg.Provider = athenzname.Service{} },
		"no volumes":   func(cfg *athenz.AgentConfig) { cfg.Volumes = nil },
		"no pods":      func(cfg *athenz.AgentConfig) { cfg.Pods = nil },
		"no signer":    func(cfg *athenz.AgentConfig) { cfg.Signer = nil },
		"no CA":        func(cfg *athenz.AgentConfig) { cfg.CA = nil },
		"no suffix":    func(cfg *athenz.AgentConfig) { cfg.Suffix = "" },
		"a suffix":     func(cfg *athenz.AgentConfig) { cfg.Suffix = ".x" },
		"no domain":    func(cfg *athenz.AgentConfig) { cfg.TrustDomain = spiffe.TrustDomain{} },
		"admin domain": func(cfg *athenz.AgentConfig) { cfg.Mapping.AdminDomain = "A" },
		"timeout":      func(cfg *athenz.AgentConfig) { cfg.Timeout = -1 },
	} {
		cfg := c.config
		edit(&cfg)
		_, err := athenz.NewAgent(cfg)
		require.ErrorContains(t, err, "athenz: new agent: ", name)
	}
	for _, args := range [][3]string{{"relative", "ns", "pod"}, {"/x", "", "pod"}, {"/x", "ns", ""}, {"/x", "a/b", "pod"}, {"/x", "ns", "../x"}} {
		_, err := c.volumes.Add(args[0], args[1], args[2])
		require.ErrorContains(t, err, "athenz: add volume: ")
	}
}

func TestAgentClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-7.1-1", "ATH-7.1-2", "ATH-8-10")
	for _, args := range [][2]string{{"", "/x"}, {"/x", ""}} {
		_, err := athenz.NewAgentClient(args[0], args[1])
		require.ErrorContains(t, err, "athenz: new agent client: ")
	}
	dir := t.TempDir()
	socket, id := filepath.Join(dir, "agent.sock"), filepath.Join(dir, "id")
	c, err := athenz.NewAgentClient(socket, id)
	require.NoError(t, err)
	_, err = c.Init(t.Context())
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(id, []byte("x"), 0o600))
	_, err = c.Init(t.Context())
	require.ErrorContains(t, err, "43 letters")
	handle := athenz.VolumeHandle("/x")
	require.NoError(t, os.WriteFile(id, []byte(handle+"\n"), 0o600))
	_, err = c.Init(t.Context())
	require.ErrorContains(t, err, "connect:")
	assert.NotContains(t, err.Error(), handle)
	_, err = c.Refresh(t.Context(), nil)
	require.ErrorContains(t, err, "use Init")

	var answer atomic.Value
	l, err := net.Listen("unix", socket)
	require.NoError(t, err)
	server := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := new(bytes.Buffer)
		_, _ = body.ReadFrom(r.Body)
		text := answer.Load().(string)
		if text == "echo" {
			w.WriteHeader(http.StatusInternalServerError)
			text = r.URL.Path + body.String()
		}
		_, _ = w.Write([]byte(text))
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	if os.Geteuid() != 0 { // whom no mode stops
		require.NoError(t, os.Chmod(socket, 0))
		_, err = c.Init(t.Context())
		require.ErrorContains(t, err, "this user may not connect to the agent")
		require.NoError(t, os.Chmod(socket, 0o700))
	}
	cluster := cafake.NewZTS(t, newTestCA(t), "/ns/a/sa/b")
	good := cluster.Credential("a.b")
	certs, key, err := good.MarshalPEM()
	require.NoError(t, err)
	body := func(edit func(object)) string {
		o := object{"ntoken": "v=S1;s=secret", "keyPEM": key, "certPEM": certs, "caCertPEM": certs}
		edit(o)
		data, err := json.Marshal(o)
		require.NoError(t, err)
		return string(data)
	}
	answer.Store(body(func(object) {}))
	i, err := c.Init(t.Context())
	require.NoError(t, err)
	assert.True(t, i.Credential.Leaf().Equal(good.Leaf()))
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "identity", i)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s %q", i, i, i, i, i), log.String()} {
		assert.NotContains(t, text, "secret")
		assert.Contains(t, text, "a.b until")
	}
	for name, text := range map[string]string{
		"nothing": "", "noise": "x", "a list": "[]", "no fields": "{}", "another's key": body(func(o object) { o["keyPEM"] = []byte(mustKey(t)) }),
		"no key": body(func(o object) { delete(o, "keyPEM") }), "not base64": body(func(o object) { o["certPEM"] = "?" }), "roots": body(func(o object) { o["caCertPEM"] = key }),
		"2 MiB": body(func(o object) { o["x"] = strings.Repeat("x", 2<<20) }), "echo": "echo",
	} {
		answer.Store(text)
		_, err = c.Init(t.Context())
		require.Error(t, err, name)
		_, err = c.Refresh(t.Context(), good)
		require.Error(t, err, name)
		assert.NotContains(t, err.Error(), string(key)[40:80], name)
		assert.NotContains(t, err.Error(), base64.StdEncoding.EncodeToString(key)[40:80], name)
		assert.NotContains(t, err.Error(), handle, name)
	}
}

func must2[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func mustKey(t testing.TB) string {
	t.Helper()
	text, err := pki.MarshalPrivateKeyPEM(rsaKey())
	require.NoError(t, err)
	return string(text)
}

func FuzzAgentRefresh(f *testing.F) {
	c := newCluster(f)
	agent := newAgent(f, c, nil)
	handle, err := c.volumes.Add("/fuzz", namespace, "web-0")
	require.NoError(f, err)
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

func FuzzConfirmation(f *testing.F) {
	c := newCluster(f)
	client := c.mutualTLS(cafake.ZTSName)
	good, err := json.Marshal(confirmation(""))
	require.NoError(f, err)
	f.Add(string(good))
	f.Add(`{"provider":"a.b","domain":"a","service":"b","attestationData":"x.y.z","attributes":{"sanIP":",,"}}`)
	f.Fuzz(func(t *testing.T, body string) {
		own := *c
		own.t = t
		code, text := own.confirm(client, "/instance", body)
		if code != http.StatusBadRequest && code != http.StatusForbidden {
			t.Fatalf("%d %s", code, text)
		}
	})
}
