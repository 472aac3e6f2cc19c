package authn_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
)

func withHeader(fields ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "https://ca.example.org/", nil)
	if fields != nil {
		r.Header["Authorization"] = fields
	}
	return r
}

func TestBearer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-15")
	longest := strings.Repeat("a", 16<<10)
	for _, c := range []struct {
		name   string
		fields []string
		token  string
		err    error
		text   string
	}{
		{"one", []string{"Bearer a.b.c"}, "a.b.c", nil, ""},
		{"any visible ASCII", []string{"Bearer !\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"}, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", nil, ""},
		{"longest", []string{"Bearer " + longest}, longest, nil, ""},
		{"the first that fits", []string{"Basic x", "bearer y", "Bearer z", "Bearer other"}, "z", nil, ""},

		{"none", nil, "", authn.ErrNoCredential, "there is no authorization header"},
		{"empty field", []string{""}, "", authn.ErrNoCredential, "does not begin"},
		{"lower case", []string{"bearer sesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"upper case", []string{"BEARER sesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"other scheme", []string{"Istio sesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"no scheme", []string{"sesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"no blank", []string{"Bearersesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"scheme only", []string{"Bearer"}, "", authn.ErrNoCredential, "does not begin"},
		{"tab", []string{"Bearer\tsesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"blank in front", []string{" Bearer sesame"}, "", authn.ErrNoCredential, "does not begin"},
		{"not at the beginning", []string{"x Bearer sesame"}, "", authn.ErrNoCredential, "does not begin"},

		{"empty", []string{"Bearer "}, "", authn.ErrRefused, "it is empty"},
		{"empty before a good one", []string{"Bearer ", "Bearer sesame"}, "", authn.ErrRefused, "it is empty"},
		{"too long", []string{"Bearer " + longest + "a"}, "", authn.ErrRefused, "16385 bytes, the limit is 16384"},
		{"two blanks", []string{"Bearer  sesame"}, "", authn.ErrRefused, "one word"},
		{"blank at the end", []string{"Bearer sesame "}, "", authn.ErrRefused, "one word"},
		{"two words", []string{"Bearer sesame open"}, "", authn.ErrRefused, "one word"},
		{"line break", []string{"Bearer sesame\r\nX: y"}, "", authn.ErrRefused, "one word"},
		{"NUL", []string{"Bearer sesame\x00"}, "", authn.ErrRefused, "one word"},
		{"DEL", []string{"Bearer sesame\x7f"}, "", authn.ErrRefused, "one word"},
		{"not ASCII", []string{"Bearer sesämé"}, "", authn.ErrRefused, "one word"},
		{"not UTF-8", []string{"Bearer sesame\xff"}, "", authn.ErrRefused, "one word"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := withHeader(c.fields...)
			for _, bearer := range []func(*http.Request) (string, error){authn.Bearer, authn.BearerOverPlaintext} {
				token, err := bearer(r)
				assert.Equal(t, c.token, token)
				if c.err == nil {
					require.NoError(t, err)
					continue
				}
				must.Fail(t, err, c.err, c.text)
				assert.NotContains(t, err.Error(), "ses", "the token is in the error")
				assert.Less(t, len(err.Error()), 200)
				assert.Equal(t, c.err == authn.ErrNoCredential, errors.Is(err, authn.ErrNoCredential), "not there")
				assert.Equal(t, c.err == authn.ErrRefused, errors.Is(err, authn.ErrRefused), "not good enough")
			}
		})
	}
}

// A token that others can read on the way is refused, whatever it is worth.
func TestBearerPlaintext(t *testing.T) {
	t.Parallel()
	r := withHeader("Bearer sesame")
	r.TLS = nil
	token, err := authn.Bearer(r)
	must.Fail(t, err, authn.ErrRefused, "not encrypted")
	assert.NotContains(t, err.Error(), "sesame")
	assert.Empty(t, token)

	// without a token there is nothing to refuse
	none := withHeader()
	none.TLS = nil
	_, err = authn.Bearer(none)
	require.ErrorIs(t, err, authn.ErrNoCredential)
	assert.NotErrorIs(t, err, authn.ErrRefused)

	token = must.Get(authn.BearerOverPlaintext(r))(t)
	assert.Equal(t, "sesame", token)

	r.TLS = &tls.ConnectionState{}
	require.NoError(t, must.Err(authn.Bearer(r)))

	// what the client says of itself does not count
	r.TLS = nil
	r.RemoteAddr = "@"
	r.Header.Set("X-Forwarded-Proto", "https")
	must.Fail(t, must.Err(authn.Bearer(r.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, &net.TCPAddr{})))), authn.ErrRefused)
}

func TestBearerAllocs(t *testing.T) {
	r := withHeader("Bearer sesame")
	assert.Zero(t, testing.AllocsPerRun(100, func() { _, _ = authn.Bearer(r) }))
}

// The connections of real servers: a Unix socket, TLS, and neither.
func TestBearerConnections(t *testing.T) {
	t.Parallel()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, err := authn.Bearer(r)
		_, _ = fmt.Fprintf(w, "%s %v", token, err)
	})
	ask := func(t *testing.T, c *http.Client, url string) string {
		t.Helper()
		r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil))(t)
		r.Header.Set("authorization", "Bearer sesame")
		resp := must.Get(c.Do(r))(t)
		defer func() { _ = resp.Body.Close() }()
		var b strings.Builder
		require.NoError(t, resp.Write(&b))
		return b.String()
	}

	plain := httptest.NewServer(handler)
	t.Cleanup(plain.Close)
	assert.Contains(t, ask(t, plain.Client(), plain.URL), "not encrypted")

	overTLS := httptest.NewTLSServer(handler)
	t.Cleanup(overTLS.Close)
	assert.Contains(t, ask(t, overTLS.Client(), overTLS.URL), "sesame <nil>")

	path := filepath.Join(t.TempDir(), "s")
	l := must.Get(net.Listen("unix", path))(t)
	srv := &http.Server{Handler: handler}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(l) })
	t.Cleanup(func() { _ = srv.Close(); wg.Wait() })
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	assert.Contains(t, ask(t, &http.Client{Transport: transport}, "http://socket/"), "sesame <nil>")
}

// Whatever a client sends, the answer is a token of the allowed bytes or an error without the token.
func FuzzBearer(f *testing.F) {
	for _, s := range []string{"", "Bearer ", "Bearer a.b.c", "bearer a", "Bearer a b", "Bearer \x00", "Bearer Bearer Bearer", "Bearer é"} {
		f.Add(s, "Bearer second")
	}
	f.Fuzz(func(t *testing.T, first, second string) {
		token, err := authn.Bearer(withHeader(first, second))
		if err != nil {
			if token != "" {
				t.Fatalf("token %q with the error %v", token, err)
			}
			if len(err.Error()) > 200 {
				t.Fatalf("error of %d bytes", len(err.Error()))
			}
			return
		}
		if want := "Bearer " + token; want != first && (want != second || strings.HasPrefix(first, "Bearer ")) {
			t.Fatalf("token %q of %q and %q", token, first, second)
		}
		for i := range len(token) {
			if token[i] <= ' ' || token[i] > '~' {
				t.Fatalf("byte %#x in the token", token[i])
			}
		}
	})
}
