package xdsproxy

import (
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// Status is the state of a [Handler] at one moment, for health checks and diagnosis. It has no secrets.
type Status struct {
	// URL is the control plane.
	URL string

	// Streams is how many ADS streams of Envoys are open.
	Streams int

	// LastResponse is when the control plane last sent a response; zero if it never has.
	LastResponse time.Time

	// LastFailure is when a stream to the control plane last failed, and Err why; zero and nil if none has since
	// LastResponse. Envoy, and not the Handler, connects again.
	LastFailure time.Time
	Err         error

	// Failures counts those since LastResponse.
	Failures int
}

// plane is what is known of the control plane.
type plane struct {
	mu     sync.Mutex
	status Status
}

// answered notes a response.
func (p *plane) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status = Status{LastResponse: time.Now()}
}

// failed notes the end of a stream.
func (p *plane) failed(e *grpchttp.Error) {
	told := *e
	told.Message, told.Err = bearer.Redact(e.Message), nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.status.Failures++
	p.status.LastFailure, p.status.Err = time.Now(), &told
}

// Status returns the state of the handler.
func (h *Handler) Status() Status {
	h.plane.mu.Lock()
	st := h.plane.status
	h.plane.mu.Unlock()
	st.URL, st.Streams = h.cfg.url(), h.open.Held()
	return st
}
