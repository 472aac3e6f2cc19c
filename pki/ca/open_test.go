package ca_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"slices"
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
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func open(t testing.TB, store ca.Store, edit ...func(*ca.Config)) *ca.Authority {
	t.Helper()
	return must.Get(tryOpen(t.Context(), store, edit...))(t)
}

func tryOpen(ctx context.Context, store ca.Store, edit ...func(*ca.Config)) (*ca.Authority, error) {
	cfg := ca.Config{TrustDomain: td, MaxTTL: time.Hour, Create: true}
	for _, e := range edit {
		e(&cfg)
	}
	return ca.Open(ctx, cfg, store)
}

func withJWT(c *ca.Config) { c.JWT = new(ca.JWTConfig) }

// run starts Run and returns what ends it, and waits for the end.
func run(t testing.TB, a *ca.Authority) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = a.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(stop)
	return stop
}

func serials(a *ca.Authority) []string {
	var out []string
	for _, r := range a.Roots() {
		out = append(out, r.ID)
	}
	return out
}

// What an authority has outlives it: keys, phases, times, sequence number.
func TestReopen(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-8")
	all := []string{"ecdsa-p256", "ecdsa-p384", "ed25519", "rsa-2048"}
	few := all[:min(2+rounds.Of(1), 4)] // TestAdoption and TestFollow open roots with RSA keys again
	for name, algs := range map[string][]string{"memory": few, "folder": all[:1]} {
		for _, alg := range algs {
			t.Run(name+"/"+alg, func(t *testing.T) {
				t.Parallel()
				s := ca.Store(ca.NewMemoryStore())
				if name == "folder" {
					s, _ = newDirStore(t)
				}
				synctest.Test(t, func(t *testing.T) {
					edit := func(c *ca.Config) { c.Rotation.KeyAlgorithm, c.JWT = alg, new(ca.JWTConfig) }
					a := open(t, s, edit)
					run(t, a)
					csr := newCSR(t)
					leaf := sign(t, a, csr, time.Hour)
					check := func(what string) {
						t.Helper()
						synctest.Wait()
						b := open(t, s, edit)
						require.Equal(t, a.Roots(), b.Roots(), what)
						require.Equal(t, a.Status().JWTKeys, b.Status().JWTKeys, what)
						require.True(t, a.Bundle().Equal(b.Bundle()), what)
						assert.Equal(t, a.Roots()[0].Certificate.Raw, b.Roots()[0].Certificate.Raw)
						if len(b.Roots()) > 1 || b.Roots()[0].Phase == "active" && what == "at first" {
							assert.NoError(t, verify(b.Bundle(), leaf, leaf.NotBefore), what)
						}
						again := sign(t, b, csr, time.Hour)
						assert.NoError(t, verify(a.Bundle(), again, time.Now()), what)
						a = b
					}
					check("at first")
					must.Get(a.Rotate(t.Context()))(t)
					must.Get(a.RotateJWT(t.Context()))(t)
					check("distributing")
					time.Sleep(9 * time.Minute)
					check("still distributing")
					time.Sleep(16 * time.Minute)
					check("activated by time alone")
					require.Equal(t, "retiring", a.Roots()[0].Phase)
					time.Sleep(time.Hour + 2*time.Minute - 1)
					check("the last moment")
					require.Len(t, a.Roots(), 2)
					time.Sleep(time.Nanosecond)
					check("retired by time alone")
					require.Len(t, a.Roots(), 1)
					assert.EqualValues(t, 6, sequence(t, a.Bundle()), "prepared twice, retired twice, and one apart")
				})
			})
		}
	}
}

