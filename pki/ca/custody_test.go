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
	"maps"
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

// A start waits for a custodian that hangs once, however many keys it has, so that a command that taints or revokes has
// the time for it.
func TestStartWhileCustodianHangs(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store, keys := ca.NewMemoryStore(), custodian.New()
		a := open(t, store, withJWT, heldBy(keys))
		must.Get(a.Rotate(t.Context()))(t)
		must.Get(a.RotateJWT(t.Context()))(t)
		keys.Fault = func(ctx context.Context, _, _ string) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		start := time.Now()
		open(t, store, withJWT, heldBy(keys))
		assert.Less(t, time.Since(start), 20*time.Second)
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
