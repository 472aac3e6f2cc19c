package workloadapi_test

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conformance"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// tokenService issues and validates with package jwtsvid.
type tokenService struct {
	issuer  *jwtsvid.Issuer
	bundles spiffe.BundleSource
}

func (s tokenService) IssueJWTSVID(_ context.Context, id spiffe.ID, audience []string) (string, error) {
	return s.issuer.Issue(jwtsvid.Request{ID: id, Audience: audience})
}

func (s tokenService) ValidateJWTSVID(_ context.Context, audience, token string) (spiffe.ID, map[string]any, error) {
	v, err := jwtsvid.NewValidator(s.bundles, []string{audience}, &jwtsvid.ValidatorOptions{Remember: -1})
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	proof, err := v.Validate(token)
	if err != nil {
		return spiffe.ID{}, nil, err
	}
	var claims map[string]any
	if err := proof.Claims(&claims); err != nil {
		return spiffe.ID{}, nil, err
	}
	return proof.ID(), claims, nil
}

// tokenSource is a source of tokens for a jwtsvid.Cache.
type tokenSource struct{ client *workloadapi.Client }

func (t tokenSource) Fetch(ctx context.Context, audience ...string) (string, error) {
	svid, err := t.client.FetchJWTSVID(ctx, audience[0], audience[1:]...)
	if err != nil {
		return "", err
	}
	return svid.Token(), nil
}

// A workload that calls others with tokens keeps each for most of its life: the Client is the source of
// a jwtsvid.Cache. One that is called takes the keys from a Source with JWTBundles.
func ExampleClient_FetchJWTSVID() {
	ca := spiffetest.NewCA(exampleTB{}, "example.org")
	address, stop := tokensForExample(ca)
	defer stop()

	src, err := workloadapi.New(workloadapi.Config{Address: address, JWTBundles: true})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- src.Run(ctx) }()
	if err := src.Ready(ctx); err != nil {
		log.Fatal(err)
	}

	cache, err := jwtsvid.NewCache(tokenSource{src.Client()}, nil)
	if err != nil {
		log.Fatal(err)
	}
	token, err := cache.Fetch(ctx, "db")
	if err != nil {
		log.Fatal(err)
	}

	validator, err := jwtsvid.NewValidator(src, []string{"db"}, nil)
	if err != nil {
		log.Fatal(err)
	}
	proof, err := validator.Validate(token)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("this is", proof.ID())
	_, _, err = src.Client().ValidateJWTSVID(ctx, "mail", token)
	fmt.Println("the server refuses it for mail:", errors.Is(err, workloadapi.ErrRefused))
	cancel()
	<-ended
	// Output:
	// this is spiffe://example.org/web
	// the server refuses it for mail: true
}

func tokensForExample(ca *spiffetest.CA) (address string, stop func()) {
	service, bundle, err := newTokenService(ca, nil)
	if err != nil {
		log.Fatal(err)
	}
	snap := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles().With(bundle))
	handler, err := workloadapi.NewHandler(workloadapi.Fixed(snap), &workloadapi.Options{Issuer: service, Validator: service})
	if err != nil {
		log.Fatal(err)
	}
	return serveForExample(handler)
}

// newTokenService returns a service for the domain of ca, and the bundle with its key.
func newTokenService(ca *spiffetest.CA, opts *jwtsvid.IssuerOptions) (tokenService, *spiffe.Bundle, error) {
	_, key := ca.Certificate("/key")
	c := ca.Bundle().Contents()
	c.JWTAuthorities = map[string]crypto.PublicKey{"key-1": key.Public()}
	bundle, err := spiffe.NewBundle(ca.TrustDomain(), c)
	if err != nil {
		return tokenService{}, nil, err
	}
	issuer, err := jwtsvid.NewIssuer(ca.TrustDomain(), "key-1", key, opts)
	return tokenService{issuer, bundle}, bundle, err
}

// Tokens from the API are good, and what is not is refused with a reason and without the token.
func TestTokensEndToEnd(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-16", "WAPI-40", "WAPI-50", "WAPI-51", "WAPI-53", "WAPI-54", "WAPI-55")
	home, other := newDomain(t, "example.org"), newDomain(t, "other.test")
	service, bundle, err := newTokenService(home.CA, &jwtsvid.IssuerOptions{WideAudience: true})
	require.NoError(t, err)
	stranger, _, err := newTokenService(other.CA, nil)
	require.NoError(t, err)
	late := time.Now().Add(-time.Hour)
	expired, _, err := newTokenService(home.CA, &jwtsvid.IssuerOptions{Now: func() time.Time { return late }})
	require.NoError(t, err)
	service.bundles = home.Bundles().With(bundle).With(other.Bundle())
	h := handler(t, workloadapi.Fixed(spiffe.NewSnapshot(home.SVID("/web"), home.Bundles().With(bundle))), &workloadapi.Options{Issuer: service, Validator: service})
	c := inMemory(t, h)
	s, err := workloadapi.New(workloadapi.Config{Client: c, JWTBundles: true})
	require.NoError(t, err)
	run(t, s)
	require.NoError(t, s.Ready(t.Context()))

	svid, err := c.FetchJWTSVID(t.Context(), "a", "b")
	require.NoError(t, err)
	for _, audience := range []string{"a", "b"} {
		id, claims, err := c.ValidateJWTSVID(t.Context(), audience, svid.Token())
		require.NoError(t, err)
		assert.Equal(t, "spiffe://example.org/web", id.String())
		assert.Equal(t, []any{"a", "b"}, claims["aud"])
		assert.Equal(t, id.String(), claims["sub"])
		assert.InDelta(t, time.Now().Add(jwtsvid.DefaultLifetime).Unix(), claims["exp"], 60)
		v, err := jwtsvid.NewValidator(s, []string{audience}, nil)
		require.NoError(t, err)
		proof, err := v.Validate(svid.Token())
		require.NoError(t, err, "with the keys of FetchJWTBundles")
		assert.Equal(t, id, proof.ID())
	}
	token := func(s tokenService, id string) string {
		t.Helper()
		text, err := s.IssueJWTSVID(t.Context(), spiffe.MustParseID(id), []string{"a"})
		require.NoError(t, err)
		return text
	}
	for name, bad := range map[string]string{
		"no bundle with keys": token(stranger, "spiffe://other.test/web"),
		"expired":             token(expired, "spiffe://example.org/web"),
		"cut":                 svid.Token()[:len(svid.Token())-4],
		"junk":                "junk",
	} {
		_, _, err := c.ValidateJWTSVID(t.Context(), "a", bad)
		require.ErrorIs(t, err, workloadapi.ErrRefused, name)
		assert.NotContains(t, err.Error(), bad[len(bad)/2:], name)
	}
	_, _, err = c.ValidateJWTSVID(t.Context(), "c", svid.Token())
	require.ErrorIs(t, err, workloadapi.ErrRefused)
}
