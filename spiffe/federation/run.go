package federation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/files/store"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/sourcereport"
	"github.com/svidkit/svidkit/spiffe"
)

// How many fetches run at the same time, and how long a fetch keeps its slot.
const (
	slow        = time.Second
	concurrency = 16
)

// relation is a relationship and its state. There may be 10,000 of them.
type relation struct {
	renew.Entry // the Manager's mu guards it, and the fields after decree

	e      *endpoint
	bundle atomic.Pointer[spiffe.Bundle] // in force, for readers; nil before the first
	decree atomic.Bool                   // an operator has set a bundle, which takes the place of the initial one

	etag      tag            // of etagOf: a 304 confirms no other bundle, such as one that was set by hand
	etagOf    *spiffe.Bundle // the bundle that came with etag
	interval  time.Duration  // between the last attempt and the next, before jitter
	success   time.Time      // the last, on the wall clock
	confirmed *spiffe.Bundle // by the last success
	err       error          // of the last attempt
	refused   *spiffe.Bundle
	offers    bundleorder.Offers // holds a bundle whose number is not plausible
	loaded    sync.Once          // the stored bundle was looked for
	saved     *spiffe.Bundle     // the bundle in the store
}

func (m *Manager) newRelation(e *endpoint) *relation {
	r := &relation{e: e, interval: m.cfg.MinInterval}
	switch {
	case e.initial != nil:
		e.source = r
	case e.borrows():
		e.source = m
	}
	return r
}

// Bundle returns the newest known bundle, which verifies a self-serving endpoint. After a missed rotation an
// operator configures an initial bundle with a higher sequence number than the fetched one.
func (r *relation) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return r.newest().Bundle(td)
}

// newest returns the newest known bundle, or nil.
func (r *relation) newest() *spiffe.Bundle {
	have, initial := r.bundle.Load(), r.e.initial
	switch {
	case have == nil:
		return initial
	case initial == nil || r.decree.Load() || have.Supersedes(initial):
		return have
	}
	return initial
}

// Run fetches the bundles and keeps them fresh. It blocks until ctx is done or [Manager.Close] is called, then ends
// and awaits its goroutines, and returns nil. It returns an error at once if it is already running or closed;
// otherwise it may be called again after it has returned.
//
// At its start it reads the directory, if there is one, and then fetches everything. An error about the directory
// itself ends it before that.
func (m *Manager) Run(ctx context.Context) error {
	return m.life.RunAs(ctx, "federation", m.run)
}

// Close ends [Manager.Run] for good, and waits for it. Fetched bundles stay in force. The error is always nil.
func (m *Manager) Close() error { return m.life.Close() }

// Ready waits until there is a bundle of every relationship, from the directory or from its endpoint. The error
// wraps [spiffe.ErrNotReady], the cause of ctx, and for each missing bundle the last error of [Fetch]. It is
// returned before ctx is done if Run has failed, and after [Manager.Close]. If Run was never called, it says so.
func (m *Manager) Ready(ctx context.Context) error {
	return m.life.Ready(ctx, m.Changed, func() bool {
		for _, r := range m.all() { // without the work of missing, as there may be 10,000 changes
			if r.bundle.Load() == nil {
				return false
			}
		}
		return true
	}, m.missing)
}

// mostMissing is how many bundles an error names.
const mostMissing = 10

// missing returns an error that names the bundles that are missing.
func (m *Manager) missing() error {
	var missing []error
	for _, s := range m.Status() {
		if s.Bundle == nil {
			missing = append(missing, fmt.Errorf("no bundle of %q: %w", s.TrustDomain, cmp.Or(s.Err, errNoAnswer)))
		}
	}
	return m.life.NotReady("federation", sourcereport.Joined(missing, mostMissing), "a bundle was missing")
}

var errNoAnswer = errors.New("its endpoint has not answered yet")

func (m *Manager) run(ctx context.Context) error {
	if err := m.stored(func(*store.Folder) error { return nil }); err != nil {
		return err
	}
	for _, rel := range m.all() {
		m.load(ctx, rel)
		if ctx.Err() != nil {
			break
		}
	}
	m.mu.Lock()
	for _, rel := range m.all() {
		m.loop.Hasten(rel, 0)
	}
	m.mu.Unlock()
	m.loop.Run(ctx)
	return nil
}