// The record says what is: the old key is gone when it must not sign any more, and Istio finds its
// items.
func TestRecord(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		a := open(t, store, withJWT)
		stop := run(t, a)
		record := func() map[string][]byte {
			synctest.Wait()
			r := must.Get(store.Load(t.Context()))(t)
			return r.Data()
		}
		keys := func() int { return bytes.Count(record()["svidkit-state.json"], []byte("PRIVATE KEY-----\\n")) / 2 }
		istio := func() *x509.Certificate {
			d := record()
			chain := must.Get(pki.ParseCertificatesPEM(d["ca-cert.pem"]))(t)
			key := must.Get(pki.ParsePrivateKeyPEM(d["ca-key.pem"]))(t)
			require.True(t, pki.PublicKeysEqual(chain[0].PublicKey, key.Public()))
			require.Contains(t, d, "cert-chain.pem")
			require.Empty(t, d["cert-chain.pem"])
			require.Contains(t, d, "key.pem")
			require.Empty(t, d["key.pem"])
			roots := must.Get(pki.ParseCertificatesPEM(d["root-cert.pem"]))(t)
			require.Equal(t, slices.Collect(a.Bundle().X509Authorities()), roots)
			return chain[0]
		}
		first := a.Roots()[0].Certificate
		assert.True(t, istio().Equal(first))
		assert.Equal(t, 2, keys(), "one root, one JWT key")
		next := must.Get(a.Rotate(t.Context()))(t)
		assert.True(t, istio().Equal(first), "the new one signs nothing yet")
		assert.Equal(t, 3, keys())
		time.Sleep(25 * time.Minute)
		assert.True(t, istio().Equal(next.Certificate))
		assert.Equal(t, 2, keys(), "the old root's key was forgotten, and Run wrote that down")
		time.Sleep(2 * time.Hour)
		assert.NotContains(t, string(record()["svidkit-state.json"]), "retiring")
		stop()
	})
}

// However many start at once, they end with one CA.
func TestRaceToCreate(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-5")
	_, dir := newDirStore(t)
	memory := ca.NewMemoryStore()
	for name, store := range map[string]func() ca.Store{
		"memory": func() ca.Store { return memory },
		"folder": func() ca.Store { d, err := ca.NewDirStore(dir); assert.NoError(t, err); return d },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 5
			all := make([]*ca.Authority, n)
			var wg sync.WaitGroup
			for i := range n {
				wg.Go(func() {
					a, err := tryOpen(t.Context(), store())
					assert.NoError(t, err)
					all[i] = a
				})
			}
			wg.Wait()
			for _, a := range all {
				require.NotNil(t, a)
				assert.Equal(t, all[0].Roots(), a.Roots())
				assert.True(t, all[0].Bundle().Equal(a.Bundle()))
			}
		})
	}
}

func TestOpenRetries(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.5-1", "IST-3.5-6")
	for name, f := range map[string]fault{"fails": before, "fails after it was done": after, "hangs": hang} {
		for _, op := range []string{"", "load", "save"} {
			bubble.Run(t, name+"/"+op, func(t *testing.T) {
				store := &faultStore{Store: ca.NewMemoryStore(), decide: always(op, f)}
				start := time.Now()
				go func() {
					time.Sleep(10 * time.Minute)
					store.behave(nil)
				}()
				a := open(t, store)
				if !(op == "save" && f == after) { // then it shows at once that it was done
					assert.GreaterOrEqual(t, time.Since(start), 10*time.Minute)
					assert.Less(t, time.Since(start), 12*time.Minute, "it looks at least every minute and a half")
				}
				b := open(t, store.Store)
				assert.Equal(t, a.Roots(), b.Roots())
				time.Sleep(time.Hour)
			})
		}
	}
	bubble.Run(t, "until ctx is done", func(t *testing.T) {
		memory := ca.NewMemoryStore()
		old := open(t, memory)
		cause := errors.New("deadline of the start")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, cause)
		defer cancel()
		a, err := tryOpen(ctx, &faultStore{Store: memory, decide: always("load", before)})
		require.ErrorIs(t, err, cause)
		require.ErrorIs(t, err, errFault, "and why")
		assert.Nil(t, a)
		assert.Equal(t, old.Roots(), open(t, memory).Roots(), "an error is never a reason for another CA")
	})
}

func TestOpenRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.12-1")
	_, err := ca.Open(t.Context(), ca.Config{TrustDomain: td}, nil)
	require.ErrorContains(t, err, "needs a store")
	for _, tt := range []struct {
		name string
		edit func(*ca.Config)
		says string
	}{
		{"no trust domain", func(c *ca.Config) { c.TrustDomain = spiffe.TrustDomain{} }, "TrustDomain"},
		{"an unreadable trust domain", func(c *ca.Config) { c.TrustDomain = spiffe.MustParseTrustDomain("a..b") }, "crypto/x509 cannot read a trust domain name with an empty label"},
		{"no such key", func(c *ca.Config) { c.Rotation.KeyAlgorithm = "rsa" }, "new root of example.org"},
		{"a grace ratio over a half", func(c *ca.Config) { c.Rotation.GraceRatio = 0.6 }, "GraceRatio"},
		{"a negative grace ratio", func(c *ca.Config) { c.Rotation.GraceRatio = -0.1 }, "GraceRatio"},
		{"a negative check interval", func(c *ca.Config) { c.Rotation.CheckInterval = -1 }, "CheckInterval is negative"},
		{"a strange JWT algorithm", func(c *ca.Config) { c.JWT = &ca.JWTConfig{Algorithm: "HS256"} }, `"HS256" is none of`},
		{"JWT keys that live too short", func(c *ca.Config) { c.JWT = &ca.JWTConfig{KeyTTL: 50 * time.Minute} }, "half of KeyTTL"},
		{"JWT keys that live too short for their Propagation", func(c *ca.Config) { c.JWT = &ca.JWTConfig{KeyTTL: 4 * time.Hour, Propagation: 2 * time.Hour} }, "Propagation 2h0m0s does not fit"},
		{"a negative JWT Propagation", func(c *ca.Config) { c.JWT = &ca.JWTConfig{Propagation: -1} }, "negative"},
		{"an issuer without TLS", func(c *ca.Config) { c.JWT = &ca.JWTConfig{Issuer: "http://oidc.example.org"} }, "JWT: Issuer: the scheme"},
		{"an issuer with an algorithm that its keys cannot name", func(c *ca.Config) { c.JWT = &ca.JWTConfig{Issuer: "https://oidc.example.org", Algorithm: "PS256"} }, "the algorithm is PS256"},
		{"a JWT default over the maximum", func(c *ca.Config) { c.JWT = &ca.JWTConfig{DefaultTTL: 2 * time.Hour} }, "DefaultTTL 2h0m0s is more than MaxTTL 1h0m0s"},
		{"a negative JWT lifetime", func(c *ca.Config) { c.JWT = &ca.JWTConfig{MaxTTL: -1} }, "negative"},
		{"a JWT lifetime of parts of seconds", func(c *ca.Config) { c.JWT = &ca.JWTConfig{MaxTTL: time.Millisecond} }, "whole seconds"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			store := ca.NewMemoryStore()
			a, err := tryOpen(t.Context(), store, tt.edit)
			require.ErrorContains(t, err, tt.says)
			assert.Regexp(t, `^ca: `, err.Error())
			assert.Nil(t, a)
			_, err = store.Load(t.Context())
			assert.ErrorIs(t, err, ca.ErrNoRecord)
		})
	}
}

