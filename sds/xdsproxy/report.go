package xdsproxy

import (
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/spiffe/report"
)

// plane is the state of the control plane.
type plane struct {
	mu       sync.Mutex
	answer   time.Time // of the last response; zero if there was none
	failures int       // streams to it that have failed since then
	err      error     // of the last failure; it is Envoy, not the Handler, that reconnects
}

// answered notes a response.
func (p *plane) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer, p.failures, p.err = time.Now(), 0, nil
}

// failed notes the end of a stream. No token is in e.
func (p *plane) failed(e *grpchttp.Error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failures++
	p.err = e
}

// Report implements [report.Reporter] with the open streams of Envoys, and the control plane as the upstream. The
// metrics have the names of Istio's agent.
func (h *Handler) Report() report.Report {
	h.plane.mu.Lock()
	defer h.plane.mu.Unlock()
	return report.Report{
		Servers: []report.Server{{Protocol: "ADS", Streams: h.open.Held()}},
		Upstreams: []report.Upstream{{Name: h.cfg.URL, LastSuccess: h.plane.answer, Failures: h.plane.failures,
			Err: h.plane.err}},
		Metrics: h.metrics.Write,
	}
}
