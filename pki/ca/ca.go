// Package ca is a certificate authority for one trust domain: it holds self-signed roots in memory,
// signs X.509-SVIDs, publishes the trust bundle that goes with them, and replaces its roots without
// a moment in which a good certificate is refused.
//
// Most programs need [New], [Authority.Run] in a goroutine, and [Authority.Sign]. To give the
// authority to something that renews identities, wrap it with package caclient/local.
//
// # Who is certified
//
// Sign takes the public key out of a signing request, and nothing else. The identity and every
// other name come from the caller, who has to know who is asking before it calls: this package
// authenticates nobody.
//
// # Rotation
//
// A root is replaced in four steps, and time alone moves it from one to the next:
//
//	prepare     Rotate makes a new root and puts it into the bundle
//	distribute  for Config.Propagation, verifiers learn of it while the old root goes on signing
//	activate    the new root signs from now on; the old root's private key is forgotten
//	retire      the old root leaves the bundle when the last leaf that it really signed has
//	            expired, plus Config.Backdate for verifiers whose clocks are slow
//
// So a leaf's root has been in the bundle for at least Propagation before the leaf exists (FED-2),
// and stays there until the leaf is dead (FED-4). No method takes these steps in another order, or
// early. What holds is computed when it is asked for, so it is right even while nobody calls Run;
// Run adds that waiters are told, and that a root is replaced before it comes to its end.
//
// A step is taken when the wall clock and the monotonic clock both say that it is due: setting the
// wall clock may delay a step, but never hastens one, and no step is ever taken back.
//
// # What it does not do
//
// It stores nothing: an Authority that ends takes its keys with it, and the next one has another
// root and counts its bundles from 1 again. It has no intermediate certificates and keeps no record
// of what it signed.
package ca

