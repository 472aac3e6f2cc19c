package caclient_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// tlsServer is a server whose certificate changes, and what its clients presented.
type tlsServer struct {
	url   string
	cert  atomic.Pointer[tls.Certificate]
	conns atomic.Int64
	open  atomic.Int64
}

// startTLS serves a page with the protocol and the subject of the client certificate.
func startTLS(t testing.TB, host *spiffetest.CA, edit func(*tls.Config)) *tlsServer {
	t.Helper()
	s := new(tlsServer)
	s.become(host)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		peer := "none"
		if len(r.TLS.PeerCertificates) > 0 {
			peer = r.TLS.PeerCertificates[0].URIs[0].Path
		}
		_, _ = fmt.Fprintf(w, "%s %s", r.Proto, peer)
	}))
	srv.EnableHTTP2 = true
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	srv.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			s.conns.Add(1)
			s.open.Add(1)
		case http.StateClosed:
			s.open.Add(-1)
		}
	}
	srv.TLS = &tls.Config{
		ClientAuth: tls.RequestClientCert, MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			c := &tls.Config{ClientAuth: tls.RequestClientCert, Certificates: []tls.Certificate{*s.cert.Load()}, NextProtos: []string{"h2", "http/1.1"}, MinVersion: tls.VersionTLS12}
			if edit != nil {
				edit(c)
			}
			return c, nil
		},
	}
	srv.StartTLS()
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

// become gives the server a certificate of a CA, for ca.test.
func (s *tlsServer) become(host *spiffetest.CA) {
	chain, key := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{"ca.test"} })
	s.cert.Store(&tls.Certificate{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key})
}

func writeFile(t testing.TB, name string, data []byte) {
	t.Helper()
	require.NoError(t, os.WriteFile(name+".tmp", data, 0o600))
	require.NoError(t, os.Rename(name+".tmp", name))
}

func writePair(t testing.TB, dir string, chain []*x509.Certificate, key crypto.Signer) {
	t.Helper()
	pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
	writeFile(t, filepath.Join(dir, "key.pem"), pem)
	writeFile(t, filepath.Join(dir, "cert-chain.pem"), pki.MarshalCertificatesPEM(chain...))
}

// in returns the options for files in a directory, like that of PROV_CERT.
func in(dir string) caclient.TLSOptions {
	return caclient.TLSOptions{
		RootsFile: filepath.Join(dir, "root-cert.pem"), ServerName: "ca.test",
		CertificateFile: filepath.Join(dir, "cert-chain.pem"), KeyFile: filepath.Join(dir, "key.pem"),
	}
}

// directory returns one with the root of host.
func folder(t testing.TB, host *spiffetest.CA) string {
	t.Helper()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "root-cert.pem"), pki.MarshalCertificatesPEM(host.Root()))
	return dir
}

func newHTTPClient(t testing.TB, o caclient.TLSOptions) *http.Client {
	t.Helper()
	c := must.Get(caclient.NewHTTPClient(o))(t)
	t.Cleanup(c.CloseIdleConnections)
	return c
}

func page(t testing.TB, c *http.Client, url string) (string, error) {
	t.Helper()
	req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil))(t)
	resp, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func requirePage(t testing.TB, want string, c *http.Client, url string) {
	t.Helper()
	require.Equal(t, want, must.Get(page(t, c, url))(t))
}

// settled makes requests until they use the connections that there are, and returns how many were made: net/http may dial
// for a request, too, that comes before it has pooled the connection of the one before.
func settled(t testing.TB, want string, c *http.Client, s *tlsServer) int64 {
	t.Helper()
	for range 20 {
		before := s.conns.Load()
		for range 3 {
			requirePage(t, want, c, s.url)
			time.Sleep(2 * time.Millisecond)
		}
		if before > 0 && s.conns.Load() == before {
			return before
		}
	}
	t.Fatal("connections are not kept")
	return 0
}

