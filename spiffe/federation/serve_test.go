package federation_test

import (
	"bytes"
	"context"
	"crypto/fips140"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func ask(h http.Handler, method string, header ...string) *http.Response {
	r := httptest.NewRequest(method, "/any/path?x=1", nil)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t testing.TB, r *http.Response) []byte {
	t.Helper()
	b := must.Get(io.ReadAll(r.Body))(t)
	return b
}

func TestHandler(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-1", "FED-34", "FED-35", "FED-36", "BND-19", "BND-20", "BND-24")
	ca := spiffetest.NewCA(t, "partner.test")
	src := &source{}
	h := must.Get(federation.NewHandler(src, partner))(t)

	r := ask(h, "GET")
	assert.Equal(t, 503, r.StatusCode, "there is none yet")
	assert.Equal(t, "no-store", r.Header.Get("Cache-Control"))
	assert.Empty(t, r.Header.Get("Etag"))

	src.b = bundleOf(t, ca, new(uint64(7)), 120*time.Second)
	r = ask(h, "GET")
	first := body(t, r)
	assert.Equal(t, 200, r.StatusCode)
	assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
	assert.Equal(t, "max-age=120", r.Header.Get("Cache-Control"))
	assert.Equal(t, string(documentOf(t, src.b)), string(first))
	assert.True(t, utf8.Valid(first) && first[0] == '{')
	assert.Contains(t, string(first), `"spiffe_sequence":7,"spiffe_refresh_hint":120,`)
	for _, member := range []string{"alg", "key_ops", "x5t", "kid"} {
		assert.NotContains(t, string(first), `"`+member+`"`)
	}
	tag := r.Header.Get("Etag")
	assert.Regexp(t, `^"[A-Za-z0-9_-]{24}"$`, tag, "strong")

	head := ask(h, "HEAD")
	assert.Empty(t, body(t, head))
	assert.Equal(t, 200, head.StatusCode)
	assert.Equal(t, r.Header, head.Header)
	assert.Equal(t, int64(len(first)), head.ContentLength)

	for _, c := range []struct {
		header []string
		status int
	}{
		{[]string{"If-None-Match", tag}, 304},
		{[]string{"If-None-Match", "W/" + tag}, 304},
		{[]string{"If-None-Match", `"a", ` + tag}, 304},
		{[]string{"If-None-Match", "*"}, 304},
		{[]string{"If-None-Match", `"a"`}, 200},
		{[]string{"If-None-Match", tag[1:]}, 200},
		{[]string{"If-None-Match", ""}, 200},
		{[]string{"Authorization", "Bearer x"}, 200},
	} {
		for _, method := range []string{"GET", "HEAD"} {
			r := ask(h, method, c.header...)
			assert.Equal(t, c.status, r.StatusCode, "%v", c.header)
			assert.Equal(t, tag, r.Header.Get("Etag"))
			assert.Equal(t, "max-age=120", r.Header.Get("Cache-Control"))
			if c.status == 304 {
				assert.Empty(t, body(t, r))
				assert.Empty(t, r.Header.Get("Content-Type"))
			}
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE", "PATCH", "OPTIONS", "QUERY"} {
		r := ask(h, method)
		assert.Equal(t, 405, r.StatusCode)
		assert.Equal(t, "GET, HEAD", r.Header.Get("Allow"))
	}

	// An equal bundle has equal bytes, and a new one is served at once.
	src.b = bundleOf(t, ca, new(uint64(7)), 120*time.Second)
	assert.Equal(t, tag, ask(h, "GET").Header.Get("Etag"))
	ca.Rotate()
	src.b = bundleOf(t, ca, new(uint64(8)), 0)
	r = ask(h, "GET", "If-None-Match", tag)
	assert.Equal(t, 200, r.StatusCode)
	assert.Equal(t, "max-age=300", r.Header.Get("Cache-Control"))
	assert.Equal(t, string(documentOf(t, src.b)), string(body(t, r)))

	// What is not this domain's bundle is not served under its name.
	src.b = spiffetest.NewCA(t, "other.test").Bundle()
	assert.Equal(t, 503, ask(h, "GET").StatusCode)

	_, err := federation.NewHandler(nil, partner)
	require.ErrorContains(t, err, "no bundle source")
	_, err = federation.NewHandler(src, spiffe.TrustDomain{})
	require.ErrorIs(t, err, spiffe.ErrZero)
}

// A document that cannot be written is no document: 503, and not half of one.
func TestHandlerCannotEncode(t *testing.T) {
	t.Parallel()
	big := spiffetest.NewCA(t, "partner.test").Root()
	many := make([]*x509.Certificate, jws.MaxSetKeys)
	for i := range many {
		c := *big
		c.Raw = bytes.Clone(big.Raw)
		c.Raw = append(c.Raw, byte(i), byte(i>>8))
		c.Raw = append(c.Raw, make([]byte, 1000)...)
		many[i] = &c
	}
	b := must.Get(spiffe.NewBundle(partner, spiffe.BundleContents{X509Authorities: many}))(t)
	h := must.Get(federation.NewHandler(b, partner))(t)
	assert.Equal(t, 503, ask(h, "GET").StatusCode)
}

// handshake has a client with the given configuration dial a server with the other one.
func handshake(t *testing.T, server, client *tls.Config) (tls.ConnectionState, error) {
	t.Helper()
	a, b := memconn.Pipe()
	done := make(chan error, 1)
	go func() {
		defer b.Close()
		done <- tls.Server(b, server).HandshakeContext(t.Context())
	}()
	c := tls.Client(a, client)
	err := c.HandshakeContext(t.Context())
	_ = a.Close()
	return c.ConnectionState(), errors.Join(err, <-done)
}

// What the server negotiates, and what it does not.
func TestServerTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-24", "FED-25", "FED-33")
	web := spiffetest.NewCA(t, "web.test")
	svid := web.SVID("/endpoint", func(c *x509.Certificate) { c.DNSNames = []string{"a.test"} })
	cert := svid.TLSCertificate()
	server := must.Get(federation.ServerConfig(svid))(t)
	roots := web.Bundle().CertPool()

	asked := false
	state, err := handshake(t, server, &tls.Config{RootCAs: roots, ServerName: "a.test", GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		asked = true
		return cert, nil
	}})
	require.NoError(t, err)
	assert.Equal(t, uint16(tls.VersionTLS13), state.Version)
	assert.False(t, asked, "no client certificate is asked for")

	cache := &tls.Config{RootCAs: roots, ServerName: "a.test", ClientSessionCache: tls.NewLRUClientSessionCache(1), MaxVersion: tls.VersionTLS12}
	for range 2 {
		state = must.Get(handshake(t, server, cache))(t)
		assert.False(t, state.DidResume, "consumers see the newest certificate")
	}

	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
		_, err = handshake(t, server, &tls.Config{RootCAs: roots, ServerName: "a.test", MinVersion: version, MaxVersion: version})
		require.Error(t, err, tls.VersionName(version))
	}
	suite := func(id uint16) error {
		_, err := handshake(t, server, &tls.Config{RootCAs: roots, ServerName: "a.test", MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{id}})
		return err
	}
	for _, id := range []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
	} {
		if fips140.Enabled() && strings.Contains(tls.CipherSuiteName(id), "CHACHA20") {
			require.Error(t, suite(id))
			continue
		}
		require.NoError(t, suite(id), tls.CipherSuiteName(id))
	}
	for _, id := range []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA, tls.TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA, tls.TLS_RSA_WITH_AES_128_GCM_SHA256, tls.TLS_RSA_WITH_AES_256_GCM_SHA384,
	} {
		require.Error(t, suite(id), tls.CipherSuiteName(id))
	}
	for curve, ok := range map[tls.CurveID]bool{tls.X25519: true, tls.CurveP256: true, tls.CurveP384: true, tls.X25519MLKEM768: true, tls.CurveP521: false} {
		_, err := handshake(t, server, &tls.Config{RootCAs: roots, ServerName: "a.test", CurvePreferences: []tls.CurveID{curve}})
		assert.Equal(t, ok && !(fips140.Enabled() && notApproved(curve)), err == nil, "%v", curve)
	}

	_, err = federation.ServerConfig(nil)
	require.Error(t, err)
}

