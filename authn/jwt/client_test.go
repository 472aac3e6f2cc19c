package jwt_test

import (
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

const (
	asURL      = "https://as.example/realms/prod"
	spiffeType = "urn:ietf:params:oauth:client-assertion-type:jwt-spiffe"
	bearerType = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
)

// registered are the clients of the authorization server of these tests.
func registered(id string) spiffe.Policy {
	return map[string]spiffe.Policy{
		webID:  spiffe.AllowIDs(spiffe.MustParseID(webID)),
		"shop": spiffe.AllowPathPrefix(td, "/ns/prod"),
	}[id]
}

// asks is a request to a token endpoint, whose handler has parsed the form.
func asks(t testing.TB, form ...string) *http.Request {
	t.Helper()
	values := url.Values{"grant_type": {"client_credentials"}}
	for i := 0; i < len(form); i += 2 {
		values.Add(form[i], form[i+1])
	}
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "https://as.example/token", strings.NewReader(values.Encode()))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	require.NoError(t, r.ParseForm())
	return r
}

// asserts is a request with an assertion.
func asserts(t testing.TB, assertion string, more ...string) *http.Request {
	t.Helper()
	return asks(t, append([]string{"client_assertion_type", spiffeType, "client_assertion", assertion}, more...)...)
}

func newClients(t testing.TB, edit ...func(*jwt.ClientOptions)) (authn.Authenticator, *jwtsvid.Issuer) {
	t.Helper()
	issuer, bundle := mint(t)
	o := jwt.ClientOptions{Issuer: asURL, Bundles: bundle, Clients: registered}
	for _, e := range edit {
		e(&o)
	}
	a := must.Get(jwt.Client(o))(t)
	return a, issuer
}

func TestClient(t *testing.T) {
	t.Parallel()
	a, issuer := newClients(t, func(o *jwt.ClientOptions) { o.JWTBearer = true })
	token := svidOf(t, issuer, webID, asURL)
	for name, r := range map[string]*http.Request{
		webID:  asserts(t, token),
		"shop": asserts(t, token, "client_id", "shop"),
	} {
		c := must.Get(a.Authenticate(r))(t)
		assert.Equal(t, &authn.Caller{ID: spiffe.MustParseID(webID), Name: name, Method: "client-assertion", NotAfter: c.NotAfter}, c)
		assert.WithinDuration(t, time.Now().Add(5*time.Minute), c.NotAfter, 10*time.Second)
	}
	require.NoError(t, must.Err(a.Authenticate(asks(t, "client_assertion", token, "client_assertion_type", bearerType))))
	other := svidOf(t, issuer, "spiffe://"+td.String()+"/ns/prod/sa/other", asURL)
	c := must.Get(a.Authenticate(asserts(t, other, "client_id", "shop")))(t)
	assert.Equal(t, "shop", c.Name, "one of the instances")
}

