package witsvid_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// pair is a server and a client of it, over TLS on a real socket, each with an identity.
type pair struct {
	url, origin string
	server      *httptest.Server
	issuer      *witsvid.Issuer
	validator   *witsvid.Validator
	web, db     *workload
	logs        *logged
}

// pairOptions change what newPair makes.
type pairOptions struct {
	http1      bool
	middleware witsvid.MiddlewareOptions
	targets    []string
}

func newPair(t testing.TB, handler http.HandlerFunc, edit ...func(*pairOptions)) *pair {
	t.Helper()
	p := &pair{issuer: newIssuer(t, nil), logs: &logged{}}
	p.web, p.db = issue(t, p.issuer, webID), issue(t, p.issuer, "spiffe://example.org/db")
	p.validator = must.Get(witsvid.NewValidator(bundleOf(t, wit1), spiffe.AllowIDs(p.web.id), nil))(t)

	var o pairOptions
	for _, e := range edit {
		e(&o)
	}
	p.server = httptest.NewUnstartedServer(nil)
	p.server.EnableHTTP2 = !o.http1
	p.server.Config.ErrorLog = log.New(io.Discard, "", 0)
	p.origin = "https://" + p.server.Listener.Addr().String()
	if o.targets == nil {
		o.targets = []string{p.origin}
	}
	o.middleware.Logger = p.logs.logger()
	wrap := must.Get(witsvid.Middleware(p.validator, o.targets, &o.middleware))(t)
	p.server.Config.Handler = wrap(handler)
	p.server.StartTLS()
	t.Cleanup(p.server.Close)
	require.Equal(t, p.origin, p.server.URL)
	p.url = p.origin + "/query?x=1"
	return p
}

// client returns a client that presents the identity of web.
func (p *pair) client(t testing.TB) *http.Client { return p.clientOver(t, p.server.Client().Transport) }

// clientOver is client with another base.
func (p *pair) clientOver(t testing.TB, base http.RoundTripper) *http.Client {
	t.Helper()
	tr := must.Get(witsvid.NewTransport(proverOf(p.web.SVID), base))(t)
	c := &http.Client{Transport: tr}
	t.Cleanup(c.CloseIdleConnections)
	return c
}

// who answers with the HTTP version and the caller.
func who(w http.ResponseWriter, r *http.Request) {
	proof, ok := witsvid.FromContext(r.Context())
	if !ok {
		proof = &witsvid.Proof{}
	}
	body := must.Do(io.ReadAll(r.Body))
	fmt.Fprintf(w, "%d %s %s%s", r.ProtoMajor, proof.ID(), r.Method, body)
}

func do(t testing.TB, c *http.Client, r *http.Request) (int, string) {
	t.Helper()
	resp := must.Get(c.Do(r))(t)
	defer resp.Body.Close()
	body := must.Get(io.ReadAll(resp.Body))(t)
	return resp.StatusCode, string(body)
}

func request(t testing.TB, method, url, body string, header ...string) *http.Request {
	t.Helper()
	var b io.Reader
	if body != "" {
		b = strings.NewReader(body)
	}
	r := must.Get(http.NewRequestWithContext(t.Context(), method, url, b))(t)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	return r
}

