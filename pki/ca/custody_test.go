package ca_test

import (
	"bytes"
	"context"
	"crypto"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
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
	"github.com/svidkit/svidkit/internal/test/custodian"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func heldBy(c ca.Custodian, former ...ca.Custodian) func(*ca.Config) {
	return custody(func(o *ca.Custody) { o.Keys, o.Former = c, former })
}

// custody edits the Custody of a Config.
func custody(edit func(*ca.Custody)) func(*ca.Config) {
	return func(cfg *ca.Config) {
		o, _ := cfg.Custody.(ca.Custody)
		edit(&o)
		cfg.Custody = o
	}
}

// state is what a record says of private keys.
type state struct {
	Roots   []stateKey `json:"roots"`
	JWTKeys []stateKey `json:"jwt_keys"`
	Loose   []struct {
		Name string `json:"name"`
		Use  string `json:"use"`
	} `json:"loose_keys"`
}

type stateKey struct {
	PrivateKey string `json:"private_key"`
	KeyName    string `json:"key_name"`
	Phase      string `json:"phase"`
}

func stateOf(t testing.TB, s ca.Store) (all state) {
	t.Helper()
	r := must.Get(s.Load(t.Context()))(t)
	require.NoError(t, json.Unmarshal(r.Data()["svidkit-state.json"], &all))
	return all
}

// names returns the names of private keys that sign or will, and of those that no key has.
func (s state) names() (signing, loose []string) {
	for _, k := range append(s.Roots, s.JWTKeys...) {
		if k.KeyName != "" {
			signing = append(signing, k.KeyName)
		}
	}
	for _, l := range s.Loose {
		loose = append(loose, l.Name)
	}
	slices.Sort(signing)
	slices.Sort(loose)
	return signing, loose
}

// A CA moves its keys from the store to a custodian, to another one, and back. At each moment it signs; the store never
// has a key that the custodian made, and in the end no custodian has a key that the record does not name.
func TestCustody(t *testing.T) {
	for _, keepKey := range []bool{false, true} {
		bubble.Run(t, fmt.Sprint("keep key ", keepKey), func(t *testing.T) {
			store, first, second := ca.NewMemoryStore(), custodian.New(), custodian.New()
			csr := newCSR(t)
			for _, step := range []struct {
				name   string
				edit   func(*ca.Config)
				has    *custodian.Custodian // all keys that sign, after a rotation
				empty  *custodian.Custodian
				rotate bool
			}{
				{"in the store", func(*ca.Config) {}, nil, nil, true},
				{"at the first", heldBy(first), first, nil, true},
				{"at the first, again", heldBy(first), first, nil, false},
				{"at the second", heldBy(second, first), second, first, true},
				{"in the store again", custody(func(o *ca.Custody) { o.Former = []ca.Custodian{second} }), nil, second, true},
				{"without a custodian", func(*ca.Config) {}, nil, nil, false},
			} {
				a := open(t, store, withJWT, step.edit, func(c *ca.Config) { c.Rotation.KeepKey = keepKey && !step.rotate })
				stop := run(t, a)
				check := func() {
					leaf := sign(t, a, csr, time.Hour)
					require.NoError(t, verify(a.Bundle(), leaf, time.Now()), step.name)
					must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
				}
				check()
				must.Get(a.Rotate(t.Context()))(t)
				must.Get(a.RotateJWT(t.Context()))(t)
				for range 8 {
					check()
					time.Sleep(10 * time.Minute)
				}
				check()
				s := stateOf(t, store)
				signing, loose := s.names()
				assert.Empty(t, loose, step.name)
				if step.has == nil {
					assert.Empty(t, signing, step.name)
				} else {
					assert.Equal(t, step.has.Names(), signing, step.name)
					data := must.Get(store.Load(t.Context()))(t).Data()
					assert.NotContains(t, fmt.Sprintf("%s", slices.Collect(maps.Values(data))), "PRIVATE KEY", step.name)
					assert.Len(t, signing, 2, step.name)
					assert.Contains(t, fmt.Sprint(a.Status().JWTKeys), ", private key svidkit-", step.name)
				}
				if step.empty != nil {
					assert.Empty(t, step.empty.Names(), step.name)
				}
				orphans := must.Get(a.Orphans(t.Context()))(t)
				assert.Empty(t, orphans, step.name)
				stop()
			}
		})
	}
}

var errDead = errors.New("the process is dead")

// mortal is a store and a custodian of a process that dies at its nth call, before or after the call was done.
type mortal struct {
	ca.Store
	*custodian.Custodian
	mu    sync.Mutex
	n     int
	after bool
	dead  bool
}

func (m *mortal) step(after bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errDead
	}
	if after != m.after {
		return nil
	}
	if m.n--; m.n < 0 {
		m.dead = true
		return errDead
	}
	return nil
}

func (m *mortal) Load(ctx context.Context) (ca.Record, error) {
	if err := m.step(false); err != nil {
		return ca.Record{}, err
	}
	r, err := m.Store.Load(ctx)
	return r, cmpErr(m.step(true), err)
}

func (m *mortal) Save(ctx context.Context, r ca.Record) (string, error) {
	if err := m.step(false); err != nil {
		return "", err
	}
	v, err := m.Store.Save(ctx, r)
	return v, cmpErr(m.step(true), err)
}

