package prometheus_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/faulty"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/metricstest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/podcert"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var (
	domain   = spiffe.MustParseTrustDomain("example.org")
	web      = spiffe.MustParseID("spiffe://example.org/web")
	serverID = spiffe.MustParseID("spiffe://example.org/ca")
	errAway  = errors.New("away")
)

// away fails while it is set.
type away struct{ atomic.Bool }

func (f *away) err() error {
	if f.Load() {
		return errAway
	}
	return nil
}

// store is a [ca.Store] in memory.
type store struct {
	away
	unfit   bool // what its errors say
	mu      sync.Mutex
	version int
	data    map[string][]byte
}

func (s *store) Load(context.Context) (ca.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.err(); err != nil {
		if s.unfit {
			err = errors.Join(ca.ErrUnfit, err)
		}
		return ca.Record{}, err
	}
	if s.data == nil {
		return ca.Record{}, ca.ErrNoRecord
	}
	return ca.NewRecord(strconv.Itoa(s.version), copied(s.data)), nil
}

func (s *store) Save(_ context.Context, r ca.Record) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.err(); err != nil {
		return "", err
	}
	if r.Version != strconv.Itoa(s.version) && !(r.Version == "" && s.data == nil) {
		return "", ca.ErrConflict
	}
	s.version++
	s.data = copied(r.Data())
	return strconv.Itoa(s.version), nil
}

func copied(data map[string][]byte) map[string][]byte {
	all := map[string][]byte{}
	for name, b := range data {
		all[name] = bytes.Clone(b)
	}
	return all
}

// disk is a [ca.Auditor].
type disk struct{ away }

func (d *disk) Record(context.Context, *ca.Issuance) error { return d.err() }
func (d *disk) Err() error                                 { return d.err() }

// issuer is the way from the agent to the CA.
type issuer struct {
	*local.CA
	away
}

func (i *issuer) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := i.err(); err != nil {
		return nil, err
	}
	return i.CA.Sign(ctx, csr, lifetime)
}

// world is a CA, an agent that has identities of it, and a service that has one of the agent, put together as the programs
// are, with what makes them fail.
type world struct {
	*testing.T
	*recording
	store   store
	audit   disk
	ca      *ca.Authority
	issuer  *issuer
	manager *secretcache.Manager
	socket  *faulty.Dial // of the agent, for the Workload API
	secrets *sds.Handler
	port    *port                                                                // of the CA, for operators
	dial    func(ctx context.Context, network, address string) (net.Conn, error) // socket
	stopCA  func()
	targets []target
}

// port is an address at which there may be a server.
type port struct {
	at atomic.Pointer[memconn.Listener]
}

func (p *port) client(t testing.TB) *http.Client {
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.at.Load().Dial(ctx) }}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 10 * time.Second}
}

