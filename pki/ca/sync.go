package ca

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

// Open makes an authority whose CA is in store. If there is no record, it makes a new CA with [Config.Create], and
// fails with [ErrNoRecord] otherwise. It adopts a CA that Istio made.
//
// Open starts no goroutine. It reads the store, and retries with growing waits until ctx is done; the error then
// wraps ctx's cause and the last error of the store. An unfit record or store gives an error at once, which wraps
// [ErrUnfit], and is left as it is. No error of the store leads to another CA.
//
// Authorities that share a store are replicas of one CA: they have the same roots, keys and sequence numbers, and
// take each step of a rotation at the same moment without talking to each other. They write only decisions, and
// replace only the version that they have read; a late replica reads and decides again. Each needs [Authority.Run].
// Their clocks must not differ by more than Backdate, and their durations and Rotation.KeepKey should be the same.
//
// # While the store does not answer
//
// An authority goes on signing with the keys that it read last. As another replica may have prepared a new root right
// afterwards, no leaf may end later than that reading plus Propagation plus the longest lifetime: the old root stays
// in every replica's bundle at least as long. With the defaults that is 90 days; a key at a [Custodian] signs only until
// another replica has replaced it, and it is destroyed. After that, and whenever no lifetime is left, it refuses with
// [spiffe.ErrNotReady].
//
// # When no authority was running
//
// A root that was prepared but not distributed, because no authority ran, must not sign on time. If an authority
// first sees a distributing key with less than three fifths of its Propagation left (three refreshes), the key waits
// for all of Propagation again, in all replicas. The exception is when an old root is due to retire meanwhile: others
// may show bundles without it, and all that it signed has expired.
func Open(ctx context.Context, cfg Config, store Store) (*Authority, error) {
	if store == nil {
		return nil, errors.New("ca: Open needs a store; New makes an authority without one")
	}
	a, err := newAuthority(cfg)
	if err != nil {
		return nil, err
	}
	a.store = store
	if err := a.open(ctx); err != nil {
		return nil, err
	}
	return a, nil
}

// The waits between attempts to open a store.
const (
	openWait    = 500 * time.Millisecond
	openMaxWait = time.Minute
)

// open reads the store until that succeeds.
func (a *Authority) open(ctx context.Context) error {
	var last error
	for wait := openWait; ; wait = min(wait+wait/2, openMaxWait) {
		err := a.update(ctx, "", nil)
		switch {
		case err == nil:
			a.opened(ctx)
			return nil
		case ctx.Err() == nil && lasts(err):
			return err
		case last == nil || !errors.Is(err, context.Cause(ctx)): // an earlier error says more than the end of ctx
			last = err
		}
		if ctx.Err() == nil {
			a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "store not opened", slog.Any("err", err),
				slog.Duration("retry_in", wait))
		}
		if cause := renew.Sleep(ctx, wait/2+rand.N(wait)); cause != nil {
			return fmt.Errorf("ca: open the store of %s: %w: %w", a.cfg.TrustDomain, cause, within(last))
		}
	}
}

// lasts reports whether an error in opening a store is for an operator to mend.
func lasts(err error) bool {
	_, creation := errors.AsType[*creationError](err)
	return creation || slices.ContainsFunc([]error{ErrUnfit, errors.ErrUnsupported, fs.ErrPermission, syscall.EROFS},
		func(lasting error) bool { return errors.Is(err, lasting) })
}

// creationError says that no CA can be made with these settings, whatever the store.
type creationError struct{ error }

func (e *creationError) Unwrap() error { return e.error }

// Results of a change that are not failures.
var (
	errNoChange = errors.New("no change")     // there was nothing to change
	errRemark   = errors.New("only a remark") // store it, but the bundle stays the same
)

// update decides and stores. change edits a copy of the current document, at the given time; it is called again, on
// another copy, if another replica was faster. The result is saved first and published, with why, afterwards. If
// change is nil, update reads the store, follows the record, and stores the steps that time has taken.
func (a *Authority) update(ctx context.Context, why string,
	change func(d *rotation.Document, now time.Time) error) error {
	select {
	case a.writing <- struct{}{}:
		defer func() { <-a.writing }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	reload := change == nil && a.store != nil
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := a.attempt(ctx, reload, why, change)
		if !errors.Is(err, ErrConflict) {
			return err
		}
		reload = true
		if cause := renew.Sleep(ctx, wait/2+rand.N(wait)); cause != nil {
			return fmt.Errorf("%w: %w", cause, err)
		}
	}
}

