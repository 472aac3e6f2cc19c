//go:build go1.27

package spiffetls_test

import (
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
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

// TestQuantumTickets: the session of a client with at most four certificates of ML-DSA-65 is resumed. One with more has a
// full handshake each time.
func TestQuantumTickets(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	for _, n := range []int{1, 2, 3, 4, 5, 16} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			svid, bundle := quantum.Chain(t, n)
			p := newParty(svid, must.Get(spiffe.NewBundleSet(bundle))(t))
			opts := &spiffetls.Config{Algorithms: must.Get(spiffe.ParseAlgorithms("ml-dsa-65"))(t), RequireMLKEM: true}
			server, client := p.server(t, spiffe.AllowAnyPeer(), opts), p.resuming(t, spiffe.AllowAnyPeer(), opts)
			for i := range 3 {
				s, c := good(t, server, client, i > 0 && n <= 4, fmt.Sprint(i))
				require.Len(t, s.state.PeerCertificates, n)
				require.Len(t, c.state.PeerCertificates, n)
				assert.Equal(t, tls.X25519MLKEM768, c.state.CurveID)
				assert.EqualValues(t, tls.VersionTLS13, c.state.Version)
			}
		})
	}
}

// TestQuantumPresents: an alternative is presented if this side allows its kind, the other side can verify it, and it is
// valid. Otherwise the first SVID is.
func TestQuantumPresents(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, ml := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	bundles := must.Get(spiffe.NewBundleSet(quantum.Bundle(t, classical.Certificate(), ml.Certificate())))(t)
	own := quantum.SVID(t, classical, "ecdsa-p256", "web")
	both := func(other *spiffe.SVID) *party {
		return newParty(must.Get(own.WithAlternative(other))(t), bundles)
	}
	allow := func(text string) *spiffetls.Config {
		return &spiffetls.Config{Algorithms: must.Get(spiffe.ParseAlgorithms(text))(t)}
	}
	const all = "ecdsa,ml-dsa-44,ml-dsa-65"
	old := pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(own.ID())}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(-time.Minute)}
	key := must.Get(pki.NewKey("ml-dsa-65"))(t)
	old.PublicKey = key.Public()
	expired := must.Get(spiffe.NewSVID([]*x509.Certificate{must.Get(ml.Issue(old))(t)}, key))(t)
	early := old
	early.NotBefore, early.NotAfter = time.Now().Add(time.Minute), ml.Certificate().NotAfter
	tomorrow := must.Get(spiffe.NewSVID([]*x509.Certificate{must.Get(ml.Issue(early))(t)}, key))(t)
	// An intermediate that has expired ends the alternative as well.
	below := must.Get(pki.NewKey("ml-dsa-65"))(t)
	old.PublicKey, old.CA, old.SANs = below.Public(), true, []pki.SAN{pki.IDSAN(quantum.TrustDomain.ID())}
	middle := must.Get(ml.Issue(old))(t)
	same := old
	same.NotAfter = ml.Certificate().NotAfter
	issuer := must.Get(pki.NewIssuer([]*x509.Certificate{must.Get(ml.Issue(same))(t)}, below))(t)
	under := quantum.SVID(t, issuer, "ml-dsa-65", "web")
	withOld := must.Get(spiffe.NewSVID([]*x509.Certificate{under.Leaf(), middle}, under.TLSCertificate().PrivateKey.(crypto.Signer)))(t)

	other44, other65 := quantum.SVID(t, ml, "ml-dsa-44", "web"), quantum.SVID(t, ml, "ml-dsa-65", "web")
	for name, c := range map[string]struct {
		other   *spiffe.SVID
		allowed string                 // of this side
		edit    func(peer *tls.Config) // of the other side, which allows all
		want    bool
	}{
		"44":                          {other44, all, nil, true},
		"65":                          {other65, all, nil, true},
		"with its intermediate":       {under, all, nil, true},
		"not allowed here":            {other65, "ecdsa", nil, false},
		"only the other one allowed":  {other65, "ecdsa,ml-dsa-44", nil, false},
		"expired":                     {expired, all, nil, false},
		"not valid yet":               {tomorrow, all, nil, false},
		"with an expired certificate": {withOld, all, nil, false},
		"TLS 1.2":                     {other65, all, func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, peer := both(c.other), newParty(quantum.SVID(t, classical, "ecdsa-p256", "peer"), bundles)
			kind := func(r result) bool {
				require.NoError(t, r.err)
				return r.state.PeerCertificates[0].PublicKeyAlgorithm == x509.MLDSA
			}
			mine, theirs := allow(c.allowed), allow(all)
			mine.MinVersion, theirs.MinVersion = tls.VersionTLS12, tls.VersionTLS12
			client := peer.client(t, spiffe.AllowAnyPeer(), theirs)
			server := peer.server(t, spiffe.AllowAnyPeer(), theirs)
			if c.edit != nil {
				c.edit(client)
				c.edit(server)
			}
			_, r := connect(t, p.server(t, spiffe.AllowAnyPeer(), mine), client)
			assert.Equal(t, c.want, kind(r), "as the server")
			r, _ = connect(t, server, p.client(t, spiffe.AllowAnyPeer(), mine))
			assert.Equal(t, c.want, kind(r), "as the client")
		})
	}
}

