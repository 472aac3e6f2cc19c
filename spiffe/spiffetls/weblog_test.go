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
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// TestWebServerWithoutMLDSA: the line about a web server names no ID, which its certificate has and does not prove.
func TestWebServerWithoutMLDSA(t *testing.T) {
	t.Parallel()
	root, key := quantum.Root(t, "ecdsa-p256"), must.Get(pki.NewKey("ecdsa-p256"))(t)
	leaf := must.Get(root.Issue(pki.CertificateOptions{PublicKey: key.Public(),
		SANs:      []pki.SAN{pki.DNSSAN("web.example.org"), pki.IDSAN(spiffe.MustParseID("spiffe://example.org/admin"))},
		NotBefore: root.Certificate().NotBefore, NotAfter: root.Certificate().NotAfter}))(t)
	out, pool := new(journal), x509.NewCertPool()
	pool.AddCert(root.Certificate())
	e := must.Get(spiffetls.New(spiffetls.Config{Self: quantum.SVID(t, root, "ecdsa-p256", "x"), Algorithms: spiffe.AnyAlgorithm(), Logger: out.logger(),
		WebRoots: func() (*x509.CertPool, error) { return pool, nil }}))(t)
	l := must.Get(tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw}, PrivateKey: key}}}))(t)
	defer l.Close()
	go func() {
		if conn, err := l.Accept(); err == nil {
			_ = conn.(*tls.Conn).Handshake()
			_ = conn.Close()
		}
	}()
	config := must.Get(e.ClientConfig())(t)
	config.ServerName = "web.example.org"
	conn := tls.Client(must.Get(net.Dial("tcp", l.Addr().String()))(t), config)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	require.NoError(t, conn.Handshake())
	lines := out.take(t)
	require.Len(t, lines, 1)
	assert.Equal(t, "spiffetls: a peer without ML-DSA", lines[0]["msg"])
	assert.Equal(t, "web.example.org", lines[0]["name"])
	assert.NotContains(t, lines[0], "id")
}
