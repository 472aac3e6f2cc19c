package jwt_test

import (
	"crypto"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// mint issues JWT-SVIDs of the trust domain, whose bundle it is.
func mint(t testing.TB) (*jwtsvid.Issuer, *spiffe.Bundle) {
	t.Helper()
	key := keys()["p256"]
	issuer := must.Get(jwtsvid.NewIssuer(td, "k", key, nil))(t)
	b := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{"k": key.Public()}}))(t)
	return issuer, b
}

func svidOf(t testing.TB, issuer *jwtsvid.Issuer, id, audience string) string {
	t.Helper()
	text := must.Get(issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(id), Audience: []string{audience}}))(t)
	return text
}

type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

func TestSVID(t *testing.T) {
	t.Parallel()
	issuer, bundle := mint(t)
	down := errors.New("down")
	var fail error
	v, err := jwtsvid.NewValidator(bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
		if fail != nil {
			return nil, fail
		}
		return bundle.Bundle(td)
	}), []string{"ca"}, nil)
	require.NoError(t, err)
	a := must.Get(jwt.SVID(v, spiffe.AllowIDs(spiffe.MustParseID(webID))))(t)

	text := svidOf(t, issuer, webID, "ca")
	first := must.Get(a.Authenticate(request(t, text)))(t)
	assert.Equal(t, webID, first.ID.String())
	assert.Equal(t, "jwt-svid", first.Method)
	assert.False(t, first.NotAfter.IsZero())
	again := must.Get(a.Authenticate(request(t, text)))(t)
	assert.Same(t, first, again)

	for name, c := range map[string]struct {
		text string
		want error
	}{
		"no token":       {"", authn.ErrNoCredential},
		"other audience": {svidOf(t, issuer, webID, "db"), jwtsvid.ErrAudience},
		"other workload": {svidOf(t, issuer, "spiffe://example.org/other", "ca"), spiffe.ErrDenied},
		"no JWT":         {"sesame", authn.ErrRefused},
		"other issuer":   {sign("p256", nil), authn.ErrRefused},
	} {
		_, err := a.Authenticate(request(t, c.text))
		require.ErrorIs(t, err, c.want, name)
		assert.Equal(t, c.text != "", errors.Is(err, authn.ErrRefused), name)
		assert.False(t, authn.Unavailable(err), name)
		assert.Empty(t, leak(err.Error(), c.text), name)
	}
	plain := request(t, text)
	plain.TLS = nil
	must.Fail(t, must.Err(a.Authenticate(plain)), authn.ErrRefused, "not encrypted")

	fail = down
	_, err = a.Authenticate(request(t, text))
	must.Fail(t, err, down, jwtsvid.ErrUnavailable)
	assert.True(t, authn.Unavailable(err))

	require.Error(t, must.Err(jwt.SVID(nil, spiffe.AllowAnyPeer())))
	require.Error(t, must.Err(jwt.SVID(v, spiffe.Policy{})))
	require.Error(t, must.Err(jwt.SVID(v, nil)))
}

// Tokens of an issuer, JWT-SVIDs and others beside each other: each is for its own method.
func TestSeveral(t *testing.T) {
	t.Parallel()
	minter, bundle := mint(t)
	v := must.Get(jwtsvid.NewValidator(bundle, []string{"ca"}, nil))(t)
	svids, err := jwt.SVID(v, spiffe.AllowMembersOf(td))
	require.NoError(t, err)
	away := newIssuer()
	away.err = errors.New("away")
	west := newAuthenticator(t, away, func(o *jwt.Options) { o.Issuer = "https://west.example.org" })
	east := newAuthenticator(t, newIssuer("p256"))
	all := authn.FirstOf(west, east, svids)
	for text, method := range map[string]string{sign("p256", nil): "jwt", svidOf(t, minter, webID, "ca"): "jwt-svid"} {
		c := must.Get(all.Authenticate(request(t, text)))(t)
		assert.Equal(t, method, c.Method)
		assert.Equal(t, webID, c.ID.String())
	}
	assert.Empty(t, away.asked(), "it was not asked about the tokens of others")
	_, err = all.Authenticate(request(t, sign("other", map[string]any{"iss": "https://west.example.org"})))
	assert.True(t, authn.Unavailable(err))
	_, err = all.Authenticate(request(t, sign("other", nil)))
	assert.False(t, authn.Unavailable(err))
}
