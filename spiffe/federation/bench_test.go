package federation_test

import (
	"context"
	"errors"
	"fmt"
	"github.com/svidkit/svidkit/internal/test/must"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// sink is a ResponseWriter that keeps nothing.
type sink struct {
	header http.Header
	status int
	n      int
}

func (s *sink) Header() http.Header { return s.header }
func (s *sink) WriteHeader(status int) {
	s.status = status
}
func (s *sink) Write(p []byte) (int, error) {
	s.n += len(p)
	return len(p), nil
}

func benchHandler(tb testing.TB) (http.Handler, string) {
	tb.Helper()
	b := bundleOf(tb, spiffetest.NewCA(tb, "partner.test"), new(uint64(7)), 5*time.Minute)
	h := must.Get(federation.NewHandler(b, partner))(tb)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	return h, w.Header().Get("Etag")
}

func BenchmarkServe(b *testing.B) {
	h, tag := benchHandler(b)
	for name, etag := range map[string]string{"200": "", "304": tag} {
		b.Run(name, func(b *testing.B) {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			if etag != "" {
				r.Header.Set("If-None-Match", etag)
			}
			w := &sink{header: http.Header{}}
			b.ReportAllocs()
			for b.Loop() {
				clear(w.header)
				h.ServeHTTP(w, r)
			}
			if fmt.Sprint(w.status) != name {
				b.Fatal(w.status)
			}
		})
	}
}

// Reading allocates nothing.
func TestAllocations(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates too")
	}
	m := manyRelationships(t, 100)
	require.NoError(t, m.Set(spiffetest.NewCA(t, "td-7").Bundle()))
	td := spiffe.MustParseTrustDomain("td-7")
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		if _, err := m.Bundle(td); err != nil {
			t.Error(err)
		}
		m.Bundles()
	}))
}

func manyRelationships(tb testing.TB, n int) *federation.Manager {
	tb.Helper()
	cfg := federation.Config{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("refused")
	}}
	for i := range n {
		cfg.Relationships = append(cfg.Relationships, federation.Relationship{
			TrustDomain: spiffe.MustParseTrustDomain(fmt.Sprint("td-", i)), URL: "https://a.test/bundle", Profile: federation.Web{},
		})
	}
	return newManager(tb, cfg)
}

func BenchmarkBundle(b *testing.B) {
	m := manyRelationships(b, 1000)
	require.NoError(b, m.Set(spiffetest.NewCA(b, "td-7").Bundle()))
	td := spiffe.MustParseTrustDomain("td-7")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Bundle(td); err != nil {
			b.Fatal(err)
		}
	}
}

// What a relationship costs that waits for its next fetch, in memory.
func BenchmarkIdleRelationship(b *testing.B) {
	const n = 10_000
	for b.Loop() {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		m := manyRelationships(b, n)
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "B/relationship")
		runtime.KeepAlive(m)
	}
}

// What it costs to look after 1,000 relationships for an hour in which every fetch fails at once:
// scheduling, without the network.
func TestScheduling(t *testing.T) {
	rounds.Slow(t)
	if rounds.Race {
		t.Skip("60,000 attempts")
	}
	start := time.Now()
	fetches := 0
	synctest.Test(t, func(t *testing.T) {
		m := manyRelationships(t, 1000)
		running(t, m)
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, s := range m.Status() {
			assert.True(t, s.Failures >= 54 && s.Failures <= 62, "%d", s.Failures)
			fetches += s.Failures
		}
	})
	t.Logf("%v for each of %d attempts", time.Since(start)/time.Duration(fetches), fetches)
}

// A fetch over a real socket with a new handshake, and one that learns that nothing has changed.
func BenchmarkFetch(b *testing.B) {
	web, ca := spiffetest.NewCA(b, "web.test"), spiffetest.NewCA(b, "partner.test")
	_, url := listen(b, webCert(web, "127.0.0.1"), serving(b, ca.Bundle()))
	r := federation.Relationship{TrustDomain: partner, URL: url, Profile: webRoots(web)}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := federation.Fetch(b.Context(), r, nil); err != nil {
			b.Fatal(err)
		}
	}
}