// Clients and servers of ours understand each other, in both versions of HTTP.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-43", "WIT-49", "WPT-1", "WPT-5")
	for _, version := range []int{1, 2} {
		t.Run(fmt.Sprintf("HTTP/%d", version), func(t *testing.T) {
			t.Parallel()
			p := newPair(t, who, func(o *pairOptions) { o.http1 = version == 1 })
			c := p.client(t)
			for _, r := range []*http.Request{
				request(t, "GET", p.url, ""),
				request(t, "GET", p.origin, ""),
				request(t, "GET", p.origin+"?x", ""),
				request(t, "GET", p.origin+"/a%2Fb/%C3%A9?x=%20#frag", ""),
				request(t, "POST", p.url, "body", "Content-Type", "text/plain"),
				request(t, "POST", p.url, strings.Repeat("body", 1<<19)), // a proof does not look at bodies, whatever their size
				request(t, "DELETE", p.url, "", "Authorization", "Bearer access", "Txn-Token", "txn"),
				request(t, "PUT", p.url, "body", "authorization", "Basic dTpw"),
				{Method: "", URL: request(t, "GET", p.url, "").URL},
			} {
				want := fmt.Sprintf("%d %s %s", version, webID, r.Method)
				if r.Method == "" {
					want += "GET"
				}
				if r.Body != nil {
					want += strings.Repeat("body", int(r.ContentLength)/4)
				}
				status, body := do(t, c, r)
				require.NoError(t, p.logs.take())
				assert.Equal(t, http.StatusOK, status)
				assert.Equal(t, want, body)
				assert.Empty(t, r.Header.Get(headerToken), "the caller's request is left alone")
			}
			resp := must.Get(c.Do(request(t, "GET", p.url, "")))(t)
			require.NoError(t, resp.Body.Close())
			assert.NotContains(t, resp.Request.Header, headerToken, "the response does not show the token")
		})
	}
}

// A proof names its target; what the request says of the host plays no part.
func TestTargets(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WPT-5")
	p := newPair(t, who, func(o *pairOptions) {
		o.targets = []string{"https://DB.example.org", "https://db.example.org:8443/", "https://gateway.example.org/db", "urn:db"}
	})
	const refused = "audience WPT-5"
	for target, want := range map[string]string{
		p.origin + "/query":                    refused,
		"https://db.example.org/query":         "",
		"https://DB.example.org:443/query":     "",
		"https://db.example.org:8443/query":    "",
		"https://gateway.example.org/db":       "",
		"urn:db":                               "",
		"urn:DB":                               refused,
		"https://db.example.org/":              refused,
		"https://db.example.org/query/":        refused,
		"https://db.example.org/Query":         refused,
		"https://db.example.org.evil/query":    refused,
		"https://gateway.example.org/db/query": refused,
		"http://db.example.org/query":          refused,
		"https://evil.test/query":              refused,
	} {
		token, proof := prove(t, p.web.SVID, nil, witsvid.Call{Target: target})
		r := request(t, "GET", p.url, "", headerToken, token, headerProof, proof,
			"X-Forwarded-Host", "evil.test", "Forwarded", "host=evil.test")
		r.Host = p.server.Listener.Addr().String()
		if target == "https://evil.test/query" {
			r.Host = "evil.test"
		}
		status, _ := do(t, p.server.Client(), r)
		err := p.logs.take()
		assert.Equal(t, want, outcome(t, err), "%s: %v", target, err)
		if want == "" {
			assert.Equal(t, http.StatusOK, status)
		} else {
			assert.Equal(t, http.StatusBadRequest, status)
			assert.Equal(t, "proof", refusal(t, err).What)
		}
	}
	// The Host field is part of the URI that the client calls, and it is what the proof is for.
	r := request(t, "GET", p.url, "")
	r.Host = "db.example.org"
	status, _ := do(t, p.client(t), r)
	assert.Equal(t, http.StatusOK, status, "%v", p.logs.take())
}

func TestMiddlewareRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-40", "WIT-41", "WIT-42", "WIT-49", "WIT-50", "WPT-1", "WPT-9", "WPT-11", "WPT-12", "WPT-13")
	called := false
	p := newPair(t, func(http.ResponseWriter, *http.Request) { called = true })
	plain := p.server.Client()
	call := witsvid.Call{Target: p.origin + "/query"}
	fresh := func() (token, proof string) { return prove(t, p.web.SVID, nil, call) }
	token, proof := fresh()
	used := request(t, "GET", p.url, "", headerToken, token, headerProof, proof)
	status, _ := do(t, plain, used)
	require.Equal(t, http.StatusOK, status, "%v", p.logs.take())
	require.True(t, called)
	called = false
	withAccess := func() string {
		_, proof := prove(t, p.web.SVID, nil, witsvid.Call{Target: call.Target, AccessToken: "x"})
		return proof
	}
	next := func() string { _, proof := fresh(); return proof }
	_, dbProof := prove(t, p.db.SVID, nil, call)
	_, further := prove(t, p.web.SVID, nil, witsvid.Call{Target: call.Target, Tokens: map[string]string{"x-user": "u"}})
	for name, c := range map[string]struct {
		header []string
		status int
		want   string
		detail string
	}{
		"nothing":                  {nil, 400, "missing WIT-49", "request: missing"},
		"token alone":              {[]string{headerToken, token}, 400, "missing WIT-40", "request: missing"},
		"proof alone":              {[]string{headerProof, next()}, 400, "missing WIT-49", "request: missing"},
		"token twice":              {[]string{headerToken, token, headerToken, token, headerProof, next()}, 400, "missing WIT-49", "request: missing"},
		"token twice in one":       {[]string{headerToken, token + ", " + token, headerProof, next()}, 400, "malformed WIT-1", "token: malformed"},
		"proof twice":              {[]string{headerToken, token, headerProof, next(), headerProof, next()}, 400, "missing WPT-1", "request: missing"},
		"proof twice in one":       {[]string{headerToken, token, headerProof, next() + "," + next()}, 400, "malformed WPT-2", "proof: malformed"},
		"bearer":                   {[]string{"Authorization", "Bearer " + token}, 400, "misplaced WIT-42", "request: misplaced"},
		"bearer with proof":        {[]string{"Authorization", "Bearer " + token, headerProof, withAccess()}, 400, "misplaced WIT-42", "request: misplaced"},
		"bearer beside good":       {[]string{headerToken, token, "Authorization", "Bearer " + token, headerProof, next()}, 400, "misplaced WIT-42", "request: misplaced"},
		"other scheme":             {[]string{headerToken, token, "Authorization", "WIT " + token + ", x=y", headerProof, next()}, 400, "misplaced WIT-42", "request: misplaced"},
		"no scheme":                {[]string{headerToken, token, "Authorization", token, headerProof, next()}, 400, "misplaced WIT-42", "request: misplaced"},
		"used proof":               {[]string{headerToken, token, headerProof, proof}, 400, "replay WPT-9", "proof: replay"},
		"proof of another":         {[]string{headerToken, token, headerProof, dbProof}, 400, "signature WPT-4", "proof: signature"},
		"access token, no ath":     {[]string{headerToken, token, headerProof, next(), "Authorization", "Bearer x"}, 400, "binding WPT-11", "proof: binding"},
		"other access token":       {[]string{headerToken, token, headerProof, withAccess(), "Authorization", "Bearer y"}, 400, "binding WPT-11", "proof: binding"},
		"scheme alone":             {[]string{headerToken, token, headerProof, next(), "Authorization", "Bearer"}, 400, "binding WPT-11", "request: binding"},
		"two access tokens":        {[]string{headerToken, token, headerProof, withAccess(), "Authorization", "Bearer x", "Authorization", "Bearer y"}, 400, "binding WPT-11", "request: binding"},
		"access token gone":        {[]string{headerToken, token, headerProof, withAccess()}, 400, "binding WPT-11", "proof: binding"},
		"Basic, uncovered":         {[]string{headerToken, token, headerProof, next(), "Authorization", "Basic dTpw"}, 400, "binding WPT-13", "proof: binding"},
		"transaction, no tth":      {[]string{headerToken, token, headerProof, next(), "Txn-Token", "t"}, 400, "binding WPT-12", "proof: binding"},
		"two transactions":         {[]string{headerToken, token, headerProof, next(), "Txn-Token", "t", "Txn-Token", "t"}, 400, "binding WPT-12", "request: binding"},
		"further field":            {[]string{headerToken, token, headerProof, further, "X-User", "u"}, 400, "binding WPT-13", "proof: binding"},
		"empty transaction":        {[]string{headerToken, token, headerProof, next(), "Txn-Token", ""}, 400, "binding WPT-12", "request: binding"},
		"not allowed":              {[]string{headerToken, p.db.token, headerProof, dbProof}, 403, "denied", "proof: denied"},
		"foreign signature, alone": {[]string{headerToken, token, "Signature-Input", `sig=("@method");tag="x"`, "Signature", "sig=:AA==:"}, 400, "missing WIT-40", "request: missing"},
	} {
		resp := must.Get(plain.Do(request(t, "GET", p.url, "", c.header...)))(t)
		var doc struct {
			Title, Detail string
			Status        int
		}
		require.NoError(t, json.NewDecoder(resp.Body).Decode(&doc))
		require.NoError(t, resp.Body.Close())
		logErr := p.logs.take()
		assert.Equal(t, c.want, outcome(t, logErr), "%s: %v", name, logErr)
		assert.Equal(t, c.status, resp.StatusCode, name)
		assert.Equal(t, c.status, doc.Status)
		assert.Equal(t, c.detail, doc.Detail, name)
		assert.Equal(t, "application/problem+json", resp.Header.Get("Content-Type"))
		assert.Empty(t, resp.Header.Get("WWW-Authenticate"))
		assert.False(t, called, name)
	}
	// An access token may be a JWT of another type.
	jwt := sign(`{"alg":"ES256","typ":"at+jwt"}`, claims(webSubject), wk)
	_, withJWT := prove(t, p.web.SVID, nil, witsvid.Call{Target: call.Target, AccessToken: jwt})
	status, _ = do(t, plain, request(t, "GET", p.url, "", headerToken, token, headerProof, withJWT, "Authorization", "Bearer "+jwt))
	assert.Equal(t, http.StatusOK, status, "%v", p.logs.take())
	// And its scheme may be DPoP.
	status, _ = do(t, plain, request(t, "GET", p.url, "", headerToken, token, headerProof, withAccess(), "Authorization", "dpop x"))
	assert.Equal(t, http.StatusOK, status, "%v", p.logs.take())
	// A signature of another party for another purpose is ignored.
	status, _ = do(t, plain, request(t, "GET", p.url, "", headerToken, token, headerProof, next(),
		"Signature-Input", `sig=("@authority");created=1;keyid="k";tag="web-bot-auth"`, "Signature", "sig=:AA==:"))
	assert.Equal(t, http.StatusOK, status, "%v", p.logs.take())
}

