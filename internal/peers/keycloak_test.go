package peers_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// svidsOf are the JWT-SVIDs that an authority signs for a workload.
type svidsOf struct {
	*ca.Authority
	id spiffe.ID
}

func (s svidsOf) Fetch(ctx context.Context, audience ...string) (string, error) {
	return s.SignJWT(ctx, ca.JWTRequest{ID: s.id, Audience: audience, TTL: 10 * time.Second})
}

// TestKeycloak has a real Keycloak take workloads for OAuth clients without a secret: by our bundle endpoint (jwt-spiffe) and by our issuer
// of OpenID Connect (RFC 7523). It is configured as examples/TOKENS.md says.
func TestKeycloak(t *testing.T) {
	t.Parallel()
	mux := http.NewServeMux()
	web := httptest.NewServer(mux)
	t.Cleanup(web.Close)
	// Keycloak fetches keys that it does not know at most once in ten seconds. It looks for an issuer if a token names one.
	authority := func(issuer string) *ca.Authority {
		a := must.Get(ca.New(ca.Config{
			TrustDomain: domain, RefreshHint: time.Second, Rotation: ca.Rotation{Propagation: time.Second},
			JWT: &ca.JWTConfig{Issuer: issuer, KeyTTL: 26 * time.Second, Propagation: 12 * time.Second},
		}))(t)
		run(t, a)
		return a
	}
	a, b := authority(""), authority(web.URL)
	// Keycloak reads the roots of client certificates once, so theirs are of an authority that keeps its root.
	clients := must.Get(ca.New(ca.Config{TrustDomain: domain}))(t)
	k := peers.NewKeycloak(t, clients.Bundle().MarshalPEM())
	bundle := must.Get(federation.NewHandler(ownBundle{a}, domain))(t)
	documents := must.Get(jwtsvid.NewOIDCHandler(ownBundle{b}, domain, web.URL))(t)
	mux.Handle("/bundle", bundle)
	mux.Handle("/", documents)

	for _, realm := range []string{"prod", "oidc"} {
		k.Do(t, "", doc{"realm": realm, "enabled": true, "sslRequired": "none", "accessTokenLifespan": 4})
	}
	k.Do(t, "/prod/identity-provider/instances", doc{"alias": "spiffe", "providerId": "spiffe", "enabled": true, "config": doc{
		"issuer": domain.ID().String(), "trustDomain": domain.ID().String(), "bundleEndpoint": web.URL + "/bundle",
	}})
	k.Do(t, "/oidc/identity-provider/instances", doc{"alias": "ca", "providerId": "oidc", "enabled": true, "config": doc{
		"issuer": web.URL, "jwksUrl": web.URL + "/keys", "useJwksUrl": "true", "validateSignature": "true", "supportsClientAssertions": "true",
		"clientId": "unused", "clientSecret": "unused", "authorizationUrl": web.URL, "tokenUrl": web.URL,
	}})
	client := func(realm, id, provider string, subject spiffe.ID, more doc) {
		t.Helper()
		attributes := doc{"jwt.credential.issuer": provider, "jwt.credential.sub": subject.String(), "standard.token.exchange.enabled": "true"}
		body := doc{"clientId": id, "enabled": true, "serviceAccountsEnabled": true, "clientAuthenticatorType": "federated-jwt", "attributes": attributes}
		maps.Copy(body, more)
		k.Do(t, "/"+realm+"/clients", body)
	}
	gateway, batch := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/gateway"), spiffe.MustParseID("spiffe://example.org/ns/prod/sa/batch")
	client("prod", webID.String(), "spiffe", webID, doc{"protocolMappers": []doc{{
		"name": "for-gateway", "protocol": "openid-connect", "protocolMapper": "oidc-audience-mapper",
		"config": doc{"included.client.audience": gateway.String(), "access.token.claim": "true"},
	}}})
	client("prod", gateway.String(), "spiffe", gateway, nil)
	client("oidc", "batch", "ca", batch, nil)
	k.Do(t, "/prod/clients", doc{"clientId": "by-certificate", "enabled": true, "serviceAccountsEnabled": true, "clientAuthenticatorType": "client-x509", "attributes": doc{
		"x509.subjectdn": "(.*)O=svidkit(.*)", "x509.allow.regex.pattern.comparison": "true",
	}})

	// What Keycloak says to an assertion of either type.
	judge := func(realm, kind string) func(token string) error {
		return func(token string) error {
			status, answer, err := k.TokenRequest(realm, url.Values{
				"grant_type": {"client_credentials"}, "client_assertion": {token}, "client_assertion_type": {"urn:ietf:params:oauth:client-assertion-type:" + kind},
			})
			switch {
			case err != nil:
				return err
			case status == http.StatusBadRequest || status == http.StatusUnauthorized:
				return fmt.Errorf("%w: %s", errRefused, answer)
			case status != http.StatusOK:
				return fmt.Errorf("%d: %s", status, answer)
			}
			return nil
		}
	}
	t.Run("jwt-spiffe", func(t *testing.T) {
		t.Parallel()
		(&oidcIssuer{Authority: a}).judged(t, webID, k.Issuer("prod"), judge("prod", "jwt-spiffe"))
		foreign, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("stranger.test"), JWT: new(ca.JWTConfig)})
		require.NoError(t, err)
		token, err := foreign.SignJWT(t.Context(), ca.JWTRequest{ID: spiffe.MustParseID("spiffe://stranger.test/ns/prod/sa/web"), Audience: []string{k.Issuer("prod")}})
		require.NoError(t, err)
		require.ErrorIs(t, judge("prod", "jwt-spiffe")(token), errRefused)
	})
	t.Run("jwt-bearer", func(t *testing.T) {
		t.Parallel()
		(&oidcIssuer{Authority: b, url: web.URL}).judged(t, batch, k.Issuer("oidc"), judge("oidc", "jwt-bearer"))
	})

	// A workload has an access token at each moment, through rotations of the roots and of the keys of its JWT-SVIDs, and a service
	// behind it proves its caller by that, and by the token that the gateway has in exchange for it.
	t.Run("source", func(t *testing.T) {
		t.Parallel()
		source := func(id spiffe.ID, from ...*tokensource.Source) *tokensource.Source {
			cache, err := jwtsvid.NewCache(svidsOf{a, id}, nil)
			require.NoError(t, err)
			o := tokensource.ClientOptions{URL: k.TokenURL("prod"), Issuer: k.Issuer("prod"), ClientAssertion: tokensource.SVID(cache, k.Issuer("prod"))}
			var s *tokensource.Source
			if len(from) > 0 {
				s, err = tokensource.Exchange(from[0], o)
			} else {
				s, err = tokensource.ClientCredentials(o)
			}
			require.NoError(t, err)
			return s
		}
		tokens := source(webID)
		exchanged := source(gateway, tokens)
		service, err := jwt.New(jwt.Options{Issuer: k.Issuer("prod"), Audiences: []string{gateway.String(), "account"}, AllowPlaintext: true, Caller: func(c *jwt.Claims) (*authn.Caller, error) {
			var more struct {
				Client string `json:"azp"`
			}
			err := c.Decode(&more)
			return &authn.Caller{Name: more.Client}, err
		}})
		require.NoError(t, err)
		callers, requests, distinct := map[string]int{}, 0, map[string]bool{}
		old := a.Status()
		must.Get(a.Rotate(t.Context()))(t)
		for begin := time.Now(); time.Since(begin) < 40*time.Second; time.Sleep(50 * time.Millisecond) {
			for _, s := range []*tokensource.Source{tokens, exchanged} {
				token, err := s.Token(t.Context())
				if err != nil && requests < 2 && strings.Contains(err.Error(), "404") {
					continue
				}
				require.NoError(t, err, "after %d requests and %v", requests, time.Since(begin))
				r := httptest.NewRequest("GET", "/", nil)
				r.Header.Set("Authorization", "Bearer "+token)
				c := must.Get(service.Authenticate(r))(t)
				callers[c.Name]++
				distinct[token] = true
				requests++
			}
		}
		now := a.Status()
		assert.NotEqual(t, old.Roots[0].ID, now.Roots[len(now.Roots)-1].ID, "the root was rotated")
		assert.NotEqual(t, old.JWTKeys[0].ID, now.JWTKeys[len(now.JWTKeys)-1].ID, "and so was the key of tokens")
		assert.Positive(t, callers[webID.String()])
		assert.Positive(t, callers[gateway.String()], "who exchanged the token")
		t.Logf("%d requests with %d access tokens, none refused: %v", requests, len(distinct), callers)
	})
	// By mutual TLS the X.509-SVID is the proof (RFC 8705), and access tokens are bound to nothing that its renewal would end.
	t.Run("mutual TLS", func(t *testing.T) {
		t.Parallel()
		signer := must.Get(local.New(clients, webID))(t)
		me, err := secretcache.Start(t.Context(), secretcache.Config{ID: webID, CA: signer, Lifetime: 8 * time.Second})
		require.NoError(t, err)
		t.Cleanup(func() { _ = me.Close() })
		endpoint, err := spiffetls.New(spiffetls.Config{Self: me, WebRoots: func() (*x509.CertPool, error) { return k.Roots, nil }})
		require.NoError(t, err)
		transport := must.Get(endpoint.Transport())(t)
		transport.DisableKeepAlives = true // each request shows the certificate of then
		ask := func(id string) *tokensource.Source {
			s, err := tokensource.ClientCredentials(tokensource.ClientOptions{
				URL: strings.Replace(k.TokenURL("prod"), k.URL, k.TLS, 1), ClientID: id, HTTPClient: &http.Client{Transport: transport},
			})
			require.NoError(t, err)
			return s
		}
		tokens, distinct, serials := ask("by-certificate"), map[string]bool{}, map[string]bool{}
		for begin := time.Now(); time.Since(begin) < 20*time.Second; time.Sleep(50 * time.Millisecond) {
			token := must.Get(tokens.Token(t.Context()))(t)
			distinct[token], serials[must.Get(me.SVID())(t).Leaf().SerialNumber.String()] = true, true
		}
		t.Logf("%d access tokens by %d certificates", len(distinct), len(serials))
		assert.Greater(t, len(serials), 2)
		_, err = ask(webID.String()).Token(t.Context())
		require.Error(t, err, "a client that is to prove itself otherwise")
	})
}
