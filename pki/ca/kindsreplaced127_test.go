//go:build go1.27

package ca_test

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// TestKindsReplacedByOthers: another program puts its root in the place of one of ML-DSA, or removes our state.
func TestKindsReplacedByOthers(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
	open := func() (*ca.Authority, error) {
		return ca.Open(t.Context(), ca.Config{TrustDomain: quantum.TrustDomain, Create: true,
			Rotation: ca.Rotation{KeyAlgorithm: "ml-dsa-44"}}, store)
	}
	edit := func(edit func(items map[string][]byte)) {
		r := must.Get(store.Load(t.Context()))(t)
		items := r.Data()
		edit(items)
		must.Get(store.Save(t.Context(), ca.NewRecord(r.Version, items)))(t)
	}
	replace := func(algorithm string) {
		key := must.Get(pki.NewKey(algorithm))(t)
		root := must.Get(pki.NewRoot(key, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(quantum.TrustDomain.ID())},
			NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(1000 * time.Hour)}))(t)
		edit(func(items map[string][]byte) {
			items["ca-cert.pem"] = pki.MarshalCertificatesPEM(root.Certificate())
			items["ca-key.pem"] = must.Get(pki.MarshalPrivateKeyPEM(key))(t)
		})
	}
	a := must.Get(open())(t)
	first := a.Status().Roots[0]
	edit(func(items map[string][]byte) { delete(items, "svidkit-state.json") })
	must.Get(a.Rotate(t.Context()))(t)
	a = must.Get(open())(t)
	require.Len(t, a.Status().Roots, 2, "the state is there again")
	assert.Equal(t, first.ID, a.Status().Roots[0].ID)

	replace("ml-dsa-65")
	a = must.Get(open())(t)
	require.Len(t, a.Status().Roots, 3)
	assert.Equal(t, "retiring", a.Status().Roots[0].Phase)
	assert.Equal(t, "ML-DSA-65", a.Status().Roots[1].Certificate.SignatureAlgorithm.String())
	assert.Equal(t, "active", a.Status().Roots[1].Phase)

	replace("ecdsa-p256")
	_, err := open()
	require.ErrorIs(t, err, ca.ErrUnfit)
	require.ErrorContains(t, err, "ca-cert.pem: there is no root that it could replace")
}
