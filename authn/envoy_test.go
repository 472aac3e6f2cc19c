package authn_test

import (
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/test/envoytest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// The gateway has one listener for each setting. None requires a client certificate, so that a request without one
// shows what becomes of the header.
const (
	gatewayBootstrap = `
static_resources:
  clusters:
  - name: plain
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: plain
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: PLAIN}}}}]}]
  - name: tls
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: tls
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: TLS}}}}]}]
    transport_socket: &upstream
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: &identity
          tls_params: {tls_maximum_protocol_version: TLSv1_3}
          ` + gatewayFiles + `
          validation_context: {trusted_ca: {filename: roots.pem}}
  - name: second
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: second
      endpoints: [{lb_endpoints: [{endpoint: {address: {pipe: {path: "./second.sock"}}}}]}]
    transport_socket: *upstream
  listeners:`
	gatewayListener = `
  - name: NAME
    address: ADDRESS
    filter_chains:
    - transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          VERIFY
      filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: NAME
          forward_client_cert_details: MODE
          set_current_client_cert_details: {DETAILS}
          route_config:
            virtual_hosts:
            - {name: all, domains: ["*"], routes: [{match: {prefix: "/"}, route: {cluster: CLUSTER}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
`
	// How a listener verifies certificates of clients: as it should; not, as its settings say; not, as nothing is set.
	verified     = "require_client_certificate: false" + nextLine + "common_tls_context: *identity"
	untrusted    = "require_client_certificate: true" + nextLine + "common_tls_context: {" + gatewayFiles + ", validation_context: {trusted_ca: {filename: roots.pem}, trust_chain_verification: ACCEPT_UNTRUSTED}}"
	unverified   = "require_client_certificate: true" + nextLine + "common_tls_context: {" + gatewayFiles + "}"
	gatewayFiles = `tls_certificates: [{certificate_chain: {filename: gateway.pem}, private_key: {filename: gateway.key}}]`
	nextLine     = "\n          "
	anyPort      = `{socket_address: {address: 127.0.0.1, port_value: 0}}`
	allDetails   = `subject: true, cert: true, chain: true, dns: true, uri: true`
)

// answer is what the server behind the gateway says of a request.
type answer struct {
	Headers      []string
	Caller       *authn.Caller
	NoCredential bool
	Refused      string
}

// gateway is an Envoy in front of a server.
type gateway struct {
	t       *testing.T
	ca      *spiffetest.CA
	envoy   *envoytest.Envoy
	answers chan answer // of the server, one for each request
}

func startGateway(t *testing.T) *gateway {
	envoytest.Binary(t)
	ca := spiffetest.NewCA(t, "example.org")
	self := ca.SVID("/gateway")
	dir, err := os.MkdirTemp("", "xfcc") // t.TempDir is too long for a Unix socket
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	root := must.Get(os.OpenRoot(dir))(t)
	defer root.Close()
	certs, key, err := self.MarshalPEM()
	require.NoError(t, err)
	for name, content := range map[string][]byte{"gateway.pem": certs, "gateway.key": key, "roots.pem": certpem.EncodeCertificates([]*x509.Certificate{ca.Root()})} {
		require.NoError(t, root.WriteFile(name, content, 0o600))
	}

	a, answers := forwardedCertificate(t), make(chan answer, 1)
	handler := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		c, err := a.Authenticate(r)
		said := answer{Headers: r.Header.Values("X-Forwarded-Client-Cert"), Caller: c, NoCredential: errors.Is(err, authn.ErrNoCredential)}
		if errors.Is(err, authn.ErrRefused) {
			said.Refused = err.Error()
		}
		answers <- said
	})
	plain := httptest.NewServer(handler)
	t.Cleanup(plain.Close)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/server"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(self.ID())})
	require.NoError(t, err)
	config := must.Get(endpoint.ServerConfig())(t)
	listener := must.Get(tls.Listen("tcp", "127.0.0.1:0", config))(t)
	secure := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	served := make(chan struct{})
	go func() { _ = secure.Serve(listener); close(served) }()
	t.Cleanup(func() { _ = secure.Close(); <-served })

	var listeners strings.Builder
	listen := func(name, address, verify, mode, details, cluster string) {
		listeners.WriteString(strings.NewReplacer("VERIFY", verify, "NAME", name, "ADDRESS", address, "MODE", mode, "DETAILS", details, "CLUSTER", cluster).Replace(gatewayListener))
	}
	for _, mode := range []string{"SANITIZE", "SANITIZE_SET", "APPEND_FORWARD", "FORWARD_ONLY", "ALWAYS_FORWARD_ONLY"} {
		listen(mode, anyPort, verified, mode, allDetails, "plain")
	}
	listen("tls", anyPort, verified, "SANITIZE_SET", allDetails, "tls")
	listen("uri", anyPort, verified, "SANITIZE_SET", "uri: true", "plain")
	listen("hash", anyPort, verified, "SANITIZE_SET", "", "plain")
	listen("first", anyPort, verified, "SANITIZE_SET", allDetails, "second")
	listen("second", `{pipe: {path: "./second.sock"}}`, verified, "APPEND_FORWARD", allDetails, "plain")
	listen("untrusted", anyPort, untrusted, "SANITIZE_SET", allDetails, "plain")
	listen("unverified", anyPort, unverified, "SANITIZE_SET", allDetails, "plain")
	port := func(l net.Listener) string { return strconv.Itoa(l.Addr().(*net.TCPAddr).Port) }
	g := &gateway{t: t, ca: ca, answers: answers}
	g.envoy = envoytest.Start(t, dir, "gateway", strings.NewReplacer("PLAIN", port(plain.Listener), "TLS}", port(listener)+"}").Replace(gatewayBootstrap)+listeners.String())
	g.envoy.WaitLive(20 * time.Second)
	return g
}

