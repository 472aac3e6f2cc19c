package internal_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/spiffe"
)

var errWork = errors.New("work")

func untilDone(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestLifecycleRun(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		require.ErrorIs(t, l.Idle(), lifecycle.ErrNotStarted)

		ctx, stop := context.WithCancelCause(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx, untilDone) }()
		synctest.Wait()
		require.NoError(t, l.Idle())
		require.ErrorIs(t, l.Run(ctx, untilDone), lifecycle.ErrRunning)
		require.ErrorIs(t, l.Start(ctx, untilDone, untilDone), lifecycle.ErrRunning)
		stop(errWork)
		require.NoError(t, <-ended, "the end of the context is a clean stop, whatever its cause")
		require.ErrorIs(t, l.Idle(), lifecycle.ErrEnded)

		require.ErrorIs(t, l.Run(t.Context(), func(context.Context) error { return errWork }), errWork, "it may be called again")
		require.NoError(t, l.Run(t.Context(), func(context.Context) error { return nil }))

		require.NoError(t, l.Close())
		require.ErrorIs(t, l.Run(t.Context(), untilDone), lifecycle.ErrClosed)
		require.ErrorIs(t, l.Idle(), lifecycle.ErrClosed)
	})
}

func TestLifecycleStart(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		type key struct{}
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "value"), time.Second)
		defer cancel()
		var value any
		work := func(ctx context.Context) error {
			value = ctx.Value(key{})
			return untilDone(ctx)
		}
		require.NoError(t, l.Start(ctx, work, func(context.Context) error { time.Sleep(time.Millisecond); return nil }))
		time.Sleep(time.Hour)
		require.NoError(t, l.Idle(), "the context bounds the start alone")
		require.NoError(t, l.Close())
		assert.Equal(t, "value", value)
		require.NoError(t, l.Close())
	})
}

func TestLifecycleStartFails(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errWork)
		defer cancel()
		ended := false
		work := func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			ended = true
			return nil
		}
		require.ErrorIs(t, l.Start(ctx, work, untilDone), errWork)
		assert.True(t, ended, "what was started has ended when Start returns")
		require.ErrorIs(t, l.Idle(), lifecycle.ErrClosed)
	})
}

func TestLifecycleAwait(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		var news renew.Signal
		var there atomic.Bool
		await := func() <-chan error {
			ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, context.DeadlineExceeded)
			t.Cleanup(cancel)
			result := make(chan error, 1)
			go func() { result <- l.Await(ctx, news.Changed, there.Load) }()
			synctest.Wait()
			return result
		}
		require.ErrorIs(t, <-await(), context.DeadlineExceeded, "what was not started may still be")

		result := await()
		there.Store(true)
		news.Notify()
		require.NoError(t, <-result)
		there.Store(false)

		result = await()
		require.ErrorIs(t, l.Run(t.Context(), func(context.Context) error { return errWork }), errWork)
		require.ErrorIs(t, <-result, errWork, "work that failed is not waited for")
		require.ErrorIs(t, l.Idle(), errWork)
		require.ErrorIs(t, l.Idle(), lifecycle.ErrEnded)
		there.Store(true)
		require.NoError(t, <-await(), "what is there counts more than how the work ended")
		there.Store(false)

		require.NoError(t, l.Run(t.Context(), func(context.Context) error { return nil }))
		result = await()
		require.NoError(t, l.Close())
		require.ErrorIs(t, <-result, lifecycle.ErrClosed)
	})
}

// TestLifecycleStartOfWhatFails: the error of the work is that of Start.
func TestLifecycleStartOfWhatFails(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		var never renew.Signal
		begun := time.Now()
		err := l.Start(t.Context(), func(context.Context) error { time.Sleep(time.Second); return errWork }, func(ctx context.Context) error {
			return l.Await(ctx, never.Changed, func() bool { return false })
		})
		require.ErrorIs(t, err, errWork)
		assert.Equal(t, time.Second, time.Since(begun))
	})
}

// part is what a package starts.
type part struct {
	lifecycle.Life
	ready, end error
	closed     int
}

func (p *part) Ready(context.Context) error { return p.ready }
func (p *part) Close() error                { p.closed++; _ = p.Life.Close(); return p.end }

// Started returns what is ready, and closes what is not.
func TestLifecycleStarted(t *testing.T) {
	t.Parallel()
	good := new(part)
	got, err := lifecycle.Started(t.Context(), good, &good.Life, untilDone)
	require.NoError(t, err)
	require.Same(t, good, got)
	require.Zero(t, good.closed)
	require.NoError(t, good.Close())

	errReady, errEnd := errors.New("not ready"), errors.New("end")
	for _, end := range []error{nil, errEnd} {
		bad := &part{ready: errReady, end: end}
		got, err = lifecycle.Started(t.Context(), bad, &bad.Life, untilDone)
		require.ErrorIs(t, err, errReady)
		require.Equal(t, end != nil, errors.Is(err, errEnd))
		require.Nil(t, got)
		require.Equal(t, 1, bad.closed)
	}
}

// RunAs names what has failed.
func TestLifecycleRunAs(t *testing.T) {
	t.Parallel()
	var l lifecycle.Life
	err := l.RunAs(t.Context(), "mail", func(context.Context) error { return errWork })
	require.ErrorIs(t, err, errWork)
	require.EqualError(t, err, "mail: run: work")
	require.NoError(t, l.RunAs(t.Context(), "mail", func(context.Context) error { return nil }))
}