// A token never travels without TLS, and never further than its caller meant.
func TestTransportRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-42", "WIT-44", "WIT-51")
	p := newPair(t, who)
	sent := 0
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		sent++
		return nil, errors.New("sent")
	})
	tr := must.Get(witsvid.NewTransport(proverOf(p.web.SVID), base))(t)
	for want, r := range map[string]*http.Request{
		`refusing to send a WIT-SVID by "http", where others can read it; use https`: request(t, "POST", "http://db.example.org/", "x"),
		`refusing to send a WIT-SVID by "ftp"`:                                       request(t, "GET", "ftp://db.example.org/", ""),
		"the request has a token or a proof already":                                 request(t, "GET", p.url, "", "workload-Identity-token", "x"),
		"there is a WIT-SVID in Authorization":                                       request(t, "GET", p.url, "", "Authorization", "Bearer "+p.web.token),
		`the host "dé.example.org" is not in ASCII`:                                  request(t, "GET", "https://dé.example.org/", ""),
		"the request has no URL":                                                     {Body: io.NopCloser(strings.NewReader("x"))},
	} {
		body := &closing{Reader: strings.NewReader("x")}
		r.Body = body
		_, err := tr.RoundTrip(r)
		require.ErrorContains(t, err, "witsvid: transport: "+want)
		assert.True(t, body.closed, want)
	}
	lower := request(t, "GET", p.url, "")
	lower.Header["workload-proof-token"] = []string{"x"}
	_, err := tr.RoundTrip(lower)
	require.ErrorContains(t, err, "already")
	assert.Zero(t, sent)

	_, err = tr.RoundTrip(request(t, "GET", p.url, "", "Txn-Token", "a", "Txn-Token", "b"))
	require.ErrorContains(t, err, `the field "txn-token" is there 2 times`)
	_, err = tr.RoundTrip(request(t, "GET", p.url, ""))
	require.EqualError(t, err, "sent")

	expired := must.Get(witsvid.NewSVID(baseToken(), wk))(t)
	tr = must.Get(witsvid.NewTransport(proverOf(expired), base))(t)
	_, err = tr.RoundTrip(request(t, "GET", p.url, ""))
	require.ErrorContains(t, err, "its key is not used any more")

	_, err = witsvid.NewTransport(nil, nil)
	require.EqualError(t, err, "witsvid: new transport: the Prover has no Source of a WIT-SVID")
	_, err = witsvid.NewTransport(&witsvid.Prover{}, nil)
	require.EqualError(t, err, "witsvid: new transport: the Prover has no Source of a WIT-SVID")
	unset := must.Get(witsvid.NewTransport(proverOf(p.web.SVID), nil))(t)
	_, err = unset.RoundTrip(request(t, "GET", p.url, ""))
	require.ErrorContains(t, err, "certificate", "the roots of the host do not know a test server")
	(&http.Client{Transport: unset}).CloseIdleConnections()
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

