package ca

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/svidkit/svidkit/pki"
)

// Errors of the methods that change which keys there are.
var (
	// ErrRotating says that a rotation cannot start, because one is under way.
	ErrRotating = errors.New("a rotation is under way")

	// ErrActive says that a key cannot be revoked, because it is the one that signs.
	ErrActive = errors.New("the key is active")

	// ErrUnknownKey says that there is no root with this serial number, and no JWT key with this ID.
	ErrUnknownKey = errors.New("no such key")

	// ErrPluggedIn says that the roots are those of files, which whoever wrote them has to change.
	ErrPluggedIn = errors.New("the roots are plugged in")
)

// maxKeys bounds the roots and the JWT keys in the bundle: every verifier of the trust domain parses
// and searches it.
const maxKeys = 64

// Phase is the place of a root, or of a JWT key, in a rotation. A key moves forward only, except
// that a Distributing one waits anew when nobody was there to distribute it; see [Open].
type Phase int

// The phases of a key that is in the bundle. Before Distributing a key does not exist; after
// Retiring it is out of the bundle and the authority has forgotten it.
const (
	// Distributing keys are in the bundle, so that verifiers learn of them, and sign nothing yet.
	Distributing Phase = iota + 1
	// Active is the phase of the one key that signs.
	Active
	// Retiring keys sign nothing any more and wait in the bundle for the last leaf or token that
	// they signed to expire. Their private keys are gone.
	Retiring
	// Trusted roots are in the bundle on somebody else's word, and never sign: further roots of a
	// CA that was adopted, until they expire, and those of a plugged-in CA.
	Trusted
)

var phaseNames = []string{"", "distributing", "active", "retiring", "trusted"}

// String returns the name of the phase in lower case.
func (p Phase) String() string {
	if p > 0 && int(p) < len(phaseNames) {
		return phaseNames[p]
	}
	return fmt.Sprintf("Phase(%d)", int(p))
}

// MarshalText returns the name of the phase. What is not one of the constants is an error.
func (p Phase) MarshalText() ([]byte, error) {
	if p <= 0 || int(p) >= len(phaseNames) {
		return nil, fmt.Errorf("ca: %v is not a phase", p)
	}
	return []byte(phaseNames[p]), nil
}

// UnmarshalText reads what MarshalText writes, and nothing else.
func (p *Phase) UnmarshalText(text []byte) error {
	i := slices.Index(phaseNames, string(text))
	if i <= 0 {
		return fmt.Errorf("ca: %.32q is not a phase", text)
	}
	*p = Phase(i)
	return nil
}

// RootStatus describes one root of an [Authority]. It is a copy and holds no secret. Its times are
// the wall clock's.
type RootStatus struct {
	Phase       Phase
	Certificate *x509.Certificate // shared; do not change
	Prepared    time.Time         // when it joined the bundle
	Activates   time.Time         // when it begins, or began, to sign
	Retires     time.Time         // when it leaves the bundle; zero if nobody knows yet
	Tainted     bool              // its private key may be in wrong hands; see [Authority.Taint]
}

// Serial returns the certificate's serial number in hexadecimal.
func (s RootStatus) Serial() string { return serial(s.Certificate) }

// String says in words what the root does and when that changes, such as
// "root 5d1c…: distributing, signs from 2000-01-01T00:25:00Z".
func (s RootStatus) String() string {
	return describe("root "+s.Serial(), s.Phase, s.Tainted, s.Activates, s.Retires)
}

// JWTKeyStatus describes one key for JWT-SVIDs of an [Authority]. It is a copy and holds no secret.
type JWTKeyStatus struct {
	KeyID     string
	Algorithm string // "alg" of the tokens
	PublicKey crypto.PublicKey
	Phase     Phase
	Prepared  time.Time // when it joined the bundle
	Activates time.Time // when it begins, or began, to sign
	Retires   time.Time // when it leaves the bundle; zero before it is Retiring
	Tainted   bool      // its private key may be in wrong hands; see [Authority.Taint]
}

// String says in words what the key does and when that changes.
func (s JWTKeyStatus) String() string {
	return describe("JWT key "+s.KeyID, s.Phase, s.Tainted, s.Activates, s.Retires)
}

