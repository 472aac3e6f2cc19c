package ca

import (
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Rotate prepares a new root and puts it into the bundle. The other steps follow automatically: see the package
// comment. It returns the new root, whose Activates says when it starts to sign.
//
// The error wraps [ErrRotating] while the root of an earlier rotation does not sign yet, or while the bundle holds 64
// roots because old ones wait for their leaves to expire. After an error of the store nothing has changed, unless the
// store has written anyway: then the next read shows the root. Rotate refuses plugged-in roots.
//
// With [Rotation].KeepKey Rotate renews the active root's certificate instead, and returns that. Of two kinds of roots
// it rotates both, and returns the classical one.
func (a *Authority) Rotate(ctx context.Context) (KeyStatus, error) {
	if a.files != nil {
		return KeyStatus{}, a.opError("rotate",
			fmt.Errorf("%w; replace the files with those of another CA", errPluggedIn))
	}
	primary := a.current().active()
	first, err := a.rotate(ctx, asked, "rotate", primary.Kind())
	if second := a.current().In(rotation.Quantum, rotation.Active); second != nil && primary.Kind() != rotation.Quantum {
		_, failed := a.rotate(ctx, asked, "rotate", rotation.Quantum)
		err = cmp.Or(err, failed)
	}
	return first, err
}

// RotateJWT is [Authority.Rotate] for the key of JWT-SVIDs. The error wraps [ErrNoJWT] if [Config.JWT] is nil.
func (a *Authority) RotateJWT(ctx context.Context) (KeyStatus, error) {
	const op = "rotate the JWT key of"
	if a.cfg.JWT == nil {
		return KeyStatus{}, a.opError(op, ErrNoJWT)
	}
	return a.rotate(ctx, asked, op, rotation.Token)
}

func (a *Authority) rotate(ctx context.Context, why, op string, kind rotation.Kind) (KeyStatus, error) {
	defer a.settle(ctx)
	if ctx.Err() != nil {
		return KeyStatus{}, a.opError(op, context.Cause(ctx))
	}
	s := a.current()
	from := s.In(kind, rotation.Active)
	renews := kind != rotation.Token && a.cfg.Rotation.KeepKey && from != nil && !from.Tainted
	if err := s.MayPrepare(kind, !renews); err != nil {
		return KeyStatus{}, a.opError(op, err)
	}
	if renews {
		return a.renew(ctx, why, from)
	}
	fresh, err := a.makeKey(ctx, kind, a.alg(kind)) // before any lock: a key takes its time
	if err != nil {
		return KeyStatus{}, a.opError(op, err)
	}
	err = a.update(ctx, why, func(d *rotation.Document, now time.Time) error {
		if d.Find(fresh.ID) != nil { // an earlier attempt was written, and a change of its times was not
			return errNoChange
		}
		if err := d.MayPrepare(kind, true); err != nil { // another rotation may have been faster
			return err
		}
		fresh = d.Prepare(fresh, a.cfg.Rotation.Propagation, now)
		return nil
	})
	if err != nil {
		return KeyStatus{}, a.opError(op, err)
	}
	if now := a.current().Find(fresh.ID); now != nil { // a slow store may have made it wait longer
		fresh = *now
	}
	return status(fresh), nil
}

// opError returns err with the failed operation.
func (a *Authority) opError(op string, err error) error {
	return fmt.Errorf("ca: %s %s: %w", op, a.cfg.TrustDomain, within(err))
}

// renew replaces the active root's certificate by a new one with the same key and subject. Leaves verify with either
// certificate, so no step has to wait.
func (a *Authority) renew(ctx context.Context, why string, from *rotation.Key) (KeyStatus, error) {
	now := time.Now()
	var issuer *pki.Issuer
	err := a.use(ctx, from, func() (err error) {
		issuer, err = from.Issuer.Renew(now.Add(-a.cfg.Backdate), now.Add(a.cfg.Rotation.RootTTL))
		return err
	})
	if err != nil {
		return KeyStatus{}, a.opError("renew the root of", err)
	}
	var renewed rotation.Key
	err = a.update(ctx, why, func(d *rotation.Document, now time.Time) error {
		if err := d.MayPrepare(from.Kind(), false); err != nil {
			return err
		}
		old := d.In(from.Kind(), rotation.Active)
		switch {
		case old == nil:
			return errors.New("its kind was ended just now")
		case old.Tainted:
			return fmt.Errorf("%w: root %s was tainted just now, and its key needs a successor", ErrRotating, old.ID)
		case old.ID != from.ID:
			return fmt.Errorf("%w: root %s has replaced root %s", ErrRotating, old.ID, from.ID)
		}
		cert := issuer.Certificate()
		renewed = *old
		renewed.Issuer, renewed.Cert, renewed.ID = issuer, cert, rotation.Serial(cert)
		renewed = d.Renew(renewed, now)
		return nil
	})
	if err != nil {
		return KeyStatus{}, a.opError("renew the root of", err)
	}
	return status(renewed), nil
}

// Taint marks the private key of a root (id is its serial number in hexadecimal, in any case, with or without colons)
// or of a JWT key (id is its key ID) as possibly stolen. Certificates that the key signed in good faith go on working
// for a while; if they must not, follow with [Authority.Revoke].
//
// An active key gets a successor at once, as in Rotate, unless a rotation is under way. Once the successor signs, the
// tainted key stays in the bundle for at most half of DefaultTTL plus Backdate, in which every workload that renews
// at half of the default lifetime has renewed. A distributing key leaves the bundle at once, and another is prepared
// in its place. A retiring or trusted key leaves after the same time at the latest. The successor of a JWT key comes
// from a replica that signs JWT-SVIDs, once it has read the store. With a [Custodian] the successor comes in a write of
// its own, after the taint; if it cannot be made now, Taint logs that and [Authority.Run] tries again.
//
// When Taint returns, the key is missing from [Authority.CallerBundle]. Taint also marks roots with the same private
// key. Tainting a key twice changes nothing. The error wraps [ErrUnknownKey] or the error of the store, or says that
// the root is plugged in.
func (a *Authority) Taint(ctx context.Context, id string) error {
	const op = "taint a key of"
	k, err := a.keyWithID(id)
	if err != nil {
		return a.opError(op, err)
	}
	kind, id := k.Kind(), k.ID
	defer a.settle(ctx)
	// Run, in a replica that signs tokens, prepares the successor of a JWT key.
	prepares := (kind != rotation.Token || a.cfg.JWT != nil) && a.current().NeedsSuccessor(id)
	var successor rotation.Key
	if prepares && !a.holds {
		if successor, err = a.newKey(kind, a.alg(kind)); err != nil {
			return a.opError(op, err)
		}
	}
	err = a.update(ctx, asked, func(d *rotation.Document, now time.Time) error {
		prepares := successor.ID != "" && d.NeedsSuccessor(id)
		if !d.Taint(id, a.taintGrace, now) {
			return errNoChange
		}
		if prepares {
			successor = d.Prepare(successor, a.cfg.Rotation.Propagation, now)
		}
		return nil
	})
	if err != nil {
		return a.opError(op, err)
	}
	if prepares && a.holds { // afterwards, as the taint must not wait for a custodian
		if _, err := a.rotate(ctx, asked, "replace", kind); err != nil && !errors.Is(err, ErrRotating) {
			a.cfg.Logger.LogAttrs(ctx, slog.LevelError, "a tainted key has no successor yet", slog.Any("err", err))
		}
	}
	return nil
}

// Revoke removes a root (id is its serial number in hexadecimal) or a JWT key (id is its key ID) from the bundle, with
// each root that has the same private key. Verifiers with the new bundle refuse everything that it signed. It returns
// what it did, and the cost, as a sentence for the operator.
//
// The key that signs is refused: taint it, and revoke it once its successor signs. With now, Revoke accepts it, too:
// use that for a key that is known to be stolen. In the same write its successor becomes active: the key that was
// being distributed, or else a new one. It skips the rotation steps that keep handshakes from failing, which has a
// cost:
//
//   - A verifier that has read the bundle refuses everything that the revoked key signed, and so each workload that
//     has not renewed.
//   - A verifier that has not read the bundle refuses everything that the successor signs, for up to Propagation. A
//     fully distributed successor costs nothing.
//   - A replica that has not read the store yet (30 seconds) goes on signing with the revoked key and shows the old
//     bundle.
//
// Otherwise the key stays trusted for Propagation and half of DefaultTTL. The successor always has another key, even
// with [Rotation].KeepKey. A JWT key's successor has the same algorithm; this authority makes it even if it signs no
// tokens. Errors are as in [Authority.Taint]; a failure of the Auditor prevents nothing.
func (a *Authority) Revoke(ctx context.Context, id string, now bool) (done string, err error) {
	const op = "revoke a key of"
	k, err := a.keyWithID(id)
	if err != nil {
		return "", a.opError(op, err)
	}
	id = k.ID
	defer a.settle(ctx)
	var successor func() (rotation.Key, error)
	if now {
		fresh, err := a.newSuccessor(ctx, &k)
		successor = func() (rotation.Key, error) { return fresh, err }
	}
	var made *rotation.Key
	err = a.update(ctx, asked, func(d *rotation.Document, at time.Time) (err error) {
		old := d.Find(id)
		if made = nil; old == nil {
			return errNoChange
		}
		k = *old
		made, err = d.Revoke(id, successor, at)
		if errors.Is(err, rotation.ErrActive) {
			err = fmt.Errorf("%w; taint it, and revoke it when its successor signs, or revoke it now although it "+
				"signs", err)
		}
		return err
	})
	if err != nil {
		return "", a.opError(op, err)
	}
	done = revoked(&k, made)
	if made != nil {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "the active key was revoked", slog.String("cost", done))
	}
	return done, nil
}

