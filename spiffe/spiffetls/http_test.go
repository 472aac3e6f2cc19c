package spiffetls_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// who answers with the HTTP version and the peer, as the handler knows them.
var who = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	peer, ok := spiffetls.PeerFromContext(r.Context())
	if !ok {
		fmt.Fprintf(w, "%d nobody", r.ProtoMajor)
		return
	}
	fmt.Fprintf(w, "%d %s", r.ProtoMajor, peer)
})

// serve runs s on a real socket until the test ends and returns the base URL. A nil listen means
// s.ServeTLS.
func serve(t *testing.T, s *http.Server, run func(net.Listener) error) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	if run == nil {
		run = func(l net.Listener) error { return s.ServeTLS(l, "", "") }
	}
	if s.ErrorLog == nil {
		s.ErrorLog = log.New(io.Discard, "", 0)
	}
	var wg sync.WaitGroup
	wg.Go(func() { assert.ErrorIs(t, run(l), http.ErrServerClosed) })
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		wg.Wait()
	})
	return "https://" + l.Addr().String()
}

// configured returns a server that who answers on, for /db.
func configured(t *testing.T, ca *spiffetest.CA, allow spiffe.Policy, opts *spiffetls.Config) *http.Server {
	t.Helper()
	s := &http.Server{Handler: who}
	require.NoError(t, configureServer(s, with(opts, ca.SVID("/db"), ca.Bundle(), allow)))
	return s
}

// clientOf returns a client with the identity path, for HTTP/2 unless the options say otherwise.
func clientOf(t *testing.T, ca *spiffetest.CA, path string, opts *spiffetls.Config) *http.Client {
	t.Helper()
	transport := must.Get(newTransport(with(opts, ca.SVID(path), ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID()))))(t)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}
}

var http1 = &spiffetls.Config{NextProtos: []string{"http/1.1"}}

func get(t *testing.T, c *http.Client, url string) string {
	t.Helper()
	resp, err := c.Get(url)
	if !assert.NoError(t, err) {
		return ""
	}
	body, err := io.ReadAll(resp.Body)
	assert.NoError(t, err)
	assert.NoError(t, resp.Body.Close())
	return string(body)
}

func TestPeerFromContext(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for _, version := range versions {
		s := configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), &spiffetls.Config{MinVersion: version})
		s.TLSConfig.MaxVersion = version
		url := serve(t, s, nil)
		assert.Equal(t, "2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", &spiffetls.Config{MinVersion: version}), url))
		assert.Equal(t, "1 spiffe://example.org/old", get(t, clientOf(t, ca, "/old", &spiffetls.Config{MinVersion: version, NextProtos: http1.NextProtos}), url))
	}
}

// TestPeersDoNotMix has many clients at once, each of which must be seen as itself.
func TestPeersDoNotMix(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	url := serve(t, configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), nil), nil)
	var wg sync.WaitGroup
	for i := range 8 {
		opts, major := (*spiffetls.Config)(nil), 2
		if i%2 == 1 {
			opts, major = http1, 1
		}
		client := clientOf(t, ca, fmt.Sprintf("/client/%d", i), opts)
		wg.Go(func() {
			for range 10 {
				assert.Equal(t, fmt.Sprintf("%d spiffe://example.org/client/%d", major, i), get(t, client, url))
			}
		})
	}
	wg.Wait()
}

func TestPeerOfResumedConnection(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	url := serve(t, configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), nil), nil)
	client := clientOf(t, ca, "/web", nil)
	transport := client.Transport.(*http.Transport)
	transport.TLSClientConfig.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	for i := range 3 {
		resp := must.Get(client.Get(url))(t)
		body := must.Get(io.ReadAll(resp.Body))(t)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, "2 spiffe://example.org/web", string(body))
		assert.Equal(t, i > 0, resp.TLS.DidResume)
		transport.CloseIdleConnections()
	}
}

func TestRefusedClientReachesNoHandler(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := configured(t, ca, spiffe.AllowIDs(ca.SVID("/web").ID()), nil)
	s.Handler = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("a request got through") })
	url := serve(t, s, nil)
	for _, opts := range []*spiffetls.Config{nil, http1} {
		_, err := clientOf(t, ca, "/other", opts).Get(url)
		assert.Error(t, err) // the alert, or a reset if the client was still writing
	}
}

func TestClientRefusesServer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := &http.Server{Handler: who}
	require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/impostor"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()}))
	_, err := clientOf(t, ca, "/web", nil).Get(serve(t, s, nil))
	e := verifyError(t, err, "policy")
	assert.Equal(t, "spiffe://example.org/impostor", e.ID.String())
	assert.ErrorIs(t, err, spiffe.ErrDenied)
}

// TestNeverAGuess asks for the peer where no proof was made.
func TestNeverAGuess(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	allow := spiffe.AllowMembersOf(ca.TrustDomain())

	config := must.Get(serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: allow}))(t)
	verified := &http.Server{TLSConfig: config, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		assert.NotEmpty(t, r.TLS.PeerCertificates)
		who(w, r)
	})}
	assert.Equal(t, "2 nobody", get(t, clientOf(t, ca, "/web", nil), serve(t, verified, nil)), "without ConfigureServer")

	configuredElsewhere := configured(t, ca, allow, nil)
	other := &http.Server{Handler: who}
	url := serve(t, other, func(l net.Listener) error { return other.Serve(tls.NewListener(l, configuredElsewhere.TLSConfig)) })
	assert.Equal(t, "1 nobody", get(t, clientOf(t, ca, "/web", http1), url), "a connection that another server accepted")

	plain := configured(t, ca, allow, nil)
	url = serve(t, plain, plain.Serve)
	assert.Equal(t, "1 nobody", get(t, http.DefaultClient, "http"+strings.TrimPrefix(url, "https")), "without TLS")

	_, ok := spiffetls.PeerFromContext(httptest.NewRequest(http.MethodGet, "/", nil).Context())
	assert.False(t, ok)
	_, ok = spiffetls.PeerFromContext(t.Context())
	assert.False(t, ok)
}

