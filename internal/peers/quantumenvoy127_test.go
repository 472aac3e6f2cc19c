//go:build go1.27

package peers_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// Two listeners: "in" asks for certificates of clients; "out" is the way to the server at BACKEND, which
// is called with the certificate of Envoy. CONTEXT is ROOTCA, or ALL for Envoy's SPIFFE validator, and PARAMS are for TLS.
const quantumBootstrap = `
node: {id: quantum, cluster: svidkit}
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
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./s.sock"}}}}]}]
  - name: backend
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: backend
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: BACKEND}}}}]}]
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: &tls
          tls_params: {PARAMStls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3}
          tls_certificate_sds_secret_configs:
          - name: default
            sds_config: &sds
              resource_api_version: V3
              initial_fetch_timeout: 2s
              api_config_source:
                api_type: DELTA_GRPC
                transport_api_version: V3
                grpc_services: [{envoy_grpc: {cluster_name: sds}}]
          validation_context_sds_secret_config: {name: CONTEXT, sds_config: *sds}
  listeners:
  - name: in
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context: *tls
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, direct_response: {status: 200, body: {inline_string: hello}}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  - name: out
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: out
          cluster: backend
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
`

// offersMLDSA is for tls_params of Envoy: the usual signature algorithms, and those of ML-DSA, which it does not offer by
// itself.
const offersMLDSA = "signature_algorithms: [mldsa44, mldsa65, ecdsa_secp256r1_sha256, rsa_pss_rsae_sha256], "

// quantumEnvoy is an Envoy that has its identity from a source and talks both ways to endpoints of our ID.
type quantumEnvoy struct {
	*envoytest.Envoy
	t       *testing.T
	bundle  *spiffe.Bundle
	src     settable
	log     logtest.Buffer // of the server of SDS
	in, out string
	backend net.Listener
}

func newQuantumEnvoy(t *testing.T, bin, validation, params string, bundle *spiffe.Bundle, self *spiffe.SVID) *quantumEnvoy {
	dir := envoytest.Dir(t)
	e := &quantumEnvoy{t: t, bundle: bundle, backend: must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)}
	t.Cleanup(func() { _ = e.backend.Close() })
	e.set(self)
	h := must.Get(sds.NewHandler(sdssource.FromIdentity(&e.src), &sds.Options{Logger: e.log.Logger()}))(t)
	t.Cleanup(func() { _ = h.Close() })
	background(t, func(ctx context.Context) {
		_ = (&unixsocket.Server{Path: filepath.Join(dir, "s.sock"), Handler: h}).Run(ctx)
	})
	_, port := must.Get2(net.SplitHostPort(e.backend.Addr().String()))(t)
	config := strings.NewReplacer("BACKEND", port, "CONTEXT", validation, "PARAMS", params).Replace(quantumBootstrap)
	e.Envoy = envoytest.StartConfig(t, bin, dir, "quantum", config)
	t.Log("Envoy ", envoytest.Version(t, bin))
	e.WaitLive(passing)
	e.in, e.out = e.ListenerAddr("in", passing), e.ListenerAddr("out", passing)
	return e
}

// set gives Envoy an identity.
func (e *quantumEnvoy) set(self *spiffe.SVID) {
	e.src.set(self, must.Get(spiffe.NewBundleSet(e.bundle))(e.t))
}

// call has an endpoint call Envoy, and be called by it. It returns the kinds of keys that Envoy has presented.
func (e *quantumEnvoy) call(self *spiffe.SVID) (asServer, asClient string, serverErr, clientErr error) {
	e.t.Helper()
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: e.bundle, Allow: spiffe.AllowIDs(theirID),
		Algorithms: spiffe.AnyAlgorithm()}))(e.t)
	transport := must.Get(endpoint.Transport())(e.t)
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport, Timeout: passing}).Get("https://" + e.in)
	if err == nil {
		asServer = resp.TLS.PeerCertificates[0].PublicKeyAlgorithm.String()
		assert.Equal(e.t, "hello", string(must.Get(io.ReadAll(resp.Body))(e.t)))
		_ = resp.Body.Close() // all of it is read
	}
	done := make(chan outcomeTLS, 1)
	require.NoError(e.t, e.backend.(*net.TCPListener).SetDeadline(time.Now().Add(passing)))
	go func() { done <- greet(e.t.Context(), endpoint, e.backend) }()
	conn := must.Get(net.Dial("tcp", e.out))(e.t)
	defer conn.Close()
	text, _ := io.ReadAll(conn) // of a connection that Envoy may cut
	o := <-done
	if o.err == nil {
		asClient = o.state.PeerCertificates[0].PublicKeyAlgorithm.String()
		assert.Equal(e.t, theirID.String(), string(text))
	}
	return asServer, asClient, err, o.err
}

func (e *quantumEnvoy) takes(what, presents string, self *spiffe.SVID) {
	e.t.Helper()
	asServer, asClient, serverErr, clientErr := e.call(self)
	require.NoError(e.t, serverErr, what)
	require.NoError(e.t, clientErr, what)
	assert.Equal(e.t, presents, asServer, what)
	assert.Equal(e.t, presents, asClient, what)
}

