package internal_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

// thing is what the tests keep fresh.
type thing struct {
	renew.Entry
	name     string
	attempts int
	last     time.Time // when the last attempt began
}

// keeper keeps things fresh. An attempt takes time and then fails with err, or succeeds for life.
type keeper struct {
	mu         sync.Mutex
	loop       *renew.Loop[*thing]
	time, life time.Duration
	cleanup    time.Duration // after the end of the context
	err        error
	order      []string // in which attempts began
	now, most  int      // attempts under way
}

func newKeeper() *keeper {
	k := &keeper{life: time.Hour}
	k.loop = &renew.Loop[*thing]{Mu: &k.mu, Attempt: k.attempt}
	return k
}

func (k *keeper) attempt(ctx context.Context, e *thing) {
	k.mu.Lock()
	e.attempts++
	e.last = time.Now()
	k.order = append(k.order, e.name)
	k.now++
	k.most = max(k.most, k.now)
	duration := k.time
	k.mu.Unlock()
	if renew.Sleep(ctx, duration) != nil {
		time.Sleep(k.cleanup)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.now--
	wait := time.Duration(0)
	switch {
	case ctx.Err() != nil:
	case k.err != nil:
		wait = renew.Backoff{Low: time.Second, First: time.Second, High: time.Second}.Wait(e.Failed(k.err), 0)
	default:
		e.Succeeded()
		wait = k.life
	}
	k.loop.Done(e, wait)
}

// do calls f with the lock.
func (k *keeper) do(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

func (k *keeper) add(name string, wait time.Duration) *thing {
	e := &thing{name: name}
	k.do(func() { k.loop.Put(e, wait) })
	return e
}

// attempts settles the bubble and returns the number of attempts for e.
func (k *keeper) attempts(e *thing) (n int) {
	synctest.Wait()
	k.do(func() { n = e.attempts })
	return n
}

func (k *keeper) next(e *thing) (at time.Time) {
	k.do(func() { at = k.loop.Next(e) })
	return at
}

// run runs the Loop until stop is called or the test ends.
func (k *keeper) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.loop.Run(ctx)
	}()
	synctest.Wait()
	stop = sync.OnceFunc(func() {
		cancel(errStop)
		<-done
	})
	t.Cleanup(stop)
	return stop
}

var (
	errStop = errors.New("stop")
	errDown = errors.New("down")
)

// inBubble runs f in a bubble of its own.
func inBubble(t *testing.T, f func(t *testing.T, k *keeper)) {
	bubble.Test(t, func(t *testing.T) { f(t, newKeeper()) })
}

// sleep lets time pass and the bubble settle.
func sleep(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// of returns what f returns with the lock.
func of[T any](k *keeper, f func() T) T {
	k.mu.Lock()
	defer k.mu.Unlock()
	return f()
}

// read returns what p points to.
func read[T any](k *keeper, p *T) T { return of(k, func() T { return *p }) }

func TestRenewRunOnTime(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		start := time.Now()
		k.run(t)
		waits := []time.Duration{90 * time.Minute, 0, time.Nanosecond, time.Second, 3 * time.Hour, time.Second}
		var all []*thing
		for i, wait := range waits {
			e := &thing{name: fmt.Sprint(i)}
			all = append(all, e)
			k.do(func() { // before the first attempt
				k.loop.Put(e, wait)
				assert.Equal(t, start.Add(wait).UTC(), k.loop.Next(e).UTC())
			})
		}
		sleep(4 * time.Hour)
		for i, e := range all {
			assert.Equal(t, int((4*time.Hour-waits[i])/time.Hour)+1, k.attempts(e), "each hour from %v on", waits[i])
			assert.Zero(t, read(k, &e.last).Sub(start.Add(waits[i]))%time.Hour)
		}
	})
}

