package jwt_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// inBubble runs f in a bubble, with an issuer that has the key "p256".
func inBubble(t *testing.T, f func(t *testing.T, i *issuer, a *jwt.Authenticator)) {
	t.Helper()
	keys() // outside the bubble
	synctest.Test(t, func(t *testing.T) {
		i := newIssuer("p256")
		f(t, i, newAuthenticator(t, i))
	})
}

// A new key is fetched when a token names it, and no more often than once in 10 seconds.
func TestUnknownKey(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		try := func(id string) error {
			_, err := a.Authenticate(request(t, sign(id, nil)))
			return err
		}
		require.NoError(t, try("p256"))
		for range rounds.Of(90) { // a flood of tokens that anyone can write
			require.ErrorIs(t, try("other"), authn.ErrRefused)
			time.Sleep(9 * time.Second / time.Duration(rounds.Of(90)))
		}
		assert.Equal(t, 1, i.count(), "9 seconds")
		time.Sleep(time.Second)
		i.set(func(i *issuer) { i.jwks = keySet("p256", "other") })
		require.NoError(t, try("other"))
		require.NoError(t, try("p256"))
		assert.Equal(t, 2, i.count())
		for range 60 {
			require.ErrorIs(t, try("rsa"), authn.ErrRefused)
			time.Sleep(time.Second)
		}
		assert.Equal(t, 2+5, i.count(), "a minute less a moment")
	})
}

// A token without "kid" is tried with new keys, too.
func TestNewKeyWithoutID(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		i.set(func(i *issuer) { i.jwks = keySet("other") })
		text := signHeader(`{"alg":"ES256"}`, nil) // by p256
		require.ErrorIs(t, must.Err(a.Authenticate(request(t, text))), authn.ErrRefused)
		i.set(func(i *issuer) { i.jwks = keySet("p256") })
		require.ErrorIs(t, must.Err(a.Authenticate(request(t, text))), authn.ErrRefused)
		time.Sleep(10 * time.Second)
		require.NoError(t, must.Err(a.Authenticate(request(t, text))))
		assert.Equal(t, 2, i.count())
	})
}

// Keys that work count on while the issuer is away, and while it gives nonsense.
func TestOldBeforeNew(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		good := func() {
			require.NoError(t, must.Err(a.Authenticate(request(t, sign("p256", map[string]any{"jti": time.Now().String()})))))
		}
		good()
		away := errors.New("away")
		for _, change := range []func(*issuer){
			func(i *issuer) { i.err = away },
			func(i *issuer) { i.err, i.status = nil, http.StatusInternalServerError },
			func(i *issuer) { i.status, i.jwks = 0, `{"keys":[]}` },
			func(i *issuer) { i.jwks = `<html>` },
			func(i *issuer) {
				i.jwks, i.discovery = keySet("other"), `{"issuer":"https://evil.example.org","jwks_uri":"https://evil.example.org"}`
			},
		} {
			before := len(i.asked())
			i.set(change)
			for range 60 {
				good()
				time.Sleep(10 * time.Second)
			}
			assert.Greater(t, len(i.asked()), before+1)
			assert.Less(t, len(i.asked()), before+80, "10 minutes")
			_, err := a.Authenticate(request(t, sign("other", nil)))
			require.Error(t, err)
			assert.True(t, authn.Unavailable(err), "%v", err)
			assert.NotErrorIs(t, err, authn.ErrRefused)
		}
		i.set(func(i *issuer) { i.discovery = "" })
		time.Sleep(30 * time.Second)
		require.NoError(t, must.Err(a.Authenticate(request(t, sign("other", nil)))), "it is back")
	})
}

// A key that the issuer withdraws counts for 5 minutes, and no token waits for that.
func TestWithdrawnKey(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		text := sign("p256", nil) // remembered
		require.NoError(t, must.Err(a.Authenticate(request(t, text))))
		i.set(func(i *issuer) { i.jwks = keySet("other"); i.wait = sleep(3 * time.Second) })
		begin := time.Now()
		var refused time.Duration
		for refused == 0 {
			at := time.Now()
			if _, err := a.Authenticate(request(t, text)); err != nil {
				refused = time.Since(begin)
				require.ErrorIs(t, err, authn.ErrRefused)
			} else {
				assert.Zero(t, time.Since(at), "it does not wait")
			}
			time.Sleep(time.Second)
		}
		assert.InDelta(t, 5*time.Minute, refused, float64(10*time.Second))
	})
}

