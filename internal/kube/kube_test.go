package kube_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

const secrets = "/api/v1/namespaces/default/secrets"

type object struct {
	Metadata kube.ObjectMeta   `json:"metadata"`
	Type     string            `json:"type,omitempty"`
	Data     map[string][]byte `json:"data,omitempty"`
}

func clientOf(t *testing.T, s *kubetest.Server) *kube.Client {
	t.Helper()
	c := must.Get(kube.New(kube.Options{URL: s.URL(), Client: s.Client()}))(t)
	return c
}

// asks starts a server with one handler for everything and returns a client for it.
func asks(t *testing.T, h http.HandlerFunc) *kube.Client {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	c := must.Get(kube.New(kube.Options{URL: s.URL, Client: s.Client()}))(t)
	return c
}

func answer(w http.ResponseWriter, code int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, body)
}

// TestObjects takes an object through its life.
func TestObjects(t *testing.T) {
	t.Parallel()
	c, ctx := clientOf(t, kubetest.Start(t)), t.Context()
	in := object{Metadata: kube.ObjectMeta{Name: "a"}, Data: map[string][]byte{"k": {0, 1, 2}}}
	one := kube.Path("api", "v1", "namespaces", "default", "secrets", "a")

	var none, made, read, changed object
	err := c.Get(ctx, one, nil, &none)
	assert.True(t, kube.NotFound(err), err)
	assert.EqualError(t, err, `kube: GET `+one+`: 404 NotFound: secrets "a" not found`)
	require.NoError(t, c.Create(ctx, secrets, in, &made))
	assert.NotEmpty(t, made.Metadata.UID)
	assert.NotEmpty(t, made.Metadata.ResourceVersion)
	assert.NotNil(t, made.Metadata.CreationTimestamp)
	require.NoError(t, c.Get(ctx, one, nil, &read))
	assert.Equal(t, made, read)
	assert.Equal(t, in.Data, read.Data)

	err = c.Create(ctx, secrets, in, nil)
	assert.True(t, kube.AlreadyExists(err), err)
	assert.False(t, kube.Conflict(err))
	assert.False(t, kube.MayHaveLanded(err))

	changed = read
	changed.Data = map[string][]byte{"k": {3}}
	require.NoError(t, c.Update(ctx, one, changed, &changed))
	assert.NotEqual(t, read.Metadata.ResourceVersion, changed.Metadata.ResourceVersion)
	err = c.Update(ctx, one, read, nil)
	assert.True(t, kube.Conflict(err), err)
	assert.False(t, kube.AlreadyExists(err))
	assert.False(t, kube.MayHaveLanded(err))

	require.NoError(t, c.Patch(ctx, one, object{Data: map[string][]byte{"l": {4}}}))
	require.NoError(t, c.Get(ctx, one, nil, &changed))
	assert.Equal(t, map[string][]byte{"k": {3}, "l": {4}}, changed.Data)

	require.NoError(t, c.Delete(ctx, one))
	assert.True(t, kube.NotFound(c.Delete(ctx, one)))
	assert.True(t, kube.NotFound(c.Update(ctx, one, object{Metadata: kube.ObjectMeta{Name: "a"}}, nil)))
}

// TestPathsAndNames shows that no segment of a path can become two, or lead elsewhere.
func TestPathsAndNames(t *testing.T) {
	t.Parallel()
	var asked []string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.EscapedPath())
		answer(w, http.StatusOK, `{}`)
	}))
	t.Cleanup(s.Close)
	c := must.Get(kube.New(kube.Options{URL: s.URL + "/k8s/clusters/c-1/", Client: s.Client()}))(t)

	for _, p := range []string{kube.Path("api", "v1"), kube.Path("a/b", "c?d", "e%2ff", "g#h"), "/x"} {
		require.NoError(t, c.Get(t.Context(), p, nil, nil), p)
	}
	assert.Equal(t, []string{"/k8s/clusters/c-1/api/v1", "/k8s/clusters/c-1/a%2Fb/c%3Fd/e%252ff/g%23h", "/k8s/clusters/c-1/x"}, asked)

	for _, p := range []string{
		"", "api", "/", "//x", "/api/", "/api//v1", "/./x", "/x/..", "/../x", "/%2e%2e/x", "/x/%2E", "/%zz", "/x\x00", "/x y\n",
		"/x?y/..", kube.Path(), kube.Path("a", "", "b"), kube.Path(".."),
	} {
		err := c.Get(t.Context(), p, nil, nil)
		assert.Error(t, err, "%q", p)
		assert.False(t, kube.MayHaveLanded(err), "%q", p)
	}
	for _, p := range asked[3:] {
		assert.NotContains(t, p, "..", "what was sent is below the URL")
	}

	for _, name := range []string{"a", "istio-ca-secret", "a.b-c.d1", "1", strings.Repeat("a", 63), strings.Repeat("ab.", 84) + "a"} {
		assert.True(t, kube.ValidName(name), name)
		assert.Equal(t, len(name) <= 63 && !strings.Contains(name, "."), kube.ValidLabel(name), name)
	}
	for _, name := range []string{"", ".", "..", "a.", ".a", "a..b", "-a", "a-", "a-.b", "A", "a_b", "a/b", "ä", "a b", "a\x00", strings.Repeat("a.", 127)} {
		assert.False(t, kube.ValidName(name), name)
		assert.False(t, kube.ValidLabel(name), name)
	}
	assert.False(t, kube.ValidLabel(strings.Repeat("a", 64)))
}

