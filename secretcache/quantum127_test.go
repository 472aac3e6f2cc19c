//go:build go1.27

package secretcache_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
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

// pair is a CA with two kinds of roots, which counts requests, and refuses those with keys of ML-DSA when told to.
type pair struct {
	*local.CA
	authority        *ca.Authority
	classical, mldsa atomic.Int64
	refuse, hang     atomic.Bool
}

var errClassicalOnly = errors.New("no keys of ML-DSA here")

func (p *pair) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if (spiffe.Algorithms{}).Check(csr.PublicKey()) == nil {
		p.classical.Add(1)
		return p.CA.Sign(ctx, csr, lifetime)
	}
	p.mldsa.Add(1)
	switch {
	case p.hang.Load():
		<-ctx.Done()
		return nil, context.Cause(ctx)
	case p.refuse.Load():
		return nil, errClassicalOnly
	}
	return p.CA.Sign(ctx, csr, lifetime)
}

func newPair(t *testing.T) *pair {
	a := must.Get(ca.Open(t.Context(), ca.Config{TrustDomain: domain, Create: true, MaxTTL: time.Hour, Algorithms: spiffe.AnyAlgorithm(),
		Rotation: ca.Rotation{KeyAlgorithm: "ecdsa-p256,ml-dsa-65"}}, must.Get(ca.NewDirStore(filepath.Join(t.TempDir(), "ca")))(t)))(t)
	issuer := must.Get(local.NewFunc(a, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) { return csr.ID() }))(t)
	go func() { _ = a.Run(t.Context()) }()
	return &pair{CA: issuer, authority: a}
}

func mldsaKey() (crypto.Signer, error) { return pki.NewKey("ml-dsa-44") }

// verifiable requires that peers with the bundles of m accept the SVID.
func verifiable(t *testing.T, m *secretcache.Manager, svid *spiffe.SVID) {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(m, spiffe.AllowIDs(svid.ID()), nil))(t)
	must.Get(v.VerifyChain(svid.Chain(), spiffe.AnyRole))(t)
	if other := svid.Alternative(); other != nil {
		_, err := v.VerifyChain(other.Chain(), spiffe.AnyRole)
		require.ErrorIs(t, err, spiffe.ErrAlgorithm)
		must.Get(v.WithAlgorithms(spiffe.AnyAlgorithm()).VerifyChain(other.Chain(), spiffe.AnyRole))(t)
	}
}

func TestQuantumAlternative(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t)
		ctx := t.Context()
		m := must.Get(secretcache.Start(ctx, secretcache.Config{ID: web, CA: p, NewAlternative: mldsaKey}))(t)
		defer func() { _ = m.Close() }()
		require.NoError(t, m.Add(worker))

		// Both come together, for each identity, in the SVID and in the secrets.
		first := must.Get(m.SVID())(t)
		require.NotNil(t, first.Alternative())
		verifiable(t, m, first)
		for _, name := range []string{"default", web.String(), worker.String()} {
			s := must.Get(m.GenerateSecret(ctx, name))(t)
			require.NotNil(t, s.Alternative(), name)
			assert.Nil(t, s.Alternative().Alternative())
			certs, key, _ := s.Alternative().KeyPair()
			other := must.Get(spiffe.ParseSVIDPEM(certs, key))(t)
			require.ErrorIs(t, spiffe.Algorithms{}.Check(other.Leaf().PublicKey), spiffe.ErrAlgorithm, name)
		}

		// A rotation of both roots fails no verification, and leaves no certificate under an old root.
		must.Get(p.authority.Rotate(ctx))(t)
		for range 24 * 12 {
			time.Sleep(5 * time.Minute)
			verifiable(t, m, must.Get(m.SVID())(t))
		}
		last := must.Get(m.SVID())(t)
		require.NotNil(t, last.Alternative())
		assert.NotEqual(t, first.Leaf().AuthorityKeyId, last.Leaf().AuthorityKeyId)
		assert.NotEqual(t, first.Alternative().Leaf().AuthorityKeyId, last.Alternative().Leaf().AuthorityKeyId)
		assert.Equal(t, p.classical.Load(), p.mldsa.Load(), "they are renewed together")

		// The loss of the root of the alternative alone is noticed too.
		roots := p.authority.Status().Roots
		must.Get(p.authority.Revoke(ctx, roots[len(roots)-1].ID, true))(t)
		time.Sleep(time.Minute)
		verifiable(t, m, must.Get(m.SVID())(t))
		assert.NotNil(t, must.Get(m.SVID())(t).Alternative())
	})
}

// TestQuantumAlternativeRefused: a CA that certifies no keys of ML-DSA costs no identity.
func TestQuantumAlternativeRefused(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	for name, refuse := range map[string]func(*pair) *atomic.Bool{
		"refuses": func(p *pair) *atomic.Bool { return &p.refuse },
		"hangs":   func(p *pair) *atomic.Bool { return &p.hang },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t)
				refuse(p).Store(true)
				m := must.Get(secretcache.Start(t.Context(), secretcache.Config{ID: web, CA: p, NewAlternative: mldsaKey}))(t)
				defer func() { _ = m.Close() }()
				svid := must.Get(m.SVID())(t)
				assert.Nil(t, svid.Alternative())
				require.ErrorContains(t, m.Report().Identities[0].Err, "the alternative: sign: ", "an operator sees why")

				// The failed attempts cost the CA nothing more while the identity has long to live.
				before := p.classical.Load()
				time.Sleep(time.Until(svid.NotAfter()) / 4)
				assert.Equal(t, before, p.classical.Load())
				assert.Same(t, svid, must.Get(m.SVID())(t))
				refuse(p).Store(false)
				time.Sleep(time.Until(svid.NotAfter()) / 4)
				both := must.Get(m.SVID())(t)
				require.NotNil(t, both.Alternative())
				require.NoError(t, m.Report().Identities[0].Err)

				// The pair stays while it has a quarter of its life, and then the identity goes on alone.
				refuse(p).Store(true)
				time.Sleep(time.Until(both.NotAfter()) - 18*time.Minute)
				assert.Same(t, both, must.Get(m.SVID())(t), "it lives for an hour")
				for range 24 {
					time.Sleep(10 * time.Minute)
					svid := must.Get(m.SVID())(t)
					assert.True(t, time.Now().Before(svid.NotAfter()), "no gap")
					verifiable(t, m, svid)
				}
				assert.Nil(t, must.Get(m.SVID())(t).Alternative())
			})
		})
	}
}

func TestQuantumAlternativeOfACredential(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	expect := pki.ExpectDNSName(domain, "web.example.org")
	_, err := secretcache.New(secretcache.Config{Expect: expect, CA: &pair{}, NewAlternative: mldsaKey})
	require.ErrorContains(t, err, "NewAlternative is for X.509-SVIDs")
}