// attempt fetches the bundle of rel once.
func (m *Manager) attempt(ctx context.Context, rel *relation) {
	m.load(ctx, rel) // it may have been added while Run runs
	m.mu.Lock()
	have, etag := rel.bundle.Load(), rel.etag
	if rel.etagOf != have {
		etag = tag{}
	}
	m.mu.Unlock()

	a, failed := rel.e.fetch(ctx, &m.cfg, etag)

	m.mu.Lock()
	if rel.Removed() || failed != nil && ctx.Err() != nil { // ended by Run, Remove or Add
		m.loop.Done(rel, 0)
		m.mu.Unlock()
		return
	}
	end := outcomeFailed
	if failed == nil {
		end, failed = m.judge(rel, have, &a)
	}
	m.note(rel, have, a, failed)
	m.outcomes[end]++
	wait := m.wait(rel, a.unasked)
	m.loop.Done(rel, wait)
	b := rel.bundle.Load()
	m.mu.Unlock()

	rel.e.log(ctx, &m.cfg, a, failed, b, end, slog.Duration("next", wait))
	m.save(ctx, rel)
}

// judge decides about an answer to a request that was sent while have was in force. The caller holds mu.
func (m *Manager) judge(rel *relation, have *spiffe.Bundle, a *answer) (outcome, *fetchError) {
	switch {
	case a.bundle == nil:
		rel.offers.Forget() // the endpoint has confirmed the bundle in force
		return outcomeNotModified, nil
	case rel.bundle.Load() != have: // Set was called meanwhile: an earlier request does not replace its bundle
		a.bundle = nil
		return outcomeOvertaken, nil
	}
	return m.apply(rel, *a)
}

// note records the result of an attempt for [Status]. The caller holds mu.
func (m *Manager) note(rel *relation, have *spiffe.Bundle, a answer, failed *fetchError) {
	if failed != nil {
		rel.Failed(failed)
		rel.err = failed
		return
	}
	rel.Succeeded()
	rel.err, rel.refused, rel.success = nil, nil, time.Now().Round(0)
	if rel.confirmed = have; a.bundle != nil { // a 304 says nothing about a bundle that was set meanwhile
		rel.confirmed = rel.bundle.Load()
	}
}

// wait returns how long to wait after an attempt, which sent nothing if no authority could verify the endpoint. The
// caller holds mu.
func (m *Manager) wait(rel *relation, unasked bool) time.Duration {
	var hint time.Duration // none without a bundle
	if b := rel.bundle.Load(); b != nil {
		hint, _ = b.RefreshHint()
		hint = cmp.Or(hint, renew.UsualPoll)
	}
	if rel.offers.Held() != nil { // a refresh hint of a day would make it last for days
		hint = min(hint, renew.UsualPoll)
	}
	rel.interval = max(min(hint, m.cfg.MaxInterval), m.cfg.MinInterval)
	if unasked && rel.e.borrows() {
		if rel.e.anchored() == nil {
			return 0 // the authorities arrived during the attempt
		}
		m.waiting[rel] = rel.e.id.TrustDomain()
	}
	return renew.Poll(rel.interval, m.cfg.MinInterval, m.cfg.MaxInterval, rand.Float64())
}

// apply puts the bundle of an answer in force, subject to the rules about sequence numbers and plausibility (see
// internal/certs/bundleorder). The caller holds mu.
func (m *Manager) apply(rel *relation, a answer) (outcome, *fetchError) {
	have, known := rel.bundle.Load(), rel.newest()
	refuse := func(format string, args ...any) *fetchError {
		rel.refused = a.bundle
		err := fmt.Errorf("%w: "+format, append([]any{errSequence}, args...)...)
		return &fetchError{TrustDomain: rel.e.td, URL: a.url, Err: err}
	}
	if !a.bundle.Supersedes(known) {
		n, _ := a.bundle.Sequence()
		last, _ := known.Sequence()
		rel.offers.Forget()
		return outcomeRefused, refuse("the sequence number is %d, and %d is known; "+
			"if the publisher has reset it, accept the bundle with Manager.Set", n, last)
	}
	if have == nil {
		known = nil // an initial bundle may be old, and nothing is in force
	}
	prevailed, err := rel.offers.Judge(known, a.bundle, time.Now())
	if err != nil {
		return outcomeHeld, refuse("%w; if the publisher means it, accept it with Manager.Set", err)
	}
	end := outcomeNew
	n, ok := a.bundle.Sequence()
	switch {
	case prevailed:
		end = outcomePrevailed
	case have == nil:
	case a.bundle.Equal(have):
		rel.etag, rel.etagOf = a.etag, have
		return outcomeUnchanged, nil
	default:
		if last, known := have.Sequence(); ok && known && n == last {
			end = outcomeClash
		}
	}
	rel.etag, rel.etagOf = a.etag, a.bundle
	m.publish(rel, a.bundle)
	return end, nil
}
