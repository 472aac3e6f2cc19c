package xdsproxy

import (
	"context"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// queue has the requests that a server has not taken yet, so that Envoy and the server need not wait for each other.
// One goroutine puts, and one takes.
type queue struct {
	shares *limit.Shares[peerkey.Holder]
	peer   peerkey.Holder

	mu      sync.Mutex
	waiting [][]byte
	bytes   int // of those, and of the one that is being sent
	state   int
	more    chan struct{} // has one when next is to look again
	room    chan struct{} // has one when put is to look again
}

// The states of a queue.
const (
	filling   = iota
	complete  // there are no more requests
	discarded // requests are dropped, as the server has gone
)

func newQueue(shares *limit.Shares[peerkey.Holder], p peerkey.Holder) *queue {
	return &queue{shares: shares, peer: p, more: make(chan struct{}, 1), room: make(chan struct{}, 1)}
}

// put adds a request. It waits for room.
func (q *queue) put(ctx context.Context, msg []byte) error {
	var timeout <-chan time.Time
	for {
		ok, err := q.tryPut(msg)
		if ok || err != nil {
			return err
		}
		timer := time.NewTimer(stalled) // a new one after each message that was sent
		timeout = timer.C
		select {
		case <-q.room:
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-timeout:
			err = grpchttp.Errorf(grpchttp.Unavailable,
				"xdsproxy: the server has not taken a request for %v, and more than %d bytes wait", stalled, maxQueue)
		}
		timer.Stop()
		if err != nil {
			return err
		}
	}
}

func (q *queue) tryPut(msg []byte) (ok bool, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(msg) + besideMessage
	switch {
	case q.state == discarded:
		return true, nil
	case q.bytes > 0 && q.bytes+n > maxQueue:
		return false, nil
	}
	if err := q.shares.Take(q.peer, n); err != nil {
		return false, full(err, "requests that the control plane has not taken")
	}
	q.bytes += n
	q.waiting = append(q.waiting, msg)
	wake(q.more)
	return true, nil
}

// next returns the next request, or false if there is none and will be none. It waits for one. The caller passes the
// request to sent once it is not kept any more.
func (q *queue) next(ctx context.Context) (msg []byte, ok bool) {
	for {
		q.mu.Lock()
		if len(q.waiting) > 0 {
			msg = q.waiting[0]
			q.waiting[0] = nil
			q.waiting = q.waiting[1:]
			q.mu.Unlock()
			return msg, true
		}
		state := q.state
		q.waiting = nil // so that an idle stream keeps no array
		q.mu.Unlock()
		if state != filling {
			return nil, false
		}
		select {
		case <-q.more:
		case <-ctx.Done():
			return nil, false
		}
	}
}

// sent says that a request is not kept any more.
func (q *queue) sent(msg []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.give(msg)
	wake(q.room)
}

// give gives the room of a request back. The lock is held.
func (q *queue) give(msg []byte) {
	n := len(msg) + besideMessage
	q.bytes -= n
	q.shares.Give(q.peer, n)
}

// end says that put is not called any more.
func (q *queue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.state == filling {
		q.state = complete
	}
	wake(q.more)
}

// ended reports whether end was called, and discard was not.
func (q *queue) ended() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state == complete
}

// discard drops the requests in the queue, and those to come.
func (q *queue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, msg := range q.waiting {
		q.give(msg)
	}
	q.waiting = nil
	q.state = discarded
	wake(q.more)
	wake(q.room)
}

func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
