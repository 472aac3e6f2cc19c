package jwt_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for want, edit := range map[string]func(*jwt.Options){
		"Issuer is empty":                         func(o *jwt.Options) { o.Issuer = "" },
		"Audiences is empty":                      func(o *jwt.Options) { o.Audiences = nil },
		"or has an empty one":                     func(o *jwt.Options) { o.Audiences = []string{"a", ""} },
		"are both missing":                        func(o *jwt.Options) { o.TrustDomain = spiffe.TrustDomain{} },
		"are both set":                            func(o *jwt.Options) { o.Caller = func(*jwt.Claims) (*authn.Caller, error) { return nil, nil } },
		`Issuer: the scheme is "http"`:            func(o *jwt.Options) { o.Issuer = "http://oidc.example.org" },
		`Issuer: "kubernetes" is no URL`:          func(o *jwt.Options) { o.Issuer = "kubernetes" },
		`Issuer: the scheme is "file"`:            func(o *jwt.Options) { o.Issuer = "file://localhost/keys" },
		"Issuer: it is no URL":                    func(o *jwt.Options) { o.Issuer = "https://%zz" },
		`JWKSURL: the scheme is "http"`:           func(o *jwt.Options) { o.JWKSURL = "http://127.example.org/keys" },
		`JWKSURL: "https:///keys" is no URL`:      func(o *jwt.Options) { o.JWKSURL = "https:///keys" },
		`"https://u:xxxxx@example.org" is no URL`: func(o *jwt.Options) { o.Issuer = "https://u:sesame@example.org" },
	} {
		o := jwt.Options{Issuer: issuerURL, Audiences: []string{audience}, TrustDomain: td}
		edit(&o)
		_, err := jwt.New(o)
		require.ErrorContains(t, err, want)
		assert.NotContains(t, err.Error(), "sesame")
	}
	for _, edit := range []func(*jwt.Options){
		func(o *jwt.Options) { o.Issuer = "http://127.0.0.1:8001" },
		func(o *jwt.Options) { o.Issuer = "http://[::1]:8001" },
		func(o *jwt.Options) {
			o.Issuer, o.JWKSURL = "kubernetes/serviceaccount", "http://localhost:8001/openid/v1/jwks"
		},
	} {
		newAuthenticator(t, newIssuer(), edit)
	}
}

func TestNotMade(t *testing.T) {
	t.Parallel()
	var a jwt.Authenticator
	require.Error(t, a.Fetch(t.Context()))
	c, err := a.Authenticate(request(t, sign("p256", nil)))
	require.ErrorContains(t, err, "not made by New")
	assert.Nil(t, c)
	assert.True(t, authn.Unavailable(err))
}

func TestAuthenticate(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.4-1")
	all := newIssuer("p256", "p384", "p521", "rsa")
	a := newAuthenticator(t, all)
	for name, text := range map[string]string{
		"ES256":           sign("p256", nil),
		"ES384":           sign("p384", nil),
		"ES512":           sign("p521", nil),
		"RS256":           sign("rsa", nil),
		"PS512":           signRaw("rsa", "PS512", "rsa", "JWT", mustJSON(claims(nil))),
		"no kid":          signHeader(`{"alg":"ES256"}`, nil),
		"other members":   signHeader(`{"alg":"ES256","kid":"p256","x5t":"AAAA","jku":"https://evil.example.org"}`, nil),
		"at+jwt":          signHeader(`{"alg":"ES256","kid":"p256","typ":"at+jwt"}`, nil),
		"application/jwt": signHeader(`{"alg":"ES256","kid":"p256","typ":"application/AT+JWT"}`, nil),
		"aud is a text":   sign("p256", map[string]any{"aud": audience}),
		"one of the aud":  sign("p256", map[string]any{"aud": []string{"other", audience}}),
		"no nbf, no iat":  sign("p256", map[string]any{"nbf": nil, "iat": nil}),
		"just ended":      sign("p256", map[string]any{"exp": time.Now().Unix() - 50}),
		"begins soon":     sign("p256", map[string]any{"nbf": time.Now().Unix() + 50}),
		"fractions":       sign("p256", map[string]any{"exp": float64(time.Now().Unix()) + 3600.5}),
		"other claims":    sign("p256", map[string]any{"kubernetes.io": map[string]any{"namespace": "prod"}, "email": "a@example.org"}),
		"dots in a name":  sign("p256", map[string]any{"sub": "system:serviceaccount:prod:web.v1"}),
	} {
		for _, again := range []bool{false, true} {
			c, err := a.Authenticate(request(t, text))
			require.NoError(t, err, name)
			want := webID
			if name == "dots in a name" {
				want += ".v1"
			}
			assert.Equal(t, want, c.ID.String(), name)
			assert.Equal(t, "jwt", c.Method)
			assert.WithinDuration(t, time.Now(), c.NotAfter, time.Hour+time.Second)
			assert.False(t, c.NotAfter.IsZero())
			assert.Nil(t, c.Certificate)
			_ = again
		}
	}
	assert.Equal(t, []string{"/.well-known/openid-configuration", "/jwks"}, all.asked(), "fetched once")
}

func mustJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// With JWKSURL there is no discovery.
func TestJWKSURL(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.4-1")
	i := newIssuer("p256")
	a := newAuthenticator(t, i, func(o *jwt.Options) {
		o.Issuer, o.JWKSURL = "kubernetes/serviceaccount", "https://keys.example.org/jwks"
	})
	_, err := a.Authenticate(request(t, sign("p256", map[string]any{"iss": "kubernetes/serviceaccount"})))
	require.NoError(t, err)
	assert.Equal(t, []string{"/jwks"}, i.asked())
}

func TestRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.4-2", "IST-5.4-3", "IST-5.4-4")
	now := time.Now().Unix()
	part := func(text string, n int, change func(string) string) string {
		parts := strings.Split(text, ".")
		parts[n] = change(parts[n])
		return strings.Join(parts, ".")
	}
	encode := func(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }
	good := sign("p256", nil)
	a := newAuthenticator(t, newIssuer("p256", "p384", "rsa"))
	require.NoError(t, must.Err(a.Authenticate(request(t, good))))
	for name, c := range map[string]struct{ text, want string }{
		"other audience":        {sign("p256", map[string]any{"aud": []string{"vault"}}), `it is for ["vault"]`},
		"audience as a text":    {sign("p256", map[string]any{"aud": "vault"}), `it is for ["vault"]`},
		"no audience":           {sign("p256", map[string]any{"aud": nil}), "it is for []"},
		"empty list":            {sign("p256", map[string]any{"aud": []string{}}), "it is for []"},
		"empty audience":        {sign("p256", map[string]any{"aud": ""}), `it is for [""]`},
		"audience of numbers":   {sign("p256", map[string]any{"aud": []any{audience, 1}}), `"aud" is of another type`},
		"audience is an object": {sign("p256", map[string]any{"aud": map[string]any{audience: true}}), `"aud" is of another type`},
		"expired":               {sign("p256", map[string]any{"exp": now - 61}), "expired: it ended at"},
		"no exp":                {sign("p256", map[string]any{"exp": nil}), `"exp" is missing`},
		"exp is a text":         {sign("p256", map[string]any{"exp": "9999999999"}), `"exp" is of another type`},
		"not yet":               {sign("p256", map[string]any{"nbf": now + 90}), "not yet valid"},
		"nbf is a text":         {sign("p256", map[string]any{"nbf": "0"}), `"nbf" is of another type`},
		"issued in the future":  {sign("p256", map[string]any{"iat": now + 90}), "in the future"},
		"iat is null":           {signRaw("p256", "", "p256", "JWT", strings.Replace(mustJSON(claims(map[string]any{"iat": 77})), `:77`, ":null", 1)), `"iat" is of another type`},
		"no sub":                {sign("p256", map[string]any{"sub": nil}), `"sub" is missing`},
		"sub is a number":       {sign("p256", map[string]any{"sub": 1}), `"sub" is of another type`},
		"iss is a list":         {sign("p256", map[string]any{"iss": []string{issuerURL}}), `"iss" is of another type`},
		"two parts":             {sign("p256", map[string]any{"sub": "system:serviceaccount"}), "is not a service account"},
		"three parts":           {sign("p256", map[string]any{"sub": "system:serviceaccount:prod"}), "is not a service account"},
		"five parts":            {sign("p256", map[string]any{"sub": subject + ":x"}), "is not a service account"},
		"other prefix":          {sign("p256", map[string]any{"sub": "system:serviceaccounts:prod:web"}), "is not a service account"},
		"no namespace":          {sign("p256", map[string]any{"sub": "system:serviceaccount::web"}), "is not a namespace"},
		"no account":            {sign("p256", map[string]any{"sub": "system:serviceaccount:prod:"}), "is not a service account's name"},
		"path in a name":        {sign("p256", map[string]any{"sub": "system:serviceaccount:prod:../sa/admin"}), "is not a service account's name"},
		"a user":                {sign("p256", map[string]any{"sub": "alice"}), "is not a service account"},
		"other key":             {signRaw("other", "", "p256", "JWT", mustJSON(claims(nil))), "signature"},
		"unknown kid":           {sign("other", nil), `the issuer has no key "other" for ES256`},
		"kid of another type":   {signRaw("p256", "", "rsa", "JWT", mustJSON(claims(nil))), `the issuer has no key "rsa" for ES256`},
		"kid is a number":       {signHeader(`{"alg":"ES256","kid":1}`, nil), `"kid" is not a string`},
		"none":                  {encode(`{"alg":"none"}`) + "." + encode(mustJSON(claims(nil))) + ".", "algorithm"},
		"HS256":                 {signHeader(`{"alg":"HS256","kid":"p256"}`, nil), "algorithm"},
		"alg is missing":        {signHeader(`{"kid":"p256"}`, nil), "algorithm"},
		"EdDSA":                 {signHeader(`{"alg":"EdDSA","kid":"p256"}`, nil), "algorithm"},
		"RS256 with an EC key":  {signHeader(`{"alg":"RS256","kid":"p256"}`, nil), `no key "p256" for RS256`},
		"crit":                  {signHeader(`{"alg":"ES256","kid":"p256","crit":["exp"],"exp":1}`, nil), `"crit"`},
		"b64":                   {signHeader(`{"alg":"ES256","kid":"p256","b64":false,"crit":["b64"]}`, nil), `"crit"`},
		"logout token":          {signHeader(`{"alg":"ES256","kid":"p256","typ":"logout+jwt"}`, nil), "a token of another kind"},
		"event token":           {signHeader(`{"alg":"ES256","kid":"p256","typ":"secevent+jwt"}`, nil), "a token of another kind"},
		"empty typ":             {signHeader(`{"alg":"ES256","kid":"p256","typ":""}`, nil), "a token of another kind"},
		"duplicate in a header": {signHeader(`{"alg":"ES256","kid":"p256","kid":"p256"}`, nil), "strict JSON"},
		"duplicate claim":       {signRaw("p256", "", "p256", "JWT", strings.TrimSuffix(mustJSON(claims(nil)), "}")+`,"sub":"`+subject+`"}`), "strict JSON"},
		"claims are a list":     {signRaw("p256", "", "p256", "JWT", "[]"), "not a JSON object"},
		"no JSON":               {signRaw("p256", "", "p256", "JWT", "{"), "strict JSON"},
		"padding":               {part(good, 2, func(s string) string { return s + "==" }), "base64url"},
		"cut signature":         {part(good, 2, func(s string) string { return s[:len(s)-4] }), "signature"},
		"empty signature":       {part(good, 2, func(string) string { return "" }), "signature"},
		"changed claims": {part(good, 1, func(string) string {
			return encode(mustJSON(claims(map[string]any{"sub": "system:serviceaccount:prod:admin"})))
		}), "signature"},
		"changed header": {part(good, 0, func(string) string { return encode(`{"alg":"ES256","kid":"p256"}`) }), "signature"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, err := a.Authenticate(request(t, c.text))
			require.Error(t, err)
			assert.Nil(t, c)
			require.ErrorIs(t, err, authn.ErrRefused)
			assert.NotErrorIs(t, err, authn.ErrNoCredential)
			assert.False(t, authn.Unavailable(err))
		})
		_, err := a.Authenticate(request(t, c.text))
		require.ErrorContains(t, err, c.want, name)
		assert.Empty(t, leak(err.Error(), c.text), name)
	}
	require.NoError(t, must.Err(a.Authenticate(request(t, good))), "the authenticator is as it was")
	_, err := a.Authenticate(request(t, sign("p256", map[string]any{"exp": now - 61})))
	require.ErrorIs(t, err, jwtsvid.ErrExpired)
	_, err = a.Authenticate(request(t, sign("p256", map[string]any{"aud": "vault"})))
	require.ErrorIs(t, err, jwtsvid.ErrAudience)
}

