package jwtsvid_test

import (
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// receiver is a server that notes what it is sent and answers what it is told to.
type receiver struct {
	*httptest.Server

	mu     sync.Mutex
	tokens []string // the Authorization headers, in order
	bodies []string
	answer func(n int, w http.ResponseWriter, r *http.Request)
}

func newReceiver(t *testing.T, secure bool, answer func(n int, w http.ResponseWriter, r *http.Request)) *receiver {
	t.Helper()
	s := &receiver{answer: answer}
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		assert.NoError(t, err)
		s.mu.Lock()
		n := len(s.tokens)
		s.tokens = append(s.tokens, strings.Join(r.Header["Authorization"], "|"))
		s.bodies = append(s.bodies, string(body))
		s.mu.Unlock()
		if s.answer != nil {
			s.answer(n, w, r)
		}
	})
	s.Server = httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	if secure {
		s.EnableHTTP2 = true
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

func (s *receiver) host() string { return s.Listener.Addr().String() }

// seen returns what came since the last call.
func (s *receiver) seen() (tokens, bodies []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	tokens, bodies = s.tokens, s.bodies
	s.tokens, s.bodies = nil, nil
	return tokens, bodies
}

// client returns a client that trusts the servers, knows the given audiences, and a source of tokens.
func client(t *testing.T, audiences map[string]string, opts *jwtsvid.TransportOptions, trusted ...*receiver) (*http.Client, *mint) {
	t.Helper()
	source := &mint{issuer: longIssuer(t)}
	cache := must.Get(jwtsvid.NewCache(source, nil))(t)
	if opts == nil {
		opts = &jwtsvid.TransportOptions{}
	}
	if opts.Base == nil && opts.UnixSocket == "" {
		base := &http.Transport{ForceAttemptHTTP2: true}
		for _, s := range trusted {
			if s.TLS != nil {
				base.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone() // the same for all of httptest
			}
		}
		t.Cleanup(base.CloseIdleConnections)
		opts.Base = base
	}
	transport := must.Get(jwtsvid.NewTransport(cache, audiences, opts))(t)
	c := &http.Client{Transport: transport}
	t.Cleanup(c.CloseIdleConnections)
	return c, source
}

func do(t *testing.T, c *http.Client, method, url, body string, edit ...func(*http.Request)) (*http.Response, error) {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body)))(t)
	for _, e := range edit {
		e(r)
	}
	resp, err := c.Do(r)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
	}
	return resp, err
}

// audienceOf returns the audience of the token in an Authorization header.
func audienceOf(t *testing.T, header string) string {
	t.Helper()
	token, ok := strings.CutPrefix(header, "Bearer ")
	require.True(t, ok, "%q", header)
	u := must.Get(jwtsvid.ParseUnverified(token))(t)
	return strings.Join(u.Audience, ",")
}

func TestTransport(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-32", "JWT-34")
	db, cache := newReceiver(t, true, nil), newReceiver(t, true, nil)
	c, source := client(t, map[string]string{db.host(): "db", cache.host(): "cache"}, nil, db, cache)
	for range 3 {
		resp := must.Get(do(t, c, http.MethodPost, db.URL+"/x", "hello"))(t)
		assert.Equal(t, 2, resp.ProtoMajor)
		assert.NotContains(t, resp.Request.Header, "Authorization", "the response does not show the token")
	}
	must.Get(do(t, c, http.MethodGet, cache.URL, ""))(t)
	tokens, bodies := db.seen()
	require.Len(t, tokens, 3)
	assert.Equal(t, []string{"hello", "hello", "hello"}, bodies)
	assert.Equal(t, "db", audienceOf(t, tokens[0]))
	assert.Equal(t, tokens[0], tokens[2])
	tokens, _ = cache.seen()
	assert.Equal(t, "cache", audienceOf(t, tokens[0]))
	assert.Equal(t, 2, source.count())

	// The caller's own Authorization header is kept.
	must.Get(do(t, c, http.MethodGet, db.URL, "", func(r *http.Request) { r.Header.Set("Authorization", "Basic x") }))(t)
	must.Get(do(t, c, http.MethodGet, db.URL, "", func(r *http.Request) { r.SetBasicAuth("user", "pass") }))(t)
	must.Get(do(t, c, http.MethodGet, db.URL, "", func(r *http.Request) { r.Header["authorization"] = []string{"x"} }))(t)
	tokens, _ = db.seen()
	assert.Equal(t, []string{"Basic x", "Basic dXNlcjpwYXNz", "x"}, tokens)

	// A request is not changed, and may be sent again.
	r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, db.URL, nil))(t)
	r.Header = nil
	resp := must.Get(c.Transport.RoundTrip(r))(t)
	require.NoError(t, resp.Body.Close())
	assert.Empty(t, r.Header)
}

func TestTransportRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-34", "GO-12")
	sent := roundTripper(func(r *http.Request) (*http.Response, error) {
		return nil, errors.New("sent to " + r.URL.Scheme + "://" + r.URL.Host)
	})
	audiences := map[string]string{
		"db.example.org": "db", "other.example.org:8443": "other", "localhost:8080": "local", "127.0.0.1:8080": "local", "[::1]:8080": "local",
		"10.0.0.1:8080": "remote", "UPPER.example.org": "upper", "127.0.0.1.example.org": "trap", "443.example.org:443": "port",
	}
	for _, c := range []struct {
		url      string
		loopback bool
		want     string
	}{
		{"https://db.example.org/", false, "sent"},
		{"https://db.example.org:443/", false, "sent"},
		{"https://DB.example.org/", false, "sent"},
		{"https://upper.example.org/", false, "sent"},
		{"https://443.example.org/", false, "sent"},
		{"https://other.example.org:8443/", false, "sent"},
		{"https://db.example.org:8443/", false, `no audience is known for the host "db.example.org:8443"`},
		{"https://other.example.org/", false, `no audience is known for the host "other.example.org"`},
		{"https://db.example.org./", false, "no audience is known"},
		{"https://db.example.org:80/", false, "no audience is known"},
		{"https://xdb.example.org/", false, "no audience is known"},
		{"https://example.org/", false, "no audience is known"},
		{"http://db.example.org/", false, `refusing to send a token to "db.example.org" by "http"`},
		{"http://db.example.org/", true, "refusing to send a token"},
		{"http://10.0.0.1:8080/", true, "refusing to send a token"},
		{"http://127.0.0.1.example.org/", true, "refusing to send a token"},
		{"http://443.example.org:443/", true, "refusing to send a token"},
		{"http://localhost:8080/", false, "refusing to send a token"},
		{"http://127.0.0.1:8080/", false, "refusing to send a token"},
		{"http://127.0.0.1:8080/", true, "sent"},
		{"http://[::1]:8080/", true, "sent"},
		{"http://LocalHost:8080/", true, "sent"},
		{"ftp://db.example.org/", true, "refusing to send a token"},
		{"//db.example.org/", true, "refusing to send a token"},
	} {
		rt, source := client(t, audiences, &jwtsvid.TransportOptions{Base: sent, AllowLoopback: c.loopback})
		body := &closing{}
		u := must.Get(url.Parse(c.url))(t)
		_, err := rt.Transport.RoundTrip(&http.Request{URL: u, Body: body})
		assert.ErrorContains(t, err, c.want, c.url)
		if c.want != "sent" {
			assert.True(t, body.closed, c.url)
			assert.Zero(t, source.count(), c.url)
		}
	}
	rt, source := client(t, audiences, &jwtsvid.TransportOptions{Base: sent})
	_, err := rt.Transport.RoundTrip(&http.Request{})
	assert.ErrorContains(t, err, "no URL")

	// Without a token nothing is sent.
	source.set(func(m *mint) { m.err = errors.New("down") })
	body := &closing{}
	_, err = rt.Transport.RoundTrip(&http.Request{URL: &url.URL{Scheme: "https", Host: "db.example.org"}, Body: body})
	assert.EqualError(t, err, `jwtsvid: fetch a token for "db": down`)
	assert.True(t, body.closed)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

