package secretcache_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var oneSchedule = flag.Int64("schedule", -1, "the one schedule that TestSchedules plays")

// TestSchedules plays random schedules of what can happen to a Manager: a CA that fails, is slow, hangs, or answers
// garbage, roots that change, and a machine that is suspended or whose clock is set. After the first success there is
// something to read at every moment; what has expired is not handed out while the Manager has had something that has
// not; it never asks the CA in a tight loop; and when all is well again, it soon is.
//
// A schedule that fails is printed, and is played alone with
//
//	go test ./secretcache -run TestSchedules -schedule SEED
//
// In a bubble of testing/synctest the wall clock and the monotonic clock are one, and a goroutine that waits for a
// mutex stops both. So a suspension is played by what it means: the scheduler of the Manager reads a wall clock that
// has leapt, while its timers have stood still; and the dates of all certificates are moved into the past by as much,
// those that the Manager holds and those that the CA issues from then on. A call that is under way when the machine
// falls asleep fails, as its connection does.
func TestSchedules(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.3-5")
	from, n := int64(10), int64(16) // 10,000 take minutes, most of them in signatures
	switch {
	case *long:
		from, n = 0, 10_000
	case rounds.Race:
		from, n = 0, 60
	case rounds.Of(1) > 1:
		from, n = 0, int64(rounds.Of(64))
	}
	if *oneSchedule >= 0 {
		synctest.Test(t, func(t *testing.T) { play(t, *oneSchedule) })
		return
	}
	const shards = 4
	for shard := range int64(shards) {
		t.Run(fmt.Sprint("shard ", shard), func(t *testing.T) {
			t.Parallel()
			for seed := from + shard; seed < n && !t.Failed(); seed += shards {
				synctest.Test(t, func(t *testing.T) { play(t, seed) })
			}
		})
	}
}

// schedule is what happens, and when.
type schedule struct {
	seed   int64
	life   time.Duration
	events []event
}

// event is one thing that happens, after the Manager was ready.
type event struct {
	at   time.Duration
	kind string
	d    time.Duration // the latency, or by how much the clock leaps
	n    int           // which garbage
}

func (s schedule) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "schedule %d: certificates live for %v", s.seed, s.life)
	for _, e := range s.events {
		fmt.Fprintf(&b, "\n  %12v  %s", e.at.Round(time.Millisecond), e.kind)
		if e.d != 0 {
			fmt.Fprintf(&b, " by %v", e.d)
		}
		if e.kind == "garbage" {
			fmt.Fprintf(&b, ": %s", garbage[e.n].name)
		}
	}
	return b.String()
}

// newSchedule draws one. Certificates live for 20 seconds to a day. In three lives there are up to six spells in
// which the CA misbehaves, most of them for less than 45 % of a life, and up to four leaps of the clock.
func newSchedule(seed int64) schedule {
	random := rand.New(rand.NewPCG(uint64(seed), 12))
	s := schedule{seed: seed, life: time.Duration(20 * float64(time.Second) * math.Pow(24*3600/20, random.Float64()))}
	part := func(most float64) time.Duration { return time.Duration(most * random.Float64() * float64(s.life)) }
	for range 1 + random.IntN(6) {
		begin, length := part(3), part(0.45)
		if random.IntN(6) == 0 {
			length = part(1.5)
		}
		e := event{at: begin, kind: []string{"fails", "fails", "slow", "hangs", "garbage", "garbage"}[random.IntN(6)]}
		switch e.kind {
		case "slow":
			e.d = part(0.05)
		case "garbage":
			if e.n = random.IntN(len(garbage)); e.n == endsAtOnce {
				length = min(length, time.Minute) // where there is nothing better it is taken, and renewed again and again
			}
		}
		s.events = append(s.events, e, event{at: begin + length, kind: "well"})
	}
	for range random.IntN(5) {
		e := event{at: part(3), kind: "suspended", d: part(0.5)}
		switch random.IntN(8) {
		case 0:
			e.d = part(10)
		case 1, 2: // set, and set right later
			e.kind, e.d = "clock set", part(0.5)
			if random.IntN(2) == 0 {
				e.d = -e.d
			}
			s.events = append(s.events, event{at: e.at + part(0.3), kind: "clock set", d: -e.d})
		}
		s.events = append(s.events, e)
	}
	for range random.IntN(3) {
		s.events = append(s.events, event{at: part(3), kind: []string{"root added", "root replaced"}[random.IntN(2)]})
	}
	slices.SortStableFunc(s.events, func(a, b event) int { return int(a.at - b.at) })
	return s
}

