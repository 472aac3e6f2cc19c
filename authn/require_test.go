package authn_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// later is an error that passes.
type later struct{ after time.Duration }

func (later) Error() string                               { return "later" }
func (l later) Retryable() (after time.Duration, ok bool) { return l.after, true }

// answering is an authenticator with one answer.
func answering(c *authn.Caller, err error) authn.Authenticator {
	return authn.Func(func(*http.Request) (*authn.Caller, error) { return c, err })
}

// firstOf is the error of [authn.FirstOf] whose methods fail with errs.
func firstOf(errs ...error) error {
	var methods []authn.Authenticator
	for _, err := range errs {
		methods = append(methods, answering(nil, err))
	}
	_, err := authn.FirstOf(methods...).Authenticate(httptest.NewRequest(http.MethodGet, "/", nil))
	return err
}

// outcomes of authenticators, and what a client is told.
var outcomes = []struct {
	name   string
	caller *authn.Caller
	err    error
	status int
	retry  string
}{
	{"no credential", nil, fmt.Errorf("x: %w", authn.ErrNoCredential), 401, ""},
	{"refused", nil, fmt.Errorf("sesame: %w", authn.ErrRefused), 401, ""},
	{"refused for a cause", nil, fmt.Errorf("%w: %w", authn.ErrRefused, errors.New("sesame")), 401, ""},
	{"all judged", nil, errors.Join(fmt.Errorf("a: %w", authn.ErrNoCredential), fmt.Errorf("b: %w", authn.ErrRefused)), 401, ""},
	{"nothing", nil, nil, 401, ""},
	{"a caller without a name", &authn.Caller{Method: "m", Pod: &spiffe.Pod{Name: "web-0"}}, nil, 401, ""},
	{"other error", nil, errors.New("the API server is away"), 503, ""},
	{"one cannot judge", nil, firstOf(fmt.Errorf("a: %w", authn.ErrNoCredential), errors.New("away")), 503, ""},
	{"one is to come back", nil, firstOf(authn.ErrRefused, later{2 * time.Second}, later{time.Second}), 503, "2"},
	{"later", nil, fmt.Errorf("x: %w", later{2500 * time.Millisecond}), 503, "3"},
	{"limit", nil, fmt.Errorf("x: %w", &limit.Error{Reason: limit.TotalRate, RetryAfter: time.Second}), 503, "1"},
	{"later, unknown when", nil, later{}, 503, ""},
	{"by ID", &authn.Caller{ID: spiffe.MustParseID("spiffe://example.org/web"), Method: "m"}, nil, 200, ""},
	{"by name", &authn.Caller{Name: "uid:1000", Method: "m"}, nil, 200, ""},
	{"by DNS name", &authn.Caller{DNSNames: []string{"web.test"}, Method: "m"}, nil, 200, ""},
}

func TestRequire(t *testing.T) {
	t.Parallel()
	for _, c := range outcomes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			served := false
			h := authn.Require(answering(c.caller, c.err), http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				served = true
				got, ok := authn.CallerFromContext(r.Context())
				assert.True(t, ok)
				assert.Same(t, c.caller, got)
			}), nil)
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
			assert.Equal(t, c.status, w.Code)
			assert.Equal(t, c.status == 200, served)
			assert.Equal(t, c.status == 503, authn.Unavailable(c.err))
			if c.status != 200 {
				assert.Equal(t, http.StatusText(c.status)+"\n", w.Body.String())
				assert.Equal(t, "no-store", w.Header().Get("Cache-Control"))
			}
			challenge := ""
			if c.status == 401 {
				challenge = "Bearer"
			}
			assert.Equal(t, challenge, w.Header().Get("WWW-Authenticate"))
			assert.Equal(t, c.retry, w.Header().Get("Retry-After"))
		})
	}
	_, ok := authn.CallerFromContext(t.Context())
	assert.False(t, ok)
}

// TestRequireDenied: the log shows each of several IDs that the policy denies.
func TestRequireDenied(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	verifier := must.Get(spiffe.NewVerifier(ca.Bundle(), spiffe.AllowIDs(ca.SVID("/web").ID()), nil))(t)
	var log strings.Builder
	h := authn.Require(authn.ClientCertificate(verifier), http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, nil)))
	for _, path := range []string{"/a", "/a", "/b"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, ca.RequestFrom(path, httptest.NewRequest(http.MethodGet, "/", nil)))
		assert.Equal(t, http.StatusUnauthorized, w.Code)
	}
	assert.Equal(t, 2, strings.Count(log.String(), "request refused"), log.String())
	assert.Contains(t, log.String(), "example.org/b")
}