func describe(who string, p Phase, tainted bool, activates, retires time.Time) string {
	what := who + ": " + p.String()
	if tainted {
		what += ", tainted"
	}
	switch {
	case p == Distributing:
		return what + ", signs from " + activates.UTC().Format(time.RFC3339)
	case p == Active:
		return what + " since " + activates.UTC().Format(time.RFC3339)
	case !retires.IsZero():
		return what + ", leaves the bundle at " + retires.UTC().Format(time.RFC3339)
	}
	return what
}

// key is a root or a JWT key, and its place in the rotation. Its value never changes: a step makes a
// new one.
type key struct {
	id string // the serial number of a root in hexadecimal, or the key ID

	cert   *x509.Certificate // of a root; nil for a JWT key
	issuer *pki.Issuer       // of a root that may sign

	algorithm string           // of a JWT key
	public    crypto.PublicKey // of a JWT key

	secret func() crypto.Signer // nil once retiring: what must not sign any more cannot

	phase     Phase
	prepared  time.Time
	activates time.Time
	retires   time.Time // zero before it is retiring
	terms

	tainted    bool
	taintGrace time.Duration

	met   time.Time // when this process came to know of a distributing key; not stored
	shown bool      // a process has had the distributing key in its bundle for shownAfter
}

// shownAfter is how long a running authority has a key in its bundle before it says so in the store.
// With the default Propagation it is two refreshes: all who poll have the key.
func (k key) shownAfter() time.Duration { return k.propagation - k.wantsLeft() }

// wantsLeft is what a process that meets a key which nobody has shown wants to see left of its time
// to be distributed: three refreshes by default (FED-3).
func (k key) wantsLeft() time.Duration { return k.propagation / 5 * 3 }

// terms are what all who share a store have to respect in one another. They only grow while a key
// lives.
type terms struct {
	longest     time.Duration // the longest lifetime that anybody may grant under the key
	grace       time.Duration // how much longer verifiers with slow clocks accept what it signed
	propagation time.Duration // its successor is in the bundle for at least as long before it signs
}

func (t terms) raise(other terms) terms {
	return terms{max(t.longest, other.longest), max(t.grace, other.grace), max(t.propagation, other.propagation)}
}

func (k key) status() RootStatus {
	return RootStatus{
		Phase: k.phase, Certificate: k.cert, Tainted: k.tainted,
		Prepared:  k.prepared.Round(0), // without the monotonic reading, which means nothing to others
		Activates: k.activates.Round(0),
		Retires:   k.retires.Round(0),
	}
}

func (k key) jwtStatus() JWTKeyStatus {
	return JWTKeyStatus{
		KeyID: k.id, Algorithm: k.algorithm, PublicKey: k.public, Phase: k.phase, Tainted: k.tainted,
		Prepared: k.prepared.Round(0), Activates: k.activates.Round(0), Retires: k.retires.Round(0),
	}
}

// what names the kind of the key.
func (k key) what() string {
	if k.cert == nil {
		return "JWT key"
	}
	return "root"
}

// due returns when the key takes its next step by time; zero for never. The active key waits for
// another one.
func (k key) due() time.Time {
	switch k.phase {
	case Distributing:
		return k.activates
	case Retiring, Trusted:
		return k.retires
	}
	return time.Time{}
}

