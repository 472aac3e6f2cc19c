package ca_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// namer gives roots the names A, B, C… in the order in which it meets them.
type namer map[string]string

func (n namer) name(c *x509.Certificate) string {
	key := string(c.SubjectKeyId)
	if n[key] == "" {
		n[key] = string(rune('A' + len(n)))
	}
	return n[key]
}

// look writes what an authority says at this moment: "seq 2: A active, B distributing; A signs".
// It signs nothing: the signing root is read from the phases.
func (n namer) look(t *testing.T, a *ca.Authority) string {
	t.Helper()
	var parts []string
	var certs []*x509.Certificate
	for _, r := range a.Roots() {
		parts = append(parts, n.name(r.Certificate)+" "+string(r.Phase))
		certs = append(certs, r.Certificate)
	}
	b := a.Bundle()
	require.Equal(t, certs, slices.Collect(b.X509Authorities()), "the bundle has the roots")
	return fmt.Sprintf("seq %d: %s", sequence(t, b), strings.Join(parts, ", "))
}

func signer(t *testing.T, a *ca.Authority, leaf *x509.Certificate) *x509.Certificate {
	t.Helper()
	for c := range a.Bundle().X509Authorities() {
		if string(c.SubjectKeyId) == string(leaf.AuthorityKeyId) {
			return c
		}
	}
	t.Fatal("the leaf's root is not in the bundle")
	return nil
}

// shortLived limits leaves to an hour, so that an old root retires an hour and Backdate after its successor signs.
func shortLived(c *ca.Config) { c.MaxTTL = time.Hour }

// One rotation, event by event, with and without Run.
func TestTimeline(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.6-9")
	type event struct {
		at   time.Duration
		do   string // rotate, rotate! (refused), sign TTL
		want string // afterwards
	}
	const s = time.Second
	for _, tt := range []struct {
		name   string
		events []event
	}{
		{"a root whose leaves live an hour", []event{
			{0, "", "seq 1: A active"},
			{0, "sign 1h0m0s by A", "seq 1: A active"},
			{10 * s, "rotate", "seq 2: A active, B distributing"},
			{11 * s, "rotate!", "seq 2: A active, B distributing"},
			{60 * s, "sign 1h0m0s by A", "seq 2: A active, B distributing"},
			{25*time.Minute + 9*s, "sign 5m0s by A", "seq 2: A active, B distributing"},
			{25*time.Minute + 9*s, "rotate!", "seq 2: A active, B distributing"},
			{25*time.Minute + 10*s, "", "seq 2: A retiring, B active"}, // no change of contents
			{25*time.Minute + 10*s, "sign 1h0m0s by B", "seq 2: A retiring, B active"},
			{time.Hour + 27*time.Minute + 10*s - 1, "", "seq 2: A retiring, B active"}, // clocks may be slow
			{time.Hour + 27*time.Minute + 10*s, "sign 1h0m0s by B", "seq 3: B active"}, // gone
			{time.Hour + 28*time.Minute, "rotate", "seq 4: B active, C distributing"},  // and again
			{time.Hour + 53*time.Minute, "", "seq 4: B retiring, C active"},
			{3 * time.Hour, "", "seq 5: C active"},
		}},
		{"rotations follow each other while old leaves live", []event{
			{0, "sign 1h0m0s by A", "seq 1: A active"},
			{0, "rotate", "seq 2: A active, B distributing"},
			{25 * time.Minute, "sign 1h0m0s by B", "seq 2: A retiring, B active"},
			{25 * time.Minute, "rotate", "seq 4: A retiring, B active, C distributing"},
			{50 * time.Minute, "sign 1h0m0s by C", "seq 4: A retiring, B retiring, C active"},
			{50 * time.Minute, "rotate", "seq 7: A retiring, B retiring, C active, D distributing"},
			{75 * time.Minute, "", "seq 7: A retiring, B retiring, C retiring, D active"},
			{87 * time.Minute, "", "seq 8: B retiring, C retiring, D active"},
			{112*time.Minute - 1, "", "seq 8: B retiring, C retiring, D active"},
			{112 * time.Minute, "", "seq 9: C retiring, D active"},
			{137 * time.Minute, "", "seq 10: D active"},
		}},
		{"the authority is not used for a long time", []event{
			{0, "sign 1h0m0s by A", "seq 1: A active"},
			{0, "rotate", "seq 2: A active, B distributing"},
			{1000 * time.Hour, "sign 1h0m0s by B", "seq 3: B active"},
			{1000 * time.Hour, "rotate", "seq 4: B active, C distributing"},
			{2000 * time.Hour, "rotate", "seq 6: C active, D distributing"},
		}},
	} {
		for _, run := range []bool{false, true} {
			bubble.Run(t, fmt.Sprintf("%s/run=%v", tt.name, run), func(t *testing.T) {
				start := time.Now()
				a := newAuthority(t, shortLived)
				if run {
					go func() { _ = a.Run(t.Context()) }()
				}
				n, csr := namer{}, newCSR(t)
				for i, e := range tt.events {
					time.Sleep(time.Until(start.Add(e.at)))
					synctest.Wait()
					do, arg, _ := strings.Cut(e.do, " ")
					switch do {
					case "rotate":
						_, err := a.Rotate(t.Context())
						require.NoError(t, err, "event %d", i)
					case "rotate!":
						_, err := a.Rotate(t.Context())
						require.ErrorIs(t, err, ca.ErrRotating, "event %d", i)
					case "sign":
						ttl, name, _ := strings.Cut(arg, " by ")
						d := must.Get(time.ParseDuration(ttl))(t)
						leaf := sign(t, a, csr, d)
						assert.Equal(t, name, n.name(signer(t, a, leaf)), "event %d: the signing root", i)
					}
					require.Equal(t, e.want, n.look(t, a), "event %d, at %v", i, e.at)
				}
			})
		}
	}
}

