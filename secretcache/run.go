package secretcache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/report"
)

// How long the Manager waits between attempts.
const (
	shortestPoll = time.Second    // wins over a shorter refresh hint
	longestPoll  = 24 * time.Hour // a typing error in a refresh hint must not keep a withdrawn root for years
	longestWish  = time.Hour      // limit of a wait that the CA asks for while there is nothing to serve
	impatient    = 30 * time.Second
)

const concurrency = 16 // certificate requests at the same time

var patience = renew.Patience{Impatient: impatient, Longest: 30 * time.Minute, Wish: longestWish}

// Run keeps the identities and the bundles fresh. It blocks until ctx is done or [Manager.Close] is called, then ends
// its goroutines, waits for them, and returns nil. It returns an error at once if it is already running or the
// Manager is closed; otherwise it may be called again after it has returned.
//
// At its start it fetches the bundles, and requests each certificate that is missing or due.
func (m *Manager) Run(ctx context.Context) error {
	if m.first == nil {
		return errors.New("secretcache: run: it is the zero Manager; New makes one")
	}
	return m.life.RunAs(ctx, "secretcache", m.run)
}

// Close stops [Start], [Manager.Run] and [Manager.GenerateSecret] for good. It waits for their work and for the
// functions of [Manager.Subscribe], which must not call Close. The last certificate and bundles stay readable. The
// error is always nil.
func (m *Manager) Close() error {
	err := m.life.Close()
	m.identities.Close()
	m.bundles.Close()
	m.subscribers.Wait()
	return err
}

// Ready waits until there are trust bundles and, with a default identity, a certificate of it that has not expired.
// The error wraps [spiffe.ErrNotReady], the cause of ctx, and the failure of the last attempt. Ready fails before ctx
// is done if the CA has refused for good, if the trust bundle is empty, and after [Manager.Close]. If Run was never
// called, the error says so: unlike [Manager.GenerateSecret], Ready does not call the CA.
func (m *Manager) Ready(ctx context.Context) error {
	var ready, empty bool
	err := m.life.Await(ctx, m.Changed, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		t := m.trust.Load()
		ready, empty = t != nil && m.ready(m.first), t != nil && !t.usable()
		if !m.hasFirst() {
			ready = t.usable()
		}
		return ready || empty || m.first.Final() || t == nil && m.roots.Final()
	})
	switch {
	case ready:
		return nil
	case err == nil && empty:
		err = errNoAuthority
	}
	if !m.hasFirst() {
		return m.notReady(m.roots, err)
	}
	return m.notReady(m.first, err)
}

// errNoAuthority is the reason why no certificate can be verified.
var errNoAuthority = fmt.Errorf("the trust bundle is empty: %w", spiffe.ErrNoAuthority)

func (m *Manager) run(ctx context.Context) error {
	m.mu.Lock()
	m.bundles.Hasten(m.roots, 0)
	fetched := m.bundles.Ended(m.roots)
	m.mu.Unlock()

	var wg sync.WaitGroup
	wg.Go(func() { m.bundles.Run(ctx) })
	if w, ok := m.cfg.CA.(caclient.BundleWatcher); ok {
		wg.Go(func() { m.watchBundles(ctx, w, fetched) })
	}
	if m.cfg.Federated != nil {
		wg.Go(func() { m.followFederated(ctx) })
	}
	m.identities.Run(ctx)
	wg.Wait()

	m.subscribers.Wait()
	return nil
}

// setBack renews certificates that were obtained while the clock was ahead, and are not valid yet. The caller holds
// mu.
func (m *Manager) setBack(now time.Time) {
	for _, v := range m.names.Range {
		if e := v.(*entry); e.held.Load() != nil && now.Before(e.held.Load().notBefore) {
			m.identities.Hasten(e, 0)
		}
	}
}

func (m *Manager) loopOf(e *entry) *renew.Loop[*entry] {
	if e == m.roots {
		return &m.bundles
	}
	return &m.identities
}

func (m *Manager) attempt(ctx context.Context, e *entry) {
	id := slog.String("id", m.label(e))
	m.cfg.Logger.LogAttrs(ctx, slog.LevelDebug, "secretcache: attempt", id)
	obtain := m.issue
	if e == m.roots {
		obtain = m.fetch
	}
	e.asked.Store(time.Now().UnixNano())
	err := obtain(ctx, e)
	tried := report.Attempt{Time: time.Now(), Names: []string{m.label(e)}, Count: 1}
	if err != nil { // not under the lock: it may come from the caller's CA
		tried.Failure = cmp.Or(err.Error(), "it failed without a reason")
	}

	m.mu.Lock()
	wait := m.settle(ctx, e, err, tried)
	failures := e.Failures()
	m.loopOf(e).Done(e, wait)
	m.mu.Unlock()

	switch {
	case err == nil && e != m.roots:
		m.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "secretcache: new certificate", id,
			slog.Time("not_after", e.held.Load().notAfter), slog.Duration("renew_in", wait))
	case err != nil && wait > 0:
		m.logRetry(ctx, "secretcache: attempt failed", e, failures, err, wait)
	}
}

// settle records the end of an attempt for e, and returns the wait before the next one. The caller holds mu.
func (m *Manager) settle(ctx context.Context, e *entry, err error, tried report.Attempt) (wait time.Duration) {
	if err != nil && ctx.Err() != nil { // Run or Remove ended the attempt
		return 0
	}
	e.asked.Store(0)
	m.count(e, err)
	m.record(tried)
	if err == nil {
		e.Succeeded()
		e.cause.Store(nil)
		e.since = time.Time{}
		return m.renewIn(e)
	}
	if e.cause.Swap(&err) == nil {
		e.since = time.Now()
	}
	wait = m.retryIn(e, e.Failed(err))
	if _, ok := errors.AsType[*tooShort](err); ok { // the CA works, and each attempt costs it a signature
		wait = max(wait, e.held.Load().left()/4)
	}
	if e.Final() && (e == m.first || e == m.roots) {
		m.changed.Notify() // for Ready
	}
	return wait
}

