package ca

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
)

// ErrRotating says that a rotation cannot start, because one is under way.
var ErrRotating = errors.New("a root rotation is under way")

// maxRoots bounds the bundle: every verifier of the trust domain parses and searches it.
const maxRoots = 64

// Phase is a root's place in a rotation. A root only ever moves forward.
type Phase int

// The phases of a root that is in the bundle. Before Distributing a root does not exist; after
// Retiring it is out of the bundle and the authority has forgotten it.
const (
	// Distributing roots are in the bundle, so that verifiers learn of them, and sign nothing yet.
	Distributing Phase = iota + 1
	// Active is the phase of the one root that signs.
	Active
	// Retiring roots sign nothing any more and wait in the bundle for the last leaf that they
	// signed to expire. Their private keys are gone.
	Retiring
)

// String returns the name of the phase in lower case.
func (p Phase) String() string {
	switch p {
	case Distributing:
		return "distributing"
	case Active:
		return "active"
	case Retiring:
		return "retiring"
	}
	return fmt.Sprintf("Phase(%d)", int(p))
}

// RootStatus describes one root of an [Authority]. It is a copy and holds no secret. Its times are
// the wall clock's when the authority computed them.
type RootStatus struct {
	Phase       Phase
	Certificate *x509.Certificate // shared; do not change
	Prepared    time.Time         // when it joined the bundle
	Activates   time.Time         // when it begins, or began, to sign
	Retires     time.Time         // when it leaves the bundle; zero before it is Retiring
}

// Serial returns the certificate's serial number in hexadecimal.
func (s RootStatus) Serial() string { return serial(s.Certificate) }

// String says in words what the root does and when that changes, such as
// "root 5d1c…: distributing, signs from 2000-01-01T00:25:00Z".
func (s RootStatus) String() string {
	what := "root " + s.Serial() + ": " + s.Phase.String()
	switch s.Phase {
	case Distributing:
		return what + ", signs from " + s.Activates.UTC().Format(time.RFC3339)
	case Retiring:
		return what + ", leaves the bundle at " + s.Retires.UTC().Format(time.RFC3339)
	}
	return what + " since " + s.Activates.UTC().Format(time.RFC3339)
}

// root is one root and its place in the rotation. Its value never changes: a step makes a new one.
type root struct {
	cert      *x509.Certificate
	issuer    *pki.Issuer // nil once retiring: what must not sign any more cannot
	phase     Phase
	prepared  time.Time
	activates time.Time
	retires   time.Time // zero before it is retiring
}

func (r root) status() RootStatus {
	return RootStatus{
		Phase:       r.phase,
		Certificate: r.cert,
		Prepared:    r.prepared.Round(0), // without the monotonic reading, which means nothing to others
		Activates:   r.activates.Round(0),
		Retires:     r.retires.Round(0),
	}
}

// due returns when the root takes its next step by time; zero for never. The active root waits for
// another one.
func (r root) due() time.Time {
	switch r.phase {
	case Distributing:
		return r.activates
	case Retiring:
		return r.retires
	}
	return time.Time{}
}

// nextStep returns when the first of roots takes its next step by time; zero for never.
func nextStep(roots []root) time.Time {
	var first time.Time
	for _, r := range roots {
		if t := r.due(); !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	return first
}

// reached reports whether t has come at now, on the wall clock and, if both have a reading of it, on
// the monotonic clock. The wall clock alone would let a clock that jumps ahead cut a wait short;
// the monotonic clock alone would let a leaf whose dates were written by a clock that was set back
// since outlive its root.
func reached(now, t time.Time) bool {
	return !now.Before(t) && !now.Round(0).Before(t.Round(0))
}

// step is what happened to the roots at one time.
type step struct {
	at        time.Time
	activated *x509.Certificate   // the new active root, or nil
	retired   []*x509.Certificate // the roots that left the bundle
}

// advance returns roots as they are at now, and the steps that lead there, one for each moment at
// which something happened: the result is the same however late and however often it is called.
// lastLeaf is the latest NotAfter of the leaves that the active root signed (zero for none), and
// grace is what is added to it before that root may retire. Phases only move forward: a now that is
// earlier than the last one changes nothing. roots is not changed.
func advance(roots []root, lastLeaf time.Time, grace time.Duration, now time.Time) ([]root, []step) {
	var steps []step
	for {
		at := nextStep(roots)
		if at.IsZero() || !reached(now, at) {
			return roots, steps
		}
		st := step{at: at}
		activates := slices.ContainsFunc(roots, func(r root) bool { return r.phase == Distributing && !at.Before(r.activates) })
		after := make([]root, 0, len(roots))
		for _, r := range roots {
			switch {
			case activates && r.phase == Active:
				r.phase, r.issuer, r.retires = Retiring, nil, at
				if end := lastLeaf.Add(grace); !lastLeaf.IsZero() && end.After(at) {
					r.retires = end
				}
			case activates && r.phase == Distributing:
				r.phase, st.activated = Active, r.cert
			}
			if r.phase == Retiring && !at.Before(r.retires) {
				st.retired = append(st.retired, r.cert)
				continue
			}
			after = append(after, r)
		}
		if activates {
			lastLeaf = time.Time{} // the new root has signed nothing
		}
		roots, steps = after, append(steps, st)
	}
}

// Rotate prepares a new root and puts it into the bundle. The other steps follow by themselves: see
// the package comment. It returns the new root, whose Activates says when it begins to sign. The
// error wraps [ErrRotating] while an earlier rotation has not come to its activation, and when the
// bundle already holds 64 roots, as old ones wait for their leaves to expire.
func (a *Authority) Rotate(ctx context.Context) (RootStatus, error) {
	if err := a.mayRotate(ctx, a.current()); err != nil {
		return RootStatus{}, err
	}
	issuer, err := a.newRoot() // before the lock: an RSA key takes its time
	if err != nil {
		return RootStatus{}, err
	}
	r, steps, err := a.prepare(ctx, issuer)
	a.log(steps)
	if err != nil {
		return RootStatus{}, err
	}
	st := r.status()
	a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "root prepared", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String("serial", st.Serial()), slog.Time("activates", st.Activates))
	return st, nil
}