// revoked describes the revocation of k, and its cost if k was active, so that made signs now.
func revoked(k, made *rotation.Key) string {
	text := fmt.Sprintf("%v %s is revoked: verifiers that have read the bundle since refuse everything that it signed",
		k.Kind(), k.ID)
	if made == nil {
		return text
	}
	text += fmt.Sprintf("; %v %s signs in its place", k.Kind(), made.ID)
	if known := made.Prepared.Add(made.Propagation); time.Until(known) > 0 {
		text += ", and verifiers that have not read the bundle refuse what it signs, until " +
			known.UTC().Format(time.RFC3339) + " at the latest"
	}
	return text + "; make all workloads renew"
}

// newSuccessor makes a key that can replace k, if it signs and nothing is to replace it yet.
func (a *Authority) newSuccessor(ctx context.Context, k *rotation.Key) (fresh rotation.Key, err error) {
	s := a.current()
	active := s.In(k.Kind(), rotation.Active)
	if active == nil || !active.SameKey(k) || s.In(k.Kind(), rotation.Distributing) != nil {
		return fresh, errors.New("the keys have changed meanwhile; try again")
	}
	fresh, err = a.makeKey(ctx, k.Kind(), cmp.Or(a.alg(k.Kind()), k.Algorithm))
	fresh.Terms = fresh.Terms.Raise(k.Terms)
	return fresh, err
}

