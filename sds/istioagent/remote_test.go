package istioagent_test

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/istioagent"
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

// ask opens a stream of ADS at a socket, asks for clusters, and waits for the status.
func ask(t *testing.T, socket string) (status string) {
	t.Helper()
	message, err := protofield.Write(func(w *protofield.Writer) { w.AddText(4, "type.googleapis.com/envoy.config.cluster.v3.Cluster") })
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	client := sds.UnixClient(socket)
	defer client.CloseIdleConnections()
	body, writer := io.Pipe()
	defer writer.Close()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources", body)
	require.NoError(t, err)
	r.Header.Set("Content-Type", "application/grpc")
	r.Header.Set("Te", "trailers")
	go func() { _, _ = writer.Write(append([]byte{0, 0, 0, 0, byte(len(message))}, message...)) }()
	resp, err := client.Do(r)
	require.NoError(t, err)
	_, _ = io.Copy(io.Discard, resp.Body)
	require.NoError(t, resp.Body.Close())
	if s := resp.Header.Get("Grpc-Status"); s != "" {
		return s
	}
	return resp.Trailer.Get("Grpc-Status")
}

// TestControlPlane forwards ADS with the token, the metadata and the certificate of the agent, and serves secrets at the same socket.
func TestControlPlane(t *testing.T) {
	t.Parallel()
	c := newControl(t)
	root := c.root(t)
	p := newPlane(t)
	write(t, root, "xds-root.pem", pki.MarshalCertificatesPEM(p.Certificate()))
	provisioned := spiffetest.NewCA(t, "example.org")
	writeSVID(t, root, "prov", provisioned, provisioned.SVID("/ns/shop/sa/machine"))
	cfg := config(t, root, `TRUST_DOMAIN=example.org POD_NAMESPACE=shop SERVICE_ACCOUNT=web MINIMUM_DRAIN_DURATION=0s ECC_SIGNATURE_ALGORITHM=ECDSA XDS_ROOT_CA={root}/xds-root.pem
		PROV_CERT=prov CA_ROOT_CA=var/run/secrets/istio/root-cert.pem XDS_HEADER_X-One=1 ISTIO_META_CLUSTER_ID=c1 CA_ADDR=`+c.addr)
	cfg.Discovery = p.Listener.Addr().String()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	cfg.DebugAddress = l.Addr().String()
	require.NoError(t, l.Close())
	a := start(t, cfg)

	socket := filepath.Join(root, "etc/istio/proxy/XDS")
	assert.Equal(t, "7", ask(t, socket), "the answer of the control plane")
	p.mu.Lock()
	assert.Equal(t, []string{"Bearer good-token", "c1", "1", "spiffe://example.org/ns/shop/sa/machine"},
		[]string{p.header.Get("Authorization"), p.header.Get("ClusterID"), p.header.Get("X-One"), p.peer})
	p.mu.Unlock()
	svid, err := a.Source().SVID()
	require.NoError(t, err)
	assert.Equal(t, svid.Leaf().SerialNumber.String(), serial(t, watch(t, socket, "default")()))

	resp, err := http.Get("http://" + cfg.DebugAddress + "/debug/syncz")
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusServiceUnavailable, resp.StatusCode, "no Envoy is connected")
	_, text := get(t, a, "/metrics")
	assert.Contains(t, text, "istio_agent_xds_proxy_requests")
}

// TestFakeCA has the CA for tests, which is found by the address of the control plane and its name in ISTIOD_SAN.
func TestFakeCA(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	fake := caclienttest.NewIstio(t, authority, "/ns/shop/sa/web")
	root := folder(t)
	token, err := fake.Endpoint().Token(t.Context())
	require.NoError(t, err)
	write(t, root, "var/run/secrets/tokens/istio-token", []byte(token))
	write(t, root, "root.pem", authority.Bundle().MarshalPEM())
	cfg := config(t, root, pod+"CA_ROOT_CA={root}/root.pem ISTIOD_SAN=localhost SECRET_TTL=1h")
	cfg.Discovery = fake.Endpoint().URL[len("https://"):]
	fake.Drop()
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err = istioagent.Start(ctx, cfg)
	require.ErrorIs(t, err, istioagent.ErrNotReady)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	fake.Mend()
	a := start(t, cfg)
	svid, err := a.Source().SVID()
	require.NoError(t, err)
	assert.Equal(t, web, svid.ID())
	assert.InDelta(t, time.Hour, time.Until(svid.NotAfter()), float64(time.Minute))
	b, err := a.Source().Bundle(web.TrustDomain())
	require.NoError(t, err)
	assert.Equal(t, authority.Bundle().MarshalPEM(), b.MarshalPEM(), "learned from the CA, as CA_ROOT_CA vouches for the server alone")
}

// TestGoogle has a token of the metadata server that is exchanged for one of Google's service.
func TestGoogle(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	fake := caclienttest.NewGoogleCAS(t, authority, "/ns/shop/sa/web")
	token, err := fake.Endpoint().Token(t.Context())
	require.NoError(t, err)
	metadata := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.Equal(t, "example.org", r.URL.Query().Get("audience"))
		w.Header().Set("Metadata-Flavor", "Google")
		_, _ = io.WriteString(w, unsigned("example.org"))
	}))
	t.Cleanup(metadata.Close)
	exchange := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var fields map[string]any
		assert.NoError(t, json.NewDecoder(r.Body).Decode(&fields))
		assert.Equal(t, "identitynamespace:example.org:provider", fields["audience"])
		assert.Equal(t, unsigned("example.org"), fields["subjectToken"])
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": token, "issued_token_type": "urn:ietf:params:oauth:token-type:access_token", "token_type": "Bearer", "expires_in": 3600})
	}))
	t.Cleanup(exchange.Close)
	root := folder(t)
	write(t, root, "root.pem", authority.Bundle().MarshalPEM())
	cfg := config(t, root, pod+"CA_PROVIDER=GoogleCA CA_ADDR="+caclienttest.GoogleCASPool+" CA_ROOT_CA={root}/root.pem CREDENTIAL_FETCHER_TYPE=GoogleComputeEngine CREDENTIAL_IDENTITY_PROVIDER=provider")
	a := start(t, cfg.WithGoogle(fake.Endpoint().URL, exchange.URL, metadata.URL))
	svid, err := a.Source().SVID()
	require.NoError(t, err)
	assert.Equal(t, web, svid.ID())
}

// TestTiming holds that ratios are those of Istio's agent, but for the first and the last hundredth.
func TestTiming(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ ratio, jitter, least, most float64 }{
		{0.5, 0.01, 0.49, 0.51}, {0.5, 0, 0.5, 0.5}, {0, 0.01, 0.01, 0.01}, {0, 0, 0.01, 0.01}, {1, 0.01, 0.99, 0.99}, {1, 0, 0.99, 0.99},
		{0, 1, 0.01, 0.99}, {1, 1, 0.01, 0.99}, {0.02, 0.01, 0.01, 0.03}, {0.2, 0.05, 0.15, 0.25},
	} {
		grace, jitter := istioagent.Config{GraceRatio: c.ratio, Jitter: c.jitter}.Timing()
		assert.InDelta(t, c.least, grace, 1e-6, "%+v", c)
		assert.InDelta(t, c.most, grace+jitter, 1e-6, "%+v", c)
		assert.Positive(t, jitter)
		assert.Less(t, grace+jitter, 1.0)
	}
}

// unsigned returns a token that lasts.
func unsigned(audience string) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{"alg":"RS256"}`)) + "." + part([]byte(`{"aud":"`+audience+`","exp":4102444800}`)) + "." + part([]byte("signature"))
}