import (
	"cmp"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures an [Authority]. [New] copies it. Zero means the default that is named here;
// negative durations are refused.
type Config struct {
	TrustDomain  spiffe.TrustDomain // required
	KeyAlgorithm pki.KeyAlgorithm   // of the roots; the zero value is ECDSA P-256

	// RootTTL is the lifetime of each root; 0 means ten years (3650 days). It must be more than
	// twice Propagation and DefaultTTL together, so that a root can be replaced while leaves of the
	// default lifetime still fit into its own; see [Authority.Run].
	RootTTL time.Duration

	// DefaultTTL is the lifetime of a leaf whose request names none; 0 means 24 hours, or MaxTTL if
	// that is less. More than MaxTTL is refused.
	DefaultTTL time.Duration

	// MaxTTL is the longest lifetime that may be asked for; 0 means 90 days.
	MaxTTL time.Duration

	// Backdate is how far before the present a leaf's or a root's validity begins, so that peers
	// whose clocks are slow accept it at once; 0 means 2 minutes. An old root stays in the bundle
	// for as long after the end of its last leaf.
	Backdate time.Duration

	// RefreshHint is how often consumers should fetch the bundle, and is published in it; whole
	// seconds, 0 means 5 minutes.
	RefreshHint time.Duration

	// Propagation is how long a new root is in the bundle before it signs; 0 means five times
	// RefreshHint. FED-3 asks for three to five times the hint; less is for programs in which every
	// consumer watches the bundle and none polls.
	Propagation time.Duration

	Logger *slog.Logger // nil means silence
}

// New makes an authority with one new root, which is active at once. It starts no goroutine. The
// error says which setting is wrong; it wraps [pki.ErrUnreadableTrustDomain] for a trust domain
// whose certificates crypto/x509 could not read.
func New(cfg Config) (*Authority, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	a := &Authority{cfg: cfg}
	issuer, err := a.newRoot()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	first := root{cert: issuer.Certificate(), issuer: issuer, phase: Active, prepared: now, activates: now}
	s, err := a.newState([]root{first}, 1)
	if err != nil {
		return nil, err
	}
	a.state.Store(s)
	return a, nil
}

func (cfg Config) withDefaults() (Config, error) {
	const day = 24 * time.Hour
	for name, d := range cfg.durations() {
		if *d < 0 {
			return cfg, fmt.Errorf("ca: invalid Config: %s is negative (%v)", name, *d)
		}
	}
	cfg.RootTTL = cmp.Or(cfg.RootTTL, 3650*day)
	cfg.MaxTTL = cmp.Or(cfg.MaxTTL, 90*day)
	cfg.DefaultTTL = cmp.Or(cfg.DefaultTTL, min(day, cfg.MaxTTL))
	cfg.Backdate = cmp.Or(cfg.Backdate, 2*time.Minute)
	cfg.RefreshHint = cmp.Or(cfg.RefreshHint, 5*time.Minute)
	cfg.Propagation = cmp.Or(cfg.Propagation, 5*cfg.RefreshHint)
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	switch {
	case cfg.TrustDomain.IsZero():
		return cfg, fmt.Errorf("ca: invalid Config: TrustDomain: %w", spiffe.ErrZero)
	case cfg.RefreshHint%time.Second != 0:
		return cfg, fmt.Errorf("ca: invalid Config: RefreshHint is %v, but bundles carry whole seconds", cfg.RefreshHint)
	case cfg.DefaultTTL < minTTL || cfg.MaxTTL < minTTL:
		return cfg, fmt.Errorf("ca: invalid Config: DefaultTTL is %v and MaxTTL %v, but certificates carry whole seconds", cfg.DefaultTTL, cfg.MaxTTL)
	case cfg.DefaultTTL > cfg.MaxTTL:
		return cfg, fmt.Errorf("ca: invalid Config: DefaultTTL %v is more than MaxTTL %v", cfg.DefaultTTL, cfg.MaxTTL)
	case cfg.Propagation >= cfg.RootTTL/2-cfg.DefaultTTL:
		return cfg, fmt.Errorf("ca: invalid Config: Propagation %v and DefaultTTL %v do not fit into half of RootTTL %v", cfg.Propagation, cfg.DefaultTTL, cfg.RootTTL)
	}
	return cfg, nil
}

func (cfg *Config) durations() map[string]*time.Duration {
	return map[string]*time.Duration{
		"RootTTL": &cfg.RootTTL, "DefaultTTL": &cfg.DefaultTTL, "MaxTTL": &cfg.MaxTTL,
		"Backdate": &cfg.Backdate, "RefreshHint": &cfg.RefreshHint, "Propagation": &cfg.Propagation,
	}
}

// Authority is a certificate authority; [New] makes one. All methods may be called at the same
// time. It cannot print its keys.
type Authority struct {
	cfg   Config
	state atomic.Pointer[state] // replaced under mu, read without it

	mu       sync.Mutex
	lastLeaf time.Time // the latest NotAfter granted by the active root; zero for none
}

// state is what holds from one step to the next. It never changes.
type state struct {
	roots    []root // oldest first; exactly one is Active
	sequence uint64
	bundle   *spiffe.Bundle
	next     time.Time     // of the next step by time; zero for none
	changed  chan struct{} // closed when this state has been replaced
}

func (s *state) active() root {
	return s.roots[slices.IndexFunc(s.roots, func(r root) bool { return r.phase == Active })]
}

func (a *Authority) newState(roots []root, sequence uint64) (*state, error) {
	c := spiffe.BundleContents{Sequence: &sequence, RefreshHint: a.cfg.RefreshHint}
	for _, r := range roots {
		c.X509Authorities = append(c.X509Authorities, r.cert)
	}
	b, err := spiffe.NewBundle(a.cfg.TrustDomain, c)
	if err != nil {
		return nil, fmt.Errorf("ca: bundle of %s: %w", a.cfg.TrustDomain, err)
	}
	return &state{roots: roots, sequence: sequence, bundle: b, next: nextStep(roots), changed: make(chan struct{})}, nil
}

// current returns the state at the present moment, taking the steps that have come due.
func (a *Authority) current() *state {
	s := a.state.Load()
	if s.next.IsZero() || !reached(time.Now(), s.next) {
		return s
	}
	a.mu.Lock()
	s, steps := a.advance(time.Now())
	a.mu.Unlock()
	a.log(steps)
	return s
}

// advance takes the steps that are due at now and returns the state after them; mu is held. The
// steps are for the log, once mu is free.
func (a *Authority) advance(now time.Time) (*state, []step) {
	old := a.state.Load()
	roots, steps := advance(old.roots, a.lastLeaf, a.cfg.Backdate, now)
	if len(steps) == 0 {
		return old, nil
	}
	sequence := old.sequence
	for _, s := range steps {
		if s.activated != nil {
			a.lastLeaf = time.Time{} // its value went into the old root's time to retire
		}
		if len(s.retired) > 0 {
			sequence++
		}
	}
	s, err := a.newState(roots, sequence)
	if err != nil {
		panic(err) // impossible: these authorities made a good bundle before, among others
	}
	if sequence == old.sequence {
		s.bundle = old.bundle
	}
	a.publish(s)
	return s, steps
}

// publish replaces the state; mu is held.
func (a *Authority) publish(s *state) {
	close(a.state.Swap(s).changed)
}

func (a *Authority) log(steps []step) {
	for _, s := range steps {
		if s.activated != nil {
			a.cfg.Logger.LogAttrs(context.Background(), slog.LevelInfo, "root activated", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String("serial", serial(s.activated)))
		}
		for _, c := range s.retired {
			a.cfg.Logger.LogAttrs(context.Background(), slog.LevelInfo, "root retired", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String("serial", serial(c)))
		}
	}
}

// TrustDomain returns the trust domain that the authority serves.
func (a *Authority) TrustDomain() spiffe.TrustDomain { return a.cfg.TrustDomain }

// Bundle returns the trust bundle of the present moment: every root from its preparation to its
// retirement, oldest first. Its sequence number starts at 1 and grows by one with each change of
// what is in it, and never otherwise (BND-17). Bundle does not block, except for the first caller
// after a step of a rotation came due, who takes the step.
func (a *Authority) Bundle() *spiffe.Bundle { return a.current().bundle }

// Changed returns a channel that is closed at the next change of the bundle or of the active root.
// Take it before reading, so that no change is missed. Changes that come with time are announced
// when Run, or any reader, takes notice of them.
func (a *Authority) Changed() <-chan struct{} { return a.current().changed }

// Roots returns the roots that are in the bundle, oldest first.
func (a *Authority) Roots() []RootStatus {
	s := a.current()
	out := make([]RootStatus, len(s.roots))
	for i, r := range s.roots {
		out[i] = r.status()
	}
	return out
}

// String names the authority and nothing secret.
func (a *Authority) String() string { return "authority of " + a.cfg.TrustDomain.String() }

// GoString names the authority and nothing secret.
func (a *Authority) GoString() string { return "ca.Authority(" + a.cfg.TrustDomain.String() + ")" }

// LogValue names the authority, its active root and nothing secret.
func (a *Authority) LogValue() slog.Value {
	s := a.current()
	return slog.GroupValue(
		slog.String("trust_domain", a.cfg.TrustDomain.String()),
		slog.String("active_root", serial(s.active().cert)),
		slog.Uint64("sequence", s.sequence),
	)
}

// newRoot makes a key and a self-signed certificate for it.
func (a *Authority) newRoot() (*pki.Issuer, error) {
	key, err := pki.NewKey(a.cfg.KeyAlgorithm)
	if err != nil {
		return nil, fmt.Errorf("ca: new root of %s: %w", a.cfg.TrustDomain, err)
	}
	now := time.Now()
	issuer, err := pki.NewRoot(key, pki.CAOptions{
		TrustDomain: a.cfg.TrustDomain,
		NotBefore:   now.Add(-a.cfg.Backdate),
		NotAfter:    now.Add(a.cfg.RootTTL),
	})
	if err != nil {
		return nil, fmt.Errorf("ca: new root of %s: %w", a.cfg.TrustDomain, err)
	}
	return issuer, nil
}

func serial(c *x509.Certificate) string { return c.SerialNumber.Text(16) }
