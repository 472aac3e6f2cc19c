package ca_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/svidkit/svidkit/pki/ca"
)

var errFault = errors.New("the store is having a bad day")

// fault is what happens to one call.
type fault int

const (
	fine     fault = iota
	before         // it fails, and nothing was done
	after          // it fails, and was done
	conflict       // a Save says that another writer was faster
	stale          // a Load gives the record before the present one, if that is not older than lag
	hang           // it does nothing until the caller gives up
)

// faultStore is a store that misbehaves as its owner decides.
type faultStore struct {
	ca.Store
	decide func(op string) (fault, time.Duration) // for "load" and "save"; nil: fine

	mu      sync.Mutex
	history *history // shared by the replicas that share a store; nil for a history of its own
}

// lag is how far a bad store may be behind.
const lag = 10 * time.Second

// history remembers the last two records.
type history struct {
	mu             sync.Mutex
	previous, last ca.Record
	replaced       time.Time // when last took the place of previous
}

func (h *history) saved(r ca.Record) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.previous, h.last, h.replaced = h.last, r, time.Now()
}

func (h *history) before() (ca.Record, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.previous, h.previous.Data() != nil && time.Since(h.replaced) <= lag
}

func (s *faultStore) past() *history {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.history == nil {
		s.history = new(history)
	}
	return s.history
}

func (s *faultStore) what(ctx context.Context, op string) fault {
	s.mu.Lock()
	decide := s.decide
	s.mu.Unlock()
	if decide == nil {
		return fine
	}
	f, latency := decide(op)
	if latency > 0 {
		select {
		case <-time.After(latency):
		case <-ctx.Done():
		}
	}
	return f
}

// behave changes what happens from now on.
func (s *faultStore) behave(decide func(op string) (fault, time.Duration)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.decide = decide
}

// always makes every call of one kind, or of all ("" for op), fail like that.
func always(kind string, f fault) func(string) (fault, time.Duration) {
	return func(op string) (fault, time.Duration) {
		if kind == "" || kind == op {
			return f, 0
		}
		return fine, 0
	}
}

func (s *faultStore) Load(ctx context.Context) (ca.Record, error) {
	switch s.what(ctx, "load") {
	case before, after:
		return ca.Record{}, fmt.Errorf("test: %w", errFault)
	case hang:
		<-ctx.Done()
		return ca.Record{}, context.Cause(ctx)
	case stale:
		if r, ok := s.past().before(); ok {
			return r, nil
		}
	}
	return s.Store.Load(ctx)
}

func (s *faultStore) Save(ctx context.Context, r ca.Record) (string, error) {
	f := s.what(ctx, "save")
	switch f {
	case before:
		return "", fmt.Errorf("test: %w", errFault)
	case hang:
		<-ctx.Done()
		return "", context.Cause(ctx)
	case conflict:
		return "", fmt.Errorf("test: %w", ca.ErrConflict)
	}
	v, err := s.Store.Save(ctx, r)
	if err != nil {
		return v, err
	}
	s.past().saved(ca.NewRecord(v, r.Data()))
	if f == after {
		return "", fmt.Errorf("test: after it was done: %w", errFault)
	}
	return v, nil
}
