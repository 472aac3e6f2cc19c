//go:build go1.27

package spiffetls_test

import (
	"crypto/tls"
	"crypto/x509"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestAlternativeThatFails: where a handshake with the alternative would fail, the first SVID is presented.
func TestAlternativeThatFails(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	d := newQuantumDomain(t)
	self, root := d.both(t, "/x"), d.classical.Certificate()
	for name, c := range map[string]struct {
		bundle *spiffe.Bundle
		cap    func(server, client *tls.Config)
		want   x509.PublicKeyAlgorithm
	}{
		"none":                      {d.bundle, func(_, _ *tls.Config) {}, x509.MLDSA},
		"the client has TLS 1.2":    {d.bundle, func(_, c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, x509.ECDSA},
		"the server has TLS 1.2":    {d.bundle, func(s, _ *tls.Config) { s.MaxVersion = tls.VersionTLS12 }, x509.ECDSA},
		"its root left the bundle":  {quantum.Bundle(t, root), func(_, _ *tls.Config) {}, x509.ECDSA},
		"a host name in the hello":  {d.bundle, func(_, c *tls.Config) { c.ServerName = "example.com" }, x509.MLDSA},
		"its root alone is trusted": {quantum.Bundle(t, d.mldsa.Certificate()), func(_, _ *tls.Config) {}, x509.MLDSA},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: c.bundle, Allow: spiffe.AllowAnyPeer(),
				Algorithms: spiffe.AnyAlgorithm(), MinVersion: tls.VersionTLS12}))(t)
			server, client := must.Get(e.ServerConfig())(t), must.Get(e.ClientConfig())(t)
			c.cap(server, client)
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			defer l.Close()
			ended, of := make(chan error, 1), make(chan *x509.Certificate, 1)
			go func() {
				below, err := l.Accept()
				if err == nil {
					conn := tls.Server(below, server)
					_ = conn.SetDeadline(time.Now().Add(time.Minute))
					if err = conn.Handshake(); err == nil {
						of <- conn.ConnectionState().PeerCertificates[0]
					}
					_ = conn.Close()
				}
				ended <- err
			}()
			conn := tls.Client(must.Get(net.Dial("tcp", l.Addr().String()))(t), client)
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			require.NoError(t, conn.Handshake())
			require.NoError(t, <-ended)
			assert.Equal(t, c.want, conn.ConnectionState().PeerCertificates[0].PublicKeyAlgorithm)
			assert.Equal(t, c.want, (<-of).PublicKeyAlgorithm)
		})
	}
}
