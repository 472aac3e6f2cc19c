package federation_test

import (
	"context"
	"flag"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var long = flag.Bool("long", false, "run the soaks")

// TestReadersNeverMiss has eight readers look without a pause, in real time, while the bundle is replaced by fetches and
// by an operator and the relationship is changed: in virtual time readers and the writer never meet.
func TestReadersNeverMiss(t *testing.T) {
	rounds.Slow(t)
	duration := time.Duration(rounds.Of(1)) * 500 * time.Millisecond
	if *long {
		duration = 30 * time.Second
	}
	ca, web := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "web.test")
	net := newInternet()
	site := net.host(t, "partner.test", webCert(web, "partner.test"), serving(t, ca.Bundle()))
	bundles := []*spiffe.Bundle{ca.Bundle()}
	for range 20 {
		ca.Rotate()
		ca.DropOldRoots()
		bundles = append(bundles, ca.Bundle())
	}
	r := federation.Relationship{TrustDomain: partner, URL: "https://partner.test/bundle", Profile: webRoots(web)}
	m := newManager(t, federation.Config{Relationships: []federation.Relationship{r}, DialContext: net.dial})
	require.NoError(t, m.Set(ca.Bundle()))
	running(t, m)

	ctx, cancel := context.WithCancel(t.Context())
	var misses, reads [2]atomic.Int64
	var seen sync.Map // the bundles
	var found atomic.Int64
	readers := [2]func() bool{
		func() bool {
			b, err := m.Bundle(partner)
			if b != nil {
				if _, known := seen.LoadOrStore(b, true); !known {
					found.Add(1)
				}
			}
			return err == nil && b != nil
		},
		func() bool {
			b, err := m.Bundles().Bundle(partner)
			return err == nil && b != nil
		},
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for kind := i % 2; ctx.Err() == nil; {
				for range 100 {
					reads[kind].Add(1)
					if !readers[kind]() {
						misses[kind].Add(1)
					}
				}
				runtime.Gosched() // or else the writer hardly runs where there are few cores
			}
		})
	}
	changes, fetched := 0, 0
	start := time.Now()
	// On a machine that is busy it takes longer until readers and writer have met.
	for ; time.Since(start) < duration || found.Load() <= 20 && time.Since(start) < time.Minute; changes++ {
		require.NoError(t, m.Set(bundles[changes%len(bundles)]))
		if changes%50 > 0 {
			continue
		}
		changed := m.Changed()
		ca.Rotate()
		site.serve(serving(t, ca.Bundle()))
		require.NoError(t, m.Add(r)) // which fetches at once
		<-changed
		fetched++
	}
	cancel()
	wg.Wait()
	for kind, name := range []string{"Bundle", "Bundles"} {
		assert.Zero(t, misses[kind].Load(), "%s found nothing, of %d calls", name, reads[kind].Load())
	}
	t.Logf("%d changes, %d bundles seen", changes, found.Load())
	assert.Greater(t, found.Load(), int64(20))
	assert.NotZero(t, fetched)
}
