package limit

import (
	"sync"
	"time"
)

// CallerRefused is the reason of the [Error] for a caller with too many strikes.
const CallerRefused = "too much of what this caller asked for was refused lately"

// Strikes counts what was refused, for each caller. A caller may have so many strikes at once, and is forgiven one of
// them at a time. It is for work that a caller can cause without having proven anything: a caller whose requests are
// good has strikes only while they are under way, however many there are. [NewStrikes] makes one. It is safe for
// concurrent use, and its memory is bounded as that of a [Limiter].
type Strikes struct {
	start time.Time // what now counts from

	mu      sync.Mutex
	callers callers
}

// NewStrikes returns Strikes of which no caller has any. A caller may have most of them, at least 1, and is forgiven
// as many per second as rate says, which is positive.
func NewStrikes(rate float64, most int) *Strikes {
	return &Strikes{start: time.Now(), callers: newCallers(newSize(rate, max(most, 1)))}
}

// Take gives the caller a strike, for a request that begins. If it has as many as it may have, the error is an
// [*Error] with the reason CallerRefused, which says when one of them is forgiven.
func (s *Strikes) Take(caller string) error { return s.take(caller, true) }

// Check returns what Take would return, and gives no strike.
func (s *Strikes) Check(caller string) error { return s.take(caller, false) }

func (s *Strikes) take(caller string, one bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Since(s.start)
	b, known := s.callers.find(caller, now)
	if wait := b.wait(now); wait > 0 {
		return &Error{Reason: CallerRefused, RetryAfter: wait}
	}
	if one {
		b.take(now)
		s.callers.put(caller, b, known, now)
	}
	return nil
}

// Forgive takes a strike back, after a request that was not refused.
func (s *Strikes) Forgive(caller string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Since(s.start)
	if b, known := s.callers.find(caller, now); known != nil {
		b.full -= b.every
		s.callers.put(caller, b, known, now)
	}
}
