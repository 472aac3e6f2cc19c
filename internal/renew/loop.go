package renew

import (
	"container/heap"
	"context"
	"sync"
	"time"
)

// usualTick is how often the Loop reads the clocks, so that entries that came due during a suspension are attempted
// within a second after it.
const usualTick = 900 * time.Millisecond

// longestSleep bounds how long Run, or a goroutine that waits for an entry, sleeps without checking the entries.
const longestSleep = time.Minute

// urgent is due before everything else.
const urgent time.Duration = -1

// Entry is the state of one thing that a [Loop] keeps fresh. A user embeds it in a type of its own,
// and the zero Entry is ready to use. The lock of the Loop guards it.
type Entry struct {
	due      time.Duration // when the next attempt is, in the time of the Loop
	index    int32         // in the queue, from 1; 0 if it is not in the queue
	lane     uint8         // the queue that it is in
	final    bool
	removed  bool
	failures int
	attempt  *attempt      // the one under way, or nil
	done     chan struct{} // closed at the end of the next attempt; nil if nothing waits for it
}

// attempt is an attempt that is under way.
type attempt struct {
	cancel context.CancelFunc
	slot   bool // it has one
}

// Item is a pointer to a struct that embeds an [Entry].
type Item interface {
	comparable
	entry() *Entry
}

func (e *Entry) entry() *Entry { return e }

// Busy reports whether an attempt is under way.
func (e *Entry) Busy() bool { return e.attempt != nil }

// Removed reports whether [Loop.Remove] was called.
func (e *Entry) Removed() bool { return e.removed }

// Failures returns the number of failures in a row.
func (e *Entry) Failures() int { return e.failures }

// Final reports whether the last attempt failed in a way that a retry cannot mend.
func (e *Entry) Final() bool { return e.final }

// Failed counts a failure and returns what it means for the next attempt.
func (e *Entry) Failed(err error) Failure {
	e.failures++
	f := NewFailure(e.failures, err)
	e.final = f.Final
	return f
}

// Succeeded forgets the failures.
func (e *Entry) Succeeded() { e.failures, e.final = 0, false }

// Cancel ends the context of the attempt that is under way, if there is one.
func (e *Entry) Cancel() {
	if e.attempt != nil {
		e.attempt.cancel()
	}
}

// Loop attempts entries when they are due. The fields are set before its first use and do not
// change, except for Hold.
//
// The user calls every method but [Loop.Run] and [Loop.Close] with Mu locked.
type Loop[T Item] struct {
	// Mu guards the Loop and its entries. It is the user's lock, so that an entry and what the user
	// knows about it change together.
	Mu *sync.Mutex

	// Attempt makes one attempt for e. It runs on a goroutine of its own, without the lock, and must
	// call [Loop.Done] once. The end of ctx, by the end of Run or by [Entry.Cancel], is not a failure
	// of the attempt.
	Attempt func(ctx context.Context, e T)

	// Slots is how many attempts run at a time; 0 means that there is no limit.
	Slots int

	// Slow is how long an attempt keeps its slot; a longer attempt goes on without one. 0 means until its end.
	Slow time.Duration

	// FailingLast makes entries whose last attempt failed wait until no other is due, because their next attempt
	// may well hang, too.
	FailingLast bool

	// Tick is how often Run looks at the clocks; 0 means 900 milliseconds. Tests in which years pass set a long one.
	Tick time.Duration

	// SetBack, if not nil, is called by Run, with Mu locked, after the wall clock was set back to now. Credentials
	// that were valid may then be not valid yet.
	SetBack func(now time.Time)

	// Hold keeps back entries that are due. After unsetting it, the user must call [Loop.Wake].
	Hold bool

	clock clock
	lanes [2]queue[T]
	used  int  // slots
	run   *run // nil while Run is not running

	alone  *run // for attempts started without Run; nil before the first
	closed bool
}

// run is what belongs to one call of Run.
type run struct {
	ctx    context.Context
	cancel context.CancelFunc // of alone
	wake   chan struct{}      // has room for one
	wg     sync.WaitGroup
}