// While the store is away, an authority signs, but nothing that could outlive its root.
func TestStaleness(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		edit := func(c *ca.Config) { c.DefaultTTL = 30 * time.Minute }
		a, csr := open(t, store, edit), newCSR(t)
		run(t, a)
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		assert.WithinDuration(t, time.Now(), a.Status().Synced, 31*time.Second)
		require.NoError(t, a.Status().SyncError)
		store.behave(always("", before))
		time.Sleep(time.Minute)
		read := a.Status().Synced
		require.ErrorIs(t, a.Status().SyncError, errFault)

		bound := read.Add(25*time.Minute + time.Hour) // Propagation and the longest lifetime
		for time.Now().Before(bound.Add(-time.Second)) {
			leaf := sign(t, a, csr, 0)
			assert.False(t, leaf.NotAfter.After(bound))
			if time.Until(bound) > 30*time.Minute {
				require.Equal(t, time.Now().Add(30*time.Minute).UTC().Truncate(time.Second), leaf.NotAfter, "not cut short")
			}
			time.Sleep(40 * time.Second / time.Duration(rounds.Of(1)))
		}
		time.Sleep(time.Until(bound))
		_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorIs(t, err, errFault, "it says why")
		assert.ErrorContains(t, err, "the store was last read at "+read.UTC().Format(time.RFC3339))
		e, _ := errors.AsType[*ca.SignError](err)
		assert.Equal(t, 30*time.Second, e.RetryAfter)

		store.behave(nil)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.NoError(t, a.Status().SyncError)
		assert.Equal(t, time.Now().Add(30*time.Minute).UTC().Truncate(time.Second), sign(t, a, csr, 0).NotAfter)
	})
}

// One that has not heard of a rotation signs nothing that outlives the old root in the bundle of the
// other one.
func TestStaleReplicaIsCovered(t *testing.T) {
	t.Parallel()
	for _, lifetimes := range [][2]time.Duration{{time.Hour, time.Hour}, {time.Hour, 4 * time.Hour}, {4 * time.Hour, time.Hour}} {
		bubble.Run(t, fmt.Sprint(lifetimes), func(t *testing.T) {
			memory := ca.NewMemoryStore()
			cut := &faultStore{Store: memory}
			a := open(t, memory, func(c *ca.Config) { c.MaxTTL = lifetimes[0] })
			b := open(t, cut, func(c *ca.Config) { c.MaxTTL = lifetimes[1] })
			run(t, a)
			run(t, b)
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			cut.behave(always("", before))
			time.Sleep(time.Millisecond)
			must.Get(a.Rotate(t.Context()))(t)
			csr := newCSR(t)
			var leaves []*x509.Certificate
			for range rounds.Of(7 * 60 / 2) {
				if chain, err := b.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: lifetimes[1]}); err == nil {
					leaves = append(leaves, chain[0])
				} else {
					require.ErrorIs(t, err, spiffe.ErrNotReady)
				}
				for _, leaf := range leaves {
					// To a slow clock a leaf lives longer.
					if slow := time.Now().Add(-2 * time.Minute); !slow.After(leaf.NotAfter) {
						require.True(t, vouches(a.Bundle(), leaf, slow), "a live leaf without a root")
					}
				}
				time.Sleep(2 * time.Minute / time.Duration(rounds.Of(1)))
			}
			assert.Greater(t, len(leaves), 25)
			assert.Len(t, a.Roots(), 1, "the old root has gone in the end")
		})
	}
}

