package kube

import (
	"context"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/spiffe"
)

// The limits on reviews, and on the reads of a NodeAuthorizer.
const (
	maxConcurrent    = 64
	maxWaiting       = 1000
	maxPerSecond     = 500
	maxPerPeer       = 256 // of one peer, in progress or waiting
	maxRefused       = 64  // tokens of one peer at once, including those in progress
	refusedPerSecond = 1   // further refused tokens of that peer
)

// limits bound the requests that unproven callers cause to an API server.
type limits struct {
	reviews *limit.Limiter
	shares  *limit.Shares[string] // requests in progress or waiting, by peer
	refused *limit.Limiter        // refused tokens, by peer; those in progress count as refused
}

func newLimits() limits {
	return limits{
		reviews: newLimiter(maxPerSecond/2, maxPerSecond),
		shares:  limit.NewShares[string](0, maxPerPeer),
		refused: limit.New(limit.Options{CallerRate: refusedPerSecond, CallerBurst: maxRefused}),
	}
}

func newLimiter(callerRate float64, callerBurst int) *limit.Limiter {
	return limit.New(limit.Options{
		Concurrent: maxConcurrent, Queue: maxWaiting, Rate: maxPerSecond, Burst: 2 * maxPerSecond,
		CallerRate: callerRate, CallerBurst: callerBurst,
	})
}

// do calls review within the total limits, and within the limits of the peer in ctx, if there is one. The error of a
// limit wraps [ErrReviewFailed], and says when to come back if that is known. caller is the caller's context; ctx has
// less time.
func (l *limits) do(ctx, caller context.Context, review func() (*spiffe.Pod, error)) (*spiffe.Pod, error) {
	from := peerkey.FromContext(ctx)
	if from != "" {
		if err := l.refused.Check(from); err != nil { // takes no capacity from others
			return nil, busy(fmt.Errorf("too many tokens of this peer were refused: %w", err))
		}
		if err := l.shares.Take(from, 1); err != nil {
			return nil, busy(err)
		}
		defer l.shares.Give(from, 1)
	}
	if err := l.reviews.Acquire(ctx, from); err != nil {
		return nil, busy(err)
	}
	defer l.reviews.Release()
	if from == "" {
		return review()
	}
	if err := l.refused.Acquire(ctx, from); err != nil { // other tokens of the peer may have been refused meanwhile
		return nil, busy(fmt.Errorf("too many tokens of this peer were refused: %w", err))
	}
	pod, err := review()
	// An outage says nothing about the peer. A peer that has left does count: it could leave before each answer.
	if err == nil || errors.Is(err, ErrReviewFailed) && caller.Err() == nil {
		l.refused.Forgive(from)
	}
	return pod, err
}

// busy is the error for a request that a limit refuses, or whose time ended while it waited.
func busy(err error) error { return fmt.Errorf("%w: %w", ErrReviewFailed, err) }
