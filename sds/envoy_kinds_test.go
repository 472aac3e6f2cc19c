package sds_test

import (
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// A listener for each kind of secret, all in front of one application.
const (
	kindsBootstrap = `
node: {id: kinds, cluster: svidkit}
static_resources:
  clusters:` + sdsCluster + `
  - name: app
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: app
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: BACKEND}}}}]}]
  listeners:
  - name: plain
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: plain
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: app}}]}
          http_filters:
          - name: envoy.filters.http.credential_injector
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.credential_injector.v3.CredentialInjector
              credential:
                name: envoy.http.injected_credentials.generic
                typed_config:
                  "@type": type.googleapis.com/envoy.extensions.http.injected_credentials.generic.v3.Generic
                  credential:
                    name: token
                    sds_config: &sds
                      resource_api_version: V3
                      initial_fetch_timeout: 5s
                      api_config_source:
                        api_type: API_TYPE
                        transport_api_version: V3
                        grpc_services: [{envoy_grpc: {cluster_name: sds}}]
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`
	kindsListener = `
  - name: NAME
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          EXTRA
          common_tls_context:
            tls_certificate_sds_secret_configs: [{name: CERT, sds_config: *sds}]
            CONTEXT
      filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: NAME
          cluster: app
`
)

// listOf returns a list of revoked certificates, signed with the key of a root.
func listOf(t testing.TB, root *x509.Certificate, key crypto.Signer, number int64, revoked ...*x509.Certificate) []byte {
	t.Helper()
	list := &x509.RevocationList{Number: big.NewInt(number), ThisUpdate: time.Now().Add(-time.Minute), NextUpdate: time.Now().Add(time.Hour)}
	for _, c := range revoked {
		list.RevokedCertificateEntries = append(list.RevokedCertificateEntries, x509.RevocationListEntry{SerialNumber: c.SerialNumber, RevocationTime: list.ThisUpdate})
	}
	der := must.Get(x509.CreateRevocationList(rand.Reader, list, root, key))(t)
	return pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: der})
}

// TestEnvoyKinds has an Envoy take every kind of secret, and use it: bundles of two trust domains, which vouch for their
// own only, revocation lists of roots and of a trust domain, ticket keys, and a token. What it cannot use it says no to.
func TestEnvoyKinds(t *testing.T) {
	t.Parallel()
	envoytest.Binary(t)
	for _, api := range []string{"GRPC", "DELTA_GRPC"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			testEnvoyKinds(t, api)
		})
	}
}