func cmpErr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// A process dies at each of its calls of the store and of the custodian, before or after the call was done. The next one
// goes on: it has all keys that sign, and, after a while, the custodian has no key that the record does not name.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, op := range []struct {
		name string
		do   func(a *ca.Authority)
	}{
		{"create", func(*ca.Authority) {}},
		{"rotate", func(a *ca.Authority) { _, _ = a.Rotate(ctx) }},
		{"rotate the JWT key", func(a *ca.Authority) { _, _ = a.RotateJWT(ctx) }},
		{"taint", func(a *ca.Authority) { _ = a.Taint(ctx, a.Signer()) }},
		{"revoke", func(a *ca.Authority) { _, _ = a.Revoke(ctx, a.Signer(), true) }},
		{"taint the next", func(a *ca.Authority) {
			if next, err := a.Rotate(ctx); err == nil {
				_ = a.Taint(ctx, next.ID)
			}
		}},
		{"live", func(a *ca.Authority) {
			if _, err := a.Rotate(ctx); err == nil {
				run, cancel := context.WithTimeout(ctx, 6*time.Minute)
				defer cancel()
				_ = a.Run(run)
			}
		}},
	} {
		t.Run(op.name, func(t *testing.T) {
			t.Parallel()
			for _, sealed := range []bool{false, true} {
				for _, after := range []bool{false, true} {
					for n := 0; ; n++ {
						dead := false
						synctest.Test(t, func(t *testing.T) { dead = killedAt(t, op.do, op.name == "create", n, after, sealed) })
						if !dead {
							require.Positive(t, n, "it has made a call")
							break
						}
						require.False(t, t.Failed(), "call %d, after it %v", n, after)
					}
				}
			}
		})
	}
}

func killedAt(t *testing.T, do func(*ca.Authority), fresh bool, n int, after, sealed bool) (dead bool) {
	store, keys := ca.NewMemoryStore(), custodian.New()
	held := func(c *ca.Config) {
		withJWT(c)
		heldBy(keys)(c)
		c.Rotation.Propagation = 2 * time.Minute
		if sealed {
			custody(func(o *ca.Custody) { o.Seal = keys })(c)
		}
	}
	if !fresh {
		open(t, store, held)
	}
	m := &mortal{Store: store, Custodian: keys, n: n, after: after}
	if !fresh {
		m.n = 1 << 30
	}
	keys.Fault = func(context.Context, string, string) error { return m.step(false) }
	keys.Late = func(string, string) error { return m.step(true) }
	dying, cancel := context.WithTimeout(t.Context(), time.Minute)
	a, err := tryOpen(dying, m, held)
	if err == nil {
		m.mu.Lock()
		if !fresh {
			m.n = n
		}
		m.mu.Unlock()
		do(a)
	}
	cancel()
	synctest.Wait() // a call of the custodian that Run has given up may be under way
	m.mu.Lock()
	dead = m.dead
	m.mu.Unlock()
	keys.Fault, keys.Late = nil, nil

	// The next process. The operator asks for a new CA only if the store has none at all.
	_, err = store.Load(t.Context())
	soon, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	b := must.Get(tryOpen(soon, store, held, func(c *ca.Config) { c.Create = errors.Is(err, ca.ErrNoRecord) }))(t)
	defer run(t, b)()
	for range 3 {
		require.NoError(t, verify(b.Bundle(), sign(t, b, newCSR(t), time.Minute), time.Now()), "call %d", n)
		must.Get(b.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
		time.Sleep(3 * time.Minute)
	}
	require.NoError(t, b.Health().Signing)
	var named []string
	for _, k := range append(b.Status().Roots, b.Status().JWTKeys...) {
		if k.Custody != "" {
			named = append(named, k.Custody)
		}
	}
	named = append(named, b.Status().Loose...)
	for _, name := range keys.Names() {
		assert.Contains(t, named, name, "call %d, after it %v: an orphan", n, after)
	}
	assert.Empty(t, must.Get(b.Orphans(t.Context()))(t))
	return dead
}

// A custodian is away for an hour. What is valid stays so, the store is read and written, and readiness says why
// nothing is signed; when it is back, the CA signs at once.
func TestCustodianAway(t *testing.T) {
	for _, hangs := range []bool{false, true} {
		bubble.Run(t, fmt.Sprint("hangs ", hangs), func(t *testing.T) {
			store, keys := ca.NewMemoryStore(), custodian.New()
			var mu sync.Mutex
			away := false
			keys.Fault = func(ctx context.Context, op, _ string) error {
				mu.Lock()
				is := away
				mu.Unlock()
				switch {
				case !is, hangs && op == "new": // and what it makes does not sign
					return nil
				case hangs && op == "sign":
					time.Sleep(2 * time.Minute) // longer than it may
				case hangs:
					<-ctx.Done()
				}
				return errors.New("connection refused")
			}
			set := func(to bool) { mu.Lock(); defer mu.Unlock(); away = to }
			a := open(t, store, withJWT, heldBy(keys))
			stopA := run(t, a)
			b := open(t, store, withJWT, heldBy(keys))
			stopB := run(t, b)
			csr, leaf := newCSR(t), sign(t, a, newCSR(t), time.Hour)
			set(true)
			for range 30 {
				start := time.Now()
				_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				refusal, ok := errors.AsType[*ca.SignError](err)
				require.True(t, ok)
				_, again := refusal.Retryable()
				assert.True(t, again)
				assert.LessOrEqual(t, time.Since(start), 15*time.Second)
				require.NoError(t, verify(b.Bundle(), leaf, time.Now()))
				assert.ErrorContains(t, a.Health().Signing, "custodian of the keys")
				require.Error(t, a.Health().Keys)
				require.NoError(t, a.Health().Store)
				time.Sleep(time.Minute)
			}
			short, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := a.Sign(short, ca.Request{CSR: csr, ID: web})
			cancel()
			if hangs {
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}

			// A taint reaches the other replica although there can be no successor.
			bad := a.Signer()
			tainted := make(chan error, 1)
			go func() { tainted <- a.Taint(t.Context(), bad) }()
			time.Sleep(time.Second)
			assert.Empty(t, slices.Collect(a.CallerBundle().X509Authorities()), "it does not wait")
			require.NoError(t, <-tainted)
			for range 40 { // in which both try to make a successor
				time.Sleep(5 * time.Second)
				assert.Less(t, time.Since(b.Status().Synced), 35*time.Second, "the store is read")
			}
			assert.Empty(t, slices.Collect(b.CallerBundle().X509Authorities()))
			c := open(t, store, withJWT, heldBy(keys)) // a replica starts meanwhile
			assert.True(t, c.Bundle().Equal(b.Bundle()))
			require.Error(t, c.Health().Signing)

			set(false)
			time.Sleep(3 * time.Minute)
			require.NoError(t, a.Health().Keys)
			assert.NotEmpty(t, slices.Collect(b.CallerBundle().X509Authorities()), "the successor")
			time.Sleep(time.Hour)
			assert.NotEqual(t, bad, a.Signer())
			require.NoError(t, verify(a.Bundle(), sign(t, b, csr, time.Hour), time.Now()))
			time.Sleep(2 * time.Hour)
			assert.Empty(t, a.Status().Loose)
			assert.Len(t, keys.Names(), 2)
			stopA()
			stopB()
			time.Sleep(3 * time.Minute) // until the last call returns
		})
	}
}

// A private key is destroyed only when the record in the store does not need it.
func TestDestroyedAfterTheRecord(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), &faultStore{Store: ca.NewMemoryStore()}
		a := open(t, store, heldBy(keys))
		run(t, a)
		must.Get(a.Rotate(t.Context()))(t)
		store.behave(always("save", before))
		time.Sleep(time.Hour)
		assert.Equal(t, "active", a.Roots()[1].Phase)
		signing, _ := stateOf(t, store).names()
		assert.Equal(t, signing, keys.Names())
		assert.Len(t, signing, 2)
		store.behave(nil)
		time.Sleep(5 * time.Minute)
		assert.Equal(t, []string{a.Roots()[1].Custody}, keys.Names())
	})
}

