package witsvid_test

import (
	"compress/gzip"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/witsvid"
)

// draft is a signed request as a test writes it down, without the code under test.
type draft struct {
	method, target, body string
	header               http.Header
	components           []string // as they stand in the signature base, with quotes
	params               string
	label                string
	key                  *ecdsa.PrivateKey
	afterwards           func(h http.Header) // changes after signing
}

func contentDigest(body string) string {
	sum := sha256.Sum256([]byte(body))
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
}

// goodDraft is a signed request that has all that the profile asks for.
func goodDraft(nonce string) *draft {
	return &draft{
		method: "POST", target: "/query?x=1", body: "hello",
		header: http.Header{
			"Workload-Identity-Token": {baseToken()}, "Content-Type": {"text/plain"}, "Content-Digest": {contentDigest("hello")},
			"Authorization": {"Bearer access"}, "Txn-Token": {"txn"},
		},
		components: []string{`"@method"`, `"@request-target"`, `"workload-identity-token"`, `"content-type"`, `"content-digest"`, `"authorization"`, `"txn-token"`},
		params: fmt.Sprintf(`created=%d;expires=%d;nonce="%s";tag="wimse-workload-to-workload";wimse-aud="%s"`,
			now, now+60, nonce, vectorTarget),
		label: "wimse", key: wk,
	}
}

// request signs the draft.
func (d *draft) request() *http.Request {
	r := httptest.NewRequest(d.method, d.target, strings.NewReader(d.body))
	r.Header = d.header.Clone()
	var base strings.Builder
	for _, c := range d.components {
		name := strings.Trim(strings.Split(c, ";")[0], `"`)
		value := strings.Join(d.header[http.CanonicalHeaderKey(name)], ", ")
		switch name {
		case "@method":
			value = d.method
		case "@request-target":
			value = d.target
		}
		fmt.Fprintf(&base, "%s: %s\n", c, value)
	}
	params := "(" + strings.Join(d.components, " ") + ");" + d.params
	base.WriteString(`"@signature-params": ` + params)
	r.Header.Set("Signature-Input", d.label+"="+params)
	r.Header.Set("Signature", d.label+"=:"+base64.StdEncoding.EncodeToString(rawSignature([]byte(base.String()), d.key))+":")
	if d.afterwards != nil {
		d.afterwards(r.Header)
	}
	return r
}

// receiver accepts signed requests for db.example.org at NOW.
type receiver struct {
	wrap   func(http.Handler) http.Handler
	logs   *logged
	called int
	body   string
	proof  *witsvid.Proof
}

func newReceiver(t testing.TB, edit ...func(*witsvid.ValidatorOptions)) *receiver {
	t.Helper()
	rc := &receiver{logs: &logged{}}
	var err error
	rc.wrap, err = witsvid.Middleware(newValidator(t, wit1Bundle(t), atNow(edit...)), []string{"https://db.example.org"},
		&witsvid.MiddlewareOptions{TLSTerminated: true, Logger: rc.logs.logger()})
	require.NoError(t, err)
	return rc
}

// send returns "" or the reason and rule of the refusal.
func (rc *receiver) send(t testing.TB, r *http.Request) (string, int) {
	t.Helper()
	w := httptest.NewRecorder()
	before := rc.called
	rc.wrap(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		rc.called++
		data, err := io.ReadAll(r.Body)
		if err != nil {
			panic(err)
		}
		rc.body = string(data)
		rc.proof, _ = witsvid.FromContext(r.Context())
	})).ServeHTTP(w, r)
	out := outcome(t, rc.logs.take())
	assert.Equal(t, out == "" || out == "not called", rc.called > before)
	return out, w.Code
}

func without(list []string, name string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == name })
}

func param(name string) func(*draft) {
	return func(d *draft) {
		var kept []string
		for p := range strings.SplitSeq(d.params, ";") {
			if !strings.HasPrefix(p, name+"=") {
				kept = append(kept, p)
			}
		}
		d.params = strings.Join(kept, ";")
	}
}