// A root that was prepared while no authority ran to distribute it must not sign because its time has come.
func TestUndistributedKeyWaitsAgain(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		down    time.Duration
		waits   time.Duration // from the start of the new process
		running time.Duration // for how long another replica was there
	}{
		{9 * time.Minute, 16 * time.Minute, 0}, // three refreshes are left
		{11 * time.Minute, 25 * time.Minute, 0},
		{25 * time.Minute, 25 * time.Minute, 0},
		{86 * time.Minute, 25 * time.Minute, 0}, // the old root's last moment is after 87
		{88 * time.Minute, 0, 0},
		{10 * time.Hour, 0, 0},
		{11 * time.Minute, 25 * time.Minute, 9 * time.Minute}, // before that it said nothing
		{11 * time.Minute, 14 * time.Minute, 10*time.Minute + 30*time.Second},
		{26 * time.Minute, 0, 10*time.Minute + 30*time.Second}, // two refreshes, then no authority runs
		{11 * time.Minute, 14 * time.Minute, 11 * time.Minute},
		{25 * time.Minute, 0, 25 * time.Minute},
		{10 * time.Hour, 0, 10 * time.Hour},
	} {
		bubble.Run(t, fmt.Sprint(tt.down, tt.running), func(t *testing.T) {
			store := ca.NewMemoryStore()
			a := open(t, store, withJWT)
			ctx, cancel := context.WithTimeout(t.Context(), tt.running)
			defer cancel()
			if tt.running > 0 {
				other := open(t, store, withJWT)
				go func() { _ = other.Run(ctx) }()
			}
			next := must.Get(a.Rotate(t.Context()))(t)
			nextJWT := must.Get(a.RotateJWT(t.Context()))(t)
			time.Sleep(tt.down) // a is gone
			synctest.Wait()
			b := open(t, store, withJWT)
			jwtPhase := func(id string) string {
				for _, k := range b.Status().JWTKeys {
					if k.ID == id {
						return k.Phase
					}
				}
				return ""
			}
			phase := func() string {
				roots := b.Roots()
				r := roots[len(roots)-1]
				require.Equal(t, next.ID, r.ID)
				return r.Phase
			}
			if tt.waits > 0 {
				time.Sleep(tt.waits - 1)
				assert.Equal(t, "distributing", phase())
				assert.Equal(t, "distributing", jwtPhase(nextJWT.ID))
				time.Sleep(time.Nanosecond)
			}
			assert.Equal(t, "active", phase())
			assert.Equal(t, "active", jwtPhase(nextJWT.ID))
		})
	}
}

// Processes that come and go, such as an operator's commands or a replica that is started again and
// again, do not hold up a rotation that others have been showing all along.
func TestVisitorsDoNotHoldUpARotation(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		a := open(t, store, withJWT)
		run(t, a)
		next := must.Get(a.Rotate(t.Context()))(t)
		for range 25 * 6 { // of the default Propagation
			time.Sleep(10 * time.Second)
			open(t, store, withJWT)
		}
		roots := a.Roots()
		assert.Equal(t, next.ID, roots[len(roots)-1].ID)
		assert.Equal(t, "active", roots[len(roots)-1].Phase)
	})
}

// An authority that grants more than the record knows says so before it does.
func TestLongerLifetimesAreWrittenFirst(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		memory := ca.NewMemoryStore()
		store := &faultStore{Store: memory}
		a := open(t, memory)
		b := open(t, store, func(c *ca.Config) { c.MaxTTL = 5 * time.Hour }) // writes it down
		run(t, a)
		next := must.Get(a.Rotate(t.Context()))(t) // knows of one hour only
		csr := newCSR(t)
		time.Sleep(25 * time.Minute)
		bRoots := b.Roots()
		require.Len(t, bRoots, 1, "it has not read since")

		// b reads, and the new root was made by a.
		run(t, b)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		leaf := sign(t, b, csr, 5*time.Hour)
		require.Equal(t, string(next.Certificate.SubjectKeyId), string(leaf.AuthorityKeyId))
		third := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(25*time.Minute + 5*time.Hour + 2*time.Minute - 1)
		assert.True(t, slices.Contains(serials(a), next.ID), "it stays for as long as b could grant")
		time.Sleep(time.Nanosecond)
		assert.Equal(t, []string{third.ID}, serials(a))
	})
	// While that cannot be written, short ones are granted and long ones are not.
	synctest.Test(t, func(t *testing.T) {
		memory := ca.NewMemoryStore()
		store := &faultStore{Store: memory}
		a := open(t, memory)
		b := open(t, store, func(c *ca.Config) { c.MaxTTL = 5 * time.Hour })
		must.Get(a.Rotate(t.Context()))(t)
		run(t, a)
		time.Sleep(26 * time.Minute)
		store.behave(always("save", before))
		run(t, b)
		time.Sleep(time.Minute)
		csr := newCSR(t)
		sign(t, b, csr, time.Hour)
		_, err := b.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: time.Hour + 1})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
	})
}