// run runs a part until stop is called, or the test ends.
func run(t *testing.T, part func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- part(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		assert.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return stop
}

// within begins a world in a bubble, and records it. Certificates live for 20 minutes.
func within(t *testing.T, edit func(*ca.Config), f func(w *world)) {
	rounds.NotShort(t)
	t.Parallel()
	tool(t, "promtool") // or there is no use
	synctest.Test(t, func(t *testing.T) {
		w := &world{T: t, port: new(port)}
		cfg := ca.Config{
			TrustDomain: domain, DefaultTTL: 20 * time.Minute, MaxTTL: 20 * time.Minute, Backdate: time.Minute, RefreshHint: time.Minute,
			Rotation: ca.Rotation{RootTTL: 4 * time.Hour, Propagation: 5 * time.Minute}, Create: true, Auditor: &w.audit,
		}
		if edit != nil {
			edit(&cfg)
		}
		var err error
		w.ca, err = ca.Open(t.Context(), cfg, &w.store)
		require.NoError(w, err)
		w.stopCA = w.serveCA(w.ca)
		w.startAgent()
		w.startService()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		w.recording = record(t)
		f(w)
	})
}

// serveCA serves a CA as examples/ca does, and returns what ends it.
func (w *world) serveCA(signer ca.Signer) (stop func()) {
	server, err := caserver.New(caserver.Options{CA: signer, TrustDomain: domain, Identity: caservertest.Identity(w.T, signer, serverID)})
	require.NoError(w, err)
	w.port.at.Store(memconn.Listen())
	if w.targets == nil {
		w.targets = []target{fetched("svidkit-ca", w.port.client(w), "http://localhost/metrics")}
	}
	return run(w.T, func(ctx context.Context) error { return server.Run(ctx, caserver.Listeners{Admin: w.port.at.Load()}) })
}

// startAgent runs the parts of an agent that serves the Workload API and SDS.
func (w *world) startAgent() {
	from := must.Get(local.New(w.ca, web))(w)
	w.issuer = &issuer{CA: from}
	w.manager = must.Get(secretcache.New(secretcache.Config{ID: web, CA: w.issuer}))(w)
	w.secrets = must.Get(sds.NewHandler(w.manager, nil))(w)
	workloads := must.Get(workloadserver.NewHandler(w.manager, nil))(w)
	run(w.T, w.manager.Run)
	l := memconn.Listen()
	w.socket = faulty.Start(w, faulty.Config{Listener: l, Handler: workloads, Deny: http.NotFoundHandler(), Garble: http.NotFoundHandler()})
	w.Cleanup(func() { _ = workloads.Close() })
	w.Cleanup(func() { _ = w.secrets.Close() })
	h, err := health.New(health.Part{Name: "identity", Source: w.manager}, health.Part{Name: "SDS", Source: w.secrets}, health.Part{Name: "Workload API", Source: workloads})
	require.NoError(w, err)
	w.targets = append(w.targets, handled("svidkit-agent", h))
	w.dial = l.DialContext
}

// startService runs the parts of examples/service.
func (w *world) startService() {
	transport := &http.Transport{Protocols: new(http.Protocols), DialContext: w.dial}
	transport.Protocols.SetUnencryptedHTTP2(true)
	w.Cleanup(transport.CloseIdleConnections)
	client := must.Get(workloadapi.NewClient("", &http.Client{Transport: transport}))(w)
	source := must.Get(workloadapi.New(workloadapi.Config{Client: client}))(w)
	run(w.T, source.Run)
	h, err := health.New(health.Part{Name: "identity", Source: source}, health.Part{Name: "tls", Source: new(spiffetls.Metrics)})
	require.NoError(w, err)
	w.targets = append(w.targets, handled("svidkit-service", h))
}

// lasts records the world for so many minutes.
func (w *world) lasts(minutes int) { w.follow(time.Duration(minutes)*time.Minute, w.targets...) }

// expect has promtool judge what was recorded, outside of the bubble's time.
func (w *world) expect(fired map[string]window) { w.require(w.T, fired) }

func minutes(from, to float64) window {
	return window{time.Duration(from * float64(time.Minute)), time.Duration(to * float64(time.Minute))}
}

// TestHealthyHour: no alert fires in an hour in which all certificates are renewed, and the root is replaced.
func TestHealthyHour(t *testing.T) {
	within(t, nil, func(w *world) {
		before := must.Get(w.manager.SVID())(w)
		w.lasts(10)
		must.Get(w.ca.Rotate(w.Context()))(w)
		w.lasts(50)
		after := must.Get(w.manager.SVID())(w)
		require.NotEqual(w, before.Leaf().SerialNumber, after.Leaf().SerialNumber)
		require.NotEqual(w, before.Leaf().AuthorityKeyId, after.Leaf().AuthorityKeyId, "the root was replaced")
		w.expect(nil)
	})
}

// TestCAOutOfReach: the agent cannot reach the CA for longer than a life, and the service feels it.
func TestCAOutOfReach(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(5)
		w.issuer.away.Store(true)
		w.lasts(25)
		w.issuer.away.Store(false)
		w.lasts(15)
		w.expect(map[string]window{
			"SvidkitRenewalFailing": minutes(13, 18), "SvidkitIdentityExpiring": minutes(16, 19), "SvidkitNotReady": minutes(21, 23),
		})
	})
}

// TestAgentOutOfReach: the service cannot reach its agent for longer than a life.
func TestAgentOutOfReach(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(5)
		w.socket.Drop()
		w.lasts(25)
		w.socket.Mend()
		w.lasts(5)
		w.expect(map[string]window{
			"SvidkitRenewalFailing": minutes(15, 18), "SvidkitIdentityExpiring": minutes(17, 19), "SvidkitNotReady": minutes(21, 23),
		})
	})
}

// TestUnknownIdentity: the CA refuses an identity that the agent is to have, until an operator takes it back.
func TestUnknownIdentity(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(2)
		db := spiffe.MustParseID("spiffe://example.org/db")
		require.NoError(w, w.manager.Add(db))
		w.lasts(18)
		w.manager.Remove(db)
		w.lasts(5)
		w.expect(map[string]window{"SvidkitRenewalFailing": minutes(12, 13)})
	})
}

