package kube_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/kube/kubefollow"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
)

// follow follows things of an API server until the test, which is in a bubble, ends, and returns what State is told.
func follow(t *testing.T, serve func(w http.ResponseWriter, query url.Values)) (states func() []time.Duration) {
	t.Helper()
	l := memconn.Listen()
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		serve(w, r.URL.Query())
	})}
	var running sync.WaitGroup
	running.Go(func() { _ = srv.Serve(l) })
	transport := &http.Transport{DialContext: l.DialContext}
	api := must.Get(kube.New(kube.Options{URL: "http://127.0.0.1", Client: &http.Client{Transport: transport}}))(t)
	var mu sync.Mutex
	var waits []time.Duration
	f := &kubefollow.Follower[struct{}]{
		API: api, Path: kube.Path("api", "v1", "things"), Kind: "Thing",
		Page:  func(context.Context, []struct{}, bool, bool) {},
		Event: func(context.Context, string, *struct{}) bool { return true },
		State: func(_ context.Context, err error, retryIn time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				waits = append(waits, retryIn)
			}
		},
	}
	ctx, cancel := context.WithCancel(t.Context())
	running.Go(func() { f.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		_ = srv.Close()
		transport.CloseIdleConnections()
		running.Wait()
	})
	return func() []time.Duration {
		mu.Lock()
		defer mu.Unlock()
		return append([]time.Duration(nil), waits...)
	}
}

// After a page that was too large, pages are small, and grow again: not all objects are large.
func TestFollowPagesGrowAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var limits []string
		follow(t, func(w http.ResponseWriter, query url.Values) {
			limit := query.Get("limit")
			mu.Lock()
			defer mu.Unlock()
			limits = append(limits, limit)
			switch {
			case len(limits) == 1:
				_, _ = fmt.Fprintf(w, `{"kind": %q}`, strings.Repeat("x", 5<<20))
			case len(limits) < 8:
				_, _ = fmt.Fprintf(w, `{"kind": "ThingList", "metadata": {"resourceVersion": "1", "continue": "%d"}}`, len(limits))
			default:
				_, _ = fmt.Fprint(w, `{"kind": "ThingList", "metadata": {"resourceVersion": "1"}}`)
			}
		})
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		require.GreaterOrEqual(t, len(limits), 8)
		assert.Equal(t, []string{"100", "10", "20", "40", "80", "100", "100", "100"}, limits[:8])
	})
}

// Once a watch has lasted, failures from before do not count: the next one is met by a short wait, and the objects are not listed
// again.
func TestFollowFailuresAreForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		var mu sync.Mutex
		var late []string // what is asked after an hour
		states := follow(t, func(w http.ResponseWriter, query url.Values) {
			age := time.Since(begun)
			if age > time.Hour {
				mu.Lock()
				late = append(late, query.Get("watch"))
				mu.Unlock()
			}
			if age < 5*time.Minute || age > time.Hour {
				w.WriteHeader(http.StatusInternalServerError)
				return
			}
			if query.Get("watch") == "" {
				_, _ = fmt.Fprint(w, `{"kind": "ThingList", "metadata": {"resourceVersion": "1"}}`)
				return
			}
			_ = http.NewResponseController(w).Flush()
			time.Sleep(time.Until(begun.Add(time.Hour + time.Second))) // it ends as it should
		})
		time.Sleep(59 * time.Minute)
		before := states()
		require.Greater(t, len(before), 3, "it has failed")
		time.Sleep(time.Hour)
		after := states()
		require.Greater(t, len(after), len(before))
		assert.LessOrEqual(t, after[len(before)], kubefollow.Patience.WaitEndless(renew.NewFailure(1, context.Canceled), 1), "as after a first failure")
		mu.Lock()
		defer mu.Unlock()
		assert.Equal(t, []string{"true", "true", "true", ""}, late[:4])
	})
}