type closing struct{ closed bool }

func (c *closing) Read([]byte) (int, error) { return 0, io.EOF }
func (c *closing) Close() error             { c.closed = true; return nil }

func TestTransportRedirects(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "GO-12", "JWT-34")
	plain := newReceiver(t, false, nil)
	foreign := newReceiver(t, true, nil)
	other := newReceiver(t, true, nil)
	home := newReceiver(t, true, func(_ int, w http.ResponseWriter, r *http.Request) {
		if to := r.URL.Query().Get("to"); to != "" {
			http.Redirect(w, r, to, http.StatusTemporaryRedirect)
		}
	})
	other.answer = home.answer
	c, _ := client(t, map[string]string{home.host(): "home", other.host(): "other", plain.host(): "plain"},
		&jwtsvid.TransportOptions{AllowLoopback: true}, home)

	go307 := func(to string) {
		t.Helper()
		must.Get(do(t, c, http.MethodGet, home.URL+"/?to="+url.QueryEscape(to), ""))(t)
		tokens, _ := home.seen()
		assert.Equal(t, "home", audienceOf(t, tokens[0]))
	}
	go307(foreign.URL)
	tokens, _ := foreign.seen()
	assert.Equal(t, []string{""}, tokens, "a host that is not known")
	go307(other.URL)
	tokens, _ = other.seen()
	assert.Equal(t, []string{""}, tokens, "a host that is known, but chosen by another")
	go307(plain.URL)
	tokens, _ = plain.seen()
	assert.Equal(t, []string{""}, tokens, "away from TLS")

	// Back home by way of another host.
	_, err := do(t, c, http.MethodGet, home.URL+"/?to="+url.QueryEscape(other.URL+"/?to="+url.QueryEscape(home.URL)), "")
	require.NoError(t, err)
	tokens, _ = home.seen()
	require.Len(t, tokens, 2)
	assert.Equal(t, "home", audienceOf(t, tokens[0]))
	assert.Empty(t, tokens[1])
	tokens, _ = other.seen()
	assert.Equal(t, []string{""}, tokens)

	// On the way, the other host goes on by itself.
	must.Get(do(t, c, http.MethodGet, home.URL+"/?to="+url.QueryEscape(other.URL+"/?to=/elsewhere"), ""))(t)
	tokens, _ = other.seen()
	assert.Equal(t, []string{"", ""}, tokens)
	tokens, _ = home.seen()
	assert.Len(t, tokens, 1)

	// At home.
	must.Get(do(t, c, http.MethodGet, home.URL+"/?to=/elsewhere", ""))(t)
	tokens, _ = home.seen()
	require.Len(t, tokens, 2)
	assert.Equal(t, "home", audienceOf(t, tokens[1]))
}

// A base that does not say which request a response answers hides where a redirect comes from.
func TestTransportRedirectUnknown(t *testing.T) {
	t.Parallel()
	var seen []string
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		seen = append(seen, fmt.Sprint(r.URL, " ", len(r.Header["Authorization"])))
		resp := &http.Response{StatusCode: 307, Body: http.NoBody, Header: http.Header{}}
		switch r.URL.String() {
		case "https://home.test/":
			resp.Header.Set("Location", "/here")
		case "https://home.test/here":
			resp.Header.Set("Location", "https://evil.test/")
		case "https://evil.test/":
			resp.Header.Set("Location", "https://evil.test/there")
		case "https://evil.test/there":
			resp.Header.Set("Location", "https://other.test/")
		default:
			resp.StatusCode = 200
		}
		return resp, nil
	})
	c, _ := client(t, map[string]string{"home.test": "home", "evil.test": "evil", "other.test": "other"}, &jwtsvid.TransportOptions{Base: base})
	must.Get(do(t, c, http.MethodGet, "https://home.test/", ""))(t)
	assert.Equal(t, []string{
		"https://home.test/ 1", "https://home.test/here 1", "https://evil.test/ 0", "https://evil.test/there 0", "https://other.test/ 0",
	}, seen)
}

