package workloadapi_test

import (
	"context"
	"crypto"
	"errors"
	"fmt"
	"log"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// tokenService issues and validates with package jwtsvid.
type tokenService struct {
	*jwtsvid.Issuer
	*jwtsvid.Validator
}

// A client that sends tokens keeps each for most of its life: a Source is the source of a jwtsvid.Cache. A
// server that receives them takes the keys from a Source with JWTBundles.
func ExampleSource_Fetch() {
	ca := spiffetest.NewCA(workloadtest.ExampleTB{}, "example.org")
	address, stop := tokensForExample(ca)
	defer stop()

	client, err := workloadapi.NewClient(address, nil)
	if err != nil {
		log.Fatal(err)
	}
	src, err := workloadapi.New(workloadapi.Config{Client: client, JWTBundles: true})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- src.Run(ctx) }()
	if err := src.Ready(ctx); err != nil {
		log.Fatal(err)
	}

	cache, err := jwtsvid.NewCache(src, nil)
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
	_, _, err = client.ValidateJWTSVID(ctx, "mail", token)
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
	handler, err := workloadserver.NewHandler(fixed{snap}, &workloadserver.Options{IssueJWTSVID: service.IssueJWTSVID, ValidateJWTSVID: service.ValidateJWTSVID})
	if err != nil {
		log.Fatal(err)
	}
	return workloadtest.ServeOnSocket(handler, nil)
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
	if err != nil {
		return tokenService{}, nil, err
	}
	validator, err := jwtsvid.NewAgentValidator(bundle, nil)
	return tokenService{issuer, validator}, bundle, err
}

// Tokens from the API are good, and what is not is refused with a reason and without the token.
func TestTokensEndToEnd(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-16", "WAPI-40", "WAPI-50", "WAPI-51", "WAPI-53", "WAPI-54", "WAPI-55")
	home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
	service, bundle := must.Get2(newTokenService(home.CA, &jwtsvid.IssuerOptions{WideAudience: true}))(t)
	foreign, _ := must.Get2(newTokenService(other.CA, nil))(t)
	late := time.Now().Add(-time.Hour)
	expired, _ := must.Get2(newTokenService(home.CA, &jwtsvid.IssuerOptions{Now: func() time.Time { return late }}))(t)
	service.Validator = must.Get(jwtsvid.NewAgentValidator(home.Bundles().With(bundle).With(other.Bundle()), nil))(t)
	h, err := workloadserver.NewHandler(fixed{spiffe.NewSnapshot(home.SVID("/web"), home.Bundles().With(bundle))}, &workloadserver.Options{IssueJWTSVID: service.IssueJWTSVID, ValidateJWTSVID: service.ValidateJWTSVID})
	require.NoError(t, err)
	t.Cleanup(func() { _ = h.Close() })
	c := inMemory(t, h)
	s := must.Get(workloadapi.New(workloadapi.Config{Client: c, JWTBundles: true}))(t)
	workloadtest.Run(t, s)
	require.NoError(t, s.Ready(t.Context()))

	both := must.Get(s.Fetch(t.Context(), "a", "b"))(t)
	for _, audience := range []string{"a", "b"} {
		id, claims := must.Get2(c.ValidateJWTSVID(t.Context(), audience, both))(t)
		assert.Equal(t, "spiffe://example.org/web", id.String())
		assert.Equal(t, []any{"a", "b"}, claims["aud"])
		assert.Equal(t, id.String(), claims["sub"])
		assert.InDelta(t, time.Now().Add(5*time.Minute).Unix(), claims["exp"], 60)
		v := must.Get(jwtsvid.NewValidator(s, []string{audience}, nil))(t)
		assert.Equal(t, id, must.Get(v.Validate(both))(t, "with the keys of FetchJWTBundles").ID())
	}
	token := func(s tokenService, id string) string {
		t.Helper()
		return must.Get(s.IssueJWTSVID(t.Context(), spiffe.MustParseID(id), []string{"a"}))(t)
	}
	for name, bad := range map[string]string{
		"no bundle with keys": token(foreign, "spiffe://other.test/web"),
		"expired":             token(expired, "spiffe://example.org/web"),
		"cut":                 both[:len(both)-4],
		"junk":                "junk",
	} {
		_, _, err := c.ValidateJWTSVID(t.Context(), "a", bad)
		require.ErrorIs(t, err, workloadapi.ErrRefused, name)
		assert.NotContains(t, err.Error(), bad[len(bad)/2:], name)
	}
	_, _, err = c.ValidateJWTSVID(t.Context(), "c", both)
	require.ErrorIs(t, err, workloadapi.ErrRefused)
}

// A source of tokens asks for the identity that it hands out, picked by its hint.
func TestFetch(t *testing.T) {
	t.Parallel()
	var _ jwtsvid.Source = (*workloadapi.Source)(nil)
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		web, db := home.SVID("/web"), home.SVID("/db")
		var asked []string
		c := inMemory(t, fake(t, func(c *call) {
			if c.rpc == "FetchX509SVID" {
				c.send(&wire.X509SVIDResponse{Svids: []*wire.X509SVID{message(t, home, web, ""), message(t, home, db, "data")}})
				c.wait()
				return
			}
			var req wire.JWTSVIDRequest
			require.NoError(t, proto.Unmarshal(c.request, &req))
			asked = append(asked, req.GetSpiffeId())
			m := &wire.JWTSVIDResponse{}
			for _, s := range []*wire.JWTSVID{{SpiffeId: web.ID().String(), Svid: "web"}, {SpiffeId: db.ID().String(), Svid: "other", Hint: "other"}, {SpiffeId: db.ID().String(), Svid: "db", Hint: "data"}} {
				if req.GetSpiffeId() == "" || req.GetSpiffeId() == s.GetSpiffeId() {
					m.Svids = append(m.Svids, s)
				}
			}
			c.send(m)
		}))
		for hint, want := range map[string]string{"": "web", "data": "db"} {
			asked = nil
			s := must.Get(workloadapi.New(workloadapi.Config{Client: c, Hint: hint}))(t)
			token := must.Get(s.Fetch(t.Context(), "a"))(t, "without Run")
			assert.Equal(t, want, token)
			stop := workloadtest.Run(t, s)
			require.NoError(t, s.Ready(t.Context()))
			token = must.Get(s.Fetch(t.Context(), "a"))(t)
			assert.Equal(t, want, token)
			assert.Equal(t, []string{"", "spiffe://example.org/" + want}, asked)
			require.NoError(t, stop())
		}
		s := must.Get(workloadapi.New(workloadapi.Config{Client: c, Hint: "none"}))(t)
		must.Fail(t, must.Err(s.Fetch(t.Context(), "a")), spiffe.ErrNotReady, `no identity with the hint "none"`)
		require.ErrorIs(t, must.Err(s.Fetch(t.Context())), workloadapi.ErrRefused, "no audience")
	})
}