// keyWithID returns the key with this ID.
func (a *Authority) keyWithID(id string) (rotation.Key, error) {
	s := a.current()
	for _, k := range slices.Concat(s.Keys[:]...) {
		if plainHex(k.ID) == plainHex(id) {
			return k, nil
		}
	}
	if s.plugged != nil && slices.ContainsFunc(s.plugged.roots,
		func(c *x509.Certificate) bool { return rotation.Serial(c) == plainHex(id) }) {
		return rotation.Key{}, fmt.Errorf("root %.64q: %w; replace the files with those of another CA, without "+
			"this root among theirs", id, errPluggedIn)
	}
	return rotation.Key{}, fmt.Errorf("%w: %.64q", ErrUnknownKey, id)
}

// plainHex converts a hexadecimal number to the form of [rotation.Serial]. Other programs write it in upper case,
// with colons or with leading zeros.
func plainHex(text string) string {
	return strings.TrimLeft(strings.ToLower(strings.ReplaceAll(text, ":", "")), "0")
}

// Waits of Run.
const (
	longestSleep = time.Hour   // the wall clock may be set meanwhile
	rotateRetry  = time.Minute // after a rotation that could not start
)

// Run does the work that comes due, until ctx is done.
//
// It takes the steps of rotations on time, so that [Authority.Changed] announces them. It starts a rotation when the
// active root's remaining lifetime is down to the sum of Propagation, MaxTTL and GraceRatio, but never in the first
// half of its life; at once if the root is tainted; and when the active JWT key nears its KeyTTL. As Propagation and
// DefaultTTL fit into half of RootTTL, a root's end never shortens a leaf of the default lifetime while Run runs.
//
// With a store, it reads the record every 30 seconds, or each quarter of Propagation if that is less, follows other
// writers' changes, and stores the steps that time has taken. With plugged-in files, it follows them.
//
// Run returns nil when ctx is done, and only then: it logs and retries failures, and the CA goes on working as
// before. One Run is enough; more do no harm.
func (a *Authority) Run(ctx context.Context) error {
	var following sync.WaitGroup
	defer following.Wait()
	if a.files != nil {
		following.Go(func() { _ = a.files.follower.Run(ctx) })
	}
	var written renew.Signal
	changed := written.Changed()
	if store, ok := a.store.(watched); ok {
		following.Go(func() { store.Watch(ctx, written.Notify) })
	}
	if a.custody != nil && !a.views() {
		following.Go(func() { a.custody.keep(ctx) })
	}
	r := runner{a: a, nextSync: time.Now().Add(a.syncWait()), ended: make(chan error, 1), beside: following.Go}
	if o := &a.cfg.Rotation; o.KeepKey {
		first := time.Now().Add(o.CheckInterval)
		if !o.NoJitter {
			first = first.Add(rand.N(o.CheckInterval))
		}
		r.nextCheck = [3]time.Time{first, first, first}
	}
	for ctx.Err() == nil {
		s, kept := a.current(), a.events.kept.Changed()
		wait := r.work(ctx, s)
		if a.record(ctx) {
			wait = min(wait, eventRetry)
		}
		select {
		case <-ctx.Done():
		case <-s.changed:
		case <-kept:
		case <-changed:
			changed, r.nextSync = written.Changed(), time.Now()
		case err := <-r.ended:
			r.rotated(ctx, err)
		case <-time.After(wait):
		}
	}
	return nil
}

