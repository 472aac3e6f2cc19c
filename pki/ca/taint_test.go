package ca_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"strings"
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
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// both runs a test with an authority of New and with one of Open.
func both(t *testing.T, f func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority)) {
	t.Helper()
	bubble.Run(t, "New", func(t *testing.T) {
		f(t, func(edit ...func(*ca.Config)) *ca.Authority { return newAuthority(t, edit...) })
	})
	bubble.Run(t, "Open", func(t *testing.T) {
		f(t, func(edit ...func(*ca.Config)) *ca.Authority {
			a := open(t, ca.NewMemoryStore(), edit...)
			a.ReadSeldom() // a reading each half minute makes long times long
			return a
		})
	})
}

// see is look without the number of the bundle.
func (n namer) see(t *testing.T, a *ca.Authority) string {
	t.Helper()
	_, what, _ := strings.Cut(n.look(t, a), ": ")
	return what
}

func TestTaintActive(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL, c.DefaultTTL = 90*24*time.Hour, 4*time.Hour })
		n, csr := namer{}, newCSR(t)
		old := sign(t, a, csr, 90*24*time.Hour)
		require.Equal(t, "A active", n.see(t, a))
		bad := a.Roots()[0].ID
		require.NoError(t, a.Taint(t.Context(), bad))
		require.Equal(t, "A active, B distributing", n.see(t, a))
		assert.True(t, a.Roots()[0].Tainted)
		assert.Contains(t, a.Roots()[0].String(), "active, tainted since")
		assert.False(t, a.Roots()[1].Tainted)
		require.NoError(t, a.Taint(t.Context(), bad), "twice changes nothing")
		require.Equal(t, "A active, B distributing", n.see(t, a))
		require.ErrorIs(t, must.Err(a.Revoke(t.Context(), bad, false)), ca.ErrActive)
		_, err := a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)

		time.Sleep(25 * time.Minute)
		require.Equal(t, "A retiring, B active", n.see(t, a))
		assert.Equal(t, time.Now().Add(2*time.Hour+2*time.Minute).Round(0), a.Roots()[0].Retires, "half of the default lifetime, and Backdate")
		assert.NoError(t, verify(a.Bundle(), old, time.Now()))
		time.Sleep(2*time.Hour + 2*time.Minute - 1)
		require.Equal(t, "A retiring, B active", n.see(t, a))
		time.Sleep(time.Nanosecond)
		require.Equal(t, "B active", n.see(t, a))
		assert.Error(t, verify(a.Bundle(), old, time.Now()))
	})
}

func TestTaintOthers(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL = 90 * 24 * time.Hour })
		a.SetTaintGrace(10 * time.Minute)
		n, csr := namer{}, newCSR(t)
		sign(t, a, csr, 90*24*time.Hour)
		n.see(t, a)
		next := must.Get(a.Rotate(t.Context()))(t)
		n.see(t, a)
		time.Sleep(20 * time.Minute)

		// One that has signed nothing goes at once, and another one comes in its place.
		require.NoError(t, a.Taint(t.Context(), next.ID))
		require.Equal(t, "A active, C distributing", n.see(t, a))
		assert.Equal(t, time.Now().Add(25*time.Minute).Round(0), a.Roots()[1].Activates, "no verifier knows it yet")
		time.Sleep(25 * time.Minute)
		require.Equal(t, "A retiring, C active", n.see(t, a))

		// One that retires goes sooner.
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		time.Sleep(10*time.Minute - 1)
		require.Equal(t, "A retiring, C active", n.see(t, a))
		time.Sleep(time.Nanosecond)
		require.Equal(t, "C active", n.see(t, a))

		// With a successor on its way, no other one is made.
		must.Get(a.Rotate(t.Context()))(t)
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		require.Equal(t, "C active, D distributing", n.see(t, a))

		for _, id := range []string{"", "0", "nothing", next.ID} {
			require.ErrorIs(t, a.Taint(t.Context(), id), ca.ErrUnknownKey)
			require.ErrorIs(t, must.Err(a.Revoke(t.Context(), id, false)), ca.ErrUnknownKey)
		}
	})
}

