package caserver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/pki/caserver"
)

// serverTLS is for a server on 127.0.0.1, and clientTLS for clients that trust it.
var serverTLS, clientTLS = sync.OnceValues(func() (*tls.Config, *tls.Config) {
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
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		&tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "127.0.0.1"}
})()

// start serves until the test is over and returns the address.
func start(t testing.TB, o caserver.ServeOptions) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	if !o.Plaintext && o.TLS == nil {
		o.TLS = serverTLS
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- caserver.Serve(ctx, l, o) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
	})
	return l.Addr().String()
}

// proxyClient returns an HTTP client that speaks as Linkerd's proxies do: HTTP/2 over TLS 1.3, without
// ALPN.
func proxyClient(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{
		Protocols: new(http.Protocols),
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&tls.Dialer{Config: clientTLS}).DialContext(ctx, network, addr)
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

// alpnClient returns an HTTP client that negotiates h2.
func alpnClient(t testing.TB) *http.Client {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols), TLSClientConfig: clientTLS.Clone()}
	tr.Protocols.SetHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second}
}

// serveOn serves on a listener until the test is over, or stop is called.
func serveOn(t testing.TB, l net.Listener, o caserver.ServeOptions) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- caserver.Serve(ctx, l, o) }()
	stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

// elsewhere is a listener whose clients seem to be on another machine.
type elsewhere struct{ net.Listener }

func (e *elsewhere) Accept() (net.Conn, error) {
	c, err := e.Listener.Accept()
	return &farConn{c}, err
}

type farConn struct{ net.Conn }

func (c *farConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 5} }

// logs collects what is logged.
type logs = logtest.Buffer
