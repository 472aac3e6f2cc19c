package federation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// usualInterval is for a bundle without a refresh hint (FED-8, BND-22).
const usualInterval = 5 * time.Minute

// longestInterval leaves room for twice as much in a duration, which ends after 292 years.
const longestInterval = 100 * 365 * 24 * time.Hour

// relation is a relationship and what became of it. There may be 10,000 of them, so it has no
// goroutine and no timer.
type relation struct {
	e      *endpoint
	bundle atomic.Pointer[spiffe.Bundle] // in force; what readers get; nil before the first
	decree atomic.Bool                   // an operator has set a bundle, so that the initial one counts no more

	// The Manager's mu guards what follows.
	due   time.Duration // when the next attempt is, in the scheduler's time
	index int           // in the queue, counted from 1; 0 if not there
	queue *queue        // that it is in

	gone   bool // removed, or replaced by other parameters
	busy   bool // an attempt is under way
	cancel context.CancelFunc

	etag       tag            // of etagOf, which a 304 confirms, and no other: what was set by hand
	etagOf     *spiffe.Bundle // must not keep us from seeing what the endpoint has
	interval   time.Duration  // between the last attempt and the next, before jitter
	success    time.Time      // the last, on the wall clock
	confirmed  *spiffe.Bundle // by that
	failures   int            // in a row
	err        error          // of the last attempt
	unanchored bool           // the last attempt sent nothing, as there were no anchors
	refused    *spiffe.Bundle
	loaded     bool           // the stored bundle was looked for
	saved      *spiffe.Bundle // what is stored
}

func (m *Manager) newRelation(e *endpoint) *relation {
	r := &relation{e: e, interval: m.cfg.MinInterval}
	switch {
	case e.initial != nil:
		e.source = newest{r}
	case e.borrows():
		e.source = m
	}
	return r
}

// newest is the source of the anchors of a self-serving endpoint.
type newest struct{ r *relation }

// Bundle returns the newest bundle that is known (FED-67): an initial one with a higher sequence
// number than what was fetched is how an operator helps after a rotation was missed.
func (n newest) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return n.r.newest().Bundle(td)
}

// newest returns the newest bundle that is known, or nil.
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

// run is what belongs to one call of Run.
type run struct {
	ctx   context.Context
	wake  chan struct{} // has room for one
	slots chan struct{} // one token for each fetch that is not slow
	wg    sync.WaitGroup
}

// Run fetches the bundles and keeps them fresh. It blocks until ctx is done, then ends what it has
// started, waits for it, and returns the cause of ctx. It returns at once, with an error, if it is
// running already; it may be called again after it has returned.
//
// At its start it reads the directory, if there is one, and then fetches everything. An error about
// the directory itself ends it before that.
func (m *Manager) Run(ctx context.Context) error {
	r := &run{ctx: ctx, wake: make(chan struct{}, 1), slots: make(chan struct{}, m.cfg.Concurrency)}
	m.mu.Lock()
	if m.run != nil {
		m.mu.Unlock()
		return errors.New("federation: run: already running")
	}
	m.run = r
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		m.run = nil
		m.mu.Unlock()
	}()

	if err := m.openDir(); err != nil {
		return fmt.Errorf("federation: run: %w", err)
	}
	for _, rel := range *m.relations.Load() {
		m.load(ctx, rel)
		if ctx.Err() != nil {
			break
		}
	}
	m.mu.Lock()
	now := m.ticks.advance(time.Now())
	for _, rel := range *m.relations.Load() {
		if rel.index > 0 {
			m.requeue(rel, now)
		}
	}
	m.mu.Unlock()

	timer := time.NewTimer(longestSleep)
	defer timer.Stop()
	for ctx.Err() == nil {
		timer.Reset(m.startDue(r))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.wake:
		}
	}
	r.wg.Wait()
	return context.Cause(ctx)
}

// startDue starts what is due, as far as there are slots, and returns how long there is nothing to do
// unless somebody calls. What failed last time comes last: it may well hang again.
func (m *Manager) startDue(r *run) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.ticks.advance(time.Now())
	sleep := longestSleep
	for _, q := range []*queue{&m.healthy, &m.failing} {
		for rel := q.front(); rel != nil; rel = q.front() {
			if rel.due > now {
				sleep = min(sleep, rel.due-now)
				break
			}
			select {
			case r.slots <- struct{}{}:
			default:
				return longestSleep // who gives a slot back wakes us
			}
			m.start(r, rel)
		}
	}
	return sleep
}

// start starts an attempt, which has a slot. The caller holds mu.
func (m *Manager) start(r *run, rel *relation) {
	m.unqueue(rel)
	ctx, cancel := context.WithCancel(r.ctx)
	rel.busy, rel.cancel = true, cancel
	release := sync.OnceFunc(func() {
		<-r.slots
		m.mu.Lock()
		m.kick()
		m.mu.Unlock()
	})
	r.wg.Go(func() {
		defer release()
		timer := time.AfterFunc(slow, release)
		defer timer.Stop()
		m.attempt(ctx, rel)
	})
}

// What became of an attempt, in the log.
const (
	outcomeNew         = "new"
	outcomeClash       = "new with the old sequence number"
	outcomeUnchanged   = "unchanged"
	outcomeNotModified = "not modified"
	outcomeOvertaken   = "overtaken by an operator"
	outcomeRefused     = "refused"
	outcomeFailed      = "failed"
)

