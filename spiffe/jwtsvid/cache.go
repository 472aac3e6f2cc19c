package jwtsvid

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Source obtains tokens for this workload. A workloadapi.Source is one, and so is a [Cache]. Fetch must be safe for concurrent use and return when ctx is done. An error
// may have the method Retryable() (after time.Duration, ok bool), which says when to ask again.
type Source interface {
	// Fetch returns a token whose "aud" has exactly the given values.
	Fetch(ctx context.Context, audience ...string) (token string, err error)
}

// The times of a Cache.
const (
	defaultTimeout = 30 * time.Second
	defaultEntries = 1000
	shortestWait   = time.Second      // between two attempts
	longestWait    = 30 * time.Second // while there is a token to serve
	impatientWait  = 5 * time.Second  // while there is none
	longestWish    = time.Minute      // that a Source can ask of us
	forcedInterval = 10 * time.Second // between two attempts for a token that a server has refused

	// longestSleep bounds the sleep of Run. Timers stand still while the machine is suspended, tokens do
	// not.
	longestSleep = time.Minute

	concurrency = 16 // attempts that Run makes at the same time
)

// CacheOptions are the choices of a [Cache] that have a default.
type CacheOptions struct {
	// Timeout bounds each attempt to fetch a token; 0 means 30 seconds.
	Timeout time.Duration

	// Size is how many tokens are kept, one for each set of audiences; 0 means 1,000. When there are more,
	// the one that was not asked for the longest goes.
	Size int

	// Logger is told of each new token (Debug) and of attempts that failed while nobody was waiting for
	// them (Warn), with the attributes audience, err, retry_in and expires. Nil means silence.
	Logger *slog.Logger
}

// Cache keeps the tokens of this workload fresh, one for each set of audiences that was asked for. It is
// safe for concurrent use, and itself a [Source]. However it is printed, the tokens do not show.
//
// A token is fetched again when half of its life is over, a little earlier by chance. Until the new one
// is in hand the old one is served, to the moment it expires. There is at most one attempt for a set of
// audiences at a time; after a failure the next comes after a wait of half a second, growing to 30.
type Cache struct {
	source  Source
	timeout time.Duration
	size    int
	logger  *slog.Logger

	entries atomic.Pointer[map[entryKey]*entry] // replaced, never changed; writers hold mu

	mu       sync.Mutex
	run      *cacheRun // nil while Run is not running
	inFlight int       // attempts that belong to run
}

type cacheRun struct {
	ctx  context.Context
	wake chan struct{} // has room for one
	wg   sync.WaitGroup
}

// entryKey is a set of audiences: the audience itself, or all of them in order with their lengths.
type entryKey struct {
	n    int
	text string
}

type entry struct {
	audience []string // sorted
	state    atomic.Pointer[entryState]
	asked    atomic.Int64 // the last time, in nanoseconds since 1970, give or take a second
	forced   time.Time    // when a server last refused a token of ours; guarded by mu
}

// entryState never changes; writers of entry.state hold mu.
type entryState struct {
	token    string // empty until there is one
	expires  time.Time
	received time.Time
	next     time.Time // when to fetch again
	failures int       // in a row
	err      error     // of the last failure
	flight   *flight   // nil while nobody fetches
}

// flight is an attempt that is being made.
type flight struct {
	waited bool // somebody waits for it; guarded by mu

	done    chan struct{} // closed when the rest is set
	token   string
	err     error
	stopped bool // by the end of Run, which is nobody's failure
}

// NewCache returns a Cache of what source fetches. It starts nothing. The options may be nil.
func NewCache(source Source, opts *CacheOptions) (*Cache, error) {
	var o CacheOptions
	if opts != nil {
		o = *opts
	}
	switch {
	case source == nil:
		return nil, errors.New("jwtsvid: new cache: no source")
	case o.Timeout < 0 || o.Size < 0:
		return nil, fmt.Errorf("jwtsvid: new cache: Timeout is %v and Size %d: none may be negative", o.Timeout, o.Size)
	}
	c := &Cache{
		source:  source,
		timeout: cmp.Or(o.Timeout, defaultTimeout),
		size:    cmp.Or(o.Size, defaultEntries),
		logger:  cmp.Or(o.Logger, slog.New(slog.DiscardHandler)),
	}
	c.entries.Store(new(map[entryKey]*entry))
	return c, nil
}