// Run starts the attempts that are due until ctx is done, and returns when the attempts that it has
// started have ended. It may be called again after that, and must not be called before.
//
// While Run is not running, only [Loop.Demand] and [Loop.Start] start attempts. [Loop.Close] ends those.
func (l *Loop[T]) Run(ctx context.Context) {
	r := &run{ctx: ctx, wake: make(chan struct{}, 1)}
	l.Mu.Lock()
	l.run = r
	watch := clock{read: l.clock.read, tick: l.Tick}
	l.Mu.Unlock()
	for ctx.Err() == nil {
		l.Mu.Lock()
		sleep := l.startDue()
		l.Mu.Unlock()
		watch.wait(ctx, sleep, r.wake)
	}
	l.Mu.Lock()
	l.run = nil // so that nothing more is started
	for q := &l.lanes[0]; len(*q) > 0 && (*q)[0].entry().due == urgent; {
		l.push((*q)[0], l.clock.advance()) // Await has told its callers that Run has ended
	}
	l.Mu.Unlock()
	r.wg.Wait()
}

// Close ends the attempts that were started while Run was not running, and waits for them. From then on no attempt is
// started. The user, which does not hold Mu, has ended Run before.
func (l *Loop[T]) Close() {
	l.Mu.Lock()
	l.closed = true
	alone := l.alone
	l.Mu.Unlock()
	if alone != nil {
		alone.cancel()
		alone.wg.Wait()
	}
}

// SetClock makes l read other clocks than the machine's, for tests: in a bubble of testing/synctest both clocks
// agree, while a suspension is when they do not. It is called before the first use, without the lock.
func (l *Loop[T]) SetClock(read func() (mono, wall time.Time)) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.clock = clock{read: read}
}

// startDue starts what is due, as far as there are slots, and returns how long there is nothing to do
// unless the Loop is woken. Without Run, only what is urgent is due.
func (l *Loop[T]) startDue() time.Duration {
	now := l.clock.advance()
	if l.clock.back && l.SetBack != nil && l.run != nil {
		l.clock.back = false
		l.SetBack(l.clock.wall)
	}
	sleep := longestSleep
	if l.Hold || l.closed {
		return sleep
	}
	for i := range l.lanes {
		for q := &l.lanes[i]; len(*q) > 0; {
			e := (*q)[0].entry()
			if e.due > now || l.run == nil && e.due != urgent {
				sleep = min(sleep, max(e.due-now, 0))
				break
			}
			if l.Slots > 0 && l.used >= l.Slots {
				return longestSleep // the end of an attempt wakes the Loop
			}
			l.Start((*q)[0])
		}
	}
	return sleep
}

// Wake makes the Loop check its entries.
func (l *Loop[T]) Wake() {
	if l.run == nil {
		l.startDue()
		return
	}
	select {
	case l.run.wake <- struct{}{}:
	default:
	}
}

// Put makes e due after wait, replacing any earlier plan. It does nothing while an attempt for e is under way.
func (l *Loop[T]) Put(e T, wait time.Duration) {
	if !e.entry().Busy() {
		l.push(e, l.clock.advance()+min(wait, Longest))
		l.Wake()
	}
}

// Hasten makes e due after wait, unless it is due sooner, an attempt for it is under way, or it was
// removed.
func (l *Loop[T]) Hasten(e T, wait time.Duration) {
	if s := e.entry(); s.index > 0 && l.clock.advance()+wait < s.due {
		l.Put(e, wait)
	}
}

// Demand moves e ahead of entries that no caller waits for, whether or not Run is running. It does nothing if
// the last attempt failed and the wait after that is not over.
func (l *Loop[T]) Demand(e T) {
	if s := e.entry(); s.index > 0 && (s.failures == 0 || s.due <= l.clock.advance()) {
		l.push(e, urgent)
		l.Wake()
	}
}

// Start starts an attempt for e at once, whether it is due and a slot is free or not, unless one is
// under way or the Loop is closed.
func (l *Loop[T]) Start(e T) {
	s := e.entry()
	if s.Busy() || l.closed {
		return
	}
	l.drop(e)
	r := l.run
	if r == nil {
		if l.alone == nil {
			l.alone = &run{}
			l.alone.ctx, l.alone.cancel = context.WithCancel(context.Background())
		}
		r = l.alone
	}
	ctx, cancel := context.WithCancel(r.ctx)
	a := &attempt{cancel: cancel, slot: true}
	s.attempt = a
	l.used++
	r.wg.Go(func() {
		if l.Slow > 0 {
			defer time.AfterFunc(l.Slow, func() {
				l.Mu.Lock()
				defer l.Mu.Unlock()
				l.release(a)
			}).Stop()
		}
		l.Attempt(ctx, e)
	})
}

