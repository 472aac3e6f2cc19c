// Package ca is a certificate authority for one trust domain. It signs X.509-SVIDs and JWT-SVIDs, publishes the trust
// bundle that goes with them, and replaces its roots and keys without refusing a good certificate at any moment.
//
// Most programs need [Open] with a store, [Authority.Run] in a goroutine, and [Authority.Sign]:
//
//	store, err := ca.NewDirStore("/var/lib/example-ca")
//	…
//	authority, err := ca.Open(ctx, ca.Config{TrustDomain: td, Create: first}, store)
//	…
//	go authority.Run(ctx) // in a group that waits for it
//	chain, err := authority.Sign(ctx, ca.Request{CSR: csr, ID: id})
//
// With Create, Open makes the CA if the store has none; later starts do not need it. [New] makes an authority that
// lives only in memory, for tests and demonstrations, and [Load] uses a CA that an operator provides in files.
// Package caclient/local connects the authority to a program that renews identities, packages caserver/istioca and
// caserver/linkerd serve it, and federation.NewHandler publishes its bundle.
//
// OPERATING.md beside this package says how to operate a CA, from the first start to a stolen key.
//
// # What it certifies
//
// Sign takes only the public key from a signing request. The identity and every other name come from the calling
// program, which must have authenticated the workload first: this package authenticates no caller. With
// Config.Auditor each certificate has a durable record before it leaves. With Config.Limits the authority refuses
// excess requests instead of serving them late.
//
// # Rotation
//
// A root is replaced in four steps, which time alone triggers:
//
//	prepare     Rotate makes a new root and puts it into the bundle
//	distribute  for Rotation.Propagation, verifiers learn of it while the old root goes on signing
//	activate    the new root signs from now on; the old root's private key is forgotten, and
//	            destroyed if a custodian has it, Config.Backdate later
//	retire      the old root leaves the bundle when the last leaf that it can have signed has
//	            expired, plus Config.Backdate for verifiers whose clocks are slow
//
// So a leaf's root has been in the bundle for at least Propagation before the leaf exists, and stays there until the
// leaf has expired. Only [Authority.Revoke] takes these steps early or in another order. Readers compute the state
// as of now, so it is right even while Run is not called. Run notifies waiters, replaces a root before its end, and
// reads and writes the store. The keys of JWT-SVIDs rotate by the same steps, independently.
//
// A step happens when the wall clock and the monotonic clock both say that it is due: setting the wall clock of a
// running process may delay a step, but never hastens one.
//
// # Private keys
//
// Without more the private keys are in the store, in the clear. With Config.Custody a [Custodian] makes and uses them,
// such as an HSM, a TPM or a key management service, and the store has their names and public keys. Packages
// caclient/vault (OpenBao), pki/pkcs11key and pki/tpmkey have custodians. While a custodian does not answer, nothing
// is signed with its keys, and all else goes on: the authority reads and writes its store, publishes its bundle, and
// takes the steps that have been decided. The authority verifies each signature before it leaves. A custodian's key is
// in the record before it is made, and until it is destroyed, so that a crash leaves none that no record names; see
// [Authority.Orphans]. A [Sealer] encrypts the records of a store whose keys stay in it.
//
// # What it does not do
//
// It keeps no list of what it signed, except in the Auditor. It revokes roots and keys, not single leaves: those are
// short-lived. It signs only leaves; the CA itself may be an intermediate, with [Load].
package ca

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/mldsa"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/pki/internal/lastresult"
	"github.com/svidkit/svidkit/spiffe"
)