// A thousand entries with random plans, which change: each attempt comes at its moment.
func TestRenewOrder(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		random := rand.New(rand.NewPCG(1, 2))
		start := time.Now()
		k.life = 1000 * time.Hour
		var all []*thing
		due := map[*thing]time.Duration{}
		for i := range 1000 {
			wait := time.Duration(random.IntN(int(time.Hour)))
			all = append(all, k.add(fmt.Sprint(i), wait))
			due[all[i]] = wait
		}
		k.do(func() {
			for _, e := range all {
				wait := time.Duration(random.IntN(int(time.Hour)))
				switch random.IntN(4) {
				case 0:
					k.loop.Put(e, wait)
					due[e] = wait
				case 1:
					k.loop.Hasten(e, wait)
					due[e] = min(due[e], wait)
				case 2:
					k.loop.Remove(e)
					delete(due, e)
				}
			}
		})
		k.run(t)
		sleep(time.Hour)
		for _, e := range all {
			want, there := due[e]
			if !there {
				assert.Zero(t, k.attempts(e))
				assert.True(t, of(k, e.Removed))
				assert.Zero(t, k.next(e))
				continue
			}
			assert.Equal(t, 1, k.attempts(e))
			assert.Equal(t, want, read(k, &e.last).Sub(start))
			assert.NotZero(t, k.next(e))
		}
	})
}

func TestRenewSlots(t *testing.T) {
	for _, c := range []struct {
		slots int
		slow  time.Duration
		most  int
		took  time.Duration
	}{
		{0, 0, 100, 10 * time.Second},
		{4, 0, 4, 238 * time.Second},
		{4, time.Second, 40, 34 * time.Second},
		{4, time.Minute, 4, 238 * time.Second},
	} {
		t.Run(fmt.Sprint(c.slots, c.slow), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				k.loop.Slots, k.loop.Slow, k.time = c.slots, c.slow, 9500*time.Millisecond
				for i := range 100 {
					k.add(fmt.Sprint(i), 0)
				}
				k.run(t)
				begin := time.Now()
				for len(read(k, &k.order)) < 100 || read(k, &k.now) > 0 {
					sleep(time.Second)
				}
				assert.Equal(t, c.took, time.Since(begin))
				assert.Equal(t, c.most, read(k, &k.most))
				// Nothing is left behind: the same once more.
				sleep(time.Hour)
				synctest.Wait()
				assert.Equal(t, c.most, read(k, &k.most))
			})
		})
	}
}

// What failed last time does not keep others waiting.
func TestRenewFailingLast(t *testing.T) {
	for _, last := range []bool{false, true} {
		t.Run(fmt.Sprint(last), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				k.loop.Slots, k.loop.FailingLast, k.err = 1, last, errDown
				stop := k.run(t)
				bad := k.add("bad", 0)
				require.Equal(t, 1, k.attempts(bad))
				stop()
				k.do(func() { k.err, k.order = nil, nil })
				sleep(time.Minute)
				k.add("good", 0)
				k.run(t)
				synctest.Wait()
				if last {
					assert.Equal(t, []string{"good", "bad"}, read(k, &k.order))
				} else {
					assert.Equal(t, []string{"bad", "good"}, read(k, &k.order))
				}
				assert.Zero(t, of(k, bad.Failures))
			})
		})
	}
}

// machine has clocks of which the monotonic one, and every timer, stands still while it is suspended.
type machine struct{ asleep atomic.Int64 }

func (m *machine) suspend(d time.Duration) { m.asleep.Add(int64(d)) }

func (m *machine) read() (mono, wall time.Time) {
	now := time.Now()
	return now, now.Round(0).Add(time.Duration(m.asleep.Load()))
}