// A Save that failed and was done all the same is ours; one that was not done left all as it was.
func TestAmbiguousSave(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		save, load fault
		ok         bool // Rotate succeeds
		there      int  // roots that a sees afterwards
		stored     int  // roots in the store
	}{
		"nothing was done":                       {before, fine, false, 1, 1},
		"it was done":                            {after, fine, true, 2, 2},
		"it was done, and cannot be read back":   {after, before, false, 1, 2},
		"it hangs":                               {hang, fine, false, 1, 1},
		"nothing was done, and cannot be read":   {before, before, false, 1, 1},
		"it was done, but an old record is read": {after, stale, false, 1, 2},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			store := &faultStore{Store: ca.NewMemoryStore()}
			a := open(t, store)
			store.behave(func(op string) (fault, time.Duration) {
				if op == "load" {
					return tt.load, 0
				}
				return tt.save, 0
			})
			_, err := a.Rotate(t.Context())
			assert.Equal(t, tt.ok, err == nil, "%v", err)
			assert.Len(t, a.Roots(), tt.there)
			store.behave(nil)
			assert.Len(t, open(t, store).Roots(), tt.stored)
			run(t, a)
			time.Sleep(31 * time.Second)
			synctest.Wait()
			assert.Len(t, a.Roots(), tt.stored, "the next reading shows what is there")
			if tt.stored == 1 {
				_, err := a.Rotate(t.Context())
				assert.NoError(t, err)
			}
		})
	}
}

func TestConflictsAreDecidedAnew(t *testing.T) {
	conformance.Covers(t, "IST-3.6-7")
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		all := make([]*ca.Authority, 5)
		for i := range all {
			all[i] = open(t, store)
		}
		won := 0
		var mu sync.Mutex
		var wg sync.WaitGroup
		for _, a := range all {
			wg.Go(func() {
				_, err := a.Rotate(t.Context())
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					won++
				} else {
					assert.ErrorIs(t, err, ca.ErrRotating)
				}
			})
		}
		wg.Wait()
		assert.Equal(t, 1, won)
		for _, a := range all {
			assert.Len(t, a.Roots(), 2, "the replica that lost has read what the other wrote")
		}
	})
	// Conflicts without end end with ctx.
	synctest.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		a := open(t, store)
		store.behave(always("save", conflict))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := a.Rotate(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, ca.ErrConflict)
		assert.Len(t, a.Roots(), 1)
	})
}

// Replicas whose settings differ take the longest time: it is their consumers that have to learn of a
// root, too.
func TestLongestPropagationCounts(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		open(t, store, withJWT, func(c *ca.Config) { c.Rotation.Propagation = 50 * time.Minute })
		quick := open(t, store, withJWT)
		next := must.Get(quick.Rotate(t.Context()))(t)
		assert.Equal(t, time.Now().Add(50*time.Minute).Round(0), next.Activates)
		key := must.Get(quick.RotateJWT(t.Context()))(t)
		assert.Equal(t, time.Now().Add(50*time.Minute).Round(0), key.Activates)
	})
}

// A slow write shortens the time in which consumers can learn of a key, so that the key waits anew.
func TestSlowSave(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ takes, waits time.Duration }{
		{1900 * time.Millisecond, 3100 * time.Millisecond},
		{2100 * time.Millisecond, 5 * time.Second}, // less than three fifths are left
	} {
		for name, rotate := range map[string]func(ctx context.Context, a *ca.Authority) (time.Time, error){
			"root": func(ctx context.Context, a *ca.Authority) (time.Time, error) {
				r, err := a.Rotate(ctx)
				return r.Activates, err
			},
			"JWT key": func(ctx context.Context, a *ca.Authority) (time.Time, error) {
				k, err := a.RotateJWT(ctx)
				return k.Activates, err
			},
		} {
			synctest.Test(t, func(t *testing.T) {
				store := &faultStore{Store: ca.NewMemoryStore()}
				a := open(t, store, withJWT, func(c *ca.Config) { c.Rotation.Propagation = 5 * time.Second })
				store.behave(func(op string) (fault, time.Duration) {
					return fine, map[string]time.Duration{"save": tt.takes}[op]
				})
				begin, changed := time.Now(), a.Changed()
				var seen time.Time // when consumers can have it first
				go func() { <-changed; seen = time.Now() }()
				activates := must.Get(rotate(t.Context(), a))(t)
				synctest.Wait()
				assert.Equal(t, begin.Add(tt.takes), seen, name)
				assert.Equal(t, seen.Add(tt.waits).Round(0), activates, "%s: and Rotate knows", name)
				assert.Contains(t, string(load(t, store.Store).Data()[stateName]), activates.UTC().Format(`"activates": "`+time.RFC3339Nano), name)
			})
		}
	}
}

