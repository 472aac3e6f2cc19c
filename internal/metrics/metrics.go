// Package metrics counts events and writes the counts in the text format of Prometheus (version 0.0.4).
// It has counters, counters that one label tells apart, and gauges that are computed when they are
// written.
//
// A [Set] is filled before it is used. After that all methods are safe for concurrent use.
package metrics

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
)

// Set is a list of metrics. They are written in the order in which they were added. The zero Set is empty.
type Set struct{ families []family }

type family struct {
	name, help, kind string
	samples          []sample
}

type sample struct {
	label string // {name="value"}, or empty
	value func() (v float64, ok bool)
}

// Counter is a number that only grows.
type Counter struct{ n atomic.Uint64 }

// Inc adds one.
func (c *Counter) Inc() { c.n.Add(1) }

// Counter adds a counter.
func (s *Set) Counter(name, help string) *Counter {
	c, sm := newCounter("")
	s.families = append(s.families, family{name, help, "counter", []sample{sm}})
	return c
}

// Counters adds one counter for each value of a label. The result must not be changed.
func (s *Set) Counters(name, help, label string, values ...string) map[string]*Counter {
	counters := make(map[string]*Counter, len(values))
	f := family{name: name, help: help, kind: "counter"}
	for _, v := range values {
		c, sm := newCounter("{" + label + `="` + escapeValue.Replace(v) + `"}`)
		counters[v] = c
		f.samples = append(f.samples, sm)
	}
	s.families = append(s.families, f)
	return counters
}

func newCounter(label string) (*Counter, sample) {
	c := new(Counter)
	return c, sample{label, func() (float64, bool) { return float64(c.n.Load()), true }}
}

// Gauge adds a number that read returns when the Set is written. If ok is false, there is no number now
// and nothing is written. read must be safe for concurrent use.
func (s *Set) Gauge(name, help string, read func() (v float64, ok bool)) {
	s.families = append(s.families, family{name, help, "gauge", []sample{{"", read}}})
}

var (
	escapeHelp  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	escapeValue = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// Write writes all metrics to w, in one call. The error is that of w.
func (s *Set) Write(w io.Writer) error {
	var b bytes.Buffer
	for _, f := range s.families {
		header := fmt.Sprintf("# HELP %s %s\n# TYPE %s %s\n", f.name, escapeHelp.Replace(f.help), f.name, f.kind)
		for _, sm := range f.samples {
			if v, ok := sm.value(); ok {
				b.WriteString(header + f.name + sm.label + " " + format(v) + "\n")
				header = ""
			}
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// format writes whole numbers without an exponent: people compare them with the clock.
func format(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
