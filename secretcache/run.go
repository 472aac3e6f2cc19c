package secretcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// run is what belongs to one call of Run.
type run struct {
	ctx  context.Context
	wake chan struct{} // has room for one
	wg   sync.WaitGroup

	watching bool // the CA's watch keeps the bundles fresh; guarded by the Manager's mu
}

// Run keeps the identities and the bundles fresh. It blocks until ctx is done, then ends what it
// has started, waits for it, and returns the cause of ctx. It returns at once, with an error, if it
// is running already; it may be called again after it has returned.
//
// At its start it fetches the bundles, and asks for whatever is missing or due.
func (m *Manager) Run(ctx context.Context) error {
	r := &run{ctx: ctx, wake: make(chan struct{}, 1)}
	m.mu.Lock()
	if m.run != nil {
		m.mu.Unlock()
		return errors.New("secretcache: run: already running")
	}
	m.run = r
	m.roots.due = 0
	fetched := m.roots.wait()
	m.mu.Unlock()

	if w, ok := m.cfg.CA.(bundleWatcher); ok {
		r.wg.Go(func() { m.watchBundles(r, w, fetched) })
	}
	m.schedule(r)

	r.wg.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	for m.news.telling != nil {
		told := m.news.telling
		m.mu.Unlock()
		<-told
		m.mu.Lock()
	}
	m.run = nil
	return context.Cause(ctx)
}

// schedule starts the attempts that are due, until ctx is done.
func (m *Manager) schedule(r *run) {
	timer := time.NewTimer(longestSleep)
	defer timer.Stop()
	for r.ctx.Err() == nil {
		timer.Reset(m.startDue(r))
		select {
		case <-r.ctx.Done():
		case <-timer.C:
		case <-r.wake:
		}
	}
}

// startDue starts what is due, as far as there are slots, and returns how long there is nothing
// to do unless somebody calls.
func (m *Manager) startDue(r *run) time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.ticks.advance(time.Now())
	sleep := longestSleep
	if e := m.roots; !e.busy {
		if e.due <= now && r.watching {
			e.due = now + m.poll()
		}
		if e.due <= now {
			m.start(r, e)
		} else {
			sleep = min(sleep, e.due-now)
		}
	}
	if !m.trust.Load().usable() {
		return sleep // no certificate could be good
	}
	for e := m.queue.front(); e != nil; e = m.queue.front() {
		if e.due > now {
			return min(sleep, e.due-now)
		}
		if !m.start(r, e) {
			return sleep // who gives a slot back wakes us
		}
	}
	return sleep
}

// start starts an attempt for Run unless all slots are taken. The caller holds mu.
func (m *Manager) start(r *run, e *entry) bool {
	if e != m.roots { // which need none, as those who have a slot may wait for them
		select {
		case m.slots <- struct{}{}:
		default:
			return false
		}
	}
	ctx := m.begin(r.ctx, e)
	r.wg.Go(func() { m.attemptLogged(ctx, e) })
	return true
}

// attemptAlone makes an attempt while Run is not running.
func (m *Manager) attemptAlone(ctx context.Context, e *entry) {
	if e != m.roots {
		m.slots <- struct{}{}
	}
	m.attemptLogged(ctx, e)
}

func (m *Manager) attemptLogged(ctx context.Context, e *entry) {
	if again, err := m.attempt(ctx, e); again.times > 0 {
		m.logRetry(ctx, "secretcache: attempt failed", e.id, again.times, err, again.in)
	}
}

// begin marks e as busy. The context that it returns is for the attempt. The caller holds mu.
func (m *Manager) begin(base context.Context, e *entry) context.Context {
	m.queue.remove(e)
	ctx, cancel := context.WithCancel(base)
	e.busy, e.cancel = true, cancel
	return ctx
}

// next is when to try again, and how often it failed so far.
type next struct {
	in    time.Duration
	times int
}

// attempt does what has begun for e, gives the slot back that it needed, and puts e back into the
// queue.
func (m *Manager) attempt(ctx context.Context, e *entry) (next, error) {
	m.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "secretcache: attempt", slog.String("id", e.id.String()))
	var err error
	if e == m.roots {
		err = m.fetch(ctx)
	} else {
		err = m.issue(ctx, e)
	}
	n := m.finish(ctx, e, err)
	if err == nil && e != m.roots {
		m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "secretcache: new certificate", slog.String("id", e.id.String()),
			slog.Time("not_after", e.held.Load().notAfter), slog.Duration("renew_in", n.in))
	}
	return n, err
}