func TestSignedRequests(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-1", "HSIG-2", "HSIG-3", "HSIG-4", "HSIG-5", "HSIG-6", "HSIG-7", "HSIG-8", "HSIG-9")
	sha512Of := func(s string) string {
		sum := sha512.Sum512([]byte(s))
		return "sha-512=:" + base64.StdEncoding.EncodeToString(sum[:]) + ":"
	}
	uncovered := func(name string) func(*draft) {
		return func(d *draft) { d.components = without(d.components, name) }
	}
	header := func(name string, values ...string) func(*draft) { return func(d *draft) { d.header[name] = values } }
	replace := func(old, new string) func(*draft) {
		return func(d *draft) { d.params = strings.Replace(d.params, old, new, 1) }
	}
	add := func(p string) func(*draft) { return func(d *draft) { d.params += ";" + p } }
	after := func(f func(http.Header)) func(*draft) { return func(d *draft) { d.afterwards = f } }
	cover := func(c string) func(*draft) { return func(d *draft) { d.components = append(d.components, c) } }
	for name, c := range map[string]struct {
		edit func(*draft)
		want string
	}{
		"base":                              {func(*draft) {}, ""},
		"HSIG-1 no method":                  {uncovered(`"@method"`), "binding HSIG-1"},
		"HSIG-1 no target":                  {uncovered(`"@request-target"`), "binding HSIG-1"},
		"HSIG-1 path and query for target":  {func(d *draft) { d.components[1] = `"@path"`; d.components = append(d.components, `"@query"`) }, "binding HSIG-1"},
		"HSIG-1 target with parameter":      {func(d *draft) { d.components[1] = `"@request-target";req` }, "binding HSIG-1"},
		"HSIG-1 method twice":               {cover(`"@method"`), "malformed HSIG-1"},
		"HSIG-2 no token":                   {uncovered(`"workload-identity-token"`), "binding HSIG-2"},
		"HSIG-2 no txn token":               {uncovered(`"txn-token"`), "binding HSIG-2"},
		"HSIG-2 no authorization":           {uncovered(`"authorization"`), "binding HSIG-2"},
		"HSIG-2 no content type":            {uncovered(`"content-type"`), "binding HSIG-2"},
		"HSIG-2 no content digest":          {uncovered(`"content-digest"`), "binding HSIG-2"},
		"HSIG-2 header added":               {after(func(h http.Header) { h.Add("Txn-Token", "x") }), "signature HSIG-6"},
		"HSIG-2 header changed":             {after(func(h http.Header) { h.Set("Authorization", "Bearer other") }), "signature HSIG-6"},
		"HSIG-2 header removed":             {after(func(h http.Header) { h.Del("Authorization") }), "binding HSIG-2"},
		"HSIG-2 two lines":                  {header("Txn-Token", " a ", "b\t"), "signature HSIG-6"}, // the draft does not trim
		"HSIG-2 two plain lines":            {header("Txn-Token", "a", "b"), ""},
		"HSIG-2 further field":              {func(d *draft) { d.header["X-More"] = []string{"m"}; cover(`"x-more"`)(d) }, ""},
		"HSIG-2 further field is not there": {cover(`"x-more"`), "binding HSIG-2"},
		"HSIG-2 field in upper case":        {func(d *draft) { d.header["X-More"] = []string{"m"}; cover(`"X-More"`)(d) }, "binding HSIG-2"},
		"HSIG-2 field of a dictionary":      {func(d *draft) { d.header["X-More"] = []string{"m"}; cover(`"x-more";sf`)(d) }, "binding HSIG-2"},
		"HSIG-2 other derived component":    {cover(`"@authority"`), "binding HSIG-2"},
		"HSIG-2 status of a request":        {cover(`"@status"`), "binding HSIG-2"},
		"HSIG-3 no digest":                  {func(d *draft) { d.header.Del("Content-Digest"); uncovered(`"content-digest"`)(d) }, "binding HSIG-3"},
		"HSIG-3 other body":                 {header("Content-Digest", contentDigest("other")), "binding HSIG-3"},
		"HSIG-3 body gone":                  {func(d *draft) { d.body = "" }, "binding HSIG-3"},
		"HSIG-3 no body":                    {func(d *draft) { d.body = ""; d.header.Del("Content-Digest"); uncovered(`"content-digest"`)(d) }, ""},
		"HSIG-3 no body with digest":        {func(d *draft) { d.body = ""; d.header.Set("Content-Digest", contentDigest("")) }, ""},
		"HSIG-3 sha-512":                    {header("Content-Digest", sha512Of("hello")), ""},
		"HSIG-3 both":                       {header("Content-Digest", sha512Of("hello"), "md5=:AAAA:, "+contentDigest("hello")), ""},
		"HSIG-3 one of two is wrong":        {header("Content-Digest", sha512Of("hello")+", "+contentDigest("x")), "binding HSIG-3"},
		"HSIG-3 unknown alone":              {header("Content-Digest", "md5=:AAAA:"), "binding HSIG-3"},
		"HSIG-3 digest is text":             {header("Content-Digest", `sha-256="x"`), "binding HSIG-3"},
		"HSIG-3 digest is broken":           {header("Content-Digest", `sha-256=:A:`), "malformed HSIG-3"},
		"HSIG-4 no created":                 {param("created"), "claim HSIG-4"},
		"HSIG-4 no expires":                 {param("expires"), "claim HSIG-4"},
		"HSIG-4 no nonce":                   {param("nonce"), "claim HSIG-4"},
		"HSIG-4 no tag":                     {param("tag"), "claim HSIG-4"},
		"HSIG-4 empty nonce":                {func(d *draft) { param("nonce")(d); add(`nonce=""`)(d) }, "claim HSIG-4"},
		"HSIG-4 other tag":                  {replace("workload-to-workload", "other"), "claim HSIG-4"},
		"HSIG-4 tag is a token":             {func(d *draft) { param("tag")(d); add(`tag=wimse-workload-to-workload`)(d) }, "claim HSIG-4"},
		"HSIG-4 created is text":            {func(d *draft) { param("created")(d); add(`created="1"`)(d) }, "claim HSIG-4"},
		"HSIG-4 created ahead":              {replace("created=1767225600", "created=1767225601"), "not yet valid HSIG-4"},
		"HSIG-4 expired":                    {replace("expires=1767225660", "expires=1767225600"), "expired HSIG-4"},
		"HSIG-4 far":                        {replace("expires=1767225660", "expires=1767225901"), "lifetime HSIG-4"},
		"HSIG-4 long":                       {replace("created=1767225600", "created=1767225359"), "lifetime HSIG-4"},
		"HSIG-4 as long as may be":          {replace("created=1767225600", "created=1767225360"), ""},
		"HSIG-4 parameter twice":            {add(`nonce="x"`), "malformed HSIG-7"},
		"HSIG-5 no audience":                {param("wimse-aud"), "claim HSIG-5"},
		"HSIG-5 other audience":             {replace("db.example.org", "evil.test"), "audience HSIG-5"},
		"HSIG-5 audience is true":           {func(d *draft) { param("wimse-aud")(d); add("wimse-aud")(d) }, "claim HSIG-5"},
		"HSIG-6 keyid":                      {add(`keyid="k"`), "claim HSIG-6"},
		"HSIG-6 alg":                        {add(`alg="ecdsa-p256-sha256"`), "claim HSIG-6"},
		"HSIG-6 other key":                  {func(d *draft) { d.key = other }, "signature HSIG-6"},
		"HSIG-7 other label, alone":         {func(d *draft) { d.label = "sig1" }, ""},
		"HSIG-7 two, ours labelled": {after(func(h http.Header) {
			h.Set("Signature-Input", `sig=("@method");keyid="x", `+h.Get("Signature-Input"))
			h.Add("Signature", "sig=:AA==:")
		}), ""},
		"HSIG-7 two, ours not labelled": {func(d *draft) {
			d.label = "ours"
			after(func(h http.Header) { h.Add("Signature-Input", `sig=("@method")`); h.Add("Signature", "sig=:AA==:") })(d)
		}, "malformed HSIG-7"},
		"HSIG-7 two of our tag": {after(func(h http.Header) {
			h.Add("Signature-Input", `sig=("@method");tag="wimse-workload-to-workload"`)
			h.Add("Signature", "sig=:AA==:")
		}), "malformed HSIG-7"},
		"HSIG-7 label twice":       {after(func(h http.Header) { h.Add("Signature-Input", h.Get("Signature-Input")) }), "malformed HSIG-7"},
		"HSIG-7 no signature":      {after(func(h http.Header) { h.Del("Signature") }), "missing HSIG-7"},
		"HSIG-7 label differs":     {after(func(h http.Header) { h.Set("Signature", "w"+h.Get("Signature")) }), "malformed HSIG-7"},
		"HSIG-7 signature is text": {after(func(h http.Header) { h.Set("Signature", `wimse="x"`) }), "malformed HSIG-7"},
		"HSIG-7 signature is list": {after(func(h http.Header) { h.Set("Signature", `wimse=()`) }), "malformed HSIG-7"},
		"HSIG-7 signature broken":  {after(func(h http.Header) { h.Set("Signature", `wimse=:A`) }), "malformed HSIG-7"},
		"HSIG-7 input is no list":  {after(func(h http.Header) { h.Set("Signature-Input", `wimse=1;tag="wimse-workload-to-workload"`) }), "malformed HSIG-7"},
		"HSIG-8 token first": {func(d *draft) {
			d.header.Set("Workload-Identity-Token", sign(tokenHeader, basePayload(), other))
			d.key = other
		}, "signature WIT-1"},
		"an unknown parameter": {add(`acme=?0;b=tok/en;c=-5`), ""},
		"other method":         {after(func(h http.Header) { h.Set("X", "y") }), ""},
	} {
		d := goodDraft(name)
		c.edit(d)
		rc := newReceiver(t)
		got, status := rc.send(t, d.request())
		assert.Equal(t, c.want, got, name)
		if c.want != "" {
			assert.Equal(t, http.StatusBadRequest, status, name)
			assert.Zero(t, rc.called, "HSIG-8: nothing is processed before all is valid")
			continue
		}
		assert.Equal(t, d.body, rc.body, "the handler can read the body")
		assert.Equal(t, webID, rc.proof.ID().String())
		assert.True(t, rc.proof.Covers("workload-identity-token"))
		assert.Equal(t, slices.Contains(d.components, `"x-more"`), rc.proof.Covers("X-More"))
		assert.False(t, rc.proof.Covers("@method"))
		got, _ = rc.send(t, d.request())
		assert.Equal(t, "replay HSIG-9", got, name)
	}

	// Another method, target or body than what was signed.
	for name, edit := range map[string]func(r *http.Request){
		"method": func(r *http.Request) { r.Method = "PUT" },
		"target": func(r *http.Request) { r.RequestURI = "/query?x=2" },
		"path":   func(r *http.Request) { r.RequestURI = "/other?x=1" },
	} {
		r := goodDraft(name).request()
		edit(r)
		got, _ := newReceiver(t).send(t, r)
		assert.Equal(t, "signature HSIG-6", got, name)
	}
	r := goodDraft("body").request()
	r.Body = io.NopCloser(strings.NewReader("other"))
	got, _ := newReceiver(t).send(t, r)
	assert.Equal(t, "binding HSIG-3", got)
	r = goodDraft("broken body").request()
	r.Body = io.NopCloser(errorReader{errors.New("the connection is gone")})
	got, _ = newReceiver(t).send(t, r)
	assert.Equal(t, "malformed HSIG-3", got)

	// The same nonce of the same holder is used up, whatever else the message is; with another token it is
	// another one's.
	rc := newReceiver(t)
	got, _ = rc.send(t, goodDraft("n").request())
	assert.Empty(t, got)
	again := goodDraft("n")
	again.target = "/query?x=2"
	got, _ = rc.send(t, again.request())
	assert.Equal(t, "replay HSIG-9", got)
	second := goodDraft("n")
	second.header.Set("Workload-Identity-Token", sign(tokenHeader, claims(webSubject, tokenEnd, `"x":1`, goodCNF()), wit1))
	got, _ = rc.send(t, second.request())
	assert.Empty(t, got)

	// HSIG-4 with leeway.
	late := goodDraft("late")
	late.params = strings.Replace(late.params, "created=1767225600;expires=1767225660", "created=1767225659;expires=1767225599", 1)
	rc = newReceiver(t, func(o *witsvid.ValidatorOptions) { o.Leeway = nil })
	got, _ = rc.send(t, late.request())
	assert.Empty(t, got, "both ends within the leeway")
}