func TestRevoke(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.MaxTTL = 90 * 24 * time.Hour })
		n, csr := namer{}, newCSR(t)
		leaf := sign(t, a, csr, 90*24*time.Hour)
		n.see(t, a)
		next := must.Get(a.Rotate(t.Context()))(t)
		n.see(t, a)
		require.NoError(t, must.Err(a.Revoke(t.Context(), next.ID, false)), "a rotation is called off")
		require.Equal(t, "A active", n.see(t, a))
		time.Sleep(time.Hour)
		require.Equal(t, "A active", n.see(t, a))
		must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(25 * time.Minute)
		require.Equal(t, "A retiring, C active", n.see(t, a))
		changed := a.Changed()
		require.NoError(t, must.Err(a.Revoke(t.Context(), a.Roots()[0].ID, false)))
		require.Equal(t, "C active", n.see(t, a))
		<-changed
		assert.Error(t, verify(a.Bundle(), leaf, time.Now()))
	})
}

// A full bundle has no room for a successor; there is one as soon as there is room.
func TestTaintInAFullBundle(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.Propagation, c.MaxTTL = time.Second, time.Hour })
		for range 63 {
			must.Get(a.Rotate(t.Context()))(t)
			time.Sleep(time.Second)
		}
		b := open(t, fullStore(t, time.Hour))
		for _, x := range []*ca.Authority{a, b} {
			roots := x.Roots()
			require.Len(t, roots, 64)
			require.NoError(t, x.Taint(t.Context(), roots[63].ID))
			require.Len(t, x.Roots(), 64)
			require.True(t, x.Roots()[63].Tainted)
			run(t, x)
		}
		time.Sleep(70 * time.Minute)
		synctest.Wait()
		assert.False(t, a.Roots()[len(a.Roots())-1].Tainted)
		assert.False(t, b.Roots()[len(b.Roots())-1].Tainted)
	})
}

// fullStore has a CA with 63 roots of others, which retire after stay.
func fullStore(t *testing.T, stay time.Duration) ca.Store {
	t.Helper()
	cert, key := istioCA(t)
	others := make([]*x509.Certificate, 63)
	for i := range others {
		others[i] = newOffline(t, func(o *pki.CertificateOptions) { o.NotAfter = time.Now().Add(stay) }).cert()
	}
	return put(t, istioSecret(t, cert, key, others...))
}

// A replica that signs no tokens may say that one of their keys is in wrong hands.
func TestTaintJWTKeyOfOthers(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := ca.NewMemoryStore()
		signs := open(t, store, withJWT)
		run(t, signs)
		for _, distributing := range []bool{false, true} {
			keys := signs.Status().JWTKeys
			bad := keys[0]
			if distributing {
				next := must.Get(signs.RotateJWT(t.Context()))(t)
				bad = next
			}
			other := open(t, store)
			require.NoError(t, other.Taint(t.Context(), bad.ID))
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			keys = signs.Status().JWTKeys
			if distributing {
				require.Len(t, keys, 1, "it is gone, and a rotation comes in time")
				continue
			}
			require.Len(t, keys, 2)
			require.True(t, keys[0].Tainted)
			require.Equal(t, "distributing", keys[1].Phase)
			time.Sleep(13 * time.Hour)
			synctest.Wait()
			require.Len(t, signs.Status().JWTKeys, 1)
			require.NotEqual(t, bad.ID, signs.Status().JWTKeys[0].ID)
		}
	})
}

// A key that is renewed needs no room, and everything else does: no authority could open a record with more
// keys than the limit.
func TestIstioRotationInAFullBundle(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := fullStore(t, 100*time.Hour)
		edit := func(c *ca.Config) {
			c.Rotation = ca.Rotation{KeepKey: true, Manual: true, Propagation: time.Second}
			c.MaxTTL, c.JWT = 90*24*time.Hour, &ca.JWTConfig{MaxTTL: 90 * 24 * time.Hour}
		}
		a, tokens := open(t, store, edit), newAuthority(t, edit)
		for range 63 {
			must.Get(tokens.RotateJWT(t.Context()))(t)
			time.Sleep(2 * time.Second)
		}
		_, err := tokens.RotateJWT(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		require.ErrorContains(t, err, "64 JWT keys are in the bundle")
		renewed := must.Get(a.Rotate(t.Context()))(t)
		require.Equal(t, renewed, a.Roots()[63])
		late := open(t, store, edit)
		require.NoError(t, a.Taint(t.Context(), renewed.ID))
		_, err = late.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		require.ErrorContains(t, err, "was tainted just now", "a key in wrong hands is not renewed by a replica that has not read of the taint")
		_, err = a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		require.ErrorContains(t, err, "64 roots are in the bundle")
		require.Len(t, a.Roots(), 64)
		assert.Equal(t, a.Roots(), open(t, store, edit).Roots())
		time.Sleep(101 * time.Hour)
		must.Get(a.Rotate(t.Context()))(t)
	})
}