// Fetch returns a token for the audience: the one in the cache, at once and without a lock, or a new one.
// The order of several values does not matter. The result is a credential.
//
// Only a caller for whom there is no token waits, until there is one or ctx is done; others may wait for
// the same attempt, which goes on when one of them leaves. While the source fails and there is nothing to
// serve, calls return the last failure at once until it is time to try again.
func (c *Cache) Fetch(ctx context.Context, audience ...string) (token string, err error) {
	e, err := c.entry(audience)
	if err != nil {
		return "", err
	}
	now := time.Now()
	e.touch(now)
	st := e.state.Load()
	if !st.valid(now) {
		return c.wait(ctx, e)
	}
	if st.flight == nil && reached(now, st.next) {
		c.refresh(e)
	}
	return st.token, nil
}

// Run fetches tokens again when they are due, so that no caller has to find them so. It blocks until ctx
// is done, then ends what it has started, waits for it, and returns the cause of ctx. It returns at once,
// with an error, if it is running already; it may be called again after it has returned.
//
// Without Run a Cache works too: a token that is due is then fetched again when it is next asked for, by
// a goroutine that lasts as long as the attempt, while the old one is served. With Run, tokens that
// nobody asks for any more are dropped when they expire.
func (c *Cache) Run(ctx context.Context) error {
	r := &cacheRun{ctx: ctx, wake: make(chan struct{}, 1)}
	c.mu.Lock()
	if c.run != nil {
		c.mu.Unlock()
		return errors.New("jwtsvid: cache: already running")
	}
	c.run = r
	c.mu.Unlock()

	timer := time.NewTimer(longestSleep)
	defer timer.Stop()
	for ctx.Err() == nil {
		timer.Reset(c.startDue(r))
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.wake:
		}
	}
	c.mu.Lock()
	c.run = nil // so that nothing more is started
	c.mu.Unlock()
	r.wg.Wait()
	return context.Cause(ctx)
}

// startDue starts the attempts that are due, drops what is over, and returns how long there is nothing
// to do unless somebody calls.
func (c *Cache) startDue(r *cacheRun) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	sleep := longestSleep
	var over []entryKey
	for k, e := range *c.entries.Load() {
		switch st := e.state.Load(); {
		case st.flight != nil: // wakes us when it ends
		case !e.wanted(st, now) && !st.valid(now):
			over = append(over, k)
		case !e.wanted(st, now):
			sleep = min(sleep, until(now, st.expires))
		case !reached(now, st.next):
			sleep = min(sleep, until(now, st.next))
		case c.inFlight < concurrency:
			c.start(e, r)
		}
	}
	if len(over) > 0 {
		m := maps.Clone(*c.entries.Load())
		for _, k := range over {
			delete(m, k)
		}
		c.entries.Store(&m)
	}
	return sleep
}

