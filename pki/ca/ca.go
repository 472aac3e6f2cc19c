// Package ca is a certificate authority for one trust domain: it signs X.509-SVIDs and JWT-SVIDs,
// publishes the trust bundle that goes with them, and replaces its roots and keys without a moment
// in which a good certificate is refused.
//
// Most programs need [Open] with a [DirStore], [Authority.Run] in a goroutine, and [Authority.Sign]:
//
//	store, err := ca.NewDirStore("/var/lib/example-ca")
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td}, store)
//	…
//	go authority.Run(ctx) // in a group that waits for it
//	chain, err := authority.Sign(ctx, ca.Request{CSR: csr, ID: id})
//
// [New] makes an authority that lives in memory only, for tests and demonstrations, and [Load] one
// whose CA an operator provides in files. To give the authority to something that renews
// identities, wrap it with package caclient/local; to serve it, take package caserver/istioca or
// caserver/linkerd; to publish its bundle, give that to federation.NewHandler.
//
// # Who is certified
//
// Sign takes the public key out of a signing request, and nothing else. The identity and every
// other name come from the caller, who has to know who is asking before it calls: this package
// authenticates nobody. With [Config.Auditor] each certificate has a durable record before it leaves;
// with [Config.Limits] too many requests are refused instead of served late.
//
// # Rotation
//
// A root is replaced in four steps, and time alone moves it from one to the next:
//
//	prepare     Rotate makes a new root and puts it into the bundle
//	distribute  for Config.Propagation, verifiers learn of it while the old root goes on signing
//	activate    the new root signs from now on; the old root's private key is forgotten
//	retire      the old root leaves the bundle when the last leaf that it can have signed has
//	            expired, plus Config.Backdate for verifiers whose clocks are slow
//
// So a leaf's root has been in the bundle for at least Propagation before the leaf exists (FED-2),
// and stays there until the leaf is dead (FED-4). No method takes these steps in another order, or
// early. What holds is computed when it is asked for, so it is right even while nobody calls Run;
// Run adds that waiters are told, that a root is replaced before it comes to its end, and that the
// store is read and written. The keys of JWT-SVIDs are replaced by the same steps, each kind by itself.
//
// A step is taken when the wall clock and the monotonic clock both say that it is due: setting the
// wall clock of a running process may delay a step, but never hastens one.
//
// # To operate it
//
// To start, nothing but the folder or Secret of the store is needed: the first authority to come makes
// the CA, and those that come later, or at the same moment, use it.
//
// To rotate, do nothing: Run does it in time. [Authority.Rotate] does it now.
//
// If a private key may be in wrong hands, call [Authority.Taint] with its serial number or key ID. That
// starts a rotation, after which the old root leaves the bundle as soon as everybody who renews at half
// life has a new leaf. If certificates that were signed with it do harm now, follow with
// [Authority.Revoke] when the successor signs: what it takes out of the bundle is refused at once,
// and workloads that have not renewed are refused with it.
//
// To back up, copy the record: the folder of a DirStore, or the Secret. The copy holds the private keys
// of the CA. Make a new one after each rotation, and when the store is not being written: a copy
// of a folder that was made in the middle of a write does not open, and says so.
//
// To restore, stop all authorities, put the copy in its place, and start them. A backup from before a
// rotation does not know the newer root: leaves that it signed are refused until they are renewed,
// and as the sequence number of the bundle is behind, consumers that poll may keep the newer bundle until
// it has caught up. A record that vanishes while an authority runs is written again; to get rid of a CA,
// stop all of them first.
//
// Any number of replicas may share a store; see [Open] for what they owe each other and what happens
// while the store does not answer. [Authority.Status] tells when it did last.
//
// To move a CA over from Istio, open its Secret istio-ca-secret (package kubesecret), or a folder with
// ca-cert.pem and ca-key.pem, as the store. The CA is adopted: its root stays active with its key, further roots
// in root-cert.pem stay in the bundle until they expire, and our own state is added beside the
// items that Istio has, which are kept up to date, so that the way back is open. Roots that Istio
// made are RSA and have no SPIFFE ID (X5-10), which does not matter; the next rotation makes one that has.
// If something else replaces ca-cert.pem in the record, it is followed: with the same key and
// subject as the root renewed, otherwise as a new root that signs from now on while the old one
// retires. That skips the distribution, so it should not be done to a running mesh.
//
// # What it does not do
//
// It keeps no list of what it signed, apart from what the Auditor writes, and revokes roots and
// keys only, not single leaves: those are short. Intermediate certificates come from [Load] and from
// [Authority.SignCA].
package ca

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures an [Authority]. It is copied. Zero means the default that is named here;
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

	// MaxCATTL is the longest lifetime of a CA below this one; 0 means that [Authority.SignCA] is
	// refused. As such a CA signs until its end, an old root stays in the bundle for as long.
	MaxCATTL time.Duration

	// Backdate is how far before the present a leaf's or a root's validity begins, so that peers
	// whose clocks are slow accept it at once; 0 means 2 minutes. An old root stays in the bundle
	// for as long after the end of its last leaf. The clocks of replicas must not differ by more.
	Backdate time.Duration

	// RefreshHint is how often consumers should fetch the bundle, and is published in it; whole
	// seconds, 0 means 5 minutes.
	RefreshHint time.Duration

	// Propagation is how long a new root is in the bundle before it signs; 0 means five times
	// RefreshHint. FED-3 asks for three to five times the hint; less is for programs in which every
	// consumer watches the bundle and none polls.
	Propagation time.Duration

	// Constrain puts a critical extension into new roots that permits SPIFFE IDs of the trust domain
	// and no other; see [pki.CAOptions]. Verifiers that do not know it refuse every leaf.
	Constrain bool

	// GraceRatio is the part of a root's life that is left when Run replaces the root, beside
	// Propagation and MaxTTL; 0 means 0.2. It is at most 0.5.
	GraceRatio float64

	// KeepKey makes a rotation renew the root's certificate with its own key, as Istio's does,
	// instead of the four steps with a new key. The new certificate replaces the old one at once, as
	// leaves verify with either. A root that is tainted still gets a successor with a new key.
	KeepKey bool

	// CheckInterval is how often Run looks, with KeepKey, whether the root is to be renewed; 0 means
	// an hour. The first look is one interval after the start and, unless NoJitter is set, a random
	// part of another one.
	CheckInterval time.Duration
	NoJitter      bool

	// ManualRotation keeps Run from starting rotations; [Authority.Rotate] does.
	ManualRotation bool

	// TaintGrace is how long a tainted root stays in the bundle once its successor signs; 0 means half
	// of DefaultTTL and Backdate. See [Authority.Taint].
	TaintGrace time.Duration

	// SyncInterval is how often Run reads the store; 0 means 30 seconds, or a quarter of Propagation
	// if that is less. More than a quarter of Propagation is refused: a replica would learn of a root
	// too late to tell its consumers in time.
	SyncInterval time.Duration

	// JWT makes the authority sign JWT-SVIDs, too; nil means that it does not.
	JWT *JWTConfig

	Limits  Limits  // on what is signed at once, and in a second
	Auditor Auditor // keeps a record of everything that is signed; nil means none

	// Key is the private key of a plugged-in CA that is not in a file, such as one in an HSM or a KMS;
	// nil means that it is in one. It must be safe for concurrent use. Only [Load] takes one: the other
	// authorities make keys as they rotate.
	Key crypto.Signer

	// MultiRoot allows the root file of a plugged-in CA to change while the authority runs; see [Load].
	MultiRoot bool

	// ReloadInterval is how often Run looks whether the files of a plugged-in CA have changed; 0
	// means every second.
	ReloadInterval time.Duration

	Logger *slog.Logger // nil means silence
}

