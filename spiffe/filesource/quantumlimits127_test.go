//go:build go1.27

package filesource_test

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
)

// fixed is a source that does not change.
type fixed struct{ snapshot *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snapshot, nil }
func (fixed) Changed() <-chan struct{}              { return nil }

// TestQuantumFiles: a chain of 16 certificates of ML-DSA-65 and the roots of both kinds go through files. A file of roots
// has 1 MiB, which is about 137 of ML-DSA-65.
func TestQuantumFiles(t *testing.T) {
	t.Parallel()
	quantum.Need(t)
	dir := t.TempDir()
	svid, own := quantum.Chain(t, 16)
	root := slices.Collect(own.X509Authorities())[0]
	bundle := quantum.Bundle(t, root, quantum.Root(t, "ecdsa-p256").Certificate(), quantum.Root(t, "ml-dsa-65").Certificate())
	snap := spiffe.NewSnapshot(svid, must.Get(spiffe.NewBundleSet(bundle))(t))
	sink := must.Get(filesink.New(filesink.Config{Source: fixed{snap}, Dir: dir, BundlesName: "bundles.json"}))(t)
	must.Get(sink.Write())(t)
	for _, roots := range []string{"root-cert.pem", "bundles.json"} {
		s := start(t, filesource.Config{CertFile: filepath.Join(dir, "cert-chain.pem"), KeyFile: filepath.Join(dir, "key.pem"),
			Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, roots), Map: roots == "bundles.json"}}})
		require.NoError(t, s.Status().Err)
		got := must.Get(s.SVID())(t)
		assert.Len(t, got.Chain(), 16)
		assert.True(t, pki.PublicKeysEqual(got.Leaf().PublicKey, svid.Leaf().PublicKey))
		assert.True(t, must.Get(s.Bundle(quantum.TrustDomain))(t).Equal(bundle))
	}

	issuer := quantum.Root(t, "ml-dsa-65")
	var many []*x509.Certificate
	size, fits := 0, 0
	for i := range 150 {
		next := must.Get(issuer.Renew(time.Now(), time.Now().Add(time.Duration(i+1)*time.Hour)))(t).Certificate()
		if size += len(pki.MarshalCertificatesPEM(next)); size <= 1<<20 {
			fits++
		}
		many = append(many, next)
	}
	t.Log(fits, "roots")
	assert.InDelta(t, 136, fits, 2)
	file := func(n int) filesource.Config {
		path := filepath.Join(t.TempDir(), "roots.pem")
		require.NoError(t, os.WriteFile(path, pki.MarshalCertificatesPEM(many[:n]...), 0o600))
		return filesource.Config{Bundles: []filesource.BundleFile{{Path: path, TrustDomain: quantum.TrustDomain}}}
	}
	s := start(t, file(fits))
	assert.Len(t, slices.Collect(must.Get(s.Bundle(quantum.TrustDomain))(t).X509Authorities()), fits)
	assert.ErrorContains(t, refused(t, file(fits+1)), "more than 1048576 bytes")
}
