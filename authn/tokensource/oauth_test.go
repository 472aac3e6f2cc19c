package tokensource_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/must"
)

const asIssuer = "https://as.example/realms/prod"

// fetcher is a source of JWT-SVIDs.
type fetcher func(ctx context.Context, audience ...string) (string, error)

func (f fetcher) Fetch(ctx context.Context, audience ...string) (string, error) {
	return f(ctx, audience...)
}

// svids issues tokens for what is asked.
var svids = fetcher(func(_ context.Context, audience ...string) (string, error) { return jwt(inAnHour(), audience...), nil })

func TestClientCredentials(t *testing.T) {
	t.Parallel()
	x, server := serve(t, text(200, `{"access_token":"`+secret+`","token_type":"Bearer","expires_in":300}`))
	assertion := jwt(inAnHour(), asIssuer)
	own := tokensource.Static(assertion)
	const typ = "urn:ietf:params:oauth:client-assertion-type:"
	for i, c := range []struct {
		o    tokensource.ClientOptions
		form url.Values
	}{
		{
			tokensource.ClientOptions{ClientAssertion: own, Issuer: asIssuer, Scope: "a b", Resource: "https://db.example"},
			url.Values{"client_assertion": {assertion}, "client_assertion_type": {typ + "jwt-spiffe"}, "scope": {"a b"}, "resource": {"https://db.example"}},
		},
		{
			tokensource.ClientOptions{ClientAssertion: own, Issuer: asIssuer, ClientID: "web", JWTBearer: true, Audience: "db"},
			url.Values{"client_id": {"web"}, "client_assertion": {assertion}, "client_assertion_type": {typ + "jwt-bearer"}, "audience": {"db"}},
		},
		{
			tokensource.ClientOptions{ClientID: "web", HTTPClient: http.DefaultClient}, // whose certificate is the proof
			url.Values{"client_id": {"web"}},
		},
	} {
		c.o.URL = server + "/token"
		c.form.Set("grant_type", "client_credentials")
		requireToken(t, secret, made(tokensource.ClientCredentials(c.o)))
		got := must.Get(url.ParseQuery(x.all()[i].body))(t)
		assert.Equal(t, c.form, got)
		assert.Empty(t, x.all()[i].header.Get("Authorization"))
	}
}

// An assertion that is for another receiver as well, or for another one, could be used there: it is not sent.
func TestAssertionAudience(t *testing.T) {
	t.Parallel()
	x, server := serve(t, text(200, `{"access_token":"a","token_type":"Bearer"}`))
	for _, audience := range [][]string{{}, {"other"}, {asIssuer, "other"}, {"other", asIssuer}, {asIssuer, asIssuer}, {asIssuer + "/"}} {
		s := made(tokensource.ClientCredentials(tokensource.ClientOptions{URL: server, Issuer: asIssuer, ClientAssertion: tokensource.Static(jwt(inAnHour(), audience...))}))
		require.ErrorContains(t, requireNone(t, s), "client credential: the assertion is for", "%q", audience)
	}
	s := made(tokensource.ClientCredentials(tokensource.ClientOptions{URL: server, Issuer: asIssuer, ClientAssertion: tokensource.Static("opaque")}))
	require.ErrorContains(t, requireNone(t, s), "has to be for the issuer")
	assert.Zero(t, x.count())
}

func TestClientOptions(t *testing.T) {
	t.Parallel()
	own := tokensource.Static(jwt(inAnHour(), asIssuer))
	for says, o := range map[string]tokensource.ClientOptions{
		"no URL":                         {ClientAssertion: own, Issuer: asIssuer},
		"could be read on the way":       {URL: "http://as.example", ClientAssertion: own, Issuer: asIssuer},
		"nothing authenticates":          {URL: "https://as.example"},
		"ClientAssertion and Issuer":     {URL: "https://as.example", ClientAssertion: own},
		"belong together":                {URL: "https://as.example", ClientID: "a", HTTPClient: http.DefaultClient, Issuer: asIssuer},
		"and JWTBearer to them":          {URL: "https://as.example", ClientID: "a", HTTPClient: http.DefaultClient, JWTBearer: true},
		"is the zero Source":             {URL: "https://as.example", ClientAssertion: new(tokensource.Source), Issuer: asIssuer},
		"neither ClientAssertion":        {URL: "https://as.example", ClientID: "a"},
		"client credentials: nothing au": {URL: "https://as.example", Scope: "a"},
	} {
		_, err := tokensource.ClientCredentials(o)
		require.ErrorContains(t, err, says)
		assert.NotContains(t, err.Error(), secret)
	}
	for _, s := range []*tokensource.Source{tokensource.SVID(nil, "a"), tokensource.SVID(svids, "")} {
		require.ErrorContains(t, requireNone(t, s), "no source of JWT-SVIDs, or no audience")
	}
	wrong := fetcher(func(context.Context, ...string) (string, error) { return jwt(inAnHour(), "other"), nil })
	require.ErrorContains(t, requireNone(t, tokensource.SVID(wrong, "db")), `for ["other"], and not for "db"`)
}

// A server that quotes the subject token or the assertion puts neither into an error.
func TestEchoesOfAssertions(t *testing.T) {
	t.Parallel()
	x := &exchanged{answer: func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		form, _ := url.ParseQuery(string(body))
		quoted, _ := json.Marshal("bad: " + form.Get("subject_token") + " " + form.Get("client_assertion")[:100])
		text(400, `{"error":"invalid_client","error_description":`+string(quoted)+`}`)(w, r)
	}}
	assertion := jwt(inAnHour(), asIssuer)
	s := made(tokensource.Exchange(tokensource.Static("of-the-subject-0123456789"), tokensource.ClientOptions{
		URL: "https://as.example", HTTPClient: x.client(), ClientAssertion: tokensource.Static(assertion), Issuer: asIssuer,
	}))
	err := requireNone(t, s)
	require.ErrorContains(t, err, "invalid_client")
	for _, credential := range []string{"of-the-subject-0123456789", assertion} {
		for i := range len(credential) - 16 {
			require.NotContains(t, err.Error(), credential[i:i+16])
		}
	}
}
