package jwtsvid_test

import (
	"crypto"
	"testing"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

var joseAlgorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.ES256, jose.ES384, jose.ES512, jose.PS256, jose.PS384, jose.PS512,
}

// josed returns what package jwt of go-jose verifies and reads.
func josed(token string, key crypto.PublicKey) (*jwt.Claims, error) {
	parsed, err := jwt.ParseSigned(token, joseAlgorithms)
	if err != nil {
		return nil, err
	}
	var c jwt.Claims
	return &c, parsed.Claims(key, &c)
}

// agrees asserts that package jwt reads in a token what was proved of it. It may refuse a token that a Validator
// accepts, and accepts some that a Validator refuses.
func agrees(t *testing.T, proof *jwtsvid.Verified, token string, key crypto.PublicKey) {
	t.Helper()
	c, err := josed(token, key)
	if err != nil {
		return
	}
	require.Equal(t, proof.ID().String(), c.Subject)
	require.Equal(t, proof.Audience(), []string(c.Audience))
	require.NotNil(t, c.Expiry)
	// It cuts fractions, and has no dates beyond those of an int64.
	if year := proof.Expires().Year(); year > 1 && year < 9999 {
		require.Equal(t, proof.Expires().Unix(), c.Expiry.Time().Unix())
	}
}

// TestJose exchanges tokens of all algorithms with package jwt, in both directions. What is signed and
// verified is judged in internal/tokens/token, by package crypto alone.
func TestJose(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-3", "JWT-26", "JWT-28", "GO-11")
	m := newMaterial(t)
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	for _, alg := range joseAlgorithms {
		kid, key := "jwt-2", crypto.Signer(m.jwt2)
		switch alg {
		case jose.ES256:
			kid, key = "jwt-1", m.jwt1
		case jose.ES384:
			kid, key = "jwt-3", m.jwt3
		case jose.ES512:
			kid, key = "jwt-4", m.jwt4
		}
		i := must.Get(jwtsvid.NewIssuer(domain, kid, key, &jwtsvid.IssuerOptions{Algorithm: string(alg), Now: atNow}))(t)
		token := must.Get(i.Issue(jwtsvid.Request{ID: webID, Audience: []string{"db"}}))(t)
		c, err := josed(token, key.Public())
		require.NoError(t, err, alg)
		assert.Equal(t, webID.String(), c.Subject)
		assert.Equal(t, jwt.Audience{"db"}, c.Audience)
		assert.Equal(t, int64(now+300), c.Expiry.Time().Unix())
		assert.Equal(t, int64(now), c.IssuedAt.Time().Unix())

		signer, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: jose.JSONWebKey{Key: key, KeyID: kid}}, (&jose.SignerOptions{}).WithType("JWT"))
		require.NoError(t, err)
		token = must.Get(jwt.Signed(signer).Claims(c).Serialize())(t)
		proof, err := v.Validate(token)
		require.NoError(t, err, alg)
		agrees(t, proof, token, key.Public())
	}
}
