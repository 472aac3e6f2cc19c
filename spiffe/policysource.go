package spiffe

import (
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
)

// PolicySource returns the policy in force. Its method is called again for every peer. A [Policy] is a source of
// itself; the policy of a [LivePolicy] can be replaced. Policy must not block and must be safe for concurrent use. A
// source without a policy yet returns the zero Policy, which allows no peer.
//
// A source may also have a method Changed() <-chan struct{}, which returns a channel that is closed at the next
// change. Code that keeps connections open uses it to check them again.
type PolicySource interface {
	Policy() Policy
}

// CheckPolicySource returns an error if allow is nil, a nil pointer, or a [Policy] that is zero or has a mistake.
// A function that takes a PolicySource calls it, so that the error shows when the program starts. Other sources
// may get their policy later and are accepted as they are.
func CheckPolicySource(allow PolicySource) error {
	switch {
	case allow == nil:
		return errors.New("no policy; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer")
	case isNil(allow):
		return fmt.Errorf("the policy is a nil %T", allow)
	}
	if p, ok := allow.(Policy); ok {
		return p.usable()
	}
	return nil
}

// isNil reports whether a source is a nil pointer, such as a constructor returns beside an error. It would panic at
// the first handshake.
func isNil(source any) bool {
	v := reflect.ValueOf(source)
	return v.Kind() == reflect.Pointer && v.IsNil()
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

// Changed returns a channel that is closed at the next Set. Take the channel before reading the policy, or a
// change may be missed.
func (l *LivePolicy) Changed() <-chan struct{} { return l.changed.Changed() }
