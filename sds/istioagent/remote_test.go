package istioagent

import (
	"context"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// plane is a control plane that refuses each stream, and remembers how it was asked.
type plane struct {
	*httptest.Server
	mu     sync.Mutex
	header http.Header
	peer   string // the ID of the client certificate
}

func newPlane(t *testing.T) *plane {
	t.Helper()
	p := new(plane)
	p.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.header = r.Header.Clone()
		if len(r.TLS.PeerCertificates) > 0 {
			p.peer = r.TLS.PeerCertificates[0].URIs[0].String()
		}
		w.Header().Set("Content-Type", "application/grpc")
		w.Header().Set("Grpc-Status", "7")
	}))
	p.EnableHTTP2 = true
	p.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	p.StartTLS()
	t.Cleanup(p.Close)
	return p
}

// asked reports whether the control plane was asked.
func (p *plane) asked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.header != nil
}

// ask opens a stream of ADS at a socket, asks for clusters, and keeps it open until enough is true.
func ask(t *testing.T, socket string, enough func() bool) {
	t.Helper()
	require.Eventually(t, func() bool { // of an agent that is not ready
		_, err := os.Stat(socket)
		return err == nil
	}, wait, time.Millisecond)
	message, err := protofield.Write(func(w *protofield.Writer) { w.AddText(4, "type.googleapis.com/envoy.config.cluster.v3.Cluster") })
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	client := sds.UnixClient(socket)
	defer client.CloseIdleConnections()
	body, writer := io.Pipe()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources", body)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	context.AfterFunc(ctx, func() { _ = writer.Close() })
	wg.Go(func() {
		_, _ = writer.Write(append([]byte{0, 0, 0, 0, byte(len(message))}, message...))
	})
	wg.Go(func() {
		if resp, err := client.Do(r); err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			_ = resp.Body.Close()
		}
	})
	require.Eventually(t, enough, wait, 5*time.Millisecond)
}

// TestControlPlane forwards ADS with the token, the metadata and the certificate of the agent, and serves secrets at
// the same socket.
func TestControlPlane(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.6-1", "IST-9.2-4", "IST-9.2-6", "IST-9.2-9", "IST-9.2-26", "IST-9.2-43", "IST-9.2-44",
		"IST-9.1-9", "IST-9.2-32", "IST-9.4-1", "IST-9.4-4", "IST-9.5-1", "IST-9.8-1")
	c := newControl(t)
	root := c.root(t)
	p := newPlane(t)
	write(t, root, "xds-root.pem", pki.MarshalCertificatesPEM(p.Certificate()))
	provisioned := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, "prov", provisioned, provisioned.SVID("/ns/shop/sa/machine"))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	_, debug := must.Get2(net.SplitHostPort(l.Addr().String()))(t)
	require.NoError(t, l.Close())
	cfg := config(t, root, `TRUST_DOMAIN=example.org POD_NAMESPACE=shop SERVICE_ACCOUNT=web MINIMUM_DRAIN_DURATION=0s ECC_SIGNATURE_ALGORITHM=ECDSA XDS_ROOT_CA={root}/xds-root.pem
		GRPC_XDS_BOOTSTRAP=etc/grpc/bootstrap.json OUTPUT_CERTS=out PROXY_XDS_DEBUG_VIA_AGENT_PORT=`+debug+`
		PROV_CERT=prov CA_ROOT_CA=var/run/secrets/istio/root-cert.pem XDS_HEADER_X-One=1 ISTIO_META_CLUSTER_ID=c1 CA_ADDR=`+c.addr)
	cfg.proxy.DiscoveryAddress = p.Listener.Addr().String()
	a := start(t, cfg)
	data := must.Get(os.ReadFile(filepath.Join(root, "etc/grpc/bootstrap.json")))(t)
	var grpc struct {
		Servers []struct {
			URI string `json:"server_uri"`
		} `json:"xds_servers"`
		Certificates map[string]struct {
			Config map[string]string
		} `json:"certificate_providers"`
	}
	require.NoError(t, json.Unmarshal(data, &grpc))
	assert.Equal(t, "unix://"+filepath.Join(root, "etc/istio/proxy/XDS"), grpc.Servers[0].URI)
	assert.Equal(t, filepath.Join(root, "out/key.pem"), grpc.Certificates["default"].Config["private_key_file"])

	socket := filepath.Join(root, "etc/istio/proxy/XDS")
	ask(t, socket, p.asked)
	p.mu.Lock()
	assert.Equal(t, []string{"Bearer good-token", "c1", "1", "spiffe://example.org/ns/shop/sa/machine"},
		[]string{p.header.Get("Authorization"), p.header.Get("ClusterID"), p.header.Get("X-One"), p.peer})
	p.mu.Unlock()
	svid := must.Get(a.identity.SVID())(t)
	assert.Equal(t, svid.Leaf().SerialNumber.String(), serial(t, watch(t, socket, "default")()))

	resp := must.Get(http.Get("http://127.0.0.1:" + debug + "/debug/syncz"))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, "no Envoy is connected")
	_, text := get(t, a, "/metrics")
	assert.Contains(t, text, "istio_agent_xds_proxy_requests")
}