func sleep(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// What was verified counts on when a fetch gives the same document, and is verified again with another one.
func TestSameDocument(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		text := sign("p256", nil)
		first := must.Get(a.Authenticate(request(t, text)))(t)
		for n := range 3 {
			time.Sleep(5 * time.Minute)
			again := must.Get(a.Authenticate(request(t, text)))(t)
			assert.Same(t, first, again)
			synctest.Wait()
			assert.Equal(t, 2+n, i.count())
		}
		i.set(func(i *issuer) { i.jwks = keySet("p256", "other") })
		time.Sleep(5 * time.Minute)
		require.NoError(t, must.Err(a.Authenticate(request(t, text))))
		synctest.Wait()
		again := must.Get(a.Authenticate(request(t, text)))(t)
		assert.NotSame(t, first, again)
		assert.Equal(t, first, again)
	})
}

// Many callers wait for one fetch. One that leaves does not end it.
func TestSingleFlight(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		i.wait = sleep(2 * time.Second)
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := a.Authenticate(request(t, sign("p256", nil)).WithContext(ctx))
			assert.ErrorIs(t, err, gone)
			assert.True(t, authn.Unavailable(err))
		})
		for range 100 {
			wg.Go(func() {
				assert.NoError(t, must.Err(a.Authenticate(request(t, sign("p256", nil)))))
			})
		}
		begin := time.Now()
		wg.Wait()
		assert.Equal(t, 4*time.Second, time.Since(begin), "discovery and keys")
		assert.Equal(t, 1, i.count())
	})
}

// While there are no keys, callers are told so at once, and the issuer is asked ever less often.
func TestIssuerAwayAtFirst(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		away := errors.New("away")
		i.err = away
		require.ErrorIs(t, a.Fetch(t.Context()), away)
		text := sign("p256", map[string]any{"exp": time.Now().Unix() + 3600})
		for range 200 {
			at := time.Now()
			_, err := a.Authenticate(request(t, text))
			require.ErrorIs(t, err, away)
			assert.True(t, authn.Unavailable(err))
			assert.Zero(t, time.Since(at))
			time.Sleep(3 * time.Second)
		}
		assert.Greater(t, len(i.asked()), 20, "10 minutes")
		assert.Less(t, len(i.asked()), 80)
		i.set(func(i *issuer) { i.err = nil })
		time.Sleep(30 * time.Second)
		require.NoError(t, a.Fetch(t.Context()))
		require.NoError(t, a.Fetch(t.Context()), "there are keys")
		assert.Equal(t, 1, i.count())
	})
}

func TestFetchTimeout(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		i.wait = sleep(time.Hour)
		begin := time.Now()
		err := a.Fetch(t.Context())
		require.ErrorContains(t, err, "no answer within 10s")
		assert.Equal(t, 10*time.Second, time.Since(begin))
	})
}