// What was decided is in the store before any caller sees it, and what could not be stored was not
// decided.
func TestTaintIsStoredFirst(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		a := open(t, store, withJWT)
		id, jwt := a.Roots()[0].ID, a.Status().JWTKeys[0].ID
		store.behave(always("save", before))
		for name, err := range map[string]error{"root": a.Taint(t.Context(), id), "JWT key": a.Taint(t.Context(), jwt)} {
			require.ErrorIs(t, err, errFault, name)
			assert.Regexp(t, `^ca: taint a key of example.org: `, err)
		}
		assert.False(t, a.Roots()[0].Tainted)
		assert.Len(t, a.Roots(), 1)
		store.behave(nil)
		require.NoError(t, a.Taint(t.Context(), id))
		require.NoError(t, a.Taint(t.Context(), jwt))
		b := open(t, store, withJWT)
		assert.Equal(t, a.Roots(), b.Roots())
		assert.True(t, b.Roots()[0].Tainted)
		assert.True(t, b.Status().JWTKeys[0].Tainted)
		store.behave(always("save", before))
		require.ErrorIs(t, must.Err(a.Revoke(t.Context(), a.Roots()[1].ID, false)), errFault)
		assert.Len(t, a.Roots(), 2)
		store.behave(nil)
		require.NoError(t, must.Err(a.Revoke(t.Context(), a.Roots()[1].ID, false)))
		assert.Len(t, open(t, store, withJWT).Roots(), 1)
	})
}

// A renewal with the same key, as Istio's rotator does it.
func TestIstioRotation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.9-2", "IST-2.9-3", "IST-3.6-6", "IST-3.6-9")
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.Rotation.KeepKey = true })
		csr := newCSR(t)
		before, bundle := sign(t, a, csr, 50*time.Minute), a.Bundle()
		old := a.Roots()[0]
		time.Sleep(30 * time.Minute)
		r := must.Get(a.Rotate(t.Context()))(t)
		roots := a.Roots()
		require.Len(t, roots, 1, "the old certificate is replaced at once")
		assert.Equal(t, r, roots[0])
		assert.Equal(t, "active", r.Phase)
		assert.NotEqual(t, old.ID, r.ID)
		assert.True(t, pki.PublicKeysEqual(old.Certificate.PublicKey, r.Certificate.PublicKey))
		assert.Equal(t, old.Certificate.RawSubject, r.Certificate.RawSubject)
		assert.Equal(t, old.Certificate.SubjectKeyId, r.Certificate.SubjectKeyId)
		assert.Equal(t, time.Now().Add(3650*24*time.Hour).UTC().Truncate(time.Second), r.Certificate.NotAfter)
		assert.EqualValues(t, 2, sequence(t, a.Bundle()))
		after := sign(t, a, csr, 0)
		assert.NoError(t, verify(a.Bundle(), before, time.Now()), "an old leaf with the new root")
		assert.NoError(t, verify(bundle, after, time.Now()), "a new leaf with the old root")
	})
}

func TestIstioRotationRun(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.12-3", "IST-2.12-4", "IST-3.3-1", "IST-3.3-3", "IST-3.6-1", "IST-3.6-2")
	const life, check = 200 * time.Hour, 7 * time.Hour
	for _, jitter := range []bool{false, true} {
		t.Run(fmt.Sprint(jitter), func(t *testing.T) {
			t.Parallel()
			both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
				start := time.Now()
				a := make(func(c *ca.Config) {
					c.Rotation = ca.Rotation{RootTTL: life, KeepKey: true, CheckInterval: check, NoJitter: !jitter}
				})
				run(t, a)
				key := a.Roots()[0].Certificate.SubjectKeyId
				var renewals []time.Duration
				for changed := a.Changed(); len(renewals) < 3; changed = a.Changed() {
					<-changed
					require.Len(t, a.Roots(), 1)
					require.Equal(t, key, a.Roots()[0].Certificate.SubjectKeyId)
					renewals = append(renewals, time.Since(start))
				}
				due := time.Duration(0)
				for _, at := range renewals {
					// 20 % of the life, to the dates of which Backdate belongs, is left.
					due += life - (life+2*time.Minute)/5
					assert.GreaterOrEqual(t, at, due-time.Second)
					assert.LessOrEqual(t, at, due+check, "at the first look after that")
					if !jitter {
						assert.Zero(t, at%check, "each look is an interval after the one before")
					}
					due = at
				}
			})
		})
	}
}