func TestClientRefused(t *testing.T) {
	t.Parallel()
	a, issuer := newClients(t)
	foreign := must.Get(jwtsvid.NewIssuer(spiffe.MustParseTrustDomain("stranger.test"), "k", keys()["p256"], nil))(t)
	thief := must.Get(jwtsvid.NewIssuer(td, "k", keys()["other"], nil))(t)
	wide := must.Get(jwtsvid.NewIssuer(td, "k", keys()["p256"], &jwtsvid.IssuerOptions{WideAudience: true}))(t)
	issue := func(i *jwtsvid.Issuer, id string, life time.Duration, audience ...string) string {
		text := must.Get(i.Issue(jwtsvid.Request{ID: spiffe.MustParseID(id), Audience: audience, Lifetime: life}))(t)
		return text
	}
	good := issue(issuer, webID, 0, asURL)
	plain := asserts(t, good)
	plain.TLS = nil
	twoCredentials := asserts(t, good)
	twoCredentials.SetBasicAuth("shop", "password")
	for says, r := range map[string]*http.Request{
		"it is for":                          asserts(t, issue(issuer, webID, 0, "other")),
		"for \"" + asURL + "\" alone":        asserts(t, issue(wide, webID, 0, asURL, "other")),
		"which is more than 1h0m0s from now": asserts(t, issue(issuer, webID, 2*time.Hour, asURL)),
		"stranger.test":                      asserts(t, issue(foreign, "spiffe://stranger.test/web", 0, asURL)),
		"signature":                          asserts(t, issue(thief, webID, 0, asURL)),
		`as the client "spiffe://` + td.String() + `/ns/prod/sa/other"`: asserts(t, issue(issuer, "spiffe://"+td.String()+"/ns/prod/sa/other", 0, asURL)),
		`as the client "nobody"`:                      asserts(t, good, "client_id", "nobody"),
		`as the client "*"`:                           asserts(t, good, "client_id", "*"),
		`as the client "shop"`:                        asserts(t, issue(issuer, "spiffe://"+td.String()+"/ns/test/sa/web", 0, asURL), "client_id", "shop"),
		"client_id is there 2 times":                  asserts(t, good, "client_id", "shop", "client_id", webID),
		"client_assertion is there 2 times":           asserts(t, good, "client_assertion", good),
		"client_assertion_type is there 2 times":      asserts(t, good, "client_assertion_type", spiffeType),
		`the client_assertion_type is "` + bearerType: asks(t, "client_assertion", good, "client_assertion_type", bearerType),
		`the client_assertion_type is ""`:             asks(t, "client_assertion", good),
		"not encrypted":                               plain,
		"another credential beside the assertion":     twoCredentials,
		"credential beside":                           asserts(t, good, "client_secret", "password"),
		"jwtsvid":                                     asserts(t, ""),
	} {
		c, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrRefused, says)
		require.ErrorContains(t, err, says)
		assert.Nil(t, c)
		assert.NotContains(t, err.Error(), good[len(good)-40:])
		assert.NotContains(t, err.Error(), "password")
	}
	for _, r := range []*http.Request{asks(t), asks(t, "client_id", "shop", "client_secret", "password")} {
		require.ErrorIs(t, must.Err(a.Authenticate(r)), authn.ErrNoCredential, "for another method to judge")
	}
	_, err := a.Authenticate(httptest.NewRequest(http.MethodPost, "https://as.example/token", strings.NewReader("")))
	require.ErrorContains(t, err, "ParseForm")
	require.NotErrorIs(t, err, authn.ErrRefused)
	inQuery := asks(t)
	inQuery.Form.Set("client_assertion", good) // from the query, which is logged
	require.ErrorIs(t, must.Err(a.Authenticate(inQuery)), authn.ErrNoCredential)

	down := errors.New("down")
	a, _ = newClients(t, func(o *jwt.ClientOptions) {
		o.Bundles = bundleFunc(func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, down })
	})
	_, err = a.Authenticate(asserts(t, good))
	require.ErrorIs(t, err, jwtsvid.ErrUnavailable)
	require.NotErrorIs(t, err, authn.ErrRefused)
}

// A stolen assertion is good for the uses that are left, and for no other signature of the same text.
func TestClientReplay(t *testing.T) {
	t.Parallel()
	a, issuer := newClients(t, func(o *jwt.ClientOptions) { o.Uses = 3 })
	token := svidOf(t, issuer, webID, asURL)
	for range 2 {
		require.NoError(t, must.Err(a.Authenticate(asserts(t, token))))
	}
	require.Error(t, must.Err(a.Authenticate(asserts(t, token, "client_id", "nobody"))), "which is no use")
	_, err := a.Authenticate(asserts(t, otherSignature(t, token)))
	require.NoError(t, err, "of the same text, which counts")
	for _, again := range []string{token, otherSignature(t, token)} {
		must.Fail(t, must.Err(a.Authenticate(asserts(t, again))), authn.ErrRefused, "was presented")
	}
	_, err = a.Authenticate(asserts(t, svidOf(t, issuer, webID, asURL)+""))
	if err != nil { // two of one second are one text
		require.ErrorContains(t, err, "was presented")
	}
}

// otherSignature returns a token with the other signature that ECDSA has for each.
func otherSignature(t testing.TB, token string) string {
	t.Helper()
	i := strings.LastIndex(token, ".")
	sig := must.Get(base64.RawURLEncoding.DecodeString(token[i+1:]))(t)
	order, _ := new(big.Int).SetString("ffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551", 16)
	new(big.Int).Sub(order, new(big.Int).SetBytes(sig[32:])).FillBytes(sig[32:])
	return token[:i+1] + base64.RawURLEncoding.EncodeToString(sig)
}

// One client that presents a new assertion each time takes its own share of the memory, which ends with the assertions.
func TestClientMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, issuer := newClients(t)
		n := 0
		try := func(id string) error {
			n++
			token, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(id), Audience: []string{asURL}, Claims: map[string]any{"jti": fmt.Sprint(n)}})
			require.NoError(t, err)
			_, err = a.Authenticate(asserts(t, token, "client_id", "shop"))
			return err
		}
		for range 1024 {
			require.NoError(t, try(webID))
		}
		time.Sleep(2 * time.Second)
		err := try(webID)
		require.ErrorContains(t, err, "too many assertions")
		require.NotErrorIs(t, err, authn.ErrRefused)
		_, ok := errors.AsType[interface {
			error
			Retryable() (time.Duration, bool)
		}](err)
		require.True(t, ok)
		require.NoError(t, try("spiffe://"+td.String()+"/ns/prod/sa/other"), "another client")
		time.Sleep(8 * time.Minute)
		for range rounds.Of(256) {
			require.NoError(t, try(webID), "after they have ended")
		}
	})
}