// String names the trust domain and shows no key.
func (cfg Config) String() string { return "ca.Config(" + cfg.TrustDomain.String() + ")" }

// GoString returns the same as String.
func (cfg Config) GoString() string { return cfg.String() }

// LogValue implements [slog.LogValuer].
func (cfg Config) LogValue() slog.Value { return slog.StringValue(cfg.String()) }

// Limits say how much may be asked of an authority; zero means no such limit. What is over a limit is
// refused with [ErrLimit] and the time at which to come back. Signing is limited, and not reading.
type Limits struct {
	Concurrent int // signings at the same time, the writing of their audit records included
	Queue      int // how many more may wait for their turn; the rest is refused at once

	Rate  float64 // signings per second, of all callers together
	Burst int     // how many of them may come at once after a pause; 0 means those of one second, at least 1

	CallerRate  float64 // signings per second for each [Request.Caller]
	CallerBurst int     // as Burst
}

// New makes an authority with one new root, which is active at once and lives in this process only.
// It starts no goroutine. The error says which setting is wrong; it wraps
// [pki.ErrUnreadableTrustDomain] for a trust domain whose certificates crypto/x509 could not read.
//
// As nobody else signs with its root, the authority knows the end of its last leaf: an old root
// retires then, where one of [Open] has to wait for the longest life that a leaf may have.
func New(cfg Config) (*Authority, error) {
	a, err := newAuthority(cfg)
	if err != nil {
		return nil, err
	}
	if a.key() != nil {
		return nil, errKey
	}
	now := time.Now()
	d, err := a.create(now)
	if err != nil {
		return nil, err
	}
	return a, a.install(d, "", now, now)
}