// TestOptions has options that are refused, by what the error says.
func TestOptions(t *testing.T) {
	t.Parallel()
	own := &http.Client{}
	for _, c := range []struct {
		want string
		o    kube.Options
	}{
		{"not in a cluster", kube.Options{}},
		{"not in a cluster", kube.Options{Client: own}},
		{"not a URL", kube.Options{URL: "https://a b", Client: own}},
		{"not a URL", kube.Options{URL: "https://user:hunter2@a\x7f", Client: own}},
		{"a user or a password", kube.Options{URL: "https://user:hunter2@kubernetes", Client: own}},
		{"a user or a password", kube.Options{URL: "https://user@kubernetes", Client: own}},
		{"without a host", kube.Options{URL: "https:kubernetes", Client: own}},
		{"without a host", kube.Options{URL: "https:///x", Client: own}},
		{"without a host", kube.Options{URL: "kubernetes", Client: own}},
		{"without a host", kube.Options{URL: "https://:6443", Client: own}},
		{"a query or a fragment", kube.Options{URL: "https://kubernetes?x=hunter2", Client: own}},
		{"a query or a fragment", kube.Options{URL: "https://kubernetes?", Client: own}},
		{"a query or a fragment", kube.Options{URL: "https://kubernetes#hunter2", Client: own}},
		{"http is for loopback addresses", kube.Options{URL: "http://kubernetes", Client: own}},
		{"http is for loopback addresses", kube.Options{URL: "http://10.96.0.1", Client: own}},
		{"http is for loopback addresses", kube.Options{URL: "http://127.0.0.1.example.org", Client: own}},
		{"want an https URL", kube.Options{URL: "ftp://kubernetes", Client: own}},
		{"not sent without TLS", kube.Options{URL: "http://127.0.0.1:8001"}},
	} {
		_, err := kube.Machine{}.New(c.o)
		assert.ErrorContains(t, err, c.want, "%q", c.o.URL)
		assert.NotContains(t, fmt.Sprint(err), "hunter2")
	}
	for _, u := range []string{"https://kubernetes.default.svc", "https://[fd00::1]:6443/", "http://[::1]:8001", "http://localhost:8001", "https://host/k8s/clusters/c-1"} {
		assert.NoError(t, must.Err(kube.Machine{}.New(kube.Options{URL: u, Client: own})), u)
	}
	_, err := kube.New(kube.Options{URL: "https://kubernetes.default.svc"}) // opens nothing yet
	assert.NoError(t, err)
}

