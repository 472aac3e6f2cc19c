// Package metrics counts events and writes metrics in the text format of Prometheus (version 0.0.4): counters, with
// or without a label, and counters and gauges with any labels that are computed when they are written. [Merge]
// combines several texts into one.
//
// A [Set] must be filled before it is used; then all methods are safe for concurrent use. A part that computes its
// numbers from a snapshot fills a new Set each time.
package metrics

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// Set is a list of metrics. They are written in the order in which they were added. The zero Set is empty.
type Set struct{ families []family }

type family struct {
	name, help, kind string
	read             func(Add)
}

// Add adds a sample. The labels are names and values in turn. A value may be any UTF-8 text; no two samples of a
// family may have the same labels.
type Add func(v float64, labels ...string)

// Counter is a number that only grows.
type Counter struct{ n atomic.Uint64 }

// Inc adds one.
func (c *Counter) Inc() { c.n.Add(1) }

// Counter adds a counter.
func (s *Set) Counter(name, help string) *Counter {
	c := new(Counter)
	s.Totals(name, help, func(add Add) { add(float64(c.n.Load())) })
	return c
}

// Counters adds one counter for each value of a label. The caller must not change the result.
func (s *Set) Counters(name, help, label string, values ...string) map[string]*Counter {
	counters := make(map[string]*Counter, len(values))
	for _, v := range values {
		counters[v] = new(Counter)
	}
	s.Totals(name, help, func(add Add) {
		for _, v := range values {
			add(float64(counters[v].n.Load()), label, v)
		}
	})
	return counters
}

// Totals adds a counter. read adds its samples when the Set is written; it must be safe for concurrent use, and its
// numbers must only grow.
func (s *Set) Totals(name, help string, read func(Add)) {
	s.families = append(s.families, family{name, help, "counter", read})
}

// Gauge adds a gauge whose value read returns when the Set is written. If ok is false, nothing is written. read must
// be safe for concurrent use.
func (s *Set) Gauge(name, help string, read func() (v float64, ok bool)) {
	s.Gauges(name, help, func(add Add) {
		if v, ok := read(); ok {
			add(v)
		}
	})
}

// Value adds a gauge with the value v.
func (s *Set) Value(name, help string, v float64) {
	s.Gauge(name, help, func() (float64, bool) { return v, true })
}

// Time adds a gauge with the time t, or without a value if t is zero.
func (s *Set) Time(name, help string, t time.Time) {
	s.Gauge(name, help, func() (float64, bool) { return Seconds(t), !t.IsZero() })
}

// Gauges adds a gauge. read adds its samples when the Set is written; without samples nothing is written. read must
// be safe for concurrent use.
func (s *Set) Gauges(name, help string, read func(Add)) {
	s.families = append(s.families, family{name, help, "gauge", read})
}

// Seconds returns t in seconds since 1970, or 0 for the zero time.
func Seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// Bool returns 1 for true and 0 for false.
func Bool(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

var (
	escapeHelp  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	escapeValue = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// Write writes all metrics to w, in one call. It returns the error of w.
func (s *Set) Write(w io.Writer) error {
	var b bytes.Buffer
	for _, f := range s.families {
		header := fmt.Sprintf("# HELP %s %s\n# TYPE %s %s\n", f.name, escapeHelp.Replace(f.help), f.name, f.kind)
		f.read(func(v float64, labels ...string) {
			b.WriteString(header + f.name + text(labels) + " " + format(v) + "\n")
			header = ""
		})
	}
	_, err := w.Write(b.Bytes())
	return err
}

// text formats labels, names and values in turn, as {name="value"}, or as nothing if there are none.
func text(labels []string) string {
	if len(labels) == 0 {
		return ""
	}
	var b strings.Builder
	for i := 0; i < len(labels); i += 2 {
		b.WriteByte("{,"[min(i, 1)])
		b.WriteString(labels[i] + `="` + escapeValue.Replace(labels[i+1]) + `"`)
	}
	return b.String() + "}"
}

// format writes whole numbers without an exponent, so that people can compare times with the clock.
func format(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
