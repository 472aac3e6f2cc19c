package sds_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// rights says which names are permitted, to all callers.
type rights struct {
	mu      sync.Mutex
	allowed map[string]bool
	asked   map[string]int
}

func newRights() *rights { return &rights{allowed: make(map[string]bool), asked: make(map[string]int)} }

func (r *rights) authorize(_ context.Context, name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asked[name]++
	if !r.allowed[name] {
		return errors.New("not yours")
	}
	return nil
}

func (r *rights) set(name string, allowed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.allowed[name] = allowed
}

func (r *rights) count(name string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.asked[name]
}

// arrives fails a test in which f, which waits for a response, takes a second.
func arrives(t testing.TB, f func()) {
	t.Helper()
	start := time.Now()
	f()
	assert.Less(t, time.Since(start), time.Second)
}

// A stream that waits for a name that it was refused gets it once it may have it, and one that loses the
// right to a name gets nothing more of it: when the embedder says so, and when the secret changes.
func TestRefresh(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"refresh", "change"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			m, src, r := newMint(t), newFakeSource(), newRights()
			db := m.pair("db")
			src.put("db", db)
			h, c := serving(t, src, &sds.Options{Resolve: sds.Allow(r.authorize)})
			s, d := openSotW(t, c), openDelta(t, c)
			s.ask("db")
			d.subscribe("db")
			d.takes([]string{"db"})
			require.Eventually(t, func() bool { return r.count("db") == 2 }, patient, time.Millisecond)
			assert.Zero(t, src.count("db"), "what is refused is not looked up")
			tell := func() {
				if how == "refresh" {
					h.Refresh()
					return
				}
				db = m.pair("db")
				src.put("db", db)
			}

			for range 3 {
				r.set("db", true)
				arrives(t, func() {
					tell()
					s.takes(db)
					d.takes(nil, db)
				})
				r.set("db", false)
				arrives(t, func() {
					tell()
					d.takes([]string{"db"})
				})
				require.Eventually(t, func() bool { return len(h.Status().Names) == 0 }, patient, time.Millisecond, "nothing is looked up for them")
				calls, asked := src.count("db"), r.count("db")
				db = m.pair("db")
				src.put("db", db)
				require.Eventually(t, func() bool { return r.count("db") == asked+2 }, patient, time.Millisecond, "both are asked about")
				assert.Equal(t, calls, src.count("db"))
				assert.Equal(t, 1, h.Waits())
			}
			s.cancel()
			d.cancel()
			require.Eventually(t, func() bool { return h.Status().Streams == 0 }, patient, time.Millisecond)
			assert.Zero(t, h.Waits())
			calls := r.count("db")
			tell()
			assert.Equal(t, calls, r.count("db"))

			// The stream in SotW had nothing but what it was permitted: each of the three.
			assert.Zero(t, drained(s.raw))
		})
	}
}

// drained returns how many messages there are up to the end of a stream, however that ends.
func drained(s *raw) (messages int) {
	for {
		if _, err := s.next(); err != nil {
			return messages
		}
		messages++
	}
}

// A permission that comes while the hook is about to refuse is not missed.
func TestRefreshDuringRefusal(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"refresh", "change"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			m, src, db := withPair(t, "db")
			entered, refuse := make(chan struct{}), make(chan struct{})
			var once sync.Once
			h, c := serving(t, src, &sds.Options{Resolve: sds.Allow(func(context.Context, string) (err error) {
				once.Do(func() {
					close(entered)
					<-refuse
					err = errors.New("not yet")
				})
				return err
			})})
			s := asking(t, c, "db")
			<-entered
			if how == "refresh" {
				h.Refresh()
			} else {
				db = m.pair("db")
				src.put("db", db)
			}
			close(refuse)
			want(t, s.recv(), db)
		})
	}
}

// A move to another secret that comes while the hook is about to name one is not missed, though the look-up of that one
// does not end.
func TestRefreshDuringMove(t *testing.T) {
	t.Parallel()
	for _, before := range []string{"", "old"} {
		t.Run("from "+before, func(t *testing.T) {
			t.Parallel()
			m := newMint(t)
			src := &slowSource{fakeSource: newFakeSource(), name: "hangs", entered: make(chan struct{}), release: make(chan struct{})}
			old, next := m.pair("old"), m.pair("next")
			src.put("old", old)
			src.put("next", next)
			var mu sync.Mutex
			source := before
			entered, goOn := make(chan struct{}), make(chan struct{})
			h, c := serving(t, src, &sds.Options{Resolve: func(context.Context, string) (string, error) {
				mu.Lock()
				now := source
				if now == "hangs" {
					source = "next" // while the answer is on its way
				}
				mu.Unlock()
				if now == "hangs" {
					close(entered)
					<-goOn
				}
				return now, nil
			}})
			defer close(src.release)
			s := openSotW(t, c)
			if before == "" {
				source = "hangs"
				s.ask("default")
			} else {
				s.ask("default")
				s.takes(named(t, old, "default"))
				mu.Lock()
				source = "hangs"
				mu.Unlock()
				h.Refresh()
			}
			<-entered
			h.Refresh()
			close(goOn)
			want(t, s.recv(), named(t, next, "default"))
		})
	}
}

// A delta stream that asks once more for what it was refused has the question asked once more.
func TestSubscribeAgain(t *testing.T) {
	t.Parallel()
	m, src, r := newMint(t), newFakeSource(), newRights()
	db := m.pair("db")
	src.put("db", db)
	_, c := serving(t, src, &sds.Options{Resolve: sds.Allow(r.authorize)})
	d := openDelta(t, c)
	for range 2 {
		d.subscribe("db")
		d.takes([]string{"db"})
	}
	r.set("db", true)
	d.subscribe("db")
	wantDelta(t, d.recv(), nil, db)
}