func TestMiddlewareOptions(t *testing.T) {
	t.Parallel()
	p := newPair(t, who)
	for want, c := range map[string]struct {
		v       *witsvid.Validator
		targets []string
		opts    witsvid.MiddlewareOptions
	}{
		"the Validator was not made by NewValidator":          {nil, []string{"https://a.test"}, witsvid.MiddlewareOptions{}},
		"no targets; give the origins by which clients know":  {p.validator, nil, witsvid.MiddlewareOptions{}},
		`the target "": the call has no target`:               {p.validator, []string{""}, witsvid.MiddlewareOptions{}},
		`the target "https://a.test?x": the target has a que`: {p.validator, []string{"https://a.test?x"}, witsvid.MiddlewareOptions{}},
		`the target "http://a.test" is not on TLS`:            {p.validator, []string{"http://a.test"}, witsvid.MiddlewareOptions{}},
		`the target "https://" names no host`:                 {p.validator, []string{"https://"}, witsvid.MiddlewareOptions{}},
		`the target "https://u@a.test" names no host`:         {p.validator, []string{"https://u@a.test"}, witsvid.MiddlewareOptions{}},
		`the target "https://a b" names no host`:              {p.validator, []string{"https://a b"}, witsvid.MiddlewareOptions{}},
	} {
		_, err := witsvid.Middleware(c.v, c.targets, &c.opts)
		require.ErrorContains(t, err, "witsvid: middleware: "+want)
	}
	wrap := must.Get(witsvid.Middleware(p.validator, []string{"https://a.test"}, nil))(t)
	w := httptest.NewRecorder()
	wrap(nil).ServeHTTP(w, httptest.NewRequest("GET", "http://a.test/", nil))
	assert.Equal(t, http.StatusBadRequest, w.Code, "and silent")
	_, ok := witsvid.FromContext(t.Context())
	assert.False(t, ok)
}

// A request that did not come by TLS is refused, unless TLS ends in front.
func TestMiddlewareTLS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-44")
	for _, terminated := range []bool{false, true} {
		logs := &logged{}
		wrap := must.Get(witsvid.Middleware(newValidator(t, wit1Bundle(t), atNow()), []string{"https://db.example.org"},
			&witsvid.MiddlewareOptions{TLSTerminated: terminated, Logger: logs.logger()}))(t)
		r := httptest.NewRequest("GET", "/query?x=1", nil)
		r.Header.Set(headerToken, baseToken())
		r.Header.Set(headerProof, proofFor(baseToken(), "1"))
		w := httptest.NewRecorder()
		wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
		if terminated {
			assert.Equal(t, http.StatusOK, w.Code, "%v", logs.take())
		} else {
			assert.Equal(t, "misplaced WIT-44", outcome(t, logs.take()))
			assert.Equal(t, http.StatusBadRequest, w.Code)
		}
	}
}