// A client that repeats a request and holds its body back until its nonce is forgotten is refused.
func TestReplayWithSlowBody(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-9")
	at := now
	rc := newReceiver(t, func(o *witsvid.ValidatorOptions) { o.Now = func() time.Time { return time.Unix(int64(at), 0) } })
	got, _ := rc.send(t, goodDraft("slow").request())
	require.Empty(t, got)
	r := goodDraft("slow").request()
	body := strings.NewReader("hello")
	r.Body = io.NopCloser(readerFunc(func(b []byte) (int, error) {
		if at == now {
			at += 200
			other := goodDraft("other")
			other.params = strings.Replace(other.params, fmt.Sprintf("created=%d;expires=%d", now, now+60), fmt.Sprintf("created=%d;expires=%d", at, at+60), 1)
			got, _ := rc.send(t, other.request())
			assert.Empty(t, got)
		}
		return body.Read(b)
	}))
	got, _ = rc.send(t, r)
	assert.Equal(t, "replay HSIG-9", got)
}

// The body of a client that is refused is not read, nor one whose Content-Length is too large.
func TestBodyIsNotRead(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]string{"spiffe://example.org/else": "denied 403", webID: "too large HSIG-3 413"} {
		v, err := witsvid.NewValidator(wit1Bundle(t), spiffe.AllowIDs(spiffe.MustParseID(id)), atNow())
		require.NoError(t, err)
		rc := &receiver{logs: &logged{}}
		rc.wrap, err = witsvid.Middleware(v, []string{"https://db.example.org"}, &witsvid.MiddlewareOptions{TLSTerminated: true, MaxBody: 3, Logger: rc.logs.logger()})
		require.NoError(t, err)
		r := goodDraft("denied").request()
		r.Body = io.NopCloser(readerFunc(func([]byte) (int, error) {
			assert.Fail(t, "read")
			return 0, io.EOF
		}))
		got, status := rc.send(t, r)
		assert.Equal(t, want, fmt.Sprint(got, " ", status))
	}
}