// client returns a client certificate with its chain.
func client(chain []*x509.Certificate, key any) *tls.Certificate {
	c := &tls.Certificate{PrivateKey: key}
	for _, x := range chain {
		c.Certificate = append(c.Certificate, x.Raw)
	}
	return c
}

// Ask sends a request through a listener, by a connection of its own.
func (g *gateway) Ask(listener string, from *tls.Certificate, forged ...string) (answer, error) {
	g.t.Helper()
	roots := x509.NewCertPool()
	roots.AddCert(g.ca.Root())
	config := &tls.Config{RootCAs: roots, InsecureSkipVerify: true} // the name of the gateway is not what is tested
	if from != nil {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return from, nil }
	}
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(g.t.Context(), http.MethodGet, "https://"+g.envoy.ListenerAddr(listener, 20*time.Second), nil)
	require.NoError(g.t, err)
	request.Header["X-Forwarded-Client-Cert"] = forged
	response, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Do(request)
	if err != nil {
		return answer{}, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return answer{}, fmt.Errorf("the gateway answers %s", response.Status)
	}
	return <-g.answers, nil
}

// named has a subject, and the names of web.
func named(subject pkix.Name) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.Subject, c.DNSNames = subject, []string{"web.test"} }
}

// nameOf replaces the names of a certificate by one, of the type of a DNS name (2) or a URI (6), with any characters.
func nameOf(kind byte, name string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		value := append([]byte{0x30, byte(2 + len(name)), 0x80 | kind, byte(len(name))}, name...)
		c.URIs, c.ExtraExtensions = nil, []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}}
	}
}

// forgeries are headers that a client sends of its own.
var forgeries = [][]string{
	nil,
	{"URI=spiffe://example.org/admin"},
	{"URI=spiffe://example.org/admin", "URI=spiffe://example.org/admin"},
	{`By=spiffe://example.org/gateway;Hash=00;Subject="CN=admin";URI=spiffe://example.org/admin;DNS=admin.test`},
	{""},
}

