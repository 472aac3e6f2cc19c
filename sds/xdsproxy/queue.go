package xdsproxy

import (
	"context"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/renew"
)

// queue holds the requests that a server has not taken yet, so that Envoy and the server need not wait for each
// other. One goroutine calls put, and one calls next.
type queue struct {
	shares *limit.Shares[peerkey.Holder]
	peer   peerkey.Holder

	mu      sync.Mutex
	waiting [][]byte
	bytes   int // of the waiting requests and of the request being sent
	state   int
	news    renew.Signal // put and next must look again
}

// The states of a queue.
const (
	filling   = iota
	complete  // there are no more requests
	discarded // the server has gone; requests are dropped
)

func newQueue(shares *limit.Shares[peerkey.Holder], p peerkey.Holder) *queue {
	return &queue{shares: shares, peer: p}
}

// put adds a request. It waits while the queue is full.
func (q *queue) put(ctx context.Context, msg []byte) error {
	for {
		changed := q.news.Changed()
		ok, err := q.tryPut(msg)
		if ok || err != nil {
			return err
		}
		timeout := time.NewTimer(stalled) // restarted after each message that was sent
		defer timeout.Stop()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timeout.C:
			return grpchttp.Errorf(grpchttp.Unavailable,
				"xdsproxy: the server has not taken a request for %v, and more than %d bytes wait", stalled, maxQueue)
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
		return false, grpchttp.Full(err, "xdsproxy", "requests that the control plane has not taken")
	}
	q.bytes += n
	q.waiting = append(q.waiting, msg)
	q.news.Notify()
	return true, nil
}

// next waits for the next request and returns it, or false if no more will come. The caller passes the request to
// sent once it no longer needs it.
func (q *queue) next(ctx context.Context) (msg []byte, ok bool) {
	for {
		changed := q.news.Changed()
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
		case <-changed:
		case <-ctx.Done():
			return nil, false
		}
	}
}

// sent reports that a request is no longer needed.
func (q *queue) sent(msg []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.give(msg)
	q.news.Notify()
}

// give returns the bytes of a request to the queue and the peer's share. The lock is held.
func (q *queue) give(msg []byte) {
	n := len(msg) + besideMessage
	q.bytes -= n
	q.shares.Give(q.peer, n)
}

// end declares that put is not called any more.
func (q *queue) end() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.state == filling {
		q.state = complete
	}
	q.news.Notify()
}

// ended reports whether end was called, and discard was not.
func (q *queue) ended() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state == complete
}

// discard drops the requests in the queue and all later ones.
func (q *queue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, msg := range q.waiting {
		q.give(msg)
	}
	q.waiting = nil
	q.state = discarded
	q.news.Notify()
}
