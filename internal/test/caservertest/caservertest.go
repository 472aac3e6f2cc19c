// Package caservertest has what tests of CA servers share.
package caservertest

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// Identity returns the identity of a server for caserver.Options, which the CA that it serves signs. It is renewed
// until the test ends, or the caller closes it.
func Identity(t testing.TB, signer ca.Signer, id spiffe.ID, names ...pki.SAN) *secretcache.Manager {
	t.Helper()
	own, err := local.NewServer(signer, id, names...)
	if err != nil {
		t.Fatal(err)
	}
	m, err := secretcache.New(secretcache.Config{ID: id, CA: own, Names: names})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = m.Run(context.WithoutCancel(t.Context())) }()
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// ServerTLS is for a server on 127.0.0.1, and ClientTLS for clients that trust it.
var ServerTLS, ClientTLS = sync.OnceValues(func() (*tls.Config, *tls.Config) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	own := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}},
		&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "127.0.0.1"}
})()

// Serve serves on a port of 127.0.0.1, by TLS with [ServerTLS] unless o says otherwise, until the test ends. It
// returns the address.
func Serve(t testing.TB, o caserver.ServeOptions) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if !o.Plaintext && o.TLS == nil {
		o.TLS = ServerTLS
	}
	ServeOn(t, l, o)
	return l.Addr().String()
}

// ServeOn serves on a listener until the test ends, or stop is called.
func ServeOn(t testing.TB, l net.Listener, o caserver.ServeOptions) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- caserver.Serve(ctx, l, o) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// ProxyClient returns an HTTP client that speaks as Linkerd's proxies do: HTTP/2 over TLS 1.3, without ALPN.
func ProxyClient(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&tls.Dialer{Config: ClientTLS}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			if p := c.(*tls.Conn).ConnectionState().NegotiatedProtocol; p != "" {
				return nil, fmt.Errorf("negotiated %q", p)
			}
			return struct{ net.Conn }{c}, nil
		},
	}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

// ALPNClient returns an HTTP client that negotiates h2.
func ALPNClient(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: ClientTLS.Clone()}
	tr.Protocols.SetHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

// Logger returns a logger of all levels.
func Logger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// Listen serves a handler by HTTP/1.1 and HTTP/2 over TLS on a port of 127.0.0.1 until the test ends, as the host
// ca.test. It asks for a client certificate, and returns the URL and what a client trusts.
func Listen(t testing.TB, h http.Handler) (url string, client *tls.Config) {
	t.Helper()
	host := spiffetest.NewCA(t, "server.test")
	chain, key := host.Certificate("/ca", func(c *x509.Certificate) { c.DNSNames = []string{"ca.test"} })
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}, ClientAuth: tls.RequestClientCert,
		Certificates: []tls.Certificate{{Certificate: [][]byte{chain[0].Raw}, PrivateKey: key}},
	}
	url = Start(t, h, func(s *http.Server, l net.Listener) error { return s.Serve(tls.NewListener(l, cfg)) })
	return "https" + url, &tls.Config{
		MinVersion: tls.VersionTLS12, RootCAs: host.Bundle().CertPool(), ServerName: "ca.test",
	}
}

// Start has run serve a handler on a port of 127.0.0.1 until the test ends, and returns the URL without its scheme.
func Start(t testing.TB, h http.Handler, run func(*http.Server, net.Listener) error) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{
		Handler: h, Protocols: new(http.Protocols), ReadHeaderTimeout: 10 * time.Second,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
	}
	s.Protocols.SetHTTP1(true)
	s.Protocols.SetHTTP2(true)
	s.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { _ = run(s, l) })
	t.Cleanup(func() { _ = s.Close(); wg.Wait() })
	return "://" + l.Addr().String()
}

// HTTP2Client returns a client that speaks HTTP/2 with cfg, or without TLS if that is nil.
func HTTP2Client(t testing.TB, cfg *tls.Config) *http.Client {
	t.Helper()
	tr := &http.Transport{TLSClientConfig: cfg.Clone(), Protocols: new(http.Protocols)} // which changes it
	tr.Protocols.SetUnencryptedHTTP2(cfg == nil)
	tr.Protocols.SetHTTP2(cfg != nil)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// Direct returns a client whose requests h answers without a connection, as if they came by HTTP/2 over TLS.
func Direct(h http.Handler) *http.Client { return &http.Client{Transport: direct{h}} }

type direct struct{ handler http.Handler }

func (d direct) RoundTrip(req *http.Request) (*http.Response, error) {
	in := req.Clone(req.Context())
	in.ProtoMajor, in.ProtoMinor, in.RemoteAddr, in.TLS = 2, 0, "192.0.2.1:1", new(tls.ConnectionState)
	w := httptest.NewRecorder()
	d.handler.ServeHTTP(w, in)
	resp := w.Result()
	resp.ProtoMajor = 2
	return resp, nil
}
