//go:build go1.27

package secretcache_test

import (
	"context"
	"crypto/x509"
	"path/filepath"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// TestQuantumAlternativeOfALimitedCaller: a CA that signs one certificate at a time for each caller costs no identity.
func TestQuantumAlternativeOfALimitedCaller(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: domain, Create: true, MaxTTL: time.Hour,
			Algorithms: spiffe.AnyAlgorithm(), Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-65"},
			Limits: ca.Limits{CallerRate: 0.1}}, must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)))(t)
		issuer := must.Get(local.NewFunc(a, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) { return csr.ID() }))(t)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Hour)
		defer cancel()
		go func() { _ = a.Run(ctx) }()
		m := must.Get(secretcache.Start(ctx, secretcache.Config{ID: web, CA: issuer, NewAlternative: mldsaKey}))(t)
		defer func() { _ = m.Close() }()
		for range 24 {
			time.Sleep(10 * time.Minute)
			svid := must.Get(m.SVID())(t)
			assert.True(t, time.Now().Before(svid.NotAfter()), "no gap")
		}
	})
}

// ending is a CA whose certificates for keys of ML-DSA end at a time.
type ending struct {
	*pair
	end atomic.Int64
}

func (c *ending) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if (spiffe.Algorithms{}).Check(csr.PublicKey()) != nil {
		if lifetime = time.Until(time.Unix(c.end.Load(), 0)); lifetime < time.Second {
			return nil, errClassicalOnly
		}
		lifetime = min(lifetime, time.Hour)
	}
	return c.pair.Sign(ctx, csr, lifetime)
}

// TestQuantumAlternativeEnds: the end of the root of the alternatives costs no identity.
func TestQuantumAlternativeEnds(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := &ending{pair: newPair(t)}
		c.end.Store(time.Now().Add(5 * time.Hour).Unix())
		m := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: web, CA: c, NewAlternative: mldsaKey}))(t)
		defer func() { _ = m.Close() }()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // a secret that is missing is not waited for
		for range 6 * 3600 / 5 {
			time.Sleep(5 * time.Second)
			must.Get(m.GenerateSecret(ctx, "default"))(t)
		}
		assert.Nil(t, must.Get(m.SVID())(t).Alternative())
		assert.Less(t, c.classical.Load(), int64(50))
	})
}

// TestQuantumAlternativeLost: while the CA does not answer, the loss of the root of the alternative alone does not make
// a workload that peers without ML-DSA accept unready.
func TestQuantumAlternativeLost(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		var down atomic.Bool
		c := &silent{p, &down}
		m := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: web, CA: c, NewAlternative: mldsaKey}))(t)
		defer func() { _ = m.Close() }()
		down.Store(true)
		roots := p.authority.Status().Roots
		must.Get(p.authority.Revoke(t.Context(), roots[len(roots)-1].ID, true))(t)
		time.Sleep(6 * time.Minute)
		require.NoError(t, m.Report().NotReady)
		v := must.Get(spiffe.NewVerifier(m, spiffe.AllowIDs(web), nil))(t)
		must.Get(v.VerifyChain(must.Get(m.SVID())(t).Chain(), spiffe.AnyRole))(t)
	})
}

// silent is a CA that signs nothing while it is down.
type silent struct {
	*pair
	down *atomic.Bool
}

func (s *silent) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if s.down.Load() {
		return nil, errClassicalOnly
	}
	return s.pair.Sign(ctx, csr, lifetime)
}
