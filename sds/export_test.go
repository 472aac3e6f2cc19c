package sds

import "context"

// Held returns what is counted of clients: open streams and fetches, and bytes of names.
func (h *Handler) Held() (open, names int) { return h.open.Held(), h.names.Held() }

// Waits returns how many names streams wait for that they were refused.
func (h *Handler) Waits() int {
	h.table.mu.Lock()
	defer h.table.mu.Unlock()
	return len(h.table.waits)
}

// Incoming returns how many bytes of requests that are being received are counted.
func (h *Handler) Incoming() int { return h.incoming.Held() }

// Allow returns a Resolve that asks f whether a caller may have a name, and changes no name.
func Allow(f func(ctx context.Context, name string) error) func(context.Context, string) (string, error) {
	return func(ctx context.Context, name string) (string, error) { return name, f(ctx, name) }
}

// These are the types of a Handler's Status.
type (
	Push = push
	NACK = nack
)

// Status returns what h does now.
func (h *Handler) Status() status { return h.status() }