// entry returns the entry for a set of audiences, a new one if there is none.
func (c *Cache) entry(audience []string) (*entry, error) {
	if len(audience) == 1 && audience[0] != "" {
		if e := (*c.entries.Load())[entryKey{1, audience[0]}]; e != nil {
			return e, nil
		}
	}
	if err := checkAudience(audience); err != nil {
		return nil, fmt.Errorf("jwtsvid: fetch: %w", err)
	}
	sorted := slices.Sorted(slices.Values(audience))
	key := entryKey{len(sorted), sorted[0]}
	if len(sorted) > 1 {
		key.text = ""
		for _, a := range sorted {
			key.text += strconv.Itoa(len(a)) + ":" + a
		}
		if e := (*c.entries.Load())[key]; e != nil {
			return e, nil
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := *c.entries.Load()
	if e := old[key]; e != nil {
		return e, nil
	}
	m := maps.Clone(old)
	if m == nil {
		m = make(map[entryKey]*entry)
	}
	if len(m) >= c.size {
		c.evict(m)
	}
	e := &entry{audience: sorted}
	e.state.Store(&entryState{})
	e.asked.Store(time.Now().UnixNano()) // before anybody can see it and find it too old
	m[key] = e
	c.entries.Store(&m)
	return e, nil
}

// evict drops the entry that was not asked for the longest. An attempt for it goes on, for those who
// wait.
func (c *Cache) evict(m map[entryKey]*entry) {
	var oldest entryKey
	at := int64(0)
	for k, e := range m {
		if asked := e.asked.Load(); at == 0 || asked < at {
			oldest, at = k, asked
		}
	}
	delete(m, oldest)
}

// touch notes that somebody asked. It writes once a second only, as all readers share the cache line.
func (e *entry) touch(now time.Time) {
	if n := now.UnixNano(); n-e.asked.Load() >= int64(time.Second) {
		e.asked.Store(n)
	}
}

// wanted reports whether Run should see to e: somebody has asked for the token since we received it or,
// if there is none, not long ago.
func (e *entry) wanted(st *entryState, now time.Time) bool {
	if st.valid(now) {
		return e.asked.Load() > st.received.UnixNano()
	}
	return now.UnixNano()-e.asked.Load() < int64(longestSleep)
}

func (st *entryState) valid(now time.Time) bool { return st.token != "" && now.Before(st.expires) }

// reached reports whether t has come, by the monotonic clock or by the wall clock: the first stands
// still while the machine is suspended, the second may be put back.
func reached(now, t time.Time) bool { return !now.Before(t) || !now.Round(0).Before(t.Round(0)) }

func until(now, t time.Time) time.Duration { return max(t.Sub(now), time.Millisecond) }

// refresh has the token of e fetched again, which is due, while it is still good.
func (c *Cache) refresh(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch st := e.state.Load(); {
	case st.flight != nil || !reached(time.Now(), st.next):
	case c.run != nil:
		// Somebody asks, also if the clock was put back since we received the token.
		e.asked.Store(max(e.asked.Load(), st.received.UnixNano()+1))
		c.wake()
	default:
		c.start(e, nil)
	}
}

// wait returns a token for a caller who has none.
func (c *Cache) wait(ctx context.Context, e *entry) (string, error) {
	for {
		f, token, err := c.join(e)
		again := false
		if f != nil {
			token, err, again = f.wait(ctx)
		}
		switch {
		case again:
			continue
		case err != nil:
			return "", e.failed(err)
		}
		return token, nil
	}
}

// join returns the attempt for e, a new one if there is none and it is time. Otherwise it returns what
// is known.
func (c *Cache) join(e *entry) (*flight, string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	switch st := e.state.Load(); {
	case st.valid(now):
		return nil, st.token, nil
	case st.flight == nil && st.err != nil && !reached(now, st.next):
		return nil, "", st.err
	default:
		return c.await(e, st), "", nil
	}
}

// await returns the attempt that is being made for e, or starts one, for somebody who will wait for it.
// The caller holds mu.
func (c *Cache) await(e *entry, st *entryState) *flight {
	f := st.flight
	if f == nil {
		f = c.start(e, nil)
	}
	f.waited = true
	return f
}

// wait waits for the end of f or of ctx; again says that f was stopped and that nothing is known.
func (f *flight) wait(ctx context.Context) (token string, err error, again bool) {
	select {
	case <-f.done:
		return f.token, f.err, f.stopped
	case <-ctx.Done():
		return "", context.Cause(ctx), false
	}
}

func (e *entry) failed(err error) error {
	return fmt.Errorf("jwtsvid: fetch a token for %s: %w", quote(e.audience), err)
}

// renew returns a token for one audience other than rejected, which a server has refused, or an error if
// there is no point in another one.
func (c *Cache) renew(ctx context.Context, rejected, audience string) (string, error) {
	e, err := c.entry([]string{audience})
	if err != nil {
		return "", err
	}
	for {
		f, token, err := c.joinForced(e, rejected)
		again := false
		if f != nil {
			token, err, again = f.wait(ctx)
		}
		switch {
		case again:
			continue
		case err != nil:
			return "", e.failed(err)
		case token == rejected:
			return "", e.failed(errors.New("the source gave the one again that was refused"))
		}
		return token, nil
	}
}

func (c *Cache) joinForced(e *entry, rejected string) (*flight, string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	st := e.state.Load()
	switch {
	case st.valid(now) && st.token != rejected:
		return nil, st.token, nil // somebody was faster
	case st.flight == nil && !e.mayForce(now):
		return nil, "", fmt.Errorf("a server has refused another one in the last %v: it is not the token's fault", forcedInterval)
	case st.flight == nil:
		e.forced = now
	}
	return c.await(e, st), "", nil
}

// doubt has a token fetched in the place of one that a server has refused, which nobody waits for.
func (c *Cache) doubt(rejected, audience string) {
	e, err := c.entry([]string{audience})
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if st := e.state.Load(); st.token == rejected && st.flight == nil && e.mayForce(now) {
		e.forced = now
		c.start(e, nil)
	}
}

// mayForce reports whether it is not too soon to ask for a token only because a server has refused one.
// The caller holds mu.
func (e *entry) mayForce(now time.Time) bool {
	return e.forced.IsZero() || reached(now, e.forced.Add(forcedInterval))
}

// start starts an attempt for e: Run's own if r is not nil, and else one that ends by itself. The caller
// holds mu.
func (c *Cache) start(e *entry, r *cacheRun) *flight {
	f := &flight{done: make(chan struct{})}
	st := *e.state.Load()
	st.flight = f
	e.state.Store(&st)
	if r == nil {
		go c.fly(context.Background(), e, f, nil)
	} else {
		c.inFlight++
		r.wg.Go(func() { c.fly(r.ctx, e, f, r) })
	}
	return f
}

// fly makes an attempt and publishes what came of it.
func (c *Cache) fly(base context.Context, e *entry, f *flight, r *cacheRun) {
	ctx, cancel := context.WithTimeoutCause(base, c.timeout, fmt.Errorf("no answer in %v: %w", c.timeout, context.DeadlineExceeded))
	defer cancel()
	token, err := c.source.Fetch(ctx, slices.Clone(e.audience)...)
	var expires time.Time
	if err == nil {
		expires, err = e.check(token)
	} else if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	f.token, f.err, f.stopped = token, err, err != nil && base.Err() != nil
	retryIn, unseen := c.land(e, f, r, expires)
	close(f.done)
	switch audience := slog.String("audience", quote(e.audience)); {
	case err == nil:
		c.logger.LogAttrs(base, slog.LevelDebug, "jwtsvid: new token", audience, slog.Time("expires", expires))
	case unseen:
		c.logger.LogAttrs(base, slog.LevelWarn, "jwtsvid: no new token", audience, slog.Any("err", err), slog.Duration("retry_in", retryIn))
	}
}

// land makes the results of f those of e. It returns when to try again after a failure, and whether
// nobody else will learn of that.
func (c *Cache) land(e *entry, f *flight, r *cacheRun, expires time.Time) (retryIn time.Duration, unseen bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	st := *e.state.Load()
	st.flight = nil
	switch {
	case f.err == nil:
		due := now.Add(renewAfter(expires.Sub(now), rand.Float64()))
		st = entryState{token: f.token, expires: expires, received: now, next: due}
	case !f.stopped:
		st.failures++
		st.err = f.err
		retryIn = retryAfter(f.err, st.failures, st.expires.Sub(now), rand.Float64())
		st.next = now.Add(retryIn)
	}
	e.state.Store(&st)
	if r != nil {
		c.inFlight--
	}
	c.wake()
	return retryIn, !f.waited && !f.stopped
}

// wake has Run look again. The caller holds mu.
func (c *Cache) wake() {
	if c.run == nil {
		return
	}
	select {
	case c.run.wake <- struct{}{}:
	default:
	}
}

// check looks at what a source has fetched, as far as one can who is not the receiver.
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
		return time.Time{}, fmt.Errorf("the source gave a token that ended at %s; compare the clocks", u.Expires.UTC().Format(time.RFC3339))
	}
	return u.Expires, nil
}

