package workloadserver

import "github.com/svidkit/svidkit/spiffe"

// For tests.
const (
	MaxAudiences = maxAudiences
	MaxHint      = maxHint
	MaxEncodings = maxEncodings
	MaxPeer      = maxPeerStreams
	RetryFull    = retryFull
)

// Streams returns how many streams are open and calls are being answered.
func (h *Handler) Streams() int { return h.shares.Held() }

// Fixed returns a Provider that always has the same snapshot.
func Fixed(s *spiffe.Snapshot) Provider { return fixed{s} }

type fixed struct{ snap *spiffe.Snapshot }

func (f fixed) Snapshot() (*spiffe.Snapshot, error) { return f.snap, nil }
func (f fixed) Changed() <-chan struct{}            { return nil }

// Encodings returns for how many identities responses are kept.
func (h *Handler) Encodings() int { return h.enc.cur.held }

// EncodeX509SVIDs returns the shared response for a list of identities.
func (h *Handler) EncodeX509SVIDs(snap *spiffe.Snapshot, ids []Identity) ([]byte, error) {
	return h.enc.of(snap, h.crls()).of(ids)
}