// attempt fetches the bundle of rel once.
func (m *Manager) attempt(ctx context.Context, rel *relation) {
	m.load(ctx, rel) // if it was added while Run runs
	m.mu.Lock()
	have, etag := rel.bundle.Load(), rel.etag
	if rel.etagOf != have {
		etag = tag{}
	}
	m.mu.Unlock()

	a, failed := rel.e.fetch(ctx, m.fetch, etag)

	m.mu.Lock()
	stopped := failed != nil && ctx.Err() != nil // by the end of Run, by Remove or Add: nobody's failure
	rel.cancel()
	rel.busy, rel.cancel = false, nil
	if rel.gone || stopped {
		if !rel.gone {
			m.requeue(rel, 0)
		}
		m.mu.Unlock()
		return
	}
	outcome := outcomeNotModified
	switch {
	case failed != nil || a.bundle == nil:
	case rel.bundle.Load() != have: // Set came meanwhile: what was asked for before it does not replace it
		outcome, a.bundle = outcomeOvertaken, nil
	default:
		outcome, failed = m.apply(rel, a)
	}
	now := time.Now()
	if failed != nil {
		rel.failures++
		rel.err = failed
		if outcome != outcomeRefused {
			outcome = outcomeFailed
		}
	} else {
		rel.failures, rel.err, rel.refused, rel.success = 0, nil, nil, now.Round(0)
		if rel.confirmed = have; a.bundle != nil { // a 304 says nothing about one that was set meanwhile
			rel.confirmed = rel.bundle.Load()
		}
	}
	m.setUnanchored(rel, a.unasked)
	rel.interval = m.interval(rel.bundle.Load())
	wait := jittered(rel.interval, m.cfg.MinInterval, m.cfg.MaxInterval, rand.Float64())
	if rel.unanchored && rel.e.borrows() && rel.e.anchored() == nil {
		wait = 0 // they came while we looked
	}
	m.requeue(rel, m.ticks.advance(now)+wait)
	m.kick()
	b := rel.bundle.Load()
	m.mu.Unlock()

	rel.e.log(ctx, m.fetch, a, failed, b, outcome, slog.Duration("next", wait))
	m.save(ctx, rel)
}

// apply takes the bundle of an answer into force, by the rules about sequence numbers (FED-11,
// FED-12). The caller holds mu.
func (m *Manager) apply(rel *relation, a answer) (outcome string, failed *FetchError) {
	have := rel.bundle.Load()
	if known := rel.newest(); !a.bundle.Supersedes(known) {
		rel.refused = a.bundle
		n, _ := a.bundle.Sequence()
		last, _ := known.Sequence()
		return outcomeRefused, &FetchError{
			TrustDomain: rel.e.td, URL: a.url, Code: Sequence, Status: a.received,
			Err: fmt.Errorf("the sequence number is %d, and %d is known; if its publisher has lost count, accept it with Manager.Set (FED-11)", n, last),
		}
	}
	switch {
	case have == nil:
		outcome = outcomeNew
	case a.bundle.Equal(have):
		rel.etag, rel.etagOf = a.etag, have
		return outcomeUnchanged, nil
	default:
		outcome = outcomeNew
		n, ok := a.bundle.Sequence()
		if last, ok2 := have.Sequence(); ok && ok2 && n == last {
			outcome = outcomeClash
		}
	}
	rel.etag, rel.etagOf = a.etag, a.bundle
	m.publish(rel, a.bundle)
	return outcome, nil
}

// setUnanchored notes whether rel waits for the anchors of its endpoint. The caller holds mu.
func (m *Manager) setUnanchored(rel *relation, yes bool) {
	if rel.unanchored != yes {
		rel.unanchored = yes
		if yes {
			m.unanchored++
		} else {
			m.unanchored--
		}
	}
}

// interval returns how long to wait after an attempt while b is in force.
func (m *Manager) interval(b *spiffe.Bundle) time.Duration {
	if b == nil {
		return m.cfg.MinInterval
	}
	hint, ok := b.RefreshHint()
	if !ok {
		hint = usualInterval
	}
	return max(min(hint, m.cfg.MaxInterval), m.cfg.MinInterval)
}

// jittered returns interval give or take a tenth, within the bounds; u is random, in [0,1). An
// interval that is a bound has its tenth on the other side only.
func jittered(interval, low, high time.Duration, u float64) time.Duration {
	from, to := max(interval-interval/10, low), min(interval+interval/10, max(high, low+low/10))
	return from + time.Duration(u*float64(to-from))
}

// status returns the state of r. The caller holds mu.
func (r *relation) status(now time.Duration, wall time.Time) Status {
	s := Status{
		TrustDomain: r.e.td, URL: r.e.where, Bundle: r.bundle.Load(), LastSuccess: r.success,
		Failures: r.failures, Err: r.err, Refused: r.refused,
	}
	switch lately := wall.Round(0).Sub(r.success) <= 2*r.interval; {
	case s.Bundle == nil && r.err != nil:
		s.State = Failed
	case s.Bundle == nil:
		s.State = Pending
	case r.failures == 0 && r.confirmed == s.Bundle && lately:
		s.State = Fresh
	default:
		s.State = Stale
	}
	if !r.busy {
		s.NextAttempt = wall.Round(0).Add(max(r.due-now, 0))
	}
	return s
}