// TestNoFreshRoot: the operator, who is to rotate by hand, does so late.
func TestNoFreshRoot(t *testing.T) {
	rounds.Slow(t)
	within(t, func(c *ca.Config) {
		c.DefaultTTL, c.MaxTTL = 10*time.Minute, 10*time.Minute
		c.Rotation = ca.Rotation{RootTTL: 160 * time.Minute, Propagation: 2 * time.Minute, Manual: true}
	}, func(w *world) {
		w.lasts(152)
		must.Get(w.ca.Rotate(w.Context()))(w)
		w.lasts(18)
		w.expect(map[string]window{"SvidkitNoFreshRoot": minutes(140, 144), "SvidkitRootEnding": minutes(147, 151)})
	})
}

// TestStoreAway: the store of the CA does not answer for 15 minutes, while the CA signs on.
func TestStoreAway(t *testing.T) { storeAway(t, false) }

// TestStoreUnfit: nor is it critical that only an operator mends it, as of a directory that is gone.
func TestStoreUnfit(t *testing.T) { storeAway(t, true) }

func storeAway(t *testing.T, unfit bool) {
	within(t, nil, func(w *world) {
		w.store.unfit = unfit
		w.lasts(5)
		w.store.away.Store(true)
		w.lasts(15)
		w.store.away.Store(false)
		w.lasts(5)
		w.expect(map[string]window{"SvidkitStoreAway": minutes(10, 12)})
	})
}

// TestAuditFailing: the disk of the audit log is full.
func TestAuditFailing(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(5)
		w.audit.away.Store(true)
		w.lasts(5) // less than a third of a life
		w.audit.away.Store(false)
		w.lasts(5)
		w.expect(map[string]window{"SvidkitAuditFailing": minutes(8, 8.5), "SvidkitNotReady": minutes(7, 7.5)})
	})
}

// TestCustodianAway: the custodian of the CA's keys does not sign.
func TestCustodianAway(t *testing.T) {
	keys, away := custodian.New(), new(atomic.Bool)
	keys.Fault = func(context.Context, string, string) error {
		if away.Load() {
			return errors.New("sealed")
		}
		return nil
	}
	within(t, func(c *ca.Config) { c.Custody = ca.Custody{Keys: keys} }, func(w *world) {
		w.lasts(5)
		away.Store(true)
		w.lasts(5) // less than a third of a life
		away.Store(false)
		w.lasts(5)
		w.expect(map[string]window{"SvidkitCustodianAway": minutes(8, 9.5), "SvidkitNotReady": minutes(7, 8.5)})
	})
}

// TestDown: the CA ends, and comes back.
func TestDown(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(5)
		w.stopCA()
		w.lasts(5)
		w.serveCA(w.ca)
		w.lasts(5)
		w.expect(map[string]window{"SvidkitDown": minutes(7, 7.5)})
	})
}

// TestNACK: an Envoy rejects a secret.
func TestNACK(t *testing.T) {
	within(t, nil, func(w *world) {
		w.lasts(2)
		reject(w.T, w.secrets)
		w.lasts(15)
		w.expect(map[string]window{"SvidkitNACK": minutes(2, 2.5)})
	})
}

// reject takes a secret from an SDS server, and rejects it.
func reject(t *testing.T, h http.Handler) {
	l, protocols := memconn.Listen(), new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Handler: h, Protocols: protocols}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	transport := &http.Transport{Protocols: protocols, DialContext: l.DialContext}
	defer transport.CloseIdleConnections()
	in, out := io.Pipe()
	defer out.Close()
	send := func(m *envoysds.DiscoveryRequest) {
		m.TypeUrl, m.ResourceNames = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret", []string{"default"}
		b := must.Get(proto.Marshal(m))(t)
		must.Get(out.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)))(t)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://localhost/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets", in)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Workload.spiffe.io", "true")
	go send(&envoysds.DiscoveryRequest{})
	resp := must.Get(transport.RoundTrip(r))(t)
	defer resp.Body.Close()
	var head [5]byte
	must.Get(io.ReadFull(resp.Body, head[:]))(t)
	b := make([]byte, binary.BigEndian.Uint32(head[1:]))
	must.Get(io.ReadFull(resp.Body, b))(t)
	var answer envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(b, &answer))
	send(&envoysds.DiscoveryRequest{ResponseNonce: answer.GetNonce(), ErrorDetail: &envoysds.Status{Code: 13, Message: "no"}})
	time.Sleep(time.Second)
}

