package sds_test

import (
	"crypto/tls"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// One listener, whose certificate is the secret "db".
const refusedBootstrap = `
node: {id: early, cluster: svidkit}
static_resources:
  clusters:` + sdsCluster + `
  listeners:
  - name: db
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          common_tls_context:
            tls_certificate_sds_secret_configs:
            - name: db
              sds_config:
                resource_api_version: V3
                initial_fetch_timeout: TIMEOUT
                api_config_source:
                  api_type: API_TYPE
                  transport_api_version: V3
                  grpc_services: [{envoy_grpc: {cluster_name: sds}}]
      filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: db
          cluster: sds
`

// early is an Envoy with that listener.
type early struct {
	*envoytest.Envoy
	t    *testing.T
	addr string
}

func startEarly(t *testing.T, h *sds.Handler, api, timeout string) *early {
	dir := envoytest.Dir(t)
	background(t)("SDS", (&unixsocket.Server{Path: filepath.Join(dir, "s.sock"), Handler: h}).Run)
	return &early{t: t, Envoy: envoytest.Start(t, dir, "early", strings.NewReplacer("SOCKET", "s.sock", "API_TYPE", api, "TIMEOUT", timeout).Replace(refusedBootstrap))}
}

// serial returns the serial number of the certificate that the listener shows, or "" if it shows none.
func (e *early) serial() string {
	e.t.Helper()
	if e.addr == "" {
		e.addr = e.ListenerAddr("db", patient)
	}
	c, err := tls.DialWithDialer(&net.Dialer{Timeout: time.Second}, "tcp", e.addr, &tls.Config{InsecureSkipVerify: true}) // a test looks
	if err != nil {
		return ""
	}
	defer c.Close()
	return envoytest.Serial(c.ConnectionState().PeerCertificates[0].SerialNumber)
}

func leafSerial(t testing.TB, s *pki.Secret) string {
	t.Helper()
	chain, _, _ := s.KeyPair()
	return envoytest.Serial(must.Get(pki.ParseCertificatesPEM(chain))(t)[0].SerialNumber)
}

// TestEnvoyEntitlement has an Envoy that starts before it may have its certificate: it gets it once it may, with
// no restart. When it loses the right to it, it keeps what it has, rejects nothing, and gets no newer one.
func TestEnvoyEntitlement(t *testing.T) {
	t.Parallel()
	for _, api := range []string{"GRPC", "DELTA_GRPC"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			m, src, r := newMint(t), newFakeSource(), newRights()
			first := m.pair("db")
			src.put("db", first)
			h := handler(t, src, &sds.Options{Resolve: sds.Allow(r.authorize)})
			e := startEarly(t, h, api, "1s")
			e.WaitLive(patient)
			assert.Positive(t, r.count("db"))
			assert.Empty(t, e.serial())
			shows := func(s *pki.Secret) func() bool {
				return func() bool { return e.serial() == leafSerial(t, s) }
			}
			r.set("db", true)
			h.Refresh()
			require.Eventually(t, shows(first), time.Minute, 20*time.Millisecond)

			r.set("db", false)
			h.Refresh()
			require.Eventually(t, func() bool { return h.Waits() == 1 }, time.Minute, time.Millisecond)
			src.put("db", m.pair("db"))
			time.Sleep(500 * time.Millisecond)
			assert.True(t, shows(first)(), "it keeps what it has")
			r.set("db", true)
			last := m.pair("db")
			src.put("db", last)
			require.Eventually(t, shows(last), time.Minute, 20*time.Millisecond)
			assert.Zero(t, e.Stat("sds.db.update_rejected"))
			assert.Zero(t, h.Status().NACKs)
		})
	}
}
