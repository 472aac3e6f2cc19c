package secretset

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
)

// Subscribers are functions that are called with names, one call at a time, from a goroutine that holds no lock and
// ends when the queue is empty. The zero value has none. Its methods are safe for concurrent use, and may be called
// with a lock held that a function takes.
type Subscribers struct {
	mu     sync.Mutex
	all    []*subscriber   // replaced, never changed
	names  []string        // still to tell, in order
	queued map[string]bool // the names
	told   chan struct{}   // closed once names have been told; nil if there are none
	last   chan struct{}   // closed once all names have been told; nil if none is left
	now    string          // the name being told; empty for none
	news   renew.Signal    // of a change of now, and of the end of a batch of names
}

type subscriber struct {
	f    func(name string)
	gone atomic.Bool
}

// Add registers f to be called for every name until cancel is called. f may call cancel, and cancel may be called more
// than once. A call of f that is under way goes on after that.
func (s *Subscribers) Add(f func(name string)) (cancel func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sub := &subscriber{f: f}
	s.all = append(slices.Clip(s.all), sub) // a copy, for tell reads the old one
	return func() {
		sub.gone.Store(true)
		s.mu.Lock()
		defer s.mu.Unlock()
		s.all = slices.DeleteFunc(slices.Clone(s.all), func(o *subscriber) bool { return o == sub })
	}
}

var nothingToTell = make(chan struct{})

func init() { close(nothingToTell) }

// Tell queues names for the functions; it calls names only if there are functions. A name that is already queued is
// told once. The channel is closed once the functions have been called with these names and all earlier ones.
func (s *Subscribers) Tell(names func() []string) (told <-chan struct{}) {
	s.mu.Lock()
	idle := len(s.all) == 0 && s.last == nil
	s.mu.Unlock()
	if idle {
		return nothingToTell
	}
	list := names()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range list {
		if s.queued[name] {
			continue
		}
		if s.queued == nil {
			s.queued = map[string]bool{}
		}
		s.queued[name] = true
		s.names = append(s.names, name)
	}
	switch {
	case len(s.names) > 0 && s.told == nil:
		s.told = make(chan struct{})
		if s.last == nil {
			go s.tell()
		}
		s.last = s.told
	case s.last == nil:
		return nothingToTell
	}
	return s.last
}

// tell calls the functions until the queue is empty.
func (s *Subscribers) tell() {
	for {
		s.mu.Lock()
		names, told, all := s.names, s.told, s.all
		s.names, s.queued, s.told = nil, nil, nil
		s.mu.Unlock()
		for _, name := range names {
			s.mu.Lock()
			s.now = name
			s.news.Notify()
			s.mu.Unlock()
			for _, sub := range all {
				if !sub.gone.Load() {
					sub.f(name)
				}
			}
		}
		s.mu.Lock()
		ended := s.told == nil
		if ended {
			s.last = nil
		}
		s.now = ""
		close(told)
		s.news.Notify()
		s.mu.Unlock()
		if ended {
			return
		}
	}
}

// Now returns the name being told, or "", and a channel that is closed when the name changes, or after a channel of
// Tell was closed.
func (s *Subscribers) Now() (name string, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now, s.news.Changed()
}

// Wait waits until the functions have been called with all queued names.
func (s *Subscribers) Wait() {
	for {
		s.mu.Lock()
		last := s.last
		s.mu.Unlock()
		if last == nil {
			return
		}
		<-last
	}
}