var errBroken = errors.New("the connection broke while the machine was suspended")

// endsAtOnce is an index of garbage.
const endsAtOnce = 6

// garbage is what a CA can answer that is good for nothing.
var garbage = []struct {
	name string
	edit func(*x509.Certificate)            // of the template
	out  func(w *world) []*x509.Certificate // the answer
}{
	{name: "no certificate", out: func(*world) []*x509.Certificate { return nil }},
	{name: "a certificate for another key", out: func(w *world) []*x509.Certificate { return w.other }},
	{name: "the root in place of the leaf", out: func(w *world) []*x509.Certificate {
		return []*x509.Certificate{w.ca.Root()}
	}},
	{name: "of a root that is in no bundle", out: func(w *world) []*x509.Certificate { return w.foreign }},
	{name: "expired", edit: func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
	}},
	{name: "not valid yet", edit: func(c *x509.Certificate) { c.NotBefore = c.NotAfter.Add(-time.Second) }},
	{name: "ends at once", edit: func(c *x509.Certificate) { c.NotAfter = time.Now().Add(1500 * time.Millisecond) }},
	{name: "a CA", edit: func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }},
	{name: "without names", edit: func(c *x509.Certificate) { c.URIs = nil }},
}

// world is the Manager, its CA and its machine.
type world struct {
	schedule
	t  *testing.T
	m  *secretcache.Manager
	ca *spiffetest.CA

	other, foreign []*x509.Certificate
	leapt          atomic.Int64 // by how many nanoseconds the wall clock of the machine is ahead of that of the bubble

	mu      sync.Mutex
	mode    event         // how the CA is
	broken  chan struct{} // closed when the machine falls asleep
	ahead   time.Duration // of the clock of the machine, to the one of the CA
	ends    map[string]time.Time
	best    time.Time // the latest end of all that was handed out, on the wall clock of the machine
	asked   time.Time
	last    *spiffe.BundleSet
	ready   bool
	failure string
}

func play(t *testing.T, seed int64) {
	w := &world{schedule: newSchedule(seed), t: t, ca: spiffetest.NewCA(t, "example.org"), broken: make(chan struct{}), ends: map[string]time.Time{}}
	w.other, _ = w.ca.Certificate("/web")
	w.foreign, _ = spiffetest.NewCA(t, "example.org").Certificate("/web")
	w.ca.EditTemplates(w.template)
	w.m = must.Get(secretcache.New(secretcache.Config{ID: web, CA: w, Lifetime: w.life, Timeout: 10 * time.Second, NewKey: w.newKey}))(t)
	tick := max(900*time.Millisecond, w.life/100)
	secretcache.SetClock(w.m, tick, func() (mono, wall time.Time) { return time.Now(), w.now() })
	defer w.m.Subscribe(func(string) { w.look("a subscriber") })()
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { require.NoError(t, w.m.Run(ctx)) })
	defer all.Wait()
	defer cancel()
	must.Get(w.m.GenerateSecret(ctx, "default"))(t)
	w.mu.Lock()
	w.ready = true
	w.mu.Unlock()
	all.Go(func() {
		for ctx.Err() == nil {
			changed := w.m.Changed()
			w.look("a reader that follows")
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	})

	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.failure != "" {
			t.Errorf("%s\n%s", w.failure, w.schedule)
		}
	}()
	if *oneSchedule >= 0 {
		t.Log(w.schedule)
	}
	begin := time.Now()
	look := max(w.life/40, time.Second)
	for _, e := range w.events {
		for at := begin.Add(e.at); time.Now().Before(at); {
			time.Sleep(min(look, time.Until(at)))
			if w.look("a reader"); w.failed() {
				return
			}
		}
		w.happens(e)
		w.look("a reader")
	}
	w.mu.Lock()
	w.mode = event{}
	back := -w.ahead
	w.mu.Unlock()
	w.happens(event{kind: "clock set", d: back})
	// Whatever it waits for, it has by then: the wait after a failure, that after a certificate that ends at once, and the
	// calls that began before.
	for range 20 {
		time.Sleep((30*time.Second + 2*10*time.Second + w.life/7 + 2*tick) / 20)
		w.look("a reader")
	}
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if svid, err := w.m.SVID(); w.failure == "" && (err != nil || !w.now().Before(w.ends[svid.Leaf().SerialNumber.String()])) {
		w.fail("all was well at last, and nothing good is handed out: %v", err)
	}
	if st := status(t, w.m, web); w.failure == "" && st.Failures > 0 {
		w.fail("all was well at last, and the identity is not renewed: %v", st.Err)
	}
}