// Documents that are refused, and why. The keys of none of them count.
func TestHostileDocuments(t *testing.T) {
	t.Parallel()
	big := strings.Repeat(" ", 1<<20)
	rsa3 := strings.Replace(jwk("rsa", ""), `"AQAB"`, `"Ag"`, 1)
	for name, c := range map[string]struct {
		change func(*issuer)
		want   string
	}{
		"other issuer": {func(i *issuer) {
			i.discovery = `{"issuer":"https://oidc.example.org/","jwks_uri":"https://oidc.example.org/jwks"}`
		}, `it is that of the issuer "https://oidc.example.org/"`},
		"no issuer": {func(i *issuer) { i.discovery = `{"jwks_uri":"https://oidc.example.org/jwks"}` }, `it is that of the issuer ""`},
		"issuer is a list": {func(i *issuer) {
			i.discovery = `{"issuer":["` + issuerURL + `"],"jwks_uri":"https://oidc.example.org/jwks"}`
		}, `it is that of the issuer ""`},
		"two issuers": {func(i *issuer) {
			i.discovery = `{"issuer":"x","issuer":"` + issuerURL + `","jwks_uri":"https://oidc.example.org/jwks"}`
		}, "occurs twice"},
		"no jwks_uri": {func(i *issuer) { i.discovery = `{"issuer":"` + issuerURL + `"}` }, "jwks_uri"},
		"jwks_uri without TLS": {func(i *issuer) {
			i.discovery = `{"issuer":"` + issuerURL + `","jwks_uri":"http://oidc.example.org/jwks"}`
		}, `the scheme is "http"`},
		"jwks_uri of a file":  {func(i *issuer) { i.discovery = `{"issuer":"` + issuerURL + `","jwks_uri":"file:///etc/keys"}` }, "jwks_uri"},
		"discovery no JSON":   {func(i *issuer) { i.discovery = `<html>` }, "discovery document"},
		"discovery a list":    {func(i *issuer) { i.discovery = `[]` }, "discovery document"},
		"too large":           {func(i *issuer) { i.jwks = keySet("p256") + big }, "more than 1048576 bytes"},
		"discovery too large": {func(i *issuer) { i.discovery = `{"issuer":"` + issuerURL + `"}` + big }, "more than 1048576 bytes"},
		"not found":           {func(i *issuer) { i.status = http.StatusNotFound }, "the status is 404"},
		"redirect": {func(i *issuer) {
			i.status, i.header = http.StatusFound, http.Header{"Location": {"https://evil.example.org/"}}
		}, "the status is 302, not 200; redirects are not followed"},
		"no JSON":           {func(i *issuer) { i.jwks = `{"keys":[` }, "the key set at"},
		"no keys":           {func(i *issuer) { i.jwks = `{}` }, "it has no keys"},
		"null":              {func(i *issuer) { i.jwks = `{"keys":null}` }, "it has no keys"},
		"keys is an object": {func(i *issuer) { i.jwks = `{"keys":` + jwk("p256", "") + `}` }, "it has no keys"},
		"a list":            {func(i *issuer) { i.jwks = `[` + jwk("p256", "") + `]` }, "the key set at"},
		"duplicate keys":    {func(i *issuer) { i.jwks = `{"keys":[],"keys":[` + jwk("p256", "") + `]}` }, "occurs twice"},
		"something follows": {func(i *issuer) { i.jwks = keySet("p256") + "{}" }, "the key set at"},
		"257 keys":          {func(i *issuer) { i.jwks = `{"keys":[` + strings.Repeat(`{},`, 256) + jwk("p256", "") + `]}` }, "more than 256 keys"},
		"key is a text":     {func(i *issuer) { i.jwks = `{"keys":["` + "p256" + `"]}` }, "it is no object"},
		"empty key":         {func(i *issuer) { i.jwks = `{"keys":[{}]}` }, "no key can be used"},
		"secret":            {func(i *issuer) { i.jwks = `{"keys":[{"kty":"oct","k":"c2VzYW1lc2VzYW1lc2VzYW1lc2VzYW1lc2VzYW1l"}]}` }, "it is a secret key"},
		"private":           {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"kid":"p256","d":"AAAA"`) + `]}` }, "it is a secret key"},
		"for encryption":    {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"kid":"p256","use":"enc"`) + `]}` }, `"use" is not "sig"`},
		"for signing":       {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"kid":"p256","key_ops":["sign"]`) + `]}` }, `"key_ops" has no "verify"`},
		"use is null":       {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"kid":"p256","use":null`) + `]}` }, `"use" is not "sig"`},
		"kid is a number":   {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"kid":1`) + `]}` }, `"kid" is not a string`},
		"alg is a number":   {func(i *issuer) { i.jwks = `{"keys":[` + jwk("p256", `,"alg":1`) + `]}` }, `"alg" is not a name`},
		"not on the curve": {func(i *issuer) {
			i.jwks = `{"keys":[` + strings.Replace(jwk("p256", ""), `"crv":"P-256","x":"`, `"crv":"P-256","x":"AAAA`, 1) + `]}`
		}, "no key can be used"},
		"Ed25519":       {func(i *issuer) { i.jwks = `{"keys":[{"kty":"OKP","crv":"Ed25519","x":"AAAA"}]}` }, "no algorithm uses"},
		"even exponent": {func(i *issuer) { i.jwks = `{"keys":[` + rsa3 + `]}` }, "exponent"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			i := newIssuer("p256")
			c.change(i)
			a := newAuthenticator(t, i)
			err := a.Fetch(t.Context())
			require.ErrorContains(t, err, c.want)
			assert.Less(t, len(err.Error()), 1000)
			_, again := a.Authenticate(request(t, sign("p256", nil)))
			require.Error(t, again)
			assert.True(t, authn.Unavailable(again))
			for _, path := range i.asked() {
				assert.Contains(t, []string{"/.well-known/openid-configuration", "/jwks"}, path)
			}
		})
	}
}

// Keys that are of no use stand beside one that is.
func TestKeysBesideOthers(t *testing.T) {
	t.Parallel()
	i := newIssuer()
	i.jwks = `{"more":1,"keys":[{"kty":"OKP","crv":"Ed25519","x":"AAAA","kid":"p256"},{"kty":"new"},7,` + jwk("other", `,"kid":"p256","use":"enc"`) + "," +
		jwk("p384", `,"kid":"p256"`) + "," + jwk("p256", `,"kid":"p256","alg":"ES256","key_ops":["verify"],"x5c":["AAAA"]`) + "," + jwk("rsa",
		`,"kid":"rsa","alg":"PS256"`) + "," + jwk("p521", "") + `]}`
	a := newAuthenticator(t, i)
	for name, text := range map[string]string{
		"the one of several with this ID":          sign("p256", nil),
		"another of them":                          signRaw("p384", "", "p256", "JWT", mustJSON(claims(nil))),
		"with its algorithm":                       signRaw("rsa", "PS256", "rsa", "JWT", mustJSON(claims(nil))),
		"a key without an ID, for a token without": signRaw("p521", "", "", "JWT", mustJSON(claims(nil))),
	} {
		require.NoError(t, must.Err(a.Authenticate(request(t, text))), name)
	}
	for name, text := range map[string]string{
		"for encryption":                            signRaw("other", "", "p256", "JWT", mustJSON(claims(nil))),
		"another algorithm":                         signRaw("rsa", "RS256", "rsa", "JWT", mustJSON(claims(nil))),
		"a key without an ID, for a token with one": sign("p521", nil),
	} {
		require.ErrorIs(t, must.Err(a.Authenticate(request(t, text))), authn.ErrRefused, name)
	}
}

// A token that names no key costs a bounded number of signature checks.
func TestManyKeysWithoutID(t *testing.T) {
	t.Parallel()
	i := newIssuer()
	i.jwks = `{"keys":[` + strings.Repeat(jwk("other", "")+",", 15) + jwk("p256", "") + `]}`
	a := newAuthenticator(t, i)
	require.NoError(t, must.Err(a.Authenticate(request(t, signHeader(`{"alg":"ES256"}`, nil)))))
	i.jwks = `{"keys":[` + strings.Repeat(jwk("other", "")+",", 16) + jwk("p256", "") + `]}`
	must.Fail(t, must.Err(newAuthenticator(t, i).Authenticate(request(t, signHeader(`{"alg":"ES256"}`, nil)))), authn.ErrRefused, "17 keys fit")
}

// A real server with TLS, as the API server of a cluster publishes its keys. Redirects are not followed.
func TestOverTLS(t *testing.T) {
	t.Parallel()
	var srv *httptest.Server
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"issuer":%q,"jwks_uri":%q}`, srv.URL, srv.URL+"/openid/v1/jwks")
	})
	mux.HandleFunc("GET /openid/v1/jwks", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, keySet("p256")) })
	mux.HandleFunc("GET /moved/.well-known/openid-configuration", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "/.well-known/openid-configuration", http.StatusFound)
	})
	srv = httptest.NewUnstartedServer(mux)
	srv.Config.ErrorLog = log.New(io.Discard, "", 0) // a client that does not trust it is part of the test
	srv.StartTLS()
	t.Cleanup(srv.Close)
	at := func(url string) (*jwt.Authenticator, string) {
		return newAuthenticator(t, nil, func(o *jwt.Options) { o.Issuer, o.HTTPClient = url, srv.Client() }), sign("p256", map[string]any{"iss": url})
	}
	a, text := at(srv.URL)
	c := must.Get(a.Authenticate(request(t, text)))(t)
	assert.Equal(t, webID, c.ID.String())
	a, text = at(srv.URL + "/moved")
	require.ErrorContains(t, must.Err(a.Authenticate(request(t, text))), "redirects are not followed")
	assert.Nil(t, srv.Client().CheckRedirect, "the caller's client is as it was")
	a = newAuthenticator(t, nil, func(o *jwt.Options) { o.Issuer, o.HTTPClient = srv.URL, nil })
	require.ErrorContains(t, a.Fetch(t.Context()), "certificate", "roots of the host")
}

