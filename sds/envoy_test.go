package sds_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// The bootstraps of both Envoys. Certificates and trust come from ./NAME.sock and from nowhere else.
const (
	sdsCluster = `
  - name: sds
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: sds
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./SOCKET"}}}}]}]
`
	// Every request makes a new connection to the other Envoy, so that every request proves a
	// handshake.
	clientBootstrap = `
node: {id: frontend, cluster: svidkit}
static_resources:
  clusters:` + sdsCluster + `
  - name: backend
    type: STATIC
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        common_http_protocol_options: {max_requests_per_connection: 1}
        explicit_http_config: {http_protocol_options: {}}
    load_assignment:
      cluster_name: backend
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: BACKEND}}}}]}]
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        max_session_keys: 0
        common_tls_context:
          tls_certificate_sds_secret_configs:
          - name: default
            sds_config: &sds
              resource_api_version: V3
              initial_fetch_timeout: 10s
              api_config_source:
                api_type: API_TYPE
                transport_api_version: V3
                set_node_on_first_message_only: true
                grpc_services: [{envoy_grpc: {cluster_name: sds}}]
          combined_validation_context:
            default_validation_context:
              match_typed_subject_alt_names:
              - san_type: URI
                matcher: {exact: "spiffe://example.org/ns/demo/sa/backend"}
            validation_context_sds_secret_config: {name: ROOTCA, sds_config: *sds}
  listeners:
  - name: egress
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: egress
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: backend}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`
	serverBootstrap = `
node: {id: backend, cluster: svidkit}
static_resources:
  clusters:` + sdsCluster + `
  - name: app
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: app
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: BACKEND}}}}]}]
  listeners:
  - name: ingress
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          disable_stateless_session_resumption: true
          disable_stateful_session_resumption: true
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: default
              sds_config: &sds
                resource_api_version: V3
                initial_fetch_timeout: 10s
                api_config_source:
                  api_type: API_TYPE
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: sds}}]
            combined_validation_context:
              default_validation_context:
                match_typed_subject_alt_names:
                - san_type: URI
                  matcher: {exact: "spiffe://example.org/ns/demo/sa/frontend"}
              validation_context_sds_secret_config: {name: ROOTCA, sds_config: *sds}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          forward_client_cert_details: SANITIZE_SET
          set_current_client_cert_details: {uri: true}
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: app}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`
	// A listener that asks the same SDS server for a name that does not exist.
	unknownListener = `
  - name: unknown
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: no-such-secret
              sds_config:
                resource_api_version: V3
                initial_fetch_timeout: 1s
                api_config_source:
                  api_type: API_TYPE
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: sds}}]
      filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: unknown
          cluster: sds
`
)

// workload is one side of the hop: its identity, and the socket that its Envoy reads it from.
type workload struct {
	manager *secretcache.Manager
	socket  string
}

// TestEnvoy sends requests through two Envoys that speak mTLS to each other, one fed by SotW, the
// other by delta, while leaves and the root rotate.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ client, server string }{{"GRPC", "DELTA_GRPC"}, {"DELTA_GRPC", "GRPC"}} {
		t.Run("client "+c.client+" server "+c.server, func(t *testing.T) {
			t.Parallel()
			testEnvoy(t, c.client, c.server)
		})
	}
}