func (e *quantumEnvoy) refuses(what string, self *spiffe.SVID) {
	e.t.Helper()
	_, _, serverErr, clientErr := e.call(self)
	e.t.Logf("%s: Envoy as a server: %v; as a client: %v", what, serverErr, clientErr)
	for _, err := range []error{serverErr, clientErr} {
		if assert.Error(e.t, err, what) {
			assert.Regexp(e.t, "remote error: tls: |doesn't support any of the certificate's signature algorithms", err.Error(), what)
		}
	}
}

// TestQuantumEnvoy has Envoy take a bundle with a root of each kind, and a key of ML-DSA. It is called by workloads with
// one certificate and with both. Those of ML-DSA it verifies only where its configuration offers that.
func TestQuantumEnvoy(t *testing.T) {
	t.Parallel()
	const classical, ml = "ecdsa-p256", "ml-dsa-65"
	bin := envoytest.Binary(t)
	for _, params := range []string{"", offersMLDSA} {
		for _, validation := range []string{"ROOTCA", "ALL"} {
			t.Run(validation+"/"+map[string]string{"": "as it is", offersMLDSA: "offers ML-DSA"}[params], func(t *testing.T) {
				t.Parallel()
				d, strangers := newQuantumDomain(t, classical, ml), newQuantumDomain(t, classical, ml)
				ours, quantum := d.svid(t, classical, classical, ourID), d.svid(t, ml, ml, ourID)
				both := must.Get(ours.WithAlternative(d.svid(t, ml, "ml-dsa-44", ourID)))(t)
				e := newQuantumEnvoy(t, bin, validation, params, bundleOf(t, d.roots(ml, classical)...), d.svid(t, classical, classical, theirID))
				all := func(presents string) {
					t.Helper()
					e.takes("classical", presents, ours)
					e.takes("both", presents, both)
					e.refuses("of another root", strangers.svid(t, classical, classical, ourID))
					if params == "" {
						e.refuses("ML-DSA alone", quantum)
						return
					}
					e.takes("ML-DSA alone", presents, quantum)
					e.refuses("ML-DSA of another root", strangers.svid(t, ml, ml, ourID))
					e.refuses("a leaf that was changed", tampered(t, quantum, 0))
				}
				all("ECDSA")
				for i, kind := range []string{ml, classical} {
					e.set(d.svid(t, kind, kind, theirID))
					require.Eventually(t, func() bool { return e.Stat("sds.default.update_success") >= int64(i+2) }, passing, often)
					require.Eventually(t, func() bool {
						asServer, asClient, _, _ := e.call(ours)
						return asServer == asClient && (asServer == "ECDSA") == (kind == classical)
					}, passing, often)
					all(map[string]string{ml: "ML-DSA", classical: "ECDSA"}[kind])
				}
				for _, name := range []string{"default", validation} {
					assert.Zero(t, e.Stat("sds."+name+".update_rejected"), name)
				}
				assert.NotContains(t, e.log.String(), "level=WARN")
			})
		}
	}
}

// TestQuantumOldEnvoy has older Envoys, which do not have ML-DSA at all, take the bundle and refuse the key, which the
// log of the server says. Each keeps the certificate that it has.
func TestQuantumOldEnvoy(t *testing.T) {
	t.Parallel()
	const classical, ml = "ecdsa-p256", "ml-dsa-65"
	old := envoytest.Old(t)
	if len(old) == 0 {
		t.Skip("no older Envoys: set ENVOY_OLD_PATHS")
	}
	for _, bin := range old {
		for _, validation := range []string{"ROOTCA", "ALL"} {
			t.Run(envoytest.Version(t, bin)+"/"+validation, func(t *testing.T) {
				t.Parallel()
				d := newQuantumDomain(t, classical, ml)
				ours := d.svid(t, classical, classical, ourID)
				both := must.Get(ours.WithAlternative(d.svid(t, ml, "ml-dsa-44", ourID)))(t)
				e := newQuantumEnvoy(t, bin, validation, "", bundleOf(t, d.roots(ml, classical)...), d.svid(t, classical, classical, theirID))
				e.takes("classical", "ECDSA", ours)
				e.takes("both", "ECDSA", both)
				e.refuses("ML-DSA alone", d.svid(t, ml, ml, ourID))
				assert.NotContains(t, e.log.String(), "level=WARN")
				e.set(d.svid(t, ml, ml, theirID))
				require.Eventually(t, func() bool { return strings.Contains(e.log.String(), "level=WARN") }, passing, often)
				t.Log(e.log.String())
				assert.Regexp(t, `level=WARN msg="sds: client rejected a response" .* node=quantum names=\[default\] .*`+
					`message="Failed to load certificate chain from <inline>"`, e.log.String())
				e.takes("classical, after a key of ML-DSA", "ECDSA", ours)
				e.set(d.svid(t, classical, classical, theirID))
				require.Eventually(t, func() bool { return e.Stat("sds.default.update_success") >= 2 }, passing, often)
				e.takes("classical, and its own is renewed", "ECDSA", both)
			})
		}
	}
}