func TestHTTPClientRoots(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.2-3")
	host, other := spiffetest.NewCA(t, "server.test"), spiffetest.NewCA(t, "other.test")
	s, dir, out := startTLS(t, host, nil), folder(t, host), new(logtest.Buffer)
	file := filepath.Join(dir, "root-cert.pem")
	o := caclient.TLSOptions{RootsFile: file, ServerName: "ca.test", Logger: out.Logger()}
	c := newHTTPClient(t, o)
	kept := settled(t, "HTTP/2.0 none", c, s)

	// The CA has a new root. A file that is damaged or gone changes nothing.
	for name, spoil := range map[string]func(){
		"empty": func() { writeFile(t, file, nil) }, "text": func() { writeFile(t, file, []byte("no certificate")) },
		"half": func() { writeFile(t, file, pki.MarshalCertificatesPEM(host.Root())[:300]) }, "large": func() { writeFile(t, file, make([]byte, 1<<20+1)) },
		"gone": func() { require.NoError(t, os.Remove(file)) },
	} {
		spoil()
		requirePage(t, "HTTP/2.0 none", c, s.url)
		require.Equal(t, kept, s.conns.Load(), name)
	}
	assert.Equal(t, 1, strings.Count(out.String(), `reason="not usable"`), "one line for each reason and minute: %s", out)
	writeFile(t, file, pki.MarshalCertificatesPEM(other.Root()))
	_, err := page(t, c, s.url)
	require.ErrorContains(t, err, "certificate signed by unknown authority", "a root that is gone is not trusted, on an open connection neither")
	s.become(other)
	requirePage(t, "HTTP/2.0 none", c, s.url)
	assert.Eventually(t, func() bool { return s.open.Load() == 1 }, time.Minute, 5*time.Millisecond, "the old connections are closed")

	c.CloseIdleConnections()
	assert.Eventually(t, func() bool { return s.open.Load() == 0 }, time.Minute, 5*time.Millisecond)
	requirePage(t, "HTTP/2.0 none", c, s.url)

	t.Run("names", func(t *testing.T) {
		for name, says := range map[string]string{"": "127.0.0.1", "other.test": "not other.test", "127.0.0.1": "127.0.0.1"} {
			o := o
			o.ServerName = name
			require.ErrorContains(t, must.Err(page(t, newHTTPClient(t, o), s.url)), says)
		}
	})
	t.Run("the host's roots", func(t *testing.T) {
		_, err := page(t, newHTTPClient(t, caclient.TLSOptions{ServerName: "ca.test"}), s.url)
		require.ErrorContains(t, err, "certificate", "not one of the host's roots")
	})
}

func TestHTTPClientCertificate(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-6.2-5")
	host, td := spiffetest.NewCA(t, "server.test"), spiffetest.NewCA(t, "example.org")
	s, dir, out := startTLS(t, host, nil), folder(t, host), new(logtest.Buffer)
	o := in(dir)
	o.Logger = out.Logger()
	c := newHTTPClient(t, o)
	without := settled(t, "HTTP/2.0 none", c, s)
	assert.Equal(t, 1, strings.Count(out.String(), `reason="there is none"`))
	assert.NotContains(t, out.String(), "level=WARN")

	deep := td.Intermediate()
	chain, key := deep.Certificate("/one")
	writePair(t, dir, append(chain, td.Root(), chain[0]), key) // as Istio's agent writes it
	with := settled(t, "HTTP/2.0 /one", c, s) - without
	require.Positive(t, with)
	assert.Eventually(t, func() bool { return s.open.Load() == with }, time.Minute, 5*time.Millisecond, "those without a certificate are closed")

	// What cannot be used changes nothing.
	second, secondKey := td.Certificate("/two")
	keyPEM := must.Get(pki.MarshalPrivateKeyPEM(secondKey))(t)
	for _, spoil := range []func(){
		func() { writeFile(t, o.KeyFile, keyPEM) }, // caught in between
		func() { writeFile(t, o.KeyFile, nil) },
		func() {
			writeFile(t, o.KeyFile, []byte("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"))
		},
		func() { writePair(t, dir, second, secondKey); writeFile(t, o.CertificateFile, keyPEM) },
		func() { writeFile(t, o.CertificateFile, make([]byte, 256<<10+1)) },
		func() { writePair(t, dir, append(second, bytesOf(td, 17)...), secondKey) },
	} {
		spoil()
		requirePage(t, "HTTP/2.0 /one", c, s.url)
	}
	require.Equal(t, without+with, s.conns.Load())
	assert.Equal(t, 1, strings.Count(out.String(), `a good one stays until it ends" reason="not usable"`), "%s", out)
	assert.NotContains(t, out.String(), "BEGIN")
	writePair(t, dir, second, secondKey)
	requirePage(t, "HTTP/2.0 /two", c, s.url)

	// Expired, and fresh again.
	end := time.Now().Add(1500 * time.Millisecond)
	short, shortKey := td.Certificate("/short", func(c *x509.Certificate) { c.NotAfter = end })
	writePair(t, dir, short, shortKey)
	requirePage(t, "HTTP/2.0 /short", c, s.url)
	time.Sleep(time.Until(end))
	requirePage(t, "HTTP/2.0 none", c, s.url)
	assert.Contains(t, out.String(), `reason=expired`)
	writePair(t, dir, second, secondKey)
	requirePage(t, "HTTP/2.0 /two", c, s.url)

	// Withdrawn.
	require.NoError(t, os.Remove(o.KeyFile))
	requirePage(t, "HTTP/2.0 none", c, s.url)

	t.Run("damaged from the start", func(t *testing.T) {
		dir := folder(t, host)
		writeFile(t, filepath.Join(dir, "key.pem"), []byte("x"))
		writeFile(t, filepath.Join(dir, "cert-chain.pem"), []byte("x"))
		requirePage(t, "HTTP/2.0 none", newHTTPClient(t, in(dir)), s.url)
	})
	t.Run("of a CA that the server does not name", func(t *testing.T) {
		strict := startTLS(t, host, func(c *tls.Config) {
			c.ClientAuth, c.ClientCAs = tls.VerifyClientCertIfGiven, host.Bundle().CertPool()
		})
		dir, out := folder(t, host), new(logtest.Buffer)
		writePair(t, dir, second, secondKey)
		o := in(dir)
		o.Logger = out.Logger()
		requirePage(t, "HTTP/2.0 none", newHTTPClient(t, o), strict.url)
		assert.Contains(t, out.String(), "the CA does not accept such a one")
		known, knownKey := host.Certificate("/known")
		writePair(t, dir, known, knownKey)
		requirePage(t, "HTTP/2.0 /known", newHTTPClient(t, o), strict.url)
	})
}