// Config configures an [Authority]. It is copied. A zero field means its default; negative durations are refused.
type Config struct {
	TrustDomain spiffe.TrustDomain // required

	// DefaultTTL is the lifetime of a leaf whose request has no TTL; 0 means 24 hours, or MaxTTL if that is less. It
	// must not be more than MaxTTL.
	DefaultTTL time.Duration

	// MaxTTL is the longest lifetime that a request may have; 0 means 90 days.
	MaxTTL time.Duration

	// Backdate is how far before the present a leaf's or root's validity begins, so that peers with slow clocks
	// accept it at once; 0 means 2 minutes. An old root stays in the bundle for the same time after its last leaf has
	// expired. The clocks of replicas must not differ by more.
	Backdate time.Duration

	// EmptySubject leaves the subject of leaves without a common name empty, and makes their alternative names
	// critical. Otherwise the subject is "O=svidkit" in all leaves, so that no verifier can take it for an identity.
	// SPIFFE permits both, but some readers fail on an empty subject, such as linkerd2-proxy with an X.509-SVID from
	// a Workload API.
	EmptySubject bool

	// RefreshHint is how often consumers should fetch the bundle, in whole seconds. The bundle contains it; 0 means 5
	// minutes.
	RefreshHint time.Duration

	// Rotation says how roots are made and replaced.
	Rotation Rotation

	// Algorithms are the kinds of keys that are certified. The zero value is the default, without ML-DSA.
	Algorithms spiffe.Algorithms

	// JWT makes the authority sign JWT-SVIDs too; nil means that it does not.
	JWT *JWTConfig

	// Create lets [Open] make a new CA, and [Load] the first key for JWT-SVIDs, if the store has no record. Without
	// it the error wraps [ErrNoRecord]: an unmounted volume or a deleted Secret must not look like a first start. A
	// program sets it when its operator asks for a new CA, and not at every start. A CA that is already in the store,
	// even Istio's, does not need it.
	Create bool

	// Custody is a [Custody], which says where the private keys are made and kept; nil means in the store. It needs a
	// store: [New] refuses it, and so does [Load] without [PluggedIn].Tokens.
	Custody interface{ keeper(*Authority) keeper }

	// Actor is the process that operates the CA, for the records of key events. The zero value leaves it out.
	Actor Actor

	Limits  Limits       // on concurrent signings and signings per second
	Auditor Auditor      // records everything signed, and key events; nil means none
	Logger  *slog.Logger // nil means silence
}

// Rotation says how an [Authority] makes and replaces its roots. A zero field means its default.
type Rotation struct {
	// KeyAlgorithm is the key of new roots, as in [pki.NewKey]; empty means "ecdsa-p256". Two with a comma, one of them
	// ML-DSA, such as "ecdsa-p256,ml-dsa-65", make two roots, which rotate independently: leaves with a key of ML-DSA
	// have the one, all others the other. [Authority.Run] prepares a root of a kind that is missing as in
	// [Authority.Rotate], and ends the kind that is no longer named as soon as the other kind's root signs. So a CA moves
	// from one to the other by way of both. Releases before ML-DSA refuse a store that has such a root.
	KeyAlgorithm string

	// RootTTL is the lifetime of each root; 0 means ten years (3650 days). It must be more than twice the sum of
	// Propagation and DefaultTTL, so that a root is replaced while leaves of the default lifetime still fit into its
	// own; see [Authority.Run].
	RootTTL time.Duration

	// GraceRatio is the fraction of a root's lifetime, beyond Propagation and MaxTTL, that is left when Run replaces
	// the root; 0 means 0.2. It is at most 0.5.
	GraceRatio float64

	// Propagation is how long a new root is in the bundle before it signs; 0 means five times RefreshHint. The
	// federation standard asks for three to five times the hint. Set less only if every consumer watches the bundle
	// and none polls.
	Propagation time.Duration

	// Constrain adds a critical extension to new roots that permits only SPIFFE IDs of the trust domain; see
	// [pki.CertificateOptions]. Verifiers that do not know the extension refuse every leaf.
	Constrain bool

	// Manual keeps Run from starting rotations: only [Authority.Rotate] starts them.
	Manual bool

	// KeepKey makes a rotation renew the root's certificate with its own key, as Istio's CA does, instead of taking
	// the four steps with a new key. The new certificate replaces the old one at once, as leaves verify with either.
	// A tainted root still gets a successor with a new key.
	KeepKey bool

	// CheckInterval is how often, with KeepKey, Run checks whether the root needs renewal, as Istio's CA does; 0
	// means an hour. The first check is one interval after the start plus, unless NoJitter is set, a random part of
	// another one. Even without KeepKey, Run logs at this interval that the root is not about to expire.
	CheckInterval time.Duration
	NoJitter      bool
}