// nextStep returns when the first of keys takes its next step by time; zero for never.
func nextStep(keys []key) time.Time {
	var first time.Time
	for _, k := range keys {
		if t := k.due(); !t.IsZero() && (first.IsZero() || t.Before(first)) {
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

// anchor gives t a reading of the monotonic clock: that of now, and of the time between the two.
func anchor(now, t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return now.Add(t.Sub(now.Round(0)))
}

// retired returns k as it is when another key takes over at the time at.
//
// Who signs alone knows the end of the last thing that the key signed, or that it signed nothing
// (zero), and gives it as last. Those that share a store do not know what the others signed, and
// give nil: then the key stays for the longest life that anybody may have granted until then.
func (k key) retired(last *time.Time, at time.Time) key {
	end := at.Add(k.longest).Add(k.grace)
	if last != nil {
		end = at
		if e := last.Add(k.grace); !last.IsZero() && e.After(at) {
			end = e
		}
	}
	if k.tainted {
		end = earlier(end, at.Add(k.taintGrace))
	}
	k.phase, k.issuer, k.secret, k.retires = Retiring, nil, nil, end
	return k
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// step is what happened to the keys of one kind at one time.
type step struct {
	at        time.Time
	activated *key  // the new active key, or nil
	retired   []key // the keys that left the bundle
}

// advance returns keys as they are at now, and the steps that lead there, one for each moment at
// which something happened: the result is the same however late and however often it is called, and
// for everybody who has the same keys. For last see [key.retired]. Phases only move forward: a now
// that is earlier than the last one changes nothing. keys is not changed.
func advance(keys []key, last *time.Time, now time.Time) ([]key, []step) {
	var steps []step
	for {
		at := nextStep(keys)
		if at.IsZero() || !reached(now, at) {
			return keys, steps
		}
		st := step{at: at}
		activates := slices.ContainsFunc(keys, func(k key) bool { return k.phase == Distributing && !at.Before(k.activates) })
		after := make([]key, 0, len(keys))
		for _, k := range keys {
			switch {
			case activates && k.phase == Active:
				k = k.retired(last, at)
			case activates && k.phase == Distributing:
				k.phase = Active
				st.activated = &k
			}
			if (k.phase == Retiring || k.phase == Trusted) && !k.retires.IsZero() && !at.Before(k.retires) {
				st.retired = append(st.retired, k)
				continue
			}
			after = append(after, k)
		}
		if activates && last != nil {
			last = new(time.Time) // the new key has signed nothing
		}
		keys, steps = after, append(steps, st)
	}
}

// Rotate prepares a new root and puts it into the bundle. The other steps follow by themselves: see
// the package comment. It returns the new root, whose Activates says when it begins to sign. The
// error wraps [ErrRotating] while an earlier rotation has not come to its activation, and when the
// bundle already holds 64 roots, as old ones wait for their leaves to expire; [ErrPluggedIn] if the
// roots are not the authority's own; and the error of the store, which leaves everything as it was,
// unless the store did what it said it could not: then the root shows with the next look at it.
//
// With [Config.KeepKey] Rotate renews the active root's certificate instead, and returns that.
func (a *Authority) Rotate(ctx context.Context) (RootStatus, error) {
	const op = "rotate"
	s := a.current()
	if a.files != nil {
		return RootStatus{}, a.opError(op, ErrPluggedIn)
	}
	renews := a.cfg.KeepKey && !s.roots[inPhase(s.roots, Active)].tainted
	if err := a.mayRotate(ctx, op, s.roots, !renews); err != nil {
		return RootStatus{}, err
	}
	if renews {
		return a.renew(ctx)
	}
	fresh, err := a.newRoot() // before any lock: an RSA key takes its time
	if err != nil {
		return RootStatus{}, err
	}
	var prepared key
	err = a.update(ctx, func(d *document, now time.Time) error {
		if err := a.mayRotate(ctx, op, d.roots, true); err != nil { // another one may have been faster
			return err
		}
		prepared = a.prepare(&d.roots, fresh, now)
		d.sequence++
		return nil
	})
	if err != nil {
		return RootStatus{}, a.opError(op, err)
	}
	prepared = a.latest(prepared)
	a.logPrepared(ctx, prepared)
	return prepared.status(), nil
}

// RotateJWT prepares a new key for JWT-SVIDs and puts it into the bundle, and is otherwise as
// [Authority.Rotate]. The error wraps [ErrNoJWT] if [Config.JWT] is nil.
func (a *Authority) RotateJWT(ctx context.Context) (JWTKeyStatus, error) {
	const op = "rotate the JWT key of"
	if a.cfg.JWT == nil {
		return JWTKeyStatus{}, a.opError(op, ErrNoJWT)
	}
	if err := a.mayRotate(ctx, op, a.current().jwt, true); err != nil {
		return JWTKeyStatus{}, err
	}
	fresh, err := a.newJWTKey()
	if err != nil {
		return JWTKeyStatus{}, err
	}
	var prepared key
	err = a.update(ctx, func(d *document, now time.Time) error {
		if err := a.mayRotate(ctx, op, d.jwt, true); err != nil {
			return err
		}
		prepared = a.prepare(&d.jwt, fresh, now)
		d.sequence++
		return nil
	})
	if err != nil {
		return JWTKeyStatus{}, a.opError(op, err)
	}
	prepared = a.latest(prepared)
	a.logPrepared(ctx, prepared)
	return prepared.jwtStatus(), nil
}

// prepare adds fresh to the set, to be active when all have heard of it.
func (a *Authority) prepare(set *[]key, fresh key, now time.Time) key {
	wait := a.cfg.Propagation
	if i := inPhase(*set, Active); i >= 0 {
		wait = max(wait, (*set)[i].propagation)
	}
	fresh.phase, fresh.prepared, fresh.activates, fresh.met = Distributing, now, now.Add(wait), now
	*set = append(*set, fresh)
	return fresh
}

// latest returns k as it is now: a slow store may have made it wait longer.
func (a *Authority) latest(k key) key {
	if set, i := a.current().find(k.id); i >= 0 {
		return (*set)[i]
	}
	return k
}

func (a *Authority) logPrepared(ctx context.Context, k key) {
	a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, k.what()+" prepared", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String(k.idName(), k.id), slog.Time("activates", k.activates.Round(0)))
}

func (k key) idName() string {
	if k.cert == nil {
		return "key_id"
	}
	return "serial"
}

// mayRotate says why no rotation can start now. Room is needed for one that adds a key.
func (a *Authority) mayRotate(ctx context.Context, op string, keys []key, adds bool) error {
	if ctx.Err() != nil {
		return a.opError(op, context.Cause(ctx))
	}
	if i := inPhase(keys, Distributing); i >= 0 {
		return a.opError(op, fmt.Errorf("%w: %s %s activates at %s", ErrRotating, keys[i].what(), keys[i].id, keys[i].activates.UTC().Format(time.RFC3339)))
	}
	if len(keys) >= maxKeys && adds {
		return a.opError(op, fmt.Errorf("%w: %d %ss are in the bundle, the next one to retire does so at %s", ErrRotating, len(keys), keys[0].what(), nextStep(keys).UTC().Format(time.RFC3339)))
	}
	return nil
}

// opError says what failed, once.
func (a *Authority) opError(op string, err error) error {
	if _, ok := errors.AsType[*opError](err); ok {
		return err
	}
	return &opError{op: op + " " + a.cfg.TrustDomain.String(), err: err}
}

type opError struct {
	op  string
	err error
}

func (e *opError) Error() string { return "ca: " + e.op + ": " + e.err.Error() }
func (e *opError) Unwrap() error { return e.err }

// renew replaces the certificate of the active root by a new one with the same key and subject. What
// either certificate's key signed verifies with the other one, so that no step has to wait.
func (a *Authority) renew(ctx context.Context) (RootStatus, error) {
	const op = "renew the root of"
	var renewed key
	err := a.update(ctx, func(d *document, now time.Time) error {
		if i := inPhase(d.roots, Distributing); i >= 0 {
			return fmt.Errorf("%w: root %s activates at %s", ErrRotating, d.roots[i].id, d.roots[i].activates.UTC().Format(time.RFC3339))
		}
		i := inPhase(d.roots, Active)
		old := d.roots[i]
		if old.tainted {
			return fmt.Errorf("%w: root %s was tainted just now, and its key needs a successor", ErrRotating, old.id)
		}
		issuer, err := old.issuer.Renew(now.Add(-a.cfg.Backdate), now.Add(a.cfg.RootTTL))
		if err != nil {
			return err
		}
		renewed = old
		renewed.issuer, renewed.cert, renewed.id = issuer, issuer.Certificate(), serial(issuer.Certificate())
		renewed.prepared, renewed.activates = now, now
		if !sameAuthority(old.cert, renewed.cert) {
			return fmt.Errorf("the new certificate of root %s has another key or subject", old.id)
		}
		d.roots[i] = renewed
		d.sequence++
		return nil
	})
	if err != nil {
		return RootStatus{}, a.opError(op, err)
	}
	a.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "root renewed", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String("serial", renewed.id), slog.Time("not_after", renewed.cert.NotAfter))
	return renewed.status(), nil
}

// Taint says that the private key of a root, named by its serial number in hexadecimal, or of a JWT
// key, named by its key ID, may be in wrong hands. It is for the case that what the key signed in
// good faith shall go on working for a while; where it must not, follow with [Authority.Revoke].
//
// An active key gets a successor at once, as by Rotate, unless one is on its way; when that signs,
// the tainted key stays in the bundle for no longer than [Config.TaintGrace], in which everybody who
// renews at half of the default lifetime has done so. A distributing key leaves the bundle at once, and
// another one is prepared in its place. A retiring or trusted one leaves after TaintGrace at the latest.
// The successor of a JWT key comes from a replica that signs JWT-SVIDs, when it has read the store.
//
// To taint a key twice changes nothing. The error wraps [ErrUnknownKey], [ErrPluggedIn] for a root
// that is plugged in, or the error of the store.
func (a *Authority) Taint(ctx context.Context, id string) error {
	const op = "taint a key of"
	k, err := a.keyWithID(id)
	if err != nil {
		return a.opError(op, err)
	}
	needsSuccessor := func(set []key, p Phase) bool {
		if k.cert == nil && a.cfg.JWT == nil {
			return false // Run of those that sign tokens prepares it
		}
		// A full bundle has no room for one; Run prepares it as soon as there is some.
		return p == Distributing || p == Active && inPhase(set, Distributing) < 0 && len(set) < maxKeys
	}
	var successor key
	if set, _ := a.current().find(id); set != nil && needsSuccessor(*set, k.phase) {
		if successor, err = a.freshLike(k); err != nil { // before any lock
			return a.opError(op, err)
		}
	}
	var prepared, changed bool
	err = a.update(ctx, func(d *document, now time.Time) error {
		prepared, changed = false, false
		set, i := d.find(id)
		if i < 0 || (*set)[i].tainted {
			return errNoChange
		}
		changed = true
		k := (*set)[i]
		k.tainted, k.taintGrace = true, a.cfg.TaintGrace
		prepared = needsSuccessor(*set, k.phase)
		if end := now.Add(k.taintGrace); (k.phase == Retiring || k.phase == Trusted) && (k.retires.IsZero() || end.Before(k.retires)) {
			k.retires = end
		}
		if k.phase == Distributing {
			*set = slices.Delete(*set, i, i+1)
		} else {
			(*set)[i] = k
		}
		if !prepared {
			return nil
		}
		if successor.id == "" {
			var err error
			if successor, err = a.freshLike(k); err != nil {
				return err
			}
		}
		successor = a.prepare(set, successor, now)
		d.sequence++
		return nil
	})
	if err != nil {
		return a.opError(op, err)
	}
	if changed {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, k.what()+" tainted", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String(k.idName(), id))
	}
	if prepared {
		a.logPrepared(ctx, a.latest(successor))
	}
	return nil
}

// Revoke takes a root, named by its serial number in hexadecimal, or a JWT key, named by its key ID,
// out of the bundle now. From then on what it signed is refused by whoever has the new bundle. The
// active key is not revoked: the error wraps [ErrActive], and the way is to taint it, and to revoke
// it when its successor signs. Other errors are those of [Authority.Taint].
func (a *Authority) Revoke(ctx context.Context, id string) error {
	const op = "revoke a key of"
	k, err := a.keyWithID(id)
	if err != nil {
		return a.opError(op, err)
	}
	changed := false
	err = a.update(ctx, func(d *document, _ time.Time) error {
		set, i := d.find(id)
		if changed = i >= 0; !changed {
			return errNoChange
		}
		if (*set)[i].phase == Active {
			return fmt.Errorf("%s %s: %w; taint it, and revoke it when its successor signs", k.what(), id, ErrActive)
		}
		*set = slices.Delete(*set, i, i+1)
		d.sequence++
		return nil
	})
	if err != nil {
		return a.opError(op, err)
	}
	if changed {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, k.what()+" revoked", slog.Any("trust_domain", a.cfg.TrustDomain), slog.String(k.idName(), id))
	}
	return nil
}