// A server of https_spiffe presents an X.509-SVID that is good, or nothing.
func TestServerSVID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-24", "FED-33", "FED-64")
	ca := spiffetest.NewCA(t, "partner.test")
	id := spiffe.MustParseID("spiffe://partner.test/endpoint")
	server := must.Get(federation.ServerConfig(ca.SVID("/endpoint")))(t)
	l := memconn.Listen()
	h := must.Get(federation.NewHandler(ca.Bundle(), partner))(t)
	s := &http.Server{Handler: h, TLSConfig: server}
	go func() { _ = s.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = s.Close() })
	r := federation.Relationship{TrustDomain: partner, URL: "https://a.test/", Profile: federation.SPIFFE{EndpointID: id, Initial: ca.Bundle()}}
	must.Get(federation.Fetch(t.Context(), r, &federation.Config{DialContext: l.DialContext}))(t)

	// What does not pass as an SVID cannot be given to it at all.
	for _, f := range []string{"CALeaf", "NoURI", "PathlessID", "NoDigitalSignature"} {
		_, err := spiffe.NewSVID(ca.Broken(f))
		require.Error(t, err, "%v", f)
	}
	client := &tls.Config{InsecureSkipVerify: true} // what the server sends is what is looked at
	for want, self := range map[string]spiffe.SVIDSource{
		"no identity to present: not ready":                    sourceOf{nil, errors.New("not ready")},
		"no identity to present: the source gave none":         sourceOf{},
		`the SVID of "spiffe://partner.test/endpoint" expired`: ca.SVID("/endpoint", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore }),
	} {
		server := must.Get(federation.ServerConfig(self))(t)
		_, err := handshake(t, server, client)
		require.ErrorContains(t, err, want)
	}
}

