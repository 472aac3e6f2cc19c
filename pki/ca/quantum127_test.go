//go:build go1.27

package ca_test

import (
	"context"
	"crypto/x509"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// TestBothKinds: a CA moves from a classical root by way of both kinds to ML-DSA alone, and back. Each leaf verifies until
// it ends, with the bundle of each moment.
func TestBothKinds(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)
		td := spiffe.MustParseTrustDomain("example.org")
		all := spiffe.AnyAlgorithm()
		open := func(keys string) *ca.Authority {
			return must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: td, Create: true, DefaultTTL: time.Hour, MaxTTL: 2 * time.Hour, Algorithms: all,
				Rotation: ca.Rotation{KeyAlgorithm: keys}}, store))(t)
		}
		var leaves []*x509.Certificate
		sign := func(a *ca.Authority, key string) *x509.Certificate {
			k := must.Get(pki.NewKey(key))(t)
			csr := must.Get(pki.NewCSR(k, pki.CSROptions{}))(t)
			chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/web")}))(t)
			require.Len(t, chain, 1)
			leaves = append(leaves, chain[0])
			return chain[0]
		}
		live := func(a *ca.Authority, until time.Duration) {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- a.Run(ctx) }()
			for end := time.Now().Add(until); time.Now().Before(end); time.Sleep(5 * time.Minute) {
				v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowMembersOf(td), nil))(t).WithAlgorithms(all)
				sign(a, "ecdsa-p256")
				sign(a, "ml-dsa-44")
				for _, leaf := range leaves {
					if time.Now().Before(leaf.NotAfter) {
						must.Get(v.VerifyChain([]*x509.Certificate{leaf}, spiffe.AnyRole))(t)
					}
				}
			}
			cancel()
			require.NoError(t, <-done)
		}
		for _, step := range []struct {
			keys             string
			classical, mldsa x509.PublicKeyAlgorithm // of the root that signs each in the end
		}{
			{"ecdsa-p256", x509.ECDSA, x509.ECDSA},
			{"ecdsa-p256,ml-dsa-65", x509.ECDSA, x509.MLDSA},
			{"ml-dsa-65", x509.MLDSA, x509.MLDSA},
			{"ml-dsa-65,ecdsa-p256", x509.ECDSA, x509.MLDSA},
			{"ecdsa-p256", x509.ECDSA, x509.ECDSA},
		} {
			a := open(step.keys)
			live(a, 5*time.Hour)
			for key, want := range map[string]x509.PublicKeyAlgorithm{"ecdsa-p256": step.classical, "ml-dsa-65": step.mldsa} {
				issuer := sign(a, key).SignatureAlgorithm.String()
				assert.Equal(t, want == x509.MLDSA, issuer == "ML-DSA-65", "%s: %s for %s", step.keys, issuer, key)
			}
			n := 1
			if len(step.keys) > 12 {
				n = 2
			}
			assert.Len(t, a.Status().Roots, n, step.keys)
			require.NoError(t, a.Health().Signing)
			t.Log(step.keys, a.Status().Roots)
		}
	})
}