func TestRootStatusTimes(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now().Round(0)
		a := newAuthority(t, shortLived)
		time.Sleep(time.Minute)
		sign(t, a, newCSR(t), time.Hour)
		r := must.Get(a.Rotate(t.Context()))(t)
		assert.Equal(t, "distributing", r.Phase)
		assert.Equal(t, start.Add(time.Minute), r.Prepared)
		assert.Equal(t, start.Add(26*time.Minute), r.Activates)
		assert.Zero(t, r.Retires)
		assert.Equal(t, "root "+r.ID+": distributing, signs from 2000-01-01T00:26:00Z", r.String())
		assert.Equal(t, r, a.Roots()[1])
		_, err := a.Rotate(t.Context())
		assert.EqualError(t, err, "ca: rotate example.org: a rotation is under way: root "+r.ID+" activates at 2000-01-01T00:26:00Z")

		time.Sleep(25 * time.Minute)
		old, next := a.Roots()[0], a.Roots()[1]
		assert.Equal(t, "retiring", old.Phase)
		assert.Equal(t, start.Add(26*time.Minute+time.Hour+2*time.Minute), old.Retires)
		assert.Equal(t, "root "+old.ID+": retiring, leaves the bundle at 2000-01-01T01:28:00Z", old.String())
		assert.Equal(t, "root "+next.ID+": active since 2000-01-01T00:26:00Z", next.String())
		assert.Equal(t, r.Prepared, next.Prepared)
	})
}

// Every verifier searches the bundle, so that rotations cannot make it grow without end.
func TestBundleIsBounded(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.Propagation, c.MaxTTL = time.Second, 24*time.Hour })
		for range 63 {
			must.Get(a.Rotate(t.Context()))(t)
			time.Sleep(time.Second)
		}
		require.Len(t, a.Roots(), 64)
		_, err := a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		assert.ErrorContains(t, err, "64 roots are in the bundle, the next one to retire does so at 2000-01-02T00:02:01Z")
		time.Sleep(24*time.Hour + 2*time.Minute)
		_, err = a.Rotate(t.Context())
		assert.NoError(t, err)
	})
}

func TestRunTellsOfEachStep(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		a := newAuthority(t, shortLived)
		ctx, cancel := context.WithCancelCause(t.Context())
		done := make(chan error, 2)
		for range 2 { // more than one does no harm
			go func() { done <- a.Run(ctx) }()
		}
		n := namer{}
		var seen []string
		go func() {
			for {
				changed := a.Changed() // before reading
				seen = append(seen, fmt.Sprintf("%v: %s", time.Since(start), n.look(t, a)))
				select {
				case <-changed:
				case <-ctx.Done():
					return
				}
			}
		}()
		synctest.Wait()
		sign(t, a, newCSR(t), time.Hour)
		time.Sleep(time.Minute)
		must.Get(a.Rotate(ctx))(t)
		time.Sleep(10 * time.Hour)
		synctest.Wait()
		assert.Equal(t, []string{
			"0s: seq 1: A active",
			"1m0s: seq 2: A active, B distributing",
			"26m0s: seq 2: A retiring, B active",
			"1h28m0s: seq 3: B active",
		}, seen)
		stop := errors.New("enough")
		cancel(stop)
		assert.NoError(t, <-done)
		assert.NoError(t, <-done)
		assert.Equal(t, n.look(t, a), "seq 3: B active", "reads work after Run")
	})
}

