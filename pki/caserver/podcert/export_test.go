package podcert

import (
	"context"
	"encoding/json"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
)

// SetRoom sets how many bytes of requests may wait, in total and of a node. Run has not been called.
func (s *Signer) SetRoom(all, each int) { s.room = limit.NewShares[string](all, each) }

// Answer returns the answer to a request, both in JSON; nil if it is answered already.
func Answer(ctx context.Context, s *Signer, data []byte) ([]byte, error) {
	var r request
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, err
	}
	if r.answered() {
		return nil, nil
	}
	_ = r.size() + len(r.path())
	answer, err := s.answer(ctx, &r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(answer)
}

// SetAgain sets the time between two writes of a bundle. Run has not been called.
func (s *Signer) SetAgain(d time.Duration) { s.roots.Again = d }
