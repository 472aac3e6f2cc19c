package program

import (
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
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

// Count returns the Requests of a handler. part is part of their metric's name.
func Count(part string, h http.Handler) *Requests {
	return &Requests{Handler: h, metric: "svidkit_athenz_" + part + "_requests_total", answers: map[int]int{}}
}

// answer records the status.
type answer struct {
	http.ResponseWriter
	code int
}

func (a *answer) WriteHeader(code int) {
	a.code = code
	a.ResponseWriter.WriteHeader(code)
}

// Unwrap serves [http.ResponseController].
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

// Local serves h, and refuses requests over loopback for another host: a browser on this machine sends them for a
// site whose name resolves to loopback (DNS rebinding).
func Local(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = strings.Trim(r.Host, "[]") // no port
		}
		_, notAddress := netip.ParseAddr(host)
		at, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		if ok && at.IP.IsLoopback() && notAddress != nil && !strings.EqualFold(host, "localhost") {
			http.Error(w, "this server is localhost; it has no other name over loopback",
				http.StatusMisdirectedRequest)
			return
		}
		h.ServeHTTP(w, r)
	})
}
