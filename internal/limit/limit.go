// Package limit bounds what a server does at once and in a second: slots for what runs at the same time, a
// queue in front of them, and rates in total and for each caller.
//
//	l := limit.New(limit.Options{Concurrent: 4, Queue: 100, Rate: 1000, CallerRate: 10, CallerBurst: 20})
//	…
//	if err := l.Acquire(ctx, caller); err != nil {
//		return err // an *Error, or the cause of ctx's end
//	}
//	defer l.Release()
//
// Requests that wait for a slot are served in order of arrival. A refused request takes nothing, neither a slot
// nor a place in the queue nor a token, so a caller over its own rate cannot use up what is there for others. A
// refusal says when there will be room again.
//
// [Shares] bound what is held for longer than a request, such as streams, and [Strikes] what is refused after it was
// examined.
//
// Memory is bounded by Options.Queue, and by 65,536 callers that are remembered, whatever their names. Beyond that the
// callers that asked longest ago are forgotten and begin anew with a full burst; the total rate holds all the same.
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

// Options says what is limited. A zero Concurrent, Rate or CallerRate means that there is no such
// limit, and so does one that is negative or not a number.
type Options struct {
	Concurrent int // how many hold a slot at the same time
	Queue      int // how many wait for a slot; 0: a request that finds no free slot is refused

	// QueueTime is how long a request should wait for its slot when more come than are served: while 64 wait, and one
	// more would wait longer than this by the pace of late, one more is refused. In the first half second
	// of an overload the wait may be ten times as long, so that a burst is served; an overload that begins 5 seconds
	// after another is a new one. 0: no such limit.
	QueueTime time.Duration

	Rate  float64 // requests per second, of all callers together
	Burst int     // how many of them may come at once after a pause; 0: those of one second, at least 1

	CallerRate  float64 // requests per second, of each caller
	CallerBurst int     // as Burst
}

// The reasons of an [Error].
const (
	CallerRate = "this caller asks too often"
	TotalRate  = "all callers together ask too often"
	QueueFull  = "too many requests are waiting"

	CallerShare = "this caller holds too much already"
	TotalShare  = "all callers together hold too much already"
)

// Error says that a limit is reached.
type Error struct {
	Reason string // one of the constants above

	// RetryAfter is when the same request would be let in if no other came. For QueueFull it is
	// when those that wait now are through, guessed from the pace at which slots were given back
	// lately; 0 if there was none.
	RetryAfter time.Duration
}

func (e *Error) Error() string {
	if e.RetryAfter > 0 {
		return "limit: " + e.Reason + "; try again in " + e.RetryAfter.String()
	}
	return "limit: " + e.Reason + "; try again later"
}

var _ retry.Error = (*Error)(nil)

// Retryable returns RetryAfter, and that the same request may be let in later.
func (e *Error) Retryable() (after time.Duration, ok bool) { return e.RetryAfter, true }

// Limiter counts; [New] makes one. It starts no goroutine and is safe for concurrent use.
type Limiter struct {
	concurrent, queue int
	queueTime         time.Duration
	start             time.Time // what now counts from
	limited           bool      // there is a limit at all

	mu      sync.Mutex
	used    int       // slots that are taken
	waiting list.List // of chan struct{}, first come first, which are closed when the slot is theirs

	// The first and the last request that would have waited for too long, without a calm between them.
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
	l.limited = l.concurrent > 0 || l.total.every > 0 || l.callers.every > 0
	return l
}

// Acquire takes a token of caller, a token of the total, and a slot, and waits for the slot in the
// queue if there is none. After a nil error call [Limiter.Release] exactly once. The error is an
// [*Error] at once when a limit is reached, and context.Cause(ctx) when ctx is done before there
// was a slot; tokens are not given back then, since asking and giving up is asking too.
//
// An empty caller is a caller like any other.
func (l *Limiter) Acquire(ctx context.Context, caller string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if !l.limited {
		return nil
	}
	l.mu.Lock()
	place, err := l.take(caller)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if place == nil {
		return nil
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
		l.handOn() // it came too late
	default:
		l.waiting.Remove(place)
	}
	l.mu.Unlock()
	return context.Cause(ctx)
}

