package jwtsvid_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// who answers with the HTTP version and the proof, as the handler knows them.
var who = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	p, ok := jwtsvid.FromContext(r.Context())
	if !ok {
		fmt.Fprintf(w, "%d none", r.ProtoMajor)
		return
	}
	fmt.Fprintf(w, "%d %s", r.ProtoMajor, p)
})

func protect(t testing.TB, v *jwtsvid.Validator, allow spiffe.PolicySource, opts *jwtsvid.MiddlewareOptions) http.Handler {
	t.Helper()
	m := must.Get(jwtsvid.Middleware(v, allow, opts))(t)
	return m(who)
}

func TestMiddleware(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-32", "AMB-19")
	m := newMaterial(t)
	good := es256(t, baseHeader, basePay)
	challenge, invalid := `Bearer realm="jwt-svid"`, `Bearer error="invalid_token"`
	var log bytes.Buffer
	var logged error
	look := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == "err" {
			logged = a.Value.Any().(error)
		}
		return a
	}
	logger := slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: look}))
	h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), spiffe.AllowMembersOf(domain), &jwtsvid.MiddlewareOptions{Logger: logger})
	for _, c := range []struct {
		name      string
		header    []string
		status    int
		challenge string
	}{
		{"good", []string{"Bearer " + good}, 200, ""},
		{"JWT-32 lower case", []string{"bearer " + good}, 200, ""},
		{"JWT-32 mixed case", []string{"bEARER " + good}, 200, ""},
		{"several spaces", []string{"Bearer   " + good}, 200, ""},
		{"none", nil, 401, challenge},
		{"no value", []string{}, 401, challenge},
		{"empty", []string{""}, 401, challenge},
		{"another scheme", []string{"Basic dXNlcjpwYXNz"}, 401, challenge},
		{"no scheme", []string{good}, 401, challenge},
		{"scheme runs on", []string{"Bearer" + good}, 401, challenge},
		{"a tab", []string{"Bearer\t" + good}, 401, challenge},
		{"nothing behind the scheme", []string{"Bearer"}, 401, invalid},
		{"spaces behind the scheme", []string{"Bearer  "}, 401, invalid},
		{"the token's case", []string{"Bearer " + strings.ToLower(good)}, 401, invalid},
		{"two tokens", []string{"Bearer " + good + " " + good}, 401, invalid},
		{"two in one line", []string{"Bearer " + good + ", Bearer " + good}, 401, invalid},
		{"two headers", []string{"Bearer " + good, "Bearer " + good}, 400, `Bearer error="invalid_request"`},
		{"two headers of which one is good", []string{"Basic x", "Bearer " + good}, 400, `Bearer error="invalid_request"`},
		{"for another audience", []string{"Bearer " + es256(t, baseHeader, strings.Replace(basePay, "db", "cache", 1))}, 401, invalid},
		{"of a domain without bundle", []string{"Bearer " + es256(t, baseHeader, strings.Replace(basePay, "example.org", "nowhere.test", 1))}, 401, invalid},
		{"not allowed", []string{"Bearer " + sign(baseHeader, strings.Replace(basePay, "example.org", "other.test", 1), "ES256", m.jwtx)},
			403, `Bearer error="insufficient_scope"`},
		{"AMB-19 no path", []string{"Bearer " + es256(t, baseHeader, strings.Replace(basePay, "/ns/prod/sa/web", "", 1))}, 403, `Bearer error="insufficient_scope"`},
	} {
		log.Reset()
		r := overTLS()
		r.Header["Authorization"] = c.header
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		assert.Equal(t, c.status, w.Code, c.name)
		assert.Equal(t, c.challenge, w.Header().Get("WWW-Authenticate"), c.name)
		if c.status == 200 {
			assert.Equal(t, "1 "+webID.String(), w.Body.String(), c.name)
			assert.Empty(t, log.String())
			continue
		}
		assert.Equal(t, http.StatusText(c.status)+"\n", w.Body.String(), c.name)
		assert.Contains(t, log.String(), "request refused", c.name)
		if c.challenge == challenge || c.status == 400 {
			refused(t, logged, good, "no token", "JWT-32")
		}
		assert.Empty(t, leaks(log.String(), strings.Join(c.header, ".")), c.name)
	}
}