// keyWithID returns the key with this ID.
func (a *Authority) keyWithID(id string) (key, error) {
	s := a.current()
	if set, i := s.find(id); i >= 0 {
		return (*set)[i], nil
	}
	if a.files != nil && slices.ContainsFunc(s.plugged.roots, func(c *x509.Certificate) bool { return serial(c) == id }) {
		return key{}, fmt.Errorf("root %.64q: %w; change the files", id, ErrPluggedIn)
	}
	return key{}, fmt.Errorf("%w: %.64q", ErrUnknownKey, id)
}

// freshLike returns a new key of the same kind.
func (a *Authority) freshLike(k key) (key, error) {
	if k.cert != nil {
		return a.newRoot()
	}
	return a.newJWTKey()
}

// rotateAt returns when Run replaces the active root. Only the certificate's dates count here, so the
// result is for comparison with the wall clock.
//
// With four steps it is when Propagation, MaxTTL and the grace ratio of the root's life are left,
// but not in the first half of its life. With KeepKey it is when the grace ratio is left.
func (cfg *Config) rotateAt(active *x509.Certificate) time.Time {
	life := min(cfg.RootTTL, active.NotAfter.Sub(active.NotBefore)) // that of a root from elsewhere may be short
	half, share := life/2, time.Duration(float64(life)*cfg.GraceRatio)
	if cfg.KeepKey {
		return active.NotAfter.Add(-share)
	}
	if longest := cfg.longest(); longest < half-share-cfg.Propagation { // so written that no sum overflows
		return active.NotAfter.Add(-(cfg.Propagation + longest + share))
	}
	return active.NotAfter.Add(-half)
}