// A client with an X.509-SVID proves itself by the connection, and names itself.
func TestClientCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, td.String())
	svid := ca.SVID(strings.TrimPrefix(webID, "spiffe://"+td.String()))
	v := must.Get(spiffe.NewVerifier(ca.Bundle(), spiffe.AllowMembersOf(td), nil))(t)
	a, _ := newClients(t, func(o *jwt.ClientOptions) { o.Certificates = authn.ClientCertificate(v) })
	by := func(form ...string) (*authn.Caller, error) {
		r := asks(t, form...)
		r.TLS = &tls.ConnectionState{HandshakeComplete: true, PeerCertificates: svid.Chain()}
		return a.Authenticate(r)
	}
	c := must.Get(by("client_id", "shop"))(t)
	assert.Equal(t, "shop", c.Name)
	assert.Equal(t, webID, c.ID.String())
	assert.Equal(t, "client-certificate", c.Method)
	assert.True(t, svid.NotAfter().Equal(c.NotAfter))
	assert.NotNil(t, c.Certificate)
	require.ErrorIs(t, must.Err(by()), authn.ErrNoCredential, "RFC 8705 has the client name itself")
	require.ErrorIs(t, must.Err(by("client_id", "shop", "client_secret", "password")), authn.ErrNoCredential, "another method judges the other credential")
	require.ErrorIs(t, must.Err(by("client_id", "nobody")), authn.ErrRefused)
	require.ErrorIs(t, must.Err(a.Authenticate(asks(t, "client_id", "shop"))), authn.ErrNoCredential)
}

func TestClientOptionsRefused(t *testing.T) {
	t.Parallel()
	_, bundle := mint(t)
	for says, o := range map[string]jwt.ClientOptions{
		"Issuer or Clients":    {},
		"or Clients is miss":   {Issuer: asURL, Bundles: bundle},
		"Issuer or":            {Clients: registered, Bundles: bundle},
		"authn/jwt: clients: ": {Issuer: asURL, Clients: registered},
		"Uses is negative":     {Issuer: asURL, Clients: registered, Bundles: bundle, Uses: -1},
	} {
		require.ErrorContains(t, must.Err(jwt.Client(o)), says)
	}
}

func TestActors(t *testing.T) {
	t.Parallel()
	const gateway, batch = "spiffe://example.org/gateway", "spiffe://example.org/batch"
	act := func(chain ...string) map[string]any {
		var inner map[string]any
		for i := len(chain) - 1; i >= 0; i-- {
			one := map[string]any{"sub": chain[i]}
			if inner != nil {
				one["act"] = inner
			}
			inner = one
		}
		return map[string]any{"act": inner}
	}
	i := newIssuer("p256")
	simple := newAuthenticator(t, i)
	_, err := simple.Authenticate(request(t, sign("p256", act(gateway))))
	require.ErrorIs(t, err, authn.ErrRefused)
	require.ErrorContains(t, err, "no actor is allowed here", "the actor would get what is the subject's")

	open := newAuthenticator(t, i, func(o *jwt.Options) {
		o.TrustDomain, o.Caller = spiffe.TrustDomain{}, func(c *jwt.Claims) (*authn.Caller, error) {
			return &authn.Caller{Name: fmt.Sprint(c.Subject, c.Actors)}, nil
		}
	})
	for _, chain := range [][]string{{gateway}, {gateway, batch}, {"alice", "bob", "carol"}} {
		c := must.Get(open.Authenticate(request(t, sign("p256", act(chain...)))))(t)
		assert.Equal(t, chain, c.Actors)
		assert.Equal(t, fmt.Sprint(subject, chain), c.Name)
		assert.Contains(t, c.LogValue().String(), chain[len(chain)-1])
	}
	c := must.Get(open.Authenticate(request(t, sign("p256", nil))))(t)
	assert.Empty(t, c.Actors)
	long := make([]string, 17)
	for i := range long {
		long[i] = gateway
	}
	for name, bad := range map[string]any{
		"no object": gateway, "a list": []any{act(gateway)["act"]}, "no sub": map[string]any{"iss": "x"}, "an empty sub": map[string]any{"sub": ""},
		"sub is a number": map[string]any{"sub": 1}, "an inner one without sub": map[string]any{"sub": gateway, "act": map[string]any{}},
		"an inner one of another type": map[string]any{"sub": gateway, "act": "x"}, "too many": act(long...)["act"],
	} {
		_, err := open.Authenticate(request(t, sign("p256", map[string]any{"act": bad})))
		require.ErrorIs(t, err, authn.ErrRefused, name)
		require.ErrorContains(t, err, `"act"`, name)
	}
	require.NoError(t, must.Err(open.Authenticate(request(t, sign("p256", act(long[:15]...))))))
}