// TestMiddlewareDenied: the log shows each of several IDs that the policy denies.
func TestMiddlewareDenied(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), spiffe.AllowPathPrefix(domain, "/other"), &jwtsvid.MiddlewareOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for _, path := range []string{"/a", "/a", "/b"} {
		r, w := overTLS(), httptest.NewRecorder()
		r.Header.Set("Authorization", "Bearer "+es256(t, baseHeader, strings.Replace(basePay, "/ns/prod/sa/web", path, 1)))
		h.ServeHTTP(w, r)
		assert.Equal(t, http.StatusForbidden, w.Code)
	}
	assert.Equal(t, 2, strings.Count(log.String(), "request refused"), log.String())
	assert.Contains(t, log.String(), "id=spiffe://example.org/b")
}

// TestMiddlewarePath: a path that a ServeMux in front and the handler behind may read differently is refused, with a good token too.
func TestMiddlewarePath(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), spiffe.AllowIDs(webID), &jwtsvid.MiddlewareOptions{TLSTerminated: true, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/a/", 200}, {"GET", "/a%2fb", 200}, {"CONNECT", "/a", 400}, {"GET", "/public/../admin", 400}, {"GET", "/public/%2e%2e/admin", 400}, {"GET", "//admin", 400},
	} {
		r, w := httptest.NewRequest(c.method, c.path, nil), httptest.NewRecorder()
		r.Header.Set("Authorization", "Bearer "+es256(t, baseHeader, basePay))
		h.ServeHTTP(w, r)
		assert.Equal(t, c.status, w.Code, "%s %s", c.method, c.path)
		if c.status != 200 {
			assert.Equal(t, `Bearer error="invalid_request"`, w.Header().Get("WWW-Authenticate"))
		}
	}
	assert.Contains(t, log.String(), "its path can be read in two ways")
}

// TestMiddlewarePeer: with a function for the client of the connection, a token is good in the hands of its workload alone.
func TestMiddlewarePeer(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, webID.TrustDomain().String())
	text := es256(t, baseHeader, basePay) // of webID
	var log bytes.Buffer
	h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), spiffe.AllowIDs(webID),
		&jwtsvid.MiddlewareOptions{Peer: spiffetls.PeerFromRequest, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	server := &http.Server{Handler: h}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain()), AllowAnonymousClients: true})
	require.NoError(t, err)
	require.NoError(t, endpoint.ConfigureServer(server))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.ServeTLS(l, "", "") })
	t.Cleanup(func() {
		assert.NoError(t, server.Close())
		wg.Wait()
	})
	get := func(rt http.RoundTripper) *http.Response {
		req := must.Get(http.NewRequest(http.MethodGet, "https://"+l.Addr().String(), nil))(t)
		req.Header.Set("Authorization", "Bearer "+text)
		resp := must.Get(rt.RoundTrip(req))(t)
		require.NoError(t, resp.Body.Close())
		return resp
	}
	as := func(path string) *http.Transport {
		endpoint, err := spiffetls.New(spiffetls.Config{Self: ca.SVID(path), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(ca.SVID("/db").ID())})
		require.NoError(t, err)
		rt := must.Get(endpoint.Transport())(t)
		t.Cleanup(rt.CloseIdleConnections)
		return rt
	}
	assert.Equal(t, http.StatusOK, get(as(webID.Path())).StatusCode)
	assert.Empty(t, log.String())
	anonymous := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}} // the server is of this test
	t.Cleanup(anonymous.CloseIdleConnections)
	for who, rt := range map[string]*http.Transport{"the client of the connection is ": as(webID.Path() + "/x"), "presented no certificate": anonymous} {
		resp := get(rt)
		assert.Equal(t, http.StatusUnauthorized, resp.StatusCode, who)
		assert.Equal(t, `Bearer error="invalid_token"`, resp.Header.Get("WWW-Authenticate"))
		assert.Contains(t, log.String(), "not the token of the client")
		assert.NotContains(t, log.String(), strings.Split(text, ".")[2])
	}
	h = protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), spiffe.AllowIDs(webID),
		&jwtsvid.MiddlewareOptions{Peer: func(*http.Request) (*spiffe.Peer, error) { return nil, nil }})
	r, w := overTLS(), httptest.NewRecorder()
	r.Header.Set("Authorization", "Bearer "+text)
	h.ServeHTTP(w, r)
	assert.Equal(t, http.StatusUnauthorized, w.Code, "a function without an answer proves nothing")
}

