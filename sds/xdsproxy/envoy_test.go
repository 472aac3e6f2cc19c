package xdsproxy_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
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

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const bootstrap = `
node: {id: sidecar, cluster: svidkit}
dynamic_resources:
  ads_config:
    api_type: API_TYPE
    transport_api_version: V3
    set_node_on_first_message_only: true
    grpc_services: [{envoy_grpc: {cluster_name: xds}}]
  lds_config: {resource_api_version: V3, ads: {}}
  cds_config: {resource_api_version: V3, ads: {}}
static_resources:
  clusters:
  - name: xds
    type: STATIC
    connect_timeout: 1s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
    load_assignment:
      cluster_name: xds
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./xds.sock"}}}}]}]
`

// Messages of Envoy's configuration, by the numbers of their fields.
type (
	w     = *protofield.Writer
	field func(w)
)

func text(n protofield.Number, s string) field { return func(w w) { w.AddText(n, s) } }
func number(n protofield.Number, v uint64) field {
	return func(w w) { w.AddVarint(n, v) }
}
func message(n protofield.Number, fields ...field) field {
	return func(w w) {
		w.Message(n, func(w *protofield.Writer) {
			for _, f := range fields {
				f(w)
			}
		})
	}
}
func extension(n protofield.Number, typeURL string, fields ...field) field {
	return message(n, text(1, "type.googleapis.com/envoy.extensions."+typeURL), message(2, fields...))
}
func resource(t testing.TB, fields ...field) []byte {
	b := must.Get(protofield.Write(func(w *protofield.Writer) {
		for _, f := range fields {
			f(w)
		}
	}))(t)
	return b
}
func address(port uint64) field {
	return message(1, text(2, "127.0.0.1"), number(3, port)) // socket_address
}

// tlsContext is a CommonTlsContext whose secrets come by ADS.
func tlsContext() field {
	ads := message(2, message(3), number(6, 2)) // sds_config: {ads: {}, resource_api_version: V3}
	return message(1, message(6, text(1, "default"), ads), message(7, text(1, "ROOTCA"), ads))
}

func listener(t testing.TB) []byte {
	route := message(3, message(1, text(1, "/")), message(2, text(1, "backend")))
	return resource(t, text(1, "ingress"), message(2, address(0)), message(3,
		message(3, text(1, "hcm"), extension(4, "filters.network.http_connection_manager.v3.HttpConnectionManager",
			text(2, "ingress"),
			message(4, text(1, "r"), message(2, text(1, "all"), text(2, "*"), route)),
			message(5, text(1, "router"), extension(4, "filters.http.router.v3.Router")))),
		message(6, text(1, "tls"), extension(3, "transport_sockets.tls.v3.DownstreamTlsContext", tlsContext(), message(2, number(1, 1))))))
}

func cluster(t testing.TB, port, timeout uint64) []byte {
	return resource(t, text(1, "backend"), message(4, number(1, timeout)),
		message(33, text(1, "backend"), message(2, message(2, message(1, message(1, address(port)))))),
		message(24, text(1, "tls"), extension(3, "transport_sockets.tls.v3.UpstreamTlsContext", tlsContext())))
}

// A real Envoy has everything by ADS from our socket: a listener and a cluster from a control plane, and both with
// mTLS whose secrets come from us. The control plane is restarted, its configuration and the certificates change, and
// no request fails.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.4-1")
	for _, api := range []string{"GRPC", "DELTA_GRPC"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			testEnvoy(t, api)
		})
	}
}