// renewAfter returns when to fetch again what lives for life from now: after half of that, or up to a
// tenth of it sooner by u in [0,1), so that a fleet does not move in step.
func renewAfter(life time.Duration, u float64) time.Duration {
	return max(life/2-time.Duration(u*float64(life)/10), shortestWait)
}

// retryAfter returns how long to wait after err, the given number of failures in a row, while the old
// token has left to live (0 or less if there is none). The wait doubles up to a limit, and is drawn from
// its upper half by u in [0,1); what the source wishes for is respected, up to half of what is left.
func retryAfter(err error, failures int, left time.Duration, u float64) time.Duration {
	limit, wishLimit := impatientWait, impatientWait
	if left > 0 {
		limit = min(max(left/25, shortestWait), longestWait)
		wishLimit = min(left/2, longestWish)
	}
	wait := min(shortestWait<<min(failures-1, 16), limit)
	wait -= time.Duration(u * float64(wait) / 2)
	e, ok := errors.AsType[interface {
		error
		Retryable() (time.Duration, bool)
	}](err)
	if ok {
		wish, again := e.Retryable()
		if !again {
			wish = wishLimit
		}
		wait = max(wait, min(wish, wishLimit))
	}
	return wait
}

// String returns how many sets of audiences there are tokens for.
func (c *Cache) String() string {
	n := 0
	if c != nil {
		n = len(*c.entries.Load())
	}
	return fmt.Sprintf("jwtsvid.Cache(%d)", n)
}

// GoString returns the same as String.
func (c *Cache) GoString() string { return c.String() }

// LogValue implements [slog.LogValuer] with String.
func (c *Cache) LogValue() slog.Value { return slog.StringValue(c.String()) }