func testEnvoyKinds(t *testing.T, api string) {
	m, src := newMint(t), newFakeSource()
	put := func(s *pki.Secret, err error) {
		t.Helper()
		require.NoError(t, err)
		src.put(s.Name(), s)
	}
	put(m.pair("default"), nil)

	// Two trust domains, and one that is trusted by none.
	one, two, three := spiffetest.NewCA(t, "one.example"), spiffetest.NewCA(t, "two.example"), spiffetest.NewCA(t, "three.example")
	set := func(bundles ...*spiffe.Bundle) *spiffe.BundleSet {
		return must.Get(spiffe.NewBundleSet(bundles...))(t)
	}
	put(pki.NewTrustDomainsSecret("ALL", set(one.Bundle(), two.Bundle())))

	// A CA that revokes.
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	td := spiffe.MustParseTrustDomain("crl.example")
	root, err := pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	leaf := func(path string) *tls.Certificate {
		k := must.Get(pki.NewKey("ecdsa-p256"))(t)
		c := must.Get(root.Issue(pki.CertificateOptions{PublicKey: k.Public(),
			SANs:      []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://crl.example" + path))},
			NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)}))(t)
		return &tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: k, Leaf: c}
	}
	good, bad := leaf("/good"), leaf("/bad")
	bundle, err := spiffe.NewBundle(td, spiffe.BundleContents{X509Authorities: []*x509.Certificate{root.Certificate()}})
	require.NoError(t, err)
	revoke := func(number int64, revoked ...*x509.Certificate) {
		t.Helper()
		list := listOf(t, root.Certificate(), key, number, revoked...)
		trust := must.Get(pki.NewTrustSecret("ROOTCA", bundle))(t)
		put(trust.WithCRLs(list, false))
		trust = must.Get(pki.NewTrustSecret("leaf-crl", bundle))(t)
		put(trust.WithCRLs(list, true))
		domains := must.Get(pki.NewTrustDomainsSecret("ALL-crl", set(bundle, one.Bundle())))(t)
		put(domains.WithTrustDomainCRLs(map[spiffe.TrustDomain][]byte{td: list}))
	}
	revoke(1, bad.Leaf)

	ticketKey := func() []byte {
		b := make([]byte, 80)
		_, _ = rand.Read(b)
		return b
	}
	oldKey := ticketKey()
	put(pki.NewTicketKeysSecret("tickets", oldKey))
	put(pki.NewGenericSecret("token", map[string][]byte{"": []byte("Bearer first")}))
	chain, _, _ := m.pair("x").KeyPair()
	provider := must.Get(protofield.Write(func(w *protofield.Writer) {
		w.Text(1, "no-such-provider")
		w.Message(3, func(w *protofield.Writer) { w.Text(1, "type.googleapis.com/google.protobuf.Empty") })
	}))(t)
	put(pki.NewKeyProviderSecret("by-provider", chain, provider))

	h := handler(t, src, nil)
	dir := socketDir(t)
	background(t)("SDS", (&unixsocket.Server{Path: filepath.Join(dir, "s.sock"), Handler: h}).Run)
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Authorization"))
	}))
	t.Cleanup(app.Close)
	appURL := must.Get(url.Parse(app.URL))(t)
	var bootstrap strings.Builder
	bootstrap.WriteString(kindsBootstrap)
	for _, l := range []struct{ name, cert, extra, context string }{
		{"ALL", "default", "require_client_certificate: true", "validation_context_sds_secret_config: {name: ALL, sds_config: *sds}"},
		{"ALL-crl", "default", "require_client_certificate: true", "validation_context_sds_secret_config: {name: ALL-crl, sds_config: *sds}"},
		{"ROOTCA", "default", "require_client_certificate: true", "validation_context_sds_secret_config: {name: ROOTCA, sds_config: *sds}"},
		{"leaf-crl", "default", "require_client_certificate: true", "validation_context_sds_secret_config: {name: leaf-crl, sds_config: *sds}"},
		{"tickets", "default", "session_ticket_keys_sds_secret_config: {name: tickets, sds_config: *sds}", ""},
		{"provider", "by-provider", "", ""},
	} {
		bootstrap.WriteString(strings.NewReplacer("NAME", l.name, "CERT", l.cert, "EXTRA", l.extra, "CONTEXT", l.context).Replace(kindsListener))
	}
	e := envoytest.Start(t, dir, "kinds", strings.NewReplacer("SOCKET", "s.sock", "API_TYPE", api, "BACKEND", appURL.Port()).Replace(bootstrap.String()))
	e.WaitLive(patient)

	// get makes a request in a new connection.
	get := func(listener string, c *tls.Certificate) error {
		config := &tls.Config{InsecureSkipVerify: true} // the client is what is verified
		if c != nil {
			config.Certificates = []tls.Certificate{*c}
		}
		hc := &http.Client{Transport: &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}, Timeout: patient}
		resp, err := hc.Get("https://" + e.ListenerAddr(listener, patient))
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	certificate := func(ca *spiffetest.CA, id string) *tls.Certificate {
		u := must.Get(url.Parse(id))(t)
		chain, key := ca.Certificate("/x", func(c *x509.Certificate) { c.URIs = []*url.URL{u} })
		c := &tls.Certificate{PrivateKey: key}
		for _, x := range chain {
			c.Certificate = append(c.Certificate, x.Raw)
		}
		return c
	}

	require.NoError(t, get("ALL", certificate(one, "spiffe://one.example/web")))
	require.NoError(t, get("ALL", certificate(two, "spiffe://two.example/web")))
	require.Error(t, get("ALL", certificate(one, "spiffe://two.example/web")), "minted by the authority of another")
	require.Error(t, get("ALL", certificate(three, "spiffe://three.example/web")))
	require.Error(t, get("ALL", certificate(three, "spiffe://one.example/web")))
	require.Error(t, get("ALL", certificate(one, "spiffe://one.example")), "an ID without a path")
	require.Error(t, get("ALL", nil))
	assert.EqualValues(t, 2, e.Stat("listener.127.0.0.1_0.ssl.fail_verify_error"), "those that an authority of another trust domain has signed")
	put(pki.NewTrustDomainsSecret("ALL", set(one.Bundle(), three.Bundle())))
	require.Eventually(t, func() bool { return get("ALL", certificate(three, "spiffe://three.example/web")) == nil }, patient, 20*time.Millisecond)
	require.Error(t, get("ALL", certificate(two, "spiffe://two.example/web")), "it is trusted no longer")
	require.NoError(t, get("ALL", certificate(one, "spiffe://one.example/web")))

	for _, listener := range []string{"ROOTCA", "leaf-crl", "ALL-crl"} {
		require.NoError(t, get(listener, good), listener)
		require.Error(t, get(listener, bad), "%s: it is revoked", listener)
	}
	require.NoError(t, get("ALL-crl", certificate(one, "spiffe://one.example/web")), "whose trust domain has no lists")
	revoke(2, good.Leaf)
	for _, listener := range []string{"ROOTCA", "leaf-crl", "ALL-crl"} {
		require.Eventually(t, func() bool { return get(listener, bad) == nil && get(listener, good) != nil }, patient, 20*time.Millisecond, listener)
	}

	// Tickets are read for as long as their key is there.
	sessions := tls.NewLRUClientSessionCache(1)
	resumes := func(version uint16) bool {
		c, err := tls.Dial("tcp", e.ListenerAddr("tickets", patient), &tls.Config{
			InsecureSkipVerify: true, ServerName: "x", ClientSessionCache: sessions, MinVersion: version, MaxVersion: version, // a test
		})
		require.NoError(t, err)
		defer c.Close()
		must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))(t)
		must.Get(io.Copy(io.Discard, c))(t) // a ticket of TLS 1.3 comes with it
		return c.ConnectionState().DidResume
	}
	updates := func() int64 { return e.Stat("sds.tickets.update_success") }
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		rotate := func(keys ...[]byte) {
			before := updates()
			put(pki.NewTicketKeysSecret("tickets", keys...))
			require.Eventually(t, func() bool { return updates() > before }, patient, 20*time.Millisecond)
		}
		sessions = tls.NewLRUClientSessionCache(1)
		assert.False(t, resumes(version))
		assert.True(t, resumes(version))
		newKey := ticketKey()
		rotate(newKey, oldKey)
		assert.True(t, resumes(version), "the key of the ticket is still there")
		sessions = tls.NewLRUClientSessionCache(1)
		assert.False(t, resumes(version))
		rotate(newKey)
		assert.True(t, resumes(version), "it was made with the first key")
		oldKey = ticketKey()
		rotate(oldKey)
		assert.False(t, resumes(version), "the key of the ticket has gone")
	}

	// The value of a generic secret gets where it is used.
	injected := func() string {
		resp := must.Get(http.Get("http://" + e.ListenerAddr("plain", patient)))(t)
		body := must.Get(io.ReadAll(resp.Body))(t)
		require.NoError(t, resp.Body.Close())
		return string(body)
	}
	require.Equal(t, "Bearer first", injected())
	put(pki.NewGenericSecret("token", map[string][]byte{"": []byte("Bearer second")}))
	require.Eventually(t, func() bool { return injected() == "Bearer second" }, patient, 20*time.Millisecond)

	// The provider is passed on as it is: this Envoy does not have it, and says so.
	require.Eventually(t, func() bool { return e.Stat("sds.by-provider.update_rejected") > 0 }, patient, 20*time.Millisecond)
	last := h.Status().LastNACK
	require.NotNil(t, last)
	assert.Equal(t, []string{"by-provider"}, last.Names)
	assert.Contains(t, last.Message, "no-such-provider")
	assert.EqualValues(t, 1, h.Status().NACKs, "and nothing else")
}