// TestBadAnswers has servers that answer badly, by what the error says.
func TestBadAnswers(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a", kube.MaxAnswer)
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	require.NoError(t, must.Err(io.WriteString(z, `{"x":"`+long+`"}`)))
	require.NoError(t, z.Close())
	require.Less(t, zipped.Len(), kube.MaxAnswer/100)
	for want, h := range map[string]http.HandlerFunc{
		"is not application/json": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, "<html>")
		},
		"larger than 4 MiB": func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `{"x":"`+long+`"}`) },
		"answer is larger than 4 MiB": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(zipped.Bytes())
		},
		"syntax error at byte 6":                            func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `{"a":}`) },
		"syntax error at byte 1":                            func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `[`) },
		"syntax error at byte 3":                            func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `{}{}`) },
		`the member "type" has a value that cannot be read`: func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `{"type":7}`) },
		" a value that cannot be read":                      func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, `{"data":{"k":"hunter2!"}}`) },
		"unexpected EOF": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "9")
			answer(w, 200, `{`)
		},
		"EOF": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"307 Temporary Redirect: redirects are refused": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "/elsewhere", http.StatusTemporaryRedirect)
		},
		"301 Moved Permanently: redirects are refused": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "https://attacker.test/", http.StatusMovedPermanently)
		},
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			c := asks(t, h)
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // ten seconds are few on a busy machine
			defer cancel()
			for method, do := range map[string]func() error{
				"GET":  func() error { return c.Get(ctx, secrets, nil, &object{}) },
				"POST": func() error { return c.Create(ctx, secrets, object{}, &object{}) },
				"PUT":  func() error { return c.Update(ctx, secrets, object{}, &object{}) },
			} {
				err := do()
				require.ErrorContains(t, err, "kube: "+method+" "+secrets+": ")
				assert.ErrorContains(t, err, want)
				assert.NotContains(t, err.Error(), "hunter2")
				_, status := errors.AsType[*kube.StatusError](err)
				assert.Equal(t, !status, kube.MayHaveLanded(err), "a server that said nothing clear may have done it: %v", err)
			}
		})
	}
}

// TestStatusErrors has refusals, and what is made of them.
func TestStatusErrors(t *testing.T) {
	t.Parallel()
	type is struct{ notFound, forbidden, exists, conflict, gone, landed bool }
	for _, c := range []struct {
		code         int
		header, body string
		want         kube.StatusError
		is           is
	}{
		{404, "", `{"kind":"Status","reason":"NotFound","message":"gone fishing","code":404}`, kube.StatusError{Code: 404,
			Reason: "NotFound", Message: "gone fishing"}, is{notFound: true}},
		{404, "", `{"kind":"Status","message":"no such path"}`, kube.StatusError{Code: 404, Message: "no such path"}, is{}},
		{404, "text", `404 page not found`, kube.StatusError{Code: 404}, is{}},
		{403, "", `{"kind":"Status","reason":"Forbidden"}`, kube.StatusError{Code: 403, Reason: "Forbidden"}, is{forbidden: true}},
		{409, "", `{"kind":"Status","reason":"AlreadyExists"}`, kube.StatusError{Code: 409, Reason: "AlreadyExists"}, is{exists: true}},
		{409, "", `{"kind":"Status","reason":"Conflict"}`, kube.StatusError{Code: 409, Reason: "Conflict"}, is{conflict: true}},
		{409, "", `not JSON`, kube.StatusError{Code: 409}, is{conflict: true}},
		{410, "", `{"kind":"Status","reason":"Expired"}`, kube.StatusError{Code: 410, Reason: "Expired"}, is{gone: true}},
		{410, "text", ``, kube.StatusError{Code: 410}, is{gone: true}},
		{422, "", `{"kind":"Status","reason":"Invalid","code":200}`, kube.StatusError{Code: 422, Reason: "Invalid"}, is{}},
		{429, "7", `{"kind":"Status","reason":"TooManyRequests","details":{"retryAfterSeconds":3}}`, kube.StatusError{Code: 429,
			Reason: "TooManyRequests", RetryAfter: 7 * time.Second}, is{}},
		{429, "", `{"kind":"Status","details":{"retryAfterSeconds":3}}`, kube.StatusError{Code: 429, RetryAfter: 3 * time.Second}, is{}},
		{429, "-1", `{"kind":"Status"}`, kube.StatusError{Code: 429}, is{}},
		{429, "soon", `{"kind":"Pod","message":"x","reason":"x"}`, kube.StatusError{Code: 429}, is{}},
		{503, "999999999999", `[]`, kube.StatusError{Code: 503, RetryAfter: time.Hour}, is{landed: true}},
		{503, "99999999999999999999", `[]`, kube.StatusError{Code: 503, RetryAfter: time.Hour}, is{landed: true}},
		{503, "Fri, 31 Dec 2199 23:59:59 GMT", `{}`, kube.StatusError{Code: 503, RetryAfter: time.Hour}, is{landed: true}},
		{503, "Fri, 31 Dec 1999 23:59:59 GMT", `{}`, kube.StatusError{Code: 503}, is{landed: true}},
		{500, "", `{"kind":"Status","details":7,"message":"x"}`, kube.StatusError{Code: 500}, is{landed: true}},
		{504, "", `{"kind":"Status","reason":"Timeout"}`, kube.StatusError{Code: 504, Reason: "Timeout"}, is{landed: true}},
		{408, "", `{"kind":"Status"}`, kube.StatusError{Code: 408}, is{landed: true}},
		{401, "", `{"kind":"Status","message":"` + strings.Repeat("ä ", 400) + `"}`, kube.StatusError{Code: 401, Message: strings.Repeat("ä ", 166) + "ä…"}, is{}},
		{400, "", "{\"kind\":\"Status\",\"message\":\"a\\u001b[2J\\nb\\u202e\xff\",\"reason\":\"x\\ny\"}", kube.StatusError{Code: 400, Reason: "x y", Message: "a [2J b \uFFFD"}, is{}},
	} {
		k := asks(t, func(w http.ResponseWriter, _ *http.Request) {
			if c.header == "text" {
				w.Header().Set("Content-Type", "text/plain")
				w.WriteHeader(c.code)
				_, _ = io.WriteString(w, c.body)
				return
			}
			w.Header().Set("Retry-After", c.header)
			answer(w, c.code, c.body)
		})
		err := k.Get(t.Context(), "/x", nil, &object{})
		e, ok := errors.AsType[*kube.StatusError](err)
		require.True(t, ok, "%v", err)
		assert.Equal(t, c.want, *e, c.body)
		assert.Equal(t, c.is, is{kube.NotFound(err), kube.Forbidden(err), kube.AlreadyExists(err), kube.Conflict(err), kube.Gone(err), kube.MayHaveLanded(err)}, c.body)
	}
	for _, err := range []error{nil, errors.New("x"), context.Canceled} {
		assert.False(t, kube.NotFound(err) || kube.Forbidden(err) || kube.AlreadyExists(err) || kube.Conflict(err) || kube.Gone(err) || kube.MayHaveLanded(err))
	}
}

