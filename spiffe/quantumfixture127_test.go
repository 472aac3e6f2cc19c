//go:build go1.27

package spiffe_test

import (
	"crypto"
	"crypto/x509"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantumFixtures writes the files that programs without ML-DSA read in TestQuantumElsewhere, with -update.
func TestQuantumFixtures(t *testing.T) {
	quantum.Need(t)
	if !*update {
		t.Skip("only with -update")
	}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	c := spiffe.BundleContents{JWTAuthorities: make(map[string]crypto.PublicKey), RefreshHint: 5 * time.Minute}
	for _, kind := range []string{"ecdsa-p256", "ml-dsa-44", "ml-dsa-65"} {
		key, leafKey := must.Get(pki.NewKey(kind))(t), must.Get(pki.NewKey(kind))(t)
		o := pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(quantum.TrustDomain.ID())}, NotBefore: start, NotAfter: start.AddDate(10, 0, 0)}
		root := must.Get(pki.NewRoot(key, o))(t)
		o.PublicKey, o.SANs = leafKey.Public(), []pki.SAN{pki.IDSAN(webID)}
		leaf := must.Get(root.Issue(o))(t)
		require.NoError(t, os.WriteFile("testdata/quantum/"+kind+".pem", pki.MarshalCertificatesPEM([]*x509.Certificate{leaf}...), 0o644))
		c.X509Authorities = append(c.X509Authorities, root.Certificate())
		c.JWTAuthorities[kind] = leafKey.Public()
	}
	b := must.Get(spiffe.NewBundle(quantum.TrustDomain, c))(t)
	require.NoError(t, os.WriteFile("testdata/quantum/bundle.json", must.Get(b.Marshal())(t), 0o644))
}