// TestFakeCA has the CA for tests, which is found by the address of the control plane and its name in ISTIOD_SAN.
func TestFakeCA(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.2-1", "IST-6.3-2", "IST-9.2-1", "IST-9.2-3", "IST-9.2-7")
	authority := spiffetest.NewCA(t, "example.org")
	fake := caclienttest.NewIstio(t, authority, "/ns/shop/sa/web")
	root := folder(t)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte(must.Get(fake.Endpoint().Token(t.Context()))(t)))
	public := spiffetest.NewCA(t, "example.net") // vouches for servers alone
	write(t, root, "root.pem", append(authority.Bundle().MarshalPEM(), public.Bundle().MarshalPEM()...))
	cfg := config(t, root, pod+"CA_ROOT_CA={root}/root.pem ISTIOD_SAN=localhost SECRET_TTL=1h")
	cfg.proxy.DiscoveryAddress = fake.Endpoint().URL[len("https://"):]
	fake.Drop()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := startAgent(ctx, cfg)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	fake.Mend()
	a := start(t, cfg)
	svid := must.Get(a.identity.SVID())(t)
	assert.Equal(t, web, svid.ID())
	assert.InDelta(t, time.Hour, time.Until(svid.NotAfter()), float64(time.Minute))
	b := must.Get(a.identity.Bundle(web.TrustDomain()))(t)
	assert.Equal(t, authority.Bundle().MarshalPEM(), b.MarshalPEM(), "learned from the CA, as CA_ROOT_CA vouches for the server alone")
}

// TestIntermediateEnds has a CA whose own certificate ends before those that it has issued. No peer accepts them then, and
// no Envoy gets them, so the agent is neither ready nor alive.
func TestIntermediateEnds(t *testing.T) {
	rounds.Slow(t)
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	end := time.Now().Add(3 * time.Second)
	fake := caclienttest.NewIstio(t, authority.Intermediate(func(c *x509.Certificate) { c.NotAfter = end }), "/ns/shop/sa/web")
	root := folder(t)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte(must.Get(fake.Endpoint().Token(t.Context()))(t)))
	write(t, root, "root.pem", append(authority.Bundle().MarshalPEM(), spiffetest.NewCA(t, "example.net").Bundle().MarshalPEM()...))
	cfg := config(t, root, pod+"CA_ROOT_CA={root}/root.pem ISTIOD_SAN=localhost SECRET_TTL=1h")
	cfg.proxy.DiscoveryAddress = fake.Endpoint().URL[len("https://"):]
	a := start(t, cfg)
	fake.Drop()
	require.Greater(t, time.Until(must.Get(a.identity.SVID())(t).NotAfter()), 30*time.Minute)
	for _, path := range []string{"/healthz/ready", "/healthz/live"} {
		code, text := get(t, a, path)
		require.Equal(t, http.StatusOK, code, text)
	}
	time.Sleep(time.Until(end) + 50*time.Millisecond) // certificates have whole seconds: it has ended up to one earlier
	for _, path := range []string{"/healthz/ready", "/healthz/live"} {
		code, text := get(t, a, path)
		assert.Equal(t, http.StatusServiceUnavailable, code, "%s: %s", path, text)
	}
}

