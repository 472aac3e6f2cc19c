package internal_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// refused returns what err says, which has to be an [*limit.Error].
func refused(t *testing.T, err error, reason string) time.Duration {
	t.Helper()
	var e *limit.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, reason, e.Reason)
	return e.RetryAfter
}

// Without limits everything is let in, and what makes no sense is no limit.
func TestLimitNoLimit(t *testing.T) {
	t.Parallel()
	for _, o := range []limit.Options{
		{},
		{Queue: 5, Burst: 1, CallerBurst: 1},
		{Concurrent: -1, Queue: -1, Rate: -1, CallerRate: math.NaN()},
		{Rate: math.Inf(1), CallerRate: 1e12, CallerBurst: 1},
	} {
		l := limit.New(o)
		for range 1000 {
			require.NoError(t, l.Acquire(t.Context(), "a"), "%+v", o)
		}
		l.Release()
	}
}

// A burst passes at once, then one request for each token, not earlier and not later than the
// refusal said.
func TestLimitRate(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name   string
		o      limit.Options
		reason string
	}{
		{"caller", limit.Options{CallerRate: 4, CallerBurst: 3}, limit.CallerRate},
		{"total", limit.Options{Rate: 4, Burst: 3}, limit.TotalRate},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := limit.New(tc.o)
				for range 3 {
					require.NoError(t, l.Acquire(t.Context(), "a"))
				}
				for range 5 { // asking again and again costs nothing
					require.Equal(t, 250*time.Millisecond, refused(t, l.Acquire(t.Context(), "a"), tc.reason))
				}
				time.Sleep(250*time.Millisecond - 1)
				require.EqualValues(t, 1, refused(t, l.Acquire(t.Context(), "a"), tc.reason))
				time.Sleep(time.Nanosecond)
				require.NoError(t, l.Acquire(t.Context(), "a"))
				refused(t, l.Acquire(t.Context(), "a"), tc.reason)

				time.Sleep(time.Hour) // no more than the burst is saved up
				for range 3 {
					require.NoError(t, l.Acquire(t.Context(), "a"))
				}
				require.Equal(t, 250*time.Millisecond, refused(t, l.Acquire(t.Context(), "a"), tc.reason))
			})
		})
	}
}

// A request that is over both rates is told of the longer wait.
func TestLimitLongerWait(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Rate: 1, Burst: 1, CallerRate: 10, CallerBurst: 1})
		require.NoError(t, l.Acquire(t.Context(), "a"))
		require.Equal(t, time.Second, refused(t, l.Acquire(t.Context(), "a"), limit.CallerRate))
	})
}

// The default burst is what comes in a second, and one at least.
func TestLimitDefaultBurst(t *testing.T) {
	t.Parallel()
	for rate, burst := range map[float64]int{0.01: 1, 1: 1, 2.5: 2, 40: 40} {
		synctest.Test(t, func(t *testing.T) {
			l := limit.New(limit.Options{Rate: rate})
			for range burst {
				require.NoError(t, l.Acquire(t.Context(), ""))
			}
			refused(t, l.Acquire(t.Context(), ""), limit.TotalRate)
		})
	}
}

// Rates and bursts at the edge of what a number holds do not wrap around.
func TestLimitExtremes(t *testing.T) {
	t.Parallel()
	l := limit.New(limit.Options{CallerRate: math.SmallestNonzeroFloat64, CallerBurst: math.MaxInt})
	require.NoError(t, l.Acquire(t.Context(), "a"))
	require.NoError(t, l.Acquire(t.Context(), "a"))
	l = limit.New(limit.Options{Rate: 1e-300, Burst: 1})
	require.NoError(t, l.Acquire(t.Context(), "a"))
	require.Greater(t, refused(t, l.Acquire(t.Context(), "a"), limit.TotalRate), 365*24*time.Hour)
	l = limit.New(limit.Options{Rate: 1e8, Burst: math.MaxInt})
	require.NoError(t, l.Acquire(t.Context(), "a"))
}