// A machine is suspended for ten lives, or for a little more than is left, at any moment of a life: what is due is
// attempted within a second after it wakes, once, and then lives on as planned.
func TestRenewWaking(t *testing.T) {
	const life = 10 * time.Minute // looks at the clock are not free in virtual time
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				var m machine
				k.loop.SetClock(m.read)
				k.life = life
				random := rand.New(rand.NewPCG(seed, 1))
				e, later := k.add("a", 0), k.add("b", 1000*life)
				k.run(t)
				for range 10 {
					before := k.attempts(e)
					sleep(time.Duration(random.Int64N(int64(life - time.Second))))
					left := of(k, func() time.Duration {
						_, wall := m.read()
						return k.loop.Next(e).Sub(wall)
					})
					if k.attempts(e) == before && random.IntN(2) == 0 {
						m.suspend(left + 2*time.Second)
					} else {
						m.suspend(10 * life)
					}
					before = k.attempts(e)
					woke := time.Now()
					sleep(time.Second)
					require.Equal(t, before+1, k.attempts(e))
					assert.LessOrEqual(t, read(k, &e.last).Sub(woke), time.Second)
					assert.Zero(t, k.attempts(later))
					_, wall := m.read()
					assert.WithinDuration(t, wall.Add(life), k.next(e), time.Second, "by the wall clock")
				}
			})
		})
	}
}

// A suspension that ends before anything is due brings forward what is due by as much, and no more.
func TestRenewShortSuspension(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		var m machine
		k.loop.SetClock(m.read)
		e := k.add("a", time.Hour)
		k.run(t)
		m.suspend(50 * time.Minute)
		sleep(9*time.Minute + 58*time.Second)
		assert.Zero(t, k.attempts(e))
		sleep(3 * time.Second)
		assert.Equal(t, 1, k.attempts(e))
	})
}

func TestRenewWait(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		renew.Wait(t.Context(), time.Hour, nil)
		assert.Equal(t, time.Hour, time.Since(start))
		renew.Wait(t.Context(), 0, nil)
		renew.Wait(t.Context(), -1, nil)
		assert.Equal(t, time.Hour, time.Since(start))

		wake := make(chan struct{})
		time.AfterFunc(time.Minute, func() { close(wake) })
		start = time.Now()
		renew.Wait(t.Context(), time.Hour, wake)
		assert.Equal(t, time.Minute, time.Since(start))

		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Minute, func() { cancel(errStop) })
		renew.Wait(ctx, time.Hour, nil)
		assert.Equal(t, 2*time.Minute, time.Since(start))
		assert.ErrorIs(t, renew.Sleep(ctx, time.Hour), errStop)
	})
}

// A wall clock that is put back postpones nothing.
func TestRenewClockPutBack(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		var m machine
		k.loop.SetClock(m.read)
		e := k.add("a", 10*time.Minute)
		k.run(t)
		m.suspend(-365 * 24 * time.Hour)
		sleep(10 * time.Minute)
		assert.Equal(t, 1, k.attempts(e))
	})
}

// Run ends what it has started, which is not a failure, and may be called again.
func TestRenewStop(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.time, k.cleanup = time.Minute, time.Second
		e := k.add("a", 0)
		stop := k.run(t)
		assert.True(t, of(k, e.Busy))
		assert.Zero(t, k.next(e), "under way")
		begin := time.Now()
		stop()
		assert.Equal(t, time.Second, time.Since(begin), "it waits for the attempt")
		assert.False(t, of(k, e.Busy))
		assert.Zero(t, of(k, e.Failures))
		assert.Equal(t, time.Now().UTC(), k.next(e).UTC(), "due again")
		sleep(time.Hour)
		assert.Equal(t, 1, k.attempts(e), "nothing runs")
		k.run(t)
		sleep(time.Minute)
		assert.Equal(t, 2, k.attempts(e))
	})
}

