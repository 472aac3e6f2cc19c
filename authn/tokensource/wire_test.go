package tokensource_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestGCE(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-6.5-2")
	good := jwt(inAnHour(), "https://ca.example/?a=b&c", "other")
	x, server := serve(t, text(200, good+"\n"))
	s := made(tokensource.GCE("https://ca.example/?a=b&c", &tokensource.GCEOptions{URL: server + "/"}))
	requireToken(t, good, s)
	r := x.all()[0]
	assert.Equal(t, "GET", r.method)
	assert.Equal(t, "/computeMetadata/v1/instance/service-accounts/default/identity?audience=https%3A%2F%2Fca.example%2F%3Fa%3Db%26c&format=full", r.uri)
	assert.Equal(t, []string{"Google"}, r.header["Metadata-Flavor"])
	x.become(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, good) })
	require.ErrorContains(t, requireNone(t, made(tokensource.GCE("other", &tokensource.GCEOptions{URL: server}))), "without the header Metadata-Flavor")
}

func TestExchange(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.3-1")
	x, server := serve(t, text(200, `{"access_token":"ya29.`+secret+`","issued_token_type":"urn:ietf:params:oauth:token-type:access_token",
		"token_type":"Bearer","expires_in":3600,"scope":"s","more":{"nested":[1,null]}}`))
	subject := tokensource.Static("subject-" + secret)
	bare := tokensource.ClientOptions{URL: server + "/v1/token?alt=json"}
	all := bare
	all.Audience, all.Scope = "identitynamespace:td:GoogleComputeEngine", "https://www.googleapis.com/auth/cloud-platform"
	all.Resource = "https://ca.example/"
	const prefix = "urn:ietf:params:oauth:"
	form := func(typ, subject string, more ...string) url.Values {
		v := url.Values{
			"grant_type": {prefix + "grant-type:token-exchange"}, "subject_token": {subject},
			"subject_token_type": {prefix + "token-type:" + typ}, "requested_token_type": {prefix + "token-type:access_token"},
		}
		for i := 0; i < len(more); i += 2 {
			v.Set(more[i], more[i+1])
		}
		return v
	}
	first := made(tokensource.Exchange(subject, bare))
	for i, c := range []struct {
		s    *tokensource.Source
		form url.Values
	}{
		{first, form("jwt", "subject-"+secret)},
		{made(tokensource.Exchange(subject, all)), form("jwt", "subject-"+secret, "audience", all.Audience, "scope", all.Scope, "resource", all.Resource)},
		{made(tokensource.Exchange(first, bare)), form("access_token", "ya29."+secret)},
	} {
		requireToken(t, "ya29."+secret, c.s)
		r := x.all()[i]
		assert.Equal(t, "POST", r.method)
		assert.Equal(t, "/v1/token?alt=json", r.uri)
		assert.Equal(t, "application/json", r.header.Get("Accept"))
		assert.Empty(t, r.header.Get("Authorization"))
		assert.Equal(t, "application/x-www-form-urlencoded", r.header.Get("Content-Type"))
		got := must.Get(url.ParseQuery(r.body))(t)
		assert.Equal(t, c.form, got)
	}
}

// Each exchange takes the token that there is then, and says what is missing.
func TestExchangeSubject(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-9.3-1")
	synctest.Test(t, func(t *testing.T) {
		x := &exchanged{answer: func(w http.ResponseWriter, r *http.Request) {
			text(200, `{"access_token":"for-`+r.FormValue("subject_token")+`","token_type":"N_A","expires_in":60}`)(w, r)
		}}
		file := filepath.Join(t.TempDir(), "token")
		s := made(tokensource.Exchange(tokensource.File(file), tokensource.ClientOptions{URL: "https://sts.example/", HTTPClient: x.client()}))
		err := requireNone(t, s)
		require.ErrorIs(t, err, tokensource.ErrNoToken)
		require.ErrorContains(t, err, "tokensource: exchange at https://sts.example/: subject token: tokensource: file "+file)
		require.Zero(t, x.count())

		require.NoError(t, os.WriteFile(file, []byte("one"), 0o600))
		time.Sleep(5 * time.Second)
		requireToken(t, "for-one", s)
		require.NoError(t, os.WriteFile(file, []byte("two"), 0o600))
		time.Sleep(50 * time.Second)
		requireToken(t, "for-one", s)
		synctest.Wait()
		requireToken(t, "for-two", s)

		c := made(tokensource.Exchange(tokensource.Static("a"), tokensource.ClientOptions{
			URL: "https://sts.example/", HTTPClient: x.client(), Issuer: "i", ClientAssertion: tokensource.File(file + ".none"),
		}))
		require.ErrorContains(t, requireNone(t, c), "client credential: tokensource: file")
		for _, id := range []string{"first", "second"} { // each time the assertion of then
			assertion := jwtOf(`{"aud":"i","jti":"` + id + `"}`)
			require.NoError(t, os.WriteFile(file+".none", []byte(assertion), 0o600))
			time.Sleep(61 * time.Second) // the end of the access token
			require.NoError(t, must.Err(c.Token(t.Context())))
			sent := x.all()
			require.Contains(t, sent[len(sent)-1].body, "client_assertion="+assertion)
		}
	})
}