// A client that sends bad requests as fast as it can does not fill the log.
func TestMiddlewareLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // so that all requests come in one moment
		for summarised, want := range map[bool]int{true: 2, false: 300} {
			logs := &logged{summarised: summarised}
			wrap, err := witsvid.Middleware(newValidator(t, wit1Bundle(t), atNow()), []string{"https://db.example.org"},
				&witsvid.MiddlewareOptions{TLSTerminated: true, Logger: logs.logger()})
			require.NoError(t, err)
			h := wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
			for n := range 300 {
				r := httptest.NewRequest("GET", "/query", nil)
				r.Header.Set(headerToken, strings.Repeat("x", n*100)) // malformed, or too large
				r.Header.Set(headerProof, "x")
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
			assert.LessOrEqual(t, len(logs.errs), want)
			assert.NotEmpty(t, logs.errs)
			if !summarised {
				assert.Len(t, logs.errs, 300, "each of them")
			}
		}
	})
}

// What is this side's fault is not the client's.
func TestMiddlewareFaults(t *testing.T) {
	t.Parallel()
	src := &source{set: (&spiffe.BundleSet{}).With(wit1Bundle(t)), err: errors.New("the disk is full")}
	v := newValidator(t, src, atNow(func(o *witsvid.ValidatorOptions) { o.Proofs = 1 }))
	wrap, err := witsvid.Middleware(v, []string{"https://db.example.org"}, &witsvid.MiddlewareOptions{TLSTerminated: true})
	require.NoError(t, err)
	send := func(jti string) int {
		r := httptest.NewRequest("GET", "/query", nil)
		r.Header.Set(headerToken, baseToken())
		r.Header.Set(headerProof, proofFor(baseToken(), jti))
		w := httptest.NewRecorder()
		wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
		return w.Code
	}
	assert.Equal(t, http.StatusServiceUnavailable, send("1"))
	src.err = nil
	assert.Equal(t, http.StatusOK, send("1"))
	assert.Equal(t, http.StatusServiceUnavailable, send("2"), "no place to remember it")
	assert.Equal(t, http.StatusBadRequest, send("1"))
}

// A request that some code has made up, without what net/http always sets.
func TestMiddlewareBareRequest(t *testing.T) {
	t.Parallel()
	wrap, err := witsvid.Middleware(newValidator(t, wit1Bundle(t), atNow()), []string{"https://db.example.org"}, &witsvid.MiddlewareOptions{TLSTerminated: true})
	require.NoError(t, err)
	r := httptest.NewRequest("GET", vectorURL, nil)
	r.Header = http.Header{headerToken: {baseToken()}, headerProof: {proofFor(baseToken(), "bare")}}
	r.RequestURI, r.Body = "", nil
	w := httptest.NewRecorder()
	wrap(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})).ServeHTTP(w, r)
	assert.Equal(t, http.StatusOK, w.Code, "%s", w.Body)
}

// A key that fails when it is used.
// TestMiddlewarePath: a path that a ServeMux in front and the handler behind may read differently is refused before the token is
// read.
func TestMiddlewarePath(t *testing.T) {
	t.Parallel()
	wrap, err := witsvid.Middleware(newValidator(t, wit1Bundle(t), atNow()), []string{"https://db.example.org"}, &witsvid.MiddlewareOptions{TLSTerminated: true})
	require.NoError(t, err)
	for _, c := range []struct{ method, target, want string }{
		{"GET", "/a/", "missing"}, {"CONNECT", "/a", "unclear path"}, {"GET", "/public/../admin", "unclear path"}, {"GET", "/public/%2e%2e/admin", "unclear path"},
	} {
		w := httptest.NewRecorder()
		wrap(http.HandlerFunc(who)).ServeHTTP(w, httptest.NewRequest(c.method, c.target, nil))
		assert.Equal(t, http.StatusBadRequest, w.Code)
		assert.Contains(t, w.Body.String(), c.want, "%s %s", c.method, c.target)
	}
}

