package secretcache_test

import (
	"context"
	"crypto/x509"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// faultyCA is a CA that does otherwise. It cannot be watched.
type faultyCA struct {
	caclient.CA
	sign  func(context.Context) error
	fetch func(context.Context) (*spiffe.BundleSet, error)
	calls atomic.Int64 // under way
}

func (c *faultyCA) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.calls.Add(1)
	defer c.calls.Add(-1)
	if c.sign != nil {
		if err := c.sign(ctx); err != nil {
			return nil, err
		}
	}
	return c.CA.Sign(ctx, csr, lifetime)
}

func (c *faultyCA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	c.calls.Add(1)
	defer c.calls.Add(-1)
	if c.fetch != nil {
		return c.fetch(ctx)
	}
	return c.CA.FetchBundles(ctx)
}

func hang(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestReadySays: whatever keeps a Manager from being ready, Start and Ready say it.
func TestReadySays(t *testing.T) {
	t.Parallel()
	empty := must.Get(spiffe.NewBundle(domain, spiffe.BundleContents{}))(t)
	none := must.Get(spiffe.NewBundleSet(empty))(t)
	refused := &caclient.Error{Kind: caclient.ErrDenied, Err: errors.New("no such account")}
	for _, r := range []struct {
		name  string
		sign  func(context.Context) error
		fetch func(context.Context) (*spiffe.BundleSet, error)
		final bool
		want  string
		is    error
	}{
		{name: "a CA that is down", sign: func(context.Context) error { return errDown }, want: "sign: the CA is down", is: errDown},
		{name: "a CA that is mute", sign: hang, want: "the CA has not answered for 10s"},
		{name: "a CA that is mute about its bundles", fetch: func(ctx context.Context) (*spiffe.BundleSet, error) { return nil, hang(ctx) }, want: "the CA has not answered for 10s"},
		{name: "no bundles", fetch: func(context.Context) (*spiffe.BundleSet, error) { return nil, errDown }, want: "fetch bundles: the CA is down", is: errDown},
		{name: "refused for good", sign: func(context.Context) error { return refused }, final: true, want: "no such account", is: caclient.ErrDenied},
		{name: "an empty bundle", fetch: func(context.Context) (*spiffe.BundleSet, error) { return none, nil }, final: true,
			want: "the trust bundle is empty", is: spiffe.ErrNoAuthority},
	} {
		bubble.Run(t, r.name, func(t *testing.T) {
			ca := &faultyCA{CA: spiffetest.NewCA(t, "example.org"), sign: r.sign, fetch: r.fetch}
			cfg := secretcache.Config{ID: web, CA: ca}
			check := func(err error, after time.Duration) {
				t.Helper()
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.ErrorContains(t, err, r.want)
				require.NotErrorIs(t, err, lifecycle.ErrNotStarted)
				if r.is != nil {
					require.ErrorIs(t, err, r.is)
				}
				if r.final {
					assert.Zero(t, after)
					return
				}
				require.ErrorIs(t, err, errStop)
				assert.Equal(t, 10*time.Second, after)
			}
			ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, errStop)
			defer cancel()
			begun := time.Now()
			m, err := secretcache.Start(ctx, cfg)
			check(err, time.Since(begun))
			assert.Nil(t, m)
			assert.Zero(t, ca.calls.Load(), "nothing is under way any more")

			// By hand, with one context for both, which ends them at the same moment.
			m = must.Get(secretcache.New(cfg))(t)
			ctx, cancel = context.WithTimeoutCause(t.Context(), 10*time.Second, errStop)
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- m.Run(ctx) }()
			begun = time.Now()
			check(m.Ready(ctx), time.Since(begun))
			cancel()
			require.NoError(t, <-ended)
			_, err = m.SVID()
			require.ErrorIs(t, err, spiffe.ErrNotReady)
			require.ErrorIs(t, err, lifecycle.ErrEnded)
			if r.is == nil || !r.final {
				require.ErrorContains(t, err, r.want, "it is known after the end of Run, too")
			}
		})
	}
}

