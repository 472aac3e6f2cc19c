package istioagent

import (
	"bytes"
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestLoneRoots: a root-cert.pem in etc/certs without a certificate and a key is ROOTCA beside the identity of the CA, also in
// the files of OUTPUT_CERTS, and is followed (IST-7.4-1; existingRootCertFile of the document).
func TestLoneRoots(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.4-1")
	c := newControl(t)
	root := c.root(t)
	mine, later := spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM(), spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM()
	write(t, root, "etc/certs/root-cert.pem", mine)
	a := start(t, config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS={root}/out SECRET_TTL=1h"))
	assert.Equal(t, fromCA, a.cfg.Origin)
	assert.Contains(t, a.cfg.why, "ROOTCA is")
	assert.Equal(t, web, must.Get(a.identity.SVID())(t).ID())
	for _, want := range [][]byte{mine, later} {
		require.Eventually(t, func() bool {
			secret, err := fetch(t, a.cfg.Socket, "ROOTCA")
			written, _ := os.ReadFile(filepath.Join(root, "out/root-cert.pem"))
			return err == nil && bytes.Equal(secret.GetValidationContext().GetTrustedCa().GetInlineBytes(), want) && bytes.Equal(written, want)
		}, wait, 20*time.Millisecond)
		write(t, root, "etc/certs/root-cert.pem", later)
	}

	// That of the directory to which the agent writes is its own output.
	own := c.root(t)
	write(t, own, "etc/certs/root-cert.pem", mine)
	choice := must.Get(Choose(t.Context(), config(t, own, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS={root}/etc/certs")))(t)
	assert.Empty(t, choice.roots)
}

// TestDisabledEnvoy: with DISABLE_ENVOY secrets are served and files are written, as by Istio's agent today. The document's switch
// for the server of secrets, EnableWorkloadSDS, is gone from that, too.
func TestDisabledEnvoy(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.1-7", "IST-9.2-31")
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, pod+"CA_ADDR="+c.addr+" OUTPUT_CERTS={root}/out SECRET_TTL=1h DISABLE_ENVOY=true")
	assert.True(t, cfg.Envoy.Disabled)
	a := start(t, cfg)
	secret := must.Get(fetch(t, a.cfg.Socket, "default"))(t)
	assert.NotEmpty(t, secret.GetTlsCertificate().GetCertificateChain().GetInlineBytes())
	assert.FileExists(t, filepath.Join(root, "out/cert-chain.pem"))
	code, text := get(t, a, "/healthz/ready")
	assert.Equal(t, http.StatusOK, code, text)
}

// TestPostQuantum: with COMPLIANCE_POLICY=pqc the agent asks a server for X25519MLKEM768 alone, in TLS 1.3.
func TestPostQuantum(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.2-35")
	type hello struct {
		curves   []tls.CurveID
		versions []uint16
	}
	for environ, want := range map[string]bool{"COMPLIANCE_POLICY=pqc ": true, "": false} {
		seen := make(chan hello, 100)
		server := httptest.NewUnstartedServer(http.NotFoundHandler())
		server.TLS = &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			select {
			case seen <- hello{h.SupportedCurves, h.SupportedVersions}:
			default:
			}
			return nil, nil
		}}
		server.EnableHTTP2 = true
		server.StartTLS()
		t.Cleanup(server.Close)
		root := folder(t)
		write(t, root, "var/run/secrets/tokens/istio-token", []byte("good-token\n"))
		write(t, root, "roots.pem", pki.MarshalCertificatesPEM(server.Certificate()))
		cfg := config(t, root, environ+pod+"CA_ROOT_CA=roots.pem XDS_ROOT_CA=roots.pem CA_ADDR="+server.Listener.Addr().String())
		cfg.Envoy.XDS, cfg.proxy.DiscoveryAddress = true, server.Listener.Addr().String()
		a := must.Get(New(must.Get(Choose(t.Context(), cfg))(t)))(t)
		ended := make(chan error, 1)
		go func() { ended <- a.Run(t.Context()) }()
		check := func(h hello) {
			if want {
				assert.Equal(t, hello{[]tls.CurveID{tls.X25519MLKEM768}, []uint16{tls.VersionTLS13}}, h)
			} else {
				assert.Greater(t, len(h.curves), 1)
			}
		}
		check(<-seen) // the CA
		ask(t, filepath.Join(root, "etc/istio/proxy/XDS"), func() bool {
			select {
			case h := <-seen:
				check(h)
				return true
			default:
				return false
			}
		})
		require.NoError(t, a.Close())
		require.NoError(t, <-ended)
	}
	cfg := config(t, folder(t), pod+"CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1 COMPLIANCE_POLICY=fips-140-2")
	cfg.postQuantum = true
	require.ErrorContains(t, must.Err(New(chosen(cfg, fromCA))), "TLS 1.2 has no such key exchange")
}

// TestBootstrapOfPod has the node and the listeners of a gateway in a pod with an IPv6 address.
func TestBootstrapOfPod(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.1-1", "IST-9.2-36")
	root := folder(t)
	write(t, root, "etc/istio/pod/labels", []byte("app=\"web\"\nquote=\"a\\\"b\"\n"))
	cfg := config(t, root, pod+"CA_ROOT_CA=SYSTEM CA_ADDR=127.0.0.1:1 POD_NAME=gw-1 INSTANCE_IP=2001:db8::7 ENVOY_STATUS_PORT=15121 COMPLIANCE_POLICY=pqc")
	cfg.Envoy.Started, cfg.Envoy.Role, cfg.Envoy.Domain = true, "router", "shop.svc.example.org"
	a := must.Get(New(chosen(cfg, fromCA)))(t)
	t.Cleanup(func() { _ = a.Close() })
	var b bytes.Buffer
	require.NoError(t, a.Bootstrap(&b))
	for _, want := range []string{
		`"router~2001:db8::7~gw-1.shop~shop.svc.example.org"`, `"app": "web"`, `"quote": "a\"b"`, `"address": "::"`, `"port_value": 15121`, `"port_value": 15020`,
		`"X25519MLKEM768"`, `"TLSv1_3"`,
	} {
		assert.Contains(t, b.String(), want)
	}
	select {
	case <-a.Draining():
		require.Fail(t, "it drains before it was told to")
	default:
	}
}