// TestGoogle has a token of the metadata server that is exchanged for one of Google's service.
func TestGoogle(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.5-2", "IST-9.2-2", "IST-9.2-22", "IST-9.2-23", "IST-9.3-1")
	authority := spiffetest.NewCA(t, "example.org")
	fake := cafake.NewGoogleCAS(t, authority, "/ns/shop/sa/web")
	token := must.Get(fake.Endpoint().Token(t.Context()))(t)
	metadata := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "example.org", r.URL.Query().Get("audience"))
		w.Header().Set("Metadata-Flavor", "Google")
		_, _ = io.WriteString(w, unsigned("example.org"))
	}))
	t.Cleanup(metadata.Close)
	exchange := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "identitynamespace:example.org:provider", r.FormValue("audience"))
		assert.Equal(t, unsigned("example.org"), r.FormValue("subject_token"))
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": token,
			"issued_token_type": "urn:ietf:params:oauth:token-type:access_token", "token_type": "Bearer", "expires_in": 3600})
	}))
	t.Cleanup(exchange.Close)
	root := folder(t)
	write(t, root, "root.pem", authority.Bundle().MarshalPEM())
	cfg := config(t, root,
		pod+"CA_PROVIDER=GoogleCA CA_ADDR="+cafake.GoogleCASPool+" CA_ROOT_CA={root}/root.pem CREDENTIAL_FETCHER_TYPE=GoogleComputeEngine CREDENTIAL_IDENTITY_PROVIDER=provider")
	cfg.urls.service, cfg.urls.exchange, cfg.urls.metadata = fake.Endpoint().URL, exchange.URL, metadata.URL
	a := start(t, cfg)
	assert.Equal(t, web, must.Get(a.identity.SVID())(t).ID())
}

// TestTiming holds that ratios are those of Istio's agent, but for the first and the last hundredth.
func TestTiming(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.6-1", "IST-7.6-2", "IST-7.6-6", "IST-9.2-14", "IST-9.2-15")
	for _, c := range []struct{ ratio, jitter, least, most float64 }{
		{0.5, 0.01, 0.49, 0.51}, {0.5, 0, 0.5, 0.5}, {0, 0.01, 0.01, 0.01}, {0, 0, 0.01, 0.01}, {1, 0.01, 0.99, 0.99}, {1, 0, 0.99, 0.99},
		{0, 1, 0.01, 0.99}, {1, 1, 0.01, 0.99}, {0.02, 0.01, 0.01, 0.03}, {0.2, 0.05, 0.15, 0.25},
	} {
		grace, jitter := timing(c.ratio, c.jitter)
		assert.InDelta(t, c.least, grace, 1e-6, "%+v", c)
		assert.InDelta(t, c.most, grace+jitter, 1e-6, "%+v", c)
		assert.Positive(t, jitter)
		assert.Less(t, grace+jitter, 1.0)
	}
}