// What a client of ours signs.
func TestSignRequest(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-1", "HSIG-2", "HSIG-3", "HSIG-4", "HSIG-5", "HSIG-6", "HSIG-7")
	s, err := witsvid.NewSVID(baseToken(), wk)
	require.NoError(t, err)
	p, err := witsvid.NewProver(s, &witsvid.ProverOptions{Now: atNow().Now, Lifetime: 30 * time.Second})
	require.NoError(t, err)
	var got *http.Request
	tr, err := witsvid.NewTransport(p, &witsvid.TransportOptions{SignMessages: true, Tokens: []string{"X-User"}, Base: roundTripper(func(r *http.Request) (*http.Response, error) {
		got = r
		return nil, errors.New("captured")
	})})
	require.NoError(t, err)
	r := request(t, "POST", vectorURL, "hello", "Content-Type", "text/plain", "Authorization", "Bearer a", "Txn-Token", "t", "X-User", "u", "X-Free", "f")
	_, err = tr.RoundTrip(r)
	require.EqualError(t, err, "captured")
	input := got.Header.Get("Signature-Input")
	nonce := strings.Split(strings.Split(input, `nonce="`)[1], `"`)[0]
	bits, err := base64.RawURLEncoding.DecodeString(nonce)
	require.NoError(t, err)
	assert.Len(t, bits, 16)
	assert.Equal(t, `wimse=("@method" "@request-target" "workload-identity-token" "txn-token" "authorization" "content-digest" "content-type" "x-user");`+
		`created=1767225600;expires=1767225630;nonce="`+nonce+`";tag="wimse-workload-to-workload";wimse-aud="https://db.example.org/query"`, input)
	assert.Equal(t, contentDigest("hello"), got.Header.Get("Content-Digest"))
	assert.EqualValues(t, 5, got.ContentLength)
	body, err := got.GetBody()
	require.NoError(t, err)
	data, err := io.ReadAll(body)
	require.NoError(t, err)
	assert.Equal(t, "hello", string(data))
	assert.NotContains(t, got.Header, headerProof)
	assert.NotContains(t, r.Header, "Signature")

	sent := &closing{Reader: strings.NewReader("hello")}
	r = request(t, "POST", vectorURL, "")
	r.Body = sent
	_, err = tr.RoundTrip(r)
	require.EqualError(t, err, "captured")
	assert.True(t, sent.closed)

	_, err = tr.RoundTrip(request(t, "GET", vectorURL, "", "Signature", "x=:AA==:"))
	require.ErrorContains(t, err, "the message has a signature already")
	r = request(t, "GET", vectorURL, "")
	r.Header["X-User"] = []string{"a\r\nb"}
	_, err = tr.RoundTrip(r)
	require.ErrorContains(t, err, `the component "x-user" has a line break`)

	for aud, want := range map[string]string{"é": "not printable ASCII", "a?b": "query or a fragment"} {
		tr, err := witsvid.NewTransport(p, &witsvid.TransportOptions{SignMessages: true, Audience: func(*http.Request) string { return aud }})
		require.NoError(t, err)
		_, err = tr.RoundTrip(request(t, "GET", vectorURL, ""))
		require.ErrorContains(t, err, want)
	}
}

