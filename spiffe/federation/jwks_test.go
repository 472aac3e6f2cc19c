package federation_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The JWK Set of another issuer, such as an OpenID Connect provider, validates JWT-SVIDs: its keys rotate, what is not a
// JWK Set replaces nothing, and the last good one is stored.
func TestJWKS(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Dir = filepath.Join(t.TempDir(), "store")
		w.cfg.Relationships[0].JWKS = true
		type pair struct {
			issuer *jwtsvid.Issuer
			jwk    []byte
		}
		mint := func(id string) pair {
			key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
			issuer := must.Get(jwtsvid.NewIssuer(partner, id, key, nil))(t)
			members, ok := jws.AppendKey([]byte(`{"use":"sig","alg":"ES256","kid":"`+id+`",`), key.Public())
			require.True(t, ok)
			return pair{issuer, append(members, '}')}
		}
		one, two := mint("one"), mint("two")
		set := func(pairs ...pair) []byte {
			var all [][]byte
			for _, p := range pairs {
				all = append(all, p.jwk)
			}
			return append(append([]byte(`{"keys":[`), bytes.Join(all, []byte(","))...), "]}"...)
		}
		w.site.serve(answer(200, set(one)))
		m := newManager(t, w.cfg)
		stop := running(t, m)
		synctest.Wait()
		good := func(src spiffe.BundleSource, p pair) bool {
			v := must.Get(jwtsvid.NewValidator(src, []string{"api"}, nil))(t)
			token, err := p.issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID("spiffe://partner.test/web"), Audience: []string{"api"}})
			require.NoError(t, err)
			_, err = v.Validate(token)
			return err == nil
		}
		assert.True(t, good(m, one))
		assert.False(t, good(m, two))
		assert.False(t, trusts(t, m, w.ca), "it verifies no certificates")

		w.site.serve(answer(200, set(one, two)))
		next(t, m, partner)
		assert.True(t, good(m, one) && good(m, two))
		w.site.serve(answer(200, []byte("<html>")))
		next(t, m, partner)
		assert.Error(t, statusOf(t, m, partner).Err)
		assert.True(t, good(m, one) && good(m, two))
		w.site.serve(answer(200, set(two)))
		next(t, m, partner)
		assert.False(t, good(m, one))
		assert.True(t, good(m, two))

		// After a restart while the issuer is away.
		stop()
		assert.FileExists(t, filepath.Join(w.cfg.Dir, "td-partner.test.json"))
		w.site.serve(answer(500, nil))
		m = newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		assert.False(t, good(m, one))
		assert.True(t, good(m, two))
		require.NoError(t, os.RemoveAll(w.cfg.Dir))

		// Without the option such a document has no keys that count.
		w.cfg.Relationships[0].JWKS = false
		w.cfg.Dir = ""
		w.site.serve(answer(200, set(two)))
		m = newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		assert.False(t, good(m, two))
	})
	ca := spiffetest.NewCA(t, "partner.test")
	_, err := federation.New(federation.Config{Relationships: []federation.Relationship{{
		TrustDomain: partner, URL: "https://partner.test/keys", JWKS: true,
		Profile: federation.SPIFFE{EndpointID: spiffe.MustParseID("spiffe://partner.test/keys"), Initial: ca.Bundle()},
	}}})
	require.ErrorContains(t, err, "a JWK Set has nothing to verify this one with")
}