// attempt is one try of update; the writing slot is held. It notes a failure of the store for Status, but not a
// failure of the change.
func (a *Authority) attempt(ctx context.Context, reload bool, why string,
	change func(d *rotation.Document, now time.Time) error) error {
	base, err := a.base(ctx, reload)
	if err == nil && a.custody != nil && a.state.Load() == nil && !a.views() {
		err = a.custody.check(ctx, base.Document) // before anything is written
	}
	if err != nil {
		return a.note(ctx, err)
	}
	if a.views() {
		if change != nil {
			return errors.New("the store is opened to look only")
		}
		return a.install(base.Document, base.version, base.read, time.Now(), nil, "")
	}
	d, postponed := base.Postpone(a.known(), time.Now())
	differs := base.dirty || postponed
	if reload && !differs {
		// Follow the others' changes, even if ours cannot be stored.
		if err := a.install(d, base.version, base.read, time.Now(), nil, followed); err != nil {
			return err
		}
	}
	now := time.Now()
	timed, _ := base.Advance(now)
	d, steps := d.Advance(now)
	d, decided, err := a.withRequiredKeys(d, now)
	if err != nil {
		return a.note(ctx, err)
	}
	remarked := false
	if change != nil {
		edited := d.Clone()
		err := change(edited, now)
		if err == nil {
			err = edited.Account(d, now)
		}
		switch {
		case err == nil:
			d, decided = edited, true
		case errors.Is(err, errRemark):
			d, remarked = edited, true
		case !errors.Is(err, errNoChange):
			return err
		}
	}
	if decided = decided || postponed; decided {
		d = d.Clone()
		d.Sequence = timed.NumberOfNext()
	}
	if decided || remarked || differs || len(steps) > 0 {
		return a.save(ctx, d, base, why)
	}
	return nil
}

// viewer is a store for a process that only displays the contents, and leaves all steps to others.
type viewer interface{ View() }

func (a *Authority) views() bool {
	_, ok := a.store.(viewer)
	return ok
}

// missing is the error for a store without a record, if none may be made.
func (a *Authority) missing(err error) error {
	what := "there is no CA"
	if a.files != nil {
		what = "there are no keys for JWT-SVIDs"
	}
	return fmt.Errorf("ca: %s of %s: %w; if there was one, mount its volume or restore it from a backup; to make a "+
		"new one set Config.Create", what, a.cfg.TrustDomain, within(err))
}

// within returns err as part of another error of this package, whose text already has the package name.
func within(err error) error {
	if text, ok := strings.CutPrefix(err.Error(), "ca: "); ok {
		return &part{err, text}
	}
	return err
}

type part struct {
	error
	text string
}

func (p *part) Error() string { return p.text }
func (p *part) Unwrap() error { return p.error }

// known returns the document in use, or one without keys.
func (a *Authority) known() *rotation.Document {
	if s := a.state.Load(); s != nil {
		return s.Document
	}
	return new(rotation.Document)
}

// based is the state that a decision starts from.
type based struct {
	*rotation.Document
	version string
	dirty   bool      // the document differs from the record
	read    time.Time // when the reading began

	vanished bool // there was a record, and it is gone
}

// base returns the current document: from memory or, with reload, from the store, which is never older than memory.
func (a *Authority) base(ctx context.Context, reload bool) (based, error) {
	mem := a.state.Load()
	if !reload {
		return a.inMemory(time.Time{}), nil
	}
	// The record is at least as new as the moment before the read.
	start := time.Now()
	r, err := a.load(ctx)
	switch {
	case errors.Is(err, ErrNoRecord) && mem == nil && a.files != nil && a.views():
		return based{Document: new(rotation.Document), read: start}, nil
	case errors.Is(err, ErrNoRecord) && mem == nil:
		if keys := a.files == nil || a.cfg.JWT != nil; keys && !a.cfg.Create {
			return based{}, &creationError{a.missing(err)}
		}
		return a.first(ctx, newDocument(), "", start)
	case errors.Is(err, ErrNoRecord):
		return based{Document: a.current().Document, dirty: true, vanished: true}, nil
	case err != nil:
		return based{}, err
	}
	if mem != nil && r.Version == mem.version {
		a.mu.Lock()
		a.synced, a.syncErr = start.Round(0), nil
		a.mu.Unlock()
		return a.inMemory(start), nil
	}
	d, changed, err := a.read(ctx, r, start)
	if err != nil {
		return based{}, err
	}
	if mem == nil && d.Begun() && a.files == nil { // the bundle of a plugged-in CA is known: Run makes the first key
		if a.views() {
			return based{}, fmt.Errorf("ca: %w: a CA is being made", ErrNoRecord)
		}
		return a.first(ctx, d, r.Version, start)
	}
	if mem != nil {
		if err := follows(mem.Document, d); err != nil {
			return based{}, err
		}
	}
	return based{Document: d.Merge(a.known(), start), version: r.Version, dirty: changed, read: start}, nil
}