// A private key is destroyed when a replica whose clock is slow does not sign with it any more.
func TestDestroyedAfterSlowClocks(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys := custodian.New()
		a := open(t, ca.NewMemoryStore(), heldBy(keys), func(c *ca.Config) { c.Backdate = 10 * time.Minute })
		run(t, a)
		next := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(time.Until(next.Activates) + 9*time.Minute)
		assert.Len(t, keys.Names(), 2)
		time.Sleep(3 * time.Minute)
		assert.Equal(t, []string{next.Custody}, keys.Names())
	})
}

// restarted is a custodian whose keys have to be found again after a restart.
type restarted struct {
	*custodian.Custodian
	restarts atomic.Int64
}

type startedKey struct {
	crypto.Signer
	of *restarted
	n  int64
}

func (r *restarted) Key(ctx context.Context, name string) (crypto.Signer, error) {
	key, err := r.Custodian.Key(ctx, name)
	return startedKey{key, r, r.restarts.Load()}, err
}

func (k startedKey) Sign(r io.Reader, digest []byte, opts crypto.SignerOpts) ([]byte, error) {
	if k.n != k.of.restarts.Load() {
		return nil, errors.New("no such session")
	}
	return k.Signer.Sign(r, digest, opts)
}

func TestRestartedCustodian(t *testing.T) {
	t.Parallel()
	keys, store := &restarted{Custodian: custodian.New()}, ca.NewMemoryStore()
	held := heldBy(keys)
	open(t, store, held)
	a := open(t, store, held)
	sign(t, a, newCSR(t), time.Minute)
	keys.restarts.Add(1)
	_, err := a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
	require.ErrorContains(t, err, "no such session")
	sign(t, a, newCSR(t), time.Minute)
}

// A key that does not sign is revoked without its custodian, which could not make a successor.
func TestRevokeWithoutCustodian(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, away := custodian.New(), new(atomic.Bool)
		keys.Fault = func(ctx context.Context, _, _ string) error {
			if away.Load() {
				<-ctx.Done()
			}
			return ctx.Err()
		}
		a := open(t, ca.NewMemoryStore(), heldBy(keys))
		old := a.Signer()
		next := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(time.Until(next.Activates))
		away.Store(true)
		start := time.Now()
		must.Get(a.Revoke(t.Context(), old, true))(t)
		assert.Zero(t, time.Since(start))
		assert.Equal(t, []string{next.ID}, serials(a))
		_, err := a.Revoke(t.Context(), next.ID, true)
		require.ErrorIs(t, err, context.DeadlineExceeded, "one that signs needs a successor")
	})
}

// A custodian that signs, and slower than callers ask, is not one that fails: what is refused had to wait for its turn.
func TestSlowCustodianIsHealthy(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, slow := custodian.New(), new(atomic.Bool)
		keys.Fault = func(_ context.Context, op, _ string) error {
			if op == "sign" && slow.Load() {
				time.Sleep(12 * time.Second)
			}
			return nil
		}
		a := open(t, ca.NewMemoryStore(), heldBy(keys))
		slow.Store(true)
		csr, signed := newCSR(t), new(atomic.Int64)
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if _, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web}); err == nil {
					signed.Add(1)
				}
			})
		}
		wg.Wait()
		assert.EqualValues(t, 64, signed.Load())
		require.NoError(t, a.Health().Keys)
		require.NoError(t, a.Health().Signing)
		time.Sleep(15 * time.Second)
	})
}

// At most 64 calls wait for a custodian that hangs; further requests fail in time, and so does nothing else.
func TestHangingCustodianIsBounded(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys := custodian.New()
		release := make(chan struct{})
		var mu sync.Mutex
		hanging, most, block := 0, 0, false
		keys.Fault = func(_ context.Context, op, _ string) error {
			mu.Lock()
			if !block || op != "sign" {
				mu.Unlock()
				return nil
			}
			hanging++
			most = max(most, hanging)
			mu.Unlock()
			<-release
			return errors.New("too late")
		}
		a := open(t, ca.NewMemoryStore(), heldBy(keys))
		mu.Lock()
		block = true
		mu.Unlock()
		var wg sync.WaitGroup
		csr, start := newCSR(t), time.Now()
		for range 300 {
			wg.Go(func() {
				_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
				assert.ErrorIs(t, err, spiffe.ErrNotReady)
			})
		}
		wg.Wait()
		assert.LessOrEqual(t, time.Since(start), 16*time.Second)
		mu.Lock()
		assert.Equal(t, 64, most)
		block = false
		mu.Unlock()
		close(release)
		synctest.Wait()
		sign(t, a, csr, time.Minute)
	})
}