// With Run, a root is replaced early enough that a leaf of the default lifetime is never cut short,
// over several generations of roots; here with the least room that New allows.
func TestRunReplacesRootsInTime(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.3-3")
	for name, ttl := range map[string]struct{ root, longest time.Duration }{
		"least room": {48*time.Hour + 2*time.Second, 20 * time.Hour}, "ten times the room": {480 * time.Hour, 60 * time.Hour},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			cfg := ca.Config{DefaultTTL: 20 * time.Hour, MaxTTL: ttl.longest}
			cfg.Rotation.RootTTL, cfg.Rotation.Propagation = ttl.root, 4*time.Hour
			a := newAuthority(t, func(c *ca.Config) { *c, c.TrustDomain = cfg, td })
			go func() { _ = a.Run(t.Context()) }()
			csr := newCSR(t)
			roots := map[string]bool{}
			for end := time.Now().Add(4 * ttl.root); time.Now().Before(end); time.Sleep(ttl.root / time.Duration(rounds.Of(20)-1)) {
				leaf := sign(t, a, csr, 0)
				require.Equal(t, time.Now().Add(cfg.DefaultTTL).UTC().Truncate(time.Second), leaf.NotAfter, "cut short")
				roots[string(leaf.AuthorityKeyId)] = true
				require.LessOrEqual(t, len(a.Roots()), 3)
			}
			assert.GreaterOrEqual(t, len(roots), 4)
			assert.LessOrEqual(t, len(roots), 9, "a root lives at least half of its life")
		})
	}
}

// While the bundle is full Run cannot rotate; it tries again until it can.
func TestRunTriesAgain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, func(c *ca.Config) {
			c.Rotation.RootTTL, c.MaxTTL, c.DefaultTTL, c.Rotation.Propagation = 100*time.Hour, 90*time.Hour, time.Hour, time.Second
		})
		for range 63 {
			must.Get(a.Rotate(t.Context()))(t)
			time.Sleep(time.Second)
		}
		go func() { _ = a.Run(t.Context()) }()
		time.Sleep(89 * time.Hour) // a rotation came due after 50
		require.Len(t, a.Roots(), 64)
		time.Sleep(time.Hour + 10*time.Minute)
		roots := a.Roots()
		require.Len(t, roots, 2, "the 63 old ones have retired")
		require.WithinDuration(t, time.Now(), roots[1].Prepared, 10*time.Minute)
	})
}

func TestOneOfManyRotations(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		// The store takes so long that all of them have made a key before one wins.
		a := open(t, &faultStore{Store: ca.NewMemoryStore(), decide: func(string) (fault, time.Duration) { return fine, time.Second }})
		var errs [3]error
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { _, errs[i] = a.Rotate(t.Context()) })
		}
		wg.Wait()
		lost := slices.DeleteFunc(errs[:], func(err error) bool { return err == nil })
		require.Len(t, lost, 2)
		assert.ErrorIs(t, lost[0], ca.ErrRotating)
		assert.ErrorIs(t, lost[1], ca.ErrRotating)
		assert.Len(t, a.Roots(), 2)
		assert.EqualValues(t, 2, sequence(t, a.Bundle()))
	})
}

// M.21: each interval of checks the log has a line that says that the root stays, and for how long; none when it is replaced.
func TestRunLogsChecks(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var out logBuffer
			a := newAuthority(t, func(c *ca.Config) {
				c.Logger = slog.New(slog.NewTextHandler(&out, nil))
				c.Rotation.CheckInterval, c.Rotation.KeepKey, c.Rotation.NoJitter = 2*time.Hour, keep, true
			})
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); _ = a.Run(ctx) }()
			time.Sleep(21 * time.Hour)
			cancel()
			<-ended
			require.Equal(t, 11, strings.Count(out.String(), "the root is not about to expire"), &out)
			require.Contains(t, out.String(), "root="+a.Roots()[0].ID)
			require.Contains(t, out.String(), "replaced_at=200")
			require.NotContains(t, out.String(), "WARN")
		})
	}
}

func TestRunDefaults(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const day = 24 * time.Hour
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.CheckInterval = 10 * day }) // looks change nothing
		go func() { _ = a.Run(t.Context()) }()
		n := namer{}
		time.Sleep(3650*day - 730*day - 90*day - 25*time.Minute - time.Second)
		synctest.Wait()
		assert.Equal(t, "seq 1: A active", n.look(t, a))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, "seq 2: A active, B distributing", n.look(t, a))
	})
}

// Whatever happens and whenever, a leaf that has not expired verifies: with the bundle of now, with
// the bundle that a verifier fetched one Propagation ago, and for a peer whose clock is slow by
// Backdate.
func TestEveryLiveLeafAlwaysVerifies(t *testing.T) {
	t.Parallel()
	for seed := range uint64(rounds.Of(2)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			bubble.Test(t, func(t *testing.T) { randomSchedule(t, seed) })
		})
	}
}

