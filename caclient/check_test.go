package caclient_test

import (
	"crypto"
	"crypto/x509"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var web = spiffe.MustParseID("spiffe://example.org/web")

func csrFor(t testing.TB, key crypto.Signer, ids ...spiffe.ID) *pki.CSR {
	t.Helper()
	var opts pki.CSROptions
	for _, id := range ids {
		opts.SANs = append(opts.SANs, pki.IDSAN(id))
	}
	return must.Get(pki.NewCSR(key, opts))(t)
}

func newCSR(t testing.TB, ids ...spiffe.ID) *pki.CSR {
	t.Helper()
	return csrFor(t, must.Get(pki.NewKey(pki.ECDSAP256))(t), ids...)
}

func requireBadAnswer(t testing.TB, err error) {
	t.Helper()
	e := must.As[*caclient.Error](err)(t)
	require.Equal(t, caclient.ErrBadAnswer, e.Kind)
	_, ok := e.Retryable()
	require.False(t, ok, "a CA that sent nonsense is not asked again")
}

func TestCheckAccepts(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	deep := ca.Intermediate()
	for name, issuer := range map[string]*spiffetest.CA{"a root's leaf": ca, "an intermediate's leaf": deep} {
		t.Run(name, func(t *testing.T) {
			chain, key := issuer.Certificate("/web")
			// The request may name anything, or nothing: id is what counts.
			for _, csr := range []*pki.CSR{csrFor(t, key), csrFor(t, key, web), csrFor(t, key, spiffe.MustParseID("spiffe://example.org/other"))} {
				assert.NoError(t, caclient.Check(chain, csr, pki.ExpectID(web), ca.Bundle(), time.Now()))
				assert.NoError(t, caclient.Check(chain, csr, pki.ExpectID(web), ca.Bundles(), chain[0].NotAfter))
			}
		})
	}
	t.Run("any usage, or none said", func(t *testing.T) {
		for _, usage := range [][]x509.ExtKeyUsage{nil, {x509.ExtKeyUsageAny}} {
			chain, key := ca.Certificate("/web", func(c *x509.Certificate) { c.ExtKeyUsage = usage })
			assert.NoError(t, caclient.Check(chain, csrFor(t, key), pki.ExpectID(web), ca.Bundle(), time.Now()))
		}
	})
}

// Each answer is good but for one thing.
func TestCheckRefuses(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	foreign := spiffetest.NewCA(t, "example.com")
	deep := ca.Intermediate()
	good, key := deep.Certificate("/web")
	big, bigKey := deep.Certificate("/web", func(c *x509.Certificate) {
		c.Subject.OrganizationalUnit = []string{string(make([]byte, 64<<10))}
	})
	signing, signingKey := ca.Certificate("/web", func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} })
	foreignChain, foreignKey := foreign.Certificate("/web")
	stolen, stolenKey := foreign.Certificate("/web", func(c *x509.Certificate) { c.URIs[0] = web.URL() })
	now := time.Now() // after the last leaf: a certificate is not valid in the second before it was made
	csr := csrFor(t, key)
	empty := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{}))(t)
	unusable := must.Get(spiffe.NewBundle(ca.TrustDomain(), other.Bundle().Contents()))(t)
	both := ca.Bundles().With(foreign.Bundle())
	chainOf := func(n int) []*x509.Certificate {
		c := slices.Clone(good)
		for len(c) < n {
			c = append(c, good[1])
		}
		return c
	}
	require.NoError(t, caclient.Check(good, csr, pki.ExpectID(web), ca.Bundle(), now))
	require.NoError(t, caclient.Check(chainOf(16), csr, pki.ExpectID(web), ca.Bundle(), now))

	for _, tt := range []struct {
		name    string
		chain   []*x509.Certificate
		csr     *pki.CSR
		id      spiffe.ID
		bundles spiffe.BundleSource
		now     time.Time
		is      error
		says    string
	}{
		{"no chain", nil, csr, web, both, now, nil, "empty"},
		{"no leaf", good[:0], csr, web, both, now, nil, "empty"},
		{"a hole", []*x509.Certificate{good[0], nil}, csr, web, both, now, nil, "nil certificate"},
		{"too many", chainOf(17), csr, web, both, now, spiffe.ErrTooLarge, "17 certificates, the limit is 16"},
		{"too large", big, csrFor(t, bigKey), web, both, now, spiffe.ErrTooLarge, "bytes of certificates, the limit is 65536"},
		{"the leaf last", []*x509.Certificate{good[1], good[0]}, csr, web, both, now, nil, "certificate 2 of 2 is not a CA"},
		{"two leaves", []*x509.Certificate{good[0], good[1], foreignChain[0]}, csr, web, both, now, nil, "certificate 3 of 3 is not a CA"},
		{"no request", good, nil, web, both, now, nil, "no request"},
		{"an empty request", good, new(pki.CSR), web, both, now, nil, "public key"},
		{"another key", good, newCSR(t, web), web, both, now, nil, "public key is not that of the request"},
		{"the signer's own certificate", good[1:], csr, web, both, now, nil, "public key is not that of the request"},
		{"no ID", good, csr, spiffe.ID{}, both, now, spiffe.ErrZero, "nothing was expected"},
		{"another workload", good, csr, spiffe.MustParseID("spiffe://example.org/api"), both, now, nil, `the leaf is for "spiffe://example.org/web"`},
		{"a workload below", good, csr, spiffe.MustParseID("spiffe://example.org/web/x"), both, now, nil, "the leaf is for"},
		{"another trust domain", foreignChain, csrFor(t, foreignKey), web, both, now, nil, `the leaf is for "spiffe://example.com/web"`},
		{"signed by another trust domain", stolen, csrFor(t, stolenKey), web, both, now, nil, "authority"},
		{"no bundles", good, csr, web, nil, now, nil, "no bundle source"},
		{"no bundle of the trust domain", good, csr, web, foreign.Bundle(), now, spiffe.ErrUnknownTrustDomain, ""},
		{"an empty bundle", good, csr, web, empty, now, spiffe.ErrNoAuthority, ""},
		{"another root", good, csr, web, unusable, now, nil, "authority"},
		{"no intermediate", good[:1], csr, web, both, now, nil, "authority"},
		{"another intermediate", []*x509.Certificate{good[0], ca.Intermediate().Root()}, csr, web, both, now, nil, "authority"},
		{"for signing code", signing, csrFor(t, signingKey), web, both, now, nil, "incompatible key usage"},
		{"not yet valid", good, csr, web, both, good[0].NotBefore.Add(-time.Second), nil, "not yet valid"},
		{"expired", good, csr, web, both, good[0].NotAfter.Add(time.Second), nil, "expired"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			err := caclient.Check(tt.chain, tt.csr, pki.ExpectID(tt.id), tt.bundles, tt.now)
			requireBadAnswer(t, err)
			assert.ErrorContains(t, err, tt.says)
			if tt.is != nil {
				assert.ErrorIs(t, err, tt.is)
			}
		})
	}
}

