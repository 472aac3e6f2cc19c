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

	"github.com/stretchr/testify/require"

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
	n := int64(rounds.Of(64)) // 10,000 take minutes, most of them in signatures
	switch {
	case *long:
		n = 10_000
	case rounds.Race:
		n = 60
	}
	if *oneSchedule >= 0 {
		synctest.Test(t, func(t *testing.T) { play(t, *oneSchedule) })
		return
	}
	const shards = 4
	for shard := range int64(shards) {
		t.Run(fmt.Sprint("shard ", shard), func(t *testing.T) {
			t.Parallel()
			for seed := shard; seed < n && !t.Failed(); seed += shards {
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
	var err error
	w.m, err = secretcache.New(secretcache.Config{ID: web, CA: w, Lifetime: w.life, Timeout: 10 * time.Second, NewKey: w.newKey})
	require.NoError(t, err)
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
	return pki.NewKey(pki.ECDSAP256)
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
		return nil, nil //nolint:nilnil // which is the garbage
	}
	set, err := w.ca.FetchBundles(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && set != w.last { // a root that has gone is a reason to ask at once
		w.last, w.asked = set, time.Time{}
	}
	return set, err
}