// A signature that is wrong does not leave, whatever it is for.
func TestWrongSignatures(t *testing.T) {
	t.Parallel()
	other := []byte(nil)
	for name, spoil := range map[string]func([]byte) []byte{
		"truncated": func(b []byte) []byte { return b[:len(b)-1] },
		"empty":     func([]byte) []byte { return nil },
		"longer":    func(b []byte) []byte { return append(b, 0) },
		"a bit":     func(b []byte) []byte { b[len(b)-1] ^= 1; return b },
		"of another": func(b []byte) []byte {
			last := other
			if other = bytes.Clone(b); last == nil {
				return b
			}
			return last
		},
	} {
		for _, alg := range []string{"ecdsa-p256", "rsa-2048", "ed25519"} {
			t.Run(name+"/"+alg, func(t *testing.T) {
				keys := custodian.New()
				jwt := map[string]string{"ecdsa-p256": "ES512", "rsa-2048": "PS256", "ed25519": "RS256"}[alg]
				a := open(t, ca.NewMemoryStore(), heldBy(keys), func(c *ca.Config) {
					c.Rotation.KeyAlgorithm, c.JWT = alg, &ca.JWTConfig{Algorithm: jwt}
				})
				csr := newCSR(t)
				good := sign(t, a, csr, time.Minute)
				require.NoError(t, verify(a.Bundle(), good, time.Now()))
				must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
				other = []byte("another")
				keys.Spoil = spoil
				_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.ErrorContains(t, err, "signature is wrong")
				_, err = a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}})
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.Error(t, a.Health().Signing)
				keys.Spoil = nil
				sign(t, a, csr, time.Minute)
				require.NoError(t, a.Health().Signing)
			})
		}
	}
}

// What an authority says at the start about custodians.
func TestCustodyAtTheStart(t *testing.T) {
	t.Parallel()
	begin := func(t *testing.T, edit ...func(*ca.Config)) (ca.Store, *custodian.Custodian) {
		store, keys := ca.NewMemoryStore(), custodian.New()
		open(t, store, append(edit, withJWT, heldBy(keys))...)
		return store, keys
	}
	t.Run("none", func(t *testing.T) {
		t.Parallel()
		store, _ := begin(t)
		_, err := tryOpen(t.Context(), store)
		require.ErrorIs(t, err, ca.ErrUnfit)
		require.ErrorContains(t, err, "is at a custodian, and none is named")
	})
	t.Run("the wrong one", func(t *testing.T) {
		t.Parallel()
		store, _ := begin(t)
		before := load(t, store).Version
		other := custodian.New()
		_, err := tryOpen(t.Context(), store, withJWT, heldBy(other), custody(func(o *ca.Custody) { o.Seal = other }))
		require.ErrorIs(t, err, ca.ErrUnfit)
		require.ErrorContains(t, err, "name the custodian that has it")
		assert.Equal(t, before, load(t, store).Version, "it is left as it is, and not sealed")
	})
	t.Run("another key with the name", func(t *testing.T) {
		t.Parallel()
		store, keys := begin(t)
		other := custodian.New()
		for _, name := range keys.Names() {
			other.Put(name, must.Get(pki.NewKey(""))(t))
		}
		a, err := tryOpen(t.Context(), store, withJWT, heldBy(other))
		require.NoError(t, err, "it has keys of this CA, so that the record may be old")
		_, err = a.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		require.ErrorIs(t, err, pki.ErrKeyMismatch)
		require.ErrorIs(t, a.Health().Keys, pki.ErrKeyMismatch)
	})
	t.Run("one that cannot make the key", func(t *testing.T) {
		t.Parallel()
		keys := custodian.New()
		keys.Fault = func(_ context.Context, op, _ string) error {
			if op == "new" {
				return fmt.Errorf("an HSM: %w", errors.ErrUnsupported)
			}
			return nil
		}
		_, err := tryOpen(t.Context(), ca.NewMemoryStore(), heldBy(keys))
		require.ErrorIs(t, err, errors.ErrUnsupported)
	})
	t.Run("one that makes another kind of key", func(t *testing.T) {
		t.Parallel()
		keys := custodian.New()
		_, err := tryOpen(t.Context(), ca.NewMemoryStore(), withJWT, heldBy(stubborn{keys}))
		require.ErrorContains(t, err, "which is not written")
	})
	t.Run("without a store", func(t *testing.T) {
		t.Parallel()
		_, err := ca.New(ca.Config{TrustDomain: td, Custody: ca.Custody{Keys: custodian.New()}})
		require.ErrorContains(t, err, "Custody needs a store")
		_, err = ca.New(ca.Config{TrustDomain: td, Custody: ca.Custody{Seal: custodian.New()}})
		require.ErrorContains(t, err, "Custody needs a store")
	})
	bubble.Run(t, "an old record", func(t *testing.T) {
		store, keys := begin(t)
		old := must.Get(store.Load(t.Context()))(t)
		a := open(t, store, withJWT, heldBy(keys))
		stop := run(t, a)
		must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(3 * time.Hour)
		lost := a.Signer()
		stop()
		restored := ca.NewMemoryStore()
		must.Get(restored.Save(t.Context(), ca.NewRecord("", old.Data())))(t)
		b := open(t, restored, withJWT, heldBy(keys))
		_, err := b.Sign(t.Context(), ca.Request{CSR: newCSR(t), ID: web})
		require.ErrorIs(t, err, fs.ErrNotExist)
		orphans := must.Get(b.Orphans(t.Context()))(t)
		require.Len(t, orphans, 1, "the key of root %s", lost)
		_, err = b.Revoke(t.Context(), b.Signer(), true)
		require.NoError(t, err)
		sign(t, b, newCSR(t), time.Minute)
		run(t, b)
		time.Sleep(3 * time.Hour)
		assert.Contains(t, keys.Names(), orphans[0], "it is never destroyed")
	})
}