// TestQuantumHello: what a client offers decides, in TLS 1.3 alone.
func TestQuantumHello(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	classical, ml := quantum.Root(t, "ecdsa-p256"), quantum.Root(t, "ml-dsa-65")
	both := must.Get(quantum.SVID(t, classical, "ecdsa-p256", "web").WithAlternative(quantum.SVID(t, ml, "ml-dsa-65", "web")))(t)
	c := must.Get(serverConfig(spiffetls.Config{Self: both, Peers: quantum.Bundle(t, ml.Certificate()), Allow: spiffe.AllowAnyPeer(),
		Algorithms: spiffe.AnyAlgorithm()}))(t)
	const ml44, ml65 = tls.MLDSA44, tls.MLDSA65
	for _, v := range []struct {
		versions []uint16
		schemes  []tls.SignatureScheme
		want     x509.PublicKeyAlgorithm
	}{
		{[]uint16{tls.VersionTLS13}, []tls.SignatureScheme{tls.ECDSAWithP256AndSHA256, ml65}, x509.MLDSA},
		{[]uint16{tls.VersionTLS12, tls.VersionTLS13}, []tls.SignatureScheme{ml44, ml65}, x509.MLDSA},
		{[]uint16{tls.VersionTLS12}, []tls.SignatureScheme{tls.ECDSAWithP256AndSHA256, ml65}, x509.ECDSA},
		{[]uint16{tls.VersionTLS13}, []tls.SignatureScheme{tls.ECDSAWithP256AndSHA256, ml44}, x509.ECDSA},
		{[]uint16{tls.VersionTLS13}, []tls.SignatureScheme{tls.ECDSAWithP256AndSHA256, 0x0906}, x509.ECDSA},
		{nil, nil, x509.ECDSA},
	} {
		cert := must.Get(c.GetCertificate(&tls.ClientHelloInfo{SupportedVersions: v.versions, SignatureSchemes: v.schemes}))(t)
		assert.Equal(t, v.want, cert.Leaf.PublicKeyAlgorithm, "%v %v", v.versions, v.schemes)
	}
}

// TestQuantumWeb: a client verifies a web server whose key is ML-DSA if it allows that.
func TestQuantumWeb(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	root := quantum.Root(t, "ml-dsa-65")
	key := must.Get(pki.NewKey("ml-dsa-44"))(t)
	leaf := must.Get(root.Issue(pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.DNSSAN("a.test")},
		NotBefore: root.Certificate().NotBefore, NotAfter: root.Certificate().NotAfter}))(t)
	roots := x509.NewCertPool()
	roots.AddCert(root.Certificate())
	server := &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{leaf.Raw}, PrivateKey: key}}}
	for text, ok := range map[string]bool{"": false, "ecdsa,ml-dsa-44": false, "ml-dsa-44,ml-dsa-65": true} {
		c := spiffetls.Config{OptionalIdentity: true, Self: quantum.SVID(t, root, "ml-dsa-44", "web"),
			WebRoots: func() (*x509.CertPool, error) { return roots, nil }}
		if text != "" {
			c.Algorithms = must.Get(spiffe.ParseAlgorithms(text))(t)
		}
		client := must.Get(clientConfig(c))(t)
		client.ServerName = "a.test"
		_, r := connect(t, server, client)
		if ok {
			assert.NoError(t, r.err)
		} else {
			assert.ErrorIs(t, r.err, spiffe.ErrAlgorithm, text)
		}
	}
}