// What a caller over its limit asks for takes nothing from the others: no token, no slot and no
// place in the queue.
func TestLimitCallerOverItsLimit(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Concurrent: 2, Queue: 1, Rate: 10, Burst: 3, CallerRate: 1, CallerBurst: 1})
		require.NoError(t, l.Acquire(t.Context(), "greedy"))
		for range 1000 {
			refused(t, l.Acquire(t.Context(), "greedy"), limit.CallerRate)
		}
		require.NoError(t, l.Acquire(t.Context(), "b"))
		l.Release()
		require.NoError(t, l.Acquire(t.Context(), "c"))

		// Now the total is empty: a caller that it refuses keeps its own token.
		require.Equal(t, 100*time.Millisecond, refused(t, l.Acquire(t.Context(), "d"), limit.TotalRate))
		time.Sleep(100 * time.Millisecond)
		l.Release()
		require.NoError(t, l.Acquire(t.Context(), "d"))
		// Both are empty for the greedy one, and the longer wait counts.
		require.Equal(t, 900*time.Millisecond, refused(t, l.Acquire(t.Context(), "greedy"), limit.CallerRate))
	})
}

// briefly asks for a slot of l, and gives up at once if it finds a place in the queue.
func briefly(t *testing.T, l *limit.Limiter) error {
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	return l.Acquire(ctx, "brief")
}

// Callers that wait are served in the order of arrival, and later ones do not overtake.
func TestLimitQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Concurrent: 1, Queue: 5})
		require.NoError(t, l.Acquire(t.Context(), "first"))
		order := make(chan int, 5)
		for i := range 5 {
			go func() {
				assert.NoError(t, l.Acquire(t.Context(), "x"))
				order <- i
			}()
			synctest.Wait()
		}
		require.Zero(t, refused(t, l.Acquire(t.Context(), "sixth"), limit.QueueFull), "there is no pace yet")
		for i := range 5 {
			time.Sleep(time.Second)
			l.Release()
			synctest.Wait()
			require.Len(t, order, 1)
			require.Equal(t, i, <-order)
			require.ErrorIs(t, briefly(t, l), context.DeadlineExceeded, "its place is free")
		}
		l.Release()
		require.NoError(t, l.Acquire(t.Context(), "later"))
		l.Release()
		assert.PanicsWithValue(t, "limit: Release without Acquire", l.Release)
	})
}

// When the queue is full, the refusal guesses from the pace of the releases, and a pace that slows
// down makes the guess longer.
func TestLimitQueueFullRetryAfter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Concurrent: 1, Queue: 2})
		for range 3 {
			go func() { assert.NoError(t, l.Acquire(t.Context(), "x")) }()
		}
		synctest.Wait()
		for range 20 {
			time.Sleep(100 * time.Millisecond)
			l.Release()
			go func() { assert.NoError(t, l.Acquire(t.Context(), "x")) }()
			synctest.Wait()
		}
		require.Equal(t, 300*time.Millisecond, refused(t, l.Acquire(t.Context(), "y"), limit.QueueFull))
		time.Sleep(time.Minute)
		require.Equal(t, 3*time.Minute, refused(t, l.Acquire(t.Context(), "y"), limit.QueueFull))
		for range 3 {
			l.Release()
		}
	})
}