// signedPair is a pair whose client demands signed responses of /db.
func signedPair(t *testing.T, handler http.HandlerFunc, edit ...func(*pairOptions)) (*pair, *http.Client) {
	t.Helper()
	p := newPair(t, handler, append([]func(*pairOptions){func(o *pairOptions) { o.signs = true }}, edit...)...)
	servers, err := witsvid.NewValidator(bundleOf(t, p.issuer), spiffe.AllowIDs(p.db.ID()), nil)
	require.NoError(t, err)
	return p, p.client(t, signing, func(o *witsvid.TransportOptions) { o.Responses = servers })
}

func TestSignedResponses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-10")
	for _, version := range []int{1, 2} {
		t.Run(fmt.Sprintf("HTTP/%d", version), func(t *testing.T) {
			t.Parallel()
			p, c := signedPair(t, func(w http.ResponseWriter, r *http.Request) {
				status, err := strconv.Atoi(r.URL.Query().Get("status"))
				if err != nil {
					panic(err)
				}
				if typ := r.URL.Query().Get("type"); typ != "" {
					w.Header().Set("Content-Type", typ)
				}
				w.Header().Set("Content-Digest", "sha-256=:AAAA:") // not the handler's to say
				w.Header().Add("X-Two", "1")
				w.Header().Add("X-Two", "2")
				w.WriteHeader(http.StatusEarlyHints)
				w.WriteHeader(status)
				w.Header().Set("X-Late", "never sent")
				if status != http.StatusNoContent && status != http.StatusNotModified {
					fmt.Fprint(w, r.URL.Query().Get("body"))
				}
			}, func(o *pairOptions) { o.http1 = version == 1 })
			for _, method := range []string{"GET", "POST", "HEAD"} {
				for _, query := range []string{
					"status=200&body=hello", "status=200", "status=404&body=no", "status=201&type=application/json&body={}", "status=204", "status=304", "status=500",
					"status=304&type=text/x", "status=204&type=text/x",
				} {
					resp, err := c.Do(request(t, method, p.origin+"/q?"+query, ""))
					require.NoError(t, err, "%s %s: %v", method, query, p.logs.take())
					body, err := io.ReadAll(resp.Body)
					require.NoError(t, err)
					require.NoError(t, resp.Body.Close())
					want := resp.Request.URL.Query().Get("body")
					if method == "HEAD" {
						assert.EqualValues(t, len(want), max(resp.ContentLength, 0))
						want = ""
					}
					assert.Equal(t, want, string(body))
					assert.Equal(t, []string{"1", "2"}, resp.Header["X-Two"])
					assert.Empty(t, resp.Header.Get("X-Late"))
					assert.Equal(t, want != "", resp.Header.Get("Content-Digest") != "")
					assert.Empty(t, resp.Request.Header.Get(headerToken), "the response does not show the token")
					proof, ok := witsvid.FromResponse(resp)
					require.True(t, ok)
					assert.Equal(t, p.db.ID(), proof.ID())
					_, ok = witsvid.FromResponse(&http.Response{Request: resp.Request})
					assert.False(t, ok, "another response to a request of that context")
					_, ok = witsvid.FromContext(resp.Request.Context())
					assert.False(t, ok)
					if _, typed := resp.Header["Content-Type"]; typed {
						assert.True(t, proof.Covers("content-type"))
					}
					if typ := resp.Request.URL.Query().Get("type"); typ != "" && resp.StatusCode != http.StatusNotModified {
						assert.Equal(t, typ, resp.Header.Get("Content-Type"))
					} else if want != "" {
						assert.Equal(t, "text/plain; charset=utf-8", resp.Header.Get("Content-Type"), "as net/http does")
					}
				}
			}
		})
	}
	_, ok := witsvid.FromResponse(nil)
	assert.False(t, ok)
	_, ok = witsvid.FromResponse(&http.Response{})
	assert.False(t, ok)
}