// A caller that waits is woken by the end of the attempt, and its entry goes before those without waiters.
func TestRenewAwait(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprint(running), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				k.loop.Slots, k.time = 2, time.Second
				for i := range 100 {
					k.add("other", time.Duration(i)*time.Nanosecond)
				}
				if running {
					k.run(t)
				}
				e := k.add("a", time.Hour)
				begin := time.Now()
				var wg sync.WaitGroup
				for range 10 {
					wg.Go(func() { k.do(func() { assert.NoError(t, k.loop.Await(t.Context(), e)) }) })
				}
				wg.Wait()
				assert.Equal(t, 1, k.attempts(e), "one attempt for all of them")
				assert.LessOrEqual(t, time.Since(begin), 2*time.Second)
				assert.LessOrEqual(t, read(k, &k.most), 2)
				if !running {
					sleep(3 * time.Hour)
					assert.Equal(t, []string{"a"}, read(k, &k.order), "only what was demanded")
				}
			})
		})
	}
}

// Without Run, demands share the slots and come one after the other.
func TestRenewDemandWithoutRun(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.loop.Slots, k.time = 3, time.Second
		var wg sync.WaitGroup
		for i := range 30 {
			e := k.add(fmt.Sprint(i), time.Hour)
			wg.Go(func() { k.do(func() { assert.NoError(t, k.loop.Await(t.Context(), e)) }) })
		}
		begin := time.Now()
		wg.Wait()
		assert.Equal(t, 10*time.Second, time.Since(begin))
		assert.Equal(t, 3, read(k, &k.most))
	})
}

// A demand does not shorten the wait after a failure, and is repeated after it.
func TestRenewDemandAfterFailure(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprint(running), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				k.err = errDown
				if running {
					k.run(t)
				}
				e := k.add("a", 0)
				ctx, cancel := context.WithTimeout(t.Context(), 10500*time.Millisecond)
				defer cancel()
				k.do(func() {
					for ctx.Err() == nil {
						assert.NoError(t, k.loop.Await(ctx, e))
					}
				})
				assert.Equal(t, 11, of(k, e.Failures), "one each second")
				assert.Equal(t, 10500*time.Millisecond, time.Since(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)))
			})
		})
	}
}

func TestRenewAwaitEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.time = time.Hour
		stop := k.run(t)
		e := k.add("a", 0)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		k.do(func() { assert.NoError(t, k.loop.Await(ctx, e)) })
		assert.Error(t, ctx.Err(), "with the context")
		assert.True(t, of(k, e.Busy), "the attempt goes on for others")

		var wg sync.WaitGroup
		wg.Go(func() { k.do(func() { assert.ErrorIs(t, k.loop.Await(t.Context(), e), errStop, "with Run") }) })
		synctest.Wait()
		stop()
		wg.Wait()

		wg.Go(func() { k.do(func() { assert.NoError(t, k.loop.Await(t.Context(), e), "with Remove") }) })
		synctest.Wait()
		begin := time.Now()
		k.do(func() { k.loop.Remove(e) })
		wg.Wait()
		assert.Zero(t, time.Since(begin))
		k.do(e.Cancel)
		synctest.Wait()
		assert.False(t, of(k, e.Busy))
		assert.Zero(t, k.next(e), "an attempt that ends after Remove is not followed by another")
		sleep(time.Hour)
		assert.Equal(t, 2, k.attempts(e))
	})
}

// What was demanded of Run and not begun is not begun without it.
func TestRenewDemandOfRunThatEnds(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.loop.Slots, k.time = 1, time.Minute
		stop := k.run(t)
		require.Equal(t, 1, k.attempts(k.add("busy", 0)))
		e := k.add("a", time.Hour)
		var wg sync.WaitGroup
		wg.Go(func() { k.do(func() { assert.ErrorIs(t, k.loop.Await(t.Context(), e), errStop) }) })
		synctest.Wait()
		stop()
		wg.Wait()
		assert.Zero(t, k.attempts(e))
		k.do(func() { assert.NoError(t, k.loop.Await(t.Context(), e), "it may be demanded again") })
		assert.Equal(t, 1, k.attempts(e))
	})
}