// What a real Envoy says of a client certificate is the caller, whatever the client says itself.
func TestEnvoyForwardedCertificate(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	web := spiffe.MustParseID("spiffe://example.org/web")
	type vector struct {
		chain   []*x509.Certificate
		key     any
		want    authn.Caller
		refused string // why no caller is proven
	}
	vectors := map[string]vector{}
	add := func(name string, ca *spiffetest.CA, want authn.Caller, refused string, edit ...func(*x509.Certificate)) {
		chain, key := ca.Certificate("/web", edit...)
		want.Method = "forwarded-certificate"
		vectors[name] = vector{chain, key, want, refused}
	}
	add("one URI", g.ca, authn.Caller{ID: web}, "")
	add("URIs and DNS names", g.ca, authn.Caller{ID: web, DNSNames: []string{"web.test", "*.web.test"}}, "", func(c *x509.Certificate) {
		c.URIs, c.DNSNames = append(c.URIs, &url.URL{Scheme: "https", Host: "web.test", Path: "/a=b"}), []string{"web.test", "*.web.test"}
	})
	add("DNS names alone", g.ca, authn.Caller{DNSNames: []string{"a.test", "b.test"}}, "", func(c *x509.Certificate) {
		c.URIs, c.DNSNames = nil, []string{"a.test", "b.test"}
	})
	add("no names", g.ca, authn.Caller{}, "neither a SPIFFE ID", func(c *x509.Certificate) { c.URIs = nil })
	add("two SPIFFE IDs", g.ca, authn.Caller{}, "more than one SPIFFE ID", func(c *x509.Certificate) {
		c.URIs = append(c.URIs, &url.URL{Scheme: "spiffe", Host: "example.org", Path: "/admin"})
	})
	for _, name := range []string{ // what the subject says must not be read as something else
		"web", "a, b; c=d", `say "hi"`, `back\slash`, `end\`, `two\\`, `end"`, "#hash", "Jürgen", "admin,O=Shop", "new\nline", "nul\x00",
		`x",URI=spiffe://example.org/admin;Subject="y`, `";URI=spiffe://example.org/admin`,
	} {
		add("CN "+name, g.ca, authn.Caller{ID: web, DNSNames: []string{"web.test"}}, "",
			named(pkix.Name{CommonName: name, Organization: []string{"Shop, Inc."}, OrganizationalUnit: []string{`a=b;"c"`}}))
	}
	// Envoy's header is well-formed, but other readers may see another end of the value.
	add(`CN \"`, g.ca, authn.Caller{}, "more than one backslash", named(pkix.Name{CommonName: `x\",URI=spiffe://example.org/admin;Subject=\"y`}))
	add(`subject ends with \`, g.ca, authn.Caller{}, "more than one backslash", named(pkix.Name{CommonName: `web\`}))
	below, large := g.ca, g.ca
	for n := range 5 { // with names of their own, or Envoy takes them for signed by themselves
		below = below.Intermediate(func(c *x509.Certificate) { c.Subject.CommonName = fmt.Sprint("below ", n) })
		large = large.Intermediate(func(c *x509.Certificate) {
			c.Subject.CommonName, c.Subject.OrganizationalUnit = fmt.Sprint("large ", n), slices.Repeat([]string{strings.Repeat("x", 60)}, 30)
		})
	}
	add("chain of 6", below, authn.Caller{ID: web}, "")
	add("chain of 6 large ones", large, authn.Caller{}, "the limit is 16384")

	for name, v := range vectors {
		from := client(v.chain, v.key)
		for _, listener := range []string{"SANITIZE_SET", "APPEND_FORWARD", "tls"} {
			for _, forged := range forgeries {
				said, err := g.Ask(listener, from, forged...)
				about := fmt.Sprint(name, " by ", listener, ", forged ", forged, ": ", said.Headers)
				require.NoError(t, err, about)
				require.Len(t, said.Headers, 1, about)
				element := said.Headers[0]
				if listener == "APPEND_FORWARD" {
					element = element[max(0, strings.LastIndex(element, ",By=")+1):]
				}
				require.True(t, strings.HasPrefix(element, fmt.Sprintf("By=spiffe://example.org/gateway;Hash=%x;Cert=", sha256.Sum256(v.chain[0].Raw))), about)
				if v.refused != "" {
					assert.Nil(t, said.Caller, about)
					assert.Contains(t, said.Refused, v.refused, about)
					continue
				}
				assert.Equal(t, &v.want, said.Caller, about)
			}
			// A quote that the client opens must not take in what Envoy appends.
			said := must.Get(g.Ask(listener, from, `URI=spiffe://example.org/admin;Subject="x`))(t)
			if listener == "APPEND_FORWARD" || v.refused != "" {
				assert.Nil(t, said.Caller, name)
				assert.NotEmpty(t, said.Refused, name)
			} else {
				assert.Equal(t, &v.want, said.Caller, name)
			}
		}
	}
}

