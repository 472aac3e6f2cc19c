package ca_test

import (
	"context"
	"crypto/x509"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

var long = flag.Bool("long", false, "run soaks, too")

// Two and five authorities share a store that has bad days, and each does what it likes.
//
// At every moment: no leaf lives whose root a replica in sync does not show; no replica's sequence number
// goes back; and equal numbers mean equal bundles. In the end, all are one CA, and none of the
// decisions that were reported as done is lost.
func TestReplicas(t *testing.T) {
	t.Parallel()
	schedules := uint64(rounds.Of(1))
	if *long {
		schedules = 60
	}
	for _, n := range []int{5, 2}[:min(rounds.Of(1), 2)] {
		for seed := range schedules {
			t.Run(fmt.Sprintf("%d/seed %d", n, seed), func(t *testing.T) {
				bubble.Test(t, func(t *testing.T) { replicas(t, n, seed, n == 2) })
			})
		}
	}
}

type replica struct {
	a      *ca.Authority
	store  *faultStore
	stop   func()
	bundle *spiffe.Bundle
}

func replicas(t *testing.T, n int, seed uint64, custody bool) {
	const (
		tick        = 5 * time.Second
		propagation = 5 * time.Minute
		grace       = 30 * time.Second
		longest     = 10 * time.Minute
	)
	ticks := rounds.Of(270) // 22 minutes
	rng := rand.New(rand.NewPCG(seed, 3))
	var dice sync.Mutex // faults are drawn by the goroutines of Run, too
	draw := func(n int) int {
		dice.Lock()
		defer dice.Unlock()
		return rng.IntN(n)
	}
	shared, past := ca.NewMemoryStore(), new(history)
	bad := make([]bool, n) // a replica's own line to the store is down
	var badMu sync.Mutex
	line := func(i int) func(op string) (fault, time.Duration) {
		return func(op string) (fault, time.Duration) {
			badMu.Lock()
			down := bad[i]
			badMu.Unlock()
			if down {
				return before, 0
			}
			latency := time.Duration(draw(800)) * time.Millisecond
			switch draw(12) {
			case 0:
				return before, latency
			case 1:
				return after, latency
			case 2:
				return conflict, latency
			case 3:
				return hang, 0
			case 4:
				return stale, latency
			}
			return fine, latency
		}
	}
	keys, healed := custodian.New(), new(atomic.Bool)
	keys.Fault = func(context.Context, string, string) error {
		if !healed.Load() && draw(40) == 0 {
			return errFault
		}
		return nil
	}
	keys.Late = func(string, string) error { return keys.Fault(t.Context(), "", "") }
	start := func(i int, s *faultStore) *replica {
		// One failure after the other may be drawn, so that opening takes a while.
		a := open(t, s, func(c *ca.Config) {
			c.DefaultTTL, c.MaxTTL, c.Backdate, c.Rotation.Propagation = longest, longest, grace, propagation
			c.JWT = &ca.JWTConfig{KeyTTL: time.Hour, MaxTTL: 5 * time.Minute}
			c.Rotation.Manual = i%2 == 1
			if custody {
				c.Custody = ca.Custody{Keys: keys}
			}
		})
		return &replica{a: a, store: s, stop: run(t, a)}
	}
	all := make([]*replica, n)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i] = start(i, &faultStore{Store: shared, decide: line(i), history: past}) })
	}
	wg.Wait()

	csr := newCSR(t)
	type issued struct {
		leaf  *x509.Certificate
		until time.Time
	}
	var live []issued
	exempt := map[string]bool{} // roots that were tainted or revoked
	// Of emergencies: their successors sign before others know them, until these have read the store.
	revoking, revoked, emergency, emergencies := 0, map[string]bool{}, time.Time{}, 0
	contents := map[uint64]*spiffe.Bundle{}
	var done []string // roots of rotations that were reported as done, by key
	var mu sync.Mutex
	leaves, rotations, refused := 0, 0, 0
	// The store may refuse all that is drawn in this time; then it goes on until an emergency and a rotation have worked.
	happened := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return emergencies > 0 && rotations > 0
	}
	for left := ticks; left > 0 || !happened() && left > -10*ticks; left-- {
		i := draw(n)
		r := all[i]
		switch draw(60) {
		case 0:
			badMu.Lock()
			bad[i] = !bad[i]
			badMu.Unlock()
		case 1: // it is killed and starts again
			badMu.Lock()
			down := bad[i]
			badMu.Unlock()
			if !down {
				r.stop()
				all[i] = start(i, r.store)
				r = all[i]
			}
		case 2, 3:
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				s, err := r.a.Rotate(ctx)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					rotations++
					done = append(done, s.ID)
				}
			})
		case 4:
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, _ = r.a.RotateJWT(ctx)
			})
		case 5:
			if draw(8) == 0 {
				roots := r.a.Roots()
				bad := roots[draw(len(roots))]
				mu.Lock()
				exempt[string(bad.Certificate.SubjectKeyId)] = true
				mu.Unlock()
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
					defer cancel()
					if draw(2) == 0 {
						_ = r.a.Taint(ctx, bad.ID)
					} else {
						_, _ = r.a.Revoke(ctx, bad.ID, false)
					}
				})
			}
		}
		if draw(160) == 0 {
			roots := r.a.Roots()
			bad := roots[draw(len(roots))]
			mu.Lock()
			exempt[string(bad.Certificate.SubjectKeyId)] = true
			revoking++
			mu.Unlock()
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				_, err := r.a.Revoke(ctx, bad.ID, true)
				mu.Lock()
				defer mu.Unlock()
				revoking--
				emergency = time.Now()
				if err == nil {
					revoked[bad.ID] = true
					emergencies++
				}
			})
		}
		if draw(3) == 0 {
			chain, err := r.a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: time.Duration(1+draw(600)) * time.Second})
			if err == nil {
				live = append(live, issued{leaf: chain[0], until: chain[0].NotAfter})
				leaves++
			} else {
				require.ErrorIs(t, err, spiffe.ErrNotReady, "seed %d", seed)
				refused++
			}
		}
		time.Sleep(tick)

		// What others hold: a bundle of any replica that is in sync. Of the time that Backdate gives to
		// clocks that are slow, a store that is behind has used up some.
		slow := time.Now().Add(lag - grace)
		live = slices.DeleteFunc(live, func(l issued) bool { return slow.After(l.until) })
		for j, r := range all {
			b := r.a.Bundle()
			if r.bundle != nil {
				require.GreaterOrEqual(t, sequence(t, b), sequence(t, r.bundle), "seed %d: replica %d went back", seed, j)
			}
			r.bundle = b
			badMu.Lock()
			down := bad[j]
			badMu.Unlock()
			if down || time.Since(r.a.Status().Synced) > time.Minute {
				continue // it says itself that it may be behind
			}
			mu.Lock()
			behind := revoking > 0 || r.a.Status().Synced.Before(emergency.Add(lag))
			gone := maps.Clone(revoked)
			mu.Unlock()
			if behind {
				continue
			}
			for _, k := range r.a.Roots() {
				require.False(t, gone[k.ID], "seed %d: replica %d still has root %s", seed, j, k.ID)
			}
			for _, l := range live {
				mu.Lock()
				skip := exempt[string(l.leaf.AuthorityKeyId)]
				mu.Unlock()
				if !skip && !vouches(b, l.leaf, slow) {
					for k, r := range all {
						t.Logf("replica %d, synced %v: %v", k, r.a.Status().Synced, r.a.Roots())
					}
					t.Fatalf("seed %d, %v: replica %d does not know the root %x… of a leaf from %v to %v", seed, time.Now(), j, l.leaf.AuthorityKeyId[:4], l.leaf.NotBefore, l.leaf.NotAfter)
				}
			}
			n := sequence(t, b)
			if was := contents[n]; was != nil {
				require.True(t, was.Equal(b), "seed %d: two bundles with the number %d: %s and %s", seed, n, describeBundle(was), describeBundle(b))
			}
			contents[n] = b
		}
	}
	wg.Wait()
	for _, r := range all {
		r.store.behave(nil)
	}
	time.Sleep(5 * time.Minute)
	synctest.Wait()
	for range 3 { // a JWT key may have come due just now, and not all have read of it yet
		if !slices.ContainsFunc(all, func(r *replica) bool { return !r.a.Bundle().Equal(all[0].a.Bundle()) }) {
			break
		}
		time.Sleep(31 * time.Second)
		synctest.Wait()
	}
	for j, r := range all {
		require.True(t, r.a.Bundle().Equal(all[0].a.Bundle()), "seed %d: replica %d", seed, j)
		require.NoError(t, r.a.Status().SyncError, "seed %d: replica %d", seed, j)
		require.Equal(t, serials(all[0].a), serials(r.a), "seed %d: replica %d", seed, j)
		require.Equal(t, all[0].a.Status().JWTKeys, r.a.Status().JWTKeys, "seed %d", seed)
		for _, k := range r.a.Roots() {
			require.False(t, k.Phase == "active" && k.Tainted && k.Activates.Before(time.Now().Add(-time.Hour)), "seed %d: a tainted root signs", seed)
		}
	}
	if custody {
		a, names := all[0].a, keys.Names()
		healed.Store(true)
		assert.NotEmpty(t, names, "seed %d", seed)
		assert.Empty(t, must.Get(a.Orphans(t.Context()))(t), "seed %d", seed)
		for _, k := range append(a.Status().Roots, a.Status().JWTKeys...) {
			assert.True(t, k.Custody == "" || slices.Contains(names, k.Custody), "seed %d: the private key of %v is lost", seed, k)
		}
	}
	t.Logf("seed %d: %d leaves, %d refused, %d rotations, %d emergencies, sequence %d", seed, leaves, refused, rotations, emergencies, sequence(t, all[0].a.Bundle()))
	assert.Greater(t, leaves, ticks/20)
	assert.Greater(t, rotations, ticks/720)
	assert.Positive(t, emergencies)
}

// describeBundle names what is in b.
func describeBundle(b *spiffe.Bundle) string {
	var out []string
	for c := range b.X509Authorities() {
		out = append(out, c.SerialNumber.Text(16)[:4])
	}
	for id := range b.JWTAuthorities() {
		out = append(out, id[:4])
	}
	return fmt.Sprint(out)
}
