package caconn_test

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tlsalert"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A certificate is presented from its first moment to before its end, and not out of that time: the CA would refuse the connection, on which a token
// may do.
func TestPresent(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		begin := time.Now().Add(time.Minute)
		chain, key := spiffetest.NewCA(t, "example.org").Certificate("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = begin, begin.Add(time.Hour) })
		cert := &tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}
		get := func() *tls.Certificate { return cert }
		assert.Nil(t, caconn.Present(nil))
		assert.Nil(t, caconn.Present(func() *tls.Certificate { return nil }))
		assert.Nil(t, caconn.Present(func() *tls.Certificate { return new(tls.Certificate) }))
		assert.Nil(t, caconn.Present(func() *tls.Certificate { return &tls.Certificate{Certificate: [][]byte{[]byte("x")}} }))
		for _, step := range []struct {
			at   time.Duration
			good bool
		}{{-time.Second, false}, {0, true}, {time.Hour - time.Nanosecond, true}, {time.Hour, false}, {2 * time.Hour, false}} {
			time.Sleep(time.Until(begin.Add(step.at)))
			for _, withLeaf := range []*x509.Certificate{nil, chain[0]} {
				cert.Leaf = withLeaf
				got := caconn.Present(get)
				require.Equal(t, step.good, got != nil, "%v", step.at)
				if got != nil {
					assert.NotNil(t, got.Leaf)
					assert.Equal(t, cert.Certificate, got.Certificate)
				}
			}
			assert.Equal(t, chain[0], cert.Leaf, "what the caller has is not changed")
		}
	})
}

// The client of a caller is copied without what it would do beside asking: it sends no cookies, which a CA could know it by, and follows no redirects. The
// caller's own goes on as it was.
func TestNoCookies(t *testing.T) {
	t.Parallel()
	var sent []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent = append(sent, r.URL.Path+" "+r.Header.Get("Cookie"))
		http.SetCookie(w, &http.Cookie{Name: "session", Value: "1", Path: "/"})
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		}
	}))
	defer server.Close()
	jar := must.Get(cookiejar.New(nil))(t)
	own := &http.Client{Jar: jar}
	require.NoError(t, must.Get(own.Get(server.URL+"/own"))(t).Body.Close())
	c, err := caconn.New(caconn.Config{Name: "test", Endpoint: caclient.Endpoint{
		URL: server.URL, AllowPlaintext: true, HTTPClient: own, TrustDomain: spiffe.MustParseTrustDomain("example.org"),
	}})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, c.Do(t.Context(), caconn.Request{Op: "sign", Method: http.MethodGet, Path: "/ca"}, nil))
	}
	err = c.Do(t.Context(), caconn.Request{Op: "sign", Method: http.MethodGet, Path: "/away"}, nil)
	assert.Equal(t, http.StatusTemporaryRedirect, must.As[*caconn.Status](err)(t).Code)
	assert.Equal(t, []string{"/own ", "/ca ", "/ca ", "/away "}, sent)
	assert.Same(t, jar, own.Jar)
	assert.Nil(t, own.CheckRedirect)
}

// TestAlert: without roots of its own, too, a client that the CA refuses is told so by its alert.
func TestAlert(t *testing.T) {
	t.Parallel()
	host := spiffetest.NewCA(t, "example.org")
	chain, key := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{"localhost"} })
	server := httptest.NewUnstartedServer(http.NotFoundHandler())
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}}, ClientAuth: tls.RequireAnyClientCert}
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	for i := range rounds.Of(10) {
		size := []int{0, 1 << 20}[i%2]
		transport := tlsalert.NewTransport(nil, false, nil)
		transport.TLSClientConfig.RootCAs, transport.TLSClientConfig.ServerName = host.Bundle().CertPool(), "localhost" // in place of those of the host
		transport.Protocols.SetHTTP1(false)
		resp, err := (&http.Client{Transport: transport}).Post(server.URL, "", strings.NewReader(strings.Repeat("x", size)))
		if err == nil {
			_ = resp.Body.Close()
		}
		assert.ErrorContains(t, err, "remote error: tls: certificate required")
		transport.CloseIdleConnections()
	}
}