// renewIn returns the wait after a success before the next attempt for e.
func (m *Manager) renewIn(e *entry) time.Duration {
	switch h := e.held.Load(); {
	case e == m.roots && m.watching:
		return renew.Longest
	case e == m.roots:
		return m.poll()
	case e.orphan: // the bundles have changed since
		return 0
	case m.cfg.RenewIn != nil:
		return max(m.cfg.RenewIn(h.left(), 0), renew.Shortest)
	default:
		return time.Until(m.cfg.renewAt(h, rand.Float64()))
	}
}

// renewAt returns when to renew h. u is in [0,1).
func (c *Config) renewAt(h *held, u float64) time.Time {
	return renew.RenewAt(h.received, h.notBefore, h.notAfter, c.GraceRatio, c.Jitter, u)
}

// retryAfter returns how long to wait after f while h has left to live. u is in [0,1).
func (h *held) retryAfter(f renew.Failure, left time.Duration, u float64) time.Duration {
	return patience.Wait(f, h.notAfter.Sub(h.received), left, u)
}

// retryIn returns the wait after a failure before the next attempt for e. The caller holds mu.
func (m *Manager) retryIn(e *entry, f renew.Failure) time.Duration {
	h := e.held.Load()
	left := h.left()
	if e.orphan { // peers with the new bundle reject the certificate
		left = 0
	}
	switch u := rand.Float64(); {
	case e == m.roots && m.trust.Load() != nil:
		return renew.Backoff{Low: time.Second, First: 2 * time.Second, High: m.poll(), Wish: longestWish}.Wait(f, u)
	case e == m.roots:
		return patience.Wait(f, 0, 0, u)
	case m.cfg.RenewIn != nil:
		wait, wish := max(m.cfg.RenewIn(left, f.Times), renew.Shortest), left/2
		if left == 0 {
			wish = longestWish
		}
		return renew.Backoff{Low: wait, First: wait, High: wait, Wish: wish}.Wait(f, u)
	case h == nil:
		return patience.Wait(f, m.cfg.Lifetime, 0, u)
	default:
		return h.retryAfter(f, left, u)
	}
}

// poll returns when to fetch the bundles again. The caller holds mu.
func (m *Manager) poll() time.Duration {
	hint := renew.UsualPoll
	if t := m.trust.Load(); t != nil {
		if d, ok := t.own.RefreshHint(); ok {
			hint = d
		}
	}
	if len(m.offers) > 0 { // with a hint of a day it would take days to see whether the CA repeats the bundle
		hint = min(hint, renew.UsualPoll)
	}
	return renew.Poll(hint, shortestPoll, longestPoll, rand.Float64())
}

// label is the name of e in logs: its ID, or the form of a credential.
func (m *Manager) label(e *entry) string {
	if e == m.first {
		return m.cfg.Expect.String()
	}
	return e.id.String()
}

func (m *Manager) logRetry(ctx context.Context, msg string, e *entry, attempt int, err error, in time.Duration) {
	m.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, msg, slog.String("id", m.label(e)), slog.Int("attempt", attempt),
		slog.Any("err", err), slog.Duration("retry_in", in))
}

// Add adds an identity, which must be a workload in the Manager's trust domain. The Manager obtains and renews it
// like the default identity, and serves it under its ID. Adding it again does nothing. Add does not block: the first
// certificate comes while Run runs, or with a call of [Manager.GenerateSecret].
func (m *Manager) Add(id spiffe.ID) error {
	switch {
	case id.IsZero():
		return fmt.Errorf("secretcache: add: %w", spiffe.ErrZero)
	case id.Path() == "":
		return fmt.Errorf("secretcache: add: %q names a trust domain and not a workload", id)
	case !id.MemberOf(m.domain()):
		return fmt.Errorf("secretcache: add: %q is not in the trust domain %q", id, m.domain())
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	e := &entry{id: id}
	if _, there := m.names.LoadOrStore(id.String(), e); !there {
		m.identities.Put(e, 0)
		m.tell(id.String())
	}
	return nil
}

// Remove forgets an identity that was added, with its key, and ends a running attempt to renew it. Calls that wait
// for it return an error that wraps [io/fs.ErrNotExist]. The default identity cannot be removed.
func (m *Manager) Remove(id spiffe.ID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.names.Load(id.String())
	if !ok || v == m.first {
		return
	}
	e := v.(*entry)
	m.names.Delete(id.String())
	m.identities.Remove(e)
	e.Cancel()
	m.tell(id.String())
}

const maxAttempts = 50

// record keeps the last few attempts. A failure like the last attempt's for the same identity only counts it again.
// The caller holds mu.
func (m *Manager) record(tried report.Attempt) {
	for k := range slices.Backward(m.tried) {
		if last := &m.tried[k]; last.Names[0] == tried.Names[0] {
			if tried.Failure != "" && last.Failure == tried.Failure {
				last.Time = tried.Time
				last.Count++
				return
			}
			break
		}
	}
	if len(m.tried) == maxAttempts {
		m.tried = slices.Delete(m.tried, 0, 1)
	}
	m.tried = append(m.tried, tried)
}
