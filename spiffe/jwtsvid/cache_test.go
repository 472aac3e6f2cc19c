package jwtsvid_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// newCache returns a cache of five-minute tokens, which are minted by the clock of the bubble.
func newCache(t testing.TB, logger *slog.Logger) (*jwtsvid.Cache, *mint) {
	t.Helper()
	source := &mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now})}
	c := must.Get(jwtsvid.NewCache(source, logger))(t)
	return c, source
}

// start runs c until the test ends, or until stop is called.
func start(t *testing.T, c *jwtsvid.Cache) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context()))
	over := errors.New("over") // a clean stop whatever the cause
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	synctest.Wait()
	stop = sync.OnceFunc(func() {
		cancel(over)
		assert.NoError(t, <-done)
	})
	t.Cleanup(stop)
	return stop
}

// fetch asks for a token and returns which of its source's it is: "n" in its claims.
func fetch(t *testing.T, c *jwtsvid.Cache, audience ...string) string {
	t.Helper()
	token := must.Get(c.Fetch(t.Context(), audience...))(t)
	u := must.Get(jwtsvid.ParseUnverified(token))(t)
	require.True(t, time.Now().Before(u.Expires), "an expired token is never served")
	_, payload := parts(t, token)
	_, n, ok := strings.Cut(payload, `"n":`)
	n, _, _ = strings.Cut(n, ",")
	require.True(t, ok)
	return strings.TrimSuffix(n, "}")
}

// every asks for a token every d for a while, as a client that is in use does.
func every(t *testing.T, c *jwtsvid.Cache, d, total time.Duration) (last string) {
	t.Helper()
	for end := time.Now().Add(total); time.Now().Before(end); time.Sleep(d) {
		last = fetch(t, c, "db")
	}
	return last
}

func TestCacheRefresh(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, source := newCache(t, nil)
			if running {
				start(t, c)
			}
			assert.Equal(t, "1", fetch(t, c, "db"))
			assert.Equal(t, "1", every(t, c, time.Second, 119*time.Second), "before half of its life less a tenth")
			time.Sleep(time.Second)
			every(t, c, time.Second, 31*time.Second)
			synctest.Wait()
			assert.Equal(t, "2", fetch(t, c, "db"), "after half of its life")
			assert.Equal(t, 2, source.count())

			// Twenty minutes of use: one token for each two to two and a half minutes.
			every(t, c, time.Second, 20*time.Minute)
			assert.GreaterOrEqual(t, source.count(), 2+7)
			assert.LessOrEqual(t, source.count(), 2+11)
		})
	}
}

// A clock that is put back does not keep a token that is in use from being renewed: the second bubble begins when the
// first one did.
func TestCacheClockPutBack(t *testing.T) {
	t.Parallel()
	var c *jwtsvid.Cache
	var source *mint
	var due time.Time
	synctest.Test(t, func(t *testing.T) {
		c, source = newCache(t, nil)
		stop := start(t, c)
		fetch(t, c, "db")
		source.set(func(m *mint) { m.wait = sleep(time.Hour) })
		for source.count() < 2 {
			time.Sleep(time.Second)
			fetch(t, c, "db")
		}
		due = time.Now()
		every(t, c, time.Second, 25*time.Second)
		stop() // before the attempt fails
		source.set(func(m *mint) { m.wait = nil })
	})
	synctest.Test(t, func(t *testing.T) {
		every(t, c, time.Second, time.Until(due)+3*time.Second)
		synctest.Wait()
		assert.Equal(t, 3, source.count())
		assert.Equal(t, "3", fetch(t, c, "db"))
	})
}

// A caller whose token is cached does not wait, however many audiences it has.
func TestCacheWithoutLock(t *testing.T) {
	t.Parallel()
	source := &mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now, WideAudience: true})}
	c := must.Get(jwtsvid.NewCache(source, nil))(t)
	for _, audience := range [][]string{{"db"}, {"db", "cache"}} {
		fetch(t, c, audience...)
		done := make(chan struct{})
		_, err := c.Fetch(errFunc{t.Context(), sync.OnceFunc(func() { // while c is locked
			go func() {
				defer close(done)
				_, err := c.Fetch(t.Context(), audience...)
				assert.NoError(t, err)
			}()
			select {
			case <-done:
			case <-time.After(time.Minute):
				assert.Fail(t, "waits for the lock", audience)
			}
		})}, fmt.Sprint(audience))
		assert.ErrorIs(t, err, context.Canceled)
		<-done
	}
}

