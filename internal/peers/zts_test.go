package peers_test

import (
	"crypto/ecdsa"
	"crypto/x509"
	"encoding/pem"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestZTSSvcCert has Athenz's own client judge our ZTS: it registers an instance by attestation data, and is refused.
func TestZTSSvcCert(t *testing.T) {
	t.Parallel()
	program := peers.Program(t, "zts-svccert")
	ca := spiffetest.NewCA(t, "athenz.io")
	z := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	instance := cafake.AthenzInstance(z.Fake)
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, data, 0o600))
		return path
	}
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	der, err := x509.MarshalECPrivateKey(key.(*ecdsa.PrivateKey))
	require.NoError(t, err)
	token, err := z.Endpoint().Token(t.Context())
	require.NoError(t, err)
	roots := put("roots.pem", ca.Bundle().MarshalPEM())
	keyFile := put("key.pem", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	register := func(attestation, id string, more ...string) (leaf *x509.Certificate, says string) {
		t.Helper()
		cert, signer := filepath.Join(dir, id+".cert"), filepath.Join(dir, id+".ca")
		out, err := exec.Command(program, append([]string{
			"-zts", z.Endpoint().URL + "/zts/v1", "-cacert", roots, "-private-key", keyFile, "-attestation-data", put(id+".data", []byte(attestation)),
			"-provider", instance.Provider.String(), "-domain", instance.Service.Domain, "-service", instance.Service.Name, "-instance", id,
			"-dns-domain", instance.Suffix, "-cert-file", cert, "-signer-cert-file", signer,
		}, more...)...).CombinedOutput()
		if err != nil {
			return nil, string(out)
		}
		text, err := os.ReadFile(cert)
		require.NoError(t, err)
		chain, err := pki.ParseCertificatesPEM(text)
		require.NoError(t, err)
		text, err = os.ReadFile(signer)
		require.NoError(t, err)
		signers, err := pki.ParseCertificatesPEM(text)
		require.NoError(t, err)
		pool := x509.NewCertPool()
		for _, c := range signers {
			pool.AddCert(c)
		}
		_, err = chain[0].Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
		require.NoError(t, err)
		return chain[0], string(out)
	}
	leaf, says := register(token, "frontend-0")
	require.NotNil(t, leaf, says)
	assert.Equal(t, instance.Service.String(), leaf.Subject.CommonName)
	assert.Equal(t, key.Public(), leaf.PublicKey)
	assert.True(t, time.Now().Before(leaf.NotAfter))
	t.Log(leaf.DNSNames, leaf.URIs)

	for name, c := range map[string]struct {
		attestation string
		more        []string
		says        string
	}{
		"attestation":  {"another", nil, "401 the attestation data is not good"},
		"provider":     {token, []string{"-provider", "k8s.admin.other"}, "403 the provider"},
		"service":      {token, []string{"-service", "backend"}, "400 the service"},
		"trust domain": {token, []string{"-spiffe-trust-domain", "evil.example"}, "400 the SPIFFE URI"},
	} {
		leaf, says := register(c.attestation, "frontend-1", c.more...)
		t.Logf("%s: %s", name, says)
		assert.Nil(t, leaf, name)
		assert.Contains(t, says, c.says, name)
	}
}
