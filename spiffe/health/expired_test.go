package health_test

import (
	"crypto"
	"crypto/x509"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A bundle is good for as long as one of its X.509 authorities is, whatever keys for tokens are beside them and in which order
// they end.
func TestExpiredAuthorities(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		short, long := root(t, time.Hour), root(t, 2*time.Hour)
		keys := map[string]crypto.PublicKey{"k": ca.SVID("/web").Leaf().PublicKey}
		type check struct {
			h    *health.Handler
			name string
			ends time.Duration // 0: never
		}
		var all []check
		for name, c := range map[string]struct {
			x509 []*x509.Certificate
			jwt  map[string]crypto.PublicKey
			ends time.Duration
		}{
			"one":                  {[]*x509.Certificate{short}, nil, time.Hour},
			"one and keys":         {[]*x509.Certificate{short}, keys, time.Hour},
			"the longer one last":  {[]*x509.Certificate{short, long}, nil, 2 * time.Hour},
			"the longer one first": {[]*x509.Certificate{long, short}, keys, 2 * time.Hour},
			"keys alone":           {nil, keys, 0},
		} {
			b := must.Get(spiffe.NewBundle(ca.TrustDomain(), spiffe.BundleContents{X509Authorities: c.x509, JWTAuthorities: c.jwt}))(t)
			for kind, part := range map[string]health.Part{
				"named":    {Source: health.FromSources(nil, b), TrustDomains: []spiffe.TrustDomain{ca.TrustDomain()}},
				"in a set": {Source: health.FromSources(nil, ca.Bundles().With(b)), TrustDomains: []spiffe.TrustDomain{ca.TrustDomain()}},
			} {
				part.Name = "it"
				all = append(all, check{newHandler(t, part), name + ", " + kind, c.ends})
			}
		}
		begun := time.Now()
		for _, at := range []time.Duration{0, time.Hour, time.Hour + 1, 2 * time.Hour, 2*time.Hour + 1, 24 * time.Hour} {
			time.Sleep(time.Until(begun.Add(at)))
			for _, c := range all {
				if c.ends == 0 || at <= c.ends {
					assert.NoError(t, c.h.Ready(), "%s after %v", c.name, at)
				} else {
					assert.ErrorContains(t, c.h.Ready(), "so that no peer can be verified", "%s after %v", c.name, at)
				}
				assert.NoError(t, c.h.Alive(), c.name)
			}
		}
	})
}

// root returns an authority with a life.
func root(t *testing.T, life time.Duration) *x509.Certificate {
	t.Helper()
	chain, _ := spiffetest.NewCA(t, "example.org").Intermediate(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(life) }).Certificate("/web")
	require.Len(t, chain, 2)
	return chain[1]
}