// A slow save makes a new root wait longer, and another replica writes before that is stored: the root is prepared once.
func TestSlowSaveAndAnotherWriter(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store, saves := &faultStore{Store: ca.NewMemoryStore()}, 0
		a := open(t, store, func(c *ca.Config) { c.Rotation.Propagation = 5 * time.Second })
		store.behave(func(op string) (fault, time.Duration) {
			if op != "save" {
				return fine, 0
			}
			switch saves++; saves {
			case 1:
				return fine, 2500 * time.Millisecond
			case 2:
				return conflict, 0
			}
			return fine, 0
		})
		next := must.Get(a.Rotate(t.Context()))(t)
		assert.GreaterOrEqual(t, saves, 2)
		assert.Len(t, a.Roots(), 2)
		assert.Equal(t, next.ID, a.Roots()[1].ID)
	})
}

// What time does while something else is being written is written down, too.
func TestStepDuringASave(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		a := open(t, store, withJWT)
		run(t, a)
		must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(26 * time.Minute)
		old := a.Roots()[0]
		require.Equal(t, "retiring", old.Phase)
		time.Sleep(time.Until(old.Retires) - 500*time.Millisecond)
		store.behave(func(op string) (fault, time.Duration) {
			return fine, map[string]time.Duration{"save": time.Second}[op]
		})
		must.Get(a.RotateJWT(t.Context()))(t)
		require.Len(t, a.Roots(), 1)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		assert.NotContains(t, string(load(t, store.Store).Data()[stateName]), "retiring")
	})
}

