package source

import (
	"cmp"
	"context"
	"time"
)

// Load loads what l has stored.
func Load(ctx context.Context, l *LastGood) { l.load(ctx) }

// Status is the state of a LastGood.
type Status struct {
	Live, InUse  bool
	Saved        time.Time
	Refused, Err error
}

// Status returns the state of l.
func (l *LastGood) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	live := l.isLive()
	return Status{live, !live && l.past() != nil, l.saved, l.refused, cmp.Or(l.ended, l.failed)}
}
