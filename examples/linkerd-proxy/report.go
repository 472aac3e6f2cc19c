package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// counter is a metric with one label, whose values are known.
type counter struct {
	name, help, label string
	values            []string
	counts            []atomic.Int64
}

func newCounter(name, help, label string, values ...string) *counter {
	return &counter{name, help, label, values, make([]atomic.Int64, len(values))}
}

func (c *counter) inc(value string) { c.counts[slices.Index(c.values, value)].Add(1) }

// WriteMetrics writes the metric in the text format of Prometheus.
func (c *counter) WriteMetrics(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %[1]s counter\n", c.name, c.help)
	for i, value := range c.values {
		fmt.Fprintf(&b, "%s{%s=%q} %d\n", c.name, c.label, value, c.counts[i].Load())
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// warnings log what clients can cause as often as they like: each reason at once, and then once in a minute with a count of
// those that were left out.
type warnings struct {
	log  *slog.Logger
	mu   sync.Mutex
	last map[string]time.Time
	left map[string]int
}

// warn logs an event. The reason is one of a few texts, and not one that a client can choose.
func (w *warnings) warn(message, reason string, attrs ...slog.Attr) {
	if n, now := w.due(reason); now { // a logger can block, and is called without the lock
		attrs = append([]slog.Attr{slog.String("reason", reason), slog.Int("left_out", n)}, attrs...)
		w.log.LogAttrs(context.Background(), slog.LevelWarn, message, attrs...)
	}
}

// due reports whether there was none with the reason for a minute, and how many were left out before.
func (w *warnings) due(reason string) (left int, now bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if at, known := w.last[reason]; known && time.Since(at) < time.Minute {
		w.left[reason]++
		return 0, false
	}
	if w.last == nil {
		w.last, w.left = map[string]time.Time{}, map[string]int{}
	}
	left = w.left[reason]
	w.last[reason], w.left[reason] = time.Now(), 0
	return left, true
}