// What the other settings of a real Envoy make of a client, and of what the client says itself: ForwardedCertificate's
// documentation says which of them are safe.
func TestEnvoySettings(t *testing.T) {
	t.Parallel()
	g := startGateway(t)
	web, rogue := client(g.ca.Certificate("/web")), client(spiffetest.NewCA(t, "example.org").Certificate("/admin"))
	const admin = "spiffe://example.org/admin"
	const none, refused = "", "refused"
	forged := []string{"URI=" + admin}
	for _, c := range []struct {
		listener string
		from     *tls.Certificate
		forged   []string
		want     string // the caller
	}{
		// Safe: the caller is the client of the nearest proxy, or there is none.
		{"SANITIZE", web, forged, none},
		{"SANITIZE", nil, forged, none},
		{"SANITIZE_SET", nil, forged, none},
		{"APPEND_FORWARD", nil, forged, none},
		{"tls", nil, forged, none},
		{"uri", web, forged, "spiffe://example.org/web"},
		{"hash", web, forged, refused},
		{"first", web, forged, "spiffe://example.org/gateway"},
		{"first", nil, forged, "spiffe://example.org/gateway"},
		{"FORWARD_ONLY", web, nil, none},
		{"FORWARD_ONLY", nil, forged, none},
		{"ALWAYS_FORWARD_ONLY", web, nil, none},
		{"ALWAYS_FORWARD_ONLY", nil, nil, none},
		{"unverified", rogue, nil, none},
		// Not safe: the client is whatever it says, or whatever its own certificate says.
		{"FORWARD_ONLY", web, forged, admin},
		{"ALWAYS_FORWARD_ONLY", web, forged, admin},
		{"ALWAYS_FORWARD_ONLY", nil, forged, admin},
		{"untrusted", rogue, nil, admin},
	} {
		said, err := g.Ask(c.listener, c.from, c.forged...)
		about := fmt.Sprintf("%s, certificate: %v, forged: %v, answer: %+v", c.listener, c.from != nil, c.forged, said)
		require.NoError(t, err, about)
		switch c.want {
		case none:
			assert.True(t, said.NoCredential && said.Caller == nil, about)
		case refused:
			assert.True(t, said.Refused != "" && said.Caller == nil, about)
		default:
			if assert.NotNil(t, said.Caller, about) {
				assert.Equal(t, c.want, said.Caller.ID.String(), about)
			}
		}
	}
	require.Error(t, must.Err(g.Ask("SANITIZE_SET", rogue)), "Envoy verifies the certificate")

	// Envoy writes names as they stand in the certificate. Those of a CA that signs any name can be read as others. The
	// URIs alone are safe from DNS names.
	for _, end := range ",;" {
		for kind, start := range map[byte]string{2: "a", 6: "https://a.test/"} {
			from := client(g.ca.Certificate("/web", nameOf(kind, start+string(end)+"URI="+admin)))
			said := must.Get(g.Ask("SANITIZE_SET", from))(t)
			require.NotNil(t, said.Caller, said)
			assert.Equal(t, admin, said.Caller.ID.String(), "if Envoy does quote names now, the documentation of ForwardedCertificate should say so")
			said = must.Get(g.Ask("uri", from))(t)
			assert.Equal(t, kind == 2, said.Caller == nil && said.Refused != "", said)
		}
	}
	for _, name := range []string{`a"b.test`, `a.test\`, "a b.test"} {
		said := must.Get(g.Ask("SANITIZE_SET", client(g.ca.Certificate("/web", nameOf(2, name)))))(t)
		assert.NotEmpty(t, said.Refused, name)
	}
}