func TestSignerFails(t *testing.T) {
	t.Parallel()
	failed := errors.New("the device is gone")
	s := must.Get(witsvid.NewSVID(newWebToken(t), badSigner{wk, wk.Public(), failed}))(t)
	_, _, err := proverOf(s).Prove(witsvid.Call{Target: "x"})
	require.ErrorIs(t, err, failed)
	tr := must.Get(witsvid.NewTransport(proverOf(s), nil))(t)
	_, err = tr.RoundTrip(request(t, "GET", vectorURL, ""))
	require.ErrorIs(t, err, failed)
}

// newWebToken returns a token for wk by the real clock.
func newWebToken(t testing.TB) string {
	t.Helper()
	return must.Get(newIssuer(t, nil).Issue(spiffe.MustParseID(webID), wk.Public()))(t)
}

// A redirect to another host does not take the identity along.
func TestRedirect(t *testing.T) {
	t.Parallel()
	var got http.Header
	elsewhere := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	t.Cleanup(elsewhere.Close)
	at := ""
	p := newPair(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/there" {
			who(w, r)
			return
		}
		http.Redirect(w, r, at, http.StatusTemporaryRedirect)
	})
	at = "/there"
	status, body := do(t, p.client(t), request(t, "GET", p.url, ""))
	assert.Equal(t, http.StatusOK, status, "a proof for each request: %v", p.logs.take())
	assert.Contains(t, body, webID)

	at = elsewhere.URL
	base := p.server.Client().Transport.(*http.Transport)
	base.TLSClientConfig.RootCAs.AddCert(elsewhere.Certificate())
	status, _ = do(t, p.client(t), request(t, "GET", p.url, ""))
	assert.Equal(t, http.StatusOK, status)
	assert.NotContains(t, got, headerToken)
	assert.NotContains(t, got, headerProof)
}

// A base that does not say which request a response answers hides where a redirect comes from.
func TestRedirectUnknown(t *testing.T) {
	t.Parallel()
	p := newPair(t, who)
	var seen []string
	c := p.clientOver(t, roundTripper(func(r *http.Request) (*http.Response, error) {
		seen = append(seen, fmt.Sprint(r.URL, " ", len(r.Header[headerToken])))
		resp := &http.Response{StatusCode: 307, Body: http.NoBody, Header: http.Header{}}
		switch r.URL.String() {
		case "https://home.test/":
			resp.Header.Set("Location", "https://evil.test/")
		case "https://evil.test/":
			resp.Header.Set("Location", "https://evil.test/there")
		default:
			resp.StatusCode = 200
		}
		return resp, nil
	}))
	_, _ = do(t, c, request(t, "GET", "https://home.test/", ""))
	assert.Equal(t, []string{"https://home.test/ 1", "https://evil.test/ 0", "https://evil.test/there 0"}, seen)
}

// Hostile tokens cost little: none is parsed further than it has to.
func TestHostileInput(t *testing.T) {
	t.Parallel()
	v := newValidator(t, wit1Bundle(t), atNow())
	fill := func(n int, unit string) string { return strings.Repeat(unit, n/len(unit)) }
	start := time.Now()
	for _, payload := range []string{
		"{" + strings.TrimSuffix(fill(11000, `"a":1,`), ",") + "}", fill(11000, "["), `{"cnf":` + fill(11000, `{"jwk":`),
		claims(webSubject, tokenEnd, cnfOf(`"alg":"RS256","kty":"RSA","e":"AQAB","n":"`+fill(9000, "A")+`"`)),
		claims(webSubject, tokenEnd, goodCNF(), `"x":"`+fill(9000, `A`)+`"`),
	} {
		token := sign(tokenHeader, payload, wit1)
		_, err := v.Validate(token, proofFor(token, "1"), witsvid.Call{Target: vectorTarget})
		if err != nil {
			refusal(t, err, token)
		}
	}
	_, err := v.Validate(string(bytes.Repeat([]byte("A.A.A"), 1<<20)), "", witsvid.Call{Target: vectorTarget})
	assert.Equal(t, "malformed WIT-1", outcome(t, err))
	assert.Less(t, time.Since(start), time.Second)
}