func (a *Authority) prepare(ctx context.Context, issuer *pki.Issuer) (root, []step, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	s, steps := a.advance(now)
	if err := a.mayRotate(ctx, s); err != nil { // another one may have been faster
		return root{}, steps, err
	}
	r := root{cert: issuer.Certificate(), issuer: issuer, phase: Distributing, prepared: now, activates: now.Add(a.cfg.Propagation)}
	next, err := a.newState(append(slices.Clone(s.roots), r), s.sequence+1)
	if err != nil {
		return root{}, steps, err
	}
	a.publish(next)
	return r, steps, nil
}

func (a *Authority) mayRotate(ctx context.Context, s *state) error {
	if ctx.Err() != nil {
		return fmt.Errorf("ca: rotate %s: %w", a.cfg.TrustDomain, context.Cause(ctx))
	}
	for _, r := range s.roots {
		if r.phase == Distributing {
			return fmt.Errorf("ca: rotate %s: %w: root %s activates at %s", a.cfg.TrustDomain, ErrRotating, serial(r.cert), r.activates.UTC().Format(time.RFC3339))
		}
	}
	if len(s.roots) >= maxRoots {
		return fmt.Errorf("ca: rotate %s: %w: %d roots are in the bundle, the next one to retire does so at %s", a.cfg.TrustDomain, ErrRotating, len(s.roots), s.next.UTC().Format(time.RFC3339))
	}
	return nil
}

// rotateAt returns when Run replaces the active root: when Propagation, MaxTTL and a fifth of the
// root's life are left, but not in the first half of its life. Only the certificate's dates count
// here, so the result is for comparison with the wall clock.
func (cfg *Config) rotateAt(active *x509.Certificate) time.Time {
	half, fifth := cfg.RootTTL/2, cfg.RootTTL/5
	if cfg.MaxTTL < half-fifth-cfg.Propagation { // so written that no sum overflows
		return active.NotAfter.Add(-(cfg.Propagation + cfg.MaxTTL + fifth))
	}
	return active.NotAfter.Add(-half)
}

// Waits of Run.
const (
	longestSleep = time.Hour   // the wall clock may have been set meanwhile
	rotateRetry  = time.Minute // after a rotation that could not start
)

// Run takes the steps of a rotation when they come due, so that [Authority.Changed] tells of them,
// and starts a rotation when the active root comes near its end: when no more is left than
// Propagation, MaxTTL and a fifth of RootTTL together, but never before half of RootTTL. As [New]
// demands that Propagation and DefaultTTL fit into half of RootTTL, a leaf of the default lifetime
// is never cut short by the end of its root while Run runs.
//
// Run returns context.Cause(ctx) when ctx is done, and nothing else ends it: what fails is logged
// and tried again a minute later. One Run is enough; more do no harm.
func (a *Authority) Run(ctx context.Context) error {
	for {
		s := a.current()
		wait := longestSleep
		if !s.next.IsZero() {
			// Both clocks have to reach the step, so the longer wait counts.
			wait = min(wait, max(time.Until(s.next), time.Until(s.next.Round(0))))
		}
		if !slices.ContainsFunc(s.roots, func(r root) bool { return r.phase == Distributing }) {
			// Until compares wall clocks, as a certificate's dates have no monotonic reading.
			left := time.Until(a.cfg.rotateAt(s.active().cert))
			if left <= 0 && ctx.Err() == nil {
				_, err := a.Rotate(ctx)
				if err == nil {
					continue
				}
				if !errors.Is(err, ErrRotating) {
					a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "root rotation failed", slog.Any("trust_domain", a.cfg.TrustDomain), slog.Any("err", err), slog.Duration("retry_in", rotateRetry))
				}
				left = rotateRetry
			}
			wait = min(wait, left)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-s.changed:
		case <-timer.C:
		}
		timer.Stop()
	}
}