// errFunc is a context that calls a function when it is asked whether it is done, which it is.
type errFunc struct {
	context.Context
	f func()
}

func (c errFunc) Err() error {
	c.f()
	return context.Canceled
}

// TestCacheSlowSource shows that a caller with an old token does not wait for a new one.
func TestCacheSlowSource(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, source := newCache(t, nil)
			if running {
				start(t, c)
			}
			fetch(t, c, "db")
			source.set(func(m *mint) { m.wait = sleep(20 * time.Second) })
			for range 270 { // the third is fetched after 280 seconds or later
				begin := time.Now()
				fetch(t, c, "db")
				assert.Zero(t, time.Since(begin))
				time.Sleep(time.Second)
			}
			assert.Equal(t, "2", fetch(t, c, "db"))
			time.Sleep(time.Minute) // for what is on its way
		})
	}
}

func sleep(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// TestCacheOutage has the source fail from the first renewal on: the old token is served to its end, to
// the second, and the source is asked again and again but not all the time.
func TestCacheOutage(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var log buffer
			c, source := newCache(t, slog.New(slog.NewTextHandler(&log, nil)))
			if running {
				start(t, c)
			}
			fetch(t, c, "db")
			down := errors.New("the agent is down")
			source.set(func(m *mint) { m.err = down })
			assert.Equal(t, "1", every(t, c, time.Second, 5*time.Minute))
			failures := source.count() - 1
			assert.Greater(t, failures, 40)
			assert.Less(t, failures, 150)
			assert.Contains(t, log.String(), `level=WARN msg="jwtsvid: no new token" audience="\"db\"" err="the agent is down" retry_in=`)

			begin := time.Now()
			for range 100 {
				_, err := c.Fetch(t.Context(), "db")
				assert.ErrorIs(t, err, down)
				assert.EqualError(t, err, `jwtsvid: fetch a token for "db": the agent is down`)
			}
			assert.Zero(t, time.Since(begin), "callers do not wait while it is clear that there is none")
			assert.LessOrEqual(t, source.count(), failures+2)

			source.set(func(m *mint) { m.err = nil })
			time.Sleep(5 * time.Second)
			synctest.Wait()
			before := source.count()
			fetch(t, c, "db")
			assert.Equal(t, running, source.count() == before, "Run has fetched it already")
		})
	}
}

// buffer is a bytes.Buffer for many goroutines.
type buffer = logtest.Buffer

func TestCacheFirstFetchFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log buffer
		c, source := newCache(t, slog.New(slog.NewTextHandler(&log, nil)))
		down := errors.New("down")
		source.set(func(m *mint) { m.err = down })
		for range 600 { // a minute
			_, err := c.Fetch(t.Context(), "db")
			assert.ErrorIs(t, err, down)
			time.Sleep(100 * time.Millisecond)
		}
		assert.Empty(t, log.String(), "the caller that waits is told, and not the log")
		assert.Greater(t, source.count(), 12)
		assert.Less(t, source.count(), 30)
		source.set(func(m *mint) { m.err = nil })
		time.Sleep(5 * time.Second)
		fetch(t, c, "db")
	})
}

func TestCacheSingleFlight(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c, source := newCache(t, nil)
			if running {
				start(t, c)
			}
			source.set(func(m *mint) { m.wait = sleep(time.Second) })
			var wg sync.WaitGroup
			for i := range 100 {
				wg.Go(func() {
					_, err := c.Fetch(t.Context(), []string{"a", "b"}[i%2])
					assert.NoError(t, err)
				})
			}
			begin := time.Now()
			wg.Wait()
			assert.Equal(t, time.Second, time.Since(begin))
			assert.Equal(t, 2, source.count())
		})
	}
}

// TestCacheCallerLeaves shows that the attempt goes on for the others.
func TestCacheCallerLeaves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		source.set(func(m *mint) { m.wait = sleep(10 * time.Second) })
		gone := errors.New("gone")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, gone)
		defer cancel()
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := c.Fetch(ctx, "db")
			assert.ErrorIs(t, err, gone)
			assert.Equal(t, time.Second, time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
		})
		synctest.Wait()
		wg.Go(func() { assert.Equal(t, "1", fetch(t, c, "db")) })
		wg.Wait()
		assert.Equal(t, 1, source.count())

		// With a token in hand the context does not matter.
		_, err := c.Fetch(ctx, "db")
		assert.NoError(t, err)
	})
}

func TestCacheTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		source.set(func(m *mint) { m.wait = sleep(time.Hour) })
		begin := time.Now()
		_, err := c.Fetch(t.Context(), "db")
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorContains(t, err, "no answer in 30s")
		assert.Equal(t, 30*time.Second, time.Since(begin))
	})
}

// TestCacheBadAnswers has a source that gives what was not asked for. It does not replace what works.
func TestCacheBadAnswers(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	other := func(t *testing.T, r jwtsvid.Request) func(string) string {
		r.ID = webID
		i := issuer(t, jwtsvid.IssuerOptions{Now: func() time.Time { return time.Now().Add(-time.Minute) }, WideAudience: true})
		return func(string) string { return must.Get(i.Issue(r))(t) }
	}
	for want, edit := range map[string]func(*testing.T) func(string) string{
		"the source gave something else: jwtsvid: token: malformed": func(*testing.T) func(string) string { return func(string) string { return "x" } },
		`the source gave a token for "cache"`:                       func(t *testing.T) func(string) string { return other(t, jwtsvid.Request{Audience: []string{"cache"}}) },
		`the source gave a token for "db" "cache"`: func(t *testing.T) func(string) string {
			return other(t, jwtsvid.Request{Audience: []string{"db", "cache"}})
		},
		"the source gave a token that ended at": func(t *testing.T) func(string) string {
			return other(t, jwtsvid.Request{Audience: []string{"db"}, Lifetime: time.Minute})
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			c, source := newCache(t, nil)
			fetch(t, c, "db")
			source.set(func(m *mint) { m.edit = edit(t) })
			assert.Equal(t, "1", every(t, c, time.Second, 5*time.Minute))
			_, err := c.Fetch(t.Context(), "db")
			assert.ErrorContains(t, err, want)
			_, err = c.Fetch(t.Context(), "cold")
			assert.ErrorContains(t, err, "the source gave ")
			time.Sleep(time.Minute)
		})
	}
}

// TestCacheForgets shows that unused tokens are neither renewed nor kept, and that use brings
// the renewal back.
func TestCacheForgets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		start(t, c)
		var kept weak.Pointer[byte]
		source.set(func(m *mint) {
			m.edit = func(token string) string {
				kept = weak.Make(unsafe.StringData(token))
				return token
			}
		})
		fetch(t, c, "once")
		time.Sleep(5*time.Minute - time.Second)
		runtime.GC()
		assert.NotNil(t, kept.Value())
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.True(t, collected(kept))
		assert.Equal(t, 1, source.count())
		source.set(func(m *mint) { m.edit = nil })

		fetch(t, c, "db")
		time.Sleep(4 * time.Minute) // unused for long, then used again
		assert.Equal(t, "2", fetch(t, c, "db"))
		synctest.Wait()
		assert.Equal(t, "3", fetch(t, c, "db"))

		var last atomic.Value // of weak.Pointer[net.AddrError]
		source.set(func(m *mint) {
			m.wait = func(context.Context) error {
				err := new(net.AddrError)
				last.Store(weak.Make(err))
				return err
			}
		})
		_, err := c.Fetch(t.Context(), "never")
		assert.Error(t, err)
		err = nil
		runtime.GC()
		assert.NotNil(t, last.Load().(weak.Pointer[net.AddrError]).Value())
		time.Sleep(10 * time.Minute)
		assert.True(t, collected(last.Load().(weak.Pointer[net.AddrError])))
	})
}

// TestCacheGoroutines shows that their number does not depend on that of the tokens.
func TestCacheGoroutines(t *testing.T) {
	rounds.NotShort(t)
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		start(t, c)
		var wg sync.WaitGroup
		for i := range 200 {
			wg.Go(func() { fetch(t, c, fmt.Sprint(i)) })
		}
		wg.Wait()
		synctest.Wait()
		assert.Equal(t, 1, cacheGoroutines(), "Run")
		time.Sleep(10 * time.Second)
		for i := range 200 {
			fetch(t, c, fmt.Sprint(i)) // they are all in use
		}
		most, now := 0, 0
		source.set(func(m *mint) {
			m.wait = func(ctx context.Context) error {
				m.set(func(*mint) { now++; most = max(most, now) })
				defer m.set(func(*mint) { now-- })
				return sleep(3 * time.Second)(ctx)
			}
		})
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		assert.Equal(t, 400, source.count())
		assert.Equal(t, 1, cacheGoroutines())
		assert.LessOrEqual(t, most, 16)
		assert.Greater(t, most, 8)
	})
}

