package lifecycle_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/bubble"
)

func fails(context.Context) error { return errWork }
func ends(context.Context) error  { return nil }

// Those that wait are woken by Close, and not by the end of their own patience, whatever the work has come to.
func TestCloseWakes(t *testing.T) {
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
func TestAwaitSeesWhatCameLast(t *testing.T) {
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
func TestFailureIsForgotten(t *testing.T) {
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
func TestContextOfWorkEnds(t *testing.T) {
	t.Parallel()
	for _, work := range []func(context.Context) error{fails, ends} {
		var l lifecycle.Life
		var of context.Context
		_ = l.Run(t.Context(), func(ctx context.Context) error { of = ctx; return work(ctx) })
		require.ErrorIs(t, of.Err(), context.Canceled)
	}
}
