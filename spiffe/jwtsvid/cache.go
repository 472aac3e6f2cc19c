package jwtsvid

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
	"github.com/svidkit/svidkit/internal/renew"
)

// Source obtains tokens for this workload. A workloadapi.Source is one, and so is a [Cache]. Fetch must be safe for
// concurrent use and return when ctx is done. An error may say when to call again: see [spiffe.ErrNotReady].
type Source interface {
	// Fetch returns a token whose "aud" has exactly the given values.
	Fetch(ctx context.Context, audience ...string) (token string, err error)
}

const (
	shortestLife   = time.Second      // between two fetches, for tokens with less than two seconds to live
	forcedInterval = 10 * time.Second // between two fetches for a token that a server has refused
	remembered     = time.Minute      // how long Run tries to get a missing token after the last call for it
	concurrency    = 16               // fetches that Run makes at the same time
	fetchTimeout   = 30 * time.Second // for each attempt
	mostEntries    = 1000             // sets of audiences
)

// patience is shorter than for certificates, because a caller without a token fails until the next fetch.
var patience = renew.Patience{Impatient: 5 * time.Second, Longest: 30 * time.Second, Wish: 5 * time.Second}

// Cache keeps the tokens of this workload fresh, one for each requested set of audiences. It is safe for
// concurrent use, and itself a [Source]. No printer shows the tokens.
//
// A token is fetched again when half of its life is over, or a little earlier, by chance. The old token is served
// until the new one is there or the old one expires. There is at most one attempt for a set of audiences at a
// time, which ends after 30 seconds. The wait after a failure begins at a second or less and grows to 30 seconds while
// there is a token, and to 5 without one. Of more than 1,000 sets of audiences, the least recently used is dropped.
type Cache struct {
	redacted
	source  Source
	logger  *slog.Logger
	timeout time.Duration // of an attempt
	most    int           // entries

	entries atomic.Pointer[map[string]*entry] // replaced, never changed; writers hold mu

	life lifecycle.Life

	mu   sync.Mutex
	loop renew.Loop[*entry]
}

type entry struct {
	renew.Entry // the Cache's mu guards it

	audience []string // sorted
	state    atomic.Pointer[entryState]
	asked    atomic.Int64 // the last time, in nanoseconds since 1970, give or take a second
	used     atomic.Bool  // the token was served since it was fetched

	forced  time.Time // when a token was last fetched because a server had refused one; guarded by mu
	waiting int       // calls that wait; guarded by mu
}

// entryState never changes; writers of entry.state hold mu.
type entryState struct {
	token    string // empty until there is one
	expires  time.Time
	received time.Time
	err      error         // of the last attempt
	planned  time.Time     // when the next attempt was planned
	wait     time.Duration // from then to the next attempt
}

func (st *entryState) valid(now time.Time) bool { return st.token != "" && now.Before(st.expires) }
func (st *entryState) due(now time.Time) bool   { return renew.Elapsed(st.planned, now) >= st.wait }

// NewCache returns a Cache of the tokens that source fetches. It starts nothing. The logger gets a record of each new
// token (Debug) and of each failed attempt that no call waited for (Warn), with the attributes audience, err, retry_in
// and expires; nil means no logs.
func NewCache(source Source, logger *slog.Logger) (*Cache, error) {
	if source == nil {
		return nil, errors.New("jwtsvid: new cache: no source")
	}
	c := &Cache{
		redacted: redact.New("jwtsvid.Cache"), source: source, logger: ratelog.Patient(logger),
		timeout: fetchTimeout, most: mostEntries,
	}
	c.entries.Store(&map[string]*entry{})
	c.loop = renew.Loop[*entry]{Mu: &c.mu, Attempt: c.attempt, Slots: concurrency}
	return c, nil
}

// Fetch returns a token for the audience: the one in the cache, at once and without a lock, or a new one.
// The order of several values does not matter. The result is a credential.
//
// A caller waits only if there is no token, until there is one or ctx is done. Several callers may wait for one
// attempt, which goes on when one of them leaves. While the source fails and there is no token to serve, calls
// return the last failure at once until the next attempt is due.
func (c *Cache) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	e, err := c.entry(audience)
	if err != nil {
		return "", err
	}
	now := time.Now()
	firstLately := e.touch(now)
	st := e.state.Load()
	if !st.valid(now) {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.wait(ctx, e, "")
	}
	if firstLately && st.due(now) {
		c.mu.Lock()
		c.loop.Demand(e)
		c.mu.Unlock()
	}
	return st.token, nil
}