// TestRequirePath: a path that a ServeMux in front and the handler behind may read differently is refused before the method is asked.
func TestRequirePath(t *testing.T) {
	t.Parallel()
	asked := 0
	var log strings.Builder
	h := authn.Require(authn.Func(func(*http.Request) (*authn.Caller, error) {
		asked++
		return &authn.Caller{Name: "uid:1000", Method: "m"}, nil
	}), http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), slog.New(slog.NewTextHandler(&log, nil)))
	for _, c := range []struct {
		method, target string
		status         int
	}{
		{"GET", "/a/", 200}, {"OPTIONS", "*", 200}, {"GET", "/orders/a%2fb", 200}, {"CONNECT", "db.test:443", 200},
		{"CONNECT", "/a", 400}, {"GET", "/public/../admin", 400}, {"GET", "/public/%2e%2e/admin", 400}, {"POST", "//admin", 400}, {"GET", "/a/.", 400},
	} {
		before, w := asked, httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.target, nil))
		assert.Equal(t, c.status, w.Code, "%s %s", c.method, c.target)
		assert.Equal(t, c.status == 200, asked != before, "%s %s", c.method, c.target)
	}
	assert.Contains(t, log.String(), "its path can be read in two ways: a CONNECT has none")
}

// A request that its client has given up says nothing about its credential.
func TestRequireGivenUp(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	w := httptest.NewRecorder()
	authn.Require(answering(nil, fmt.Errorf("x: %w", authn.ErrRefused)), http.NotFoundHandler(), nil).ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	assert.Equal(t, http.StatusServiceUnavailable, w.Code)
}

// A gRPC client gets a status, over a real connection, and a body that it sends meanwhile does not matter.
func TestRequireGRPC(t *testing.T) {
	t.Parallel()
	for _, c := range outcomes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const path = "/test.Service/Call"
			service := &grpchttp.Handler{MaxMessage: 1 << 20, Methods: map[string]grpchttp.Method{path: grpchttp.Unary(func(ctx context.Context, _ []byte) ([]byte, error) {
				got, _ := authn.CallerFromContext(ctx)
				return []byte(got.String()), nil
			})}}
			srv := httptest.NewUnstartedServer(authn.Require(answering(c.caller, c.err), service, nil))
			srv.EnableHTTP2 = true
			srv.StartTLS()
			t.Cleanup(srv.Close)
			body := append([]byte{0, 0, 1, 0, 0}, make([]byte, 1<<16)...)
			r := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, srv.URL+path, strings.NewReader(string(body))))(t)
			r.Header.Set("Content-Type", "application/grpc+proto")
			r.Header.Set("Te", "trailers")
			resp := must.Get(srv.Client().Do(r))(t)
			defer resp.Body.Close()
			text := must.Get(io.ReadAll(resp.Body))(t)
			assert.Equal(t, http.StatusOK, resp.StatusCode)
			assert.Equal(t, "application/grpc", resp.Header.Get("Content-Type"))
			if c.status == 200 {
				assert.Equal(t, c.caller.String(), string(text[5:]))
				assert.Equal(t, "0", resp.Trailer.Get("Grpc-Status"))
				return
			}
			assert.Empty(t, text)
			assert.Equal(t, map[int]string{401: "16", 503: "14"}[c.status], resp.Header.Get("Grpc-Status"))
			assert.Equal(t, http.StatusText(c.status), resp.Header.Get("Grpc-Message"))
			assert.Empty(t, resp.Header.Get("WWW-Authenticate"))
		})
	}
}

// Content types that are not gRPC's get the answer of HTTP.
func TestRequireNotGRPC(t *testing.T) {
	t.Parallel()
	h := authn.Require(answering(nil, nil), http.NotFoundHandler(), nil)
	for _, c := range []struct {
		contentType string
		major, want int
	}{
		{"application/grpc", 2, 200}, {"application/grpc;charset=x", 2, 200}, {"application/grpc", 1, 401},
		{"application/grpc-web", 2, 401}, {"application/json", 2, 401}, {"", 2, 401},
	} {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Content-Type", c.contentType)
		r.ProtoMajor = c.major
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		assert.Equal(t, c.want, w.Code, c)
	}
}

