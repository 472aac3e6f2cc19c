package ca_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
)

// The emergency stop: the stolen key is out of the bundle, and another one signs, at once.
func TestRevokeNow(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		for _, keepKey := range []bool{false, true} {
			for _, distributing := range []bool{false, true} {
				var log bytes.Buffer
				a := make(func(c *ca.Config) {
					c.MaxTTL, c.Rotation.KeepKey, c.Logger = 90*24*time.Hour, keepKey, slog.New(slog.NewTextHandler(&log, nil))
				})
				n, csr := namer{}, newCSR(t)
				n.see(t, a)
				leaf, before := sign(t, a, csr, 90*24*time.Hour), a.Bundle()
				stolen := a.Roots()[0]
				if distributing {
					require.NoError(t, a.Taint(t.Context(), stolen.ID), "with Istio's rotation, too, the successor has another key")
					n.see(t, a)
					stolen = a.Roots()[0]
					time.Sleep(10 * time.Minute)
				}
				changed := a.Changed()
				r := must.Get(a.Revoke(t.Context(), stolen.ID, true))(t)
				<-changed
				require.Equal(t, "B active", n.see(t, a))
				now := a.Roots()[0]
				assert.Equal(t, time.Now().Round(0), now.Activates)
				assert.False(t, now.Tainted)
				assert.False(t, pki.PublicKeysEqual(stolen.Certificate.PublicKey, now.Certificate.PublicKey))
				for _, text := range []string{r, log.String()} {
					assert.Contains(t, text, fmt.Sprintf("root %s is revoked: verifiers that have read the bundle since refuse everything that it signed; root %s signs in its place", stolen.ID, now.ID))
					assert.Contains(t, text, "refuse what it signs, until "+now.Prepared.Add(25*time.Minute).UTC().Format(time.RFC3339))
				}
				fresh := sign(t, a, csr, 0)
				assert.Error(t, verify(a.Bundle(), leaf, time.Now()), "what it signed is refused")
				assert.NoError(t, verify(a.Bundle(), fresh, time.Now()))
				if !distributing {
					assert.Error(t, verify(before, fresh, time.Now()), "the cost: a verifier that has not read the bundle")
				}
				_, err := a.Revoke(t.Context(), stolen.ID, true)
				require.ErrorIs(t, err, ca.ErrUnknownKey)

				// Life goes on.
				if !keepKey {
					must.Get(a.Rotate(t.Context()))(t)
					n.see(t, a)
					time.Sleep(25 * time.Minute)
					require.Equal(t, "B retiring, C active", n.see(t, a))
					assert.NoError(t, verify(a.Bundle(), fresh, time.Now()))
				}
			}
		}
	})
}

// A key that does not sign costs nothing more than with Revoke.
func TestRevokeNowOfOthers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL = 90 * 24 * time.Hour })
		sign(t, a, newCSR(t), 90*24*time.Hour)
		n := namer{}
		n.see(t, a)
		next := must.Get(a.Rotate(t.Context()))(t)
		r := must.Get(a.Revoke(t.Context(), next.ID, true))(t)
		assert.NotContains(t, r, "in its place")
		require.Equal(t, "A active", n.see(t, a))
		must.Get(a.Rotate(t.Context()))(t)
		n.see(t, a)
		time.Sleep(25 * time.Minute)
		r = must.Get(a.Revoke(t.Context(), a.Roots()[0].ID, true))(t)
		assert.NotContains(t, r, "in its place")
		require.Equal(t, "B active", n.see(t, a))
		for _, id := range []string{"", "0", next.ID} {
			_, err := a.Revoke(t.Context(), id, true)
			require.ErrorIs(t, err, ca.ErrUnknownKey)
		}
	})
}

func TestRevokeNowJWT(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{"ES256", "ES384"} {
		bubble.Run(t, alg, func(t *testing.T) {
			store := ca.NewMemoryStore()
			edit := func(c *ca.Config) { c.JWT = &ca.JWTConfig{Algorithm: alg} }
			a := open(t, store, edit)
			stolen := a.Status().JWTKeys[0]
			token := signJWT(t, a, time.Hour)
			// The operator's program signs no tokens.
			r := must.Get(open(t, store).Revoke(t.Context(), stolen.ID, true))(t)
			assert.Contains(t, r, "JWT key "+stolen.ID+" is revoked")
			a = open(t, store, edit)
			require.Len(t, a.Status().JWTKeys, 1)
			require.Equal(t, "active", a.Status().JWTKeys[0].Phase)
			require.Equal(t, alg, a.Status().JWTKeys[0].Algorithm)
			require.Error(t, validate(a.Bundle(), token))
			require.NoError(t, validate(a.Bundle(), signJWT(t, a, time.Hour)), "it signs for as long as the old one did")
		})
	}
}