// inMemory returns the state in use, whose record was read at this time.
func (a *Authority) inMemory(read time.Time) based {
	s := a.current()
	return based{Document: s.Document, version: s.version, dirty: s.dirty, read: read}
}

// first returns the keys of a new CA, of which the store has d as version, if that is not empty.
func (a *Authority) first(ctx context.Context, d *rotation.Document, version string, now time.Time) (based, error) {
	if a.holds {
		return a.custody.begin(ctx, d, version, now)
	}
	if a.fresh == nil { // once: retries use the same CA, as an earlier save may have landed
		if err := a.create(d, now, a.newKey); err != nil {
			return based{}, &creationError{err}
		}
		a.fresh = d
	}
	return based{Document: a.fresh, version: version, dirty: true}, nil
}

// follows returns an error unless d, which was read, may replace the document in use.
func follows(mem, d *rotation.Document) error {
	switch {
	case d.Authority != mem.Authority:
		return fmt.Errorf("ca: %w: another CA of the same trust domain has taken the place of this one; stop all "+
			"authorities but one, and restore the record that is right", errRecord)
	case d.Revision < mem.Revision, d.Revision == mem.Revision && d.Writer != mem.Writer:
		return fmt.Errorf("ca: %w: it is older than what this process has read or written before (revision %d, "+
			"not %d); after restoring a backup, restart all authorities", errRecord, d.Revision, mem.Revision)
	}
	return nil
}

// withRequiredKeys returns d with what this authority needs: terms that cover the lifetimes that it grants, and a key for
// tokens. The bool reports whether d had to be changed.
func (a *Authority) withRequiredKeys(d *rotation.Document, now time.Time) (*rotation.Document, bool, error) {
	next := d.Clone()
	edited := false
	for _, kind := range rotation.Kinds {
		if kind != rotation.Token || a.cfg.JWT != nil {
			edited = next.Raise(kind, a.cfg.terms(kind)) || edited
		}
	}
	if a.cfg.JWT != nil && next.In(rotation.Token, rotation.Active) == nil &&
		next.MayPrepare(rotation.Token, true) == nil && !a.holds { // otherwise Run makes it
		// The first token key of a CA whose bundle verifiers may already have.
		fresh, err := a.newKey(rotation.Token, a.alg(rotation.Token))
		if err != nil {
			return nil, false, &creationError{err}
		}
		next.Prepare(fresh, a.cfg.Rotation.Propagation, now)
		edited = true
	}
	if edited {
		return next, true, nil
	}
	return d, false, nil
}

// save stores d in place of base's record, if there is a store, and installs it.
func (a *Authority) save(ctx context.Context, d *rotation.Document, base based, why string) error {
	if a.store == nil {
		return a.install(d, "", time.Time{}, time.Now(), base.Document, why)
	}
	first, known := a.state.Load() == nil, a.known()
	start := time.Now()
	written, err := a.write(ctx, d, base.version)
	if err != nil {
		return a.note(ctx, err)
	}
	if err := a.install(written.Document, written.version, start, time.Now(), base.Document, why); err != nil {
		return err
	}
	if base.vanished {
		const what = "the record had vanished from the store, and was written again"
		k := a.current().active()
		a.cfg.Logger.LogAttrs(ctx, slog.LevelError, what, slog.String("serial", k.ID))
		a.keep(a.keyEvent("recovered", k, time.Now(), "", what))
	}
	// During a slow save, others may have missed the time to learn of a key.
	if late, changed := written.Postpone(known, time.Now()); changed && !first {
		late.Sequence = written.NumberOfNext()
		return a.save(ctx, late, written, why)
	}
	return nil
}

// write stores d in place of the given version, and returns it as it was written.
func (a *Authority) write(ctx context.Context, d *rotation.Document, version string) (based, error) {
	d = d.Clone()
	d.Revision++
	d.Writer = rotation.RandomID()
	data, err := record(d, a.cfg.TrustDomain)
	if err != nil {
		return based{}, &creationError{fmt.Errorf("ca: record of %s, which is not written: %w", a.cfg.TrustDomain, err)}
	}
	if a.seals {
		if err := a.custody.seal(ctx, d, data); err != nil {
			return based{}, fmt.Errorf("ca: write the record of %s: %w", a.cfg.TrustDomain, err)
		}
	}
	start := time.Now()
	saving, cancel := context.WithTimeout(ctx, a.patience())
	defer cancel()
	stored, err := a.store.Save(saving, NewRecord(version, data))
	switch {
	case errors.Is(err, ErrConflict):
		return based{}, err
	case err != nil:
		// The write may have happened anyway. If so, the record is ours; if not, or if that is unknown, the next
		// reading shows it.
		if stored = a.landed(ctx, d.Writer, start); stored == "" {
			return based{}, fmt.Errorf("ca: write the record of %s: %w", a.cfg.TrustDomain, within(err))
		}
	}
	return based{Document: d, version: stored}, nil
}