// Each answer is refused, and quoted nowhere.
func TestHostileAnswers(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("x", 16<<10+1)
	jsonOf := func(text string) string {
		return `{"access_token":"` + secret + `","token_type":"Bearer",` + text + `}`
	}
	made := map[string]func(c *http.Client) *tokensource.Source{
		"GCE": func(c *http.Client) *tokensource.Source {
			return made(tokensource.GCE("ca", &tokensource.GCEOptions{HTTPClient: c}))
		},
		"exchange": func(c *http.Client) *tokensource.Source {
			return made(tokensource.Exchange(tokensource.Static("subject"), tokensource.ClientOptions{URL: "http://127.0.0.1/", HTTPClient: c}))
		},
	}
	for _, c := range []struct{ from, name, body, says string }{
		{"GCE", "nothing", "", "no token: it is empty"},
		{"GCE", "white space", " \n", "it is empty"},
		{"GCE", "a page", "<html><body>" + secret + "</body> </html>", "printable ASCII, or spaces"},
		{"GCE", "not a JWT", secret, "not a JWT"},
		{"GCE", "two parts", strings.TrimSuffix(jwt(inAnHour(), "ca"), "."+secret), "not a JWT"},
		{"GCE", "payload that is no JSON", jwtOf("{" + secret), "not a JWT"},
		{"GCE", "payload with a claim twice", jwtOf(`{"aud":"ca","aud":"ca"}`), "not a JWT"},
		{"GCE", "padding", jwt(inAnHour(), "ca") + "=", "not a JWT"},
		{"GCE", "another audience", jwt(inAnHour(), "other"), `the token is for ["other"], and not for "ca"`},
		{"GCE", "no audience", jwt(inAnHour()), `the token is for [], and not for "ca"`},
		{"GCE", "an audience that begins so", jwt(inAnHour(), "cattle"), "and not for"},
		{"GCE", "expired", jwt(time.Unix(1e9, 0), "ca"), "it ended at 2001-09-09T01:46:40Z"},
		{"GCE", "too long", jwt(inAnHour(), "ca", big), "the limit is 16384"},
		{"GCE", "endless", strings.Repeat("x", 64<<10+1), "the answer is larger than 64 KiB"},
		{"exchange", "nothing", "", "not JSON, or a member"},
		{"exchange", "an array", "[]", "not JSON, or a member"},
		{"exchange", "half", `{"access_token":"` + secret, "not JSON, or a member"},
		{"exchange", "more after it", jsonOf(`"a":1`) + "x", "not JSON, or a member"},
		{"exchange", "no token", `{"token_type":"Bearer","expires_in":3600}`, "no token: it is empty"},
		{"exchange", "an empty token", `{"access_token":"","expires_in":3600}`, "no token: it is empty"},
		{"exchange", "a token that is no text", `{"access_token":{"a":"` + secret + `"}}`, "not JSON, or a member"},
		{"exchange", "a token of two lines", `{"access_token":"` + secret + `\n` + secret + `"}`, "printable ASCII, or spaces"},
		{"exchange", "a token with a header in it", `{"access_token":"` + secret + `\r\nHost: evil"}`, "printable ASCII, or spaces"},
		{"exchange", "a long token", `{"access_token":"` + big + `"}`, "the limit is 16384"},
		{"exchange", "expires at once", jsonOf(`"expires_in":0`), "it ended at"},
		{"exchange", "a negative life", jsonOf(`"expires_in":-1`), `the member "expires_in" of the answer is not`},
		{"exchange", "a broken life", jsonOf(`"expires_in":1.5`), `"expires_in"`},
		{"exchange", "a life out of range", jsonOf(`"expires_in":1e9`), `"expires_in"`},
		{"exchange", "a life of words", jsonOf(`"expires_in":"` + secret + `"`), "not JSON, or a member"},
		{"exchange", "very deep", strings.Repeat(`{"a":`, 1000), "not JSON, or a member"},
		{"exchange", "another kind of token", `{"access_token":"` + secret + `","token_type":"DPoP"}`, "not a bearer token"},
		{"exchange", "a kind that is no text", `{"access_token":"` + secret + `","token_type":["Bearer"]}`, "not JSON, or a member"},
		{"exchange", "a refusal with status 200", `{"error":"invalid_grant","error_description":"` + secret + `"}`, "no token"},
		{"exchange", "expired, says the token", `{"access_token":"` + jwt(time.Unix(1e9, 0)) + `","expires_in":3600}`, "it ended at 2001"},
		{"exchange", "endless", jsonOf(`"a":"` + strings.Repeat("x", 64<<10) + `"`), "larger than 64 KiB"},
	} {
		t.Run(c.from+"/"+c.name, func(t *testing.T) {
			t.Parallel()
			x := &exchanged{answer: func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				text(200, c.body)(w, r)
			}}
			err := requireNone(t, made[c.from](x.client()))
			assert.ErrorContains(t, err, c.says)
			assert.Less(t, len(err.Error()), 700)
			assert.Equal(t, 1, x.count(), "it is not asked again")
		})
	}
}