// Once an issuer is back its outage is forgotten: a key that it does not have is a reason to refuse again, and its next outage begins with short
// waits.
func TestIssuerIsBack(t *testing.T) {
	t.Parallel()
	inBubble(t, func(t *testing.T, i *issuer, a *jwt.Authenticator) {
		unknown := func() error {
			_, err := a.Authenticate(request(t, sign("other", map[string]any{"jti": time.Now().String()})))
			return err
		}
		away := errors.New("away")
		for range 3 {
			i.set(func(i *issuer) { i.err = away })
			for range 40 { // so that the waits grow to their longest
				err := unknown()
				require.ErrorIs(t, err, away)
				require.NotErrorIs(t, err, authn.ErrRefused)
				time.Sleep(10 * time.Second)
			}
			i.set(func(i *issuer) { i.err = nil })
			time.Sleep(30 * time.Second)
			err := unknown()
			require.ErrorIs(t, err, authn.ErrRefused)
			require.NotErrorIs(t, err, away)
			require.ErrorIs(t, unknown(), authn.ErrRefused, "without asking again")

			i.set(func(i *issuer) { i.err = away })
			time.Sleep(10 * time.Second)
			require.ErrorIs(t, unknown(), away)
			before := len(i.asked())
			time.Sleep(2 * time.Second)
			require.ErrorIs(t, unknown(), away)
			assert.Greater(t, len(i.asked()), before, "the first wait is of two seconds at most")
		}
	})
}
