// Package metrics counts, and writes what it counted in the text format that Prometheus reads. It
// has what the certificate servers need and no more: counters, counters told apart by one label
// whose values are known beforehand, and gauges that are computed when somebody asks.
//
// A [Set] is filled once, before it is used; then everything is safe for concurrent use, and to
// count costs one atomic addition. Mistakes in a name are the programmer's and panic.
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

// ContentType is the media type of what [Set.Write] writes.
const ContentType = "text/plain; version=0.0.4; charset=utf-8"

// Set is a list of metrics, which are written in the order in which they were added. The zero Set
// is empty.
type Set struct {
	families []family
}

type family struct {
	name, help, kind string
	samples          []sample
}

type sample struct {
	labels string // {name="value"}, or empty
	value  func() (float64, bool)
}

// Counter is a number that only grows. The zero Counter is at 0, and in no [Set].
type Counter struct{ n atomic.Uint64 }

// Inc adds one.
func (c *Counter) Inc() { c.n.Add(1) }

// Value returns what was counted.
func (c *Counter) Value() uint64 { return c.n.Load() }

func (c *Counter) sample() (float64, bool) { return float64(c.n.Load()), true }

// Counter adds a counter. help is one sentence for people.
func (s *Set) Counter(name, help string) *Counter {
	c := new(Counter)
	s.add(family{name, help, "counter", []sample{{"", c.sample}}})
	return c
}

// Counters adds one counter for each value of a label. The result is not changed by anybody, and
// an unknown value finds nil in it.
func (s *Set) Counters(name, help, label string, values ...string) map[string]*Counter {
	if !isName(label) || strings.Contains(label, ":") || strings.HasPrefix(label, "__") {
		panic(fmt.Sprintf("metrics: %q is not a name for a label", label))
	}
	out := make(map[string]*Counter, len(values))
	f := family{name: name, help: help, kind: "counter"}
	for _, v := range values {
		if out[v] != nil {
			panic(fmt.Sprintf("metrics: %s has the value %q twice", name, v))
		}
		c := new(Counter)
		out[v] = c
		f.samples = append(f.samples, sample{"{" + label + `="` + escapeValue.Replace(v) + `"}`, c.sample})
	}
	s.add(f)
	return out
}

// Gauge adds a number that read returns when somebody asks; false means that there is none now,
// and then nothing is written. read must be safe for concurrent use.
func (s *Set) Gauge(name, help string, read func() (float64, bool)) {
	s.add(family{name, help, "gauge", []sample{{"", read}}})
}

func (s *Set) add(f family) {
	if !isName(f.name) {
		panic(fmt.Sprintf("metrics: %q is not a name for a metric", f.name))
	}
	for _, g := range s.families {
		if g.name == f.name {
			panic(fmt.Sprintf("metrics: %s is there already", f.name))
		}
	}
	s.families = append(s.families, f)
}

// isName reports whether s matches [a-zA-Z_:][a-zA-Z0-9_:]*.
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || c == ':' || '0' <= c && c <= '9' && i > 0) {
			return false
		}
	}
	return s != ""
}

var (
	escapeHelp  = strings.NewReplacer(`\`, `\\`, "\n", `\n`)
	escapeValue = strings.NewReplacer(`\`, `\\`, "\n", `\n`, `"`, `\"`)
)

// Write writes all metrics to w, in one call. The error is w's.
func (s *Set) Write(w io.Writer) error {
	var b bytes.Buffer
	for _, f := range s.families {
		first := true
		for _, sm := range f.samples {
			v, ok := sm.value()
			if !ok {
				continue
			}
			if first {
				fmt.Fprintf(&b, "# HELP %s %s\n# TYPE %s %s\n", f.name, escapeHelp.Replace(f.help), f.name, f.kind)
				first = false
			}
			b.WriteString(f.name)
			b.WriteString(sm.labels)
			b.WriteByte(' ')
			b.WriteString(format(v))
			b.WriteByte('\n')
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// format writes a number as Go's ParseFloat reads it, which is what the format asks for: whole
// numbers without an exponent, as people compare them with the clock.
func format(v float64) string {
	if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
		return strconv.FormatFloat(v, 'f', 0, 64)
	}
	return strconv.FormatFloat(v, 'g', -1, 64)
}