// rotateJWTAt returns when Run prepares the successor of the active JWT key: so that it signs when
// the active one has done so for KeyTTL.
func (cfg *Config) rotateJWTAt(active key) time.Time {
	return active.activates.Add(cfg.JWT.KeyTTL - cfg.Propagation)
}

// Waits of Run.
const (
	longestSleep = time.Hour   // the wall clock may have been set meanwhile
	rotateRetry  = time.Minute // after a rotation that could not start
)

// Run does what comes due, until ctx is done.
//
// It takes the steps of rotations at their time, so that [Authority.Changed] tells of them. It
// starts a rotation when the active root comes near its end: when no more is left than Propagation,
// MaxTTL and GraceRatio of the root's life together, but never before half of its life; at once if
// it is tainted; and when the active JWT key has almost had its KeyTTL. As [New] demands that
// Propagation and DefaultTTL fit into half of RootTTL, a leaf of the default lifetime is never cut
// short by the end of its root while Run runs.
//
// With a store, it reads the record every SyncInterval, follows what others wrote, and writes down
// what time has done. With plugged-in files, it looks at them every ReloadInterval.
//
// Run returns context.Cause(ctx) when ctx is done, and nothing else ends it: what fails is logged
// and tried again, and what was there before goes on working. One Run is enough; more do no harm.
func (a *Authority) Run(ctx context.Context) error {
	r := runner{a: a, nextSync: time.Now().Add(a.syncWait()), nextFiles: time.Now(), nextCheck: time.Now()}
	if a.cfg.KeepKey {
		r.nextCheck = time.Now().Add(a.cfg.CheckInterval)
		if !a.cfg.NoJitter {
			r.nextCheck = r.nextCheck.Add(rand.N(a.cfg.CheckInterval))
		}
	}
	for ctx.Err() == nil {
		s := a.current()
		wait := r.work(ctx, s)
		if ctx.Err() != nil {
			break
		}
		timer := time.NewTimer(max(wait, 0))
		select {
		case <-ctx.Done():
		case <-s.changed:
		case <-timer.C:
		}
		timer.Stop()
	}
	return context.Cause(ctx)
}