func randomSchedule(t *testing.T, seed uint64) {
	const tick = 10 * time.Second
	rng := rand.New(rand.NewPCG(seed, 2))
	lag := 1 + rng.IntN(30) // of a verifier, in ticks
	back := time.Duration(1+rng.IntN(12)) * tick
	a := newAuthority(t, func(c *ca.Config) {
		c.Rotation.RootTTL, c.DefaultTTL, c.MaxTTL = 6*time.Hour, time.Hour, 3*time.Hour
		c.Rotation.Propagation, c.Backdate = time.Duration(lag)*tick, back
	})
	if seed%2 == 0 {
		go func() { _ = a.Run(t.Context()) }()
	}
	csr := newCSR(t)
	var live []*x509.Certificate
	var history []*spiffe.Bundle // one for each tick
	rotations, checks := 0, 0
	ticks := rounds.Of(1500) // four hours
	for i := range ticks {
		if rng.IntN(15) == 0 {
			live = append(live, sign(t, a, csr, time.Duration(1+rng.Int64N(int64(2*time.Hour)))+time.Second))
		}
		if rng.IntN(40) == 0 {
			if _, err := a.Rotate(t.Context()); err == nil {
				rotations++
			} else {
				require.ErrorIs(t, err, ca.ErrRotating)
			}
		}
		bundle := a.Bundle()
		if n := len(history); n > 0 {
			was, is := sequence(t, history[n-1]), sequence(t, bundle)
			same := slices.Equal(slices.Collect(history[n-1].X509Authorities()), slices.Collect(bundle.X509Authorities()))
			require.Equal(t, same, was == is, "the sequence changes with the contents")
			require.GreaterOrEqual(t, is, was)
		}
		history = append(history, bundle)
		// To a slow clock a leaf lives longer.
		slow := time.Now().Add(-back)
		live = slices.DeleteFunc(live, func(c *x509.Certificate) bool { return slow.After(c.NotAfter) })
		for _, leaf := range live {
			for _, b := range []*spiffe.Bundle{bundle, history[max(0, i-lag)]} {
				require.True(t, vouches(b, leaf, slow), "seed %d, tick %d: no root for a live leaf", seed, i)
				if checks++; checks%500 == 0 {
					require.NoError(t, verify(b, leaf, slow), "seed %d, tick %d", seed, i)
				}
			}
		}
		time.Sleep(tick)
	}
	assert.Greater(t, rotations, ticks/300)
	assert.Greater(t, checks, 8*ticks)
}

// vouches is verify without its arithmetic on curves.
func vouches(b *spiffe.Bundle, leaf *x509.Certificate, now time.Time) bool {
	for c := range b.X509Authorities() {
		if string(c.SubjectKeyId) == string(leaf.AuthorityKeyId) && !now.Before(c.NotBefore) && !now.After(c.NotAfter) {
			return true
		}
	}
	return false
}

// In real time, many goroutines sign, rotate and read at once.
func TestConcurrency(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, func(c *ca.Config) { c.Rotation.Propagation, c.Backdate = 5*time.Millisecond, time.Millisecond })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // a second is the usual time
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(func() { _ = a.Run(ctx) })
	for range 3 {
		csr := newCSR(t)
		wg.Go(func() {
			for ctx.Err() == nil {
				chain, err := a.Sign(context.Background(), ca.Request{CSR: csr, ID: web, TTL: time.Minute})
				if !assert.NoError(t, err) {
					return
				}
				assert.NoError(t, verify(a.Bundle(), chain[0], time.Now()))
			}
		})
	}
	rotations := 0
	wg.Go(func() {
		defer cancel()
		for ctx.Err() == nil && rotations < rounds.Of(3) {
			changed := a.Changed() // before, as the next step may come any moment
			switch _, err := a.Rotate(ctx); {
			case err == nil:
				rotations++
			case !errors.Is(err, ca.ErrRotating):
				assert.ErrorIs(t, err, context.DeadlineExceeded)
			}
			select { // the next step
			case <-changed:
			case <-ctx.Done():
			}
		}
	})
	wg.Go(func() {
		last := uint64(0)
		for ctx.Err() == nil {
			changed := a.Changed()
			n, _ := a.Bundle().Sequence()
			assert.GreaterOrEqual(t, n, last)
			last = n
			active := 0
			for _, r := range a.Roots() {
				if r.Phase == "active" {
					active++
				}
				_ = r.String()
			}
			assert.Equal(t, 1, active)
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	})
	wg.Wait()
	assert.Equal(t, rounds.Of(3), rotations)
}
