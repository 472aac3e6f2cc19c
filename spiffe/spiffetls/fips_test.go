package spiffetls_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/fips140"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// What a server takes of a peer where nothing but approved cryptography is allowed (GODEBUG=fips140=only), as examples/PLATFORMS.md says.
// Elsewhere the same peers get in, but for those with weak keys.
func TestFIPS(t *testing.T) {
	t.Parallel()
	only := fips140.Enforced()
	ca := spiffetest.NewCA(t, "example.org")
	rootKey := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	keys := map[string]crypto.Signer{}
	sizes := []int{1024, 2048, 3072}[:min(3, 1+rounds.Of(1))]
	fips140.WithoutEnforcement(func() { // what others have
		_, keys["Ed25519"] = must.Get2(ed25519.GenerateKey(rand.Reader))(t)
		for name, curve := range map[string]elliptic.Curve{"ECDSA P-256": elliptic.P256(), "ECDSA P-384": elliptic.P384(), "ECDSA P-521": elliptic.P521(), "ECDSA P-224": elliptic.P224()} {
			keys[name] = must.Get(ecdsa.GenerateKey(curve, rand.Reader))(t)
		}
		for _, bits := range sizes {
			keys[fmt.Sprint("RSA ", bits)] = must.Get(rsa.GenerateKey(rand.Reader, bits))(t)
		}
	})
	template := func(n int64) *x509.Certificate {
		return &x509.Certificate{SerialNumber: big.NewInt(n), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour)}
	}
	root := template(1)
	root.IsCA, root.BasicConstraintsValid, root.KeyUsage = true, true, x509.KeyUsageCertSign
	root.URIs = []*url.URL{ca.TrustDomain().ID().URL()}
	rootDER := must.Get(x509.CreateCertificate(rand.Reader, root, root, rootKey.Public(), rootKey))(t)
	rootCert := must.Get(x509.ParseCertificate(rootDER))(t)
	bundle := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{X509Authorities: []*x509.Certificate{rootCert}}))(t)
	server, err := serverConfig(spiffetls.Config{Self: ca.SVID("/db"), Peers: bundle, Allow: spiffe.AllowMembersOf(ca.TrustDomain())})
	require.NoError(t, err)

	shake := func(client *tls.Config) error {
		a, b := memconn.Pipe()
		defer a.Close()
		defer b.Close()
		done := make(chan error, 1)
		go func() { done <- tls.Server(b, server.Clone()).Handshake() }()
		client.InsecureSkipVerify = true // the client is not under test
		conn := tls.Client(a, client)
		var failed error
		fips140.WithoutEnforcement(func() { failed = conn.Handshake() })
		if failed != nil {
			_ = a.Close()
		}
		return errors.Join(<-done, failed)
	}
	with := func(key string, curves ...tls.CurveID) error {
		leaf := template(2)
		leaf.URIs, leaf.Subject = []*url.URL{spiffe.MustParseID("spiffe://example.org/web").URL()}, pkix.Name{}
		leaf.KeyUsage, leaf.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
		der := must.Get(x509.CreateCertificate(rand.Reader, leaf, root, keys[key].Public(), rootKey))(t)
		return shake(&tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: keys[key]}}, CurvePreferences: curves})
	}
	for _, key := range []string{"ECDSA P-256", "ECDSA P-384", "ECDSA P-521", "RSA 2048", "Ed25519", fmt.Sprint("RSA ", sizes[len(sizes)-1])} {
		require.NoError(t, with(key), key)
	}
	require.Error(t, with("ECDSA P-224"), "in no mode")
	err = with("RSA 1024")
	assert.Equal(t, only, err != nil, "%v", err)
	if only {
		require.ErrorContains(t, err, "keys smaller than 2048 bits")
	}
	for curve, approved := range map[tls.CurveID]bool{tls.X25519MLKEM768: true, tls.CurveP256: true, tls.CurveP384: true, tls.X25519: false} {
		err := with("ECDSA P-256", curve)
		assert.Equal(t, approved || !only, err == nil, "%v: %v", curve, err)
		if err != nil {
			t.Log(curve, err)
		}
	}
}
