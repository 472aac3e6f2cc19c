package istioagent

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
)

// ports has any ports in place of those of a bootstrap.
var ports = strings.NewReplacer("\n", " ", ": 15443", ": 0", ": 15021", ": 0", ": 15090", ": 0")

// bootstrap returns the configuration of an agent for package envoytest, which has an admin section of its own, and
// with any ports for the listeners.
func bootstrap(t *testing.T, a *Agent) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, a.Bootstrap(&b))
	var members map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b.Bytes(), &members))
	require.Contains(t, members, "admin")
	delete(members, "admin")
	var text strings.Builder // JSON is YAML, but for the layout of the members
	for name, value := range members {
		text.WriteString(name + ": " + ports.Replace(string(value)) + "\n")
	}
	return text.String()
}

func TestBootstrap(t *testing.T) {
	t.Parallel()
	cfg := config(t, folder(t), pod+`CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1 XDS_ROOT_CA=SYSTEM POD_NAME=web-1 INSTANCE_IP=10.0.0.1 ISTIO_META_MESH_ID=m1 ISTIO_META_QUOTE="\`)
	for _, xds := range []bool{false, true} {
		cfg.Envoy.XDS = xds
		a := must.Get(New(chosen(cfg, fromCA)))(t)
		t.Cleanup(func() { _ = a.Close() })
		var b bytes.Buffer
		require.NoError(t, a.Bootstrap(&b))
		var got struct {
			Node struct {
				ID       string
				Metadata map[string]any
			}
			Static struct {
				Clusters  []struct{ Name string }
				Listeners []struct{ Name string }
			} `json:"static_resources"`
			Dynamic map[string]any `json:"dynamic_resources"`
		}
		require.NoError(t, json.Unmarshal(b.Bytes(), &got))
		assert.Equal(t, "sidecar~10.0.0.1~web-1.shop~shop.svc.cluster.local", got.Node.ID)
		assert.Equal(t, "m1", got.Node.Metadata["MESH_ID"])
		assert.Equal(t, `"\`, got.Node.Metadata["QUOTE"])
		assert.Equal(t, "sds-grpc", got.Static.Clusters[0].Name)
		assert.Equal(t, xds, len(got.Static.Clusters) == 4 && got.Dynamic["ads_config"] != nil && len(got.Static.Listeners) == 2)
		assert.Equal(t, "agent_15021", got.Static.Listeners[0].Name)
		assert.Equal(t, "prometheus_stats_15090", got.Static.Listeners[1].Name)
		assert.NotContains(t, b.String(), "0.0.0.0", "on a machine it is loopback alone")
		assert.Equal(t, xds, strings.Contains(b.String(), filepath.Join(cfg.Root, "etc/istio/proxy/XDS")))
		assert.Contains(t, b.String(), "DELTA_GRPC")
	}
}

// TestEnvoy runs a real Envoy with the bootstrap: it has the identity of the agent, and each new one.
func TestEnvoy(t *testing.T) {
	t.Parallel()
	envoytest.Binary(t)
	c := newControl(t)
	root := c.root(t)
	a := start(t, config(t, root, pod+"SECRET_TTL=6s CA_ADDR="+c.addr))
	envoy := envoytest.Start(t, root, "envoy", bootstrap(t, a))
	envoy.WaitLive(wait)
	at := envoy.ListenerAddr("mtls", wait)
	seen := make(map[string]bool)
	require.Eventually(t, func() bool {
		svid := must.Get(a.identity.SVID())(t)
		conn, err := tls.Dial("tcp", at, &tls.Config{RootCAs: c.authority.Bundle().CertPool(), InsecureSkipVerify: true,
			Certificates: []tls.Certificate{*svid.TLSCertificate()}}) // the certificate is compared
		if err != nil {
			return false
		}
		defer conn.Close()
		text, err := io.ReadAll(conn)
		if err == nil && string(text) == "hello from Envoy\n" {
			seen[conn.ConnectionState().PeerCertificates[0].SerialNumber.String()] = true
		}
		return len(seen) > 1
	}, wait, 50*time.Millisecond, "two certificates are presented")
	leaves, roots := envoy.Serials()
	assert.Len(t, leaves, 1)
	assert.True(t, slices.Contains(roots, envoytest.Serial(slices.Collect(c.authority.Bundle().X509Authorities())[0].SerialNumber)))
	assert.Zero(t, envoy.Stat("sds.default.update_rejected"))
}

// TestEnvoyWithControlPlane runs a real Envoy whose ADS is forwarded, with the token of the agent.
func TestEnvoyWithControlPlane(t *testing.T) {
	t.Parallel()
	envoytest.Binary(t)
	c := newControl(t)
	root := c.root(t)
	p := newPlane(t)
	write(t, root, "xds-root.pem", pki.MarshalCertificatesPEM(p.Certificate()))
	cfg := config(t, root, pod+"CA_ADDR="+c.addr+" XDS_ROOT_CA=xds-root.pem")
	cfg.Envoy.XDS, cfg.proxy.DiscoveryAddress = true, p.Listener.Addr().String()
	a := start(t, cfg)
	envoytest.Start(t, root, "envoy", bootstrap(t, a))
	require.Eventually(t, func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.header.Get("Authorization") == "Bearer good-token"
	}, wait, 20*time.Millisecond)
	code, _ := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code)
}
