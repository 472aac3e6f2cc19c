package xdsproxy_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient"
	caapi "github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// agentKey is the variable that makes this program an agent; it has an agentConfig in JSON.
const agentKey = "SVIDKIT_TEST_AGENT"

const admin = "\nadmin:\n  address: {socket_address: {address: 127.0.0.1, port_value: 0}}\n"

func TestMain(m *testing.M) {
	config := os.Getenv(agentKey)
	if config == "" {
		rounds.Parallel(8)
		m.Run()
		return
	}
	if err := runAgent(config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// agentConfig is what an agent is told.
type agentConfig struct {
	ID                   spiffe.ID
	Socket, CA, Control  string // a path and two URLs
	RootsFile, TokenFile string
}

// Bundle has the roots in the file, to be read again every second.
func (c *agentConfig) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	data, err := os.ReadFile(c.RootsFile)
	if err != nil {
		return nil, err
	}
	b, err := spiffe.ParseBundlePEM(td, data)
	if err != nil {
		return nil, err
	}
	return spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: slices.Collect(b.X509Authorities()), RefreshHint: time.Second})
}

// runAgent is an agent of the parts that an operator puts together: a manager over a CA by the network, secrets for
// Envoy, and Envoy's configuration by the same socket. It ends when standard input does.
func runAgent(config string) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	var c agentConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return err
	}
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: c.RootsFile})
	if err != nil {
		return err
	}
	issuer, err := caapi.New(caapi.Options{Endpoint: caclient.Endpoint{
		URL: c.CA, TrustDomain: c.ID.TrustDomain(), HTTPClient: client, Roots: &c, TokenFile: c.TokenFile,
	}})
	if err != nil {
		return err
	}
	m, err := secretcache.Start(ctx, secretcache.Config{ID: c.ID, CA: issuer})
	if err != nil {
		return err
	}
	defer m.Close()
	secrets, err := sds.NewHandler(m, nil)
	if err != nil {
		return err
	}
	defer secrets.Close()
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	h, err := xdsproxy.NewHandler(xdsproxy.Config{URL: c.Control, AllowPlaintext: true, HTTPClient: &http.Client{Transport: tr}, Secrets: secrets})
	if err != nil {
		return err
	}
	defer h.Close()
	return (&unixsocket.Server{Path: c.Socket, Handler: h}).Run(ctx)
}

// startAgent starts an agent as a process of its own, and returns how to kill it.
func startAgent(t *testing.T, c agentConfig) (kill func()) {
	t.Helper()
	self := must.Get(os.Executable())(t)
	config := must.Get(json.Marshal(c))(t)
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), agentKey+"="+string(config))
	var printed bytes.Buffer // read when the process has ended
	cmd.Stderr = &printed
	in := must.Get(cmd.StdinPipe())(t) // which ends when this process does, however that ends
	require.NoError(t, cmd.Start())
	kill = sync.OnceFunc(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		_ = in.Close()
	})
	t.Cleanup(func() {
		kill()
		if printed.Len() > 0 {
			t.Errorf("an agent printed: %s", &printed)
		}
	})
	return kill
}

// issued is a CA that notes what it issued to each workload.
type issued struct {
	*ca.Authority
	mu   sync.Mutex
	last map[spiffe.ID]time.Time
	all  map[spiffe.ID][]string // serial numbers
}

func (i *issued) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	chain, err := i.Authority.Sign(ctx, r)
	if err == nil {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.last[r.ID] = time.Now()
		i.all[r.ID] = append(i.all[r.ID], envoytest.Serial(chain[0].SerialNumber))
	}
	return chain, err
}

func (i *issued) to(id spiffe.ID) (serials []string, last time.Time) {
	i.mu.Lock()
	defer i.mu.Unlock()
	return slices.Clone(i.all[id]), i.last[id]
}

// The Authority is run by the test and not by the server, which comes and goes.
type served interface {
	ca.Signer
	Changed() <-chan struct{}
}

// A side is one of the two workloads: its identity, its Envoy's control plane, and where its agent is told to serve.
type side struct {
	agentConfig
	plane     *plane
	stopPlane func()
	byADS     bool // where its Envoy has its secrets from: by ADS, or by SDS
	delta     bool
}