// TestRoots has good roots in one place, and others in all other places.
func TestRoots(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.3-1", "IST-6.3-2", "IST-6.3-3", "IST-6.3-4", "IST-6.3-6", "IST-6.3-7", "IST-9.2-3", "IST-9.2-4", "IST-9.2-8",
		"IST-9.2-9")
	c := newControl(t)
	wrong := spiffetest.NewCA(t, "example.org").Bundle().MarshalPEM()
	const podRoots, mountedRoots = "var/run/secrets/istio/root-cert.pem", "etc/certs/root-cert.pem"
	places := []string{podRoots, mountedRoots, "prov/root-cert.pem", "own.pem"}
	for _, test := range []struct{ ca, xds, environ string }{ // where the good roots are; empty: nowhere
		{podRoots, mountedRoots, ""},
		{podRoots, "own.pem", "XDS_ROOT_CA=own.pem"},
		{"own.pem", mountedRoots, "CA_ROOT_CA=own.pem PROV_CERT=prov"},
		{mountedRoots, mountedRoots, "PILOT_CERT_PROVIDER=custom PROV_CERT=prov"},
		{"prov/root-cert.pem", mountedRoots, "PROV_CERT=prov"},
		{"prov/root-cert.pem", "prov/root-cert.pem", "PROV_CERT=prov WITHOUT=" + mountedRoots},
		{podRoots, podRoots, "WITHOUT=" + mountedRoots},
		{"", mountedRoots, "CA_ROOT_CA=SYSTEM"},
		{podRoots, "", "XDS_ROOT_CA=SYSTEM"},
	} {
		t.Run(test.environ, func(t *testing.T) {
			t.Parallel()
			root, p := c.root(t), newPlane(t)
			for _, place := range places {
				write(t, root, place, wrong)
				if place == test.ca {
					write(t, root, place, c.authority.Bundle().MarshalPEM())
				}
				if place == test.xds && place == test.ca {
					write(t, root, place, append(c.authority.Bundle().MarshalPEM(), pki.MarshalCertificatesPEM(p.Certificate())...))
				} else if place == test.xds {
					write(t, root, place, pki.MarshalCertificatesPEM(p.Certificate()))
				}
			}
			if _, missing, ok := strings.Cut(test.environ, "WITHOUT="); ok {
				require.NoError(t, os.Remove(filepath.Join(root, missing)))
			}
			cfg := config(t, root, strings.Replace(pod, "PROXY_XDS_VIA_AGENT=false", "", 1)+"CA_ADDR="+c.addr+" "+test.environ)
			cfg.proxy.DiscoveryAddress = p.Listener.Addr().String()
			a := run(t, cfg)
			if test.ca == "" {
				require.Eventually(t, func() bool {
					_, text := get(t, a, "/healthz/ready")
					return strings.Contains(text, "unknown authority")
				}, wait, 5*time.Millisecond)
			} else {
				starting, cancel := context.WithTimeout(t.Context(), wait)
				defer cancel()
				require.NoError(t, a.Ready(starting))
			}
			if socket := filepath.Join(root, "etc/istio/proxy/XDS"); test.xds != "" {
				ask(t, socket, p.asked)
			} else {
				ask(t, socket, func() bool {
					_, text := get(t, a, "/metrics")
					return strings.Contains(text, `istio_agent_istiod_connection_failures{part="xds"} 1`)
				})
				assert.False(t, p.asked())
			}
		})
	}
}

// Without the file that has the roots there is no start, whichever server they are for.
func TestMissingRoots(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.2-3", "IST-6.3-8")
	c := newControl(t)
	const xds = "PROXY_XDS_VIA_AGENT=false"
	for environ, missing := range map[string]string{
		pod: "var/run/secrets/istio/root-cert.pem", pod + "CA_ROOT_CA=other.pem": "other.pem",
		strings.Replace(pod, xds, "", 1) + "XDS_ROOT_CA=other.pem": "other.pem",
	} {
		root := c.root(t)
		if missing != "other.pem" {
			require.NoError(t, os.Remove(filepath.Join(root, missing)))
		}
		cfg := config(t, root, environ+" CA_ADDR="+c.addr)
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		_, err := startAgent(ctx, cfg)
		require.ErrorContains(t, err, "no regular file ", environ)
		require.ErrorContains(t, err, missing)
		assert.NoFileExists(t, filepath.Join(root, workloadSocket))
	}
	assert.Zero(t, c.tokens.Load())
}

