package peers_test

import (
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
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
	a, err := ca.New(ca.Config{
		TrustDomain: domain, RefreshHint: time.Second,
		JWT:      &ca.JWTConfig{Issuer: issuer, Algorithm: algorithm, KeyTTL: 6 * time.Second, Propagation: 2 * time.Second},
		Rotation: ca.Rotation{Propagation: time.Second},
	})
	require.NoError(t, err)
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
			provider := must.Get(oidc.NewProvider(ctx, i.url))(t)
			verifier := provider.Verifier(&oidc.Config{ClientID: "app"})
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