func TestLifecycleCloseWaits(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		ended := false
		work := func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			ended = true
			return errWork
		}
		result := make(chan error, 1)
		go func() { result <- l.Run(t.Context(), work) }()
		synctest.Wait()
		require.NoError(t, l.Close())
		assert.True(t, ended)
		require.NoError(t, <-result)
	})
}

func TestLifecyclePanic(t *testing.T) {
	t.Parallel()
	var l lifecycle.Life
	assert.Panics(t, func() { _ = l.Run(t.Context(), func(context.Context) error { panic("a fault") }) })
	require.ErrorIs(t, l.Idle(), lifecycle.ErrEnded)
	require.NoError(t, l.Close())
}

func fails(context.Context) error { return errWork }
func ends(context.Context) error  { return nil }

// Those that wait are woken by Close, and not by the end of their own patience, whatever the work has come to.
func TestLifecycleCloseWakes(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]func(t *testing.T, l *lifecycle.Life){
		"never started": func(*testing.T, *lifecycle.Life) {},
		"ended well":    func(t *testing.T, l *lifecycle.Life) { require.NoError(t, l.Run(t.Context(), ends)) },
		"failed, and then ended well": func(t *testing.T, l *lifecycle.Life) {
			require.ErrorIs(t, l.Run(t.Context(), fails), errWork)
			require.NoError(t, l.Run(t.Context(), ends))
		},
		"running": func(t *testing.T, l *lifecycle.Life) {
			go func() { assert.NoError(t, l.Run(t.Context(), untilDone)) }()
		},
		"failed, and running again": func(t *testing.T, l *lifecycle.Life) {
			require.ErrorIs(t, l.Run(t.Context(), fails), errWork)
			go func() { assert.NoError(t, l.Run(t.Context(), untilDone)) }()
		},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			var l lifecycle.Life
			var news renew.Signal
			before(t, &l)
			synctest.Wait()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			results := make(chan error, 3)
			for range cap(results) {
				go func() { results <- l.Await(ctx, news.Changed, func() bool { return false }) }()
			}
			time.Sleep(time.Minute)
			require.Empty(t, results)
			require.NoError(t, l.Close())
			synctest.Wait()
			require.NoError(t, ctx.Err())
			require.Len(t, results, cap(results), "they are woken at once")
			for range cap(results) {
				require.ErrorIs(t, <-results, lifecycle.ErrClosed)
			}
		})
	}
}

// What the work does last counts, though it ends, fails or is closed while a caller looks.
func TestLifecycleAwaitSeesWhatCameLast(t *testing.T) {
	t.Parallel()
	for name, last := range map[string]func(t *testing.T, l *lifecycle.Life){
		"fails":  func(t *testing.T, l *lifecycle.Life) { require.ErrorIs(t, l.Run(t.Context(), fails), errWork) },
		"closed": func(t *testing.T, l *lifecycle.Life) { require.NoError(t, l.Close()) },
		"ends":   func(t *testing.T, l *lifecycle.Life) { require.NoError(t, l.Run(t.Context(), ends)) },
	} {
		bubble.Run(t, name, func(t *testing.T) {
			var l lifecycle.Life
			var never renew.Signal
			there := false
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			looks := 0
			require.NoError(t, l.Await(ctx, never.Changed, func() bool {
				looks++
				was := there
				if !was { // the success comes after this look, and the end after the success
					there = true
					last(t, &l)
				}
				return was
			}))
			assert.Equal(t, 2, looks)
			assert.Zero(t, time.Since(begun))
		})
	}
}

// Work that has failed and runs again is waited for: its old failure is forgotten.
func TestLifecycleFailureIsForgotten(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		var news renew.Signal
		there := false
		require.ErrorIs(t, l.Run(t.Context(), fails), errWork)
		require.ErrorIs(t, l.Await(t.Context(), news.Changed, func() bool { return there }), errWork)
		go func() { assert.NoError(t, l.Run(t.Context(), untilDone)) }()
		synctest.Wait()
		require.NoError(t, l.Idle())
		result := make(chan error, 1)
		go func() { result <- l.Await(t.Context(), news.Changed, func() bool { return there }) }()
		synctest.Wait()
		require.Empty(t, result)
		there = true
		news.Notify()
		require.NoError(t, <-result)
		require.NoError(t, l.Close())
	})
}

// The context of the work ends when the work does, also by itself: nothing that it has started is left.
func TestLifecycleContextOfWorkEnds(t *testing.T) {
	t.Parallel()
	for _, work := range []func(context.Context) error{fails, ends} {
		var l lifecycle.Life
		var of context.Context
		_ = l.Run(t.Context(), func(ctx context.Context) error { of = ctx; return work(ctx) })
		require.ErrorIs(t, of.Err(), context.Canceled)
	}
}

// The error says what is missing, why nothing is being done, and why the wait has ended, each once.
func TestLifecycleReady(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var l lifecycle.Life
		var news renew.Signal
		var there atomic.Bool
		var cause error
		ready := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			return l.Ready(ctx, news.Changed, there.Load, func() error { return l.NotReady("part", cause, "nothing has come yet") })
		}
		err := ready()
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, err, lifecycle.ErrNotStarted)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		cause = errWork
		require.ErrorContains(t, ready(), "work; waited for it")

		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx, untilDone) }()
		synctest.Wait()
		cause = nil
		require.EqualError(t, ready(), "part: not ready: nothing has come yet; waited for it: context deadline exceeded")
		there.Store(true)
		require.NoError(t, ready())
		there.Store(false)
		stop()
		require.NoError(t, <-ended)
		require.NoError(t, l.Close())
		err = ready()
		require.ErrorIs(t, err, lifecycle.ErrClosed)
		require.NotContains(t, err.Error(), "waited for it", "it says why already")
	})
}