// What a handler takes back of the header that was set around it is gone, and so is what it would be signed with.
func TestSignedResponseHeader(t *testing.T) {
	t.Parallel()
	p, c := signedPair(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Del("Content-Type")
		w.Header().Del("X-Gone")
		w.WriteHeader(http.StatusNoContent)
	}, func(o *pairOptions) {
		o.around = func(inner http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "text/x")
				w.Header().Set("X-Gone", "1")
				w.Header().Set("X-Stays", "1")
				inner.ServeHTTP(w, r)
			})
		}
	})
	resp, err := c.Do(request(t, "GET", p.url, ""))
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.NotContains(t, resp.Header, "Content-Type")
	assert.NotContains(t, resp.Header, "X-Gone")
	assert.Contains(t, resp.Header, "X-Stays")
}

// A handler may take longer than the token of the server lasts, whose key then signs nothing more.
func TestResponseAfterTheEnd(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WIT-51")
	var ahead atomic.Int64
	handler := func(http.ResponseWriter, *http.Request) { ahead.Store(int64(2 * time.Hour)) }
	issuer := newIssuer(t, nil)
	db, err := issuer.IssueSVID(spiffe.MustParseID("spiffe://example.org/db"))
	require.NoError(t, err)
	prover, err := witsvid.NewProver(db, &witsvid.ProverOptions{Now: func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }})
	require.NoError(t, err)
	p := newPair(t, handler, func(o *pairOptions) { o.middleware.Prover = prover })
	c := p.client(t, signing, func(o *witsvid.TransportOptions) { o.Responses = newValidator(t, bundleOf(t, issuer), nil) })
	_, err = c.Do(request(t, "GET", p.url, ""))
	require.ErrorContains(t, err, "the server answered 501")
	require.ErrorContains(t, p.logs.take(), "its key is not used any more")
}