// By mutual TLS both sides have nothing but their X.509-SVIDs, also after the one of the client and its root were replaced.
func TestClientByMutualTLS(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, td.String())
	self, verify := ca.Source("/as"), spiffe.AllowMembersOf(td)
	v := must.Get(spiffe.NewVerifier(self, verify, nil))(t)
	a, _ := newClients(t, func(o *jwt.ClientOptions) { o.Certificates = authn.ClientCertificate(v) })
	serial := make(chan string, 10)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !assert.NoError(t, r.ParseForm()) {
			return
		}
		caller, err := a.Authenticate(r)
		if err != nil {
			http.Error(w, `{"error":"invalid_client"}`, http.StatusUnauthorized)
			return
		}
		serial <- caller.Certificate.SerialNumber.String()
		_, _ = fmt.Fprint(w, `{"access_token":"t0ken","token_type":"Bearer","expires_in":1}`)
	}))
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: self, Allow: verify}))(t)
	config := must.Get(endpoint.ServerConfig())(t)
	spiffetest.StartTLS(server, config)
	defer server.Close()
	source := ca.Source(strings.TrimPrefix(webID, "spiffe://"+td.String()))
	ask := func(clientID string) error {
		endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: source, Peers: source, Allow: spiffe.AllowIDs(spiffe.MustParseID("spiffe://" + td.String() + "/as"))}))(t)
		transport := must.Get(endpoint.Transport())(t)
		defer transport.CloseIdleConnections()
		s, err := tokensource.ClientCredentials(tokensource.ClientOptions{URL: server.URL, ClientID: clientID, HTTPClient: &http.Client{Transport: transport}})
		require.NoError(t, err)
		_, err = s.Token(t.Context())
		return err
	}
	require.NoError(t, ask("shop"))
	first := <-serial
	ca.Prepare()
	ca.Rotate()
	source.Renew()
	self.Renew()
	require.NoError(t, ask("shop"))
	require.NotEqual(t, first, <-serial)
	refused, ok := errors.AsType[*tokensource.StatusError](ask("nobody"))
	require.True(t, ok)
	require.Equal(t, "invalid_client", refused.Code)
}

// Uses of 1 is once: as long as the signature and the times of an assertion would do, the leeway for clocks that differ included, and however many
// assertions of others come and go meanwhile.
func TestOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		once, issuer := newClients(t, func(o *jwt.ClientOptions) { o.Uses = 1 })
		_, bundle := mint(t)
		often := must.Get(jwt.Client(jwt.ClientOptions{Issuer: asURL, Bundles: bundle, Clients: registered, Uses: 1000}))(t)
		issue := func(n int) string {
			token := must.Get(issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(webID), Audience: []string{asURL}, Claims: map[string]any{"jti": fmt.Sprint(n)}}))(t)
			return token
		}
		token := issue(0)
		require.NoError(t, must.Err(once.Authenticate(asserts(t, token))))
		good := 0
		for n := 1; n <= 100; n++ { // 500 s, and the assertion is good for 300
			if _, err := often.Authenticate(asserts(t, token)); err == nil {
				good++
				_, err = once.Authenticate(asserts(t, token))
				require.ErrorIs(t, err, authn.ErrRefused, "after %d s", 5*(n-1))
				require.ErrorContains(t, err, "at most 1 are accepted")
			}
			require.NoError(t, must.Err(once.Authenticate(asserts(t, issue(n)))))
			time.Sleep(5 * time.Second)
		}
		require.Greater(t, good, 60, "the leeway")
		require.Less(t, good, 100)
	})
}

// An assertion may end an hour ahead, and no second more.
func TestLifetimeOfAssertion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a, issuer := newClients(t)
		for life, ok := range map[time.Duration]bool{time.Second: true, time.Hour: true, time.Hour + time.Second: false} {
			token, err := issuer.Issue(jwtsvid.Request{ID: spiffe.MustParseID(webID), Audience: []string{asURL}, Lifetime: life})
			require.NoError(t, err)
			_, err = a.Authenticate(asserts(t, token))
			require.Equal(t, ok, err == nil, "%v: %v", life, err)
		}
	})
}
