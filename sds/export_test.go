package sds

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
