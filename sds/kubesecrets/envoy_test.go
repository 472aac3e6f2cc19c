package kubesecrets_test

import (
	"context"
	cryptotls "crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// gatewayBootstrap is an Envoy with a listener that ends mutual TLS, with a certificate and roots of Secrets.
const gatewayBootstrap = `
node: {id: gateway, cluster: svidkit}
static_resources:
  clusters:
  - name: sds
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: sds
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./s"}}}}]}]
  listeners:
  - name: gateway
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: "kubernetes://web"
              sds_config: &sds
                resource_api_version: V3
                initial_fetch_timeout: 10s
                api_config_source:
                  api_type: API_TYPE
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: sds}}]
            validation_context_sds_secret_config: {name: "kubernetes://gw/web-cacert", sds_config: *sds}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, direct_response: {status: 200, body: {inline_string: "here"}}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`

// TestEnvoyGateway has Envoys that end mutual TLS for clients, each request with a handshake, while the certificate
// in the Secret is replaced, and so are the roots, broken, and deleted.
func TestEnvoyGateway(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-8.6-1", "IST-8.6-2")
	envoytest.Binary(t)
	for _, api := range []string{"GRPC", "DELTA_GRPC"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			testEnvoyGateway(t, api)
		})
	}
}

func testEnvoyGateway(t *testing.T, api string) {
	dir := must.Get(os.MkdirTemp("", "gw"))(t) // t.TempDir is too long for a Unix socket
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	servers, clients := spiffetest.NewCA(t, "servers.test"), spiffetest.NewCA(t, "clients.test")
	w := &world{t: t, api: kubetest.Start(t)}
	var current *spiffe.SVID
	renew := func() data {
		current = servers.SVID("/gateway", func(c *x509.Certificate) { c.DNSNames = []string{"gateway.test"} })
		return with(tls(t, current), data{"ca.crt": clients.Bundle().MarshalPEM()})
	}
	w.start(kubesecrets.Config{})
	handler := must.Get(sds.NewHandler(w.src, nil))(t)
	t.Cleanup(func() { _ = handler.Close() })
	server := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: handler}
	require.NoError(t, server.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = server.Run(ctx) })

	envoy := envoytest.Start(t, dir, "gateway", strings.ReplaceAll(gatewayBootstrap, "API_TYPE", api))
	time.Sleep(200 * time.Millisecond)
	put(w.api, "gw/web", renew()) // which comes after the gateway has asked for it
	envoy.WaitLive(20 * time.Second)
	address := envoy.ListenerAddr("gateway", 20*time.Second)

	pool := x509.NewCertPool()
	pool.AddCert(servers.Root())
	certs, key, err := clients.SVID("/client").MarshalPEM()
	require.NoError(t, err)
	certificate := must.Get(cryptotls.X509KeyPair(certs, key))(t)
	ask := func() (serial string, err error) {
		transport := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &cryptotls.Config{
			RootCAs: pool, ServerName: "gateway.test", Certificates: []cryptotls.Certificate{certificate}, MinVersion: cryptotls.VersionTLS12,
		}}
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport, Timeout: 10 * time.Second}).Get("https://" + address)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err == nil && string(body) != "here" {
			err = fmt.Errorf("%d: %s", resp.StatusCode, body)
		}
		return envoytest.Serial(resp.TLS.PeerCertificates[0].SerialNumber), err
	}
	served := func() {
		t.Helper()
		require.Eventually(t, func() bool {
			serial, err := ask()
			return err == nil && serial == envoytest.Serial(current.Leaf().SerialNumber)
		}, time.Minute, 20*time.Millisecond)
	}
	served()

	var done atomic.Int64
	loading, stop := context.WithCancel(ctx)
	var load sync.WaitGroup
	load.Go(func() {
		for ; loading.Err() == nil; time.Sleep(5 * time.Millisecond) {
			if _, err := ask(); assert.NoError(t, err) {
				done.Add(1)
			}
		}
	})
	for range 5 {
		put(w.api, "gw/web", renew())
		served()
	}
	bad := with(renew(), data{"tls.key": tls(t, servers.SVID("/other"))["tls.key"]})
	last := current
	put(w.api, "gw/web", bad)
	require.Eventually(t, func() bool { return w.src.SecretStatus("gw", "web").PairErr != nil }, time.Minute, time.Millisecond)
	time.Sleep(300 * time.Millisecond)
	serial := must.Get(ask())(t)
	assert.NotEqual(t, envoytest.Serial(last.Leaf().SerialNumber), serial, "the certificate whose key is another one")
	put(w.api, "gw/web", renew())
	served()
	w.api.Remove(path("gw/web"))
	require.Eventually(t, func() bool { return w.src.Status().Secrets == 0 }, time.Minute, time.Millisecond)
	time.Sleep(300 * time.Millisecond)
	served()          // Envoy keeps what it has
	clients.Prepare() // a second root, in a Secret of its own
	put(w.api, "gw/web", renew())
	put(w.api, "gw/web-cacert", data{"cacert": clients.Bundle().MarshalPEM()})
	served()
	require.Eventually(t, func() bool {
		_, roots := envoy.Serials()
		return slices.Contains(roots, envoytest.Serial(clients.Root().SerialNumber)) && len(roots) == 2
	}, time.Minute, 20*time.Millisecond)
	stop()
	load.Wait()
	assert.Greater(t, done.Load(), int64(20))
	for _, name := range []string{"sds.kubernetes_web", "sds.kubernetes_gw/web-cacert"} {
		assert.Positive(t, envoy.Stat(name+".update_success"), name)
		assert.Zero(t, envoy.Stat(name+".update_rejected"), name)
	}
	t.Logf("%d requests, each with a handshake", done.Load())
}
