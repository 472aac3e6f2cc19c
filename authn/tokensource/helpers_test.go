package tokensource_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// secret is a part of every token of these tests, and of no other text.
const secret = "c2VzYW1lLW9wZW4tc2VzYW1l"

// jwt returns a token for the audiences that ends then.
func jwt(expires time.Time, audience ...string) string {
	claims, err := json.Marshal(map[string]any{"aud": audience, "exp": expires.Unix()})
	if err != nil {
		panic(err)
	}
	return jwtOf(string(claims))
}

func jwtOf(claims string) string {
	b := base64.RawURLEncoding.EncodeToString
	return b([]byte(`{"alg":"RS256"}`)) + "." + b([]byte(claims)) + "." + secret
}

// inAnHour is when tokens of tests without a bubble end.
func inAnHour() time.Time { return time.Now().Add(time.Hour) }

// exchanged is how requests were received, and how they are answered.
type exchanged struct {
	mu       sync.Mutex
	requests []received
	answer   http.HandlerFunc
}

type received struct {
	method, uri string
	header      http.Header
	body        string
}

// ServeHTTP notes the request and answers it.
func (x *exchanged) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	x.mu.Lock()
	x.requests = append(x.requests, received{r.Method, r.URL.RequestURI(), r.Header.Clone(), string(body)})
	answer := x.answer
	x.mu.Unlock()
	r.Body = io.NopCloser(bytes.NewReader(body))
	answer(w, r)
}

func (x *exchanged) become(answer http.HandlerFunc) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.answer = answer
}

func (x *exchanged) all() []received {
	x.mu.Lock()
	defer x.mu.Unlock()
	return slices.Clone(x.requests)
}

func (x *exchanged) count() int { return len(x.all()) }

// RoundTrip answers without a network, so that a server fits into a bubble.
func (x *exchanged) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body == nil {
		r.Body = http.NoBody
	}
	w := httptest.NewRecorder()
	x.ServeHTTP(w, r)
	if r.Context().Err() != nil {
		return nil, r.Context().Err()
	}
	return w.Result(), nil
}

func (x *exchanged) client() *http.Client { return &http.Client{Transport: x} }

// serve serves on a loopback address.
func serve(t testing.TB, answer http.HandlerFunc) (*exchanged, string) {
	t.Helper()
	x := &exchanged{answer: answer}
	s := httptest.NewServer(x)
	t.Cleanup(s.Close)
	return x, s.URL
}

// text answers with a status and a body, and the header that shows Google's metadata server.
func text(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Metadata-Flavor", "Google")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

func made(s *tokensource.Source, err error) *tokensource.Source {
	if err != nil {
		panic(err)
	}
	return s
}

func requireToken(t testing.TB, want string, s *tokensource.Source) {
	t.Helper()
	got := must.Get(s.Token(t.Context()))(t)
	require.Equal(t, want, got)
}

// requireNone returns the error of a Source that has no token. It does not show any.
func requireNone(t testing.TB, s *tokensource.Source) error {
	t.Helper()
	got, err := s.Token(t.Context())
	require.Error(t, err)
	require.Empty(t, got)
	require.NotContains(t, err.Error(), secret)
	return err
}

// logs collects what is logged.
type logs struct{ logtest.Buffer }

func (l *logs) count(part string) int { return strings.Count(l.String(), part) }

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// done returns a context that has ended.
func done(t testing.TB) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// proxy is the proxy of the environment, which net/http reads once, for all hosts but those of this machine.
var proxy = &exchanged{answer: text(http.StatusForbidden, "")}

func TestMain(m *testing.M) {
	rounds.Parallel(8)
	s := httptest.NewServer(proxy)
	_ = errors.Join(os.Setenv("HTTP_PROXY", s.URL), os.Setenv("HTTPS_PROXY", s.URL))
	_ = errors.Join(os.Unsetenv("NO_PROXY"), os.Unsetenv("no_proxy"))
	m.Run()
}