// release frees the slot of a.
func (l *Loop[T]) release(a *attempt) {
	if a.slot {
		a.slot = false
		l.used--
		l.Wake()
	}
}

// Done ends the attempt for e, makes the next one due after wait, and wakes the goroutines that wait
// for e.
func (l *Loop[T]) Done(e T, wait time.Duration) {
	s := e.entry()
	a := s.attempt
	s.attempt = nil
	a.cancel()
	if !s.removed {
		l.Put(e, wait)
	}
	s.tell()
	l.release(a)
}

// Remove takes e out of the Loop, and wakes the goroutines that wait for it. An attempt that is under
// way goes on, and is not followed by another one.
func (l *Loop[T]) Remove(e T) {
	l.drop(e)
	s := e.entry()
	s.removed = true
	s.tell()
}

// Next returns when the next attempt for e is due, on the wall clock. It is zero while an attempt is
// under way, and for an entry that is not in the Loop.
func (l *Loop[T]) Next(e T) time.Time {
	s := e.entry()
	if s.index == 0 {
		return time.Time{}
	}
	wait := max(s.due-l.clock.advance(), 0)
	return l.clock.wall.Add(wait)
}

// Ended returns a channel that is closed at the end of the next attempt for e, or when e is removed.
func (l *Loop[T]) Ended(e T) <-chan struct{} {
	s := e.entry()
	if s.done == nil {
		s.done = make(chan struct{})
	}
	return s.done
}

// Await demands e as [Loop.Demand] does, and waits for the end of the attempt, unlocking Mu while it waits. It returns
// nil when the caller should check e again: because the attempt has ended, e may be demanded again, or ctx is done. It
// returns the cause of Run's context if Run has ended meanwhile.
func (l *Loop[T]) Await(ctx context.Context, e T) error {
	l.Demand(e)
	ended, r := l.Ended(e), l.run
	wait := longestSleep
	if s := e.entry(); s.index > 0 && s.due >= 0 {
		wait = max(min(wait, s.due-l.clock.advance()), Shortest)
	}
	l.Mu.Unlock()
	defer l.Mu.Lock()
	timer := time.NewTimer(wait)
	defer timer.Stop()
	var over <-chan struct{}
	if r != nil {
		over = r.ctx.Done()
	}
	select {
	case <-ended:
	case <-timer.C:
	case <-ctx.Done():
	case <-over:
	}
	if r != nil && r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	return nil
}

func (l *Loop[T]) push(e T, due time.Duration) {
	l.drop(e)
	s := e.entry()
	s.due, s.lane = due, 0
	if l.FailingLast && s.failures > 0 && due != urgent {
		s.lane = 1
	}
	heap.Push(&l.lanes[s.lane], e)
}

// drop takes e out of its queue.
func (l *Loop[T]) drop(e T) {
	if s := e.entry(); s.index > 0 {
		heap.Remove(&l.lanes[s.lane], int(s.index-1))
	}
}

// tell wakes the goroutines that wait for e.
func (e *Entry) tell() {
	if e.done != nil {
		close(e.done)
		e.done = nil
	}
}

// queue is a heap of entries for which no attempt is under way, the next one due in front. It
// implements [heap.Interface].
type queue[T Item] []T

func (q queue[T]) Len() int           { return len(q) }
func (q queue[T]) Less(i, j int) bool { return q[i].entry().due < q[j].entry().due }
func (q queue[T]) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].entry().index, q[j].entry().index = int32(i+1), int32(j+1) // entries fit into memory
}

func (q *queue[T]) Push(x any) {
	e := x.(T)
	*q = append(*q, e)
	e.entry().index = int32(len(*q)) // entries fit into memory
}

func (q *queue[T]) Pop() any {
	last := len(*q) - 1
	e := (*q)[last]
	clear((*q)[last:])
	*q = (*q)[:last]
	e.entry().index = 0
	return e
}