// A host that sends us from https to http is the same host, and the token stays where it is.
func TestTransportRedirectAwayFromTLS(t *testing.T) {
	t.Parallel()
	var seen []string
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		seen = append(seen, fmt.Sprint(r.URL, " ", len(r.Header["Authorization"])))
		resp := &http.Response{StatusCode: 307, Body: http.NoBody, Header: http.Header{"Location": {"http://localhost:8080/b"}}, Request: r}
		if r.URL.Path == "/b" {
			resp.StatusCode = 200
		}
		return resp, nil
	})
	c, _ := client(t, map[string]string{"localhost:8080": "db"}, &jwtsvid.TransportOptions{Base: base, AllowLoopback: true})
	must.Get(do(t, c, http.MethodGet, "https://localhost:8080/a", ""))(t)
	must.Get(do(t, c, http.MethodGet, "http://localhost:8080/b", ""))(t)
	assert.Equal(t, []string{"https://localhost:8080/a 1", "http://localhost:8080/b 0", "http://localhost:8080/b 1"}, seen)
}

func TestTransportRetry(t *testing.T) {
	t.Parallel()
	refuse := func(times int) func(int, http.ResponseWriter, *http.Request) {
		var count atomic.Int64
		return func(_ int, w http.ResponseWriter, _ *http.Request) {
			if count.Add(1) <= int64(times) {
				w.WriteHeader(http.StatusUnauthorized)
				_, _ = w.Write(make([]byte, 1000))
			}
		}
	}
	reader := func(r *http.Request) { r.GetBody = nil } // such as a pipe
	for _, c := range []struct {
		name     string
		refused  int // requests in a row
		method   string
		body     string
		edit     func(*http.Request)
		status   int
		requests int
		fetched  int
	}{
		{"never refused", 0, "POST", "hello", nil, 200, 1, 1},
		{"refused once", 1, "POST", "hello", nil, 200, 2, 2},
		{"no body", 1, "GET", "", nil, 200, 2, 2},
		{"refused for good", 99, "POST", "hello", nil, 401, 2, 2},
		{"a body that is gone", 1, "POST", "hello", reader, 401, 1, 2},
		{"a body that does not come back", 1, "POST", "hello", func(r *http.Request) {
			r.GetBody = func() (io.ReadCloser, error) { return nil, errors.New("gone") }
		}, 401, 1, 2},
		{"the caller's own", 1, "POST", "hello", func(r *http.Request) { r.Header.Set("Authorization", "Bearer x") }, 401, 1, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newReceiver(t, true, refuse(c.refused))
			client, source := client(t, map[string]string{s.host(): "db"}, nil, s)
			edit := c.edit
			if edit == nil {
				edit = func(*http.Request) {}
			}
			resp := must.Get(do(t, client, c.method, s.URL, c.body, edit))(t)
			assert.Equal(t, c.status, resp.StatusCode)
			tokens, bodies := s.seen()
			assert.Len(t, tokens, c.requests)
			assert.Equal(t, slices.Repeat([]string{c.body}, c.requests), bodies)
			if c.requests == 2 {
				assert.NotEqual(t, tokens[0], tokens[1])
			}
			assert.Eventually(t, func() bool { return source.count() == c.fetched }, time.Minute, time.Millisecond)
			if c.status == http.StatusUnauthorized && c.refused == 1 && c.fetched == 2 {
				// It could not be repeated. The next one has the new token, when that is there.
				assert.Eventually(t, func() bool {
					resp, err := do(t, client, c.method, s.URL, c.body, edit)
					s.mu.Lock()
					defer s.mu.Unlock()
					return err == nil && resp.StatusCode == http.StatusOK && s.tokens[len(s.tokens)-1] != tokens[0]
				}, time.Minute, time.Millisecond)
				assert.Equal(t, c.fetched, source.count())
			}
			if c.name != "refused for good" {
				return
			}
			// A server that refuses whatever it gets does not make us hammer at the source.
			for range 5 {
				must.Get(do(t, client, c.method, s.URL, c.body))(t)
			}
			assert.Equal(t, c.fetched, source.count())
		})
	}
}

