package xdsproxy

import (
	"cmp"
	"log/slog"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/tokens/bearer"
)

// reports has the last report of the workload's health, and the streams that it is for.
type reports struct {
	mu      sync.Mutex
	any     bool // there is a report
	healthy bool
	text    string
	legs    map[*leg]struct{} // whose Envoy has asked for listeners
}

// ReportHealth tells the control plane whether the workload is healthy, for programs that probe it: nil means healthy, and an
// error says what is wrong, in at most 500 bytes. The last report is sent on each stream once its Envoy has asked for
// listeners, and then when healthy becomes unhealthy or the other way round. ReportHealth does not wait for that. What the
// control plane answers is not for Envoy, and is dropped.
//
// The report is a request of the type istio.v1.HealthInformation.
func (h *Handler) ReportHealth(err error) {
	r := &h.health
	var failed error
	defer func() { h.unreported(failed) }() // once the lock is free, as a logger can block
	r.mu.Lock()
	defer r.mu.Unlock()
	if healthy := err == nil; r.any && r.healthy == healthy {
		return
	}
	r.any, r.healthy, r.text = true, err == nil, ""
	if err != nil {
		r.text = bearer.Redact(strings.ToValidUTF8(err.Error(), ""))
	}
	for l := range r.legs {
		failed = cmp.Or(r.send(l), failed)
	}
}

func (h *Handler) unreported(err error) {
	if err != nil {
		h.log.Warn("xdsproxy: the health of the workload cannot be reported", "encode", slog.Any("err", err))
	}
}

// join says that a stream may have reports.
func (r *reports) join(l *leg) {
	var failed error
	defer func() { l.s.h.unreported(failed) }()
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.legs[l]; ok || l.left {
		return
	}
	if r.legs == nil {
		r.legs = map[*leg]struct{}{}
	}
	r.legs[l] = struct{}{}
	if r.any {
		failed = r.send(l)
	}
}

// leave says that a stream has ended.
func (r *reports) leave(l *leg) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l.left = true
	delete(r.legs, l)
}

// send sends the report on a stream. r.mu is held.
func (r *reports) send(l *leg) error {
	msg, err := l.s.fields.report(r.healthy, r.text)
	if err == nil {
		l.queue.setReport(msg)
	}
	return err
}
