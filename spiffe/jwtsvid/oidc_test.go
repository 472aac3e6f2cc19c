package jwtsvid_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

var partner = spiffe.MustParseTrustDomain("partner.test")

// served is a bundle source that a test sets.
type served struct{ b *spiffe.Bundle }

func (s *served) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if s.b == nil {
		return nil, spiffe.ErrUnknownTrustDomain
	}
	return s.b, nil
}

const oidcIssuer = "https://oidc.example.org/prod"

// jwtBundle returns a bundle of the partner with these JWT keys alone.
func jwtBundle(t testing.TB, keys map[string]crypto.PublicKey) *spiffe.Bundle {
	t.Helper()
	b, err := spiffe.NewBundle(partner, spiffe.BundleContents{JWTAuthorities: keys, RefreshHint: 90 * time.Second})
	require.NoError(t, err)
	return b
}

// oidcKeys returns a key of each kind that can sign a JWT-SVID.
func oidcKeys(t testing.TB) map[string]crypto.PublicKey {
	t.Helper()
	keys := make(map[string]crypto.PublicKey)
	for id, curve := range map[string]elliptic.Curve{"e256": elliptic.P256(), "e384": elliptic.P384(), "e521": elliptic.P521()} {
		key := must.Get(ecdsa.GenerateKey(curve, rand.Reader))(t)
		keys[id] = key.Public()
	}
	key := must.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	keys[`r "ä"`] = key.Public()
	return keys
}

func TestOIDCHandler(t *testing.T) {
	t.Parallel()
	src := &served{}
	h := must.Get(jwtsvid.NewOIDCHandler(src, partner, oidcIssuer))(t)
	get := func(path string) (*http.Response, map[string]any) {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		var doc map[string]any
		if w.Code == 200 {
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &doc))
		}
		return w.Result(), doc
	}
	r, _ := get("/keys")
	assert.Equal(t, 503, r.StatusCode, "there is no bundle yet")
	src.b = jwtBundle(t, nil)
	for _, path := range []string{"/keys", "/.well-known/openid-configuration"} {
		r, _ = get(path)
		assert.Equal(t, 503, r.StatusCode, "no token could be verified: %s", path)
		assert.Equal(t, "no-store", r.Header.Get("Cache-Control"))
	}

	keys := oidcKeys(t)
	src.b = jwtBundle(t, keys)
	for _, prefix := range []string{"", "/prod", "/a/b"} {
		r, doc := get(prefix + "/.well-known/openid-configuration")
		assert.Equal(t, "application/json", r.Header.Get("Content-Type"))
		assert.Equal(t, map[string]any{
			"issuer": oidcIssuer, "jwks_uri": oidcIssuer + "/keys",
			"response_types_supported": []any{"id_token"}, "subject_types_supported": []any{"public"},
			"id_token_signing_alg_values_supported": []any{"ES256", "ES384", "ES512", "RS256"},
		}, doc)
		r, doc = get(prefix + "/keys")
		assert.Equal(t, "max-age=90", r.Header.Get("Cache-Control"), "the refresh hint")
		assert.NotEmpty(t, r.Header.Get("Etag"))
		algorithms := map[string]string{"e256": "ES256", "e384": "ES384", "e521": "ES512", `r "ä"`: "RS256"}
		require.Len(t, doc["keys"], len(keys))
		for _, k := range doc["keys"].([]any) {
			k := k.(map[string]any)
			assert.Equal(t, algorithms[k["kid"].(string)], k["alg"])
			assert.Equal(t, "sig", k["use"])
			want := map[string]int{"EC": 7, "RSA": 6}[k["kty"].(string)]
			assert.Len(t, k, want, "nothing else: no chain, no private part")
		}
	}
	tag := func() string { r, _ := get("/keys"); return r.Header.Get("Etag") }
	before := tag()
	delete(keys, "e256")
	src.b = jwtBundle(t, keys)
	assert.NotEqual(t, before, tag(), "a key has gone")

	for _, path := range []string{"/", "/keys/", "/keysx", "/.well-known/openid-configuration/keysx", "/.well-known/jwks.json"} {
		r, _ := get(path)
		assert.Equal(t, 404, r.StatusCode, path)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("POST", "/keys", nil))
	assert.Equal(t, 405, w.Code)
}