// Limits bound an authority's signing; zero means no such limit. A request over a limit is refused with [ErrLimit]
// and the time at which to come back.
type Limits struct {
	Concurrent int // concurrent signings, including the writing of their audit records
	Queue      int // how many more requests may wait; others are refused at once

	// QueueTime is how long a request should wait in the queue. In an overload, when for half a second more requests
	// come than can be signed, a request that would wait longer is refused at once; a burst may wait ten times as
	// long.
	QueueTime time.Duration

	Rate  float64 // signings per second, of all callers together
	Burst int     // how many may come at once after a pause; 0 means one second's worth, at least 1

	CallerRate  float64 // signings per second for each [Request.LimitKey] or Caller
	CallerBurst int     // like Burst
}

// New makes an authority with one new root, which is active at once and lives only in this process. It starts no
// goroutine. The error says which setting is wrong, such as a trust domain whose certificates crypto/x509 could not
// read.
func New(cfg Config) (*Authority, error) {
	a, err := newAuthority(cfg)
	if err != nil {
		return nil, err
	}
	if err := a.createInMemory(newDocument()); err != nil {
		return nil, err
	}
	a.started(context.Background(), created, "in memory")
	return a, nil
}

// createInMemory adds the keys of a new CA to d, which no store has, and installs it.
func (a *Authority) createInMemory(d *rotation.Document) error {
	now := time.Now()
	if err := a.create(d, now, a.newKey); err != nil {
		return err
	}
	return a.install(d, "", now, now, nil, "")
}

// newAuthority returns an authority without state.
func newAuthority(cfg Config) (*Authority, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("ca: invalid Config: %w", err)
	}
	a := &Authority{
		redacted: redact.New("ca.Authority(" + cfg.TrustDomain.String() + ")"),
		cfg:      cfg, writing: make(chan struct{}, 1),
		syncInterval: max(1, min(30*time.Second, cfg.Rotation.Propagation/4)),
		taintGrace:   cfg.DefaultTTL/2 + cfg.Backdate,
		limiter:      limit.New(limit.Options(cfg.Limits)),
	}
	if cfg.Custody != nil {
		a.custody = cfg.Custody.keeper(a)
	}
	return a, nil
}

func (cfg Config) withDefaults() (Config, error) {
	const day = 24 * time.Hour
	r := &cfg.Rotation
	for name, d := range map[string]time.Duration{
		"RootTTL": r.RootTTL, "DefaultTTL": cfg.DefaultTTL, "MaxTTL": cfg.MaxTTL, "Backdate": cfg.Backdate,
		"RefreshHint": cfg.RefreshHint, "Propagation": r.Propagation, "CheckInterval": r.CheckInterval,
	} {
		if d < 0 {
			return cfg, fmt.Errorf("%s is negative (%v)", name, d)
		}
	}
	cfg.MaxTTL = cmp.Or(cfg.MaxTTL, 90*day)
	cfg.DefaultTTL = cmp.Or(cfg.DefaultTTL, min(day, cfg.MaxTTL))
	cfg.Backdate = cmp.Or(cfg.Backdate, 2*time.Minute)
	cfg.RefreshHint = cmp.Or(cfg.RefreshHint, 5*time.Minute)
	r.KeyAlgorithm = cmp.Or(r.KeyAlgorithm, "ecdsa-p256")
	roots := strings.Split(r.KeyAlgorithm, ",")
	r.RootTTL = cmp.Or(r.RootTTL, 3650*day)
	r.Propagation = cmp.Or(r.Propagation, 5*min(cfg.RefreshHint, math.MaxInt64/5))
	r.GraceRatio = cmp.Or(r.GraceRatio, 0.2)
	r.CheckInterval = cmp.Or(r.CheckInterval, time.Hour)
	cfg.Logger = ratelog.Patient(cfg.Logger).With(slog.Any("trust_domain", cfg.TrustDomain))
	switch {
	case len(roots) > 2 || len(roots) == 2 && (r.named(rotation.Root) == "" || r.named(rotation.Quantum) == ""):
		return cfg, fmt.Errorf("KeyAlgorithm %.64q: of two, one is of ML-DSA, and the other is not", r.KeyAlgorithm)
	case cfg.TrustDomain.IsZero():
		return cfg, fmt.Errorf("TrustDomain: %w", spiffe.ErrZero)
	case cfg.RefreshHint%time.Second != 0:
		return cfg, fmt.Errorf("RefreshHint is %v, but bundles carry whole seconds", cfg.RefreshHint)
	case cfg.DefaultTTL < minTTL || cfg.MaxTTL < minTTL:
		return cfg, fmt.Errorf("DefaultTTL is %v and MaxTTL %v, but certificates carry whole seconds", cfg.DefaultTTL,
			cfg.MaxTTL)
	case cfg.DefaultTTL > cfg.MaxTTL:
		return cfg, fmt.Errorf("DefaultTTL %v is more than MaxTTL %v", cfg.DefaultTTL, cfg.MaxTTL)
	case r.Propagation >= r.RootTTL/2-cfg.DefaultTTL:
		return cfg, fmt.Errorf("the root's lifetime %v is not more than twice the time in which verifiers learn of its "+
			"successor (%v) and the default lifetime of a leaf (%v) together", r.RootTTL, r.Propagation, cfg.DefaultTTL)
	case !(r.GraceRatio > 0 && r.GraceRatio <= 0.5):
		return cfg, fmt.Errorf("GraceRatio is %v; it is more than 0 and at most 0.5", r.GraceRatio)
	}
	if cfg.JWT != nil {
		jwt, err := cfg.JWT.withDefaults(r.Propagation)
		if err != nil {
			return cfg, err
		}
		cfg.JWT = &jwt
	}
	return cfg, nil
}

