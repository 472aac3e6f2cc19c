package spiffe

import (
	"fmt"
	"sync/atomic"
)

// PolicySource gives the policy that holds at this moment, and is asked anew for every peer. Most
// programs have a policy that never changes, and a [Policy] is a source of itself; a [LivePolicy] can
// be replaced. Policy must not block and must be safe for concurrent use. A source that has nothing to
// give returns the zero Policy, which allows nobody.
//
// A source may also have a method Changed() <-chan struct{}, which returns a channel that is closed at
// the next change: whoever keeps connections open then learns that they have to be judged again.
type PolicySource interface {
	Policy() Policy
}

// Policy returns p, which makes a fixed policy a [PolicySource].
func (p Policy) Policy() Policy { return p }

// LivePolicy is a [PolicySource] whose policy can be replaced while it is in use. Its zero value is
// ready to use and allows nobody until Set is called. It is safe for concurrent use and must not be
// copied.
type LivePolicy struct {
	now atomic.Pointer[livePolicy]
}

// livePolicy never changes.
type livePolicy struct {
	policy  Policy
	changed chan struct{} // closed when another takes its place
}

// Set makes p the policy for every decision that begins after Set has returned. A policy that can
// allow nobody is an error, and then the one before stays: a broken file must not shut everybody out,
// nor let anybody in.
func (l *LivePolicy) Set(p Policy) error {
	if err := p.usable(); err != nil {
		return fmt.Errorf("spiffe: set policy: %w", err)
	}
	if old := l.now.Swap(&livePolicy{policy: p, changed: make(chan struct{})}); old != nil {
		close(old.changed)
	}
	return nil
}

// Policy returns the policy that was set last, or the zero Policy.
func (l *LivePolicy) Policy() Policy {
	if now := l.now.Load(); now != nil {
		return now.policy
	}
	return Policy{}
}

// Changed returns a channel that is closed at the next Set. Take it before reading the policy, so that
// nothing is missed.
func (l *LivePolicy) Changed() <-chan struct{} {
	if now := l.now.Load(); now != nil {
		return now.changed
	}
	l.now.CompareAndSwap(nil, &livePolicy{changed: make(chan struct{})}) // else somebody was faster
	return l.now.Load().changed
}
