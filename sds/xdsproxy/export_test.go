package xdsproxy

// For tests.
const (
	Linger  = linger
	Stalled = stalled
)

// SetLimits sets limits on messages and streams; 0 means the default.
func (c *Config) SetLimits(request, response, streams, peerStreams int) {
	c.limits.request, c.limits.response, c.limits.streams, c.limits.peerStreams = request, response, streams, peerStreams
}

// NodeBytes returns how many bytes the nodes of Envoys have that are kept for debug requests.
func (h *Handler) NodeBytes() int {
	h.envoys.mu.Lock()
	defer h.envoys.mu.Unlock()
	return len(h.envoys.node)
}

// Held returns how many streams are open, and how many bytes of requests wait.
func (h *Handler) Held() (streams, bytes int) { return h.open.Held(), h.waiting.Held() }

// Read returns what is read of a request.
func Read(message []byte, delta bool) (secret bool, node []byte, err error) {
	f := sotwRequest
	if delta {
		f = deltaRequest
	}
	secret, node, err = f.read(message)
	return secret, f.encode(node), err
}

// DebugAnswer returns the JSON of a response to a debug request.
var DebugAnswer = debugAnswer
