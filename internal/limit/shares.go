package limit

import "sync"

// Shares limits resources that are held at the same time, such as connections, streams or bytes: in total, and by
// each peer, so that no peer holds everything. A peer is any party that the server can distinguish: a user, a
// connection, a pod. NewShares creates one. It is safe for concurrent use, and remembers only peers that hold
// something.
type Shares[K comparable] struct {
	total, each int

	mu   sync.Mutex
	held int
	of   map[K]int
}

// NewShares returns Shares of which nothing is held. A total or each that is 0 or negative means no such limit.
func NewShares[K comparable](total, each int) *Shares[K] {
	return &Shares[K]{total: total, each: each, of: map[K]int{}}
}

// Take takes n for the peer, or nothing: then the error is an [*Error] with the reason CallerShare or TotalShare.
// Return the n with Give.
func (s *Shares[K]) Take(peer K, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.each > 0 && n > s.each-s.of[peer]:
		return &Error{Reason: CallerShare}
	case s.total > 0 && n > s.total-s.held:
		return &Error{Reason: TotalShare}
	case n < 0:
		panic("limit: Take of less than nothing")
	case n > 0:
		s.held += n
		s.of[peer] += n
	}
	return nil
}

// Give returns n that the peer has taken.
func (s *Shares[K]) Give(peer K, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	left := s.of[peer] - n
	if left < 0 || n < 0 {
		panic("limit: Give without Take")
	}
	s.held -= n
	if left == 0 {
		delete(s.of, peer)
		return
	}
	s.of[peer] = left
}

// Held returns how much is held, by all peers together.
func (s *Shares[K]) Held() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held
}