// stubborn makes only one kind of key.
type stubborn struct{ *custodian.Custodian }

func (s stubborn) NewKey(ctx context.Context, name, _ string) (crypto.Signer, error) {
	return s.Custodian.NewKey(ctx, name, "ecdsa-p384")
}

// A sealed record gives no key, and is of no use to another custodian; a part of another record, or of another version,
// is refused. A CA moves in and out.
func TestSealed(t *testing.T) {
	t.Parallel()
	seal := func(c ca.Sealer) func(*ca.Config) { return custody(func(o *ca.Custody) { o.Seal = c }) }
	unseal := func(c ca.Sealer) func(*ca.Config) { return custody(func(o *ca.Custody) { o.Unseal = c }) }
	store, keys := ca.NewMemoryStore(), custodian.New()
	a := open(t, store, withJWT)
	root := a.Signer()
	open(t, store, withJWT, seal(keys))
	sealed := must.Get(store.Load(t.Context()))(t)
	text := fmt.Sprintf("%s", slices.Collect(maps.Values(sealed.Data())))
	assert.NotContains(t, text, "PRIVATE")
	assert.Equal(t, []string{"ca-cert.pem", "cert-chain.pem", "key.pem", "root-cert.pem", "svidkit-note.txt",
		"svidkit-sealed.json"}, slices.Sorted(maps.Keys(sealed.Data())))
	version := sealed.Version
	b := open(t, store, withJWT, seal(keys))
	assert.Equal(t, root, b.Signer())
	sign(t, b, newCSR(t), time.Minute)
	assert.Equal(t, version, load(t, store).Version, "it is written once")
	must.Get(b.Rotate(t.Context()))(t)
	later := must.Get(store.Load(t.Context()))(t)

	type members map[string]any
	parse := func(r ca.Record) (m members) {
		require.NoError(t, json.Unmarshal(r.Data()["svidkit-sealed.json"], &m))
		return m
	}
	with := func(m members, name string, value any) []byte {
		m = maps.Clone(m)
		m[name] = value
		return must.Get(json.Marshal(m))(t)
	}
	one, two := parse(sealed), parse(later)
	other := ca.NewMemoryStore()
	open(t, other, withJWT, seal(keys))
	for name, b := range map[string][]byte{
		"the state of the next version":   with(one, "state", two["state"]),
		"the key of the next version":     with(one, "key", two["key"]),
		"another revision":                with(one, "revision", 77),
		"another writer":                  with(one, "writer", two["writer"]),
		"another authority":               with(one, "authority", parse(must.Get(other.Load(t.Context()))(t))["authority"]),
		"another trust domain":            with(one, "trust_domain", "example.com"),
		"an empty state":                  with(one, "state", ""),
		"an empty key":                    with(one, "key", ""),
		"a state in the place of the key": with(one, "key", one["state"]),
		"no JSON":                         []byte("{"),
		"nothing":                         {},
	} {
		t.Run(name, func(t *testing.T) {
			data := maps.Clone(sealed.Data())
			data["svidkit-sealed.json"] = b
			s := ca.NewMemoryStore()
			v := must.Get(s.Save(t.Context(), ca.NewRecord("", data)))(t)
			_, err := tryOpen(t.Context(), s, withJWT, seal(keys))
			require.ErrorIs(t, err, ca.ErrUnfit)
			assert.Equal(t, v, load(t, s).Version, "it is left as it is")
		})
	}
	t.Run("both forms", func(t *testing.T) {
		data := maps.Clone(sealed.Data())
		data["svidkit-state.json"] = []byte("{}")
		s := ca.NewMemoryStore()
		must.Get(s.Save(t.Context(), ca.NewRecord("", data)))(t)
		_, err := tryOpen(t.Context(), s, withJWT, seal(keys))
		require.ErrorIs(t, err, ca.ErrUnfit)
	})
	t.Run("no custodian", func(t *testing.T) {
		_, err := tryOpen(t.Context(), store, withJWT)
		require.ErrorIs(t, err, ca.ErrUnfit)
		require.ErrorContains(t, err, "sealed, and no key is named")
	})
	t.Run("another custodian", func(t *testing.T) {
		_, err := tryOpen(t.Context(), store, withJWT, seal(custodian.New()))
		require.ErrorIs(t, err, ca.ErrUnfit)
	})
	bubble.Run(t, "a custodian that comes later", func(t *testing.T) {
		c, s, start := custodian.New(), ca.NewMemoryStore(), time.Now()
		open(t, s, seal(c))
		c.Fault = func(context.Context, string, string) error {
			if time.Since(start) < time.Minute {
				return errors.New("connection refused")
			}
			return nil
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err := tryOpen(ctx, s, seal(c))
		cancel()
		require.ErrorContains(t, err, "connection refused")
		require.NotErrorIs(t, err, ca.ErrUnfit)
		open(t, s, seal(c))
		assert.GreaterOrEqual(t, time.Since(start), time.Minute)
	})
	bubble.Run(t, "one that seals badly", func(t *testing.T) {
		c, s := custodian.New(), ca.NewMemoryStore()
		old := open(t, s)
		before := load(t, s).Version
		c.Spoil = func([]byte) []byte { return make([]byte, 32) }
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := tryOpen(ctx, s, seal(c))
		require.ErrorContains(t, err, "does not unseal to the same")
		assert.Equal(t, before, load(t, s).Version)
		assert.Equal(t, old.Signer(), open(t, s).Signer())
	})

	next := custodian.New()
	c := open(t, store, withJWT, seal(next), unseal(keys))
	assert.Equal(t, root, c.Signer())
	assert.Equal(t, root, open(t, store, withJWT, seal(next)).Signer(), "it moved")
	d := open(t, store, withJWT, unseal(next))
	assert.Equal(t, root, d.Signer())
	assert.Equal(t, root, open(t, store, withJWT).Signer(), "it is in the clear")
	assert.Contains(t, load(t, store).Data(), "ca-key.pem")
}

// hanging has signatures with keys wait until the result is closed, from when on is set.
func hanging(t testing.TB, keys *custodian.Custodian, on *atomic.Bool) {
	release := make(chan struct{})
	keys.Fault = func(_ context.Context, op, _ string) error {
		if on.Load() && op == "sign" {
			<-release
		}
		return nil
	}
	t.Cleanup(func() { close(release) })
}

// Signatures that never return stop those with their keys, and nothing at another custodian: the store is unsealed and
// sealed, and a stolen root gets a successor, which signs.
func TestHangingSignatures(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, other, store, hangs := custodian.New(), custodian.New(), ca.NewMemoryStore(), new(atomic.Bool)
		hanging(t, keys, hangs)
		sealed := custody(func(o *ca.Custody) { o.Seal = other })
		a := open(t, store, heldBy(keys), sealed)
		b := open(t, store, heldBy(other, keys), sealed)
		run(t, a)
		run(t, b)
		hangs.Store(true)
		var wg sync.WaitGroup
		csr := newCSR(t)
		for _, each := range []*ca.Authority{a, b} {
			for range 70 {
				wg.Go(func() {
					_, err := each.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
					assert.ErrorIs(t, err, spiffe.ErrNotReady)
				})
			}
		}
		wg.Wait()
		must.Get(b.Revoke(t.Context(), b.Signer(), true))(t)
		leaf := sign(t, b, csr, time.Minute)
		require.NoError(t, b.Health().Signing)
		time.Sleep(31 * time.Second)
		require.NoError(t, a.Health().Store)
		require.NoError(t, verify(a.Bundle(), leaf, time.Now()))
	})
}