// leak returns a piece of the token that an error shows, other than of its empty parts.
func leak(text, token string) string {
	const piece = 20
	for n := range max(len(token)-piece, 0) {
		if strings.Contains(text, token[n:n+piece]) {
			return token[n : n+piece]
		}
	}
	return ""
}

// What is not for this method leaves the question to the next one, and causes no fetch.
func TestNoCredential(t *testing.T) {
	t.Parallel()
	i := newIssuer("p256")
	a := newAuthenticator(t, i)
	scheme := request(t, "")
	scheme.Header.Set("Authorization", "Basic YTpi")
	for name, r := range map[string]*http.Request{
		"no header":      request(t, ""),
		"another scheme": scheme,
		"no JWT":         request(t, "SECRET:prod/web"),
		"encrypted":      request(t, "a.b.c.d.e"),
		"other issuer":   request(t, sign("p256", map[string]any{"iss": issuerURL + "/"})),
		"no issuer":      request(t, sign("p256", map[string]any{"iss": nil})),
	} {
		_, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrNoCredential, name)
		assert.NotErrorIs(t, err, authn.ErrRefused, name)
	}
	assert.Empty(t, i.asked())
	require.ErrorIs(t, must.Err(a.Authenticate(request(t, sign("p256", map[string]any{"exp": 1})))), authn.ErrRefused)
	assert.Empty(t, i.asked(), "a token that is refused anyway costs no fetch")
}