func TestServeOnATLSListener(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	url := serve(t, s, func(l net.Listener) error { return s.Serve(tls.NewListener(l, s.TLSConfig)) })
	assert.Equal(t, "2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", nil), url))
	assert.Equal(t, "1 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", http1), url))
}

// Serve configures the server that it serves, and refuses one that is configured already.
func TestServe(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	e := must.Get(spiffetls.New(spiffetls.Config{
		Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()),
	}))(t)
	s := &http.Server{Handler: who}
	url := serve(t, s, func(l net.Listener) error { return e.Serve(s, l) })
	assert.Equal(t, "2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", nil), url))
	assert.ErrorContains(t, e.Serve(s, nil), "has a TLSConfig")
}

func TestConnContextIsKept(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	type key struct{}
	s := &http.Server{
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context { return context.WithValue(ctx, key{}, "kept") },
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprint(w, r.Context().Value(key{}), " ")
			who(w, r)
		}),
	}
	require.NoError(t, configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())}))
	url := serve(t, s, nil)
	assert.Equal(t, "kept 2 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", nil), url))
	assert.Equal(t, "kept 1 spiffe://example.org/web", get(t, clientOf(t, ca, "/web", http1), url))

}

func TestConfigureServerRefuses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	configure := func(s *http.Server) error {
		return configureServer(s, spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowAnyPeer()})
	}
	s := &http.Server{TLSConfig: &tls.Config{}}
	assert.ErrorContains(t, configure(s), "has a TLSConfig")
	assert.Nil(t, s.ConnContext, "a refused server is left as it was")
	s = &http.Server{}
	require.NoError(t, configure(s))
	assert.Error(t, configure(s), "twice")
}

// TestProtocols shows that the versions of HTTP that the server was told to speak are those that it
// offers, whenever it was told.
func TestProtocols(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	only := func(http1, http2 bool) *http.Protocols {
		p := new(http.Protocols)
		p.SetHTTP1(http1)
		p.SetHTTP2(http2)
		p.SetUnencryptedHTTP2(true)
		return p
	}
	for name, c := range map[string]struct {
		opts   *spiffetls.Config
		change func(*http.Server)
		h2, h1 string // what clients get that prefer HTTP/2 and that speak only HTTP/1.1
	}{
		"default":           {nil, func(*http.Server) {}, "2", "1"},
		"HTTP/1.1":          {nil, func(s *http.Server) { s.Protocols = only(true, false) }, "1", "1"},
		"HTTP/2":            {nil, func(s *http.Server) { s.Protocols = only(false, true) }, "2", ""},
		"no TLSNextProto":   {nil, func(s *http.Server) { s.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} }, "1", "1"},
		"options, HTTP/1.1": {http1, func(*http.Server) {}, "1", "1"},
		"options, HTTP/2":   {&spiffetls.Config{NextProtos: []string{"h2"}}, func(*http.Server) {}, "2", "1"}, // crypto/tls allows it
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), c.opts)
			c.change(s)
			url := serve(t, s, nil)
			assert.Equal(t, c.h2+" spiffe://example.org/web", get(t, clientOf(t, ca, "/web", nil), url))
			if c.h1 != "" {
				assert.Equal(t, c.h1+" spiffe://example.org/web", get(t, clientOf(t, ca, "/web", http1), url))
				return
			}
			config := must.Get(clientConfig(with(http1, ca.SVID("/web"), ca.Bundle(), spiffe.AllowAnyPeer())))(t)
			conn := must.Get(tls.Dial("tcp", strings.TrimPrefix(url, "https://"), config))(t)
			assert.Empty(t, conn.ConnectionState().NegotiatedProtocol, "HTTP/1.1 is not offered")
			assert.NoError(t, conn.Close())
		})
	}
}

func TestTransport(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	client := clientOf(t, ca, "/web", nil)
	transport := client.Transport.(*http.Transport)
	assert.NotSame(t, transport, clientOf(t, ca, "/web", nil).Transport)

	s := configured(t, ca, spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	s.Handler = http.RedirectHandler("http://127.0.0.1:1/", http.StatusTemporaryRedirect)
	url := serve(t, s, nil)
	clone := &http.Client{Transport: transport.Clone()}
	t.Cleanup(clone.CloseIdleConnections)
	transport.Proxy = nil // the caller's to change
	for _, c := range []*http.Client{client, clone} {
		for _, u := range []string{"http" + strings.TrimPrefix(url, "https"), url} {
			for _, body := range []io.Reader{nil, strings.NewReader("secret")} {
				req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, u, body))(t)
				_, err := c.Do(req)
				assert.ErrorContains(t, err, "spiffetls: refusing to send a request without TLS", u)
			}
		}
	}
}

// TestConfigurationsDoNotMix: a server believes what its own configuration has proved, and nothing that
// another one let in.
func TestConfigurationsDoNotMix(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	strict := configured(t, ca, spiffe.AllowIDs(ca.SVID("/ops").ID()), nil)
	open := configured(t, ca, spiffe.AllowAnyPeer(), nil)
	url := serve(t, strict, func(l net.Listener) error { return strict.Serve(tls.NewListener(l, open.TLSConfig)) })
	assert.Equal(t, "1 nobody", get(t, clientOf(t, ca, "/web", http1), url))
}