// TestPodsWaiting: a pod has no identity, until an operator registers it.
func TestPodsWaiting(t *testing.T) {
	within(t, func(c *ca.Config) { c.MaxTTL = time.Hour }, func(w *world) {
		api := kubetest.StartOn(w, 1, memconn.Listen())
		w.Cleanup(api.Client().CloseIdleConnections)
		var registered atomic.Bool
		key := must.Get(pki.NewKey("ecdsa-p256"))(w)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(w)
		w.stopCA()
		w.targets = w.targets[:1]
		server, err := caserver.New(caserver.Options{CA: w.ca, TrustDomain: domain, Identity: caservertest.Identity(w.T, w.ca, serverID), Pods: func(signer ca.Signer) (caserver.Part, error) {
			return podcert.New(podcert.Options{
				SignerName: "example.org/spiffe", TrustDomain: domain, CA: signer, APIServer: api.URL(), HTTPClient: api.Client(),
				ID: func(spiffe.Pod) (spiffe.ID, error) {
					if !registered.Load() {
						return spiffe.ID{}, later{errAway}
					}
					return web, nil
				},
			})
		}})
		require.NoError(w, err)
		w.port.at.Store(memconn.Listen())
		run(w.T, func(ctx context.Context) error { return server.Run(ctx, caserver.Listeners{Admin: w.port.at.Load()}) })
		w.lasts(2)
		path := "/apis/certificates.k8s.io/v1/namespaces/shop/podcertificaterequests/web"
		api.Put(path, map[string]any{"metadata": map[string]any{}, "spec": map[string]any{
			"signerName": "example.org/spiffe", "stubPKCS10Request": csr.DER(), "maxExpirationSeconds": 3600, "nodeName": "n1",
		}})
		w.lasts(10)
		registered.Store(true)
		w.lasts(8) // for five minutes Prometheus takes the last sample
		w.expect(map[string]window{"SvidkitPodsWaiting": minutes(8, 9.5)})
	})
}

// later says that it passes.
type later struct{ error }

func (later) Retryable() (time.Duration, bool) { return 0, true }

// demo is a program of the directory examples as prometheus.yaml has it.
type demo struct {
	args    []string // beside those for free ports
	named   string   // how the program prints where its metrics are
	address string   // what prometheus.yaml has
	at      string
}

// demos starts the programs of prometheus.yaml, on free ports.
func demos(t *testing.T) map[string]*demo {
	dir := programtest.Build(t, "ca", "agent", "workload-agent", "service")
	home := t.TempDir()
	all := map[string]*demo{
		"ca": {
			[]string{"-state-dir", filepath.Join(home, "ca"), "-create", "-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0"},
			"metrics, health", "127.0.0.1:15014", "",
		},
		"agent":          {[]string{"-demo", "-admin", "127.0.0.1:0"}, "status page", "127.0.0.1:15020", ""},
		"workload-agent": {[]string{"-demo", "-admin", "127.0.0.1:0"}, "health", "127.0.0.1:15024", ""},
		"service":        {[]string{"-requests", "0", "-health-addr", "127.0.0.1:0"}, "health", "127.0.0.1:15026", ""},
	}
	for name, d := range all {
		p := programtest.Start(t, filepath.Join(dir, name), nil, []string{"HOME=" + home, "TMPDIR=" + t.TempDir()}, d.args...)
		d.at = address(t, p, d.named)
	}
	return all
}

// address returns the address in the URL that a program has printed with a name.
func address(t *testing.T, p *programtest.Program, name string) string {
	_, rest, found := strings.Cut(p.Addr(name), "http://")
	require.True(t, found)
	at, _, _ := strings.Cut(rest, "/")
	return at
}