// Every way of being no identity that the fixtures know.
func TestCheckRefusesFaults(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	refused := 0
	for _, f := range spiffetest.Faults() {
		if !slices.Contains(f.Refused, spiffe.BothRoles) {
			continue
		}
		refused++
		t.Run(f.Name, func(t *testing.T) {
			chain, key := ca.Broken(f.Name)
			// Even a caller that wants exactly the ID in the leaf does not get it.
			id, err := spiffe.IDFromCertificate(chain[0])
			if err != nil {
				id = spiffe.MustParseID("spiffe://example.org/broken")
			}
			requireBadAnswer(t, caclient.Check(chain, csrFor(t, key), pki.ExpectID(id), ca.Bundle(), time.Now()))
		})
	}
	assert.Greater(t, refused, 17)
}

// A flipped bit anywhere in the certificate: either it does not parse, or it is refused.
func TestCheckRefusesDamage(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	chain, key := ca.Certificate("/web")
	csr, raw := csrFor(t, key), chain[0].Raw
	parsed := 0
	for i := range raw {
		damaged := slices.Clone(raw)
		damaged[i] ^= 1 << (i % 8)
		c, err := x509.ParseCertificate(damaged)
		if err != nil {
			continue
		}
		parsed++
		require.Error(t, caclient.Check([]*x509.Certificate{c}, csr, pki.ExpectID(web), ca.Bundle(), time.Now()), "byte %d", i)
	}
	assert.Greater(t, parsed, 100)
}
