package program

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/spiffe/report"
)

// Requests counts the answers of a handler by their status. [Count] makes one.
type Requests struct {
	http.Handler
	metric string

	mu      sync.Mutex
	answers map[int]int
}

// Count returns the Requests of a handler. The name of their metric has that part.
func Count(part string, h http.Handler) *Requests {
	return &Requests{Handler: h, metric: "svidkit_athenz_" + part + "_requests_total", answers: map[int]int{}}
}

// answer notes the status.
type answer struct {
	http.ResponseWriter
	code int
}

func (a *answer) WriteHeader(code int) {
	a.code = code
	a.ResponseWriter.WriteHeader(code)
}

// Unwrap is for [http.ResponseController].
func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

// ServeHTTP implements [http.Handler].
func (c *Requests) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	a := &answer{w, http.StatusOK}
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.answers[a.code]++
	}()
	c.Handler.ServeHTTP(a, r)
}

// Report implements [report.Reporter] with the counts as metrics.
func (c *Requests) Report() report.Report { return report.Report{Metrics: c.writeMetrics} }

func (c *Requests) writeMetrics(w io.Writer) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.answers) == 0 {
		return nil
	}
	var b strings.Builder
	fmt.Fprintf(&b, "# HELP %s Answers by their status.\n# TYPE %[1]s counter\n", c.metric)
	for _, code := range slices.Sorted(maps.Keys(c.answers)) {
		fmt.Fprintf(&b, "%s{code=\"%d\"} %d\n", c.metric, code, c.answers[code])
	}
	_, err := io.WriteString(w, b.String())
	return err
}