var errKey = errors.New("ca: invalid Config: Key is for Load; an authority with roots of its own makes its keys")

// newAuthority returns an authority without state.
func newAuthority(cfg Config) (*Authority, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	key := cfg.Key
	cfg.Key = nil
	a := &Authority{cfg: cfg, key: func() crypto.Signer { return key }, writing: make(chan struct{}, 1)}
	if cfg.Limits != (Limits{}) {
		a.limiter = limit.New(limit.Options(cfg.Limits))
	}
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
	cfg.Propagation = cmp.Or(cfg.Propagation, 5*min(cfg.RefreshHint, math.MaxInt64/5))
	cfg.GraceRatio = cmp.Or(cfg.GraceRatio, 0.2)
	cfg.CheckInterval = cmp.Or(cfg.CheckInterval, time.Hour)
	cfg.TaintGrace = cmp.Or(cfg.TaintGrace, cfg.DefaultTTL/2+cfg.Backdate)
	cfg.SyncInterval = cmp.Or(cfg.SyncInterval, max(1, min(30*time.Second, cfg.Propagation/4)))
	cfg.ReloadInterval = cmp.Or(cfg.ReloadInterval, time.Second)
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
	case !(cfg.GraceRatio > 0 && cfg.GraceRatio <= 0.5):
		return cfg, fmt.Errorf("ca: invalid Config: GraceRatio is %v; it is more than 0 and at most 0.5", cfg.GraceRatio)
	case cfg.SyncInterval > max(1, cfg.Propagation/4):
		return cfg, fmt.Errorf("ca: invalid Config: SyncInterval %v is more than a quarter of Propagation %v", cfg.SyncInterval, cfg.Propagation)
	}
	if cfg.JWT != nil {
		jwt, err := cfg.JWT.withDefaults(cfg.Propagation)
		if err != nil {
			return cfg, err
		}
		cfg.JWT = &jwt
	}
	return cfg, nil
}

func (cfg *Config) durations() map[string]*time.Duration {
	return map[string]*time.Duration{
		"RootTTL": &cfg.RootTTL, "DefaultTTL": &cfg.DefaultTTL, "MaxTTL": &cfg.MaxTTL, "MaxCATTL": &cfg.MaxCATTL,
		"Backdate": &cfg.Backdate, "RefreshHint": &cfg.RefreshHint, "Propagation": &cfg.Propagation,
		"CheckInterval": &cfg.CheckInterval, "TaintGrace": &cfg.TaintGrace, "SyncInterval": &cfg.SyncInterval, "ReloadInterval": &cfg.ReloadInterval,
	}
}

// longest returns the longest life of anything that a root signs.
func (cfg *Config) longest() time.Duration { return max(cfg.MaxTTL, cfg.MaxCATTL) }

// terms returns what this authority needs of a root.
func (cfg *Config) terms() terms {
	return terms{longest: cfg.longest(), grace: cfg.Backdate, propagation: cfg.Propagation}
}

// jwtTerms returns what this authority needs of a JWT key.
func (cfg *Config) jwtTerms() terms {
	return terms{longest: cfg.JWT.MaxTTL, grace: cfg.Backdate, propagation: cfg.Propagation}
}

// Authority is a certificate authority; [New], [Open] and [Load] make one. All methods may be called
// at the same time. It cannot print its keys.
type Authority struct {
	cfg     Config               // without Key, which package fmt would print
	key     func() crypto.Signer // Config.Key
	limiter *limit.Limiter       // nil for none
	store   Store                // nil: what it knows is all there is
	files   *files               // nil: the roots are its own

	state   atomic.Pointer[state] // replaced under mu, read without it
	writing chan struct{}         // has a slot for the one who reads and writes the store
	fresh   *document             // a new CA that may have been stored; for who has the slot

	mu      sync.Mutex
	last    lastEnds  // without a store: of what the active keys signed
	synced  time.Time // with a store: when the read or write began that gave the state; wall clock
	syncErr error     // of the last attempt since; nil if there was none or it worked
}