// landed returns the version of the record in the store if it is the writer's, and otherwise "".
func (a *Authority) landed(ctx context.Context, writer string, now time.Time) string {
	r, err := a.load(ctx)
	if err != nil {
		return ""
	}
	d, _, err := a.read(ctx, r, now)
	if err != nil || d.Writer != writer {
		return ""
	}
	return r.Version
}

// lookTime is how long a request waits to read another process's changes. After that, Run reads them.
const lookTime = time.Second

// look reads the store if a cheap check shows that another process has written to it, so that a key that an operator
// has tainted or revoked there is out at the next request.
func (a *Authority) look(ctx context.Context) {
	store, ok := a.store.(*dirStore)
	if !ok {
		return
	}
	a.looking.Lock()
	defer a.looking.Unlock()
	info, err := store.stat()
	if err != nil || a.looked != nil && os.SameFile(a.looked, info) && a.looked.ModTime().Equal(info.ModTime()) {
		return // Run reports the error
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	_ = a.update(ctx, "", nil) // update notes the error
	a.looked = info
}

// load reads the store, with a time limit.
func (a *Authority) load(ctx context.Context) (Record, error) {
	loading, cancel := context.WithTimeout(ctx, a.patience())
	defer cancel()
	r, err := a.store.Load(loading)
	if err != nil && !errors.Is(err, ErrNoRecord) {
		err = fmt.Errorf("ca: read the record of %s: %w", a.cfg.TrustDomain, within(err))
	}
	return r, err
}

// patience is how long the store may take: a decision must not be old when it is stored, but a busy disk needs some
// seconds.
func (a *Authority) patience() time.Duration {
	return min(10*time.Second, max(3*time.Second, a.cfg.Rotation.Propagation/8))
}

// syncWait is how long to wait for the next reading, so that replicas that started together drift apart.
func (a *Authority) syncWait() time.Duration {
	return a.syncInterval - rand.N(a.syncInterval/10+1)
}

// install makes d the current document. The store has it as version, and had it at the time read. It reports key
// changes since the previous state with why; if there was none, the changes since the document before, which may be
// nil.
func (a *Authority) install(d *rotation.Document, version string, read, now time.Time, before *rotation.Document,
	why string) error {
	a.mu.Lock()
	// A reader may have taken a step meanwhile.
	given := d
	var steps []rotation.Event
	if !a.views() {
		d, steps = d.Advance(now)
	}
	old := a.state.Load()
	if old != nil {
		before = old.Document
	}
	var changes []rotation.Event
	if before != nil {
		changes = rotation.Diff(before, given, now)
	}
	if old != nil && d == old.Document && version == old.version {
		a.synced, a.syncErr = read.Round(0), nil
		a.mu.Unlock()
		return nil
	}
	var p *plugged
	if old != nil {
		p = old.plugged
	} else if a.files != nil {
		p = a.files.first
	}
	s, err := a.newState(old, d, version, p)
	if err == nil {
		s.dirty = len(steps) > 0 && a.store != nil
		a.publish(s)
		if a.store != nil {
			a.synced, a.syncErr = read.Round(0), nil
		}
	}
	a.mu.Unlock()
	if err == nil {
		a.happened(why, changes...)
		a.happened("", steps...)
	}
	return err
}

// opened reports, once, how the authority began.
func (a *Authority) opened(ctx context.Context) {
	how, where := loaded, fmt.Sprintf("%T", a.store)
	if named, ok := a.store.(fmt.Stringer); ok { // other stores might print their keys
		where = named.String()
	}
	switch {
	case a.files != nil:
		where = a.files.dir
	case a.adopted:
		how = adopted
	case a.fresh != nil && a.fresh.Find(a.state.Load().active().ID) != nil:
		how = created
	}
	a.fresh = nil
	a.started(ctx, how, where)
}

// note keeps err for Status, and logs it if it is new.
func (a *Authority) note(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, ErrConflict) {
		return err // nothing is wrong with the store
	}
	a.mu.Lock()
	again := a.syncErr != nil && a.syncErr.Error() == err.Error()
	a.syncErr = err
	synced := a.synced
	a.mu.Unlock()
	if !again && a.state.Load() != nil {
		a.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "store not in sync", slog.Any("err", err),
			slog.Time("synced", synced.UTC()))
	}
	return err
}