// A token that is a JWT is for the audience that was asked for; another token cannot be compared.
func TestExchangedAudience(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		audience, resource, token, says string
	}{
		{"api", "", jwt(inAnHour(), "api"), ""},
		{"api", "", jwt(inAnHour(), "other", "api"), ""},
		{"api", "https://api.example", jwt(inAnHour(), "https://api.example"), ""},
		{"api", "", "opaque", ""},
		{"", "https://api.example", jwt(inAnHour(), "api"), ""}, // a server may have another name for it
		{"", "", jwt(inAnHour(), "api"), ""},
		{"api", "", jwt(inAnHour(), "other"), `the token is for ["other"], and "api" was asked for`},
		{"api", "", jwt(inAnHour(), ""), "was asked for"},
		{"api", "", jwt(inAnHour()), "was asked for"},
		{"api", "https://api.example", jwt(inAnHour(), "https://other.example"), "was asked for"},
	} {
		x := &exchanged{answer: text(200, `{"access_token":"`+c.token+`","token_type":"Bearer","expires_in":3600}`)}
		o := tokensource.ClientOptions{URL: "http://[::1]/", HTTPClient: x.client(), Audience: c.audience, Resource: c.resource}
		s := made(tokensource.Exchange(tokensource.Static("subject"), o))
		o.ClientID = "me" // by the certificate of the client
		for _, s := range []*tokensource.Source{s, made(tokensource.ClientCredentials(o))} {
			if c.says == "" {
				requireToken(t, c.token, s)
			} else {
				require.ErrorContains(t, requireNone(t, s), c.says)
			}
		}
	}
}

// The longest lives that an answer can have are long ones.
func TestLongLives(t *testing.T) {
	t.Parallel()
	for _, member := range []string{
		`"expires_in":9223372037`, `"expires_in":253402300800`, `"expires_in":9223372036854775807`, `"expires_in":"99999999999999999999"`,
		`"expires_in":99999999999999999999`,
	} {
		synctest.Test(t, func(t *testing.T) {
			var log logs
			x := &exchanged{answer: text(200, `{"access_token":"a",`+member+`}`)}
			requireToken(t, "a", made(tokensource.Exchange(tokensource.Static("subject"), tokensource.ClientOptions{
				URL: "https://sts.example/", HTTPClient: x.client(), Logger: log.logger()})))
			synctest.Wait()
			_, end, _ := strings.Cut(strings.TrimSpace(log.String()), "expires=")
			expires := must.Get(time.Parse(time.RFC3339, end))(t)
			assert.True(t, expires.After(time.Unix(4102444800-1, 0)), "%s: %v", member, expires)
			assert.Less(t, expires.Year(), 10000, "which package time can compute with, and JSON can have")
		})
	}
}