// A start waits once for a custodian that hangs, not for each of its keys.
func TestHangingAtTheStart(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store, hangs := custodian.New(), ca.NewMemoryStore(), new(atomic.Bool)
		hanging(t, keys, hangs)
		a := open(t, store, withJWT, heldBy(keys))
		must.Get(a.Rotate(t.Context()))(t)
		hangs.Store(true)
		start := time.Now()
		b := open(t, store, withJWT, heldBy(keys))
		assert.LessOrEqual(t, time.Since(start), 15*time.Second)
		require.Error(t, b.Health().Signing)
	})
}

// A custodian that hangs when it is asked for a key does not hide one that has it.
func TestHangingBesideFormer(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		first, second, store := custodian.New(), custodian.New(), ca.NewMemoryStore()
		open(t, store, heldBy(first))
		second.Fault = func(ctx context.Context, _, _ string) error { <-ctx.Done(); return ctx.Err() }
		a := open(t, store, heldBy(second, first))
		sign(t, a, newCSR(t), time.Minute)
		require.NoError(t, a.Health().Signing)
	})
}

// Health tells the keys apart: certificates are signed while the custodian of the key for tokens is away, and the other
// way round, and nothing but a signature is a reason not to be ready.
func TestHealthOfEachKey(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		bad := new(atomic.Value)
		bad.Store("")
		keys.Fault = func(ctx context.Context, op, name string) error {
			switch {
			case op+name == "sign"+bad.Load().(string):
				return errors.New("connection refused")
			case op == bad.Load():
				<-ctx.Done()
			}
			return ctx.Err()
		}
		a := open(t, store, withJWT, heldBy(keys))
		run(t, a)
		csr, token := newCSR(t), ca.JWTRequest{ID: web, Audience: []string{"x"}}
		root, jwt := a.Status().Roots[0].Custody, a.Status().JWTKeys[0].Custody

		bad.Store(jwt)
		_, err := a.SignJWT(t.Context(), token)
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.NoError(t, a.Health().Signing)
		require.Error(t, a.Health().Keys)
		sign(t, a, csr, time.Minute)
		require.Error(t, a.Health().Keys, "another key has signed")

		bad.Store(root)
		_, err = a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		must.Get(a.SignJWT(t.Context(), token))(t)
		require.Error(t, a.Health().Signing, "another key has signed")

		bad.Store("keys")
		time.Sleep(11 * time.Second)
		require.NoError(t, a.Health().Keys, "it is asked again")
		_, err = a.Orphans(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, a.Health().Signing)
		bad.Store("new")
		_, err = a.Rotate(t.Context())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NoError(t, a.Health().Signing)
	})
}

// An older record was restored, and a replica that has not read it yet would destroy the key that it needs.
func TestNotDestroyedAfterRestore(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		a := open(t, store, heldBy(keys))
		run(t, a)
		old := load(t, store).Data()
		next := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(time.Until(next.Activates) + 30*time.Second)
		require.Equal(t, next.ID, a.Signer())
		require.Len(t, stateOf(t, store).Loose, 1, "the key is to be destroyed")
		must.Get(store.Save(t.Context(), ca.NewRecord(load(t, store).Version, old)))(t)
		time.Sleep(time.Hour)
		b := open(t, store, heldBy(keys))
		require.Error(t, a.Health().Store)
		assert.NotEqual(t, next.ID, b.Signer())
		sign(t, b, newCSR(t), time.Minute)
	})
}

// A process that names no custodian of keys leaves to others what is to be destroyed.
func TestLeavesToOthers(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		stop := run(t, open(t, store, heldBy(keys)))
		stop()
		a := open(t, store, heldBy(nil, keys))
		must.Get(a.Revoke(t.Context(), a.Signer(), true))(t)
		require.Len(t, a.Status().Loose, 1)
		b := open(t, store, custody(func(o *ca.Custody) { o.Seal = custodian.New() }))
		run(t, b)
		time.Sleep(3 * time.Hour)
		assert.Len(t, b.Status().Loose, 1)
		assert.Len(t, keys.Names(), 1)
	})
}