// secretsBy are sources of secrets in Envoy's configuration: ADS, or SDS by the cluster of the same socket.
func (s *side) secretsBy() field {
	if s.byADS {
		return message(2, message(3), number(6, 2))
	}
	api := uint64(2)
	if s.delta {
		api = 3
	}
	return message(2, message(2, number(1, api), message(4, message(1, text(1, "xds"))), number(8, 2)), number(6, 2))
}

// tls is a CommonTlsContext that wants an ID of the peer.
func (s *side) tls(peer field) field {
	return message(1, message(6, text(1, "default"), s.secretsBy()),
		message(8, message(1, message(15, number(1, 3), message(2, peer))), message(2, text(1, "ROOTCA"), s.secretsBy())))
}

// listener is a listener that sends all requests to a cluster, and its revision with the answers.
func (s *side) listener(t testing.TB, name, cluster string, revision int, more ...field) []byte {
	header := message(4, message(1, text(1, name+"-revision"), text(2, strconv.Itoa(revision))))
	route := message(3, message(1, text(1, "/")), message(2, text(1, cluster)))
	chain := append([]field{message(3, text(1, "hcm"), extension(4, "filters.network.http_connection_manager.v3.HttpConnectionManager",
		text(2, name), number(16, 3), message(17, number(5, 1)),
		message(4, text(1, "r"), message(2, text(1, "all"), text(2, "*"), route), header),
		message(5, text(1, "router"), extension(4, "filters.http.router.v3.Router"))))}, more...)
	return resource(t, text(1, name), message(2, address(0)), message(3, chain...))
}

func (s *side) ingress(t testing.TB, revision int) []byte {
	yes := message(2, number(1, 1))
	noTickets, noSessions := number(7, 1), number(10, 1)
	return s.listener(t, "ingress", "app", revision, message(6, text(1, "tls"),
		extension(3, "transport_sockets.tls.v3.DownstreamTlsContext", s.tls(text(2, "spiffe://example.org/ns/demo/sa/")), yes, noTickets, noSessions)))
}

// backend is the cluster of the second Envoy, to which each request is a handshake.
func (s *side) backend(t testing.TB, port, timeout uint64) []byte {
	const options = "upstreams.http.v3.HttpProtocolOptions"
	once := message(36, text(1, "envoy.extensions."+options), extension(2, options, message(1, message(6, number(1, 1))), message(3, message(1))))
	return resource(t, text(1, "backend"), message(4, number(1, timeout)), once,
		message(33, text(1, "backend"), message(2, message(2, message(1, message(1, address(port)))))),
		message(24, text(1, "tls"), extension(3, "transport_sockets.tls.v3.UpstreamTlsContext",
			s.tls(text(1, "spiffe://example.org/ns/demo/sa/backend")), message(4))))
}

func (s *side) bootstrap() string {
	api := "GRPC"
	if s.delta {
		api = "DELTA_GRPC"
	}
	return strings.NewReplacer("API_TYPE", api, "./xds.sock", "./"+filepath.Base(s.Socket), "id: sidecar", "id: "+filepath.Base(s.ID.Path())).Replace(bootstrap)
}

// requests is a load of one request after the other, each on a connection of its own.
type requests struct {
	stop   func() // after which the other fields may be read
	done   int
	failed []string
	count  atomic.Int64 // done so far
	latest atomic.Pointer[http.Header]
}

