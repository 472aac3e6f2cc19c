package compare

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// A document that one writes the other reads, and what the other writes of it comes back as it was.
func TestBundlesExchanged(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, "example.org")
	a.ca.Rotate()
	c := a.bundle(t).Contents()
	c.Sequence, c.RefreshHint = new(uint64(1<<63+1)), 5*time.Minute
	for _, alg := range []string{"ecdsa-p384", "rsa-2048"} {
		key := must.Get(pki.NewKey(alg))(t)
		c.JWTAuthorities[string(alg)] = key.Public()
	}
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	c.WITAuthorities = map[string]crypto.PublicKey{"wit": key.Public()}
	b := must.Get(spiffe.NewBundle(a.ca.TrustDomain(), c))(t)

	p := peerBundle(t, b)
	assert.Equal(t, slices.Collect(b.X509Authorities()), p.X509Authorities())
	assert.Equal(t, maps.Collect(b.JWTAuthorities()), p.JWTAuthorities())
	assert.Equal(t, b.Contents().WITAuthorities, p.WITAuthorities())
	n, ok := p.SequenceNumber()
	assert.True(t, ok)
	assert.Equal(t, *c.Sequence, n)
	hint, ok := p.RefreshHint()
	assert.True(t, ok)
	assert.Equal(t, c.RefreshHint, hint)

	doc := must.Get(p.Marshal())(t)
	back := must.Get(spiffe.ParseBundleWIT(b.TrustDomain(), doc))(t)
	assert.Empty(t, back.Skipped())
	assert.True(t, back.Equal(b))

	// A bundle without authorities: BND-9 asks for an array, and the peer writes null.
	empty := must.Get(spiffebundle.New(peerDomain(b.TrustDomain())).Marshal())(t)
	assert.JSONEq(t, `{"keys":null}`, string(empty))
	_, err := spiffe.ParseBundle(b.TrustDomain(), empty)
	var refused *spiffe.ParseError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "BND-9", refused.Rule)
}

// The peer validates what we issue, with each algorithm.
func TestTokensExchanged(t *testing.T) {
	t.Parallel()
	curves := map[string]elliptic.Curve{"ES256": elliptic.P256(), "ES384": elliptic.P384(), "ES512": elliptic.P521()}
	id := spiffe.MustParseID("spiffe://example.org/web")
	for _, alg := range []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"} {
		t.Run(alg, func(t *testing.T) {
			t.Parallel()
			var key crypto.Signer
			var err error
			if curve, ok := curves[alg]; ok {
				key, err = ecdsa.GenerateKey(curve, rand.Reader)
			} else {
				key, err = rsa.GenerateKey(rand.Reader, 2048)
			}
			require.NoError(t, err)
			b, err := spiffe.NewBundle(id.TrustDomain(), spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{keyID: key.Public()}})
			require.NoError(t, err)
			issuer := must.Get(jwtsvid.NewIssuer(id.TrustDomain(), keyID, key, &jwtsvid.IssuerOptions{Algorithm: alg}))(t)
			token, err := issuer.Issue(jwtsvid.Request{ID: id, Audience: []string{"db"}, Claims: map[string]any{"role": "reader"}})
			require.NoError(t, err)

			svid := must.Get(peerjwt.ParseAndValidate(token, peerBundle(t, b).JWTBundle(), []string{"db"}))(t)
			assert.Equal(t, id.String(), svid.ID.String())
			assert.Equal(t, []string{"db"}, svid.Audience)
			assert.Equal(t, "reader", svid.Claims["role"])
			u := must.Get(jwtsvid.ParseUnverified(token))(t)
			assert.True(t, u.Expires.Equal(svid.Expiry))

			_, err = peerjwt.ParseAndValidate(token, peerBundle(t, b).JWTBundle(), []string{"cache"})
			assert.Error(t, err)
		})
	}
}
