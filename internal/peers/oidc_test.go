package peers_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
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

// oidcIssuer is a CA that is an issuer of OpenID Connect, with a certificate for websites. Its keys sign for six seconds each.
type oidcIssuer struct {
	*ca.Authority
	url    string
	roots  string // of the website, in PEM
	client *http.Client
}

func newOIDCIssuer(t *testing.T, algorithm string) *oidcIssuer {
	t.Helper()
	var documents atomic.Pointer[http.Handler]
	web := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*documents.Load()).ServeHTTP(w, r) }))
	t.Cleanup(web.Close)
	i := &oidcIssuer{
		url: web.URL + "/prod", client: web.Client(), Authority: authorityOf(t, web.URL+"/prod", algorithm),
		roots: string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: web.Certificate().Raw})),
	}
	h := must.Get(jwtsvid.NewOIDCHandler(ownBundle{i.Authority}, domain, i.url))(t)
	documents.Store(&h)
	run(t, i.Authority)
	return i
}

func authorityOf(t *testing.T, issuer, algorithm string) *ca.Authority {
	t.Helper()
	a := must.Get(ca.New(ca.Config{
		TrustDomain: domain, RefreshHint: time.Second,
		JWT:      &ca.JWTConfig{Issuer: issuer, Algorithm: algorithm, KeyTTL: 6 * time.Second, Propagation: 2 * time.Second},
		Rotation: ca.Rotation{Propagation: time.Second},
	}))(t)
	return a
}

// ownBundle is the bundle of an authority.
type ownBundle struct{ *ca.Authority }

func (b ownBundle) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return b.Authority.Bundle(), nil
}

// token returns a token for id, of a CA that may be another one.
func (i *oidcIssuer) token(t *testing.T, id spiffe.ID, audience string) string {
	t.Helper()
	token, err := i.SignJWT(t.Context(), ca.JWTRequest{ID: id, Audience: []string{audience}, TTL: 4 * time.Second})
	require.NoError(t, err)
	return token
}

// errRefused is the answer of a judge that a token is not good.
var errRefused = errors.New("refused")

// judged has a real verifier take the tokens of the issuer, through rotations of its keys, and refuse others. Each says, as an error that
// wraps errRefused if so, what the verifier says to a token.
func (i *oidcIssuer) judged(t *testing.T, id spiffe.ID, audience string, says func(token string) error) {
	t.Helper()
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		require.NoError(c, says(i.token(t, id, audience)))
	}, time.Minute, 200*time.Millisecond, "it fetches the documents at its start")

	keys, tokens := map[string]bool{}, 0
	for begin := time.Now(); len(keys) < 3; time.Sleep(20 * time.Millisecond) {
		require.Less(t, time.Since(begin), time.Minute)
		token := i.token(t, id, audience)
		require.NoError(t, says(token), "after %d tokens of %d keys", tokens, len(keys))
		keys[must.Get(jwtsvid.ParseUnverified(token))(t).KeyID] = true
		tokens++
	}
	t.Logf("%d tokens of %d keys were taken, and none refused", tokens, len(keys))

	old := i.token(t, id, audience)
	thief := &oidcIssuer{Authority: authorityOf(t, i.url, "")}
	stranger := &oidcIssuer{Authority: authorityOf(t, "https://other.example.org", "")}
	for name, token := range map[string]string{
		"another audience": i.token(t, id, "other"),
		"another subject":  i.token(t, spiffe.MustParseID("spiffe://example.org/ns/other/sa/web"), audience),
		"another key":      thief.token(t, id, audience),
		"another issuer":   stranger.token(t, id, audience),
		"a changed token":  old[:strings.LastIndex(old, ".")+1] + strings.Repeat("A", 86),
	} {
		require.ErrorIs(t, says(token), errRefused, name)
	}
	require.NoError(t, says(i.token(t, id, audience)))
	require.EventuallyWithT(t, func(c *assert.CollectT) { require.ErrorIs(c, says(old), errRefused) }, 90*time.Second, time.Second, "it has expired")
}

// TestGoOIDC has the verifier of github.com/coreos/go-oidc judge.
func TestGoOIDC(t *testing.T) {
	t.Parallel()
	for _, algorithm := range []string{"ES256", "RS256"} {
		t.Run(algorithm, func(t *testing.T) {
			t.Parallel()
			i := newOIDCIssuer(t, algorithm)
			ctx := oidc.ClientContext(t.Context(), i.client)
			verifier := must.Get(oidc.NewProvider(ctx, i.url))(t).Verifier(&oidc.Config{ClientID: "app"})
			i.judged(t, webID, "app", func(token string) error {
				id, err := verifier.Verify(ctx, token)
				switch {
				case err != nil:
					return fmt.Errorf("%w: %w", errRefused, err)
				case id.Subject != webID.String():
					return fmt.Errorf("%w: the subject is for the program to check", errRefused)
				}
				return nil
			})
		})
	}
}