// All that can fail leaves the old root in use, and it is tried again.
func TestIstioRotationRollsBack(t *testing.T) {
	conformance.Covers(t, "IST-3.6-8")
	bubble.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		a := open(t, store, func(c *ca.Config) {
			c.Rotation = ca.Rotation{RootTTL: 100 * time.Hour, KeepKey: true, NoJitter: true}
		})
		a.ReadSeldom()
		old := a.Roots()
		run(t, a)
		time.Sleep(79 * time.Hour)
		store.behave(always("save", before))
		time.Sleep(90 * time.Minute)
		synctest.Wait()
		assert.Equal(t, old, a.Roots())
		sign(t, a, newCSR(t), 0)
		store.behave(nil)
		time.Sleep(2 * time.Minute)
		assert.NotEqual(t, old, a.Roots())
		assert.Len(t, a.Roots(), 1)
	})
}

// A key that may be in wrong hands is not kept.
func TestIstioRotationTainted(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.Rotation.KeepKey = true })
		n := namer{}
		n.see(t, a)
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		require.Equal(t, "A active, B distributing", n.see(t, a))
		_, err := a.Rotate(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		time.Sleep(25 * time.Minute)
		assert.Equal(t, "B", n.name(a.Roots()[len(a.Roots())-1].Certificate))
		must.Get(a.Rotate(t.Context()))(t)
		assert.Equal(t, "B", n.name(a.Roots()[len(a.Roots())-1].Certificate), "renewed")
	})
}

// JWT keys take the same steps.
func TestJWTRotation(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(withJWT)
		keys := func() string {
			var out strings.Builder
			for _, k := range a.Status().JWTKeys {
				out.WriteString(" " + string(k.Phase))
			}
			n := 0
			for id := range a.Bundle().JWTAuthorities() {
				n++
				_, ok := a.Bundle().JWTAuthority(id)
				require.True(t, ok)
			}
			require.Equal(t, n, len(a.Status().JWTKeys), "the bundle has the keys")
			return strings.TrimSpace(out.String())
		}
		require.Equal(t, "active", keys())
		old := signJWT(t, a, time.Hour)
		next := must.Get(a.RotateJWT(t.Context()))(t)
		require.Equal(t, "active distributing", keys())
		assert.Regexp(t, `^JWT key [0-9a-f]{32}: distributing, signs from 2000-01-01T00:25:00Z$`, next.String())
		_, err := a.RotateJWT(t.Context())
		require.ErrorIs(t, err, ca.ErrRotating)
		assert.ErrorContains(t, err, "ca: rotate the JWT key of example.org: a rotation is under way: JWT key "+next.ID)
		require.NoError(t, must.Err(a.Revoke(t.Context(), next.ID, false)))
		require.Equal(t, "active", keys())
		must.Get(a.RotateJWT(t.Context()))(t)
		time.Sleep(25*time.Minute - 1)
		require.Equal(t, "active distributing", keys())
		time.Sleep(time.Nanosecond)
		require.Equal(t, "retiring active", keys())
		require.NoError(t, validate(a.Bundle(), old))
		young := signJWT(t, a, time.Hour)
		time.Sleep(35*time.Minute - time.Second)
		require.NoError(t, validate(a.Bundle(), old), "until the end of its life")
		time.Sleep(time.Hour)
		require.Equal(t, "active", keys())
		require.Error(t, validate(a.Bundle(), young))

		bad := a.Status().JWTKeys[0].ID
		require.NoError(t, a.Taint(t.Context(), bad))
		require.Equal(t, "active distributing", keys())
		require.ErrorIs(t, must.Err(a.Revoke(t.Context(), bad, false)), ca.ErrActive)
		time.Sleep(25 * time.Minute)
		last := signJWT(t, a, time.Hour)
		if len(a.Status().JWTKeys) == 2 {
			require.NoError(t, must.Err(a.Revoke(t.Context(), bad, false)))
		}
		require.NoError(t, validate(a.Bundle(), last))
	})
}