func bodyOf(t testing.TB, h http.Handler, path string) []byte {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	require.Equal(t, 200, w.Code)
	return w.Body.Bytes()
}

func TestOIDCFiles(t *testing.T) {
	t.Parallel()
	b := jwtBundle(t, oidcKeys(t))
	files := must.Get(jwtsvid.OIDCFiles(b, oidcIssuer))(t)
	h := must.Get(jwtsvid.NewOIDCHandler(&served{b: b}, partner, oidcIssuer))(t)
	require.Len(t, files, 2)
	for path, data := range files {
		assert.Equal(t, string(bodyOf(t, h, "/"+path)), string(data))
	}
	_, err := jwtsvid.OIDCFiles(jwtBundle(t, nil), oidcIssuer)
	require.ErrorIs(t, err, spiffe.ErrNoAuthority)
	_, err = jwtsvid.OIDCFiles(nil, oidcIssuer)
	require.ErrorIs(t, err, spiffe.ErrZero)
}

func TestOIDCRefuses(t *testing.T) {
	t.Parallel()
	for _, issuer := range []string{
		"", "oidc.example.org", "http://oidc.example.org", "ftp://oidc.example.org", "https://", "https:///path", "https://oidc.example.org/", "https://oidc.example.org/prod/",
		"https://oidc.example.org?a=b", "https://oidc.example.org?", "https://oidc.example.org#", "https://oidc.example.org#f", "https://user@oidc.example.org",
		"https://user:secret@oidc.example.org", "http://10.0.0.1", "http://127.0.0.1.example.org", "spiffe://example.org", "https://oidc.example.org/.well-known/openid-configuration",
		"https://oidc example.org", "https://[::1",
	} {
		_, err := jwtsvid.NewOIDCHandler(&served{}, partner, issuer)
		require.Error(t, err, issuer)
		assert.NotContains(t, err.Error(), "secret")
		_, err = jwtsvid.OIDCFiles(jwtBundle(t, nil), issuer)
		require.Error(t, err, issuer)
	}
	for _, issuer := range []string{"https://oidc.example.org", "https://oidc.example.org:8443/a/b", "http://127.0.0.1:8080", "http://localhost/a", "http://[::1]:1"} {
		_, err := jwtsvid.NewOIDCHandler(&served{}, partner, issuer)
		require.NoError(t, err, issuer)
	}
	_, err := jwtsvid.NewOIDCHandler(nil, partner, oidcIssuer)
	require.Error(t, err)
	_, err = jwtsvid.NewOIDCHandler(&served{}, spiffe.TrustDomain{}, oidcIssuer)
	require.ErrorIs(t, err, spiffe.ErrZero)
}

// A CA whose tokens are taken by verifiers that know OpenID Connect alone. The URL of the issuer leads to this handler, or to a copy of
// what it serves.
func ExampleNewOIDCHandler() {
	const issuer = "https://oidc.example.org"
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.New(ca.Config{TrustDomain: td, JWT: &ca.JWTConfig{Issuer: issuer, Algorithm: "RS256"}})
	if err != nil {
		log.Fatal(err)
	}
	handler, err := jwtsvid.NewOIDCHandler(authority.Bundle(), td, issuer) // in a program, a source that follows the authority
	if err != nil {
		log.Fatal(err)
	}
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/.well-known/openid-configuration", nil))
	fmt.Println(w.Body)
	// Output:
	// {"issuer":"https://oidc.example.org","jwks_uri":"https://oidc.example.org/keys","response_types_supported":["id_token"],"subject_types_supported":["public"],"id_token_signing_alg_values_supported":["RS256"]}
}
