package proofs_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/inject"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/sdssource"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/filesink"
	"github.com/svidkit/svidkit/spiffe/filesource"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// blocked is a handler that takes its first line and never comes back, as one does whose pipe is full.
type blocked struct {
	lines *atomic.Int32
	test  context.Context
}

func (blocked) Enabled(context.Context, slog.Level) bool { return true }
func (b blocked) Handle(context.Context, slog.Record) error {
	b.lines.Add(1)
	<-b.test.Done()
	return nil
}
func (b blocked) WithAttrs([]slog.Attr) slog.Handler { return b }
func (b blocked) WithGroup(string) slog.Handler      { return b }

// seen waits for what a part has to do although its log is blocked.
func seen(t *testing.T, what func() bool) {
	t.Helper()
	require.Eventually(t, what, 20*time.Second, 10*time.Millisecond)
}

// bothAnswered sends a request that the handler refuses and logs, and then another one like it.
func bothAnswered(t *testing.T, h http.Handler, status int, request func() *http.Request) {
	t.Helper()
	for range 2 {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, request())
		require.Equal(t, status, w.Code)
	}
}

// TestBlockedLog: a log that blocks stops no part of the library: identities renew, servers answer, and what is closed ends.
func TestBlockedLog(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	id := spiffe.MustParseID("spiffe://example.org/web")
	for name, part := range map[string]func(t *testing.T, log *slog.Logger){
		"authn.Require": func(t *testing.T, log *slog.Logger) {
			h := authn.Require(authn.FirstOf(), http.NotFoundHandler(), log)
			bothAnswered(t, h, http.StatusUnauthorized, func() *http.Request { return httptest.NewRequest("GET", "/", nil) })
		},
		"ca.Config, and the Manager of a secretcache": func(t *testing.T, log *slog.Logger) {
			authority := must.Get(ca.New(ca.Config{TrustDomain: td, Logger: log}))(t)
			issuer := must.Get(local.New(authority, id))(t)
			m, err := secretcache.Start(t.Context(), secretcache.Config{ID: id, CA: issuer, Logger: log, RenewIn: func(time.Duration, int) time.Duration { return 10 * time.Millisecond }})
			require.NoError(t, err)
			first := must.Get(m.SVID())(t)
			seen(t, func() bool { now, err := m.SVID(); return err == nil && now != first })
			require.NoError(t, m.Close())
		},
		"auditlog.Open": func(t *testing.T, log *slog.Logger) {
			dir := filepath.Join(t.TempDir(), "open")
			require.NoError(t, os.Mkdir(dir, 0o700))
			require.NoError(t, os.Chmod(dir, 0o777))
			l := must.Get(auditlog.Open(filepath.Join(dir, "audit.jsonl"), log))(t)
			require.NoError(t, l.RecordKeyEvent(t.Context(), &ca.KeyEvent{Time: time.Now(), Event: "created", Key: "root"}))
			require.NoError(t, l.Close())
		},
		"caserver.ServeOptions": func(t *testing.T, log *slog.Logger) {
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			ctx, end := context.WithCancel(t.Context())
			served := make(chan error, 1)
			authority := spiffetest.NewCA(t, "example.org")
			chain, key := authority.Certificate("/ca")
			go func() {
				served <- caserver.Serve(ctx, l, caserver.ServeOptions{Handler: http.NotFoundHandler(), TLS: spiffetest.TLSConfig(chain, key), Logger: log})
			}()
			bad := must.Get(net.Dial("tcp", l.Addr().String()))(t)
			must.Get(bad.Write([]byte("GET / HTTP/1.1\r\n\r\n")))(t)
			defer bad.Close()
			good, err := tls.Dial("tcp", l.Addr().String(), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
			require.NoError(t, err)
			require.NoError(t, good.Close())
			_, err = io.Copy(io.Discard, bad) // until it is refused
			require.NoError(t, err)
			end()
			require.NoError(t, <-served)
		},
		"federation.Config": func(t *testing.T, log *slog.Logger) {
			other := spiffetest.NewCA(t, "other.org")
			endpoint := federationtest.NewEndpoint(t, other)
			m, err := federation.Start(t.Context(), federation.Config{Logger: log, Relationships: []federation.Relationship{endpoint.Relationship()}})
			require.NoError(t, err)
			require.NoError(t, m.Close())
		},
		"filesink.Config and filesource.Config": func(t *testing.T, log *slog.Logger) {
			dir := filepath.Join(t.TempDir(), "files")
			from := spiffetest.NewCA(t, "example.org").Source("/web")
			sink, err := filesink.Start(t.Context(), filesink.Config{Dir: dir, CertName: "cert.pem", KeyName: "key.pem", RootsName: "roots.pem", Source: from, Logger: log})
			require.NoError(t, err)
			src := must.Get(filesource.Start(t.Context(), filesource.Config{
				CertFile: filepath.Join(dir, "cert.pem"), KeyFile: filepath.Join(dir, "key.pem"), Bundles: []filesource.BundleFile{{Path: filepath.Join(dir, "roots.pem"), TrustDomain: td}}, Logger: log,
			}))(t)
			first := must.Get(src.SVID())(t)
			from.Renew()
			seen(t, func() bool { now, err := src.SVID(); return err == nil && now != first })
			require.NoError(t, src.Close())
			require.NoError(t, sink.Close())
		},
		"inject.Config": func(t *testing.T, log *slog.Logger) {
			in, err := inject.New(inject.Config{Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}, TrustAnchors: pki.MarshalCertificatesPEM(spiffetest.NewCA(t, "cluster.local").Root()), Logger: log})
			require.NoError(t, err)
			bothAnswered(t, in, http.StatusOK, func() *http.Request {
				r := httptest.NewRequest("POST", "/", strings.NewReader(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"CREATE","kind":{"kind":"Pod"},"object":{"metadata":"none"}}}`))
				r.Header.Set("Content-Type", "application/json")
				return r
			})
		},
		"jwtsvid.MiddlewareOptions": func(t *testing.T, log *slog.Logger) {
			v := must.Get(jwtsvid.NewValidator(spiffetest.NewCA(t, "example.org").Bundle(), []string{"me"}, nil))(t)
			wrap := must.Get(jwtsvid.Middleware(v, spiffe.AllowIDs(id), &jwtsvid.MiddlewareOptions{Logger: log}))(t)
			bothAnswered(t, wrap(http.NotFoundHandler()), http.StatusUnauthorized, func() *http.Request { return httptest.NewRequest("GET", "https://localhost/", nil) })
		},
		"sds.Options": func(t *testing.T, log *slog.Logger) {
			h, err := sds.NewHandler(sdssource.FromIdentity(spiffetest.NewCA(t, "example.org").Source("/web")), &sds.Options{Logger: log, Resolve: func(_ context.Context, name string) (string, error) {
				if name != "default" {
					return "", errors.New("no")
				}
				return name, nil
			}})
			require.NoError(t, err)
			path := filepath.Join(t.TempDir(), "s")
			ctx, end := context.WithCancel(t.Context())
			served := make(chan error, 1)
			server := &unixsocket.Server{Path: path, Handler: h, Logger: log}
			require.NoError(t, server.Listen())
			go func() { served <- server.Run(ctx) }()
			client := sds.NewClient(sds.UnixClient(path), "http://localhost")
			go func() {
				for range client.Watch(ctx, "other") {
				}
			}()
			seen(t, func() bool { return log.Handler().(blocked).lines.Load() > 0 })
			for secret, err := range client.Watch(t.Context(), "default") {
				require.NoError(t, err)
				require.Equal(t, "default", secret.Name())
				break
			}
			end()
			require.NoError(t, <-served)
		},
		"source.LastGoodConfig": func(t *testing.T, log *slog.Logger) {
			server := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
			from := must.Get(workloadapi.New(server.Config()))(t)
			dir := t.TempDir()
			require.NoError(t, os.Chmod(dir, 0o777))
			l, err := source.StartLastGood(t.Context(), source.LastGoodConfig{Source: from, MaxAge: time.Hour, Dir: filepath.Join(dir, "last"), Logger: log})
			require.NoError(t, err)
			first := must.Get(l.SVID())(t)
			server.Rotate()
			seen(t, func() bool { now, err := l.SVID(); return err == nil && now != first })
			require.NoError(t, l.Close())
		},
		"spiffetls.Config and spiffetls.Governor": func(t *testing.T, log *slog.Logger) {
			authority := spiffetest.NewCA(t, "example.org")
			me, stranger := authority.Source("/web"), spiffetest.NewCA(t, "other.org").Source("/web")
			server := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
			g := new(spiffetls.Governor)
			endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: spiffe.AllowMembersOf(td), Logger: log, Governor: g})
			require.NoError(t, err)
			require.NoError(t, endpoint.ConfigureServer(server))
			l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
			go func() { _ = server.ServeTLS(l, "", "") }()
			t.Cleanup(func() { _ = server.Close() })
			for _, who := range []*spiffetest.Source{stranger, me} {
				endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: who, Peers: me, Allow: spiffe.AllowMembersOf(td)}))(t)
				rt := must.Get(endpoint.Transport())(t)
				resp, err := (&http.Client{Transport: rt, Timeout: 20 * time.Second}).Get("https://" + l.Addr().String())
				if who == stranger {
					require.Error(t, err)
					continue
				}
				require.NoError(t, err)
				require.NoError(t, resp.Body.Close())
			}
		},
		"unixsocket.Server": func(t *testing.T, log *slog.Logger) {
			dir := must.Get(os.MkdirTemp("", "blocked"))(t)
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			require.NoError(t, os.Chmod(dir, 0o777))
			s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: http.NotFoundHandler(), Logger: log}
			ctx, end := context.WithCancel(t.Context())
			require.NoError(t, s.Listen())
			served := make(chan error, 1)
			go func() { served <- s.Run(ctx) }()
			require.NoError(t, must.Get(sds.UnixClient(s.Path).Get("http://localhost/"))(t).Body.Close())
			end()
			require.NoError(t, <-served)
		},
		"workloadapi.Config": func(t *testing.T, log *slog.Logger) {
			server := workloadapitest.NewServer(t, spiffetest.NewCA(t, "example.org"), "/web")
			cfg := server.Config()
			cfg.Logger = log
			s := must.Get(workloadapi.Start(t.Context(), cfg))(t)
			first := must.Get(s.SVID())(t)
			server.Rotate()
			seen(t, func() bool { now, err := s.SVID(); return err == nil && now != first })
			require.NoError(t, s.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lines := new(atomic.Int32)
			begun := time.Now()
			part(t, slog.New(blocked{lines, t.Context()}))
			assert.Eventually(t, func() bool { return lines.Load() > 0 }, time.Minute, time.Millisecond, "it has logged nothing, so this proves nothing")
			assert.Less(t, time.Since(begun), 15*time.Second, fmt.Sprint("lines: ", lines.Load()))
		})
	}
}