// runner is the state of one Run.
type runner struct {
	a        *Authority
	nextSync time.Time // when to read the store
	nextNote time.Time // when to log again that the root stays
	stuck    *state    // the state that could not be stored
	narrowed bool      // there are only roots of kinds that are wanted

	nextTry   [3]time.Time  // by kind, when to retry a rotation that failed
	nextCheck [3]time.Time  // by kind, when to check a root that keeps its key
	rotating  bool          // a rotation is being prepared, and sends its result to ended
	kind      rotation.Kind // of what is rotating
	ended     chan error    // for one result
	beside    func(func())  // calls a function in a goroutine
}

// work does the work that is due at s, and returns how long to wait if nothing changes.
func (r *runner) work(ctx context.Context, s *state) time.Duration {
	a, wait := r.a, longestSleep
	until := func(t time.Time) { wait = min(wait, time.Until(t)) }
	if !s.next.IsZero() {
		// Both clocks must reach the step, so the longer wait counts.
		if wait = min(wait, max(time.Until(s.next), time.Until(s.next.Round(0)))); wait <= 0 {
			return 0
		}
	}
	if a.store != nil {
		if due := time.Until(r.nextSync) <= 0; due || s.dirty && r.stuck != s {
			r.nextSync, r.stuck = time.Now().Add(a.syncWait()), nil
			if err := a.update(ctx, "", nil); err != nil {
				r.stuck = a.state.Load()
			}
			return 0
		}
		until(r.nextSync)
		left, err := r.show(ctx, s)
		if err != nil {
			left = a.syncInterval // another replica may do it
		}
		wait = min(wait, left)
	}
	if !r.narrowed && a.files == nil && !a.views() && r.narrow(ctx, s) {
		return 0
	}
	if r.rotating {
		return wait
	}
	for _, kind := range rotation.Kinds {
		if a.cfg.Rotation.Manual && s.In(kind, rotation.Active) != nil {
			continue
		}
		at, ok := r.replaceAt(s, kind)
		at = later(at, r.nextTry[kind])
		switch {
		case !ok:
		case time.Until(at) > 0:
			until(at)
		default:
			r.rotating, r.kind = true, kind
			r.beside(func() { // the store is read meanwhile
				_, err := a.rotate(ctx, due, "rotate the "+kind.String()+" of", kind)
				r.ended <- err
			})
			return wait
		}
	}
	return wait
}

// narrow ends a kind of root that is no longer named, when one of the other kind signs, and reports whether it did. It
// does so once in a Run: otherwise replicas with other settings would take turns. Commands on the same store end no kind.
func (r *runner) narrow(ctx context.Context, s *state) bool {
	r.narrowed = true
	for _, kind := range []rotation.Kind{rotation.Root, rotation.Quantum} {
		if slices.Contains(r.a.kinds(), kind) || len(s.Keys[kind]) == 0 {
			continue
		}
		err := r.a.update(ctx, unnamed, func(d *rotation.Document, now time.Time) error {
			if !d.End(kind, now) {
				return errNoChange
			}
			return nil
		})
		r.narrowed = s.In(kind, rotation.Active) == nil && s.In(kind, rotation.Distributing) == nil
		return err == nil && r.a.current() != s
	}
	return false
}