// overTLS returns a request that came by TLS.
func overTLS() *http.Request {
	return httptest.NewRequest(http.MethodGet, "https://db.example.org/", nil)
}

// A token that others can read on the way is refused and not looked at, unless the server is told that a proxy ends TLS.
func TestMiddlewarePlaintext(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-34")
	good := "Bearer " + es256(t, baseHeader, basePay)
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	var log bytes.Buffer
	strict := protect(t, v, spiffe.AllowIDs(webID), &jwtsvid.MiddlewareOptions{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	lax := protect(t, v, spiffe.AllowIDs(webID), &jwtsvid.MiddlewareOptions{TLSTerminated: true})
	plain := func() *http.Request {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = "@"
		r.Header.Set("X-Forwarded-Proto", "https") // what the client says of itself does not count
		r.Header.Set("Authorization", good)
		return r
	}
	onSocket := plain()
	onSocket = onSocket.WithContext(context.WithValue(onSocket.Context(), http.LocalAddrContextKey, &net.UnixAddr{Name: "/s", Net: "unix"}))
	without := plain()
	without.Header.Del("Authorization")
	for _, c := range []struct {
		name   string
		h      http.Handler
		r      *http.Request
		status int
	}{
		{"refused", strict, plain(), 400},
		{"without a token", strict, without, 400},
		{"on a Unix socket", strict, onSocket, 200},
		{"TLS ended before", lax, plain(), 200},
	} {
		log.Reset()
		w := httptest.NewRecorder()
		c.h.ServeHTTP(w, c.r)
		assert.Equal(t, c.status, w.Code, c.name)
		if c.status == 400 {
			assert.Equal(t, `Bearer error="invalid_request"`, w.Header().Get("WWW-Authenticate"))
			assert.Contains(t, log.String(), "the connection is not encrypted")
			assert.Empty(t, leaks(log.String(), good))
		}
	}
}

// A client that sends bad requests as fast as it can does not fill the log.
func TestMiddlewareLog(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var lines []string
		take := func() (all []string) {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			all, lines = lines, nil
			return all
		}
		logger := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			_, line, _ := strings.Cut(strings.TrimSpace(string(p)), " ") // without the time
			lines = append(lines, line)
			return len(p), nil
		}), nil))
		db := spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db"))
		h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), db, &jwtsvid.MiddlewareOptions{Logger: logger})
		send := func(authorization string) {
			r := overTLS()
			r.Header.Set("Authorization", authorization)
			h.ServeHTTP(httptest.NewRecorder(), r)
		}
		for i := range 2000 {
			send("Bearer " + strings.Repeat("x", i%100))
			send("Basic x")
		}
		send("Bearer " + es256(t, baseHeader, basePay))
		got := take()
		require.Len(t, got, 3)
		assert.Contains(t, got[0], `level=WARN msg="jwtsvid: request refused" reason=malformed err=`)
		assert.Contains(t, got[1], `reason="no token"`)
		assert.Contains(t, got[2], `reason=denied id=`+webID.String())
		for _, line := range got {
			assert.Contains(t, line, " remote=192.0.2.1:1234")
		}
		time.Sleep(time.Minute + time.Second)
		got = take()
		require.Len(t, got, 2)
		for _, line := range got {
			assert.Contains(t, line, " count=1999 interval=1m0s")
		}
		time.Sleep(2 * time.Minute)
		assert.Empty(t, take())
	})
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestMiddlewareSourceFails(t *testing.T) {
	t.Parallel()
	down := &counted{answer: func(spiffe.TrustDomain) (*spiffe.Bundle, error) { return nil, errors.New("not ready") }}
	h := protect(t, validator(t, down, jwtsvid.ValidatorOptions{}), spiffe.AllowAnyPeer(), nil)
	r := overTLS()
	r.Header.Set("Authorization", "Bearer "+es256(t, baseHeader, basePay))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
	assert.Empty(t, w.Header().Get("WWW-Authenticate"))
}

