package sds

import (
	"context"
	"slices"

	"github.com/svidkit/svidkit/spiffe/report"
)

// Held returns what is counted of clients: open streams and fetches, and bytes of names.
func (h *Handler) Held() (open, names int) { return h.open.Held(), h.names.Held() }

// Waits returns how many names streams wait for that they were refused.
func (h *Handler) Waits() int {
	h.table.mu.Lock()
	defer h.table.mu.Unlock()
	return len(h.table.names[""])
}

// Incoming returns how many bytes of requests that are being received are counted.
func (h *Handler) Incoming() int { return h.grpc.Incoming.Held() }

// Allow returns a Resolve that asks f whether a caller may have a name, and changes no name.
func Allow(f func(ctx context.Context, name string) error) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) { return name, f(ctx, name) }
}

// Status is the state of a [Handler] at one moment.
type Status struct {
	report.Server
	NACKs    uint64
	LastNACK *report.Push
}

// Status returns what h does now, with the newest push first and no rejections among them.
func (h *Handler) Status() Status {
	st := Status{Server: h.Report().Servers[0]}
	h.mu.Lock()
	defer h.mu.Unlock()
	st.NACKs, st.Pushes = h.nacks.Load(), slices.Clone(h.pushes)
	slices.Reverse(st.Pushes)
	if n := len(h.rejections); n > 0 {
		last := h.rejections[n-1]
		st.LastNACK = &last
	}
	return st
}
