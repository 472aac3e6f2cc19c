// Package limit bounds what a server does at once and in a second: slots for concurrent requests, a queue in front of
// the slots, and rates in total and for each caller.
//
//	l := limit.New(limit.Options{Concurrent: 4, Queue: 100, Rate: 1000, CallerRate: 10, CallerBurst: 20})
//	…
//	if err := l.Acquire(ctx, caller); err != nil {
//		return err // an *Error, or the cause of ctx's end
//	}
//	defer l.Release()
//
// Requests that wait for a slot are served in order of arrival. A refused request uses nothing: no slot, no place in
// the queue, no token. So a caller over its rate cannot use up capacity for others. A refusal says when to try again.
//
// [Shares] limits resources held for longer than a request, such as streams. [Limiter.Check] and [Limiter.Forgive] make
// of the rate of a caller a limit on its refused requests, for work that a caller can cause before it proves anything.
//
// Memory is bounded by Options.Queue, and by 65,536 remembered callers, whatever their names. Beyond that number, the
// callers that asked longest ago are forgotten and start again with a full burst; the total rate still holds.
package limit

import (
	"cmp"
	"container/list"
	"context"
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/retry"
)

// Options are the limits. A Concurrent, Rate or CallerRate that is zero, negative or not a number means no limit.
type Options struct {
	Concurrent int // how many requests hold a slot at the same time
	Queue      int // how many requests wait for a slot; 0: a request that finds no free slot is refused

	// QueueTime is how long a request should wait for its slot during an overload: while 64 requests wait, and one
	// more would wait longer than this at the recent pace, it is refused. In the first half second of an overload the
	// wait may be ten times as long, so that a burst is served; an overload that begins 5 seconds after another is a
	// new one. 0: no such limit.
	QueueTime time.Duration

	Rate  float64 // requests per second, of all callers together
	Burst int     // how many requests may come at once after a pause; 0: the number for one second, at least 1

	CallerRate  float64 // requests per second, of each caller
	CallerBurst int     // like Burst
}

// The reasons of an [Error].
const (
	CallerRate = "this caller asks too often"
	TotalRate  = "all callers together ask too often"
	QueueFull  = "too many requests are waiting"

	CallerShare = "this caller holds too much already"
	TotalShare  = "all callers together hold too much already"
)

// Error says which limit is reached.
type Error struct {
	Reason string // one of the constants above

	// RetryAfter is when the same request would be admitted if no other came. For QueueFull it is when all waiting
	// requests will have been served, estimated from the recent pace of releases; 0 if there were none.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	if e.RetryAfter > 0 {
		return "limit: " + e.Reason + "; try again in " + e.RetryAfter.String()
	}
	return "limit: " + e.Reason + "; try again later"
}

var _ retry.Error = (*Error)(nil)

// Retryable returns RetryAfter, and true: the same request may be admitted later.
func (e *Error) Retryable() (after time.Duration, ok bool) { return e.RetryAfter, true }

// Limiter enforces the limits; [New] creates one. It starts no goroutine and is safe for concurrent use.
type Limiter struct {
	concurrent, queue int
	queueTime         time.Duration
	start             time.Time // the zero of all times below

	mu      sync.Mutex
	used    int       // slots in use
	waiting list.List // of chan struct{}, oldest first; each is closed when its request gets a slot

	// The first and the last request of an overload that would have waited too long.
	long    struct{ first, last time.Duration }
	total   bucket
	callers callers
	pace    pace
}

// New returns a Limiter with all slots free and all buckets full.
func New(o Options) *Limiter {
	l := &Limiter{
		concurrent: max(o.Concurrent, 0),
		queue:      max(o.Queue, 0),
		queueTime:  o.QueueTime,
		start:      time.Now(),
		total:      bucket{size: newSize(o.Rate, o.Burst)},
		callers:    newCallers(newSize(o.CallerRate, o.CallerBurst)),
	}
	l.long.last = -time.Hour
	return l
}

// Acquire takes a token of caller, a token of the total, and a slot, and waits in the queue if no slot is free. After
// a nil error call [Limiter.Release] exactly once. The error is an [*Error] at once when a limit is reached, and
// context.Cause(ctx) when ctx is done before a slot is free; its tokens are then spent, as a request that gives up
// counts like any other.
//
// An empty caller is a caller like any other.
func (l *Limiter) Acquire(ctx context.Context, caller string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	l.mu.Lock()
	place, err := l.take(caller)
	l.mu.Unlock()
	if err != nil || place == nil {
		return err
	}
	granted := place.Value.(chan struct{})
	select {
	case <-granted:
		return nil
	case <-ctx.Done():
	}
	l.mu.Lock()
	select {
	case <-granted:
		l.handOn() // the slot came too late
	default:
		l.waiting.Remove(place)
	}
	l.mu.Unlock()
	return context.Cause(ctx)
}

// take checks every limit before it takes anything, and returns its place in the queue if no slot is free. mu is held.
func (l *Limiter) take(caller string) (*list.Element, error) {
	now := time.Since(l.start)
	own, known := l.callers.find(caller, now)
	ownWait, totalWait := own.wait(now), l.total.wait(now)
	full, waiting := l.concurrent > 0 && l.used >= l.concurrent, l.waiting.Len()
	switch {
	case ownWait > 0:
		return nil, &Error{Reason: CallerRate, RetryAfter: max(ownWait, totalWait)}
	case totalWait > 0:
		return nil, &Error{Reason: TotalRate, RetryAfter: totalWait}
	case full && (waiting >= l.queue || l.overloaded(now)):
		return nil, &Error{Reason: QueueFull, RetryAfter: l.pace.after(now, waiting+1)}
	}
	own.take(now)
	l.callers.put(caller, own, known, now)
	l.total.take(now)
	if !full {
		l.used++
		return nil, nil
	}
	if waiting == 0 {
		l.pace.last = now
	}
	return l.waiting.PushBack(make(chan struct{})), nil
}

