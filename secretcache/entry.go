package secretcache

import (
	"container/heap"
	"context"
	"crypto/x509"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// entry is something that is obtained again and again: an identity, or the trust bundles. There
// may be 100,000 of them, so it is small and has no goroutine and no timer.
type entry struct {
	id   spiffe.ID
	held atomic.Pointer[held] // what readers get; nil before the first, and for the bundles

	cause atomic.Pointer[error] // of the last failure, for readers; nil after a success

	// The Manager's mu guards what follows.
	due      time.Duration // when the next attempt is, in the scheduler's time
	index    int           // in the queue, counted from 1; 0 if not there
	failures int           // in a row
	final    bool          // the CA refused for good
	orphan   bool          // the root of what is held has left the bundle
	busy     bool          // an attempt is under way, and this is not in the queue
	removed  bool
	cancel   context.CancelFunc // ends the attempt
	done     chan struct{}      // closed at the end of the next attempt; nil if nobody waits
}

// held is a certificate as it is served. It never changes.
type held struct {
	secret    *pki.Secret // under the ID's own name
	alias     *pki.Secret // under "default"; nil for other identities
	noSecret  error       // why there are none, if the key cannot be exported
	svid      *spiffe.SVID
	anchor    *x509.Certificate // the root that vouches for it
	received  time.Time
	notBefore time.Time
	notAfter  time.Time // the earliest in the verified chain
	expires   int64     // notAfter as unixNano has it
}

// life is how long h lives from our point of view.
func (h *held) life() time.Duration { return h.notAfter.Sub(h.received) }

// left is how long h has to live at now; 0 for nothing.
func (h *held) left(now time.Time) time.Duration {
	if h == nil {
		return 0
	}
	return max(h.notAfter.Sub(now.Round(0)), 0)
}

func (e *entry) err() error {
	if p := e.cause.Load(); p != nil {
		return *p
	}
	return nil
}

// wait returns a channel that is closed at the end of the next attempt.
func (e *entry) wait() <-chan struct{} {
	if e.done == nil {
		e.done = make(chan struct{})
	}
	return e.done
}

// wake tells those who wait for the end of the attempt.
func (e *entry) wake() {
	if e.done != nil {
		close(e.done)
		e.done = nil
	}
}

// urgent is due before everything else.
const urgent time.Duration = -1

// queue has the identities that are not busy, the next one due in front.
type queue struct{ h entryHeap }

func (q *queue) push(e *entry, due time.Duration) {
	e.due = due
	heap.Push(&q.h, e)
}

func (q *queue) front() *entry {
	if len(q.h) == 0 {
		return nil
	}
	return q.h[0]
}

// remove takes e out if it is there.
func (q *queue) remove(e *entry) {
	if e.index > 0 {
		heap.Remove(&q.h, e.index-1)
	}
}

// hasten makes e due at due unless it is sooner, or is not there.
func (q *queue) hasten(e *entry, due time.Duration) {
	if e.index > 0 && due < e.due {
		e.due = due
		heap.Fix(&q.h, e.index-1)
	}
}

// entryHeap implements [heap.Interface].
type entryHeap []*entry

func (h entryHeap) Len() int           { return len(h) }
func (h entryHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h entryHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i+1, j+1
}

func (h *entryHeap) Push(x any) {
	e := x.(*entry)
	*h = append(*h, e)
	e.index = len(*h)
}

func (h *entryHeap) Pop() any {
	last := len(*h) - 1
	e := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	e.index = 0
	return e
}