func (w *world) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.failure != ""
}

// now is the wall clock of the machine.
func (w *world) now() time.Time { return time.Now().Round(0).Add(time.Duration(w.leapt.Load())) }

func (w *world) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf("at %v: ", w.now()) + fmt.Sprintf(format, args...)
	}
}

var done = func() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
}()

// look is a reader.
func (w *world) look(who string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ready {
		return
	}
	svid, err := w.m.SVID()
	snap, snapErr := w.m.Snapshot()
	_, bundleErr := w.m.Bundle(domain)
	_, rootErr := w.m.GenerateSecret(done, "ROOTCA")
	if err := errors.Join(err, snapErr, bundleErr, rootErr); err != nil {
		w.fail("%s finds nothing: %v", who, err)
		return
	}
	if _, err := snap.Bundle(domain); err != nil {
		w.fail("%s finds no bundle in the snapshot: %v", who, err)
	}
	end, known := w.ends[svid.Leaf().SerialNumber.String()]
	if !known {
		w.fail("%s got a certificate that the CA has never issued", who)
	}
	now := w.now()
	if end.After(w.best) {
		w.best = end
	}
	if !now.Before(end) && now.Before(w.best) {
		w.fail("%s got a certificate that ended %v ago, and one of those before it ends in %v", who, now.Sub(end), w.best.Sub(now))
	}
	_, err = w.m.GenerateSecret(done, "default")
	after, afterErr := w.m.SVID()
	if afterErr == nil && svid.Leaf().Equal(after.Leaf()) && (err == nil) != now.Before(end) { // and no other has come meanwhile
		w.fail("%s got a secret of a certificate that ends in %v: %v", who, end.Sub(now), err)
	}
}

func (w *world) happens(e event) {
	synctest.Wait()
	w.mu.Lock()
	if e.kind != "suspended" && e.kind != "clock set" {
		switch e.kind {
		case "root added":
			w.ca.Rotate()
		case "root replaced":
			w.ca.Rotate()
			w.ca.DropOldRoots()
		default:
			w.mode = e
		}
		w.mu.Unlock()
		return
	}
	close(w.broken)
	w.broken = make(chan struct{})
	w.mu.Unlock()
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.leapt.Add(int64(e.d))
	if e.kind == "clock set" {
		w.ahead += e.d
	}
	w.best = time.Time{} // a clock that was put back brings back what had ended, which no program has kept
	secretcache.Leap(w.m, e.d)
}

// template has what the CA issues in the time of the bubble, as the machine sees it.
func (w *world) template(c *x509.Certificate) {
	w.mu.Lock()
	defer w.mu.Unlock()
	c.NotBefore, c.NotAfter = c.NotBefore.Add(-w.ahead), c.NotAfter.Add(-w.ahead)
	if w.mode.kind == "garbage" && garbage[w.mode.n].edit != nil {
		garbage[w.mode.n].edit(c)
	}
}