// overloaded reports whether one more request would wait too long, and this is not just a burst; mu is held.
func (l *Limiter) overloaded(now time.Duration) bool {
	// a machine that stops for a moment is not overloaded
	const least, burst, calm = 64, 500 * time.Millisecond, 5 * time.Second
	n := l.waiting.Len()
	wait := l.pace.average * time.Duration(n+1)
	if l.queueTime <= 0 || n < least || wait <= l.queueTime {
		return false
	}
	if now-l.long.last > calm {
		l.long.first = now
	}
	l.long.last = now
	return now-l.long.first > burst || wait > 10*l.queueTime
}

// Release frees the slot. The request that has waited longest gets it.
func (l *Limiter) Release() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.used == 0 {
		panic("limit: Release without Acquire")
	}
	l.handOn()
}

func (l *Limiter) handOn() {
	first := l.waiting.Front()
	if first == nil {
		l.used--
		return
	}
	l.pace.step(time.Since(l.start))
	l.waiting.Remove(first)
	close(first.Value.(chan struct{}))
}

// Check returns the error of Acquire for the rate of a caller, and takes nothing.
func (l *Limiter) Check(caller string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Since(l.start)
	b, _ := l.callers.find(caller, now)
	if wait := b.wait(now); wait > 0 {
		return &Error{Reason: CallerRate, RetryAfter: wait}
	}
	return nil
}

// Forgive gives a token back to a caller, whose request was good and does not count.
func (l *Limiter) Forgive(caller string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Since(l.start)
	if b, known := l.callers.find(caller, now); known != nil {
		b.full -= b.every
		l.callers.put(caller, b, known, now)
	}
}

// size is how fast a bucket fills and how much it holds.
type size struct {
	every time.Duration // between two tokens; 0: no limit
	burst time.Duration // the largest allowed debt: the time in which all tokens but one come
}

func newSize(rate float64, burst int) size {
	if !(rate > 0) { // in this form, it is also true for NaN
		return size{}
	}
	const longest = math.MaxInt64 / 8 // 36 years, and no sum overflows
	every := min(float64(time.Second)/rate, longest)
	if burst <= 0 {
		burst = int(max(1, min(rate, math.MaxInt32)))
	}
	// A rate of more than one per nanosecond is no limit.
	return size{every: time.Duration(every), burst: time.Duration(min(every*float64(burst-1), longest))}
}

// bucket is stored as the moment at which it will be full again (the "virtual scheduling" form of the leaky bucket):
// each token moves that moment on by every, and a token is available while the moment is at most burst ahead.
type bucket struct {
	size
	full time.Duration // since start
}

// wait returns how long it takes until a token is available; 0 if one is.
func (b *bucket) wait(now time.Duration) time.Duration {
	return max(0, b.full-b.burst-now)
}

func (b *bucket) take(now time.Duration) {
	b.full = max(b.full, now) + b.every
}

// pace is the recent time between releases while requests waited.
type pace struct {
	last    time.Duration // the last release, or when the queue began
	average time.Duration // of these times, weighted towards newer ones; 0 at first
}

func (p *pace) step(now time.Duration) {
	p.average = (3*cmp.Or(p.average, now-p.last) + now - p.last) / 4
	p.last = now
}

// after estimates how long n releases take. The estimate grows when releases have stopped.
func (p *pace) after(now time.Duration, n int) time.Duration {
	if p.average == 0 {
		return 0
	}
	return max(p.average, now-p.last) * time.Duration(n)
}

// maxCallers is how many callers are remembered.
const maxCallers = 1 << 16

// callers remembers the buckets that are not full. If there are too many, it forgets the least recently used one. It
// also forgets a bucket that has filled up again. Names are kept as hashes with a secret seed, so that long names
// cost no more than short ones, and a caller cannot choose a name to share another caller's bucket.
type callers struct {
	size
	seed   maphash.Seed
	index  map[uint64]*list.Element
	recent list.List // of *entry, the newest first
}

type entry struct {
	name uint64
	full time.Duration
}

func newCallers(s size) callers {
	return callers{size: s, seed: maphash.MakeSeed(), index: map[uint64]*list.Element{}}
}

// find returns the bucket of a caller, and its element in the list, or nil.
func (c *callers) find(caller string, now time.Duration) (bucket, *list.Element) {
	b := bucket{size: c.size, full: now}
	if c.every == 0 {
		return b, nil
	}
	e := c.index[maphash.String(c.seed, caller)]
	if e != nil {
		b.full = e.Value.(*entry).full
		c.recent.MoveToFront(e) // it is in use even if the request is refused
	}
	return b, e
}

// put remembers the bucket of a caller.
func (c *callers) put(caller string, b bucket, known *list.Element, now time.Duration) {
	switch {
	case c.every == 0:
		return
	case known != nil:
		known.Value.(*entry).full = b.full
		return
	}
	for range 2 { // remove two for each new one, so that the table shrinks after a flood
		oldest := c.recent.Back()
		if oldest == nil || oldest.Value.(*entry).full > now && len(c.index) < maxCallers {
			break
		}
		delete(c.index, oldest.Value.(*entry).name)
		c.recent.Remove(oldest)
	}
	name := maphash.String(c.seed, caller)
	c.index[name] = c.recent.PushFront(&entry{name, b.full})
}