// take looks at every limit before it takes anything, and returns the place in the queue if there
// is no slot; mu is held.
func (l *Limiter) take(caller string) (*list.Element, error) {
	now := time.Since(l.start)
	own, known := l.callers.find(caller, now)
	ownWait, totalWait := own.wait(now), l.total.wait(now)
	full := l.concurrent > 0 && l.used >= l.concurrent
	switch {
	case ownWait > 0:
		return nil, &Error{Reason: CallerRate, RetryAfter: max(ownWait, totalWait)}
	case totalWait > 0:
		return nil, &Error{Reason: TotalRate, RetryAfter: totalWait}
	}
	if full {
		if l.waiting.Len() >= l.queue || l.overloaded(now) {
			return nil, &Error{Reason: QueueFull, RetryAfter: l.pace.after(now, l.waiting.Len()+1)}
		}
	}
	own.take(now)
	l.callers.put(caller, own, known, now)
	l.total.take(now)
	if full {
		if l.waiting.Len() == 0 {
			l.pace.begin(now)
		}
		return l.waiting.PushBack(make(chan struct{})), nil
	}
	if l.concurrent > 0 {
		l.used++
	}
	return nil, nil
}

// overloaded reports whether one more request would wait for too long, and this is no burst; mu is held.
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

// Release gives the slot back, to the request that waits longest if there is one.
func (l *Limiter) Release() {
	if l.concurrent == 0 {
		return
	}
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

// size is how fast a bucket fills and how much it holds.
type size struct {
	every time.Duration // between two tokens; 0: there is no limit
	burst time.Duration // what may be owed: the time in which all tokens but one come
}

func newSize(rate float64, burst int) size {
	if !(rate > 0) { // so written for NaN
		return size{}
	}
	const longest = math.MaxInt64 / 8 // 36 years, and no sum overflows
	every := min(float64(time.Second)/rate, longest)
	if burst <= 0 {
		burst = int(max(1, min(rate, math.MaxInt32)))
	}
	// A rate of more than one in a nanosecond is none.
	return size{every: time.Duration(every), burst: time.Duration(min(every*float64(burst-1), longest))}
}

// bucket is full when it owes nothing. It is kept as the one moment at which it will be full again
// (the "virtual scheduling" form of the leaky bucket): each token moves that moment on by every,
// and a token is there while it is no more than burst ahead.
type bucket struct {
	size
	full time.Duration // since start
}

// wait returns how long it takes until a token is there; 0 if one is.
func (b *bucket) wait(now time.Duration) time.Duration {
	return max(0, b.full-b.burst-now)
}

func (b *bucket) take(now time.Duration) {
	b.full = max(b.full, now) + b.every
}

// pace is how long it took lately from one release to the next while requests waited.
type pace struct {
	last    time.Duration // the last release, or when the queue began
	average time.Duration // of the times between, the newer ones counting more; 0 at first
}

func (p *pace) begin(now time.Duration) { p.last = now }

func (p *pace) step(now time.Duration) {
	p.average = (3*cmp.Or(p.average, now-p.last) + now - p.last) / 4
	p.last = now
}

// after guesses how long n releases take. When releases have stopped, the guess grows.
func (p *pace) after(now time.Duration, n int) time.Duration {
	if p.average == 0 {
		return 0
	}
	return max(p.average, now-p.last) * time.Duration(n)
}

// maxCallers bounds what is remembered of callers.
const maxCallers = 1 << 16

// callers remembers the buckets that are not full, the least recently used one being forgotten
// first when there are too many. A bucket that has filled up again is forgotten too, as it says
// nothing. Names are kept as hashes with a secret seed, so that long ones cost no more than short
// ones, and a caller cannot choose a name to share the bucket of another.
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

// find returns the bucket of a caller, and where it is remembered, or nil.
func (c *callers) find(caller string, now time.Duration) (bucket, *list.Element) {
	b := bucket{size: c.size, full: now}
	if c.every == 0 {
		return b, nil
	}
	e := c.index[maphash.String(c.seed, caller)]
	if e != nil {
		b.full = e.Value.(*entry).full
		c.recent.MoveToFront(e) // refused or not, it is in use
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
	for range 2 { // two go for each one that comes, so that the table shrinks after a flood
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