// runner is what one Run remembers.
type runner struct {
	a         *Authority
	nextSync  time.Time // when to read the store
	nextFiles time.Time // when to look at the files
	nextCheck time.Time // of a root that keeps its key
	nextTry   time.Time // of a rotation that failed
	stuck     *state    // the state that could not be written down
}

// work does what is due at s and returns how long to wait, unless something changes before.
func (r *runner) work(ctx context.Context, s *state) time.Duration {
	a, wait := r.a, longestSleep
	until := func(t time.Time) { wait = min(wait, time.Until(t)) }
	if s.next.IsZero() {
	} else if left := max(time.Until(s.next), time.Until(s.next.Round(0))); left > 0 {
		wait = min(wait, left) // both clocks have to reach the step, so the longer wait counts
	} else {
		return 0
	}
	if a.files != nil {
		if time.Until(r.nextFiles) <= 0 {
			r.nextFiles = time.Now().Add(a.files.look(ctx))
		}
		until(r.nextFiles)
	}
	if a.store != nil {
		if due := time.Until(r.nextSync) <= 0; due || s.dirty && r.stuck != s {
			r.nextSync, r.stuck = time.Now().Add(a.syncWait()), nil
			if err := a.update(ctx, nil); err != nil {
				r.stuck = a.state.Load()
			}
			return 0
		}
		until(r.nextSync)
	}
	if a.store != nil {
		left, err := r.show(ctx, s)
		if err != nil {
			left = a.cfg.SyncInterval // another replica may do it
		}
		wait = min(wait, left)
	}
	if a.cfg.ManualRotation {
		return wait
	}
	if time.Until(r.nextTry) > 0 {
		until(r.nextTry)
		return wait
	}
	if at, ok := r.rotation(s); !ok {
		// One is under way.
	} else if time.Until(at) > 0 {
		until(at)
	} else {
		_, err := a.Rotate(ctx)
		return r.rotated(ctx, "root rotation failed", err)
	}
	if a.cfg.JWT == nil || inPhase(s.jwt, Distributing) >= 0 {
		return wait
	}
	if i := inPhase(s.jwt, Active); i >= 0 {
		if at := a.cfg.rotateJWTAt(s.jwt[i]); time.Until(at.Round(0)) > 0 && !s.jwt[i].tainted {
			until(at.Round(0))
			return wait
		}
		_, err := a.RotateJWT(ctx)
		return r.rotated(ctx, "JWT key rotation failed", err)
	}
	return wait
}

