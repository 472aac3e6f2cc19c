package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Whichever file of a new trust anchor cannot be written: there is no certificate whose key is lost. It would be handed out, and nothing could be
// signed under it.
func TestAnchorInPart(t *testing.T) {
	t.Parallel()
	for _, stuck := range []string{anchorKey, anchorCert} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, stuck), []byte("of another process"), 0o600))
		root := must.Get(os.OpenRoot(dir))(t)
		defer root.Close()
		_, err := makeAnchor(root, spiffe.MustParseTrustDomain("example.org"), time.Now())
		require.ErrorIs(t, err, os.ErrExist, stuck)
		data, err := os.ReadFile(filepath.Join(dir, anchorCert))
		if err == nil {
			_, err = pki.ParseCertificatesPEM(data)
		}
		assert.Error(t, err, "with %s in the way there is a certificate", stuck)
		data = must.Get(os.ReadFile(filepath.Join(dir, stuck)))(t)
		assert.Equal(t, "of another process", string(data))
	}
}

// The issuer signs leaves of proxies and no further CA, and ends when -issuer-ttl says, under an anchor that may sign issuers.
func TestIssuerOfTheMesh(t *testing.T) {
	t.Parallel()
	for scheme, file := range map[string]string{"kubernetes.io/tls": "tls.crt", "linkerd.io/tls": "crt.pem", "design": "crt.pem"} {
		dir := t.TempDir()
		anchors, err := pki.ParseCertificatesPEM(installed(t, scheme, filepath.Join(dir, "anchors"), filepath.Join(dir, "issuer")))
		require.NoError(t, err)
		data := must.Get(os.ReadFile(filepath.Join(dir, "issuer", file)))(t)
		issuers := must.Get(pki.ParseCertificatesPEM(data))(t)
		require.Len(t, issuers, 1)
		issuer := issuers[0]
		require.NoError(t, issuer.CheckSignatureFrom(anchors[0]))
		assert.True(t, issuer.IsCA && issuer.BasicConstraintsValid)
		assert.Zero(t, issuer.MaxPathLen)
		assert.True(t, issuer.MaxPathLenZero, "a CA below it would be one of the mesh")
		assert.WithinDuration(t, time.Now().Add(720*time.Hour), issuer.NotAfter, time.Minute)
		assert.False(t, anchors[0].MaxPathLenZero, "it signs the issuers")
	}
}