func TestRunReplacesJWTKeys(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.JWT = &ca.JWTConfig{KeyTTL: 10 * time.Hour} })
		run(t, a)
		seen := map[string]bool{}
		for end := time.Now().Add(105 * time.Hour); time.Now().Before(end); time.Sleep(116 * time.Minute / time.Duration(rounds.Of(1))) {
			token := signJWT(t, a, 0)
			require.NoError(t, validate(a.Bundle(), token))
			for _, k := range a.Status().JWTKeys {
				if k.Phase == "active" {
					seen[k.ID] = true
				}
			}
			require.LessOrEqual(t, len(a.Status().JWTKeys), 2)
		}
		assert.Len(t, seen, 11, "each has ten hours")
	})
}

// An issuer's keys are published for a day before the first token, and until the last one has ended; the roots do not wait for that.
func TestIssuerPublishesKeys(t *testing.T) {
	t.Parallel()
	const issuer = "https://oidc.example.org"
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) { c.JWT = &ca.JWTConfig{Issuer: issuer, KeyTTL: 5 * 24 * time.Hour} })
		run(t, a)
		published, last := map[string]time.Time{}, map[string]time.Time{}
		for begin := time.Now(); time.Since(begin) < 26*24*time.Hour; {
			changed, b := a.Changed(), a.Bundle()
			files := must.Get(jwtsvid.OIDCFiles(b, issuer))(t)
			for id := range b.JWTAuthorities() {
				require.Contains(t, string(files["keys"]), `"kid":"`+id+`"`)
				if _, known := published[id]; !known {
					published[id] = time.Now()
				}
			}
			token := signJWT(t, a, time.Hour)
			require.NoError(t, validate(b, token))
			unproven := must.Get(jwtsvid.ParseUnverified(token))(t)
			_, again := last[unproven.KeyID]
			if first := published[unproven.KeyID]; !again && first != begin {
				require.GreaterOrEqual(t, time.Since(first), 24*time.Hour)
			}
			last[unproven.KeyID] = unproven.Expires
			for id, ends := range last {
				if _, in := b.JWTAuthority(id); !in {
					require.False(t, time.Now().Before(ends), "the key went before its last token")
				}
			}
			payload := must.Get(base64.RawURLEncoding.DecodeString(strings.Split(token, ".")[1]))(t)
			require.Contains(t, string(payload), `"iss":"`+issuer+`"`)
			keys, wait := a.Status().JWTKeys, 12*time.Hour/time.Duration(rounds.Of(1))
			if left := time.Until(keys[len(keys)-1].Activates) - 1; left > 0 {
				wait = min(wait, left) // for the last token of the old key
			}
			select {
			case <-changed:
			case <-time.After(wait):
			}
		}
		assert.Len(t, last, 6, "each has five days")
		next := must.Get(a.Rotate(t.Context()))(t)
		assert.Equal(t, 25*time.Minute, next.Activates.Sub(next.Prepared), "of a root")
	})
}

// Run does not start rotations that are the operator's business.
func TestManualRotation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.3-1")
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make(func(c *ca.Config) {
			c.Rotation.Manual, c.Rotation.RootTTL, c.JWT = true, 100*time.Hour, &ca.JWTConfig{KeyTTL: 10 * time.Hour}
		})
		run(t, a)
		time.Sleep(200 * time.Hour)
		synctest.Wait()
		assert.EqualValues(t, 1, sequence(t, a.Bundle()))
		next := must.Get(a.Rotate(t.Context()))(t)
		time.Sleep(25 * time.Minute)
		synctest.Wait()
		assert.Equal(t, next.ID, a.Roots()[len(a.Roots())-1].ID)
	})
}

func TestTaintLog(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var buf bytes.Buffer
		a := newAuthority(t, withJWT, func(c *ca.Config) { c.Logger = slog.New(slog.NewTextHandler(&buf, nil)) })
		root, jwt := a.Roots()[0].ID, a.Status().JWTKeys[0].ID
		require.NoError(t, a.Taint(t.Context(), root))
		require.NoError(t, a.Taint(t.Context(), jwt))
		for _, s := range []string{
			`level=WARN msg="root tainted" trust_domain=example.org serial=` + root, `level=INFO msg="root prepared"`,
			`level=WARN msg="JWT key tainted" trust_domain=example.org key_id=` + jwt, `level=INFO msg="JWT key prepared"`,
		} {
			assert.Contains(t, buf.String(), s)
		}
	})
}

