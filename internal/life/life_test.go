package life_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/life"
)

var errWork = errors.New("work")

func untilDone(ctx context.Context) error {
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l life.Life
		require.ErrorIs(t, l.Idle(), life.ErrNotStarted)

		ctx, stop := context.WithCancelCause(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- l.Run(ctx, untilDone) }()
		synctest.Wait()
		require.NoError(t, l.Idle())
		require.ErrorIs(t, l.Run(ctx, untilDone), life.ErrRunning)
		require.ErrorIs(t, l.Start(ctx, untilDone, untilDone), life.ErrRunning)
		stop(errWork)
		require.NoError(t, <-ended, "the end of the context is a clean stop, whatever its cause")
		require.ErrorIs(t, l.Idle(), life.ErrEnded)

		require.ErrorIs(t, l.Run(t.Context(), func(context.Context) error { return errWork }), errWork, "it may be called again")
		require.NoError(t, l.Run(t.Context(), func(context.Context) error { return nil }))

		require.NoError(t, l.Close())
		require.ErrorIs(t, l.Run(t.Context(), untilDone), life.ErrClosed)
		require.ErrorIs(t, l.Idle(), life.ErrClosed)
	})
}

func TestStart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l life.Life
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

func TestStartFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l life.Life
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
		require.ErrorIs(t, l.Idle(), life.ErrClosed)
	})
}

func TestCloseWaits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var l life.Life
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

func TestPanic(t *testing.T) {
	t.Parallel()
	var l life.Life
	assert.Panics(t, func() { _ = l.Run(t.Context(), func(context.Context) error { panic("a fault") }) })
	require.ErrorIs(t, l.Idle(), life.ErrEnded)
	require.NoError(t, l.Close())
}