// Refusals are logged with the peer: the first of each kind at once, then their number.
func TestRequireLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log buffer
		var err error
		a := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, err })
		h := authn.Require(a, http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, nil)))
		for _, err = range []error{
			firstOf(errors.New("a: none"), fmt.Errorf("b: %w", authn.ErrRefused)), fmt.Errorf("b: %w", authn.ErrRefused),
			authn.ErrNoCredential, errors.New("away"),
		} {
			for range 100 {
				r := httptest.NewRequest(http.MethodGet, "/", nil)
				r.RemoteAddr = "192.0.2.7:1234"
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		require.Len(t, lines, 3)
		assert.Contains(t, lines[0], `level=WARN msg="authn: request refused" reason="credentials cannot be judged now" err="a: none; b: credential refused" peer=192.0.2.7:1234`)
		assert.Contains(t, lines[1], `reason="no credential is good" err="b: credential refused" peer=192.0.2.7:1234`)
		assert.Contains(t, lines[2], `reason="there is no credential" err="no credential" peer=192.0.2.7:1234`)
		time.Sleep(61 * time.Second)
		synctest.Wait()
		assert.Equal(t, 6, strings.Count(log.String(), "\n"))
		assert.Contains(t, log.String(), "count=199 interval=1m0s")
		time.Sleep(2 * time.Minute) // for the timers
	})
	var log strings.Builder
	h := authn.Require(answering(nil, authn.ErrRefused), http.NotFoundHandler(), slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	for range 3 {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
	}
	assert.Equal(t, 3, strings.Count(log.String(), "\n"), "each of them at level Debug")
}

// buffer is a strings.Builder for several goroutines.
type buffer = logtest.Buffer

// SDS over TCP: the caller is proven by its certificate, and the handler's hook reads who it is.
func TestRequireInFrontOfSDS(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.1-1", "IST-5.2-1")
	ca := spiffetest.NewCA(t, "example.org")
	server, web, db := ca.SVID("/agent"), ca.SVID("/web"), ca.SVID("/db")
	manager := must.Get(secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca}))(t)
	api := ca.SVID("/api")
	require.NoError(t, manager.Add(api.ID()))
	handler, err := sds.NewHandler(manager, &sds.Options{Resolve: func(ctx context.Context, name string) (string, error) {
		caller, ok := authn.CallerFromContext(ctx)
		if !ok || name != "default" || caller.ID == db.ID() {
			return "", errors.New("a caller has its own secret, under the name default")
		}
		return caller.ID.String(), nil
	}})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, handler.Close()) })
	who := authn.FirstOf(clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(web.ID(), api.ID(), db.ID())))
	srv := &http.Server{Handler: authn.Require(who, handler, nil)}
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: server, Peers: ca.Bundle(), Allow: spiffe.AllowMembersOf(ca.TrustDomain())}))(t)
	require.NoError(t, endpoint.ConfigureServer(srv))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	done := make(chan error, 1)
	go func() { done <- srv.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = srv.Close(); <-done })

	watch := func(svid *spiffe.SVID, patience time.Duration) (*pki.Secret, error) {
		endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: svid, Peers: ca.Bundle(), Allow: spiffe.AllowIDs(server.ID())}))(t)
		transport := must.Get(endpoint.Transport())(t)
		defer transport.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		for secret, err := range sds.NewClient(&http.Client{Transport: transport}, "https://"+l.Addr().String()).Watch(ctx, "default") {
			return secret, err
		}
		return nil, errors.New("nothing")
	}
	for _, svid := range []*spiffe.SVID{web, api} {
		secret := must.Get(watch(svid, 20*time.Second))(t)
		assert.Equal(t, "default", secret.Name())
		pem, _, _ := secret.KeyPair()
		chain := must.Get(pki.ParseCertificatesPEM(pem))(t)
		id := must.Get(spiffe.IDFromCertificate(chain[0]))(t)
		assert.Equal(t, svid.ID(), id, "each caller has its own default")
	}
	require.ErrorContains(t, must.Err(watch(db, 200*time.Millisecond)), "nothing")
	_, err = watch(ca.SVID("/stranger"), 20*time.Second)
	e, ok := errors.AsType[*grpchttp.Error](err)
	require.True(t, ok, "%v", err)
	assert.Equal(t, grpchttp.Unauthenticated, e.Code)
}
