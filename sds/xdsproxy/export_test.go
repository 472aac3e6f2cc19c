package xdsproxy

// For tests.
const (
	Linger  = linger
	Stalled = stalled
)

// Held returns how many streams are open, and how many bytes of requests wait.
func (h *Handler) Held() (streams, bytes int) { return h.open.Held(), h.waiting.Held() }

// Read returns what is read of a request.
func Read(message []byte, delta bool) (secret bool, node []byte, err error) {
	f := sotwRequest
	if delta {
		f = deltaRequest
	}
	k, node, err := f.read(message)
	return k == secrets, f.encode(node), err
}