// TestNothingSentIsQuoted has a server that quotes what it was sent, as admission webhooks do.
func TestNothingSentIsQuoted(t *testing.T) {
	t.Parallel()
	jwt := "eyJhbGciOiJFUzI1NiJ9." + strings.Repeat("c2VjcmV0", 20) + "." + strings.Repeat("x", 86)
	const opaque = "abcdef.0123456789abcdef"
	const name = "a-name-that-is-long-enough-to-look-odd"
	for _, secret := range []string{jwt, opaque, strings.Repeat("k", 64)} {
		body := map[string]any{"metadata": map[string]any{"name": name}, "spec": map[string]any{"token": secret},
			"data": map[string][]byte{"k": []byte("-----BEGIN\n" + strings.Repeat("s3cr3t", 30) + "\n" + strings.Repeat("e4d", 6) + "\n-----END"), "l": []byte("l1ttl3-s3cr3t-v4lu3")}}
		sent := must.Get(json.Marshal(body))(t)
		for _, format := range []string{"%s", "bad token %q.", "denied: %s: at ", "token=%s", "(%s)", "%s"} {
			status, err := json.Marshal(map[string]any{"kind": "Status", "message": fmt.Sprintf(format,
				secret) + " of " + name + " in " + string(sent) + " or " + strings.Repeat("e4d", 6) + " or l1ttl3-s3cr3t-v4lu3"})
			require.NoError(t, err)
			c := asks(t, func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusBadRequest, string(status)) })
			err = c.Create(t.Context(), "/apis/authentication.k8s.io/v1/tokenreviews", body, nil)
			require.ErrorContains(t, err, "400")
			for verb := range strings.FieldsSeq("%v %+v %#v %s %q") {
				text := fmt.Sprintf(verb, err)
				assert.NotContains(t, text, secret)
				assert.NotContains(t, text, "czNjcjN0", "base64 of the data")
				assert.NotContains(t, text, "e4de4d")
				assert.NotContains(t, text, "l1ttl3")
				assert.NotContains(t, text, "bDF0dGwz", "base64 of the data")
			}
			assert.ErrorContains(t, err, name, "the name of the object stays")
		}
	}
	for _, part := range []string{jwt, jwt[:60]} {
		e := kube.ParseStatus(401, []byte(`{"kind":"Status","reason":"`+part+`"}`), ``, part)
		assert.Equal(t, "[redacted]", e.Reason)
	}
	c := asks(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if assert.NoError(t, err) {
			_, _ = io.WriteString(conn, jwt+"\r\n\r\n") // what is no HTTP, net/http quotes
			conn.Close()
		}
	})
	err := c.Create(t.Context(), "/apis/authentication.k8s.io/v1/tokenreviews", map[string]any{"spec": map[string]any{"token": jwt}}, nil)
	require.ErrorContains(t, err, "malformed HTTP response")
	assert.NotContains(t, err.Error(), jwt[:40])
	e := kube.ParseStatus(403, []byte(`{"kind":"Status","message":"User \"system:serviceaccount:istio-system:istiod\" cannot get resource \"secrets\" in API group \"\" in the namespace \"istio-system\""}`),
		`{}`, opaque)
	assert.Equal(t, `User "system:serviceaccount:istio-system:istiod" cannot get resource "secrets" in API group "" in the namespace "istio-system"`, e.Message)
	e = kube.ParseStatus(401, []byte(`{"kind":"Status","message":"who is `+opaque+`?"}`), ``, opaque)
	assert.Equal(t, `who is [redacted]?`, e.Message)
	e = kube.ParseStatus(401, []byte(`{"kind":"Status","message":"we have `+strings.Repeat("s", 63)+`, you sent `+strings.Repeat("s", 64)+`."}`), ``, "")
	assert.Equal(t, `we have `+strings.Repeat("s", 63)+`, you sent [redacted]`, e.Message, "what is too long for a label")
	for n := range len(opaque) { // a long message is cut, but not through a secret
		e = kube.ParseStatus(401, []byte(`{"kind":"Status","message":"`+strings.Repeat("a", 16<<10-n)+` `+opaque+` z"}`), ``, opaque)
		assert.NotContains(t, e.Message, opaque[:5])
	}
}