// An attempt that was not cancelled goes on after Remove.
func TestRenewRemoveWhileBusy(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.time = time.Minute
		k.run(t)
		e := k.add("a", 0)
		synctest.Wait()
		k.do(func() {
			k.loop.Remove(e)
			k.loop.Put(e, 0)
			k.loop.Hasten(e, 0)
			k.loop.Demand(e)
		})
		sleep(30 * time.Second)
		assert.True(t, of(k, e.Busy))
		sleep(time.Hour)
		assert.False(t, of(k, e.Busy))
		assert.Equal(t, 1, k.attempts(e))
		assert.Zero(t, k.next(e))
	})
}

// Start does not ask whether something is due, failing or within the slots.
func TestRenewStart(t *testing.T) {
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprint(running), func(t *testing.T) {
			inBubble(t, func(t *testing.T, k *keeper) {
				k.loop.Slots, k.time = 1, time.Second
				if running {
					k.run(t)
				}
				for i := range 5 {
					e := k.add(fmt.Sprint(i), time.Hour)
					k.do(func() {
						k.loop.Start(e)
						k.loop.Start(e)
					})
				}
				synctest.Wait()
				assert.Equal(t, 5, read(k, &k.now))
				e := k.add("patient", 0)
				if running {
					assert.Zero(t, k.attempts(e), "the slots are taken")
				}
				sleep(2 * time.Second)
				if !running {
					k.do(func() { k.loop.Demand(e) })
				}
				assert.Equal(t, 1, k.attempts(e))
				sleep(time.Second)
			})
		})
	}
}

func TestRenewHold(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.loop.Hold = true
		k.run(t)
		e := k.add("a", 0)
		k.do(func() { k.loop.Demand(e) })
		sleep(time.Hour)
		assert.Zero(t, k.attempts(e))
		k.do(func() {
			k.loop.Hold = false
			k.loop.Wake()
		})
		assert.Equal(t, 1, k.attempts(e))
	})
}

// A plan that is longer than a duration can be is a long one.
func TestRenewLongWait(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		sleep(time.Hour)
		e := k.add("a", 1<<63-1)
		k.run(t)
		sleep(time.Hour)
		assert.Zero(t, k.attempts(e))
		assert.True(t, k.next(e).After(time.Now().AddDate(80, 0, 0)))
	})
}

// heap returns how much memory is in use.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.HeapAlloc
}

// 100,000 entries cost one goroutine, and less than 200 bytes each.
func TestRenewMany(t *testing.T) { // not parallel: it counts goroutines and memory
	rounds.Slow(t)
	synctest.Test(t, func(t *testing.T) {
		const many = 100_000
		k := newKeeper()
		k.loop.Slots = 8
		before := heap()
		all := make([]*thing, many)
		for i := range all {
			all[i] = &thing{}
			k.do(func() { k.loop.Put(all[i], time.Duration(i)*time.Microsecond) })
		}
		each := float64(heap()-before) / many
		t.Logf("%.0f bytes for each entry", each)
		if !rounds.Race {
			assert.Less(t, each, 200.0)
		}
		goroutines := runtime.NumGoroutine()
		k.run(t)
		assert.LessOrEqual(t, runtime.NumGoroutine()-goroutines, 8+2)
		sleep(time.Minute)
		synctest.Wait()
		assert.LessOrEqual(t, read(k, &k.most), 8)
		for _, e := range all {
			require.Equal(t, 1, e.attempts)
		}
	})
}

// In real time, with the race detector: everything at once.
func TestRenewConcurrency(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	k := newKeeper()
	k.loop.Slots, k.life, k.loop.Slow = 4, 50*time.Microsecond, 100*time.Microsecond
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rounds.Of(1))*125*time.Millisecond)
	defer cancel()
	var all []*thing
	var wg sync.WaitGroup
	for range 3 {
		for i := range 10 {
			e := k.add(fmt.Sprint(i), 0)
			all = append(all, e)
			wg.Go(func() {
				for ctx.Err() == nil {
					k.mu.Lock()
					switch rand.IntN(5) {
					case 0:
						k.loop.Hasten(e, 0)
					case 1:
						k.loop.Start(e)
					case 2:
						e.Cancel()
					default:
						_ = k.loop.Await(ctx, e)
					}
					k.mu.Unlock()
				}
			})
		}
	}
	for ctx.Err() == nil {
		once, stop := context.WithTimeout(ctx, 20*time.Millisecond)
		k.loop.Run(once)
		stop()
		time.Sleep(time.Millisecond)
	}
	wg.Wait()
	assert.Eventually(t, func() bool { // an attempt that was started last may not have begun
		return read(k, &k.now) == 0 && !slices.ContainsFunc(all, func(e *thing) bool { return k.next(e).IsZero() })
	}, time.Minute, time.Millisecond, "an entry is lost")
}