// What a retry leaves behind is closed: the answer that refused the token, and a body that is not sent.
func TestTransportRetryCloses(t *testing.T) {
	t.Parallel()
	var refused, again closing
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		_ = r.Body.Close()
		r.Header.Set("X-Base", "1") // in its own copy
		return &http.Response{StatusCode: http.StatusUnauthorized, Body: &refused}, nil
	})
	c, source := client(t, map[string]string{"db": "db"}, &jwtsvid.TransportOptions{Base: base})
	send := func() *http.Response {
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, "https://db/", &closing{}))(t)
		r.GetBody = func() (io.ReadCloser, error) { return &again, nil }
		resp := must.Get(c.Transport.RoundTrip(r))(t)
		assert.Empty(t, r.Header)
		return resp
	}
	resp := send()
	assert.True(t, refused.closed)
	assert.True(t, again.closed)
	require.NoError(t, resp.Body.Close())

	refused, again = closing{}, closing{}
	source.set(func(m *mint) { m.err = errors.New("down") })
	resp = send()
	assert.False(t, refused.closed, "the answer of the server stands")
	assert.True(t, again.closed)
	require.NoError(t, resp.Body.Close())
}

// Requests that cannot be repeated are refused at different times. That costs one new token.
func TestTransportRefusedStreams(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		slow   time.Duration // the source
		second time.Duration // when the second request is refused
	}{
		"while the new token is fetched": {20 * time.Second, 12 * time.Second},
		"when it is there":               {0, 12 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			cache, source := newCache(t, nil)
			base := roundTripper(func(r *http.Request) (*http.Response, error) {
				time.Sleep(map[string]time.Duration{"/first": time.Second, "/second": c.second}[r.URL.Path]) // both are sent by then
				return &http.Response{StatusCode: http.StatusUnauthorized, Body: http.NoBody}, nil
			})
			rt := must.Get(jwtsvid.NewTransport(cache, map[string]string{"db": "db"}, &jwtsvid.TransportOptions{Base: base}))(t)
			fetch(t, cache, "db")
			source.set(func(m *mint) { m.wait = sleep(c.slow) })
			var wg sync.WaitGroup
			for _, path := range []string{"/first", "/second"} {
				wg.Go(func() {
					r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://db"+path, io.NopCloser(strings.NewReader("x")))
					if assert.NoError(t, err) {
						_, err = rt.RoundTrip(r)
						assert.NoError(t, err)
					}
				})
			}
			wg.Wait()
			time.Sleep(time.Minute)
			assert.Equal(t, 2, source.count(), name)
			assert.Equal(t, "2", fetch(t, cache, "db"), name)
		})
	}
}

