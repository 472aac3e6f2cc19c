package report_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/report"
)

// uploads is a part of a program that copies files to a store.
type uploads struct {
	mu     sync.Mutex
	last   time.Time
	failed int
	err    error
}

// Report implements [report.Reporter].
func (u *uploads) Report() report.Report {
	u.mu.Lock()
	defer u.mu.Unlock()
	r := report.Report{
		Upstreams: []report.Upstream{{Name: "store.example.org", LastSuccess: u.last, Failures: u.failed, Err: u.err}},
		Metrics: func(w io.Writer) error {
			_, err := io.WriteString(w, "# HELP uploads_failures Failed uploads in a row.\n# TYPE uploads_failures gauge\nuploads_failures 3\n")
			return err
		},
	}
	if u.failed > 2 {
		r.NotReady = fmt.Errorf("three uploads have failed: %w", u.err)
	}
	return r
}

// A part of a program's own has a method Report. Package health answers probes and Prometheus with it, and package
// statuspage shows it.
func Example() {
	part := &uploads{failed: 3, err: errors.New("the disk is full")}
	h, err := health.New(health.Part{Name: "uploads", Source: part})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, path := range []string{"/ready", "/metrics"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		fmt.Println(w.Code)
		fmt.Print(w.Body)
	}
	// Output:
	// 503
	// uploads: three uploads have failed: the disk is full
	// 200
	// # HELP svidkit_ready Whether the part is ready: 1, or 0 for one without a valid identity, without a bundle that it needs, or by its own condition.
	// # TYPE svidkit_ready gauge
	// svidkit_ready{part="uploads"} 0
	// # HELP svidkit_alive Whether the part is alive: 1, or 0 if its identity has expired.
	// # TYPE svidkit_alive gauge
	// svidkit_alive{part="uploads"} 1
	// # HELP uploads_failures Failed uploads in a row.
	// # TYPE uploads_failures gauge
	// uploads_failures{part="uploads"} 3
}