// lastEnds are the latest ends of what the active keys signed; zero for nothing.
type lastEnds struct{ leaf, token time.Time }

// state is what holds from one step to the next. It never changes.
type state struct {
	*document
	version  string   // of the record; empty without a store
	dirty    bool     // time has moved the document on from the record
	plugged  *plugged // nil: the roots are in the document
	bundle   *spiffe.Bundle
	sequence uint64        // of the bundle
	next     time.Time     // of the next step by time; zero for none
	changed  chan struct{} // closed when what may be seen of this state has changed
}

// active returns the key that signs certificates.
func (s *state) active() key {
	if s.plugged != nil {
		return s.plugged.key
	}
	return s.roots[inPhase(s.roots, Active)]
}

// newState returns a state that follows old, which may be nil.
func (a *Authority) newState(old *state, d *document, version string, p *plugged) (*state, error) {
	s := &state{document: d, version: version, plugged: p, sequence: d.sequence, next: d.next(), changed: make(chan struct{})}
	c := d.contents()
	if p != nil {
		c.X509Authorities = p.roots
		s.sequence += p.sequence
	}
	c.RefreshHint = a.cfg.RefreshHint
	if old != nil && s.sequence <= old.sequence {
		// An equal bundle stays the same one, for verifiers remember by it. Another one must not have
		// an old number, which no consumer would take (FED-11), even if a replica that had not heard
		// of us has turned back what time had done.
		c.Sequence = &old.sequence
		b, err := spiffe.NewBundle(a.cfg.TrustDomain, c)
		if err != nil {
			return nil, fmt.Errorf("ca: bundle of %s: %w", a.cfg.TrustDomain, err)
		}
		if b.Equal(old.bundle) {
			s.bundle, s.sequence = old.bundle, old.sequence
			return s, nil
		}
		s.sequence = old.sequence + 1
	}
	c.Sequence = &s.sequence
	b, err := spiffe.NewBundle(a.cfg.TrustDomain, c)
	if err != nil {
		return nil, fmt.Errorf("ca: bundle of %s: %w", a.cfg.TrustDomain, err)
	}
	s.bundle = b
	return s, nil
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
	if old.next.IsZero() || !reached(now, old.next) {
		return old, nil
	}
	d, steps := old.document.advance(a.lastEnds(), now)
	for _, s := range steps {
		if s.activated != nil { // its value went into the old key's time to retire
			if s.activated.cert != nil {
				a.last.leaf = time.Time{}
			} else {
				a.last.token = time.Time{}
			}
		}
	}
	s, err := a.newState(old, d, old.version, old.plugged)
	if err != nil {
		panic(err) // impossible: these authorities made a good bundle before, among others
	}
	s.dirty = a.store != nil
	a.publish(s)
	return s, steps
}

// lastEnds returns what only who signs alone knows, or nil.
func (a *Authority) lastEnds() *lastEnds {
	if a.store != nil {
		return nil
	}
	return &a.last
}

// publish replaces the state; mu is held. Waiters are told if there is something to see.
func (a *Authority) publish(s *state) {
	if old := a.state.Load(); old != nil {
		if old.looksLike(s) {
			s.changed = old.changed
		} else {
			defer close(old.changed)
		}
	}
	a.state.Store(s)
}

// looksLike reports whether no method of the authority tells s and t apart.
func (s *state) looksLike(t *state) bool {
	same := func(a, b []key) bool {
		if len(a) != len(b) {
			return false
		}
		for i := range a {
			x, y := a[i].status(), b[i].status()
			if a[i].id != b[i].id || x.Phase != y.Phase || x.Tainted != y.Tainted ||
				!x.Prepared.Equal(y.Prepared) || !x.Activates.Equal(y.Activates) || !x.Retires.Equal(y.Retires) {
				return false
			}
		}
		return true
	}
	return s.bundle == t.bundle && s.plugged == t.plugged && same(s.roots, t.roots) && same(s.jwt, t.jwt)
}

func (a *Authority) log(steps []step) {
	for _, s := range steps {
		if k := s.activated; k != nil {
			a.cfg.Logger.LogAttrs(context.Background(), slog.LevelInfo, k.what()+" activated", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String(k.idName(), k.id))
		}
		for _, k := range s.retired {
			a.cfg.Logger.LogAttrs(context.Background(), slog.LevelInfo, k.what()+" retired", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String(k.idName(), k.id))
		}
	}
}