// cacheGoroutines counts the goroutines that are in a Cache; others come and go.
func cacheGoroutines() (n int) {
	stacks := make([]byte, 8<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	for one := range bytes.SplitSeq(stacks, []byte("\n\n")) {
		if bytes.Contains(one, []byte("jwtsvid.(*Cache).")) {
			n++
		}
	}
	return n
}

func TestCacheRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		stop := start(t, c)
		assert.ErrorContains(t, c.Run(t.Context()), "jwtsvid: cache: run: it is already running")
		fetch(t, c, "db")
		time.Sleep(10 * time.Second)
		fetch(t, c, "db")

		// Run ends while it fetches: that is no failure, and a caller that waits has another attempt.
		source.set(func(m *mint) { m.wait = sleep(time.Hour) })
		source.await(2)
		time.Sleep(10 * time.Second)
		stop()
		source.set(func(m *mint) { m.wait = sleep(time.Second) })
		assert.Equal(t, "1", fetch(t, c, "db"), "old before new")
		time.Sleep(2 * time.Second)
		assert.Equal(t, "3", fetch(t, c, "db"), "asked again at once")

		// It may run again.
		start(t, c)
		every(t, c, time.Second, 10*time.Minute)
		assert.Greater(t, source.count(), 5)
	})
}

// TestCacheRunWaits shows that Run does not return before what it has started has ended.
func TestCacheRunWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log buffer
		c, source := newCache(t, slog.New(slog.NewTextHandler(&log, nil)))
		stop := start(t, c)
		fetch(t, c, "db")
		time.Sleep(2 * time.Second)
		fetch(t, c, "db")
		source.set(func(m *mint) {
			m.wait = func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Second) // to clean up
				return ctx.Err()
			}
		})
		source.await(2)
		begin := time.Now()
		stop()
		assert.Equal(t, time.Second, time.Since(begin))
		assert.Empty(t, log.String(), "that it was stopped is no failure")
	})
}

// TestCacheRunEndsForWaiters has a caller wait for an attempt that Run has begun and does not finish.
func TestCacheRunEndsForWaiters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c, source := newCache(t, nil)
		source.lifetime = 20 * time.Second
		stop := start(t, c)
		fetch(t, c, "db")
		time.Sleep(2 * time.Second)
		fetch(t, c, "db")
		source.set(func(m *mint) { m.wait = sleep(time.Hour) })
		time.Sleep(20 * time.Second) // the attempt hangs, and the token ends
		synctest.Wait()
		require.Equal(t, 2, source.count())
		var wg sync.WaitGroup
		wg.Go(func() { assert.Equal(t, "3", fetch(t, c, "db")) })
		synctest.Wait()
		assert.Equal(t, 2, source.count(), "it joins the attempt")
		source.set(func(m *mint) { m.wait = nil })
		stop()
		wg.Wait()
	})
}

func TestNewCache(t *testing.T) {
	t.Parallel()
	_, err := jwtsvid.NewCache(nil, nil)
	assert.EqualError(t, err, "jwtsvid: new cache: no source")

	// A Cache is a Source.
	inner, source := newCache(t, nil)
	outer := must.Get(jwtsvid.NewCache(inner, nil))(t)
	for range 3 {
		assert.Equal(t, "1", fetch(t, outer, "db"))
	}
	assert.Equal(t, 1, source.count())
}

// TestCacheConcurrentUse is for the race detector.
func TestCacheConcurrentUse(t *testing.T) {
	t.Parallel()
	source := &handmade{claim: func(a []string) string { return claims(fmt.Sprintf("%q", a[0]), time.Second) }}
	c := must.Get(jwtsvid.NewCache(source, nil))(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var run, wg sync.WaitGroup
	run.Go(func() { assert.NoError(t, c.Run(ctx)) })
	for g := range 4 {
		wg.Go(func() {
			for i := range 520 { // each audience twice at about the same time, and more of them than are kept
				_, err := c.Fetch(t.Context(), fmt.Sprint(i, g/2))
				if err != nil { // the token may end the moment that it arrives
					assert.ErrorContains(t, err, "compare the clocks")
				}
				_ = c.String()
			}
		})
	}
	wg.Wait()
	cancel()
	run.Wait()
}
