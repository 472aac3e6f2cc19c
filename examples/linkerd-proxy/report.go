package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync/atomic"
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
