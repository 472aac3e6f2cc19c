//go:build go1.27

package pki_test

import (
	"crypto/x509"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
)

func TestMLDSA(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	for _, alg := range []string{"ml-dsa-44", "ml-dsa-65"} {
		key := must.Get(pki.NewKey(alg))(t)
		root := must.Get(pki.NewRoot(key, pki.CertificateOptions{CommonName: "root", NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}))(t)
		leafKey := must.Get(pki.NewKey(alg))(t)
		csr := must.Get(pki.NewCSR(leafKey, pki.CSROptions{}))(t)
		csr = must.Get(pki.ParseCSR(csr.DER()))(t)
		require.True(t, pki.PublicKeysEqual(csr.PublicKey(), leafKey.Public()))
		pem := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
		again := must.Get(pki.ParsePrivateKeyPEM(pem))(t)
		require.True(t, pki.PublicKeysEqual(again.Public(), key.Public()))
		_ = root
		_ = x509.Certificate{}
	}
}