// A response that cannot be signed is an error, on both sides.
func TestUnsignedResponses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-10")
	calls := 0
	handler := func(w http.ResponseWriter, r *http.Request) {
		calls++
		if err := http.NewResponseController(w).Flush(); err != nil && r.URL.Path == "/stream" {
			http.Error(w, err.Error(), http.StatusTeapot)
			return
		}
		if _, err := io.WriteString(w, strings.Repeat("x", 2000)); err != nil && r.URL.Path != "/stream" {
			_, _ = io.WriteString(w, "more")
		}
	}
	p, c := signedPair(t, handler, func(o *pairOptions) { o.middleware.MaxBody = 1000 })
	_, err := c.Do(request(t, "GET", p.url, ""))
	require.ErrorContains(t, err, "the server answered 501: witsvid: response: missing: Workload-Identity-Token is there 0 times")
	require.ErrorContains(t, p.logs.take(), "the body has more than 1000 bytes")
	resp, err := c.Do(request(t, "GET", p.origin+"/stream", ""))
	require.NoError(t, err)
	assert.Equal(t, http.StatusTeapot, resp.StatusCode, "a handler that streams is told that it cannot")
	require.NoError(t, resp.Body.Close())

	// No Prover, or none that can: the handler does nothing in vain.
	calls = 0
	none := newPair(t, handler)
	servers := newValidator(t, bundleOf(t, none.issuer), nil)
	c = none.client(t, signing, func(o *witsvid.TransportOptions) { o.Responses = servers })
	_, err = c.Do(request(t, "GET", none.url, ""))
	require.ErrorContains(t, err, "the server answered 501")
	require.ErrorContains(t, none.logs.take(), "there is no Prover")
	late := newPair(t, handler, func(o *pairOptions) {
		o.middleware.Prover = proverOf(t, svidSource{err: errors.New("not ready")})
	})
	c = late.client(t, signing, func(o *witsvid.TransportOptions) { o.Responses = servers })
	_, err = c.Do(request(t, "GET", late.url, ""))
	require.ErrorContains(t, err, "the server answered 501")
	require.EqualError(t, late.logs.take(), "not ready")
	assert.Zero(t, calls)

	// A refusal is not signed, and the client says so.
	denied, err := witsvid.NewTransport(proverOf(t, p.db), &witsvid.TransportOptions{
		SignMessages: true, Responses: newValidator(t, bundleOf(t, p.issuer), nil), Base: p.server.Client().Transport,
	})
	require.NoError(t, err)
	_, err = denied.RoundTrip(request(t, "GET", p.url, ""))
	require.ErrorContains(t, err, "the server answered 403: witsvid: response: missing")
	assert.Equal(t, "denied", outcome(t, p.logs.take()))

	// A client that does not demand a signature gets none, and does not check one.
	resp, err = p.client(t, signing).Do(request(t, "GET", p.url, ""))
	require.NoError(t, err)
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	require.NoError(t, resp.Body.Close())
	assert.Empty(t, resp.Header.Get("Signature"))
	_, ok := witsvid.FromResponse(resp)
	assert.False(t, ok)
}

