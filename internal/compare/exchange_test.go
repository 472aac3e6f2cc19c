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

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/exp/bundle/witbundle"
	peerwit "github.com/spiffe/go-spiffe/v2/exp/svid/witsvid"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
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
	c.WITAuthorities = map[string]crypto.PublicKey{}
	for _, alg := range []string{"ES256", "ES512", "PS256"} {
		c.WITAuthorities[alg] = tokenKey(t, alg).Public()
	}
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

	// The peer's type for the keys of WIT-SVIDs alone writes a JWK Set that is read as either kind of document.
	doc = must.Get(p.WITBundle().Marshal())(t)
	assert.Equal(t, c.WITAuthorities, must.Get(spiffe.ParseBundleWIT(b.TrustDomain(), doc))(t).Contents().WITAuthorities)
	assert.Equal(t, c.WITAuthorities, must.Get(spiffe.ParseJWKSWIT(b.TrustDomain(), doc))(t).Contents().WITAuthorities)
	// It reads such a set of ours, but takes the keys of any use (WIT-62), and so needs a whole document cut first.
	own := must.Get(spiffe.NewBundle(b.TrustDomain(), spiffe.BundleContents{WITAuthorities: c.WITAuthorities}))(t)
	doc = must.Get(own.Marshal())(t)
	assert.Equal(t, c.WITAuthorities, must.Get(witbundle.Parse(p.TrustDomain(), doc))(t).WITAuthorities())
	doc = must.Get(b.MarshalJWKS())(t)
	assert.Equal(t, c.JWTAuthorities, must.Get(witbundle.Parse(p.TrustDomain(), doc))(t).WITAuthorities())

	// A bundle without authorities: BND-9 asks for an array, and the peer writes null.
	empty := must.Get(spiffebundle.New(peerDomain(b.TrustDomain())).Marshal())(t)
	assert.JSONEq(t, `{"keys":null}`, string(empty))
	_, err := spiffe.ParseBundle(b.TrustDomain(), empty)
	var refused *spiffe.ParseError
	require.ErrorAs(t, err, &refused)
	assert.Equal(t, "BND-9", refused.Rule)
}

var algorithms = []string{"ES256", "ES384", "ES512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}

// tokenKey returns a new key for the algorithm.
func tokenKey(t testing.TB, alg string) crypto.Signer {
	t.Helper()
	curves := map[string]elliptic.Curve{"ES256": elliptic.P256(), "ES384": elliptic.P384(), "ES512": elliptic.P521()}
	if curve, ok := curves[alg]; ok {
		return must.Get(ecdsa.GenerateKey(curve, rand.Reader))(t)
	}
	return must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
}

// The peer validates what we issue, with each algorithm.
func TestTokensExchanged(t *testing.T) {
	t.Parallel()
	id := spiffe.MustParseID("spiffe://example.org/web")
	for _, alg := range algorithms {
		t.Run(alg, func(t *testing.T) {
			t.Parallel()
			key := tokenKey(t, alg)
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

// peerWIT makes a WIT-SVID as servers with the peer's libraries do, which have no issuer of their own: with go-jose.
func peerWIT(t testing.TB, kid, alg string, key crypto.Signer, id spiffeid.ID, workload jose.JSONWebKey) string {
	t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{
		Algorithm: jose.SignatureAlgorithm(alg), Key: jose.JSONWebKey{Key: key, KeyID: kid},
	}, new(jose.SignerOptions).WithType("wit+jwt"))
	require.NoError(t, err)
	now := time.Now()
	return must.Get(jwt.Signed(signer).Claims(jwt.Claims{
		Subject: id.String(), Expiry: jwt.NewNumericDate(now.Add(time.Hour)), IssuedAt: jwt.NewNumericDate(now),
	}).Claims(map[string]any{"cnf": map[string]any{"jwk": workload.Public()}}).Serialize())(t)
}

// prove has a workload with this WIT-SVID call a server with these bundles, and returns the ID that it proved.
func prove(t testing.TB, bundles spiffe.BundleSource, token string, key crypto.Signer) (spiffe.ID, error) {
	t.Helper()
	svid := must.Get(witsvid.NewSVID(token, key))(t)
	prover := &witsvid.Prover{Source: func() (*witsvid.SVID, error) { return svid, nil }}
	call := witsvid.Call{Target: "https://db.example.org/"}
	token, proof := must.Get2(prover.Prove(call))(t)
	validator := must.Get(witsvid.NewValidator(bundles, spiffe.AllowAnyPeer(), nil))(t)
	proven, err := validator.Validate(token, proof, call)
	if err != nil {
		return spiffe.ID{}, err
	}
	return proven.ID(), nil
}

// Each takes the WIT-SVIDs of the other, with each algorithm of the issuer, and of the workload.
func TestWITsExchanged(t *testing.T) {
	t.Parallel()
	id := spiffe.MustParseID("spiffe://example.org/web")
	for _, alg := range algorithms {
		t.Run(alg, func(t *testing.T) {
			t.Parallel()
			key, workload := tokenKey(t, alg), tokenKey(t, alg)
			b := must.Get(spiffe.NewBundle(id.TrustDomain(), spiffe.BundleContents{
				WITAuthorities: map[string]crypto.PublicKey{"wit-1": key.Public()},
			}))(t)
			peers := peerBundle(t, b).WITBundle()

			opts := &witsvid.IssuerOptions{Algorithm: alg}
			issuer := must.Get(witsvid.NewIssuer(id.TrustDomain(), "wit-1", key, opts))(t)
			token := must.Get(issuer.Issue(id, workload.Public()))(t)
			svid := must.Get(peerwit.ParseAndValidate(token, peers))(t)
			assert.Equal(t, id.String(), svid.ID.String())
			assert.Equal(t, "wit-1", svid.KeyID)
			assert.Equal(t, workload.Public(), svid.PublicKey)
			u := must.Get(witsvid.ParseUnverified(token))(t)
			assert.True(t, u.Expires.Equal(svid.Expiry))
			assert.Equal(t, id, must.Get(prove(t, b, token, workload))(t))

			token = peerWIT(t, "wit-1", alg, key, peerID(id), jose.JSONWebKey{Key: workload, Algorithm: alg})
			must.Get(peerwit.ParseAndValidate(token, peers))(t)
			assert.Equal(t, id, must.Get(prove(t, b, token, workload))(t))

			// Neither takes a token of another key.
			token = peerWIT(t, "wit-1", alg, tokenKey(t, alg), peerID(id), jose.JSONWebKey{Key: workload, Algorithm: alg})
			_, err := peerwit.ParseAndValidate(token, peers)
			assert.Error(t, err)
			_, err = prove(t, b, token, workload)
			assert.ErrorContains(t, err, "signature")
		})
	}
}