// TestReadySaysNeverStarted: that is the program's own fault. Ready asks the CA for nothing.
func TestReadySaysNeverStarted(t *testing.T) {
	t.Parallel()
	counted := poll(spiffetest.NewCA(t, "example.org"))
	m := newManager(t, secretcache.Config{CA: counted})
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	err := m.Ready(ctx)
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	require.ErrorIs(t, err, lifecycle.ErrNotStarted)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	assert.Zero(t, counted.fetched.Load())
	require.NoError(t, m.Close())
	assert.EqualError(t, m.Ready(t.Context()), `secretcache: "spiffe://example.org/web": not ready: it was closed by this program`)
	require.ErrorIs(t, m.Run(t.Context()), lifecycle.ErrClosed)
}

// TestStart: the context bounds the start and nothing after it.
func TestStart(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.Delay(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		m := must.Get(secretcache.Start(ctx, secretcache.Config{ID: web, CA: ca}))(t)
		require.ErrorIs(t, m.Run(t.Context()), lifecycle.ErrRunning)
		first := current(t, m)
		time.Sleep(time.Hour)
		require.Error(t, ctx.Err())
		second := current(t, m)
		assert.NotSame(t, first, second, "it is renewed")
		require.NoError(t, m.Close())
		require.NoError(t, m.Close())
		time.Sleep(100 * time.Hour)
		assert.Same(t, second, current(t, m), "what was obtained stays, and is renewed no longer")
		require.Error(t, m.Ready(t.Context()), "it has expired")
	})
}

// TestCloseWaits: Close ends attempts, also those that Run has not started, and waits for them and for subscribers.
func TestCloseWaits(t *testing.T) {
	t.Parallel()
	for _, run := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ca := &faultyCA{CA: spiffetest.NewCA(t, "example.org"), sign: func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Minute) // it is slow to notice
				return context.Cause(ctx)
			}}
			m := newManager(t, secretcache.Config{CA: ca, Timeout: time.Hour})
			told := 0
			m.Subscribe(func(string) { time.Sleep(time.Second); told++ })
			if run {
				start(t, m)
				synctest.Wait() // else a call below begins the attempt, and not Run
			}
			waiting := make(chan error, 2)
			for range 2 {
				go func() {
					_, err := m.GenerateSecret(t.Context(), "default")
					waiting <- err
				}()
			}
			time.Sleep(time.Second)
			require.EqualValues(t, 1, ca.calls.Load())
			before := time.Now()
			require.NoError(t, m.Close())
			assert.Equal(t, time.Minute, time.Since(before), "Run: %v", run)
			assert.Zero(t, ca.calls.Load())
			assert.Equal(t, 3, told, "of the bundle, by three names")
			for range 2 {
				err := <-waiting
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.ErrorIs(t, err, lifecycle.ErrClosed)
			}
			require.ErrorIs(t, must.Err(m.GenerateSecret(t.Context(), "default")), lifecycle.ErrClosed)
			require.NoError(t, must.Err(m.GenerateSecret(t.Context(), "ROOTCA")), "what was obtained stays")
			require.NoError(t, m.Add(worker))
			time.Sleep(time.Hour)
			assert.Zero(t, ca.calls.Load(), "nothing is asked for any more")
		})
	}
}

// TestStartLeavesNothing: a start that fails leaves no goroutine.
func TestStartLeavesNothing(t *testing.T) {
	ca := &faultyCA{CA: spiffetest.NewCA(t, "example.org"), sign: hang}
	goroutines := runtime.NumGoroutine()
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := secretcache.Start(ctx, secretcache.Config{ID: web, CA: ca})
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	assert.Eventually(t, func() bool { return runtime.NumGoroutine() <= goroutines+1 }, time.Minute, time.Millisecond) // one is Eventually's
	require.ErrorContains(t, must.Err(secretcache.Start(t.Context(), secretcache.Config{CA: ca})), "Config.ID is required")
}