type sourceOf struct {
	svid *spiffe.SVID
	err  error
}

func (s sourceOf) SVID() (*spiffe.SVID, error) { return s.svid, s.err }

// Two domains that serve each other: the whole way, over their own handlers.
func TestMutualFederation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-17", "FED-6", "BND-6")
	synctest.Test(t, func(t *testing.T) {
		world := newInternet()
		a, b := spiffetest.NewCA(t, "a.test"), spiffetest.NewCA(t, "b.test")
		side := func(self *spiffetest.CA, other *spiffetest.CA) *federation.Manager {
			name := self.TrustDomain().String()
			h := must.Get(federation.NewHandler(live{self}, self.TrustDomain()))(t)
			world.host(t, name, svidCert(self, "/endpoint"), h.ServeHTTP)
			if other == nil {
				return nil
			}
			id := must.Get(other.TrustDomain().WorkloadID("endpoint"))(t)
			return newManager(t, federation.Config{
				Relationships: []federation.Relationship{{
					TrustDomain: other.TrustDomain(), URL: "https://" + other.TrustDomain().String() + "/",
					Profile: federation.SPIFFE{EndpointID: id, Initial: other.Bundle()},
				}},
				DialContext: world.dial,
			})
		}
		atA := side(a, b)
		side(b, nil)
		atB := newManager(t, federation.Config{}) // A trusts B, and B does not trust A
		running(t, atA)
		running(t, atB)
		synctest.Wait()
		assert.True(t, trusts(t, atA, b))
		assert.False(t, trusts(t, atB, a))

		// B rotates with care: announce, wait, sign, wait, drop.
		for range rounds.Of(2) {
			b.Prepare()
			time.Sleep(25 * time.Minute)
			b.Rotate()
			assert.True(t, trusts(t, atA, b), "the key was known before it signed")
			time.Sleep(2 * time.Hour)
			b.DropOldRoots()
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			assert.Len(t, inForce(t, atA, b.TrustDomain()).Contents().X509Authorities, 1)
			assert.True(t, trusts(t, atA, b))
			world.mu.Lock()
			l := world.hosts["b.test"]
			world.mu.Unlock()
			_ = l.Close()
			side(b, nil) // with an SVID of the new root
		}
	})
}

// live is a CA whose bundle may change.
type live struct{ *spiffetest.CA }

func (l live) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return l.CA.Bundle().Bundle(td) }

// Other clients get along with our server, and take what it says about caching.
func TestPlainClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "FED-1", "FED-33")
	web, ca := spiffetest.NewCA(t, "web.test"), spiffetest.NewCA(t, "partner.test")
	_, url := listen(t, webCert(web, "127.0.0.1"), serving(t, ca.Bundle()))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: web.Bundle().CertPool()}}}
	defer client.CloseIdleConnections()
	req := must.Get(http.NewRequestWithContext(context.Background(), http.MethodGet, url, nil))(t)
	r := must.Get(client.Do(req))(t)
	defer r.Body.Close()
	got := must.Get(spiffe.ParseBundle(partner, body(t, r)))(t)
	assert.True(t, ca.Bundle().Equal(got))
}
