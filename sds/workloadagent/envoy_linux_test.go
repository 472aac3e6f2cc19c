package workloadagent_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// bootstrap is that of an Envoy with nothing of its own: SECRET and the roots come from the socket ./s.
const bootstrap = `
node: {id: web, cluster: machine}
static_resources:
  clusters:
  - name: agent
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: agent
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./s"}}}}]}]
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
            - name: SECRET
              sds_config: &sds
                resource_api_version: V3
                api_config_source:
                  api_type: GRPC
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: agent}}]
            validation_context_sds_secret_config: {name: ROOTCA, sds_config: *sds}
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: ingress
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, direct_response: {status: 200}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`

// TestEnvoy has an Envoy that takes the first identity from the agent of the machine, and one that takes another one by its hint,
// answer a workload that has its identity from the same socket. Certificates rotate, and a new version of the file gives the
// first Envoy the other identity.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	envoytest.Binary(t)
	const inside = `"hint": "inside"`
	p := newPlace(t, me(id("/web"), id("/admin", inside))).serve(4 * time.Second)
	src := must.Get(workloadapi.Start(t.Context(), workloadapi.Config{Client: p.client()}))(t)
	t.Cleanup(func() { _ = src.Close() })
	endpoint, err := spiffetls.New(spiffetls.Config{Self: src, Peers: src, Allow: spiffe.AllowMembersOf(exampleOrg)})
	require.NoError(t, err)
	transport := must.Get(endpoint.Transport())(t)
	transport.DisableKeepAlives = true // each request is a handshake
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	start := func(secret string) (server func() (id, serial string)) {
		e := envoytest.Start(t, p.dir, secret, strings.ReplaceAll(bootstrap, "SECRET", secret))
		e.WaitLive(20 * time.Second)
		address := "https://" + e.ListenerAddr("ingress", 20*time.Second)
		return func() (id, serial string) {
			resp := must.Get(client.Get(address))(t, secret)
			_ = resp.Body.Close()
			leaf := resp.TLS.PeerCertificates[0]
			return leaf.URIs[0].Path, leaf.SerialNumber.String()
		}
	}
	servers := map[string]func() (string, string){"/web": start("default"), "/admin": start("inside")}
	for path, server := range servers {
		serials := map[string]bool{}
		require.Eventually(t, func() bool {
			id, serial := server()
			require.Equal(t, path, id)
			serials[serial] = true
			return len(serials) == 3
		}, time.Minute, 20*time.Millisecond, path)
	}
	p.write(me(id("/admin", inside), id("/web")))
	require.Eventually(t, func() bool { id, _ := servers["/web"](); return id == "/admin" }, passing, often, "the first identity is another one")
}