// A fetch that has waited for one of its secrets asks again about the others, too, which were there from the start.
func TestFetchAsksAgainAboutAll(t *testing.T) {
	t.Parallel()
	m, r := newMint(t), newRights()
	src := &slowSource{fakeSource: newFakeSource(), name: "slow", entered: make(chan struct{}), release: make(chan struct{})}
	src.put("slow", m.pair("slow"))
	src.put("db", m.pair("db"))
	r.set("slow", true)
	r.set("db", true)
	_, c := serving(t, src, &sds.Options{Resolve: sds.Allow(r.authorize)})
	got := make(chan *envoysds.DiscoveryResponse, 1)
	go func() {
		r, _ := fetch(t, c, "db", "slow")
		got <- r
	}()
	<-src.entered
	assert.Equal(t, 1, src.count("db"))
	r.set("db", false)
	close(src.release)
	assert.Equal(t, []string{"slow"}, slices.Collect(maps.Keys(secrets(t, <-got))))
}

// slowSource waits at its first look-up, or at the first of one name.
type slowSource struct {
	*fakeSource
	name             string // "": of any
	once             sync.Once
	entered, release chan struct{}
}

func (s *slowSource) GenerateSecret(ctx context.Context, name string) (*pki.Secret, error) {
	if s.name == "" || s.name == name {
		s.once.Do(func() {
			close(s.entered)
			<-s.release
		})
	}
	return s.fakeSource.GenerateSecret(ctx, name)
}

// The hook sees the caller of the request in its context: the process on a Unix socket, the proven client of
// a spiffetls server, and what a handler in front has put there. So it does when a version is pushed.
func TestResolveSeesCaller(t *testing.T) {
	t.Parallel()
	m, src, web := withPair(t, "web")
	check := func(t *testing.T, c *http.Client, url string, seen func(context.Context) bool, hook *func(context.Context) bool) {
		*hook = seen
		r, w := io.Pipe()
		req := must.Get(http.NewRequestWithContext(t.Context(), http.MethodPost, url+service+"StreamSecrets", r))(t)
		req.Header.Set("Content-Type", "application/grpc")
		resp := must.Get(c.Do(req))(t)
		defer resp.Body.Close()
		defer w.Close()
		s := sotw{&raw{t: t, in: w, resp: resp, cancel: func() {}}}
		s.ask("web")
		s.takes(web)
		web = m.pair("web")
		src.put("web", web)
		want(t, s.recv(), web)
	}
	var hook func(context.Context) bool
	h := handler(t, src, &sds.Options{Resolve: sds.Allow(func(ctx context.Context, _ string) error {
		if !hook(ctx) {
			return errors.New("unknown caller")
		}
		return nil
	})})

	if runtime.GOOS == "linux" {
		socket, _ := serve(t, h)
		check(t, dial(t, socket), "http://localhost", func(ctx context.Context) bool {
			p, ok := unixsocket.PeerFromContext(ctx)
			return ok && p.UID == uint32(os.Geteuid()) && p.PID == int32(os.Getpid())
		}, &hook)
	}

	self, client := m.ca.SVID("/sds"), m.ca.SVID("/envoy")
	bundles := must.Get(spiffe.NewBundleSet(m.ca.Bundle()))(t)
	server := &http.Server{Handler: h}
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: self, Peers: bundles, Allow: spiffe.AllowIDs(client.ID())}))(t)
	require.NoError(t, endpoint.ConfigureServer(server))
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	go func() { _ = server.ServeTLS(l, "", "") }()
	t.Cleanup(func() { _ = server.Close() })
	endpoint = must.Get(spiffetls.New(spiffetls.Config{Self: client, Peers: bundles, Allow: spiffe.AllowIDs(self.ID())}))(t)
	tr := must.Get(endpoint.Transport())(t)
	t.Cleanup(tr.CloseIdleConnections)
	check(t, &http.Client{Transport: tr}, "https://"+l.Addr().String(), func(ctx context.Context) bool {
		p, ok := spiffetls.PeerFromContext(ctx)
		return ok && p.ID() == client.ID()
	}, &hook)

	type requestKey struct{}
	front := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), requestKey{}, r)))
	}))
	front.EnableHTTP2 = true
	front.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	front.StartTLS()
	t.Cleanup(front.Close)
	check(t, front.Client(), front.URL, func(ctx context.Context) bool {
		r, ok := ctx.Value(requestKey{}).(*http.Request)
		host, _, err := net.SplitHostPort(r.RemoteAddr)
		return ok && r.TLS != nil && r.TLS.HandshakeComplete && err == nil && host == "127.0.0.1"
	}, &hook)
}

// A name that a stream has lost the right to is not looked up for it any longer, though the look-up fails and
// there was nothing to send.
func TestRefreshEndsLookUps(t *testing.T) {
	t.Parallel()
	src, r := newFakeSource(), newRights()
	src.fail("db", errors.New("CA down"))
	r.set("db", true)
	h, c := serving(t, src, &sds.Options{Resolve: sds.Allow(r.authorize)})
	s, d := openSotW(t, c), openDelta(t, c)
	s.ask("db")
	d.subscribe("db")
	require.Eventually(t, func() bool { return src.count("db") > 0 && r.count("db") >= 2 }, patient, time.Millisecond)
	r.set("db", false)
	h.Refresh()
	wantDelta(t, d.recv(), []string{"db"})
	require.Eventually(t, func() bool { return len(h.Status().Names) == 0 }, patient, time.Millisecond)
	assert.Equal(t, 1, h.Waits())
}