func TestRenewSignal(t *testing.T) {
	t.Parallel()
	var s renew.Signal
	s.Notify()
	first := s.Changed()
	assert.Equal(t, first, s.Changed())
	select {
	case <-first:
		assert.Fail(t, "nothing has changed since")
	default:
	}
	s.Notify()
	<-first
	assert.NotEqual(t, first, s.Changed())
}

func TestRenewFollow(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *keeper) {
		var s renew.Signal
		var mu sync.Mutex
		value := 0
		set := func(v int) {
			mu.Lock()
			value = v
			mu.Unlock()
			s.Notify()
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var got []int
		var wg sync.WaitGroup
		wg.Go(func() {
			for v := range renew.Follow(ctx, s.Changed, func() int { mu.Lock(); defer mu.Unlock(); return value }) {
				got = append(got, v)
				time.Sleep(10 * time.Second)
			}
		})
		for i := range 100 {
			time.Sleep(time.Second)
			set(i / 3)
		}
		set(0)
		time.Sleep(time.Minute)
		set(99)
		synctest.Wait()
		cancel()
		wg.Wait()
		assert.Equal(t, 1, got[0])
		assert.Equal(t, 99, got[len(got)-1])
		assert.NotContains(t, got, 0)
		assert.IsIncreasing(t, got)
		assert.InDelta(t, 12, len(got), 1, "a slow reader skips to the newest")
		for range renew.Follow(ctx, s.Changed, func() int { return 1 }) {
			assert.Fail(t, "it has ended")
		}
		for range renew.Follow(t.Context(), s.Changed, func() int { return 1 }) {
			break
		}
	})
}

func TestRenewSleep(t *testing.T) {
	inBubble(t, func(t *testing.T, _ *keeper) {
		begin := time.Now()
		assert.NoError(t, renew.Sleep(t.Context(), time.Hour))
		assert.Equal(t, time.Hour, time.Since(begin))
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errStop)
		defer cancel()
		assert.Equal(t, errStop, renew.Sleep(ctx, time.Hour))
		assert.Equal(t, time.Hour+time.Second, time.Since(begin))
	})
}

// TestRenewClose: attempts that were started without Run are ended and waited for, and no other follows.
func TestRenewClose(t *testing.T) {
	inBubble(t, func(t *testing.T, k *keeper) {
		k.loop.Close()
		e := k.add("closed", 0)
		k.do(func() { k.loop.Demand(e); k.loop.Start(e) })
		assert.Zero(t, k.attempts(e))
		k.run(t)()
		assert.Zero(t, k.attempts(e))
	})
	t.Run("under way", func(t *testing.T) {
		inBubble(t, func(t *testing.T, k *keeper) {
			k.time, k.cleanup = time.Hour, time.Second
			e, other := k.add("demanded", time.Minute), k.add("other", time.Minute)
			k.do(func() { k.loop.Demand(e) })
			assert.Equal(t, 1, k.attempts(e))
			begun := time.Now()
			k.loop.Close()
			assert.Equal(t, time.Second, time.Since(begun), "its context is done, and it is waited for")
			k.do(func() { assert.False(t, e.Busy()); k.loop.Demand(other) })
			assert.Zero(t, k.attempts(other))
		})
	})
}