// The record disappears, goes back in time, is replaced by another CA's or damaged: what works goes
// on, and nothing is overwritten that an operator may need.
func TestRecordTrouble(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		do   func(t *testing.T, s *swapStore, first ca.Record)
		says string // in Status; empty for none
		kept bool   // the record is left as it is
	}{
		{"it disappears", func(_ *testing.T, s *swapStore, _ ca.Record) { s.swap(ca.NewMemoryStore()) }, "", false},
		{"it goes back", func(t *testing.T, s *swapStore, first ca.Record) {
			m := ca.NewMemoryStore()
			must.Get(m.Save(t.Context(), ca.NewRecord("", first.Data())))(t)
			must.Get(m.Save(t.Context(), ca.NewRecord("1", first.Data())))(t)
			must.Get(m.Save(t.Context(), ca.NewRecord("2", first.Data())))(t) // so that no version comes back
			s.swap(m)
		}, "older than what this process has read", true},
		{"it went back, and another writer went on from there", func(t *testing.T, s *swapStore, first ca.Record) {
			m := ca.NewMemoryStore()
			must.Get(m.Save(t.Context(), ca.NewRecord("", first.Data())))(t)
			must.Get(open(t, m).Rotate(t.Context()))(t)  // as many writes as here, and another root
			must.Get(m.Save(t.Context(), load(t, m)))(t) // no version comes back
			s.swap(m)
		}, "older than what this process has read", true},
		{"another CA of the same trust domain", func(t *testing.T, s *swapStore, _ ca.Record) {
			m := ca.NewMemoryStore()
			b := open(t, m)
			must.Get(b.Rotate(t.Context()))(t)
			time.Sleep(25 * time.Minute)
			must.Get(b.Rotate(t.Context()))(t)
			for range 9 { // no version comes back
				r := load(t, m)
				must.Get(m.Save(t.Context(), r))(t)
			}
			s.swap(m)
		}, "another CA of the same trust domain", true},
		{"another trust domain's", func(t *testing.T, s *swapStore, _ ca.Record) {
			m := ca.NewMemoryStore()
			open(t, m, func(c *ca.Config) { c.TrustDomain = spiffe.MustParseTrustDomain("example.com") })
			must.Get(m.Save(t.Context(), ca.NewRecord("1", load(t, m).Data())))(t)
			must.Get(m.Save(t.Context(), ca.NewRecord("2", load(t, m).Data())))(t)
			s.swap(m)
		}, `belongs to the trust domain "example.com"`, true},
		{"damaged", func(t *testing.T, s *swapStore, _ ca.Record) {
			r := load(t, s)
			r.Data()["svidkit-state.json"] = r.Data()["svidkit-state.json"][1:]
			must.Get(s.Save(t.Context(), r))(t)
		}, "svidkit-state.json", true},
	} {
		bubble.Run(t, tt.name, func(t *testing.T) {
			var log bytes.Buffer
			s := &swapStore{Store: ca.NewMemoryStore()}
			a := open(t, s, func(c *ca.Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
			first := load(t, s)
			must.Get(a.Rotate(t.Context()))(t)
			stop := run(t, a)
			want := serials(a)
			tt.do(t, s, first)
			had := load2(t, s)
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			assert.Equal(t, want, serials(a)[:2])
			leaf := sign(t, a, newCSR(t), 0)
			assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
			err := a.Status().SyncError
			if tt.says == "" {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, ca.ErrRecord)
				require.ErrorContains(t, err, tt.says)
			}
			if tt.kept {
				assert.Equal(t, had, load2(t, s), "left as it is")
			} else {
				assert.Equal(t, want, serials(open(t, s)), "written again")
			}
			stop()
			assert.LessOrEqual(t, bytes.Count(log.Bytes(), []byte("level=WARN")), 2, "one thing is said once: %s", &log)
		})
	}
}

// swapStore is a store that may be exchanged.
type swapStore struct {
	mu sync.Mutex
	ca.Store
}

func (s *swapStore) swap(to ca.Store) { s.mu.Lock(); defer s.mu.Unlock(); s.Store = to }
func (s *swapStore) get() ca.Store    { s.mu.Lock(); defer s.mu.Unlock(); return s.Store }
func (s *swapStore) Load(ctx context.Context) (ca.Record, error) {
	return s.get().Load(ctx)
}
func (s *swapStore) Save(ctx context.Context, r ca.Record) (string, error) {
	return s.get().Save(ctx, r)
}

func load(t *testing.T, s ca.Store) ca.Record {
	t.Helper()
	return must.Get(s.Load(t.Context()))(t)
}

// load2 is load, or nothing.
func load2(t *testing.T, s ca.Store) map[string][]byte {
	t.Helper()
	r, err := s.Load(t.Context())
	if !errors.Is(err, ca.ErrNoRecord) {
		require.NoError(t, err)
	}
	return r.Data()
}

// JWT keys that come to a CA that had none wait, as others may have its bundle.
func TestJWTIsTurnedOnLater(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		open(t, store)
		a := open(t, store, withJWT)
		run(t, a)
		keys := a.Status().JWTKeys
		require.Len(t, keys, 1)
		assert.Equal(t, "distributing", keys[0].Phase)
		_, err := a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		e, _ := errors.AsType[*ca.SignError](err)
		assert.Equal(t, 25*time.Minute, e.RetryAfter)
		time.Sleep(25 * time.Minute)
		synctest.Wait()
		must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}}))(t)
		without := open(t, store)
		assert.True(t, a.Bundle().Equal(without.Bundle()), "a replica that signs no tokens publishes the keys all the same")
		_, err = without.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"db"}})
		assert.ErrorIs(t, err, ca.ErrNoJWT)
		_, err = without.RotateJWT(t.Context())
		assert.ErrorIs(t, err, ca.ErrNoJWT)
	})
}