// Run renews tokens when they are due, before a caller asks for them. It blocks until ctx is done, then cancels its
// attempts, waits for them, and returns nil. A second call at the same time returns an error at once; Run may be
// called again after it has returned.
//
// A Cache works without Run too. The next call for a token that is due then starts a goroutine, which fetches the
// new token and ends, while the old one is served. With Run, unused tokens are dropped when they expire.
func (c *Cache) Run(ctx context.Context) error {
	return c.life.RunAs(ctx, "jwtsvid: cache", func(ctx context.Context) error {
		c.loop.Run(ctx)
		return nil
	})
}

// entry returns the entry for a set of audiences, and adds one if there is none.
func (c *Cache) entry(audience []string) (*entry, error) {
	if len(audience) == 1 {
		if e := (*c.entries.Load())[audience[0]]; e != nil {
			return e, nil
		}
	}
	if err := checkAudience(audience); err != nil {
		return nil, fmt.Errorf("jwtsvid: fetch: %w", err)
	}
	e := &entry{audience: slices.Sorted(slices.Values(audience))}
	if old := (*c.entries.Load())[e.key()]; old != nil {
		return old, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := (*c.entries.Load())[e.key()]; old != nil {
		return old, nil
	}
	m := maps.Clone(*c.entries.Load())
	if len(m) >= c.most {
		c.evict(m)
	}
	e.state.Store(&entryState{})
	e.asked.Store(time.Now().UnixNano())
	m[e.key()] = e
	c.entries.Store(&m)
	return e, nil
}

// key returns the audience, or all of them with a byte between them that UTF-8 does not contain.
func (e *entry) key() string { return strings.Join(e.audience, "\xff") }

// evict drops the entry whose last call is the longest ago. An attempt for it goes on, for the calls that wait.
func (c *Cache) evict(m map[string]*entry) {
	var oldest *entry
	for _, e := range m {
		if oldest == nil || e.asked.Load() < oldest.asked.Load() {
			oldest = e
		}
	}
	delete(m, oldest.key())
	c.loop.Remove(oldest)
}

// touch records a call. It writes at most once a second, because all readers share the cache line, and reports
// whether it did.
func (e *entry) touch(now time.Time) bool {
	if !e.used.Load() {
		e.used.Store(true)
	}
	since := now.UnixNano() - e.asked.Load()
	if since >= 0 && since < int64(time.Second) { // less than 0: the clock was put back
		return false
	}
	e.asked.Store(now.UnixNano())
	return true
}

// wait waits for a token other than rejected and returns it. The caller holds mu, which is released during the wait.
func (c *Cache) wait(ctx context.Context, e *entry, rejected string) (string, error) {
	for {
		st, now := e.state.Load(), time.Now()
		switch {
		case st.valid(now) && st.token != rejected:
			return st.token, nil
		case st.err != nil && !e.Busy() && !st.due(now) && rejected == "":
			return "", e.failed(st.err)
		case ctx.Err() != nil:
			return "", e.failed(context.Cause(ctx))
		}
		c.loop.Start(e)
		e.waiting++
		_ = c.loop.Await(ctx, e) // an attempt that was ended by the end of Run is followed by another
		e.waiting--
		switch got := e.state.Load(); {
		case got == st:
		case got.err != nil:
			return "", e.failed(got.err)
		case got.token == rejected:
			return "", e.failed(errors.New("the source gave the one again that was refused"))
		default:
			return got.token, nil
		}
	}
}

func (e *entry) failed(err error) error {
	return fmt.Errorf("jwtsvid: fetch a token for %s: %w", quote(e.audience), err)
}

// replace starts fetching a replacement for a token that a server has refused, unless one was fetched lately for that
// reason. With wait it returns the replacement, or an error if another token would not help.
func (c *Cache) replace(ctx context.Context, refused, audience string, wait bool) (string, error) {
	e, err := c.entry([]string{audience})
	if err != nil {
		return "", err
	}
	c.mu.Lock()
	// Held from the check until the attempt has started, or another request would give up in between.
	defer c.mu.Unlock()
	if now := time.Now(); e.state.Load().token == refused && !e.Busy() {
		if !e.forced.IsZero() && renew.Elapsed(e.forced, now) < forcedInterval {
			return "", e.failed(fmt.Errorf(
				"a server has refused another one in the last %v: it is not the token's fault", forcedInterval))
		}
		e.forced = now
		e.used.Store(true)
		c.loop.Start(e)
	}
	if !wait {
		return "", nil
	}
	return c.wait(ctx, e, refused)
}

// attempt fetches a token for e, unless it is unused, and plans the next attempt.
func (c *Cache) attempt(base context.Context, e *entry) {
	if c.rest(e) {
		return
	}
	ctx, cancel := context.WithTimeoutCause(base, c.timeout,
		fmt.Errorf("no answer in %v: %w", c.timeout, context.DeadlineExceeded))
	defer cancel()
	token, err := c.source.Fetch(ctx, slices.Clone(e.audience)...)
	var expires time.Time
	if err == nil {
		expires, err = e.check(token)
	} else if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}

	c.mu.Lock()
	now, unseen := time.Now(), e.waiting == 0
	st := *e.state.Load()
	var wait time.Duration
	switch {
	case err == nil:
		e.Succeeded()
		e.used.Store(false)
		st = entryState{token: token, expires: expires, received: now}
		wait = max(renew.RenewAt(now, now, expires, 0.5, 0.1, rand.Float64()).Sub(now), shortestLife)
	case base.Err() == nil: // else it was ended by the end of Run
		st.err = err
		wait = patience.Wait(e.Failed(err), st.expires.Sub(st.received), st.expires.Sub(now), rand.Float64())
	}
	if wait > 0 {
		st.planned, st.wait = now, wait
		e.state.Store(&st)
	}
	c.loop.Done(e, wait)
	c.mu.Unlock()
	if err == nil || unseen && wait > 0 {
		c.log(base, e, expires, err, wait)
	}
}