// TestTransportRetryTogether has many requests refused at once. One new token does for all.
func TestTransportRetryTogether(t *testing.T) {
	t.Parallel()
	const many = 8
	var together sync.WaitGroup
	together.Add(many)
	s := newReceiver(t, true, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n < many {
			together.Done()
			together.Wait()
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	c, source := client(t, map[string]string{s.host(): "db"}, nil, s)
	var wg sync.WaitGroup
	for range many {
		wg.Go(func() {
			resp, err := c.Get(s.URL)
			if assert.NoError(t, err) {
				assert.Equal(t, http.StatusOK, resp.StatusCode)
				assert.NoError(t, resp.Body.Close())
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 2, source.count())
}

func TestTransportRetryWithoutNewToken(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*mint, string){
		"the source fails": func(m *mint, _ string) { m.err = errors.New("down") },
		"the same again":   func(m *mint, first string) { m.edit = func(string) string { return first } },
	} {
		var s *receiver
		var source *mint
		s = newReceiver(t, true, func(_ int, w http.ResponseWriter, r *http.Request) {
			source.set(func(m *mint) { spoil(m, strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")) })
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte("who are you?"))
		})
		var c *http.Client
		c, source = client(t, map[string]string{s.host(): "db"}, nil, s)
		resp, err := c.Post(s.URL, "text/plain", strings.NewReader("hello"))
		require.NoError(t, err, name)
		body, err := io.ReadAll(resp.Body)
		require.NoError(t, err, name)
		require.NoError(t, resp.Body.Close())
		assert.Equal(t, http.StatusUnauthorized, resp.StatusCode, name)
		assert.Equal(t, "who are you?", string(body), "%s: the answer of the server stands", name)
		tokens, _ := s.seen()
		assert.Len(t, tokens, 1, name)
		assert.Equal(t, 2, source.count(), name)
	}
}

func TestTransportUnixSocket(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "JWT-34")
	dir := must.Get(os.MkdirTemp("", "jwtsvid"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l := must.Get(net.Listen("unix", socket))(t)
	v := validator(t, bundles(t, ""), jwtsvid.ValidatorOptions{})
	s := &http.Server{Handler: protect(t, v, spiffe.AllowIDs(webID), nil)}
	var wg sync.WaitGroup
	wg.Go(func() { assert.ErrorIs(t, s.Serve(l), http.ErrServerClosed) })
	t.Cleanup(func() {
		assert.NoError(t, s.Close())
		wg.Wait()
	})

	c, _ := client(t, map[string]string{"db": "db"}, &jwtsvid.TransportOptions{UnixSocket: socket})
	resp := must.Get(c.Get("http://db/x"))(t)
	body := must.Get(io.ReadAll(resp.Body))(t)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, "1 "+webID.String(), string(body))
	_, err := c.Get("http://other/x")
	assert.ErrorContains(t, err, "no audience is known")
}

func TestNewTransportMistakes(t *testing.T) {
	t.Parallel()
	cache := must.Get(jwtsvid.NewCache(&mint{}, nil))(t)
	one := map[string]string{"db": "db"}
	for want, c := range map[string]struct {
		cache     *jwtsvid.Cache
		audiences map[string]string
		opts      *jwtsvid.TransportOptions
	}{
		"no cache":                                 {nil, one, nil},
		"no audiences":                             {cache, nil, nil},
		`"" is not a host`:                         {cache, map[string]string{"": "db"}, nil},
		`"https://db" is not a host`:               {cache, map[string]string{"https://db": "db"}, nil},
		`"db/x" is not a host`:                     {cache, map[string]string{"db/x": "db"}, nil},
		`"u@db" is not a host`:                     {cache, map[string]string{"u@db": "db"}, nil},
		`"db:" is not a host`:                      {cache, map[string]string{"db:": "db"}, nil},
		`":443" is not a host`:                     {cache, map[string]string{":443": "db"}, nil},
		`"d b" is not a host`:                      {cache, map[string]string{"d b": "db"}, nil},
		`host "db": an audience is empty`:          {cache, map[string]string{"db": ""}, nil},
		`the host "db" is there twice`:             {cache, map[string]string{"db": "db", "DB": "db"}, nil},
		"UnixSocket and Base are both set; Base d": {cache, one, &jwtsvid.TransportOptions{Base: http.DefaultTransport, UnixSocket: "/x"}},
	} {
		_, err := jwtsvid.NewTransport(c.cache, c.audiences, c.opts)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "jwtsvid: new transport: ")
	}

	// The default base knows the roots of the host only, and uses no proxy.
	transport := must.Get(jwtsvid.NewTransport(cache, one, nil))(t)
	(&http.Client{Transport: transport}).CloseIdleConnections()
	s := newReceiver(t, true, nil)
	source := &mint{issuer: longIssuer(t)}
	cache = must.Get(jwtsvid.NewCache(source, nil))(t)
	transport = must.Get(jwtsvid.NewTransport(cache, map[string]string{s.host(): "db"}, nil))(t)
	_, err := (&http.Client{Transport: transport, Timeout: time.Minute}).Get(s.URL)
	assert.ErrorContains(t, err, "certificate signed by unknown authority")
	tokens, _ := s.seen()
	assert.Empty(t, tokens)
}
