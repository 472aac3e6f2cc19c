package certs_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/certs/secretset"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func file(t *testing.T, name string) []byte {
	t.Helper()
	return must.Get(os.ReadFile(filepath.Join("testdata", name)))(t)
}

func countRoots(secret *pki.Secret, err error) (int, error) {
	if err != nil {
		return 0, err
	}
	roots, _ := secret.Roots()
	return strings.Count(string(roots), "-----BEGIN "), nil
}

// Every reader of certificates takes text around blocks, and refuses a block that is torn.
func TestPEMOneRule(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	count := func(certs []*x509.Certificate, err error) (int, error) { return len(certs), err }
	readers := map[string]func(data []byte) (int, error){
		"certpem.Certificates": func(data []byte) (int, error) { return count(certpem.Certificates(data)) },
		"certpem.Roots": func(data []byte) (int, error) {
			return count(certpem.Roots(data, func(*x509.Certificate) error { return nil }, func(err error) { t.Error(err) }))
		},
		"certpem.Pool": func(data []byte) (int, error) {
			pool, err := certpem.Pool(data)
			if err != nil {
				return 0, err
			}
			//lint:ignore SA1019 it is not the pool of the system
			return len(pool.Subjects()), nil
		},
		"pki.ParseCertificatesPEM": func(data []byte) (int, error) { return count(pki.ParseCertificatesPEM(data)) },
		"pki.NewSecretPEM": func(data []byte) (int, error) {
			secret, err := pki.NewSecretPEM("ROOTCA", nil, nil, data, time.Time{})
			return countRoots(secret, err)
		},
		"secretset.Roots": func(data []byte) (int, error) {
			secret, note, err := secretset.Roots("ROOTCA", data)
			assert.NoError(t, note)
			return countRoots(secret, err)
		},
		"spiffe.ParseBundlePEM": func(data []byte) (int, error) {
			b, err := spiffe.ParseBundlePEM(td, data)
			if err != nil {
				return 0, err
			}
			return len(b.Contents().X509Authorities), nil
		},
	}
	one := string(file(t, "comment-after.pem"))
	headless := strings.SplitN(one, "\n", 3)[2] // the beginning is cut off
	for name, read := range readers {
		for in, want := range map[string]int{"comment-after.pem": 1, "comment-between.pem": 2} {
			n, err := read(file(t, in))
			require.NoError(t, err, "%s: %s", name, in)
			assert.Equal(t, want, n, "%s: %s", name, in)
		}
		for in, want := range map[string]string{
			string(file(t, "torn.pem")): "1 damaged PEM blocks",
			headless + one:              "1 damaged PEM blocks",
			string(file(t, "bom.pem")):  "the text begins with a byte order mark; save it as UTF-8 without one",
			"\xff\xfe-\x00-\x00":        "the text begins with a byte order mark; save it as UTF-8 without one",
		} {
			assert.ErrorContains(t, must.Err(read([]byte(in))), want, name)
		}
	}
	for _, in := range []string{"comment-after.pem", "comment-between.pem"} { // neither a key nor a request, for the same reason
		_, err := pki.ParsePrivateKeyPEM(file(t, in))
		assert.ErrorContains(t, err, `block "CERTIFICATE" is not a private key`)
		assert.ErrorContains(t, must.Err(pki.ParseCSRPEM(file(t, in))), "PEM block")
	}
}

// A private key is read under the label of any form.
func TestPEMLabels(t *testing.T) {
	t.Parallel()
	leaf := file(t, "leaf.pem")
	for _, name := range []string{"pkcs8-as-ec.pem", "sec1-as-private.pem"} {
		data := file(t, name)
		block, _ := pem.Decode(data)
		require.NotNil(t, block)
		for _, label := range []string{"PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY", "ECDSA PRIVATE KEY"} {
			data := append(pem.EncodeToMemory(&pem.Block{Type: label, Bytes: block.Bytes}), "# end of the key\n"...)
			svid, err := spiffe.ParseSVIDPEM(leaf, data)
			require.NoError(t, err, "%s as %s", name, label)
			assert.Equal(t, "spiffe://example.org/web", svid.ID().String())
			require.NoError(t, must.Err(pki.ParsePrivateKeyPEM(data)), "%s as %s", name, label)
		}
	}
}

// What package pki calls weak is refused with the certificate, too.
func TestPEMWeakKeys(t *testing.T) {
	t.Parallel()
	p224 := must.Get(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))(t)
	pkcs8 := must.Get(x509.MarshalPKCS8PrivateKey(p224))(t)
	sec1 := must.Get(x509.MarshalECPrivateKey(p224))(t)
	for _, der := range [][]byte{pkcs8, sec1} {
		_, err := spiffe.ParseSVIDPEM(file(t, "leaf.pem"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
		require.ErrorIs(t, err, pki.ErrWeakKey)
	}
	leaf, _ := pem.Decode(file(t, "leaf.pem"))
	require.ErrorIs(t, must.Err(spiffe.ParseSVID(leaf.Bytes, pkcs8)), pki.ErrWeakKey)
}

// The text is that of package pem, whatever the length of the last line.
func TestEncodeCertificates(t *testing.T) {
	t.Parallel()
	for n := range 200 {
		raw := make([]byte, n)
		_, _ = rand.Read(raw)
		want := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
		cert := &x509.Certificate{Raw: raw}
		assert.Equal(t, string(want)+string(want), string(certpem.EncodeCertificates([]*x509.Certificate{cert, cert})))
	}
}