func TestDoneContextOfDecisions(t *testing.T) {
	t.Parallel()
	cause := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	for name, a := range map[string]*ca.Authority{"New": newAuthority(t, withJWT), "Open": open(t, ca.NewMemoryStore(), withJWT)} {
		_, err := a.RotateJWT(ctx)
		assert.ErrorIs(t, err, cause, name)
		_, err = a.Rotate(ctx)
		assert.ErrorIs(t, err, cause, name)
		_, err = a.SignJWT(ctx, ca.JWTRequest{ID: web, Audience: []string{"db"}})
		assert.ErrorIs(t, err, cause, name)
		_, err = a.Sign(ctx, ca.Request{CSR: newCSR(t), ID: web})
		assert.ErrorIs(t, err, cause, name)
		assert.Len(t, a.Roots(), 1)
	}
}

// Each change of the contents has a number of its own, with a store and without, and the number is a part of the record: a CA that
// is opened again gives the same bundle the same number. Otherwise consumers take the new bundle for the old one.
func TestSequenceOfEachChange(t *testing.T) {
	t.Parallel()
	for name, store := range map[string]ca.Store{"New": nil, "Open": ca.NewMemoryStore()} {
		bubble.Run(t, name, func(t *testing.T) {
			edit := func(c *ca.Config) { c.JWT = &ca.JWTConfig{} }
			var a *ca.Authority
			if store == nil {
				a = newAuthority(t, edit)
			} else {
				a = open(t, store, edit)
			}
			before := a.Bundle()
			do := func(what string, err error) {
				t.Helper()
				require.NoError(t, err, what)
				now := a.Bundle()
				require.False(t, now.Equal(before), what)
				require.Greater(t, sequence(t, now), sequence(t, before), what)
				require.Equal(t, sequence(t, now), a.Status().Sequence, what)
				before = now
				if store == nil {
					return
				}
				again := open(t, store, edit, notCreating).Bundle()
				require.True(t, now.Equal(again), "%s: opened again", what)
				require.Equal(t, sequence(t, now), sequence(t, again), "%s: opened again", what)
			}
			next, err := a.Rotate(t.Context())
			do("a root is prepared", err)
			do("a root that waits is revoked", must.Err(a.Revoke(t.Context(), next.ID, false)))
			next, err = a.Rotate(t.Context())
			do("a root is prepared again", err)
			do("a root that waits is tainted, and another one prepared", a.Taint(t.Context(), next.ID))
			token, err := a.RotateJWT(t.Context())
			do("a key for tokens is prepared", err)
			do("a key for tokens is revoked", must.Err(a.Revoke(t.Context(), token.ID, false)))
			_, err = a.Revoke(t.Context(), a.Roots()[0].ID, true)
			do("the root that signs is revoked", err)
		})
	}
}

// A serial number is taken as other programs print it: in upper case, with colons, with leading zeros.
func TestSerialForms(t *testing.T) {
	t.Parallel()
	for name, form := range map[string]func(string) string{
		"upper case": strings.ToUpper,
		"zeros":      func(id string) string { return "00" + id },
		"colons": func(id string) string {
			n, _ := new(big.Int).SetString(id, 16)
			return strings.ReplaceAll(fmt.Sprintf("% X", n.Bytes()), " ", ":")
		},
	} {
		a := newAuthority(t)
		id := a.Status().Roots[0].ID
		require.NoError(t, a.Taint(t.Context(), form(id)), name)
		roots := a.Status().Roots
		require.Len(t, roots, 2, name)
		require.True(t, roots[0].Tainted, name)
		require.Error(t, must.Err(a.Revoke(t.Context(), form(id), false)), "%s: it signs", name)
		require.NoError(t, must.Err(a.Revoke(t.Context(), form(roots[1].ID), false)), name)
		require.Len(t, a.Status().Roots, 1, name)
		revoked, err := a.Revoke(t.Context(), form(id), true)
		require.NoError(t, err, name)
		require.Contains(t, revoked, id, name)
		require.NotEqual(t, id, a.Status().Roots[0].ID, name)
		require.ErrorIs(t, a.Taint(t.Context(), form(id)), ca.ErrUnknownKey, name)
		require.ErrorIs(t, a.Taint(t.Context(), ""), ca.ErrUnknownKey)
	}
}
