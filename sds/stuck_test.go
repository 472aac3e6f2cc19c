package sds_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/sds"
)

// stuck is a log whose pipe nobody reads.
type stuck struct{ slog.Handler }

func (stuck) Handle(context.Context, slog.Record) error { select {} }

// A log that blocks stops no stream, and no other name of the stream that has caused the line.
func TestStuckLog(t *testing.T) {
	t.Parallel()
	src, m := newFakeSource(), newMint(t)
	src.put("good", m.pair("good"))
	src.errs["bad"] = errors.New("out of order")
	h, err := sds.NewHandler(src, &sds.Options{Logger: slog.New(stuck{slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug})})})
	require.NoError(t, err)
	path, _ := serve(t, h)
	asking(t, dial(t, path), "bad")
	require.Eventually(t, func() bool { src.mu.Lock(); defer src.mu.Unlock(); return src.calls["bad"] > 0 }, time.Minute, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	begun := time.Now()
	for range 3 {
		s := asking(t, dial(t, path), "good")
		assert.Len(t, s.recv().GetResources(), 1)
	}
	assert.Less(t, time.Since(begun), 5*time.Second)
	h.Report()
}
