package secretcache_test

import (
	"context"
	"crypto/x509"
	"flag"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var long = flag.Bool("long", false, "run the soaks")

// TestReadersNeverMiss has eight readers look without a pause, in real time, while certificates, roots and federated
// bundles are replaced hundreds of times, by a CA that answers garbage now and then: in virtual time readers and
// the writer never meet. Each reader finds everything at every moment, without waiting, and nothing that has expired.
func TestReadersNeverMiss(t *testing.T) {
	rounds.Slow(t)
	duration := time.Duration(rounds.Of(1)) * 500 * time.Millisecond
	if *long {
		duration = 30 * time.Second
	}
	// On a machine that is busy it takes longer until readers and writer have met often enough.
	enough := int64(rounds.Of(150))
	if rounds.Race {
		enough = 100
	}
	ca, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(20 * time.Second) })
	var answers atomic.Int64
	ca.EditAnswers(func(chain []*x509.Certificate) []*x509.Certificate {
		switch answers.Add(1) % 60 {
		case 20:
			return nil
		case 40:
			return []*x509.Certificate{ca.Root()}
		}
		return chain
	})
	var federated bundles
	federated.set.Store(set(t, partner.Bundle()))
	// Renewed after a tenth of a second.
	m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca, Federated: &federated, GraceRatio: 0.994, Jitter: 0.005}))(t)
	require.NoError(t, m.Add(worker))
	start(t, m)
	names := []string{"default", web.String(), worker.String(), "ROOTCA", "spiffe://example.org"}
	for _, name := range append(names, "spiffe://partner.test") {
		must.Get(m.GenerateSecret(t.Context(), name))(t)
	}

	ctx, cancel := context.WithCancel(t.Context())
	now, stop := context.WithCancel(context.Background()) // that of a reader that does not wait
	stop()
	var misses, reads [4]atomic.Int64
	var seen sync.Map // the certificates, by serial number
	var renewals atomic.Int64
	readers := [4]func() bool{
		func() bool {
			s, err := m.SVID()
			return err == nil && s != nil && time.Now().Before(s.NotAfter())
		},
		func() bool {
			s, err := m.Snapshot()
			if err != nil || s == nil {
				return false
			}
			svid, _ := s.SVID()
			_, err = s.Bundle(domain)
			_, federatedErr := s.Bundle(partner.TrustDomain())
			if svid == nil {
				return false
			}
			if _, known := seen.LoadOrStore(svid.Leaf().SerialNumber.String(), true); !known {
				renewals.Add(1)
			}
			return err == nil && federatedErr == nil
		},
		func() bool {
			for _, td := range []spiffe.TrustDomain{domain, partner.TrustDomain()} {
				b, err := m.Bundle(td)
				if err != nil || b == nil {
					return false
				}
			}
			return true
		},
		func() bool {
			for _, name := range names {
				if s, err := m.GenerateSecret(now, name); err != nil || s == nil {
					return false
				}
			}
			return true
		},
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for kind := i % 4; ctx.Err() == nil; {
				for range 10 {
					reads[kind].Add(1)
					if !readers[kind]() {
						misses[kind].Add(1)
					}
				}
				runtime.Gosched() // or else the writer hardly runs where there are few cores
			}
		})
	}
	changes := 0
	begin := time.Now()
	for ; time.Since(begin) < duration || (changes <= rounds.Of(15) || renewals.Load() <= enough) && time.Since(begin) < time.Minute; changes++ {
		if changes%2 == 0 {
			old, _ := m.SVID()
			ca.Rotate()
			ca.DropOldRoots() // each certificate is renewed at once
			for renewed := false; !renewed; {
				changed := m.Changed()
				if now, _ := m.SVID(); now != old {
					renewed = true
				} else {
					<-changed
				}
			}
		}
		partner.Rotate()
		partner.DropOldRoots()
		changed := m.Changed()
		federated.set.Store(set(t, partner.Bundle()))
		federated.changed.Notify()
		<-changed
	}
	cancel()
	wg.Wait()
	for kind, name := range []string{"SVID", "Snapshot", "Bundle", "GenerateSecret"} {
		assert.Zero(t, misses[kind].Load(), "%s found nothing, of %d calls", name, reads[kind].Load())
	}
	t.Logf("%d changes of bundles, %d certificates", changes, renewals.Load())
	assert.Greater(t, renewals.Load(), int64(50))
	assert.Greater(t, changes, rounds.Of(15))
}

// filled returns a Manager that has its default identity and n more.
func filled(tb testing.TB, n int) *secretcache.Manager {
	tb.Helper()
	m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: spiffetest.NewCA(tb, "example.org")}))(tb)
	must.Get(m.GenerateSecret(tb.Context(), "default"))(tb)
	for i := range n {
		name := fmt.Sprintf("spiffe://example.org/ns/prod/sa/web-%d", i)
		require.NoError(tb, m.Add(spiffe.MustParseID(name)))
		must.Get(m.GenerateSecret(tb.Context(), name))(tb)
	}
	return m
}

// reads are what happens on every handshake or for every stream.
var reads = []struct {
	name string
	read func(context.Context, *secretcache.Manager) error
}{
	{"SVID", func(_ context.Context, m *secretcache.Manager) error { _, err := m.SVID(); return err }},
	{"Bundle", func(_ context.Context, m *secretcache.Manager) error { _, err := m.Bundle(domain); return err }},
	{"Snapshot", func(_ context.Context, m *secretcache.Manager) error { _, err := m.Snapshot(); return err }},
	{"Changed", func(_ context.Context, m *secretcache.Manager) error { m.Changed(); return nil }},
	{"GenerateSecret/default", generate("default")},
	{"GenerateSecret/ID", generate("spiffe://example.org/ns/prod/sa/web-7")},
}

func generate(name string) func(context.Context, *secretcache.Manager) error {
	return func(ctx context.Context, m *secretcache.Manager) error {
		return must.Err(m.GenerateSecret(ctx, name))
	}
}

func TestReadsDoNotAllocate(t *testing.T) {
	if rounds.Race {
		t.Skip("the race detector allocates")
	}
	m := filled(t, 10)
	ctx := t.Context()
	for _, r := range reads {
		require.NoError(t, r.read(ctx, m), r.name)
		assert.Zero(t, testing.AllocsPerRun(100, func() { _ = r.read(ctx, m) }), r.name)
	}
}

// TestMemory holds what one more identity costs, the PEM of its key and certificate included, and that it costs no
// goroutine.
func TestMemory(t *testing.T) {
	rounds.Slow(t)
	if rounds.Race {
		t.Skip("the race detector needs memory of its own")
	}
	many := 1000
	if *long {
		many = 100_000
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var s runtime.MemStats
		runtime.ReadMemStats(&s)
		return s.HeapAlloc
	}
	filled(t, 100) // what is made once
	before := heap()
	m := filled(t, many)
	each := float64(heap()-before) / float64(many)
	t.Logf("%.0f bytes for each of %d identities", each, many)
	assert.Less(t, each, 4096.0)

	goroutines := runtime.NumGoroutine()
	start(t, m)
	time.Sleep(50 * time.Millisecond)
	assert.LessOrEqual(t, runtime.NumGoroutine()-goroutines, 8, "goroutines of a Manager that runs")
}

// BenchmarkSVID is what a TLS handshake reads.
func BenchmarkSVID(b *testing.B) {
	m := filled(b, 0)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.SVID(); err != nil {
			b.Fatal(err)
		}
	}
}