// TestRequests looks at what is sent.
func TestRequests(t *testing.T) {
	t.Parallel()
	type sent struct{ method, uri, accept, contentType, body string }
	var got []sent
	c := asks(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got = append(got, sent{r.Method, r.RequestURI, r.Header.Get("Accept"), r.Header.Get("Content-Type"), string(body)})
		assert.Equal(t, "svidkit", r.Header.Get("User-Agent"))
		assert.Empty(t, r.Header.Values("Authorization"), "that is the http.Client's")
		answer(w, 200, `{}`)
	})
	ctx := t.Context()
	require.NoError(t, c.Get(ctx, "/x", url.Values{"fieldSelector": {"spec.nodeName=a b"}}, nil))
	require.NoError(t, c.Create(ctx, "/x", map[string]int{"a": 1}, nil))
	require.NoError(t, c.Update(ctx, "/x/y", []int{}, nil))
	require.NoError(t, c.Patch(ctx, "/x/y", map[string]int{"a": 1}))
	require.NoError(t, c.Delete(ctx, "/x/y"))
	assert.Equal(t, []sent{
		{"GET", "/x?fieldSelector=spec.nodeName%3Da+b", "application/json", "", ""},
		{"POST", "/x", "application/json", "application/json", `{"a":1}`},
		{"PUT", "/x/y", "application/json", "application/json", `[]`},
		{"PATCH", "/x/y", "application/json", "application/merge-patch+json", `{"a":1}`},
		{"DELETE", "/x/y", "application/json", "", ""},
	}, got)
	err := c.Create(ctx, "/x", func() {}, nil)
	assert.ErrorContains(t, err, "encode the func()")
	assert.False(t, kube.MayHaveLanded(err))
	assert.Len(t, got, 5)
}

// TestDeadline shows that no request waits for ever, and that a change of which the answer does not
// come may have happened.
func TestDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := kubetest.StartOn(t, 1, memconn.Listen())
		c := clientOf(t, s)
		in := object{Metadata: kube.ObjectMeta{Name: "a"}}
		s.FailNext(1, kubetest.Fault{Hang: true, Landed: true}, nil)
		start := time.Now()
		err := c.Create(t.Context(), secrets, in, nil)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Equal(t, 10*time.Second, time.Since(start))
		assert.True(t, kube.MayHaveLanded(err))
		assert.True(t, kube.AlreadyExists(c.Create(t.Context(), secrets, in, nil)), "it did")

		s.FailNext(2, kubetest.Fault{Hang: true}, nil)
		start = time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		assert.ErrorIs(t, c.Get(ctx, secrets, nil, nil), context.DeadlineExceeded)
		assert.Equal(t, time.Minute, time.Since(start))

		why := errors.New("shutting down")
		ctx, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { stop(why) })
		assert.ErrorIs(t, c.Get(ctx, secrets, nil, nil), why)
	})
}