// terms returns this authority's requirements for a key.
func (cfg *Config) terms(kind rotation.Kind) rotation.Terms {
	t := rotation.Terms{Longest: cfg.MaxTTL, Grace: cfg.Backdate, Propagation: cfg.Rotation.Propagation}
	if kind == rotation.Token {
		t.Longest, t.Propagation = cfg.JWT.MaxTTL, cfg.JWT.Propagation
	}
	return t
}

// redacted is the printed form of a type that holds keys, or that prints as a sentence.
type redacted = redact.Text

// Authority is a certificate authority; [New], [Open] and [Load] make one. It is safe for concurrent use, and does
// not print its keys.
type Authority struct {
	redacted
	cfg     Config
	limiter *limit.Limiter

	syncInterval time.Duration // how often Run reads the store: a quarter of the consumers' time
	taintGrace   time.Duration // how long a tainted root stays in the bundle once its successor signs

	store Store         // nil for an authority in memory
	files *pluggedFiles // nil if the authority makes its own roots

	custody keeper   // nil for none
	holds   bool     // its custodian makes the next keys
	seals   bool     // it seals the records
	failed  sync.Map // the failure of the last signature with each private key at a custodian, by name; none if it worked

	state   atomic.Pointer[state] // replaced under mu, read without it
	writing chan struct{}         // one slot, for the caller that reads and writes the store
	fresh   *rotation.Document    // a new CA that may have been stored, while Open runs; for the holder of the slot
	adopted bool                  // another program made the CA; for the holder of the slot

	audited lastresult.Result // of the last record of a certificate or token

	looking sync.Mutex  // for the request that reads another process's changes
	looked  fs.FileInfo // of the store at the last look; guarded by looking
	events  events

	mu      sync.Mutex
	synced  time.Time // with a store: wall-clock start of the read or write that gave the state
	syncErr error     // of the last attempt since; nil if there was none or it worked
}

// state holds from one step to the next. It never changes.
type state struct {
	*rotation.Document
	version  string   // of the record; empty without a store
	dirty    bool     // time has moved the document on from the record
	plugged  *plugged // nil: the roots are in the document
	bundle   *spiffe.Bundle
	callers  *spiffe.Bundle // bundle without tainted keys
	sequence uint64         // of the bundle
	next     time.Time      // of the next step by time; zero for none
	changed  chan struct{}  // closed when another state has replaced this one
}

// active returns the key that signs certificates.
func (s *state) active() *rotation.Key {
	if s.plugged != nil {
		return &s.plugged.key
	}
	return s.Primary()
}

// rootFor returns the kind of the root that signs for a public key.
func (s *state) rootFor(key crypto.PublicKey) rotation.Kind {
	kind := rotation.Root
	if mldsa.Name(key) != "" {
		kind = rotation.Quantum
	}
	if s.In(kind, rotation.Active) == nil && s.plugged == nil {
		return s.Primary().Kind()
	}
	return kind
}

