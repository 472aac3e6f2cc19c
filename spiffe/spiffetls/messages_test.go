package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// fatal is a testing.TB that keeps what Fatalf was told.
type fatal struct{ testing.TB }

func (fatal) Helper() {}

func (fatal) Fatalf(format string, args ...any) { panic(fmt.Errorf(format, args...)) }

// caught is the error that f panics with.
func caught(f func()) (err error) {
	defer func() {
		if why := recover(); why != nil {
			err = fmt.Errorf("%v", why)
		}
	}()
	f()
	return nil
}

// TestMessages makes the mistakes of a first day with packages spiffe, spiffetls and spiffetest: each message names the
// thing and says what to do.
func TestMessages(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(fatal{t}, "example.org"), spiffetest.NewCA(t, "other.test")
	td, self, bundle, allow := ca.TrustDomain(), ca.SVID("/db"), ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain())
	prefix := func(p string) error {
		return must.Err(serverConfig(spiffetls.Config{Self: self, Peers: bundle, Allow: spiffe.AllowPathPrefix(td, p)}))
	}
	oneID := must.Get(spiffe.ParsePolicy("spiffe://example.org/ns/prod"))(t)

	server := httptest.NewUnstartedServer(whose)
	require.NoError(t, configureServer(server.Config, spiffetls.Config{Self: self, Peers: bundle, Allow: allow}))
	server.TLS = server.Config.TLSConfig
	server.StartTLS()
	t.Cleanup(server.Close)
	web := httptest.NewTLSServer(whose)
	t.Cleanup(web.Close)
	plain := httptest.NewUnstartedServer(whose)
	require.NoError(t, configureServer(plain.Config, spiffetls.Config{Self: self, Peers: bundle, Allow: allow}))
	plain.Start()
	t.Cleanup(plain.Close)
	request := func(url string, peers spiffe.BundleSource, allow spiffe.PolicySource) error {
		transport := must.Get(newTransport(with(nil, ca.SVID("/web"), peers, allow)))(t)
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport}).Get(url)
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	answer := func(h http.Handler, r *http.Request) error {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return fmt.Errorf("%s", w.Body)
	}
	expired := must.Get(spiffe.NewSVID(ca.Broken("Expired")))(t)

	for what, c := range map[string]struct {
		err  error
		want []string
	}{
		// Policies.
		"a prefix with a star":       {prefix("/ns/prod/*"), []string{"AllowPathPrefix takes no stars"}},
		"a prefix without a slash":   {prefix("ns/prod"), []string{"the path alone, such as /ns/prod"}},
		"a prefix with one too many": {prefix("/ns/prod/"), []string{"a trailing slash is not allowed"}},
		"a prefix that is an ID":     {prefix("spiffe://example.org/ns/prod"), []string{"the path alone, such as /ns/prod"}},
		"an ID as a prefix, refused": {oneID.Check(spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")),
			[]string{`is one exact ID; write "spiffe://example.org/ns/prod/*"`}},
		"a star in a name":  {must.Err(spiffe.ParsePolicy("spiffe://*.example.org/a")), []string{"name each trust domain"}},
		"the zero policy":   {must.Err(serverConfig(spiffetls.Config{Self: self, Peers: bundle, Allow: spiffe.Policy{}})), []string{"use AllowIDs"}},
		"no ID in a policy": {must.Err(serverConfig(spiffetls.Config{Self: self, Peers: bundle, Allow: spiffe.AllowIDs()})), []string{"AllowIDs needs at least one ID"}},

		// Arguments.
		"no identity":                 {must.Err(serverConfig(spiffetls.Config{Peers: bundle, Allow: allow})), []string{"no Self to present", "OptionalIdentity", "WebCertificate"}},
		"no bundles":                  {must.Err(serverConfig(spiffetls.Config{Self: self, Allow: allow})), []string{"no Peers", "*spiffe.Bundle", "WebRoots"}},
		"no policy":                   {must.Err(serverConfig(spiffetls.Config{Self: self, Peers: bundle})), []string{"no Allow", "spiffe.AllowIDs", "Hosts"}},
		"no bundles to verify with":   {must.Err(spiffe.NewVerifier(nil, allow, nil)), []string{"no bundle source to verify peers with", "*spiffe.Bundle"}},
		"no policy to verify with":    {must.Err(spiffe.NewVerifier(bundle, nil, nil)), []string{"no policy; use AllowIDs"}},
		"a nil identity":              {must.Err(serverConfig(spiffetls.Config{Self: (*spiffe.SVID)(nil), Peers: bundle, Allow: allow})), []string{"nil *spiffe.SVID"}},
		"a zero identity":             {must.Err(serverConfig(spiffetls.Config{Self: new(spiffe.SVID), Peers: bundle, Allow: allow})), []string{"zero SVID", "NewSVID"}},
		"a nil bundle":                {must.Err(serverConfig(spiffetls.Config{Self: self, Peers: (*spiffe.Bundle)(nil), Allow: allow})), []string{"nil *spiffe.Bundle"}},
		"a nil bundle to verify with": {must.Err(spiffe.NewVerifier((*spiffe.Bundle)(nil), allow, nil)), []string{"nil *spiffe.Bundle"}},
		"a nil policy":                {must.Err(spiffe.NewVerifier(bundle, (*spiffe.LivePolicy)(nil), nil)), []string{"nil *spiffe.LivePolicy"}},
		"a URL in Hosts":              {must.Err(newTransport(spiffetls.Config{Self: self, Peers: bundle, Hosts: map[string]spiffe.PolicySource{"https://db.example": allow}})), []string{"db.example:8443", "not a URL"}},

		// Connections.
		"a bundle of another trust domain": {request(server.URL, other.Bundle(), allow), []string{`"example.org"`, `the only bundle is that of "other.test"`}},
		"a host that is not in Hosts": {request(server.URL, bundle, hostPolicies{"db.example": allow}),
			[]string{server.Listener.Addr().String(), "add it to Hosts"}},
		"a web server":         {request(web.URL, bundle, allow), []string{"no SPIFFE ID", "WebRoots"}},
		"an http URL":          {request(plain.URL, bundle, allow), []string{"use an https URL"}},
		"an expired identity":  {must.Err(tls.Dial("tcp", server.Listener.Addr().String(), clientConfigOf(t, expired, bundle))), []string{"expired at", "not renewed"}},
		"a server without TLS": {body(t, plain.URL), []string{"came without TLS", "ServeTLS or ListenAndServeTLS"}},
		"a server of httptest": {bodyOf(t, web.Client(), web.URL), []string{"ConfigureServer", "PeerFromState"}},
		"a request of httptest": {answer(whose, httptest.NewRequest("GET", "/", nil)),
			[]string{"came without TLS", "RequestFrom of package spiffetest"}},
		"a configured server twice": {configureServer(server.Config, spiffetls.Config{Self: self, Peers: bundle, Allow: allow}), []string{"has a TLSConfig", "leave it nil"}},
		"a TCP connection":          {peerOfTCP(t, server.Listener.Addr()), []string{"*net.TCPConn", "of an Endpoint"}},

		// Tests.
		"a URL of a CA":        {caught(func() { spiffetest.NewCA(fatal{t}, "spiffe://example.org") }), []string{"give the name alone"}},
		"a path without slash": {caught(func() { ca.SVID("web") }), []string{`"web"`, "begins with a slash"}},
		"an ID for a path":     {caught(func() { ca.SVID("spiffe://example.org/web") }), []string{"begins with a slash", "puts after its trust domain"}},
		"an unknown fault":     {caught(func() { ca.Broken("expired") }), []string{`"expired"`, "Expired"}},
		"an edit that breaks":  {caught(func() { ca.SVID("/web", func(c *x509.Certificate) { c.URIs = nil }) }), []string{"no SPIFFE ID"}},
		"a configuration that failed": {caught(func() {
			config, _ := serverConfig(spiffetls.Config{Peers: bundle, Allow: allow})
			spiffetest.StartTLS(httptest.NewUnstartedServer(whose), config)
		}), []string{"no configuration", "or an error"}},
	} {
		if assert.Error(t, c.err, what) {
			for _, want := range c.want {
				assert.ErrorContains(t, c.err, want, what)
			}
		}
	}
}

func clientConfigOf(t *testing.T, self *spiffe.SVID, bundle *spiffe.Bundle) *tls.Config {
	t.Helper()
	config := must.Get(clientConfig(spiffetls.Config{Self: self, Peers: bundle, Allow: spiffe.AllowAnyPeer()}))(t)
	return config
}

// body is what a server answers to a client without an identity.
func body(t *testing.T, url string) error {
	t.Helper()
	return bodyOf(t, http.DefaultClient, url)
}

func bodyOf(t *testing.T, client *http.Client, url string) error {
	t.Helper()
	resp := must.Get(client.Get(url))(t)
	defer resp.Body.Close()
	text := make([]byte, 1<<10)
	n, _ := resp.Body.Read(text)
	return fmt.Errorf("%s", text[:n])
}

func peerOfTCP(t *testing.T, addr net.Addr) error {
	t.Helper()
	conn := must.Get(net.Dial("tcp", addr.String()))(t)
	defer conn.Close()
	return must.Err(spiffetls.PeerFromConn(conn))
}