func testEnvoy(t *testing.T, api string) {
	envoytest.Binary(t)
	const listeners = "type.googleapis.com/envoy.config.listener.v3.Listener"
	ca := spiffetest.NewCA(t, "example.org")
	pool := x509.NewCertPool()
	for c := range ca.Bundle().X509Authorities() {
		pool.AddCert(c)
	}
	serial := func(m *tls.ConnectionState) *big.Int { return m.PeerCertificates[0].SerialNumber }
	var seenByApp sync.Map
	app := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seenByApp.Store(serial(r.TLS).String(), true)
		_, _ = io.WriteString(w, "hello")
	}))
	app.TLS = &tls.Config{Certificates: []tls.Certificate{*ca.SVID("/app").TLSCertificate()}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	app.StartTLS()
	t.Cleanup(app.Close)
	port := must.Get(strconv.ParseUint(must.Get(url.Parse(app.URL))(t).Port(), 10, 16))(t)

	src := new(secretSource)
	rotate := func() string {
		svid := ca.SVID("/web")
		src.set("default", must.Get(pki.NewKeyPairSecret("default", svid))(t))
		return svid.Leaf().SerialNumber.String()
	}
	first := rotate()
	src.set("ROOTCA", must.Get(pki.NewTrustSecret("ROOTCA", ca.Bundle()))(t))

	n, p := sockets(t), newPlane()
	p.set(listeners, "ingress", listener(t))
	p.set(clusters, "backend", cluster(t, port, 5))
	stopPlane := n.serve(t, "control", control(p.serve))
	h := newProxy(t, n, secrets(t, src, nil))
	dir := must.Get(os.MkdirTemp("", "xds"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	server := &unixsocket.Server{Path: filepath.Join(dir, "xds.sock"), Handler: h}
	require.NoError(t, server.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })

	e := envoytest.Start(t, dir, "envoy", strings.ReplaceAll(bootstrap, "API_TYPE", api))
	e.WaitLive(patient)
	target := "https://" + e.ListenerAddr("ingress", patient)

	// Each request is a handshake.
	var seen sync.Map
	hc := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{
		Certificates: []tls.Certificate{*ca.SVID("/app").TLSCertificate()}, InsecureSkipVerify: true, // there is no DNS name
		VerifyConnection: func(c tls.ConnectionState) error {
			seen.Store(serial(&c).String(), true)
			_, err := c.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: pool})
			return err
		},
	}}}
	get := func() error {
		resp, err := hc.Get(target)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "hello" {
			return fmt.Errorf("%d %s %w", resp.StatusCode, body, err)
		}
		return nil
	}
	require.Eventually(t, func() bool { return get() == nil }, patient, 20*time.Millisecond)
	loaded := make(chan struct{})
	var ok atomic.Int64
	var failures []string
	var load sync.WaitGroup
	load.Go(func() {
		for {
			select {
			case <-loaded:
				return
			case <-time.After(10 * time.Millisecond):
			}
			if err := get(); err != nil {
				failures = append(failures, time.Now().Format("15:04:05.000 ")+err.Error())
			} else {
				ok.Add(1)
			}
		}
	})
	stopLoad := sync.OnceFunc(func() { close(loaded); load.Wait() })
	t.Cleanup(stopLoad)
	has := func(serial string) func() bool {
		return func() bool { _, ok := seen.Load(serial); return ok }
	}
	require.Eventually(t, has(first), patient, 20*time.Millisecond)

	debug := getDebug(h, "/debug/syncz")
	require.Equal(t, http.StatusOK, debug.Code, "%s", debug.Body)
	require.Contains(t, debug.Body.String(), `"typeUrl": "istio.io/debug/syncz"`)

	updates := func() int64 { return e.Stat("cluster_manager.cds.update_success") }
	before := updates()
	p.set(clusters, "backend", cluster(t, port, 6)) // under load
	require.Eventually(t, func() bool { return updates() > before }, patient, 20*time.Millisecond)
	second := rotate()
	require.Eventually(t, has(second), patient, 20*time.Millisecond)

	stopPlane() // cuts the connection
	third := rotate()
	require.Eventually(t, has(third), patient, 20*time.Millisecond, "a certificate is rotated without a control plane")
	time.Sleep(3 * time.Second) // Envoy connects again, and is served secrets
	fourth := rotate()
	require.Eventually(t, has(fourth), patient, 20*time.Millisecond, "and another, on a new stream")

	p.set(clusters, "backend", cluster(t, port, 7))
	before = updates()
	n.serve(t, "control", control(p.serve))
	require.Eventually(t, func() bool { return updates() > before }, 2*patient, 10*time.Millisecond, "the control plane is back")
	require.Eventually(t, func() bool { return strings.Contains(e.Admin("/config_dump"), `"connect_timeout": "7s"`) }, 2*patient, 10*time.Millisecond)
	p.restart(false) // ends the streams with a status
	fifth := rotate()
	require.Eventually(t, has(fifth), patient, 20*time.Millisecond)
	stopLoad()
	assert.Empty(t, failures)
	assert.Greater(t, ok.Load(), int64(20)) // a busy machine has time for no more
	assert.Zero(t, p.secrets, "the control plane is not asked for secrets")
	leaves, _ := e.Serials()
	n5, _ := new(big.Int).SetString(fifth, 10)
	assert.True(t, slices.Contains(leaves, envoytest.Serial(n5)))
	for _, stat := range []string{"cluster_manager.cds.update_rejected", "listener_manager.lds.update_rejected", "sds.default.update_rejected"} {
		assert.Zero(t, e.Stat(stat), stat)
	}
	t.Logf("%d requests, each with a handshake; %d streams of the control plane", ok.Load(), p.streams)
}
