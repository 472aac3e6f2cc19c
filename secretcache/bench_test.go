package secretcache_test

import (
	"context"
	"fmt"
	"runtime"
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
	{"GenerateSecret/ROOTCA", generate("ROOTCA")},
	{"GenerateSecret/ID", generate("spiffe://example.org/ns/prod/sa/web-7")},
	{"GenerateSecret/domain", generate("spiffe://example.org")},
}

func generate(name string) func(context.Context, *secretcache.Manager) error {
	return func(ctx context.Context, m *secretcache.Manager) error {
		return must.ErrorOf(m.GenerateSecret(ctx, name))
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