func testEnvoy(t *testing.T, clientAPI, serverAPI string) {
	dir := envoytest.Dir(t)
	run := background(t)

	td := spiffe.MustParseTrustDomain("example.org")
	authority := must.Get(ca.New(ca.Config{TrustDomain: td, DefaultTTL: 8 * time.Second, MaxTTL: 8 * time.Second,
		Backdate: time.Second, Rotation: ca.Rotation{Propagation: 3 * time.Second}}))(t)
	run("ca", authority.Run)
	start := func(name string) workload {
		id := must.Get(td.WorkloadID("ns", "demo", "sa", name))(t)
		m := must.Get(secretcache.New(secretcache.Config{ID: id, CA: must.Get(local.New(authority, id))(t)}))(t)
		run(name, m.Run)
		h := must.Get(sds.NewHandler(m, nil))(t)
		socket := filepath.Join(dir, name+".sock")
		s := &unixsocket.Server{Path: socket, Handler: h}
		run(name+" SDS", s.Run)
		return workload{m, filepath.Base(socket)}
	}
	frontend, backend := start("frontend"), start("backend")

	server, client, url := startMesh(t, dir,
		socketOf(serverBootstrap+unknownListener, backend.socket, serverAPI), socketOf(clientBootstrap, frontend.socket, clientAPI))
	load := startLoad(t, url)
	sees := func(e *envoytest.Envoy, m *secretcache.Manager) func() bool {
		return func() bool {
			svid, err := m.SVID()
			if err != nil {
				return false
			}
			leaves, _ := e.Serials()
			return slices.Contains(leaves, envoytest.Serial(svid.Leaf().SerialNumber))
		}
	}
	require.Eventually(t, sees(client, frontend.manager), time.Minute, 50*time.Millisecond)
	require.Eventually(t, sees(server, backend.manager), time.Minute, 50*time.Millisecond)

	// A leaf rotation.
	firstFront := must.Get(frontend.manager.SVID())(t)
	firstBack := must.Get(backend.manager.SVID())(t)
	require.Eventually(t, func() bool {
		f, ferr := frontend.manager.SVID()
		b, berr := backend.manager.SVID()
		return ferr == nil && berr == nil && f != firstFront && b != firstBack &&
			sees(client, frontend.manager)() && sees(server, backend.manager)()
	}, time.Minute, 50*time.Millisecond, "both leaves rotate and /certs shows the new serials")

	// A root rotation, all four steps.
	before := authority.Status().Roots
	require.Len(t, before, 1)
	must.Get(authority.Rotate(t.Context()))(t)
	require.Eventually(t, func() bool {
		roots := authority.Status().Roots
		return len(roots) == 1 && roots[0].ID != before[0].ID
	}, 60*time.Second, 50*time.Millisecond, "the old root retires")
	newRoot := envoytest.Serial(authority.Status().Roots[0].Certificate.SerialNumber)
	for name, e := range map[string]*envoytest.Envoy{"client": client, "server": server} {
		require.Eventually(t, func() bool {
			_, roots := e.Serials()
			return slices.Contains(roots, newRoot) && !slices.Contains(roots, envoytest.Serial(before[0].Certificate.SerialNumber))
		}, time.Minute, 50*time.Millisecond, "%s trusts the new root only", name)
	}
	require.Eventually(t, sees(client, frontend.manager), time.Minute, 50*time.Millisecond)
	require.Eventually(t, sees(server, backend.manager), time.Minute, 50*time.Millisecond)

	done, failed := load.stop()
	assert.Empty(t, failed)
	assert.Greater(t, done, 100)
	assert.GreaterOrEqual(t, client.Stat("cluster.backend.ssl.handshake"), int64(done), "each request is a handshake")
	assert.Zero(t, client.Stat("cluster.backend.ssl.fail_verify_error"))
	for name, e := range map[string]*envoytest.Envoy{"client": client, "server": server} {
		for _, secret := range []string{"default", "ROOTCA"} {
			assert.GreaterOrEqual(t, e.Stat("sds."+secret+".update_success"), int64(3), "%s: %s", name, secret)
			assert.Zero(t, e.Stat("sds."+secret+".update_rejected"), "%s: %s", name, secret)
			assert.Zero(t, e.Stat("sds."+secret+".init_fetch_timeout"), "%s: %s", name, secret)
		}
	}
	assert.Positive(t, server.Stat("sds.no-such-secret.update_attempt"), "the unknown name was asked for")
	assert.Zero(t, server.Stat("sds.no-such-secret.update_rejected"))
	t.Logf("%d requests, each with a handshake; default updated %d and %d times", done,
		client.Stat("sds.default.update_success"), server.Stat("sds.default.update_success"))
}

// socketOf has a bootstrap take its secrets from a socket.
func socketOf(bootstrap, socket, api string) string {
	return strings.NewReplacer("SOCKET", socket, "API_TYPE", api).Replace(bootstrap)
}

// startMesh starts two Envoys, of which the first forwards to an application that tells who its client is, and the second
// to the first, and returns the URL of the second.
func startMesh(t *testing.T, dir, serverBootstrap, clientBootstrap string) (server, client *envoytest.Envoy, url string) {
	t.Helper()
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("X-Forwarded-Client-Cert"))
	}))
	t.Cleanup(app.Close)
	start := func(name, bootstrap, backend string) *envoytest.Envoy {
		_, port, err := net.SplitHostPort(backend)
		require.NoError(t, err)
		e := envoytest.Start(t, dir, name, strings.ReplaceAll(bootstrap, "BACKEND", port))
		e.WaitLive(20 * time.Second)
		return e
	}
	server = start("server", serverBootstrap, app.Listener.Addr().String())
	client = start("client", clientBootstrap, server.ListenerAddr("ingress", 20*time.Second))
	return server, client, "http://" + client.ListenerAddr("egress", 20*time.Second)
}

// load is a stream of requests through both Envoys.
type load struct {
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	done     atomic.Int64
	requests sync.RWMutex // held for reading by each request
	mu       sync.Mutex
	failed   []string
}

// wait waits for the requests under way, whose handshakes trust what Envoy trusted when they began.
func (l *load) wait() {
	l.requests.Lock()
	defer l.requests.Unlock()
}

func startLoad(t *testing.T, url string) *load {
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{cancel: cancel}
	t.Cleanup(func() { l.stop() })
	hc := &http.Client{Transport: &http.Transport{}, Timeout: 10 * time.Second}
	for range 2 {
		l.wg.Go(func() {
			for ctx.Err() == nil {
				l.requests.RLock()
				err := get(hc, url)
				l.requests.RUnlock()
				if err != nil {
					l.mu.Lock()
					l.failed = append(l.failed, time.Now().Format("15:04:05.000 ")+err.Error())
					l.mu.Unlock()
				} else {
					l.done.Add(1)
				}
				select {
				case <-ctx.Done():
				case <-time.After(10 * time.Millisecond):
				}
			}
		})
	}
	return l
}

// stop ends the load after the requests under way and returns what became of all.
func (l *load) stop() (done int, failed []string) {
	l.cancel()
	l.wg.Wait()
	return int(l.done.Load()), l.failed
}

// get is not cut short when the load ends: a request that was begun has to succeed.
func get(hc *http.Client, url string) error {
	resp, err := hc.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(body), "URI=spiffe://example.org/ns/demo/sa/frontend") {
		return fmt.Errorf("status %d: %s", resp.StatusCode, body)
	}
	return nil
}

// background returns a function that runs a service until the test ends and then waits for it.
func background(t *testing.T) func(name string, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	return func(name string, f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); ctx.Err() == nil {
				t.Errorf("%s ended: %v", name, err)
			}
		})
	}
}
