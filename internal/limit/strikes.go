package limit

import (
	"sync"
	"time"
)

// CallerRefused is the reason of the [Error] for a caller with too many strikes.
const CallerRefused = "too much of what this caller asked for was refused lately"

// Strikes counts refused requests for each caller. A caller may have a fixed number of strikes, and is forgiven them
// at a steady rate. Use it for work that a caller can cause before proving anything: a caller whose requests are good
// has strikes only while they are under way, however many there are. [NewStrikes] creates one. It is safe for
// concurrent use, and its memory is bounded like a [Limiter]'s.
type Strikes struct {
	start time.Time // the zero of all times

	mu      sync.Mutex
	callers callers
}

// NewStrikes returns Strikes in which no caller has any. A caller may have most strikes, at least 1, and is forgiven
// rate strikes per second, which must be positive.
func NewStrikes(rate float64, most int) *Strikes {
	return &Strikes{start: time.Now(), callers: newCallers(newSize(rate, max(most, 1)))}
}

// Take gives the caller a strike, for a request that begins. If the caller already has the most, the error is an
// [*Error] with the reason CallerRefused, which says when a strike is forgiven.
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