// TestNeverSent shows that a request without a connection has not changed anything.
func TestNeverSent(t *testing.T) {
	t.Parallel()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	require.NoError(t, l.Close())
	c, err := kube.New(kube.Options{URL: "http://" + l.Addr().String(), Client: &http.Client{Transport: &http.Transport{}}})
	require.NoError(t, err)
	err = c.Create(t.Context(), secrets, object{}, nil)
	require.ErrorContains(t, err, "kube: POST "+secrets+": dial tcp")
	assert.False(t, kube.MayHaveLanded(err))
}

// TestClientTimeout shows that the Timeout of an http.Client is for requests, not for watches, and
// that the caller's http.Client stays as it was.
func TestClientTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := kubetest.StartOn(t, 1, memconn.Listen())
		hc := *s.Client()
		hc.Timeout = time.Second
		c := must.Get(kube.New(kube.Options{URL: s.URL(), Client: &hc}))(t)
		assert.Nil(t, hc.CheckRedirect)
		s.FailNext(1, kubetest.Fault{Hang: true}, nil)
		start := time.Now()
		assert.ErrorIs(t, c.Get(t.Context(), secrets, nil, nil), context.DeadlineExceeded)
		assert.Equal(t, time.Second, time.Since(start))
		start = time.Now()
		for _, err := range c.Watch(t.Context(), secrets, url.Values{"timeoutSeconds": {"20"}}) {
			assert.NoError(t, err)
		}
		assert.Equal(t, 20*time.Second, time.Since(start))
	})
}

// TestPrinting shows that a Client prints its server and nothing else.
func TestPrinting(t *testing.T) {
	t.Parallel()
	c := must.Get(kube.New(kube.Options{URL: "https://kubernetes:6443", Client: &http.Client{Transport: secretive{"hunter2"}}}))(t)
	var log strings.Builder
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "client", c)
	for verb := range strings.FieldsSeq("%v %+v %#v %s") {
		log.WriteString(fmt.Sprintf(verb, c))
	}
	assert.NotContains(t, log.String(), "hunter2")
	assert.Equal(t, 5, strings.Count(log.String(), "https://kubernetes:6443"))
}

type secretive struct{ token string }

func (secretive) RoundTrip(*http.Request) (*http.Response, error) { return nil, errors.New("no") }

// FuzzStatus has hostile refusals: what comes out is short, printable and not a success.
func FuzzStatus(f *testing.F) {
	f.Add(404, []byte(`{"kind":"Status","reason":"NotFound","message":"secrets \"a\" not found","code":404}`))
	f.Add(0, []byte(`{"kind":"Status","code":410}`))
	f.Add(0, []byte(`{"kind":"Status","code":-1,"details":{"retryAfterSeconds":-9}}`))
	f.Add(500, []byte("{\"kind\":\"Status\",\"message\":\"\xff\\u0000hunter2hunter2hunter2.\"}"))
	f.Add(0, []byte(`null`))
	f.Fuzz(func(t *testing.T, code int, data []byte) {
		if code != 0 && (code < 100 || code > 999) {
			return // net/http has no such status
		}
		const token = "hunter2hunter2hunter2"
		e := kube.ParseStatus(code, data, `{"spec":{"token":"`+token+`"}}`, token)
		if code != 0 && e.Code != code || e.Code < 100 || e.Code > 999 {
			t.Errorf("code %d became %d", code, e.Code)
		}
		if len(e.Message) > 512 || len(e.Reason) > 64 || strings.ContainsAny(e.Message+e.Reason, "\x00\x1b\r\n") {
			t.Errorf("%q %q", e.Reason, e.Message)
		}
		if strings.Contains(e.Message, token) {
			t.Errorf("the token is in %q", e.Message)
		}
		if e.RetryAfter < 0 || e.RetryAfter > time.Hour {
			t.Errorf("retry after %v", e.RetryAfter)
		}
	})
}