// TestKubernetesTakesTokens has a real API server judge, which is configured as examples/TOKENS.md says: a workload reads its own service
// account.
func TestKubernetesTakesTokens(t *testing.T) {
	t.Parallel()
	i := newOIDCIssuer(t, "ES256")
	config := filepath.Join(t.TempDir(), "authentication.yaml")
	text := page(t, "TOKENS.md", "apiVersion: apiserver.config.k8s.io/v1")
	text = strings.ReplaceAll(text, "https://oidc.example.org", i.url)
	text = strings.ReplaceAll(text, "      -----BEGIN CERTIFICATE-----\n      …\n      -----END CERTIFICATE-----\n", indent(i.roots, "      "))
	require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
	c := peers.NewCluster(t, "--authentication-config="+config)
	c.Create(t, `POST /api/v1/namespaces
apiVersion: v1
kind: Namespace
metadata: {name: prod}
POST /api/v1/namespaces/prod/serviceaccounts
apiVersion: v1
kind: ServiceAccount
metadata: {name: web}
POST /apis/rbac.authorization.k8s.io/v1/namespaces/prod/roles
`+page(t, "TOKENS.md", "kind: Role\n")+`POST /apis/rbac.authorization.k8s.io/v1/namespaces/prod/rolebindings
`+page(t, "TOKENS.md", "kind: RoleBinding\n"))
	i.judged(t, webID, "kubernetes", func(token string) error {
		client := c.Client(token)
		for path, want := range map[string]int{
			"/api/v1/namespaces/prod/serviceaccounts/web": 200, "/api/v1/namespaces/prod/serviceaccounts/other": 403, "/api/v1/namespaces/prod/secrets": 403,
		} {
			resp, err := client.Get(c.URL + path)
			if err != nil {
				return err
			}
			_ = resp.Body.Close()
			switch {
			case resp.StatusCode == http.StatusUnauthorized:
				return fmt.Errorf("%w: %s", errRefused, resp.Status)
			case resp.StatusCode != want:
				return fmt.Errorf("%s: %s", path, resp.Status)
			}
		}
		return nil
	})
}

// TestOpenBaoTakesTokens has the login "jwt" of a real OpenBao judge, by discovery.
func TestOpenBaoTakesTokens(t *testing.T) {
	t.Parallel()
	i, b := newOIDCIssuer(t, "RS256"), peers.NewOpenBao(t)
	b.Do(t, "", http.MethodPost, "sys/auth/jwt", doc{"type": "jwt"}, nil)
	b.Do(t, "", http.MethodPost, "auth/jwt/config", doc{"oidc_discovery_url": i.url, "oidc_discovery_ca_pem": i.roots, "bound_issuer": i.url}, nil)
	b.Do(t, "", http.MethodPost, "auth/jwt/role/web", doc{
		"role_type": "jwt", "bound_audiences": []string{"bao"}, "user_claim": "sub", "bound_subject": webID.String(), "token_policies": []string{"default"},
		"expiration_leeway": -1, "not_before_leeway": -1, "clock_skew_leeway": -1,
	}, nil)
	i.judged(t, webID, "bao", func(token string) error {
		status, answer, err := b.Login("jwt", doc{"role": "web", "jwt": token})
		switch {
		case err != nil:
			return err
		case status == http.StatusBadRequest || status == http.StatusForbidden:
			return fmt.Errorf("%w: %s", errRefused, answer)
		case status != http.StatusOK:
			return fmt.Errorf("%d: %s", status, answer)
		}
		return nil
	})
}

// indent puts a prefix before each line.
func indent(text, prefix string) string {
	return prefix + strings.ReplaceAll(strings.TrimSuffix(text, "\n"), "\n", "\n"+prefix) + "\n"
}

// page returns the block of code with a text that a page of examples has.
func page(t *testing.T, name, with string) string {
	t.Helper()
	data := must.Get(os.ReadFile(filepath.Join("..", "..", "examples", name)))(t)
	for n, block := range strings.Split(string(data), "```") {
		if _, text, ok := strings.Cut(block, "\n"); n%2 == 1 && ok && strings.Contains(text, with) {
			return text
		}
	}
	require.Fail(t, "the page has no such block", "%s: %s", name, with)
	return ""
}

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
		k.Do(t, "", doc{"realm": realm, "enabled": true, "sslRequired": "none", "accessTokenLifespan": 8})
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
			var client string
			_, err := c.Claim("azp", &client)
			return &authn.Caller{Name: client}, err
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
			s := must.Get(tokensource.ClientCredentials(tokensource.ClientOptions{
				URL: strings.Replace(k.TokenURL("prod"), k.URL, k.TLS, 1), ClientID: id, HTTPClient: &http.Client{Transport: transport},
			}))(t)
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
