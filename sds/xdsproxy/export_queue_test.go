package xdsproxy

import (
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// Sizes of a Queue.
const (
	MaxQueue      = maxQueue
	BesideMessage = besideMessage
)

// NewQueueOf returns an empty Queue with a share for a peer.
func NewQueueOf(shares *limit.Shares[peerkey.Holder], p peerkey.Holder) *Queue {
	return newQueue(shares, p)
}

// Sent is sent.
func (q *Queue) Sent(msg []byte) { q.sent(msg) }

// End is end.
func (q *Queue) End() { q.end() }

// Discard is discard.
func (q *Queue) Discard() { q.discard() }
