package report_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
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
		lines := strings.Split(strings.TrimSpace(w.Body.String()), "\n")
		fmt.Println(w.Code, lines[len(lines)-1]) // the metrics of package health come before those of the parts
	}
	// Output:
	// 503 uploads: three uploads have failed: the disk is full
	// 200 uploads_failures{part="uploads"} 3
}
