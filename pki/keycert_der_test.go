package pki_test

import (
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The key of a CA may be DER, in the forms that a block of PEM may have.
func TestReadKeyCertBundleDER(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	now := time.Now()
	ec := must.Get(pki.NewKey(pki.ECDSAP256))(t)
	other := must.Get(pki.NewKey(pki.RSA2048))(t)
	sec1 := must.Get(x509.MarshalECPrivateKey(ec.(*ecdsa.PrivateKey)))(t)
	pkcs8 := must.Get(x509.MarshalPKCS8PrivateKey(ec))(t)
	pkcs1 := x509.MarshalPKCS1PrivateKey(other.(*rsa.PrivateKey))
	o := pki.CertificateOptions{CA: true, SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseTrustDomain("example.org").ID())}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour)}
	read := func(cert *x509.Certificate, key []byte) error {
		text := pki.MarshalCertificatesPEM(cert)
		_, err := pki.ReadKeyCertBundle(fstest.MapFS{"crt.pem": {Data: text}, "key.pem": {Data: key}, "ca.crt": {Data: text}}, nil, now)
		return err
	}
	root := must.Get(pki.NewRoot(ec, o))(t)
	rsaRoot := must.Get(pki.NewRoot(other, o))(t)
	require.NoError(t, read(root.Certificate(), sec1))
	require.NoError(t, read(root.Certificate(), pkcs8))
	require.NoError(t, read(rsaRoot.Certificate(), pkcs1))
	for name, key := range map[string][]byte{
		"the key of another":    pkcs1,
		"a byte less":           pkcs8[:len(pkcs8)-1],
		"a byte more":           append(append([]byte(nil), pkcs8...), 0),
		"a certificate":         root.Certificate().Raw,
		"a SEQUENCE":            {0x30, 0},
		"base64 of DER":         []byte("MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg"),
		"the first byte":        {0x30},
		"nothing":               {},
		"a line before the DER": append([]byte("\n"), pkcs8...),
	} {
		require.Error(t, read(root.Certificate(), key), name)
	}
}