// newState returns a state that follows old, which may be nil.
func (a *Authority) newState(old *state, d *rotation.Document, version string, p *plugged) (*state, error) {
	s := &state{Document: d, version: version, plugged: p, sequence: d.Sequence, changed: make(chan struct{})}
	if !a.views() {
		s.next = d.Next()
	}
	c := d.Contents()
	if p != nil {
		c.X509Authorities = p.roots
		s.sequence += p.sequence
	}
	c.RefreshHint = a.cfg.RefreshHint
	number := func(sequence uint64) (err error) {
		s.sequence, c.Sequence = sequence, &sequence
		if s.bundle, err = spiffe.NewBundle(a.cfg.TrustDomain, c); err != nil {
			err = fmt.Errorf("ca: bundle of %s: %w", a.cfg.TrustDomain, err)
		}
		return err
	}
	var err error
	if old == nil || s.sequence > old.sequence {
		err = number(s.sequence)
	} else if err = number(old.sequence); err == nil && s.bundle.Equal(old.bundle) {
		s.bundle = old.bundle // because verifiers cache by its address
	} else if err == nil {
		// A different bundle must not have an old number, which no consumer would accept: without a store only this
		// place counts changes, and with one a replica that had not heard of us may have undone a step of time.
		err = number(old.sequence + 1)
	}
	if err == nil {
		s.callers, err = a.newCallers(s, old)
	}
	return s, err
}

// current returns the state at the present moment, taking the steps that have come due.
func (a *Authority) current() *state {
	s := a.state.Load()
	if s.next.IsZero() || !rotation.Reached(time.Now(), s.next) {
		return s
	}
	a.mu.Lock()
	s, steps := a.advance(time.Now())
	a.mu.Unlock()
	a.happened("", steps...)
	return s
}

// advance takes the steps that are due at now and returns the state after them; mu is held. The caller logs the steps
// once mu is free.
func (a *Authority) advance(now time.Time) (*state, []rotation.Event) {
	old := a.state.Load()
	if old.next.IsZero() || !rotation.Reached(now, old.next) {
		return old, nil
	}
	d, steps := old.Document.Advance(now)
	s, err := a.newState(old, d, old.version, old.plugged)
	if err != nil {
		panic(err) // impossible: these authorities made a good bundle before, among others
	}
	s.dirty = a.store != nil
	a.publish(s)
	return s, steps
}

// publish replaces the state and tells waiters; mu is held.
func (a *Authority) publish(s *state) {
	if old := a.state.Swap(s); old != nil {
		close(old.changed)
	}
}

// Bundle returns the current trust bundle: every root and every JWT key from its preparation to its retirement,
// oldest first. Its sequence number starts at 1 for a new CA. It grows with each change of the contents, and when the
// time of a change is decided, in steps, so that replicas never share a number. For plugged-in files see [Load].
// Bundle does not block, except that the first caller after a rotation step came due takes the step.
func (a *Authority) Bundle() *spiffe.Bundle { return a.current().bundle }

// Changed returns a channel that is closed at the next change of the bundle or of a key's state, or of the record that
// neither shows. Take it before reading, so that no change is missed. A step of time closes it when Run, or any
// reader, notices the step.
func (a *Authority) Changed() <-chan struct{} { return a.current().changed }

func newDocument() *rotation.Document {
	return &rotation.Document{Authority: rotation.RandomID(), Sequence: 1}
}

// kinds are the kinds of keys that the authority makes.
func (a *Authority) kinds() (all []rotation.Kind) {
	for _, kind := range rotation.Kinds {
		if kind == rotation.Token && a.cfg.JWT != nil || a.files == nil && a.cfg.Rotation.named(kind) != "" {
			all = append(all, kind)
		}
	}
	return all
}

// makeKey makes a root, or a key for tokens with the algorithm alg. The caller does not hold the writing slot.
func (a *Authority) makeKey(ctx context.Context, kind rotation.Kind, alg string) (rotation.Key, error) {
	if a.holds {
		return a.custody.makeKey(ctx, kind, alg)
	}
	return a.newKey(kind, alg)
}