func TestMiddlewareMistakes(t *testing.T) {
	t.Parallel()
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	for _, c := range []struct {
		v     *jwtsvid.Validator
		allow spiffe.PolicySource
		want  string
	}{
		{nil, spiffe.AllowAnyPeer(), "not made by NewValidator"},
		{&jwtsvid.Validator{}, spiffe.AllowAnyPeer(), "not made by NewValidator"},
		{v, nil, "no policy"},
		{v, spiffe.Policy{}, "the policy is zero"},
		{v, spiffe.AllowIDs(), "AllowIDs needs at least one ID"},
	} {
		_, err := jwtsvid.Middleware(c.v, c.allow, nil)
		assert.ErrorContains(t, err, "jwtsvid: middleware: ")
		assert.ErrorContains(t, err, c.want)
	}
	_, ok := jwtsvid.FromContext(httptest.NewRequest(http.MethodGet, "/", nil).Context())
	assert.False(t, ok, "a request that came another way")
}

// A policy that is replaced counts from the next request on.
func TestMiddlewareLivePolicy(t *testing.T) {
	t.Parallel()
	live := &spiffe.LivePolicy{}
	h := protect(t, validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{}), live, nil)
	status := func() int {
		r := overTLS()
		r.Header.Set("Authorization", "Bearer "+es256(t, baseHeader, basePay))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code
	}
	assert.Equal(t, http.StatusForbidden, status(), "no policy yet")
	require.NoError(t, live.Set(spiffe.AllowIDs(webID)))
	assert.Equal(t, http.StatusOK, status())
	require.NoError(t, live.Set(spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/other"))))
	assert.Equal(t, http.StatusForbidden, status())
}

// TestGRPC sends a token as gRPC does: in metadata, which are the header fields of HTTP/2. gRPC over net/http meets the
// middleware.
func TestGRPC(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-32", "JWT-33", "JWT-34", "GO-14")
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	source := &mint{issuer: longIssuer(t)}
	cache := must.Get(jwtsvid.NewCache(source, nil))(t)
	token := must.Get(cache.Fetch(t.Context(), "db"))(t)
	url := serveH2C(t, protect(t, v, spiffe.AllowIDs(webID), &jwtsvid.MiddlewareOptions{TLSTerminated: true}))
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	defer client.CloseIdleConnections()
	for want, header := range map[string]string{"2 " + webID.String(): "Bearer " + token, "Unauthorized\n": "Bearer x"} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/svc/Method", strings.NewReader("\x00\x00\x00\x00\x00"))
		require.NoError(t, err)
		r.Header.Set("Content-Type", "application/grpc")
		r.Header.Set("authorization", header)
		resp := must.Get(client.Do(r))(t)
		body := must.Get(io.ReadAll(resp.Body))(t)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, want, string(body))
	}
}

// serveH2C serves unencrypted HTTP/2 until the test ends and returns the base URL.
func serveH2C(t *testing.T, h http.Handler) string {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := &http.Server{Handler: h, Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	wg.Go(func() { assert.ErrorIs(t, s.Serve(l), http.ErrServerClosed) })
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		wg.Wait()
	})
	return "http://" + l.Addr().String()
}