// call is what happens to a call of the CA.
func (w *world) call(ctx context.Context) error {
	w.mu.Lock()
	mode, broken := w.mode, w.broken
	w.mu.Unlock()
	switch mode.kind {
	case "fails":
		return errDown
	case "hangs":
		mode.d = 1000 * time.Hour
		fallthrough
	case "slow":
		select {
		case <-time.After(mode.d):
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-broken:
			return errBroken
		}
	}
	return nil
}

// newKey fails while the CA fails, as the Manager takes both for a failed attempt, and as a signing request costs more
// than all else.
func (w *world) newKey() (crypto.Signer, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if pause := time.Since(w.asked); pause < 50*time.Millisecond {
		w.fail("the CA is asked again after %v", pause)
	}
	w.asked = time.Now()
	if w.mode.kind == "fails" {
		return nil, errDown
	}
	return pki.NewKey("ecdsa-p256")
}

func (w *world) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	if err := w.call(ctx); err != nil {
		return nil, err
	}
	w.mu.Lock()
	mode := w.mode
	w.mu.Unlock()
	if mode.kind == "garbage" && garbage[mode.n].out != nil {
		return garbage[mode.n].out(w), nil
	}
	chain, err := w.ca.Sign(ctx, csr, lifetime)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends[chain[0].SerialNumber.String()] = chain[0].NotAfter.Add(time.Duration(w.leapt.Load()))
	return chain, nil
}

func (w *world) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if err := w.call(ctx); err != nil {
		return nil, err
	}
	w.mu.Lock()
	mode := w.mode
	w.mu.Unlock()
	if mode.kind == "garbage" && mode.n%2 == 0 {
		return nil, nil // which is the garbage
	}
	set, err := w.ca.FetchBundles(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && set != w.last { // a root that has gone is a reason to ask at once
		w.last, w.asked = set, time.Time{}
	}
	return set, err
}

// clocked is a CA that notes when it was asked.
type clocked struct {
	*spiffetest.CA
	mu  sync.Mutex
	at  []time.Time
	err error
}

func (c *clocked) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.mu.Lock()
	c.at = append(c.at, time.Now())
	err := c.err
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return c.CA.Sign(ctx, csr, lifetime)
}

func (c *clocked) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

// gaps returns the times between the last n requests.
func (c *clocked) gaps(n int) (gaps []time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := len(c.at) - n; i < len(c.at); i++ {
		gaps = append(gaps, c.at[i].Sub(c.at[i-1]))
	}
	return gaps
}

// later is an error that asks for a wait.
type later time.Duration

func (later) Error() string                      { return "later" }
func (l later) Retryable() (time.Duration, bool) { return time.Duration(l), true }

// never is an error that says that asking again will not help.
type never struct{}

func (never) Error() string                    { return "never" }
func (never) Retryable() (time.Duration, bool) { return 0, false }