// create adds the keys of a new CA to d. No verifier has its bundle yet, so they may sign at once.
func (a *Authority) create(d *rotation.Document, now time.Time,
	newKey func(rotation.Kind, string) (rotation.Key, error)) error {
	if a.store == nil && a.custody != nil {
		return errors.New("ca: invalid Config: Custody needs a store, which names the private keys")
	}
	for _, kind := range a.kinds() {
		k, err := newKey(kind, a.alg(kind))
		if err != nil {
			return err
		}
		k.Phase, k.Prepared, k.Activates = rotation.Active, now, now
		d.Keys[kind] = []rotation.Key{k}
	}
	return nil
}

// alg returns the algorithm of new tokens, or "" for roots.
func (a *Authority) alg(kind rotation.Kind) string {
	if kind == rotation.Token && a.cfg.JWT != nil {
		return a.cfg.JWT.Algorithm
	}
	return ""
}

// keyAlgorithm returns the algorithm of the private key of a new root, or of a key for tokens with the algorithm alg.
func (a *Authority) keyAlgorithm(kind rotation.Kind, alg string) string {
	switch named := a.cfg.Rotation.named(kind); kind {
	case rotation.Root:
		return cmp.Or(named, "ecdsa-p256")
	case rotation.Quantum:
		if active := a.known().In(kind, rotation.Active); named == "" && active != nil { // as the one before
			named = mldsa.Name(active.Cert.PublicKey)
		}
		return cmp.Or(named, "ml-dsa-65")
	}
	keys := map[string]string{"ES256": "ecdsa-p256", "ES384": "ecdsa-p384", "ES512": "ecdsa-p521",
		"ML-DSA-44": "ml-dsa-44", "ML-DSA-65": "ml-dsa-65"}
	return cmp.Or(keys[alg], "rsa-2048")
}

// named returns the algorithm that KeyAlgorithm has for a kind of root, or "".
func (r *Rotation) named(kind rotation.Kind) string {
	for name := range strings.SplitSeq(r.KeyAlgorithm, ",") {
		if kind != rotation.Token && strings.HasPrefix(name, "ml-dsa") == (kind == rotation.Quantum) {
			return name
		}
	}
	return ""
}

// newKey makes a root, or a key for tokens with the algorithm alg, whose private key is in the store.
func (a *Authority) newKey(kind rotation.Kind, alg string) (k rotation.Key, err error) {
	var signer crypto.Signer
	if algorithm := a.keyAlgorithm(kind, alg); algorithm == "ecdsa-p521" {
		signer, err = ecdsa.GenerateKey(elliptic.P521(), rand.Reader)
	} else {
		signer, err = pki.NewKey(algorithm)
	}
	if err == nil {
		k, err = a.keyOf(kind, alg, signer)
	}
	if err != nil {
		return rotation.Key{}, fmt.Errorf("ca: new %v of %s: %w", kind, a.cfg.TrustDomain, err)
	}
	return k, nil
}

// keyOf makes a root or a key for tokens of a private key.
func (a *Authority) keyOf(kind rotation.Kind, alg string, signer crypto.Signer) (rotation.Key, error) {
	if kind == rotation.Token {
		k := rotation.Key{ID: rotation.RandomID(), Algorithm: alg, Public: signer.Public(), Secret: redact.Seal(signer)}
		if a.cfg.JWT != nil {
			k.Terms = a.cfg.terms(kind)
		}
		return k, nil
	}
	now := time.Now()
	o := pki.CertificateOptions{
		SANs:      []pki.SAN{pki.IDSAN(a.cfg.TrustDomain.ID())},
		NotBefore: now.Add(-a.cfg.Backdate),
		NotAfter:  now.Add(a.cfg.Rotation.RootTTL),
	}
	if a.cfg.Rotation.Constrain {
		o.PermittedTrustDomains = []spiffe.TrustDomain{a.cfg.TrustDomain}
	}
	issuer, err := pki.NewRoot(signer, o)
	if err != nil {
		return rotation.Key{}, err
	}
	return rotation.Key{ID: rotation.Serial(issuer.Certificate()), Cert: issuer.Certificate(), Issuer: issuer,
		Secret: redact.Seal(signer), Terms: a.cfg.terms(kind)}, nil
}
