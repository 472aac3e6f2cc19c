package renew

import (
	"context"
	"time"
)

// ElapsedBy is Elapsed for two clocks that say different things, which no test can make them do.
var ElapsedBy = elapsed

// Suspend makes the wall clock of l leap ahead by d, as it does while a machine is suspended.
func (l *Loop[T]) Suspend(d time.Duration) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.clock.advance()
	l.clock.wall = l.clock.wall.Add(-d)
}

// Queued returns how many entries wait.
func (l *Loop[T]) Queued() int {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	return len(l.lanes[0]) + len(l.lanes[1])
}

// WaitBy is Wait with other clocks than those of the machine.
func WaitBy(ctx context.Context, read func() (mono, wall time.Time), d time.Duration, wake <-chan struct{}) {
	(&clock{read: read}).wait(ctx, d, wake)
}