// TestLimitQueueTime sends a burst, which is served, and then more than is served, of which the rest is refused.
func TestLimitQueueTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const work = time.Millisecond
		l := limit.New(limit.Options{Concurrent: 1, Queue: 10_000, QueueTime: 80 * time.Millisecond})
		var mu sync.Mutex
		var served, refused int
		var longest time.Duration
		send := func() {
			begin := time.Now()
			err := l.Acquire(t.Context(), "x")
			mu.Lock()
			longest = max(longest, time.Since(begin))
			if err == nil {
				served++
			} else {
				refused++
				assert.Zero(t, time.Since(begin))
				over, ok := errors.AsType[*limit.Error](err)
				assert.True(t, ok && over.RetryAfter > 0, "%v", err)
			}
			mu.Unlock()
			if err == nil {
				time.Sleep(work)
				l.Release()
			}
		}
		seen := func() (int, int, time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			return served, refused, longest
		}
		// after sends n requests with a pause between, and returns how many of them were served, and waited for how long.
		after := func(n int, pause time.Duration) (int, int, time.Duration) {
			mu.Lock()
			served, refused, longest = 0, 0, 0
			mu.Unlock()
			for range n {
				go send()
				time.Sleep(pause)
			}
			return seen()
		}
		after(400, 0)
		time.Sleep(time.Second)
		ok, no, wait := seen()
		require.Equal(t, 400, ok, "a burst")
		require.Zero(t, no)
		require.Equal(t, 399*work, wait)

		after(4000, 0)               // at once: a burst too, but for those that would wait ten times as long as they may
		time.Sleep(10 * time.Second) // until all have ended, and for the next to be another burst
		ok, no, wait = seen()
		require.InDelta(t, 800, ok, 2)
		require.InDelta(t, 3200, no, 2)
		require.LessOrEqual(t, wait, 10*80*time.Millisecond)

		after(4000, work/2) // twice as many as are served, for two seconds
		ok, no, wait = after(8000, work/2)
		require.InDelta(t, 4000, ok, 10, "the slot is never idle")
		require.InDelta(t, 4000, no, 10)
		require.Less(t, wait, 100*time.Millisecond, "of those that are served, when it goes on")

		ok, no, wait = after(500, 2*work) // half as many
		require.InDelta(t, 580, ok, 10, "and those that waited")
		require.LessOrEqual(t, no, 1, "the first still meets a full queue")
		require.Less(t, wait, 100*time.Millisecond)
		time.Sleep(time.Second)
	})
}

// Who gives up leaves the queue at once and never holds a slot.
func TestLimitGivingUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Concurrent: 1, Queue: 2})
		errGone := errors.New("gone")
		done, cancel := context.WithCancelCause(t.Context())
		cancel(errGone)
		require.Equal(t, errGone, l.Acquire(done, "x"), "with a slot free")
		require.NoError(t, l.Acquire(t.Context(), "x"), "that one took none")

		ctx, cancel := context.WithCancelCause(t.Context())
		errs := make(chan error, 2)
		go func() { errs <- l.Acquire(ctx, "x") }()
		synctest.Wait()
		go func() { errs <- l.Acquire(t.Context(), "x") }()
		synctest.Wait()
		refused(t, briefly(t, l), limit.QueueFull)
		cancel(errGone)
		require.Equal(t, errGone, <-errs)
		require.ErrorIs(t, briefly(t, l), context.DeadlineExceeded, "its place is free")
		l.Release()
		require.NoError(t, <-errs)
		l.Release()
		require.NoError(t, l.Acquire(t.Context(), "x"))
		l.Release()
	})
}

// A slot that is granted in the moment in which its waiter gives up is not lost.
func TestLimitGrantedTooLate(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for range rounds.Of(500) {
			l := limit.New(limit.Options{Concurrent: 1, Queue: 1})
			require.NoError(t, l.Acquire(t.Context(), "x"))
			ctx, cancel := context.WithCancel(t.Context())
			got := make(chan error, 1)
			go func() { got <- l.Acquire(ctx, "x") }()
			synctest.Wait()
			var wg sync.WaitGroup
			wg.Go(cancel)
			wg.Go(l.Release)
			wg.Wait()
			if <-got == nil {
				l.Release()
			}
			require.NoError(t, l.Acquire(t.Context(), "x"), "the slot is free")
			require.Panics(t, func() { l.Release(); l.Release() }, "and there is only one")
		}
	})
}