// log logs the result of an attempt.
func (c *Cache) log(ctx context.Context, e *entry, expires time.Time, err error, wait time.Duration) {
	level, message := slog.LevelDebug, "jwtsvid: new token"
	attrs := []slog.Attr{slog.String("audience", quote(e.audience)), slog.Time("expires", expires)}
	if err != nil {
		level, message = slog.LevelWarn, "jwtsvid: no new token"
		attrs = append(attrs[:1], slog.Any("err", err), slog.Duration("retry_in", wait))
	}
	c.logger.LogAttrs(ctx, level, message, attrs...)
}

// rest ends the attempt for e if no call has used its token or, without a token, if no call came for a while. The
// entry is checked again when the token expires, and then dropped.
func (c *Cache) rest(e *entry) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	st, now := e.state.Load(), time.Now()
	valid := st.valid(now)
	if valid && e.used.Load() || !valid && now.UnixNano()-e.asked.Load() < int64(remembered) {
		return false
	}
	if !valid && !e.Removed() {
		m := maps.Clone(*c.entries.Load())
		delete(m, e.key())
		c.entries.Store(&m)
		c.loop.Remove(e)
	}
	c.loop.Done(e, st.expires.Sub(now))
	return true
}

// check checks a token from the source, as far as a client can.
func (e *entry) check(token string) (expires time.Time, err error) {
	u, err := ParseUnverified(token)
	if err != nil {
		return time.Time{}, fmt.Errorf("the source gave something else: %w", err)
	}
	got := slices.Compact(slices.Sorted(slices.Values(u.Audience)))
	switch {
	case !slices.Equal(got, e.audience):
		return time.Time{}, fmt.Errorf("the source gave a token for %s", quote(u.Audience))
	case !time.Now().Before(u.Expires):
		return time.Time{}, fmt.Errorf("the source gave a token that ended at %s; compare the clocks",
			u.Expires.UTC().Format(time.RFC3339))
	}
	return u.Expires, nil
}
