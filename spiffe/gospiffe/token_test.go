package gospiffe_test

import (
	"context"
	"crypto"
	"errors"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	theirjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// newIssuer returns an issuer and the bundle that verifies its tokens.
func newIssuer(t testing.TB, td spiffe.TrustDomain, now func() time.Time) (*jwtsvid.Issuer, *spiffe.Bundle) {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	issuer := must.Get(jwtsvid.NewIssuer(td, "jwt-1", key, &jwtsvid.IssuerOptions{WideAudience: true, Now: now}))(t)
	b := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{JWTAuthorities: map[string]crypto.PublicKey{"jwt-1": key.Public()}}))(t)
	return issuer, b
}

func issue(t testing.TB, td spiffe.TrustDomain, audience ...string) string {
	t.Helper()
	issuer, _ := newIssuer(t, td, nil)
	id := must.Get(td.WorkloadID("web"))(t)
	return must.Get(issuer.IssueJWTSVID(t.Context(), id, audience))(t)
}

// theirTokens is a source of go-spiffe that the test controls.
type theirTokens func(theirjwt.Params) (*theirjwt.SVID, error)

func (f theirTokens) FetchJWTSVID(_ context.Context, p theirjwt.Params) (*theirjwt.SVID, error) {
	return f(p)
}

// ourTokens is a source of this library that the test controls.
type ourTokens func(audience []string) (string, error)

func (f ourTokens) Fetch(_ context.Context, audience ...string) (string, error) { return f(audience) }

func TestTokens(t *testing.T) {
	t.Parallel()
	issuer, bundle := newIssuer(t, td, nil)
	id := spiffe.MustParseID("spiffe://example.org/web")
	ours := ourTokens(func(audience []string) (string, error) { return issuer.IssueJWTSVID(t.Context(), id, audience) })
	theirs := gospiffe.ToTokenSource(ours)

	for _, audience := range [][]string{{"db"}, {"db", "cache"}} {
		svid, err := theirs.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: audience[0], ExtraAudiences: audience[1:], Subject: spiffeid.RequireFromString(id.String())})
		require.NoError(t, err)
		assert.Equal(t, audience, svid.Audience)
		assert.Equal(t, id.String(), svid.ID.String())
		// Either side validates it, with the bundle that has crossed.
		must.Get(theirjwt.ParseAndValidate(svid.Marshal(), gospiffe.ToBundleSource(bundle), []string{"db"}))(t)

		back := gospiffe.FromTokenSource(theirs)
		token := must.Get(back.Fetch(t.Context(), audience...))(t)
		validator := must.Get(jwtsvid.NewValidator(gospiffe.FromJWTBundleSource(gospiffe.ToBundleSource(bundle)), []string{"db"}, nil))(t)
		verified := must.Get(validator.Validate(token))(t)
		assert.Equal(t, id, verified.ID())
	}

	_, err := theirs.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db", Subject: spiffeid.RequireFromString("spiffe://example.org/other")})
	assert.ErrorContains(t, err, "make a source of that identity")
}