// A flood of names costs bounded memory, does not refuse anybody new, and what it leaves behind
// goes away.
func TestLimitFloodOfNames(t *testing.T) { // not parallel: it counts memory
	rounds.NotShort(t)
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{CallerRate: 1, CallerBurst: 1})
		last := 0
		take := func(n int) {
			for range n {
				last++
				require.NoError(t, l.Acquire(t.Context(), strconv.Itoa(last)))
			}
		}
		before := heap()
		take(70_000)
		full := heap() - before
		refused(t, l.Acquire(t.Context(), strconv.Itoa(last-1<<16+1)), limit.CallerRate)
		require.NoError(t, l.Acquire(t.Context(), strconv.Itoa(last-1<<16)), "one more is forgotten")
		for n := 1 << 15; n > 0; n /= 2 { // each makes room for itself and one more
			time.Sleep(time.Second)
			take(n)
		}
		require.Less(t, float64(heap()-before), float64(full)/2, "full buckets are forgotten, and their hashes cost little")
		runtime.KeepAlive(l)
	})
}

// A caller that keeps asking while it is refused is not forgotten for the sake of others.
func TestLimitBusyCallerIsRemembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{CallerRate: 0.001, CallerBurst: 1})
		require.NoError(t, l.Acquire(t.Context(), "busy"))
		for i := range 70_000 {
			require.NoError(t, l.Acquire(t.Context(), strconv.Itoa(i)))
			if i%10_000 == 0 {
				refused(t, l.Acquire(t.Context(), "busy"), limit.CallerRate)
			}
		}
		refused(t, l.Acquire(t.Context(), "busy"), limit.CallerRate)
	})
}

// A caller of which the total rate refuses everything leaves no trace.
func TestLimitRefusedLeavesNoTrace(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{Rate: 1, Burst: 1, CallerRate: 0.1})
		require.NoError(t, l.Acquire(t.Context(), "a"))
		for i := range 70_000 {
			refused(t, l.Acquire(t.Context(), strconv.Itoa(i)), limit.TotalRate)
		}
		time.Sleep(time.Second)
		require.Equal(t, 9*time.Second, refused(t, l.Acquire(t.Context(), "a"), limit.CallerRate), "it is remembered")
	})
}

// Under load never more than Concurrent hold a slot, no caller starves, and everything is given back.
func TestLimitConcurrent(t *testing.T) {
	t.Parallel()
	const slots, workers, rounds = 3, 16, 400
	l := limit.New(limit.Options{Concurrent: slots, Queue: workers, CallerRate: 1e6, CallerBurst: 1e6, Rate: 1e7, Burst: 1e7})
	var holding, done, gaveUp atomic.Int64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := range rounds {
				ctx := t.Context()
				if (w+i)%5 == 0 {
					c, cancel := context.WithTimeout(ctx, 20*time.Microsecond)
					defer cancel()
					ctx = c
				}
				if err := l.Acquire(ctx, fmt.Sprint(w)); err != nil {
					assert.ErrorIs(t, err, context.DeadlineExceeded)
					gaveUp.Add(1)
					continue
				}
				assert.LessOrEqual(t, holding.Add(1), int64(slots))
				if i%7 == 0 {
					time.Sleep(10 * time.Microsecond)
				}
				holding.Add(-1)
				l.Release()
				done.Add(1)
			}
		})
	}
	wg.Wait()
	assert.EqualValues(t, workers*rounds, done.Load()+gaveUp.Load())
	for range slots {
		require.NoError(t, l.Acquire(t.Context(), "after"))
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, l.Acquire(ctx, "after"), context.DeadlineExceeded, "all slots are taken")
}

// The happy path allocates nothing.
func TestLimitAllocs(t *testing.T) {
	l := limit.New(limit.Options{Concurrent: 4, Queue: 4, Rate: 1e8, Burst: 1e6, CallerRate: 1e8, CallerBurst: 1e6})
	name := "spiffe://example.org/ns/a/sa/" + strings.Repeat("b", 100)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		if l.Acquire(t.Context(), name) != nil {
			t.Error("refused")
		}
		l.Release()
	}))
}

