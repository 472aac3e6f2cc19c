package spiffe

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
)

// PolicySource returns the policy in force. It is asked again for every peer. A [Policy] is a source of itself;
// the policy of a [LivePolicy] can be replaced. Policy must not block and must be safe for concurrent use. A
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

// isNil reports whether a source is a nil pointer, such as one returned beside an error. It would panic at the
// first handshake.
func isNil(source any) bool {
	v := reflect.ValueOf(source)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// Policy returns p, which makes a fixed policy a [PolicySource].
func (p Policy) Policy() Policy { return p }

// LivePolicy is a [PolicySource] whose policy can be replaced while it is in use. Its zero value is
// ready to use and allows no peer until Set is called. It is safe for concurrent use and must not be
// copied.
//
// A new policy can be tried before it is set; see [LivePolicy.Try].
type LivePolicy struct {
	policy  atomic.Pointer[Policy] // with the trial, if there is one
	changed renew.Signal

	mu    sync.Mutex // held by writers of policy and trial
	set   Policy     // without the trial
	trial *trial
}

// Set makes p the policy for every decision that begins after Set has returned. A policy that can
// allow no peer is an error, and the previous policy stays in force. A trial goes on, and compares with p.
func (l *LivePolicy) Set(p Policy) error {
	if err := p.usable(); err != nil {
		return fmt.Errorf("spiffe: set policy: %w", err)
	}
	l.mu.Lock()
	l.set = p
	l.publish()
	l.mu.Unlock()
	l.changed.Notify()
	return nil
}

// Policy returns the policy that was set last, or the zero Policy. A trial counts the calls of its methods Allows
// and Check.
func (l *LivePolicy) Policy() Policy {
	if p := l.policy.Load(); p != nil {
		return *p
	}
	return Policy{}
}

// Changed returns a channel that is closed at the next Set. Take the channel before reading the policy, or a
// change may be missed.
func (l *LivePolicy) Changed() <-chan struct{} { return l.changed.Changed() }

// Try starts a trial, which counts the decisions that would change if p were set, and ends the trial before. It
// allows and refuses nothing: the policy that was set decides alone, and without one every peer is refused. The
// function that it returns gives the counts so far, with maps that are the caller's; [Policy.Explain] of p says
// why a peer would be refused. The zero Policy ends the trial; another policy that can allow no peer is an error,
// and the trial before goes on.
//
// A trial of a policy without its aliases, while the policy with them is set, counts the peers that come by
// a name of an alias; see [Policy.WithAliases].
func (l *LivePolicy) Try(p Policy) (counts func() PolicyTrial, err error) {
	var next *trial
	if !p.IsZero() {
		if err := p.usable(); err != nil {
			return nil, fmt.Errorf("spiffe: try policy: %w", err)
		}
		next = &trial{policy: Policy{s: p.s.withTrial(nil)}, refuses: make(map[ID]uint64), allows: make(map[ID]uint64)}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.trial = next
	l.publish()
	return next.counts, nil
}

// publish makes the policy and the trial visible together.
func (l *LivePolicy) publish() {
	p := l.set
	if l.trial != nil || p.s != nil && p.s.trial != nil {
		p.s = p.s.withTrial(l.trial)
	}
	l.policy.Store(&p)
}

// withTrial returns a copy of s, or of no rules, that tells t.
func (s *ruleSet) withTrial(t *trial) *ruleSet {
	if s == nil {
		s = &ruleSet{}
	}
	c := *s
	c.trial = t
	return &c
}

// PolicyTrial has the counts of a trial; see [LivePolicy.Try].
type PolicyTrial struct {
	Policy    Policy        // the policy under trial
	Decisions uint64        // how many decisions were compared
	Refuses   map[ID]uint64 // how often a peer was allowed that Policy would refuse
	Allows    map[ID]uint64 // how often a peer was refused that Policy would allow
	More      uint64        // decisions that differ, about peers beyond the 1,024 that each map holds
}

const maxInTrial = 1024 // IDs in each map

// trial compares the decisions of another policy with its own.
type trial struct {
	policy    Policy
	decisions atomic.Uint64

	mu              sync.Mutex
	refuses, allows map[ID]uint64
	more            uint64
}

// counts returns a copy of what t has counted, and nothing if there is no trial.
func (t *trial) counts() PolicyTrial {
	if t == nil {
		return PolicyTrial{}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return PolicyTrial{t.policy, t.decisions.Load(), maps.Clone(t.refuses), maps.Clone(t.allows), t.more}
}

func (t *trial) compare(id ID, allowed bool) {
	t.decisions.Add(1)
	if t.policy.s.allows(id) == allowed {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	m := t.allows
	if allowed {
		m = t.refuses
	}
	if _, ok := m[id]; ok {
		m[id]++
	} else if len(m) < maxInTrial {
		id.s = strings.Clone(id.s) // the ID of a peer is a part of its certificate
		m[id] = 1
	} else {
		t.more++
	}
}