// finish takes note of how the attempt for e ended, and plans the next.
func (m *Manager) finish(ctx context.Context, e *entry, err error) next {
	m.mu.Lock()
	defer m.mu.Unlock()
	stopped := ctx.Err() != nil // by the end of Run or by Remove, which is nobody's failure
	e.cancel()
	e.busy, e.cancel = false, nil
	if e != m.roots {
		<-m.slots
	}
	now := time.Now()
	n := next{}
	switch {
	case err == nil:
		e.failures, e.final = 0, false
		e.cause.Store(nil)
		n.in = m.renewIn(e, now)
	case !stopped:
		e.failures++
		e.cause.Store(&err)
		n.times = e.failures
		n.in = m.tryAgainIn(e, now, err)
	}
	switch due := m.ticks.advance(now) + n.in; {
	case e == m.roots:
		e.due = due
	case !e.removed:
		m.queue.push(e, due)
	}
	e.wake()
	m.kick()
	return n
}

// renewIn returns how long what was just obtained for e is good enough.
func (m *Manager) renewIn(e *entry, now time.Time) time.Duration {
	switch h := e.held.Load(); {
	case e == m.roots:
		return m.poll()
	case e.orphan: // the bundles changed behind its back
		return 0
	default:
		at := renewAt(h.received, h.notBefore, h.notAfter, m.cfg.GraceRatio, m.cfg.Jitter, rand.Float64())
		return min(at.Sub(now.Round(0)), longestLife)
	}
}

// tryAgainIn returns how long to wait after err, and remembers what kind it is.
func (m *Manager) tryAgainIn(e *entry, now time.Time, err error) time.Duration {
	f := refusal{times: e.failures}
	f.wish, f.final = asked(err)
	e.final = f.final
	if e == m.roots {
		return pollAgainIn(f, m.poll(), m.trust.Load() != nil, rand.Float64())
	}
	h := e.held.Load()
	if h == nil {
		return retryIn(f, m.cfg.Lifetime, 0, rand.Float64())
	}
	left := h.left(now)
	if e.orphan { // peers with the new bundle do not accept it any more
		left = 0
	}
	return retryIn(f, h.life(), left, rand.Float64())
}

// poll returns when to ask for the bundles again.
func (m *Manager) poll() time.Duration {
	t := m.trust.Load()
	if t == nil {
		return defaultPoll
	}
	hint, ok := t.own.RefreshHint()
	return pollIn(hint, ok, rand.Float64())
}

// kick has the scheduler look at the queue again. The caller holds mu.
func (m *Manager) kick() {
	if m.run == nil {
		return
	}
	select {
	case m.run.wake <- struct{}{}:
	default:
	}
}

// logRetry reports a failure that somebody will repeat.
func (m *Manager) logRetry(ctx context.Context, msg string, id spiffe.ID, attempt int, err error, in time.Duration) {
	m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("id", id.String()), slog.Int("attempt", attempt),
		slog.Any("err", err), slog.Duration("retry_in", in))
}

// Add adds an identity, which is then obtained and renewed like the default one and is known by its
// ID. It must be a workload in the Manager's trust domain. To add it again does nothing. It does not
// block: the first certificate comes while Run runs, or with a call of
// [Manager.GenerateSecret].
func (m *Manager) Add(id spiffe.ID) error {
	switch {
	case id.IsZero():
		return fmt.Errorf("secretcache: add: %w", spiffe.ErrZero)
	case id.Path() == "":
		return fmt.Errorf("secretcache: add: %q names a trust domain and not a workload", id)
	case !id.MemberOf(m.cfg.ID.TrustDomain()):
		return fmt.Errorf("secretcache: add: %q is not in the trust domain %q", id, m.cfg.ID.TrustDomain())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e := &entry{id: id}
	if _, there := m.names.LoadOrStore(id.String(), e); there {
		return nil
	}
	m.queue.push(e, m.ticks.advance(time.Now()))
	m.tell(id.String())
	m.kick()
	return nil
}

// Remove forgets an identity that was added, with its key, and ends an attempt to renew it; those
// who wait for it get an error that wraps [io/fs.ErrNotExist]. The default identity stays.
func (m *Manager) Remove(id spiffe.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.names.Load(id.String())
	if !ok || v == m.first {
		return
	}
	e := v.(*entry)
	m.names.Delete(id.String())
	m.queue.remove(e)
	e.removed = true
	if e.cancel != nil {
		e.cancel()
	}
	e.wake()
	m.tell(id.String())
}