// The roots of files are the operator's; the keys for tokens are not.
func TestRevokeNowPluggedIn(t *testing.T) {
	t.Parallel()
	a := loadCA(t, newFolder(newOffline(t).files(t, 1000*time.Hour)), withJWT)
	_, err := a.Revoke(t.Context(), a.Roots()[0].ID, true)
	require.ErrorIs(t, err, ca.ErrPluggedIn)
	require.ErrorContains(t, err, "replace the files with those of another CA")
	must.Get(a.Revoke(t.Context(), a.Status().JWTKeys[0].ID, true))(t)
}

// A crash leaves the old CA or the new one: all of it is one write, which is there before any reader sees it.
func TestRevokeNowIsOneWrite(t *testing.T) {
	t.Parallel()
	for _, distributing := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			memory := ca.NewMemoryStore()
			store := &faultStore{Store: memory}
			a := open(t, store)
			if distributing {
				must.Get(a.Rotate(t.Context()))(t)
			}
			stolen := a.Roots()[0].ID
			version := load(t, memory).Version

			store.behave(always("save", before)) // it dies before the write
			_, err := a.Revoke(t.Context(), stolen, true)
			require.ErrorIs(t, err, errFault)
			assert.Regexp(t, `^ca: revoke a key of example.org: `, err)
			assert.Equal(t, stolen, a.Roots()[0].ID)
			assert.Equal(t, stolen, open(t, memory).Roots()[0].ID)
			require.Equal(t, version, load(t, memory).Version)

			store.behave(func(op string) (fault, time.Duration) { // it dies after the write, and does not know
				return map[string]fault{"save": after, "load": before}[op], 0
			})
			_, err = a.Revoke(t.Context(), stolen, true)
			require.ErrorIs(t, err, errFault)
			assert.Equal(t, stolen, a.Roots()[0].ID, "it does not know")
			b := open(t, memory)
			require.Len(t, b.Roots(), 1)
			assert.Equal(t, "active", b.Roots()[0].Phase)
			assert.NotEqual(t, stolen, b.Roots()[0].ID)
			assert.NoError(t, verify(b.Bundle(), sign(t, b, newCSR(t), 0), time.Now()))

			store.behave(nil) // the operator tries again
			must.Get(a.Revoke(t.Context(), stolen, true))(t)
			assert.Equal(t, b.Roots(), a.Roots(), "and there is one successor")
		})
	}
}

// Replicas that do it at the same time, and those that rotate or taint meanwhile, end as one CA without the stolen key.
func TestRevokeNowRaces(t *testing.T) {
	t.Parallel()
	for seed := range rounds.Of(5) {
		synctest.Test(t, func(t *testing.T) {
			memory := ca.NewMemoryStore()
			var all []*ca.Authority
			for i := range 4 {
				all = append(all, open(t, &faultStore{Store: memory, decide: func(string) (fault, time.Duration) {
					return fine, time.Duration((i*7+seed*3)%11) * time.Millisecond
				}}))
			}
			stolen := all[0].Roots()[0].ID
			var wg sync.WaitGroup
			for i, a := range all {
				wg.Go(func() {
					time.Sleep(time.Duration((i*5+seed)%13) * time.Millisecond)
					switch (i + seed) % 4 {
					case 0, 1:
						_, err := a.Revoke(t.Context(), stolen, true)
						assert.NoError(t, err)
					case 2:
						_, _ = a.Rotate(t.Context())
					case 3:
						_ = a.Taint(t.Context(), stolen)
					}
				})
			}
			wg.Wait()
			for _, a := range all {
				run(t, a)
			}
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			active := 0
			for _, k := range all[0].Roots() {
				require.NotEqual(t, stolen, k.ID)
				if k.Phase == "active" {
					active++
				}
			}
			require.Equal(t, 1, active)
			for _, a := range all {
				require.Equal(t, all[0].Roots(), a.Roots(), "seed %d", seed)
				require.NoError(t, verify(all[0].Bundle(), sign(t, a, newCSR(t), 0), time.Now()))
			}
		})
	}
}