// show writes down which distributing keys have been in the bundle of this process for long enough,
// so that a process that comes later does not have to take them for unknown to everybody. It returns
// how long to wait for the next one.
func (r *runner) show(ctx context.Context, s *state) (time.Duration, error) {
	left := longestSleep
	due := false
	for _, set := range [][]key{s.roots, s.jwt} {
		if i := inPhase(set, Distributing); i >= 0 && !set[i].shown {
			wait := time.Until(set[i].met.Add(set[i].shownAfter()))
			due = due || wait <= 0
			left = min(left, max(wait, 0))
		}
	}
	if !due {
		return left, nil
	}
	return 0, r.a.update(ctx, func(d *document, now time.Time) error {
		err := errNoChange
		for _, set := range [][]key{d.roots, d.jwt} {
			if i := inPhase(set, Distributing); i >= 0 && !set[i].shown && now.Sub(set[i].met) >= set[i].shownAfter() {
				set[i].shown, err = true, errRemark
			}
		}
		return err
	})
}

// rotation returns when to replace the active root, and whether that is for Run to do at all.
func (r *runner) rotation(s *state) (time.Time, bool) {
	i := inPhase(s.roots, Active)
	if i < 0 || inPhase(s.roots, Distributing) >= 0 {
		return time.Time{}, false
	}
	at := r.a.cfg.rotateAt(s.roots[i].cert)
	switch {
	case s.roots[i].tainted: // there was no room for a successor
		return time.Time{}, true
	case !r.a.cfg.KeepKey:
		return at, true
	case time.Until(r.nextCheck) > 0:
		return r.nextCheck, true
	}
	r.nextCheck = time.Now().Add(r.a.cfg.CheckInterval)
	if time.Until(at) <= 0 {
		return at, true
	}
	return r.nextCheck, true
}

// rotated returns how long to wait after an attempt to rotate.
func (r *runner) rotated(ctx context.Context, what string, err error) time.Duration {
	if err == nil || ctx.Err() != nil {
		return 0
	}
	if !errors.Is(err, ErrRotating) {
		r.a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, what, slog.Any("trust_domain", r.a.cfg.TrustDomain), slog.Any("err", err), slog.Duration("retry_in", rotateRetry))
	}
	r.nextTry = time.Now().Add(rotateRetry)
	r.nextCheck = r.nextTry
	return rotateRetry
}