// bytesOf returns a number of different certificates.
func bytesOf(ca *spiffetest.CA, n int) (out []*x509.Certificate) {
	for range n {
		chain, _ := ca.Certificate("/x")
		out = append(out, chain...)
	}
	return out
}

// A rotation of all files, again and again, fails no request.
func TestHTTPClientUnderRotation(t *testing.T) {
	t.Parallel()
	a, b, td := spiffetest.NewCA(t, "a.test"), spiffetest.NewCA(t, "b.test"), spiffetest.NewCA(t, "example.org")
	s, dir := startTLS(t, a, nil), t.TempDir()
	both := pki.MarshalCertificatesPEM(a.Root(), b.Root())
	writeFile(t, filepath.Join(dir, "root-cert.pem"), both)
	c := newHTTPClient(t, in(dir))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var pages atomic.Int64
	n := rounds.Of(5)
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, err := page(t, c, s.url)
				if !assert.NoError(t, err) {
					return
				}
				pages.Add(1)
			}
		})
	}
	for i := range n {
		chain, key := td.Certificate(fmt.Sprintf("/%d", i))
		writePair(t, dir, chain, key)
		s.become([]*spiffetest.CA{a, b}[i%2])
		writeFile(t, filepath.Join(dir, "root-cert.pem"), append(both, '\n'))
		time.Sleep(5 * time.Millisecond)
		writeFile(t, filepath.Join(dir, "root-cert.pem"), both)
	}
	cancel()
	wg.Wait()
	assert.Greater(t, pages.Load(), int64(n))
	requirePage(t, fmt.Sprintf("HTTP/2.0 /%d", n-1), c, s.url)
}

func TestHTTPClientVersions(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.2-3")
	host := spiffetest.NewCA(t, "server.test")
	dir := folder(t, host)
	old := startTLS(t, host, func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 })
	o := in(dir)
	require.ErrorContains(t, must.Err(page(t, newHTTPClient(t, o), old.url)), "protocol version")
	o.MinVersion = tls.VersionTLS12
	requirePage(t, "HTTP/2.0 none", newHTTPClient(t, o), old.url)
	older := startTLS(t, host, func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS10, tls.VersionTLS11 })
	require.ErrorContains(t, must.Err(page(t, newHTTPClient(t, o), older.url)), "protocol version")
	one := startTLS(t, host, func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} })
	requirePage(t, "HTTP/1.1 none", newHTTPClient(t, o), one.url)
}

func TestHTTPClientRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.2-3")
	host := spiffetest.NewCA(t, "server.test")
	dir, s := folder(t, host), startTLS(t, host, nil)
	for name, contents := range map[string][]byte{
		"empty.pem": {}, "text.pem": []byte("no certificate"), "half.pem": pki.MarshalCertificatesPEM(host.Root())[:300], "large.pem": make([]byte, 1<<20+1),
		"missing.pem": nil,
	} {
		if contents != nil {
			writeFile(t, filepath.Join(dir, name), contents)
		}
		c := newHTTPClient(t, caclient.TLSOptions{RootsFile: filepath.Join(dir, name), ServerName: "ca.test"})
		body := new(closed)
		_, err := c.Post(s.url, "text/plain", body)
		require.ErrorContains(t, err, "caclient: roots of the CA connection: ")
		require.ErrorContains(t, err, name)
		require.True(t, bool(*body), "a RoundTripper closes the body")
		if contents == nil {
			require.ErrorIs(t, err, os.ErrNotExist)
		}
		writeFile(t, filepath.Join(dir, name), pki.MarshalCertificatesPEM(host.Root()))
		requirePage(t, "HTTP/2.0 none", c, s.url)
	}
	require.EqualValues(t, 5, s.conns.Load(), "no connection without roots")
	for says, change := range map[string]func(o *caclient.TLSOptions){
		"only one of CertificateFile and KeyFile": func(o *caclient.TLSOptions) { o.KeyFile = "" },
		"MinVersion is 0x0302":                    func(o *caclient.TLSOptions) { o.MinVersion = tls.VersionTLS11 },
		"MinVersion is 0x0305":                    func(o *caclient.TLSOptions) { o.MinVersion = tls.VersionTLS13 + 1 },
	} {
		o := in(dir)
		change(&o)
		require.ErrorContains(t, must.Err(caclient.NewHTTPClient(o)), says)
	}
	c := newHTTPClient(t, in(dir))
	require.ErrorContains(t, must.Err(page(t, c, "http://127.0.0.1:1/")), "not https")
	body := new(closed)
	require.Error(t, must.Err(c.Post("http://127.0.0.1:1/", "text/plain", body)))
	require.True(t, bool(*body), "a RoundTripper closes the body")
	require.ErrorIs(t, c.CheckRedirect(nil, nil), http.ErrUseLastResponse)
	c.CloseIdleConnections() // before any
}

// closed is an empty body that knows whether it was closed.
type closed bool

func (*closed) Read([]byte) (int, error) { return 0, io.EOF }
func (c *closed) Close() error           { *c = true; return nil }

// A client of Istio's CA on a machine outside a cluster, which begins with a token and goes on with its own certificate.
func ExampleNewHTTPClient() {
	const certs = "/etc/certs/" // PROV_CERT, and OUTPUT_CERTS too
	client, err := caclient.NewHTTPClient(caclient.TLSOptions{
		RootsFile:       certs + "root-cert.pem",
		ServerName:      "istiod.istio-system.svc",
		CertificateFile: certs + "cert-chain.pem",
		KeyFile:         certs + "key.pem",
	})
	if err != nil {
		log.Fatal(err)
	}
	_, err = client.Get("https://istiod.example.org:15012/")
	if errors.Is(err, fs.ErrNotExist) {
		fmt.Println("root-cert.pem has to be there before the first request")
	}
	// Output: root-cert.pem has to be there before the first request
}

// TestHTTPClientAlert: a client that the CA refuses is told so by its alert, however quick it is to write, and whatever it writes.
func TestHTTPClientAlert(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	host := spiffetest.NewCA(t, "server.test")
	dir := folder(t, host)
	chain, key := host.Certificate("/known")
	writePair(t, dir, chain, key)
	anonymous := caclient.TLSOptions{RootsFile: filepath.Join(dir, "root-cert.pem"), ServerName: "ca.test"}
	refuse := func(tls.ConnectionState) error { return errors.New("revoked") }
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, protos := range [][]string{{"h2"}, {"http/1.1"}} {
		for says, o := range map[string]caclient.TLSOptions{"certificate required": anonymous, "bad certificate": in(dir)} {
			s := startTLS(t, host, func(c *tls.Config) {
				c.NextProtos, c.ClientAuth = protos, tls.RequireAnyClientCert
				c.VerifyConnection = refuse
			})
			wg.Go(func() {
				for i := range rounds.Of(10) {
					size := []int{1 << 10, 0}[i%2] // one write
					if protos[0] == "h2" {
						size <<= 10
					}
					c, err := caclient.NewHTTPClient(o)
					if !assert.NoError(t, err) {
						return
					}
					resp, err := c.Post(s.url, "", strings.NewReader(strings.Repeat("x", size)))
					assert.ErrorContains(t, err, "remote error: tls: "+says)
					if err == nil {
						_ = resp.Body.Close()
					}
					c.CloseIdleConnections()
				}
			})
		}
	}
}