// A caller whose requests are good and forgiven has no limit, and one whose requests are not has that of its rate.
func TestLimitForgive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{CallerRate: 0.5, CallerBurst: 3})
		take := func(caller string) error { return l.Acquire(t.Context(), caller) }
		for range 1000 {
			require.NoError(t, l.Check("good"))
			require.NoError(t, take("good"))
			l.Forgive("good")
		}
		for range 3 {
			require.NoError(t, take("bad"))
		}
		for range 100 {
			assert.Equal(t, 2*time.Second, refused(t, l.Check("bad"), limit.CallerRate))
			assert.Equal(t, 2*time.Second, refused(t, take("bad"), limit.CallerRate), "a refusal does not count")
		}
		l.Forgive("bad") // one that was under way was good
		require.NoError(t, take("bad"))
		refused(t, take("bad"), limit.CallerRate)
		require.NoError(t, take("good"))
		time.Sleep(2*time.Second - 1)
		assert.EqualValues(t, 1, refused(t, take("bad"), limit.CallerRate))
		time.Sleep(time.Nanosecond)
		require.NoError(t, take("bad"))
		time.Sleep(time.Minute)
		l.Forgive("bad")
		l.Forgive("stranger")
		for range 3 {
			require.NoError(t, take("bad"), "all are forgiven, and no more than all")
		}
		refused(t, take("bad"), limit.CallerRate)
	})
}

func TestLimitShares(t *testing.T) {
	t.Parallel()
	s := limit.NewShares[string](10, 4)
	reason := func(err error) string {
		t.Helper()
		e := new(limit.Error)
		require.ErrorAs(t, err, &e)
		return e.Reason
	}
	require.NoError(t, s.Take("a", 3))
	assert.Equal(t, limit.CallerShare, reason(s.Take("a", 2)), "all or nothing")
	require.NoError(t, s.Take("a", 1))
	assert.Equal(t, limit.CallerShare, reason(s.Take("a", 1)))
	require.NoError(t, s.Take("b", 4))
	assert.Equal(t, limit.TotalShare, reason(s.Take("c", 3)))
	require.NoError(t, s.Take("c", 2))
	assert.Equal(t, limit.TotalShare, reason(s.Take("c", 1)))
	assert.Equal(t, 10, s.Held())

	s.Give("a", 4)
	require.NoError(t, s.Take("c", 2))
	assert.Equal(t, limit.CallerShare, reason(s.Take("c", 1)), "its own share, although there is room")
	assert.Equal(t, 8, s.Held())
	assert.Panics(t, func() { s.Give("a", 1) }, "it holds nothing")
	assert.Panics(t, func() { s.Give("b", 5) })
	assert.Panics(t, func() { s.Give("b", -1) })
	assert.Panics(t, func() { _ = s.Take("b", -1) })
	assert.Equal(t, 8, s.Held())

	assert.Equal(t, limit.CallerShare, reason(s.Take("d", int(^uint(0)>>1))), "no sum overflows")
	none := limit.NewShares[int](0, -1)
	require.NoError(t, none.Take(1, 1<<40))
	assert.Equal(t, 1<<40, none.Held())
}

// Uses are counted until their thing has ended, and one owner takes only its share.
func TestLimitUses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u := limit.NewUses[string](3, 2)
		count := func(thing byte, owner string) (int, error) {
			return u.Count([32]byte{thing}, owner, time.Now().Add(time.Minute))
		}
		for _, step := range []struct {
			thing  byte
			owner  string
			times  int
			reason string
		}{
			{1, "a", 1, ""}, {1, "a", 2, ""}, {2, "a", 1, ""}, {3, "a", 0, limit.CallerShare}, {3, "b", 1, ""},
			{4, "b", 0, limit.TotalShare}, {1, "a", 3, ""},
		} {
			n, err := count(step.thing, step.owner)
			require.Equal(t, step.times, n)
			if step.reason == "" {
				require.NoError(t, err)
			} else {
				refused(t, err, step.reason)
			}
		}
		time.Sleep(time.Minute + time.Second)
		n, err := count(4, "a")
		require.NoError(t, err)
		require.Equal(t, 1, n)
	})
}
