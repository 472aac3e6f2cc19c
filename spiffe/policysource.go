package spiffe

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
)

// PolicySource gives the policy that holds at this moment. It is asked again for every peer. A [Policy]
// is a source of itself; the policy of a [LivePolicy] can be replaced. Policy must not block and must be
// safe for concurrent use. A source that has no policy yet returns the zero Policy, which allows no peer.
//
// A source may also have a method Changed() <-chan struct{}, which returns a channel that is closed at
// the next change. Code that keeps connections open uses it to judge them again.
type PolicySource interface {
	Policy() Policy
}

// CheckPolicySource returns an error if allow is nil, or is a [Policy] that is zero or was made by
// mistake. A function that takes a PolicySource calls it, so that the error shows when the program
// starts. Other sources may get their policy later and are accepted as they are.
func CheckPolicySource(allow PolicySource) error {
	if allow == nil {
		return errors.New("no policy")
	}
	if p, fixed := allow.(Policy); fixed {
		return p.usable()
	}
	return nil
}

// Policy returns p, which makes a fixed policy a [PolicySource].
func (p Policy) Policy() Policy { return p }

// LivePolicy is a [PolicySource] whose policy can be replaced while it is in use. Its zero value is
// ready to use and allows no peer until Set is called. It is safe for concurrent use and must not be
// copied.
type LivePolicy struct {
	policy  atomic.Pointer[Policy]
	changed renew.Signal
}

// Set makes p the policy for every decision that begins after Set has returned. A policy that can
// allow no peer is an error, and the previous policy stays in force.
func (l *LivePolicy) Set(p Policy) error {
	if err := p.usable(); err != nil {
		return fmt.Errorf("spiffe: set policy: %w", err)
	}
	l.policy.Store(&p)
	l.changed.Notify()
	return nil
}

// Policy returns the policy that was set last, or the zero Policy.
func (l *LivePolicy) Policy() Policy {
	if p := l.policy.Load(); p != nil {
		return *p
	}
	return Policy{}
}

// Changed returns a channel that is closed at the next Set. Take it before reading the policy, so that
// no change is missed.
func (l *LivePolicy) Changed() <-chan struct{} { return l.changed.Changed() }
