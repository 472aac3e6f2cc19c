package kube

import (
	"context"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
)

// limits bound the requests that unproven callers cause to an API server.
type limits struct {
	slots   *limit.Limiter        // at the same time
	rates   *limit.Limiter        // in a second
	each    *limit.Limiter        // in a second, of each peer
	shares  *limit.Shares[string] // of what is in progress or waits, by peer
	strikes *limit.Strikes        // refused tokens, by peer
}

func newLimits(concurrent, perSecond int) limits {
	return limits{
		slots:   limit.New(limit.Options{Concurrent: concurrent, Queue: maxWaiting}),
		rates:   limit.New(limit.Options{Rate: float64(perSecond), Burst: 2 * perSecond}),
		each:    limit.New(limit.Options{CallerRate: float64(perSecond) / 2, CallerBurst: perSecond}),
		shares:  limit.NewShares[string](0, maxPerPeer),
		strikes: limit.NewStrikes(refusedPerSecond, max(maxRefused, concurrent)), // as those in progress count
	}
}

// do calls review within the total limits, and within those of the peer in ctx if there is one. The error of a limit wraps
// [ErrReviewFailed], and says when to come back. ctx is the caller's context with less time.
func (l *limits) do(ctx, caller context.Context, review func() (*Account, error)) (*Account, error) {
	from := peerkey.FromContext(ctx)
	if from != "" {
		if err := l.strikes.Check(from); err != nil { // which takes nothing from others
			return nil, busy(err)
		}
		if err := l.shares.Take(from, 1); err != nil {
			return nil, busy(err)
		}
		defer l.shares.Give(from, 1)
	}
	if err := l.slots.Acquire(ctx, ""); err != nil {
		return nil, busy(err)
	}
	defer l.slots.Release()
	if from == "" {
		if err := l.rates.Acquire(ctx, ""); err != nil { // which has no slot to release
			return nil, busy(err)
		}
		return review()
	}
	if err := l.strikes.Take(from); err != nil { // others of the peer may have been refused while this one waited
		return nil, busy(err)
	}
	err := l.each.Acquire(ctx, from)
	if err == nil {
		err = l.rates.Acquire(ctx, "")
	}
	if err != nil {
		l.strikes.Forgive(from)
		return nil, busy(err)
	}
	a, err := review()
	// An outage says nothing about the peer. One that has gone does: it could go before each answer.
	if err == nil || errors.Is(err, ErrReviewFailed) && caller.Err() == nil {
		l.strikes.Forgive(from)
	}
	return a, err
}

// busy is the error for a request that a limit refuses, or whose time was over while it waited.
func busy(err error) error {
	if over, ok := errors.AsType[*limit.Error](err); ok && over.RetryAfter == 0 {
		over.RetryAfter = busyFor
	}
	return fmt.Errorf("%w: %w", ErrReviewFailed, err)
}