func startRequests(t *testing.T, client *http.Client, target, want string) *requests {
	l, ended := new(requests), make(chan struct{})
	l.latest.Store(&http.Header{})
	var wg sync.WaitGroup
	one := func() error {
		resp, err := client.Get(target)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		if resp.StatusCode != http.StatusOK || !strings.Contains(string(body), want) {
			return fmt.Errorf("status %d: %s", resp.StatusCode, body)
		}
		l.latest.Store(&resp.Header)
		return nil
	}
	wg.Go(func() {
		for {
			select {
			case <-ended:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if err := one(); err != nil {
				l.failed = append(l.failed, time.Now().Format("15:04:05.000 ")+err.Error())
			} else {
				l.done++
				l.count.Add(1)
			}
		}
	})
	l.stop = sync.OnceFunc(func() { close(ended); wg.Wait() })
	t.Cleanup(l.stop)
	return l
}

// has returns whether the newest answer has a header.
func (l *requests) has(name string, value int) func() bool {
	return func() bool { return l.latest.Load().Get(name) == strconv.Itoa(value) }
}

// TestEnvoyRotation runs two Envoys between two applications. Each has an agent of its own, which is a process, and
// everything else from there: listeners and clusters by ADS from a control plane, secrets by SDS or ADS from a CA by
// the network. Requests go through both all the time, and from another workload to the second one, each with a
// handshake. Leaves rotate, the root rotates, listeners and clusters change, the control planes are restarted, the
// agents are killed, and the CA is away beyond half of the life of the certificates, while the first Envoy is
// restarted without traffic of its own. No request fails.
func TestEnvoyRotation(t *testing.T) {
	conformance.Covers(t, "IST-8.5-3", "IST-8.6-1", "IST-8.6-2", "IST-9.4-1", "IST-9.4-3")
	t.Parallel()
	bins := append([]string{envoytest.Binary(t)}, envoytest.Old(t)...)
	if len(bins) == 1 {
		t.Run("older", func(t *testing.T) { t.Skip("no older Envoys: set ENVOY_OLD_PATHS") })
	}
	for i, bin := range bins {
		delta := i%2 == 1 // of the first Envoy; the second has the other
		t.Run(envoytest.Version(t, bin), func(t *testing.T) {
			t.Parallel()
			testRotation(t, bin, delta)
		})
	}
}

func testRotation(t *testing.T, bin string, delta bool) {
	const (
		listeners = "type.googleapis.com/envoy.config.listener.v3.Listener"
		life      = 10 * time.Second
	)
	within := 30 * time.Second                  // for what may wait for others on a busy machine
	dir := must.Get(os.MkdirTemp("", "rot"))(t) // t.TempDir is too long for a Unix socket
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })

	// The CA. A workload's token is its name.
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.New(ca.Config{TrustDomain: td, DefaultTTL: life, MaxTTL: life, Backdate: time.Second, Rotation: ca.Rotation{Propagation: life}})
	require.NoError(t, err)
	running.Go(func() { assert.NoError(t, authority.Run(ctx)) })
	signer := &issued{Authority: authority, last: map[spiffe.ID]time.Time{}, all: map[spiffe.ID][]string{}}
	id := func(name string) spiffe.ID {
		return must.Get(td.WorkloadID("ns", "demo", "sa", name))(t)
	}
	rootsFile, at := filepath.Join(dir, "roots.pem"), "127.0.0.1:0"
	startCA := func() (stop func()) {
		served := struct{ served }{signer}
		identity := caservertest.Identity(t, served, id("ca"), pki.IPSAN(net.IPv4(127, 0, 0, 1)))
		server := must.Get(caserver.New(caserver.Options{
			CA: served, TrustDomain: td, Identity: identity, RootsFile: rootsFile, RenewByCertificate: -1,
			Istio: &istioca.Options{Authenticator: authn.Func(func(r *http.Request) (*authn.Caller, error) {
				if name, ok := bearer.Token(r.Header); ok && bearer.Confidential(r) {
					return &authn.Caller{ID: id(name), Method: "test"}, nil
				}
				return nil, errors.New("test: no token")
			})},
		}))(t)
		l := must.Get(net.Listen("tcp", at))(t)
		at = l.Addr().String()
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() { defer close(done); assert.NoError(t, server.Run(ctx, caserver.Listeners{Istio: l})) }()
		stop = func() { cancel(); <-done; _ = identity.Close() }
		t.Cleanup(stop)
		return stop
	}
	stopCA := startCA()
	require.Eventually(t, func() bool { _, err := os.Stat(rootsFile); return err == nil }, within, time.Millisecond)

	// The two sides.
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("X-Forwarded-Client-Cert"))
	}))
	t.Cleanup(app.Close)
	port := func(address string) uint64 {
		_, port, err := net.SplitHostPort(address)
		require.NoError(t, err)
		return must.Get(strconv.ParseUint(port, 10, 16))(t)
	}
	n := sockets(t)
	startPlane := func(s *side) { s.stopPlane = n.serve(t, s.ID.String(), control(s.plane.serve)) }
	newSide := func(name string, byADS, delta bool) *side {
		token := filepath.Join(dir, name+".token")
		require.NoError(t, os.WriteFile(token, []byte(name), 0o600))
		l := n.listen(id(name).String()) // which settles the address
		require.NoError(t, l.Close())
		s := &side{
			agentConfig: agentConfig{
				ID: id(name), Socket: filepath.Join(dir, name+".sock"), CA: "https://" + at, Control: "http://" + l.Addr().String(),
				RootsFile: rootsFile, TokenFile: token,
			},
			plane: newPlane(), byADS: byADS, delta: delta,
		}
		startPlane(s)
		return s
	}
	front, back := newSide("frontend", false, delta), newSide("backend", true, !delta)
	killFront, killBack := startAgent(t, front.agentConfig), startAgent(t, back.agentConfig)

	// Their configuration, and their Envoys.
	var backend string
	configure := func(revision int) {
		back.plane.set(clusters, "app", resource(t, text(1, "app"), message(4, number(1, uint64(4+revision))),
			message(33, text(1, "app"), message(2, message(2, message(1, message(1, address(port(app.Listener.Addr().String())))))))))
		back.plane.set(listeners, "ingress", back.ingress(t, revision))
		if backend != "" {
			front.plane.set(clusters, "backend", front.backend(t, port(backend), uint64(4+revision)))
			front.plane.set(listeners, "egress", front.listener(t, "egress", "backend", revision))
		}
	}
	configure(1)
	server := envoytest.StartConfig(t, bin, dir, "server", back.bootstrap()+admin)
	server.WaitLive(within)
	backend = server.ListenerAddr("ingress", within)
	configure(1)
	client := envoytest.StartConfig(t, bin, dir, "client", front.bootstrap()+admin)
	client.WaitLive(within)
	plain := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	through := startRequests(t, plain, "http://"+client.ListenerAddr("egress", within), "URI=spiffe://example.org/ns/demo/sa/frontend")

	// The other workload, which has its identity from the CA without the network.
	issuer := must.Get(local.New(authority, id("probe")))(t)
	probe := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: id("probe"), CA: issuer}))(t)
	t.Cleanup(func() { _ = probe.Close() })
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: probe, Peers: probe, Allow: spiffe.AllowIDs(back.ID)}))(t)
	tr := must.Get(endpoint.Transport())(t)
	tr.DisableKeepAlives = true
	direct := startRequests(t, &http.Client{Timeout: 10 * time.Second, Transport: tr}, "https://"+backend, "URI=spiffe://example.org/ns/demo/sa/probe")

	// renewed waits until both Envoys use certificates that are issued from now on.
	envoys := map[*side]*envoytest.Envoy{front: client, back: server}
	renewed := func(what string) {
		t.Helper()
		before := map[*side]int{}
		for s := range envoys {
			serials, _ := signer.to(s.ID)
			before[s] = len(serials)
		}
		for s, e := range envoys {
			require.Eventually(t, func() bool {
				serials, _ := signer.to(s.ID)
				leaves, _ := e.Serials()
				return slices.ContainsFunc(serials[before[s]:], func(serial string) bool { return slices.Contains(leaves, serial) })
			}, within, 50*time.Millisecond, "%s: %s", what, s.ID)
		}
	}
	// revised waits until both Envoys have a revision of their listeners.
	revised := func(revision int) {
		t.Helper()
		require.Eventually(t, through.has("egress-revision", revision), within, 20*time.Millisecond)
		require.Eventually(t, through.has("ingress-revision", revision), within, 20*time.Millisecond)
		require.Eventually(t, direct.has("ingress-revision", revision), within, 20*time.Millisecond)
	}
	phase := func(what string) {
		t.Logf("%s %s: %d and %d requests", time.Now().Format("05.000"), what, through.count.Load(), direct.count.Load())
	}
	revised(1)
	phase("begins")
	renewed("the first renewal")

	old := authority.Status().Roots[0]
	must.Get(authority.Rotate(t.Context()))(t)
	phase("root rotation begins")
	configure(2)
	revised(2)

	front.stopPlane()
	back.stopPlane()
	phase("control planes are down")
	renewed("without a control plane")
	configure(3)
	startPlane(front)
	startPlane(back)
	revised(3)
	phase("control planes are back")

	require.Eventually(t, func() bool {
		roots := authority.Status().Roots
		return len(roots) == 1 && roots[0].ID != old.ID
	}, 3*within, 10*time.Millisecond, "the old root retires")
	renewed("from the new root")
	for s, e := range envoys {
		require.Eventually(t, func() bool {
			_, roots := e.Serials()
			return slices.Contains(roots, envoytest.Serial(authority.Status().Roots[0].Certificate.SerialNumber)) &&
				!slices.Contains(roots, envoytest.Serial(old.Certificate.SerialNumber))
		}, within, 50*time.Millisecond, "%s trusts the new root only", s.ID)
	}
	phase("root rotation ends")

	killFront()
	killBack()
	time.Sleep(200 * time.Millisecond) // of requests without an agent
	startAgent(t, front.agentConfig)
	startAgent(t, back.agentConfig)
	renewed("by the new agents") // at once, as an agent starts with a certificate of its own
	configure(4)
	revised(4)
	phase("agents are back")

	stopCA()
	left := func() time.Duration { // of the life of the certificate that ends first
		_, a := signer.to(front.ID)
		_, b := signer.to(back.ID)
		return min(time.Until(a), time.Until(b)) + life
	}
	phase("CA is down")
	time.Sleep(left() - life*9/20) // renewal begins when half of the life is left, at the latest
	phase("half of the life has passed")
	updates, rootUpdates := client.Stat("sds.default.update_success"), client.Stat("sds.ROOTCA.update_success")
	through.stop()
	assert.GreaterOrEqual(t, client.Stat("cluster.backend.ssl.handshake"), int64(through.done), "each request is a handshake")
	assert.Zero(t, client.Stat("cluster.backend.ssl.session_reused"))
	assert.Zero(t, client.Stat("cluster.backend.ssl.fail_verify_error"))
	client.Stop()
	client = envoytest.StartConfig(t, bin, dir, "again", front.bootstrap()+admin)
	client.WaitLive(within)
	envoys[front] = client
	again := startRequests(t, plain, "http://"+client.ListenerAddr("egress", within), "URI=spiffe://example.org/ns/demo/sa/frontend")
	phase("the first Envoy is restarted")
	require.Eventually(t, func() bool { return again.count.Load() > 0 }, left(), 10*time.Millisecond, "there are requests while the CA is down")
	time.Sleep(left() - life*3/10) // not at all if a busy machine took long to restart Envoy
	startCA()
	phase("CA is back")
	renewed("after the outage")
	time.Sleep(500 * time.Millisecond)

	for name, l := range map[string]*requests{"through both": through, "after the restart": again, "to the second": direct} {
		l.stop()
		assert.Empty(t, l.failed, name)
		assert.Greater(t, l.done, 20, name)
	}
	updates += client.Stat("sds.default.update_success")
	rootUpdates += client.Stat("sds.ROOTCA.update_success")
	assert.GreaterOrEqual(t, updates, int64(6))
	assert.GreaterOrEqual(t, rootUpdates, int64(4), "the old root, both, the new one, and the new one after the restart")
	assert.GreaterOrEqual(t, server.Stat("sds.default.update_success"), int64(6))
	assert.GreaterOrEqual(t, server.Stat("sds.ROOTCA.update_success"), int64(3))
	assert.Zero(t, client.Stat("cluster.backend.ssl.fail_verify_error"))
	for s, e := range envoys {
		for _, stat := range []string{
			"cluster_manager.cds.update_rejected", "listener_manager.lds.update_rejected", "sds.default.update_rejected", "sds.ROOTCA.update_rejected",
			"sds.default.init_fetch_timeout", "sds.ROOTCA.init_fetch_timeout",
		} {
			assert.Zero(t, e.Stat(stat), "%s: %s", s.ID, stat)
		}
		assert.Zero(t, s.plane.secrets, "the control plane is not asked for secrets")
		assert.GreaterOrEqual(t, s.plane.streams, 3, s.ID)
	}
	t.Logf("%d, %d and %d requests, each with a handshake; certificates updated %d and %d times, roots %d and %d times", through.done, again.done, direct.done,
		updates, server.Stat("sds.default.update_success"), rootUpdates, server.Stat("sds.ROOTCA.update_success"))
}