// A failed attempt has left a key with the same name at a custodian that is named first.
func TestTwoKeysWithOneName(t *testing.T) {
	t.Parallel()
	first, second, store := custodian.New(), custodian.New(), ca.NewMemoryStore()
	open(t, store, heldBy(first))
	for _, name := range first.Names() {
		second.Put(name, must.Get(pki.NewKey(""))(t))
	}
	sign(t, open(t, store, heldBy(second, first)), newCSR(t), time.Minute)
}

// The custodian has lost a key, and does not list its keys: the record may be good or old.
func TestLostKeyWithoutList(t *testing.T) {
	t.Parallel()
	keys, store := custodian.New(), ca.NewMemoryStore()
	open(t, store, heldBy(keys))
	require.NoError(t, keys.Destroy(t.Context(), keys.Names()[0]))
	keys.Fault = func(_ context.Context, op, _ string) error {
		if op == "keys" {
			return errors.New("permission denied")
		}
		return nil
	}
	a := open(t, store, heldBy(keys))
	must.Get(a.Revoke(t.Context(), a.Signer(), true))(t)
	sign(t, a, newCSR(t), time.Minute)
}

// A plugged-in CA that began without tokens starts while the first key for them waits for its custodian.
func TestPluggedInWithoutItsCustodian(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		files := newFolder(newOffline(t).files(t, 1000*time.Hour))
		load := func(edit ...func(*ca.Config)) *ca.Authority {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
			defer cancel()
			return must.Get(tryLoadCA(ctx, files, store, edit...))(t)
		}
		load()
		away := new(atomic.Bool)
		away.Store(true)
		keys.Fault = func(context.Context, string, string) error {
			if away.Load() {
				return errors.New("connection refused")
			}
			return nil
		}
		run(t, load(withJWT, heldBy(keys)))()
		stop := run(t, load(withJWT, heldBy(keys)))
		time.Sleep(time.Minute)
		stop()
		a := load(withJWT, heldBy(keys))
		away.Store(false)
		run(t, a)
		time.Sleep(time.Hour)
		must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
		away.Store(true)
		time.Sleep(2 * time.Minute)
		require.NoError(t, a.Health().Signing)
		require.Error(t, a.Health().Keys)
	})
}

// Of two replicas that begin a CA at the same time one has made it.
func TestCreatedOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		audited := func(r *keyAuditor) func(*ca.Config) { return func(c *ca.Config) { c.Auditor = r } }
		var first, second keyAuditor
		keys.Fault = func(_ context.Context, op, _ string) error {
			if op == "new" {
				keys.Fault = nil
				run(t, open(t, store, heldBy(keys), audited(&second)))
			}
			return nil
		}
		a := open(t, store, heldBy(keys), audited(&first))
		run(t, a)
		synctest.Wait()
		assert.Equal(t, []string{"created root"}, second.take())
		assert.Equal(t, []string{"loaded root"}, first.take())
	})
}

// Replicas of which one seals the record and the other does not, as while they are restarted, do not take turns.
func TestSealedByOne(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		run(t, open(t, store, custody(func(o *ca.Custody) { o.Seal = keys })))
		run(t, open(t, store, custody(func(o *ca.Custody) { o.Unseal = keys })))
		time.Sleep(2 * time.Minute)
		before := load(t, store).Version
		time.Sleep(time.Hour)
		assert.Equal(t, before, load(t, store).Version)
	})
}

// A replica whose clock is ahead by all that it may be does not take the name of a key that another is making.
func TestTwoClocksMakeKeys(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		a := open(t, store, heldBy(keys))
		var made string
		var next ca.KeyStatus
		keys.Fault = func(_ context.Context, op, name string) error {
			if op != "new" || made != "" {
				return nil
			}
			made = name
			r := load(t, store)
			ahead := bytes.ReplaceAll(r.Data()["svidkit-state.json"], []byte(time.Now().UTC().Format(time.RFC3339)),
				[]byte(time.Now().UTC().Add(-2*time.Minute).Format(time.RFC3339)))
			r.Data()["svidkit-state.json"] = ahead
			must.Get(store.Save(t.Context(), r))(t)
			next = must.Get(open(t, store, heldBy(keys)).Rotate(t.Context()))(t)
			return nil
		}
		time.Sleep(time.Second)
		_, err := a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		assert.NotEqual(t, made, next.Custody)
	})
}

// unable makes no keys for P-384.
type unable struct{ *custodian.Custodian }

func (u unable) NewKey(ctx context.Context, name, algorithm string) (crypto.Signer, error) {
	if algorithm == "ecdsa-p384" {
		return nil, fmt.Errorf("test: %s: %w", algorithm, errors.ErrUnsupported)
	}
	return u.Custodian.NewKey(ctx, name, algorithm)
}

// A root that cannot be made keeps no key for tokens from being made.
func TestOneKindCannotBeMade(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		a := open(t, store, func(c *ca.Config) { c.Rotation.Manual = true })
		b := open(t, store, withJWT, heldBy(unable{custodian.New()}), func(c *ca.Config) { c.Rotation.KeyAlgorithm = "ecdsa-p384" })
		require.NoError(t, b.Taint(t.Context(), a.Signer()))
		run(t, b)
		time.Sleep(time.Hour)
		must.Get(b.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
	})
}