// TrustDomain returns the trust domain that the authority serves.
func (a *Authority) TrustDomain() spiffe.TrustDomain { return a.cfg.TrustDomain }

// Bundle returns the trust bundle of the present moment: every root and every JWT key from its
// preparation to its retirement, oldest first. Its sequence number starts at 1 for a CA that is
// new and grows with each change of what is in it (BND-17): without a store by one, and never
// otherwise; with one by what keeps the numbers of replicas apart, and also when somebody has decided
// when something changes. That of plugged-in files is in [Load]. Bundle does not block, except for the first caller after a step of a rotation came due,
// who takes the step.
func (a *Authority) Bundle() *spiffe.Bundle { return a.current().bundle }

// Changed returns a channel that is closed at the next change of the bundle or of the state of a
// key. Take it before reading, so that no change is missed. Changes that come with time are
// announced when Run, or any reader, takes notice of them.
func (a *Authority) Changed() <-chan struct{} { return a.current().changed }

// Roots returns the roots that are in the bundle, oldest first.
func (a *Authority) Roots() []RootStatus { return a.current().rootStatus() }

func (s *state) rootStatus() []RootStatus {
	if s.plugged != nil {
		return s.plugged.status()
	}
	out := make([]RootStatus, len(s.roots))
	for i, k := range s.roots {
		out[i] = k.status()
	}
	return out
}

// Status is what an authority knows of itself at one moment, for pages about health. It holds no
// secret.
type Status struct {
	TrustDomain spiffe.TrustDomain
	Sequence    uint64 // of the bundle
	Roots       []RootStatus
	JWTKeys     []JWTKeyStatus

	// Synced is when the store last answered, or the files of a plugged-in CA were last found to be
	// in order; zero for an authority of [New]. SyncError is what went wrong since, and nil if
	// nothing did. What the authority had before goes on working: see [Open] for how long.
	Synced    time.Time
	SyncError error
}

// Status returns the state of the authority.
func (a *Authority) Status() Status {
	s := a.current()
	out := Status{TrustDomain: a.cfg.TrustDomain, Sequence: s.sequence, Roots: s.rootStatus()}
	for _, k := range s.jwt {
		out.JWTKeys = append(out.JWTKeys, k.jwtStatus())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	out.Synced, out.SyncError = a.synced, a.syncErr
	if a.files != nil {
		checked, err := a.files.status()
		if a.store == nil || !checked.After(out.Synced) {
			out.Synced = checked
		}
		out.SyncError = cmp.Or(err, out.SyncError)
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
		slog.String("active_root", s.active().id),
		slog.Uint64("sequence", s.sequence),
	)
}

// create returns the document of a new CA. Nobody has its bundle yet, so that its keys may sign at
// once.
func (a *Authority) create(now time.Time) (*document, error) {
	d := &document{authority: randomID(), sequence: 1}
	if a.files == nil {
		root, err := a.newRoot()
		if err != nil {
			return nil, err
		}
		root.phase, root.prepared, root.activates = Active, now, now
		d.roots = []key{root}
	}
	if a.cfg.JWT != nil {
		jwt, err := a.newJWTKey()
		if err != nil {
			return nil, err
		}
		jwt.phase, jwt.prepared, jwt.activates = Active, now, now
		d.jwt = []key{jwt}
	}
	return d, nil
}

// newRoot makes a key and a self-signed certificate for it.
func (a *Authority) newRoot() (key, error) {
	fail := func(err error) (key, error) {
		return key{}, fmt.Errorf("ca: new root of %s: %w", a.cfg.TrustDomain, err)
	}
	signer, err := pki.NewKey(a.cfg.KeyAlgorithm)
	if err != nil {
		return fail(err)
	}
	now := time.Now()
	issuer, err := pki.NewRoot(signer, pki.CAOptions{
		TrustDomain: a.cfg.TrustDomain,
		Constrain:   a.cfg.Constrain,
		NotBefore:   now.Add(-a.cfg.Backdate),
		NotAfter:    now.Add(a.cfg.RootTTL),
	})
	if err != nil {
		return fail(err)
	}
	return key{id: serial(issuer.Certificate()), cert: issuer.Certificate(), issuer: issuer, secret: seal(signer), terms: a.cfg.terms()}, nil
}

func serial(c *x509.Certificate) string { return c.SerialNumber.Text(16) }