func TestPlaintext(t *testing.T) {
	t.Parallel()
	r := request(t, sign("p256", nil))
	r.TLS = nil
	a := newAuthenticator(t, newIssuer("p256"))
	for range 2 {
		_, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrRefused)
		require.ErrorContains(t, err, "not encrypted")
		require.NoError(t, must.Err(a.Authenticate(request(t, sign("p256", nil)))))
		_, err = a.Authenticate(request(t, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "))) // which is remembered then
		require.NoError(t, err)
	}
	_, err := newAuthenticator(t, newIssuer("p256"), func(o *jwt.Options) { o.AllowPlaintext = true }).Authenticate(r)
	require.NoError(t, err)
}

// An operator maps claims to callers.
func TestCallerOption(t *testing.T) {
	t.Parallel()
	denied := errors.New("not this repository")
	a := newAuthenticator(t, newIssuer("p256"), func(o *jwt.Options) {
		o.TrustDomain = spiffe.TrustDomain{}
		o.Caller = func(c *jwt.Claims) (*authn.Caller, error) {
			var repository string
			if _, err := c.Claim("repository", &repository); err != nil {
				return nil, err
			}
			var run json.Number
			if _, err := c.Claim("run", &run); err != nil {
				return nil, err
			}
			switch repository {
			case "a/b":
				return &authn.Caller{Name: c.Subject + " " + run.String(), Method: "mine", NotAfter: time.Unix(1, 0)}, nil
			case "nothing":
				return nil, nil
			case "no name":
				return &authn.Caller{Pod: &spiffe.Pod{}}, nil
			}
			return nil, denied
		}
	})
	c, err := a.Authenticate(request(t, sign("p256", map[string]any{"repository": "a/b", "Repository": "c/d", "run": 12345678901234567})))
	require.NoError(t, err)
	assert.Equal(t, subject+" 12345678901234567", c.Name)
	assert.True(t, c.ID.IsZero())
	assert.Equal(t, "jwt", c.Method)
	assert.Equal(t, "jwt:"+subject+" 12345678901234567", c.String())
	assert.WithinDuration(t, time.Now().Add(time.Hour), c.NotAfter, time.Minute)
	for _, repository := range []string{"nothing", "no name"} {
		_, err = a.Authenticate(request(t, sign("p256", map[string]any{"repository": repository})))
		require.ErrorIs(t, err, authn.ErrRefused)
		require.ErrorContains(t, err, "names no caller")
	}
	_, err = a.Authenticate(request(t, sign("p256", map[string]any{"repository": "c/d"})))
	require.ErrorIs(t, err, authn.ErrRefused)
	require.ErrorIs(t, err, denied)
	_, err = a.Authenticate(request(t, sign("p256", map[string]any{"repository": 1})))
	require.ErrorContains(t, err, "authn/jwt: claim \"repository\":")
}

// A token that is remembered is judged by the time.
func TestRememberedInTime(t *testing.T) {
	t.Parallel()
	keys() // outside the bubble
	synctest.Test(t, func(t *testing.T) {
		a := newAuthenticator(t, newIssuer("p256"))
		text := sign("p256", map[string]any{"exp": time.Now().Unix() + 30})
		first := must.Get(a.Authenticate(request(t, text)))(t)
		time.Sleep(89 * time.Second) // the leeway is a minute
		again := must.Get(a.Authenticate(request(t, text)))(t)
		assert.Same(t, first, again)
		time.Sleep(time.Second)
		require.ErrorIs(t, must.Err(a.Authenticate(request(t, text))), jwtsvid.ErrExpired)
	})
}

func TestPrint(t *testing.T) {
	t.Parallel()
	a := newAuthenticator(t, newIssuer("p256"))
	text := sign("p256", nil)
	require.NoError(t, must.Err(a.Authenticate(request(t, text))))
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("-", "a", a)
	for _, s := range []string{fmt.Sprint(a), fmt.Sprintf("%+v", a), fmt.Sprintf("%#v", a), log.String()} {
		assert.Contains(t, s, "oidc.example.org")
		assert.NotContains(t, s, text)
		assert.Less(t, len(s), 200)
	}
}