// What a refusal says is surfaced, and what it quotes of tokens is not.
func TestRefusals(t *testing.T) {
	t.Parallel()
	subject := "subject-" + strings.Repeat(secret, 3)
	long := strings.Repeat("word ", 1000)
	for _, c := range []struct{ body, code, message string }{
		{`{"error":"invalid_grant","error_description":"the token is too old","error_uri":"https://x"}`, "invalid_grant", "the token is too old"},
		{`{"error":"invalid_target"}`, "invalid_target", ""},
		{`{"error":{"code":400,"status":"INVALID_ARGUMENT","message":"bad ` + subject + `"}}`, "", ""},
		{`{"error":"a","error_description":"bad ` + subject + ` here"}`, "a", "bad [redacted] here"},
		{`{"error":"` + subject + `"}`, "[redacted]", ""},
		{`{"error":"a","error_description":"one\r\ntwo\u0000"}`, "a", "one  two"},
		{`{"error":"a","error_description":"` + long + `"}`, "a", strings.TrimSpace(long[:500]) + " …"},
		{`{"error":"` + long + `"}`, long[:60] + " …", ""},
		{`{"error":7}`, "", ""},
		{`not JSON: ` + subject, "", ""},
		{``, "", ""},
		{`[]`, "", ""},
	} {
		for _, status := range []int{400, 401} {
			x := &exchanged{answer: text(status, c.body)}
			err := requireNone(t, made(tokensource.Exchange(tokensource.Static(subject), tokensource.ClientOptions{URL: "http://[::1]/", HTTPClient: x.client()})))
			e, ok := errors.AsType[*tokensource.StatusError](err)
			require.True(t, ok, "%v", err)
			assert.Equal(t, status, e.StatusCode)
			assert.Equal(t, c.message, e.Message, c.body)
			if len(c.code) < 60 {
				assert.Equal(t, c.code, e.Code, c.body)
			}
			assert.LessOrEqual(t, len(e.Code), 64)
			_, again := e.Retryable()
			assert.False(t, again)
		}
	}
}

// A server that repeats what it was sent, in whatever way, does not get it into an error.
func TestEchoes(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	subject := "subject-" + secret
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b := make([]byte, 64<<10)
			n, _ := c.Read(b)
			for line := range strings.SplitSeq(string(b[:n]), "\r\n") { // not HTTP
				if strings.Contains(line, secret) {
					_, _ = io.WriteString(c, line+"\r\n\r\n")
				}
			}
			_ = c.Close()
		}
	}()
	out := new(logs)
	s := made(tokensource.Exchange(tokensource.Static(subject), tokensource.ClientOptions{
		URL: "http://" + l.Addr().String() + "/?key=" + secret, Logger: out.logger(),
	}))
	got := requireNone(t, s)
	require.ErrorContains(t, got, "malformed HTTP")
	for e := got; e != nil; e = errors.Unwrap(e) {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
			require.NotContains(t, fmt.Sprintf(verb, e), secret)
		}
	}
	require.NotContains(t, out.String(), secret)
}

func TestNothingPrints(t *testing.T) {
	t.Parallel()
	x := &exchanged{answer: text(200, jwt(inAnHour(), "ca"))}
	kept := gce(x, nil)
	requireToken(t, jwt(inAnHour(), "ca"), kept)
	o := tokensource.ClientOptions{URL: "https://sts.example/", Issuer: "i", ClientAssertion: tokensource.Static(secret)}
	for _, s := range []*tokensource.Source{tokensource.Static(secret), kept, made(tokensource.Exchange(tokensource.Static(secret), o))} {
		out := new(logs)
		slog.New(slog.NewJSONHandler(out, nil)).Info("x", "s", s, "in", []any{s, struct{ S *tokensource.Source }{s}}, "o", o)
		for _, v := range []any{s, o, &o, struct{ s *tokensource.Source }{s}, []*tokensource.Source{s}, map[string]any{"s": s}} {
			for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%q"} {
				_, _ = fmt.Fprintf(out, verb+"\n", v)
			}
		}
		assert.NotContains(t, out.String(), secret)
		assert.NotContains(t, out.String(), fmt.Sprintf("%x", secret))
	}
	assert.Equal(t, `tokensource.Source(GCE, for "ca")`, kept.String())
	assert.Equal(t, "tokensource.Source(static)", tokensource.Static(secret).GoString())
}

