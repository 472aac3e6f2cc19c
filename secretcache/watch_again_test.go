package secretcache_test

import (
	"context"
	"iter"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// flaky is a CA whose watch ends at once while it is down.
type flaky struct {
	*polled
	mu    sync.Mutex
	down  chan struct{} // closed when it is
	tries []time.Time
}

func (f *flaky) set(down chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down, f.tries = down, nil
}

func (f *flaky) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		f.mu.Lock()
		f.tries = append(f.tries, time.Now())
		down := f.down
		f.mu.Unlock()
		select {
		case <-down:
			yield(nil, errDown)
			return
		default:
		}
		if !yield(f.ca.FetchBundles(ctx)) {
			return
		}
		select {
		case <-down:
		case <-ctx.Done():
		}
	}
}

// A watch that was good once is asked again soon after its next end, however often it failed before.
func TestWatchAgainSoon(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		f := &flaky{polled: poll(spiffetest.NewCA(t, "example.org")), down: make(chan struct{})}
		m := newManager(t, secretcache.Config{CA: f})
		ready(t, m)
		for range 8 {
			f.mu.Lock()
			down := f.down
			f.tries = nil
			f.mu.Unlock()
			began := time.Now()
			close(down)
			time.Sleep(10 * time.Minute) // of failures
			f.mu.Lock()
			tries := f.tries
			f.mu.Unlock()
			require.Greater(t, len(tries), 10)
			assert.LessOrEqual(t, tries[0].Sub(began), 2*time.Second)
			f.set(make(chan struct{}))
			time.Sleep(10 * time.Minute)
			f.mu.Lock()
			require.Len(t, f.tries, 1, "it lasts")
			f.mu.Unlock()
		}
	})
}