// show stores which distributing keys have been in this process's bundle for long enough, so that a later process
// need not assume that no verifier knows them. It returns how long to wait for the next key.
func (r *runner) show(ctx context.Context, s *state) (time.Duration, error) {
	left := longestSleep
	due := false
	for _, kind := range rotation.Kinds {
		if k := s.In(kind, rotation.Distributing); k != nil && !k.Shown {
			wait := time.Until(k.Met.Add(k.ShownAfter()))
			due = due || wait <= 0
			left = min(left, max(wait, 0))
		}
	}
	if !due {
		return left, nil
	}
	return 0, r.a.update(ctx, "", func(d *rotation.Document, now time.Time) error {
		err := errNoChange
		for _, kind := range rotation.Kinds {
			if k := d.In(kind, rotation.Distributing); k != nil && !k.Shown && now.Sub(k.Met) >= k.ShownAfter() {
				k.Shown, err = true, errRemark
			}
		}
		return err
	})
}

// replaceAt returns when to replace the active key of a kind, and whether Run must replace it at all.
func (r *runner) replaceAt(s *state, kind rotation.Kind) (time.Time, bool) {
	cfg, k := &r.a.cfg, s.In(kind, rotation.Active)
	switch {
	case s.In(kind, rotation.Distributing) != nil || kind == rotation.Token && cfg.JWT == nil:
		return time.Time{}, false
	case k == nil: // the first key of its kind; other roots are in files
		return time.Time{}, slices.Contains(r.a.kinds(), kind) && r.a.store != nil && !r.a.views()
	case k.Tainted: // the bundle was full, so there is no successor
		return time.Time{}, true
	case kind == rotation.Token: // so that its successor signs once it has signed for KeyTTL
		return k.Activates.Add(cfg.JWT.KeyTTL - cfg.JWT.Propagation).Round(0), true
	}
	at := cfg.Rotation.replaceAt(k.Cert, cfg.MaxTTL)
	if time.Until(r.nextNote) <= 0 && time.Until(at) > 0 {
		r.nextNote = time.Now().Add(cfg.Rotation.CheckInterval)
		cfg.Logger.Info("the root is not about to expire", "root", k.ID, "replaced_at", at)
	}
	switch {
	case !cfg.Rotation.KeepKey:
		return at, true
	case time.Until(r.nextCheck[kind]) > 0:
		return r.nextCheck[kind], true
	}
	r.nextCheck[kind] = time.Now().Add(cfg.Rotation.CheckInterval)
	if time.Until(at) <= 0 {
		return at, true
	}
	return r.nextCheck[kind], true
}

// replaceAt returns when to replace the active root. It depends only on the certificate's dates, so compare it with
// the wall clock.
//
// With four steps, that is when Propagation, the longest lifetime of a leaf and the grace ratio of the root's life are
// left, but not in the first half of its life. With the same key, it is when the grace ratio is left.
func (r *Rotation) replaceAt(active *x509.Certificate, longest time.Duration) time.Time {
	life := min(r.RootTTL, active.NotAfter.Sub(active.NotBefore)) // a root from elsewhere may have a short one
	half, share := life/2, time.Duration(float64(life)*r.GraceRatio)
	if r.KeepKey {
		return active.NotAfter.Add(-share)
	}
	if longest < half-share-r.Propagation { // this order avoids overflow
		return active.NotAfter.Add(-(r.Propagation + longest + share))
	}
	return active.NotAfter.Add(-half)
}

// rotated takes the result of an attempt to rotate.
func (r *runner) rotated(ctx context.Context, err error) {
	r.rotating = false
	if err == nil || ctx.Err() != nil {
		return
	}
	if !errors.Is(err, ErrRotating) {
		r.a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "rotation failed", slog.Any("err", err),
			slog.Duration("retry_in", rotateRetry))
	}
	r.nextTry[r.kind] = time.Now().Add(rotateRetry)
	r.nextCheck[r.kind] = r.nextTry[r.kind]
}