// Responses that were tampered with, or are for another request.
func TestResponsesRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "HSIG-10", "HSIG-9")
	p, _ := signedPair(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") })
	servers, err := witsvid.NewValidator(bundleOf(t, p.issuer), spiffe.AllowIDs(p.db.ID()), nil)
	require.NoError(t, err)
	base := p.server.Client().Transport
	setBody := func(resp *http.Response, s string) {
		resp.Body = io.NopCloser(strings.NewReader(s))
	}
	// answer returns the answer to a good request for url, as it came.
	answer := func(url string) func(*http.Response) {
		var kept http.Response
		c := p.client(t, signing, func(o *witsvid.TransportOptions) {
			o.Responses = servers
			o.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
				resp, err := base.RoundTrip(r)
				if err == nil {
					kept = *resp
					kept.Header = resp.Header.Clone()
				}
				return resp, err
			})
		})
		_, body := do(t, c, request(t, "GET", url, ""))
		return func(r *http.Response) {
			*r = kept
			setBody(r, body)
		}
	}
	for name, c := range map[string]struct {
		tamper func(resp *http.Response)
		want   string
	}{
		"nothing":       {func(*http.Response) {}, ""},
		"status":        {func(r *http.Response) { r.StatusCode = 201 }, "signature HSIG-6"},
		"body":          {func(r *http.Response) { setBody(r, "other") }, "binding HSIG-3"},
		"empty body":    {func(r *http.Response) { setBody(r, "") }, "binding HSIG-3"},
		"long body":     {func(r *http.Response) { setBody(r, strings.Repeat("x", 2<<20)) }, "too large HSIG-3"},
		"broken body":   {func(r *http.Response) { r.Body = io.NopCloser(errorReader{errors.New("gone")}) }, "malformed HSIG-3"},
		"type":          {func(r *http.Response) { r.Header.Set("Content-Type", "text/html") }, "signature HSIG-6"},
		"no type":       {func(r *http.Response) { r.Header.Del("Content-Type") }, "binding HSIG-2"},
		"no token":      {func(r *http.Response) { r.Header.Del(headerToken) }, "missing HSIG-10"},
		"two tokens":    {func(r *http.Response) { r.Header.Add(headerToken, p.db.Token()) }, "missing HSIG-10"},
		"other token":   {func(r *http.Response) { r.Header.Set(headerToken, p.web.Token()) }, "signature HSIG-6"},
		"foreign token": {func(r *http.Response) { r.Header.Set(headerToken, baseToken()) }, "unknown key WIT-62"},
		"no signature":  {func(r *http.Response) { r.Header.Del("Signature-Input") }, "missing HSIG-7"},
		"no status": {func(r *http.Response) {
			r.Header.Set("Signature-Input", strings.Replace(r.Header.Get("Signature-Input"), `"@status" `, "", 1))
		}, "binding HSIG-10"},
		"no method": {func(r *http.Response) {
			r.Header.Set("Signature-Input", strings.Replace(r.Header.Get("Signature-Input"), `"@method";req `, "", 1))
		}, "binding HSIG-10"},
		"own method": {func(r *http.Response) {
			r.Header.Set("Signature-Input", strings.Replace(r.Header.Get("Signature-Input"), `"@method";req`, `"@method"`, 1))
		}, "binding HSIG-10"},
		"no nonce": {func(r *http.Response) {
			r.Header.Set("Signature-Input", strings.Replace(r.Header.Get("Signature-Input"), `wimse-req-nonce`, "other", 1))
		}, "claim HSIG-10"},
		"keyid":         {func(r *http.Response) { r.Header.Set("Signature-Input", r.Header.Get("Signature-Input")+`;keyid="x"`) }, "claim HSIG-6"},
		"other target":  {answer(p.origin + "/other"), "signature HSIG-6"},
		"other request": {answer(p.url), "binding HSIG-10"},
	} {
		capture := p.client(t, signing, func(o *witsvid.TransportOptions) {
			o.Responses = servers
			o.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
				resp, err := base.RoundTrip(r)
				if err != nil {
					return nil, err
				}
				c.tamper(resp)
				return resp, nil
			})
		})
		resp, err := capture.Do(request(t, "GET", p.url, ""))
		assert.Equal(t, c.want, outcome(t, err), "%s: %v", name, err)
		if err == nil {
			require.NoError(t, resp.Body.Close())
			continue
		}
		require.ErrorContains(t, err, "the server answered ")
	}

	onlyWeb := p.client(t, signing, func(o *witsvid.TransportOptions) { o.Responses = p.validator })
	_, err = onlyWeb.Do(request(t, "GET", p.url, ""))
	assert.Equal(t, "denied", outcome(t, err), "a server that is not allowed")
	require.ErrorIs(t, err, spiffe.ErrDenied)
}

// net/http asks for gzip by itself and hides the answer: what is signed must be what is received.
func TestSignedResponseCompression(t *testing.T) {
	t.Parallel()
	p, c := signedPair(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept-Encoding") != "gzip" {
			fmt.Fprint(w, "plain "+r.Header.Get("Accept-Encoding"))
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		fmt.Fprint(z, "packed")
		if err := z.Close(); err != nil {
			panic(err)
		}
	})
	_, body := do(t, c, request(t, "GET", p.url, ""))
	assert.Equal(t, "plain identity", body)
	resp, err := c.Do(request(t, "GET", p.url, "", "Accept-Encoding", "gzip"))
	require.NoError(t, err)
	z, err := gzip.NewReader(resp.Body)
	require.NoError(t, err)
	data, err := io.ReadAll(z)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, "packed", string(data))
}