// The token of a cache comes again: it is parsed once, and each reader has an SVID of its own.
func TestToTokenSourceShares(t *testing.T) {
	t.Parallel()
	theirs := gospiffe.ToTokenSource(fixed(issue(t, td, "db")))
	first := must.Get(theirs.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db"}))(t)
	want := first.Expiry
	first.ID, first.Audience[0], first.Expiry, first.Claims["sub"] = spiffeid.ID{}, "evil", time.Time{}, "spiffe://example.org/admin"
	again := must.Get(theirs.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db"}))(t)
	assert.Equal(t, "spiffe://example.org/web", again.ID.String())
	assert.Equal(t, []string{"db"}, again.Audience)
	assert.Equal(t, want, again.Expiry)
	assert.Equal(t, "spiffe://example.org/web", again.Claims["sub"])
	assert.Equal(t, first.Marshal(), again.Marshal())
}

func TestToTokenSourceRefuses(t *testing.T) {
	t.Parallel()
	down := errors.New("down")
	_, err := gospiffe.ToTokenSource(ourTokens(func([]string) (string, error) { return "", down })).FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db"})
	assert.ErrorIs(t, err, down)
	old, _ := newIssuer(t, td, func() time.Time { return time.Now().Add(-time.Hour) })
	expired := must.Get(old.IssueJWTSVID(t.Context(), spiffe.MustParseID("spiffe://example.org/web"), []string{"db"}))(t)
	for name, token := range map[string]string{"expired": expired, "for another": issue(t, td, "cache"), "no token": "hunter2", "empty": ""} {
		_, err := gospiffe.ToTokenSource(fixed(token)).FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db"})
		require.Error(t, err, name)
		if token != "" {
			assert.NotContains(t, err.Error(), token, name)
		}
	}
	// Audience and age of one that was parsed before count too.
	short, _ := newIssuer(t, td, nil)
	token := must.Get(short.Issue(jwtsvid.Request{ID: spiffe.MustParseID("spiffe://example.org/web"), Audience: []string{"db"}}))(t)
	src := gospiffe.ToTokenSource(fixed(token))
	must.Get(src.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "db"}))(t)
	_, err = src.FetchJWTSVID(t.Context(), theirjwt.Params{Audience: "cache"})
	require.Error(t, err, "the token of one audience for another")
	assert.Panics(t, func() { gospiffe.ToTokenSource(nil) })
}

func TestFromTokenSourceRefuses(t *testing.T) {
	t.Parallel()
	parse := func(token string) *theirjwt.SVID {
		return must.Get(theirjwt.ParseInsecure(token, nil))(t)
	}
	down := errors.New("down")
	recent, _ := newIssuer(t, td, func() time.Time { return time.Now().Add(-5*time.Minute - 20*time.Second) }) // within the leeway of go-spiffe
	expired := must.Get(recent.IssueJWTSVID(t.Context(), spiffe.MustParseID("spiffe://example.org/web"), []string{"db"}))(t)
	renamed := parse(issue(t, td, "db"))
	renamed.ID = spiffeid.RequireFromString("spiffe://example.org/admin")
	nameless := parse(issue(t, td, "db"))
	nameless.ID = spiffeid.ID{}
	for name, c := range map[string]struct {
		svid *theirjwt.SVID
		err  error
		is   error
	}{
		"the source fails":    {nil, down, down},
		"neither":             {nil, nil, nil},
		"made by hand":        {&theirjwt.SVID{ID: spiffeid.RequireFromString("spiffe://example.org/web")}, nil, nil},
		"renamed":             {renamed, nil, nil},
		"nameless":            {nameless, nil, spiffe.ErrZero},
		"for another":         {parse(issue(t, td, "cache")), nil, jwtsvid.ErrAudience},
		"for others too":      {parse(issue(t, td, "db", "cache")), nil, jwtsvid.ErrAudience},
		"it has just expired": {parse(expired), nil, jwtsvid.ErrExpired},
	} {
		token, err := gospiffe.FromTokenSource(theirTokens(func(theirjwt.Params) (*theirjwt.SVID, error) { return c.svid, c.err })).Fetch(t.Context(), "db")
		assert.Empty(t, token, name)
		require.Error(t, err, name)
		if c.is != nil {
			assert.ErrorIs(t, err, c.is, name)
		}
		if c.svid != nil && c.svid.Marshal() != "" {
			assert.NotContains(t, err.Error(), c.svid.Marshal(), name)
		}
	}
	_, err := gospiffe.FromTokenSource(theirTokens(nil)).Fetch(t.Context())
	assert.ErrorIs(t, err, jwtsvid.ErrAudience, "no audience")
	assert.Panics(t, func() { gospiffe.FromTokenSource(nil) })
}

// fixed is a source of one token.
type fixed string

func (f fixed) Fetch(context.Context, ...string) (string, error) { return string(f), nil }