// TestServer: a Prometheus with prometheus.yaml scrapes the demos, evaluates the rules, and has nothing to tell.
func TestServer(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	path := tool(t, "prometheus")
	all := demos(t)
	data := must.Get(os.ReadFile(deployed("prometheus.yaml")))(t)
	config := strings.ReplaceAll(string(data), ": 15s", ": 1s")
	require.NotEqual(t, string(data), config)
	for name, d := range all {
		resp := must.Get(http.Get("http://"+d.at+"/metrics"))(t, name)
		page := must.Get(io.ReadAll(resp.Body))(t)
		_ = resp.Body.Close()
		assert.NoError(t, must.Err(metricstest.Page(string(page))), name)
		require.Equal(t, 1, strings.Count(config, `"`+d.address+`"`), name)
		config = strings.ReplaceAll(config, `"`+d.address+`"`, `"`+d.at+`"`)
	}
	dir := t.TempDir()
	text := must.Get(os.ReadFile(deployed("rules.yaml")))(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), text, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "prometheus.yaml"), []byte(config), 0o600))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	at := l.Addr().String()
	require.NoError(t, l.Close())
	log := new(programtest.Log)
	cmd := exec.Command(path, "--config.file="+filepath.Join(dir, "prometheus.yaml"), "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+at)
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	get := func(path string, into any) error {
		resp, err := http.Get("http://" + at + "/api/v1/" + path)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		return json.NewDecoder(resp.Body).Decode(into)
	}
	query := func(expr string) (results int) {
		var answer struct {
			Data struct{ Result []any }
		}
		_ = get("query?query="+url.QueryEscape(expr), &answer)
		return len(answer.Data.Result)
	}
	for _, expr := range []string{
		`count(up{job=~"svidkit-.+"} == 1) == 4`, `count(count by (job) (svidkit_ready == 1)) == 4`, `svidkit_ca_signing{job="svidkit-ca"} == 1`,
		`svidkit:identity_life_left:ratio{job="svidkit-service"} > 0`, `svidkit:identity_life_left:ratio{job="svidkit-agent"} > 0`,
		`svidkit:bundle_life_left:ratio{job="svidkit-workload-agent"} > 0`, `svidkit:connection_descriptors_used:ratio{job="svidkit-ca"} < 0.5`,
		`increase(svidkit_secretcache_attempts_total{outcome="good"}[10s])`,
	} {
		require.Eventually(t, func() bool { return query(expr) > 0 }, time.Minute, 200*time.Millisecond, expr)
	}
	time.Sleep(3 * time.Second) // three evaluations more
	assert.Zero(t, query("ALERTS"))
	var answer struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
	}
	require.NoError(t, get("rules", &answer))
	n := 0
	for _, g := range answer.Data.Groups {
		for _, r := range g.Rules {
			n++
			assert.Equal(t, "ok", r.Health, "%s: %s", r.Name, r.LastError)
		}
	}
	assert.Len(t, rules(t), n)
}

// TestDescriptors: a CA has few file descriptors, and one user holds as many connections to it as the CA allows.
func TestDescriptors(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	tool(t, "promtool")
	if runtime.GOOS != "linux" {
		t.Skip("the limit is set by sh")
	}
	dir := programtest.Build(t, "ca")
	home := t.TempDir()
	p := programtest.Start(t, "/bin/sh", nil, []string{"HOME=" + home}, "-c", `ulimit -n 128; exec "$0" "$@"`, filepath.Join(dir, "ca"),
		"-state-dir", filepath.Join(home, "ca"), "-create", "-istio-addr", "127.0.0.1:0", "-linkerd-addr", "127.0.0.1:0", "-bundle-addr", "127.0.0.1:0", "-admin-addr", "127.0.0.1:0")
	admin := address(t, p, "metrics, health")
	scraped := fetched("svidkit-ca", &http.Client{Timeout: 10 * time.Second}, "http://"+admin+"/metrics") // a connection that was there before
	r := record(t)
	each := func(n int, also func()) {
		for range n {
			also()
			r.scrape(scraped)
		}
	}
	each(8, func() {})
	var held []net.Conn
	drop := func() {
		for _, c := range held {
			_ = c.Close()
		}
		held = nil
	}
	defer drop()
	each(40, func() {
		for len(held) < 100 {
			held = append(held, must.Get(net.Dial("tcp", admin))(t))
		}
		if r.n%2 == 0 { // those that were closed at once come again
			for _, c := range held[80:] {
				_ = c.Close()
			}
			held = held[:80]
		}
	})
	drop()
	require.Eventually(t, func() bool {
		page, err := scraped.page()
		return err == nil && strings.Contains(page, `svidkit_connection_descriptors{state="used"} 1`+"\n")
	}, time.Minute, 50*time.Millisecond)
	each(48, func() {})
	r.require(t, map[string]window{"SvidkitDescriptorsUsedUp": minutes(6.5, 8), "SvidkitLimitReached": minutes(6.5, 8)})
}