func TestOptions(t *testing.T) {
	t.Parallel()
	proxied := &http.Client{Transport: &http.Transport{Proxy: http.ProxyFromEnvironment}}
	for raw, says := range map[string]string{
		"http://169.254.169.254": "", "http://169.254.170.23/x": "", "http://127.0.0.1:8080": "", "http://[::1]:80": "", "http://localhost:80": "",
		"http://[fe80::1%25eth0]": "", "http://[fd20:ce::254]": "", "https://metadata.example": "", "http://[::ffff:169.254.169.254]": "",
		"http://metadata.google.internal": "could be read on the way", "http://10.0.0.1": "could be read on the way", "http://169.253.169.254": "could be read on the way",
		"http://[fd20:ce::255]": "could be read on the way", "http://localhost.example": "could be read on the way", "http://2852039166": "could be read on the way",
		"ftp://127.0.0.1": "https://host", "127.0.0.1": "https://host", "http:127.0.0.1": "https://host", "http://": "https://host", ":": "not a URL",
		"http://u:" + secret + "@127.0.0.1": "a user", "http://127.0.0.1/#f": "a fragment", "http://127.0.0.1/?q": "a query", "http://127.0.0.1:" + secret: "not a URL",
	} {
		_, err := tokensource.GCE("a", &tokensource.GCEOptions{URL: raw})
		if says == "" {
			assert.NoError(t, err, raw)
			continue
		}
		assert.ErrorContains(t, err, says, raw)
		assert.NotContains(t, err.Error(), secret)
	}
	for raw, says := range map[string]string{
		"https://sts.googleapis.com/v1/token": "", "http://127.0.0.1/token?x=y": "", "http://localhost/": "",
		"": "no URL", "http://169.254.169.254/": "could be read on the way", "http://sts.example/": "could be read on the way", "https://u@sts.example/": "a user",
	} {
		_, err := tokensource.Exchange(tokensource.Static("a"), tokensource.ClientOptions{URL: raw})
		if says == "" {
			assert.NoError(t, err, raw)
			continue
		}
		assert.ErrorContains(t, err, says, raw)
	}
	second := func(_ *tokensource.Source, err error) error { return err }
	static := tokensource.Static("a")
	for says, err := range map[string]error{
		"no audience":        second(tokensource.GCE("", nil)),
		"has a proxy":        second(tokensource.GCE("a", &tokensource.GCEOptions{HTTPClient: proxied})),
		"set Proxy to nil":   second(tokensource.GCE("a", &tokensource.GCEOptions{HTTPClient: &http.Client{Transport: http.DefaultTransport}})),
		"the subject is nil": second(tokensource.Exchange(nil, tokensource.ClientOptions{URL: "https://sts.example"})),
		"neither ClientAssertion nor HTTPClient is": second(tokensource.Exchange(static, tokensource.ClientOptions{URL: "https://sts.example", ClientID: "me"})),
	} {
		assert.ErrorContains(t, err, says)
	}
}

// Metadata servers are asked directly, and no redirect leads elsewhere.
func TestTransports(t *testing.T) {
	t.Parallel()
	before := proxy.count()
	requireNone(t, made(tokensource.GCE("a", &tokensource.GCEOptions{URL: "http://[fe80::1%25none]:1"})))
	require.Equal(t, before, proxy.count())
	o := tokensource.ClientOptions{URL: "https://sts.example"}
	requireNone(t, made(tokensource.Exchange(tokensource.Static(secret), o)))
	require.Equal(t, before+1, proxy.count())
	assert.Equal(t, http.MethodConnect, proxy.all()[before].method)

	var elsewhere bool
	other, url := serve(t, func(http.ResponseWriter, *http.Request) { elsewhere = true })
	x, server := serve(t, func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, url, http.StatusTemporaryRedirect) })
	for _, s := range []*tokensource.Source{
		made(tokensource.GCE("a", &tokensource.GCEOptions{URL: server})),
		made(tokensource.Exchange(tokensource.Static(secret), tokensource.ClientOptions{URL: server, HTTPClient: http.DefaultClient})),
		made(tokensource.Exchange(tokensource.Static(secret), tokensource.ClientOptions{URL: server})),
	} {
		require.ErrorContains(t, requireNone(t, s), "redirects are not followed")
	}
	assert.Equal(t, 3, x.count())
	assert.Zero(t, other.count())
	assert.False(t, elsewhere)
}

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