// RenewIn says when the CA is asked, after answers and after failures. A CA that asks for more time gets it, up to half of the
// life that is left.
func TestRenewIn(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const life = 10 * time.Hour
		ca := &clocked{CA: spiffetest.NewCA(t, "example.org")}
		type call struct {
			left     time.Duration
			failures int
		}
		var mu sync.Mutex
		var calls []call
		m := newManager(t, secretcache.Config{CA: ca, Lifetime: life, RenewIn: func(left time.Duration, failures int) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, call{left, failures})
			if failures > 0 {
				return time.Minute
			}
			return left / 10 * 7
		}})
		ready(t, m)
		for range 3 {
			time.Sleep(7 * time.Hour)
			synctest.Wait()
		}
		assert.Equal(t, []time.Duration{7 * time.Hour, 7 * time.Hour, 7 * time.Hour}, ca.gaps(3))

		ca.fail(errors.New("down"))
		time.Sleep(7*time.Hour + 3*time.Minute)
		synctest.Wait()
		assert.Equal(t, []time.Duration{7 * time.Hour, time.Minute, time.Minute, time.Minute}, ca.gaps(4))
		mu.Lock()
		assert.Equal(t, call{3*time.Hour - 3*time.Minute, 4}, calls[len(calls)-1])
		mu.Unlock()

		ca.fail(never{}) // no refusal is for good
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		assert.Equal(t, []time.Duration{time.Minute, time.Minute}, ca.gaps(2))

		ca.fail(later(30 * time.Minute))
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.GreaterOrEqual(t, ca.gaps(1)[0], 30*time.Minute)
		assert.Less(t, ca.gaps(1)[0], 34*time.Minute)

		ca.fail(later(10 * time.Hour)) // more than is left
		svid := current(t, m)
		time.Sleep(time.Until(svid.NotAfter()))
		synctest.Wait()
		assert.Less(t, ca.gaps(1)[0], time.Hour)

		ca.fail(errors.New("down"))
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		mu.Lock()
		assert.Equal(t, time.Duration(0), calls[len(calls)-1].left, "it has expired")
		mu.Unlock()
		ca.fail(later(30 * time.Minute))
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		assert.GreaterOrEqual(t, ca.gaps(1)[0], 30*time.Minute)
		ca.fail(nil)
		time.Sleep(40 * time.Minute)
		synctest.Wait()
		assert.True(t, time.Now().Before(current(t, m).NotAfter()))
	})
}

// A RenewIn that returns nothing sensible does not make a tight loop.
func TestRenewInNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := &clocked{CA: spiffetest.NewCA(t, "example.org")}
		m := newManager(t, secretcache.Config{CA: ca, RenewIn: func(time.Duration, int) time.Duration { return -time.Hour }})
		ready(t, m)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []time.Duration{50 * time.Millisecond}, ca.gaps(1))
		ca.fail(errors.New("down"))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []time.Duration{50 * time.Millisecond}, ca.gaps(1))
	})
	_, err := secretcache.New(secretcache.Config{ID: web, CA: spiffetest.NewCA(t, "example.org"), GraceRatio: 0.3, RenewIn: func(time.Duration, int) time.Duration { return 0 }})
	require.ErrorContains(t, err, "RenewIn")
}

// A clock that was an hour ahead, and is set right, leaves a certificate that no peer accepts before the hour is over: it is
// replaced at once. One that is valid by the new time as well stays.
func TestClockSetBack(t *testing.T) {
	for name, test := range map[string]struct {
		life, back time.Duration
		signed     int
	}{
		"for an hour": {24 * time.Hour, time.Hour, 2}, "for much more than a life": {10 * time.Second, time.Hour, 2},
		"within what the CA dates back": {24 * time.Hour, time.Minute, 1},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			ca.EditTemplates(func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Minute), time.Now().Add(test.life)
			})
			m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca, Timeout: time.Minute}))(t)
			var ahead atomic.Int64
			ahead.Store(int64(test.back))
			secretcache.SetClock(m, 0, func() (mono, wall time.Time) { return time.Now(), time.Now().Round(0).Add(time.Duration(ahead.Load())) })
			ctx, cancel := context.WithCancel(t.Context())
			var all sync.WaitGroup
			all.Go(func() { assert.NoError(t, m.Run(ctx)) })
			defer all.Wait()
			defer cancel()
			soon, stop := context.WithTimeout(ctx, time.Hour) // of the bubble, and not of the test
			require.NoError(t, m.Ready(soon))
			stop()
			time.Sleep(time.Second)
			before := must.Get(m.SVID())(t)
			secretcache.Leap(m, -test.back) // by the right time, at which the bubble is
			ahead.Store(0)
			time.Sleep(time.Second)
			synctest.Wait()
			assert.Equal(t, test.signed, ca.Signed())
			assert.Equal(t, test.signed == 1, must.Get(m.SVID())(t) == before)
			time.Sleep(test.life / 5)
			assert.Equal(t, test.signed, ca.Signed(), "and it is renewed as usual from then on")
		})
	}
}