// A record that a writer of the store has forged does not have the CA destroy the keys of other owners.
func TestForeignNames(t *testing.T) {
	t.Parallel()
	keys, store := custodian.New(), ca.NewMemoryStore()
	keys.Put("theirs", must.Get(pki.NewKey(""))(t))
	open(t, store, heldBy(keys))
	own := keys.Names()[0]
	for name, edit := range map[string]func(state map[string]any){
		"to be destroyed": func(state map[string]any) {
			state["loose_keys"] = []any{map[string]any{"name": "theirs", "since": "2000-01-01T00:00:00Z"}}
		},
		"of a key": func(state map[string]any) { state["roots"].([]any)[0].(map[string]any)["key_name"] = "theirs" },
	} {
		t.Run(name, func(t *testing.T) {
			r := load(t, store)
			var state map[string]any
			require.NoError(t, json.Unmarshal(r.Data()["svidkit-state.json"], &state))
			edit(state)
			data := maps.Clone(r.Data())
			data["svidkit-state.json"] = must.Get(json.Marshal(state))(t)
			changed := ca.NewMemoryStore()
			must.Get(changed.Save(t.Context(), ca.NewRecord("", data)))(t)
			_, err := tryOpen(t.Context(), changed, heldBy(keys))
			require.ErrorIs(t, err, ca.ErrUnfit)
			require.ErrorContains(t, err, "is not one of this CA")
		})
	}
	assert.Contains(t, keys.Names(), own)
}

// looking is a store for a process that only looks.
type looking struct{ ca.Store }

func (looking) View() {}

// A process that only looks does not ask the custodians of keys.
func TestLookingAsksNoCustodian(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		a := open(t, store, withJWT, heldBy(keys))
		must.Get(a.Revoke(t.Context(), a.Signer(), true))(t)
		keys.Fault = func(_ context.Context, op, _ string) error { t.Error(op); return nil }
		for _, edit := range []func(*ca.Config){heldBy(keys), func(*ca.Config) {}} {
			b := open(t, looking{store}, withJWT, edit)
			run(t, b)
			time.Sleep(2 * time.Hour)
			assert.True(t, a.Bundle().Equal(b.Bundle()))
			assert.Len(t, b.Status().Loose, 1)
		}
	})
}

// A private key that no record names is in the log soon after the start, and once an hour.
func TestOrphansAreLogged(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, log := custodian.New(), new(logBuffer)
		a := open(t, ca.NewMemoryStore(), heldBy(keys), func(c *ca.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
		orphan := keys.Names()[0] + "0"
		keys.Put(orphan, must.Get(pki.NewKey(""))(t))
		run(t, a)
		time.Sleep(time.Minute)
		assert.Contains(t, log.String(), orphan)
		time.Sleep(3 * time.Hour)
		assert.LessOrEqual(t, strings.Count(log.String(), orphan), 4)
	})
}

// An older record was restored, and others have written more since than this process has read: it does not destroy a
// key on the word of its memory.
func TestNotDestroyedAfterRestoreAndWrites(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		late := &faultStore{Store: store}
		a := open(t, late, heldBy(keys), func(c *ca.Config) { c.Rotation.Propagation = 25 * time.Minute })
		needed := a.Roots()[0].Custody
		run(t, a)
		old := load(t, store).Data()
		next := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(time.Until(next.Activates) + 5*time.Second)
		require.Len(t, stateOf(t, store).Loose, 1, "the key is to be destroyed")
		late.behave(always("load", before))
		must.Get(store.Save(t.Context(), ca.NewRecord(load(t, store).Version, old)))(t)
		b := open(t, store, heldBy(keys))
		require.Equal(t, needed, b.Roots()[0].Custody)
		must.Get(b.Rotate(t.Context()))(t)
		for range 5 {
			require.NoError(t, b.Taint(t.Context(), b.Roots()[1].ID))
		}
		time.Sleep(time.Until(time.Date(2000, 1, 1, 0, 27, 9, 500_000_000, time.UTC))) // a is about to destroy the key
		late.behave(nil)
		time.Sleep(10 * time.Second)
		assert.Contains(t, keys.Names(), needed)
		sign(t, b, newCSR(t), time.Minute)
	})
}

// A plugged-in CA dies at each call of the store of its keys for tokens, and of the custodian. The next process goes on.
func TestPluggedInKilledAtEachStep(t *testing.T) {
	t.Parallel()
	for _, after := range []bool{false, true} {
		for n, dead := 0, true; dead; n++ {
			synctest.Test(t, func(t *testing.T) {
				keys, store := custodian.New(), ca.NewMemoryStore()
				files := newFolder(newOffline(t).files(t, 1000*time.Hour))
				m := &mortal{Store: store, Custodian: keys, n: n, after: after}
				keys.Fault = func(context.Context, string, string) error { return m.step(false) }
				keys.Late = func(string, string) error { return m.step(true) }
				dying, cancel := context.WithTimeout(t.Context(), time.Minute)
				soon := func(c *ca.Config) { c.Rotation.Propagation = 2 * time.Minute }
				_, _ = tryLoadCA(dying, files, m, withJWT, heldBy(keys), soon)
				cancel()
				synctest.Wait()
				dead = m.dead
				keys.Fault, keys.Late = nil, nil
				a := must.Get(tryLoadCA(t.Context(), files, store, withJWT, heldBy(keys), soon))(t)
				run(t, a)
				time.Sleep(5 * time.Minute)
				must.Get(a.SignJWT(t.Context(), ca.JWTRequest{ID: web, Audience: []string{"x"}}))(t)
				assert.Subset(t, append(a.Status().Loose, a.Status().JWTKeys[0].Custody), keys.Names(), "call %d, after it %v", n, after)
			})
		}
	}
}

// Another replica renews the root while this one waits for the signature of its new certificate.
func TestRenewedByAnother(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		keys, store := custodian.New(), ca.NewMemoryStore()
		keep := func(c *ca.Config) { c.Rotation.KeepKey = true }
		a, b := open(t, store, heldBy(keys), keep), open(t, store, heldBy(keys), keep)
		var renewed ca.KeyStatus
		var once atomic.Bool
		keys.Fault = func(context.Context, string, string) error {
			if once.CompareAndSwap(false, true) {
				renewed = must.Get(b.Rotate(t.Context()))(t)
			}
			return nil
		}
		_, err := a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		run(t, a)
		time.Sleep(time.Minute)
		assert.Equal(t, []string{renewed.ID}, serials(a))
	})
}