// TestKeys has the algorithms of keys.
func TestKeys(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.5-3", "IST-9.2-17", "IST-9.2-19", "IST-9.2-20", "IST-2.1-13", "IST-2.1-14")
	c := newControl(t)
	for environ, bits := range map[string]int{
		"": 2048, "ECC_SIGNATURE_ALGORITHM=ECDSA": 256, "ECC_SIGNATURE_ALGORITHM=ECDSA ECC_CURVE=P384": 384,
	} {
		a := start(t, config(t, c.root(t), strings.Replace(pod, "ECC_SIGNATURE_ALGORITHM=ECDSA", "", 1)+"CA_ADDR="+c.addr+" "+environ))
		svid := must.Get(a.identity.SVID())(t)
		switch key := svid.Leaf().PublicKey.(type) {
		case *rsa.PublicKey:
			assert.Equal(t, bits, key.N.BitLen(), environ)
		case *ecdsa.PublicKey:
			assert.Equal(t, bits, key.Params().BitSize, environ)
		default:
			assert.Fail(t, "another key", "%T", key)
		}
	}
}

// unsigned returns a token that lasts.
func unsigned(audience string) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{"alg":"RS256"}`)) + "." + part([]byte(`{"aud":"`+audience+`","exp":4102444800}`)) + "." + part([]byte("signature"))
}

// The bootstrap for gRPC is not written into a directory of another user, who could replace it.
func TestGRPCBootstrapOfAnother(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("there is no other user")
	}
	c := newControl(t)
	root := c.root(t)
	cfg := config(t, root, `TRUST_DOMAIN=example.org POD_NAMESPACE=shop SERVICE_ACCOUNT=web ECC_SIGNATURE_ALGORITHM=ECDSA GRPC_XDS_BOOTSTRAP=theirs/bootstrap.json CA_ADDR=`+c.addr)
	cfg.proxy.DiscoveryAddress = c.addr
	folder := filepath.Join(root, "theirs")
	require.NoError(t, os.Mkdir(folder, 0o755))
	require.NoError(t, os.Chown(folder, 65534, 65534))
	a := must.Get(New(must.Get(Choose(t.Context(), cfg))(t)))(t)
	require.ErrorContains(t, a.Run(t.Context()), "GRPC_XDS_BOOTSTRAP")
	assert.NoFileExists(t, filepath.Join(folder, "bootstrap.json"))
}

// TestControlPlanePolicy: the policy or the port says that the control plane is reached without TLS, and nothing else does.
func TestControlPlanePolicy(t *testing.T) {
	t.Parallel()
	for proxy, want := range map[string]string{
		`"discoveryAddress":"cp:1"`:                                       "(https://cp:1)",
		`"discoveryAddress":"cp:1","controlPlaneAuthPolicy":"MUTUAL_TLS"`: "(https://cp:1)",
		`"discoveryAddress":"cp:1","controlPlaneAuthPolicy":1`:            "(https://cp:1)",
		`"discoveryAddress":"cp:1","controlPlaneAuthPolicy":"NONE"`:       "(http://cp:1)",
		`"discoveryAddress":"cp:1","controlPlaneAuthPolicy":0`:            "(http://cp:1)",
		`"discoveryAddress":"cp:15010"`:                                   "(http://cp:15010)",
	} {
		a := must.Get(New(chosen(config(t, folder(t), "XDS_ROOT_CA=SYSTEM PROXY_CONFIG={"+proxy+"}"), fromSocket)))(t)
		assert.Contains(t, fmt.Sprint(a.xds), want, proxy)
		require.NoError(t, a.Close())
	}
}

// TestPlaintextClient: the client without TLS begins with HTTP/2 and uses no proxy of the environment.
func TestPlaintextClient(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Proto) }))
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	c := new(Config)
	client := c.plaintextClient()
	t.Cleanup(client.CloseIdleConnections)
	resp := must.Get(client.Get(server.URL))(t)
	defer resp.Body.Close()
	assert.Equal(t, "HTTP/2.0", string(must.Get(io.ReadAll(resp.Body))(t)))
	assert.Nil(t, client.Transport.(*http.Transport).Proxy)
	assert.Equal(t, []*http.Client{client}, c.clients)
}
