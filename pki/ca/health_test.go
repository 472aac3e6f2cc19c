package ca_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func TestHealthy(t *testing.T) {
	t.Parallel()
	both(t, func(t *testing.T, make func(...func(*ca.Config)) *ca.Authority) {
		a := make()
		run(t, a)
		for range 200 {
			h := a.Health()
			require.NoError(t, errors.Join(h.Signing, h.Store, h.Audit, h.Root))
			require.True(t, h.Until.After(time.Now()))
			time.Sleep(7 * time.Minute)
		}
	})
}

// Health says that a store does not answer at once, and that nothing is signed exactly when nothing is.
func TestHealthOfTheStore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &faultStore{Store: ca.NewMemoryStore()}
		a, csr := open(t, store), newCSR(t)
		assert.WithinDuration(t, time.Now().Add(85*time.Minute), a.Health().Until, 0, "Propagation and MaxTTL")
		time.Sleep(121 * time.Second)
		require.ErrorContains(t, a.Health().Store, "see that the authority is running")
		run(t, a)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.NoError(t, a.Health().Store)
		store.behave(always("", before))
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, a.Health().Store, errFault)
		require.NoError(t, a.Health().Signing)
		until := a.Health().Until
		for time.Now().Before(until.Add(time.Minute)) {
			_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
			require.Equal(t, err == nil, a.Health().Signing == nil, "%v", err)
			require.Equal(t, time.Until(until) < time.Second, err != nil)
			time.Sleep(59 * time.Second)
		}
		require.ErrorIs(t, a.Health().Signing, spiffe.ErrNotReady)
		require.NotContains(t, a.Health().Signing.Error(), "SPIFFE ID", "it is about no request")
		require.Equal(t, until, a.Health().Until)
		store.behave(nil)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.NoError(t, a.Health().Signing)
	})
}

// Health of a root that should have been replaced.
func TestHealthOfTheRoot(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const life = 1000 * time.Hour
		a := newAuthority(t, func(c *ca.Config) { c.Rotation.RootTTL, c.Rotation.Manual, c.MaxTTL = life, true, 24*time.Hour })
		end := a.Roots()[0].Certificate.NotAfter
		require.Equal(t, end, a.Health().Until)
		time.Sleep(life * 7 / 10)
		require.NoError(t, a.Health().Root, "it is not time yet")
		time.Sleep(life * 2 / 10)
		require.ErrorContains(t, a.Health().Root, "has no successor: rotate it")
		require.NoError(t, a.Health().Signing)
		next := must.Get(a.Rotate(t.Context()))(t)
		require.NoError(t, a.Health().Root)
		require.NoError(t, must.Err(a.Revoke(t.Context(), next.ID, false)))
		time.Sleep(time.Until(end))
		require.ErrorIs(t, a.Health().Signing, spiffe.ErrNotReady)

		a = newAuthority(t)
		require.NoError(t, a.Taint(t.Context(), a.Roots()[0].ID))
		require.ErrorContains(t, a.Health().Root, "is tainted, and signs until its successor does")
		time.Sleep(25 * time.Minute)
		require.NoError(t, a.Health().Root)
	})
}

func TestHealthOfFiles(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.7-7")
	synctest.Test(t, func(t *testing.T) {
		files := newFolder(newOffline(t).files(t, time.Hour))
		a := loadCA(t, files, func(c *ca.Config) { c.DefaultTTL = 5 * time.Minute })
		run(t, a)
		time.Sleep(time.Minute)
		h := a.Health()
		require.NoError(t, errors.Join(h.Signing, h.Store, h.Audit, h.Root))
		files.put(map[string][]byte{"ca-key.pem": []byte("x")})
		time.Sleep(time.Minute)
		require.Error(t, a.Health().Store)
		time.Sleep(50 * time.Minute)
		require.ErrorContains(t, a.Health().Root, "replace its files")
		require.NoError(t, a.Health().Signing)
		time.Sleep(10 * time.Minute)
		require.ErrorIs(t, a.Health().Signing, spiffe.ErrNotReady)
	})
}

// A full disk: nothing is signed, and health says so, until that has passed.
func TestHealthOfTheAudit(t *testing.T) {
	t.Parallel()
	for _, asked := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			var broken atomic.Pointer[error]
			full := errors.New("disk full")
			records := &auditor{fail: func(context.Context) error {
				if err := broken.Load(); err != nil {
					return *err
				}
				return nil
			}}
			var use ca.Auditor = records
			if asked {
				use = askedAuditor{records}
			}
			a, csr := newAuthority(t, func(c *ca.Config) { c.Auditor = use }), newCSR(t)
			sign := func() error {
				_, err := a.Sign(t.Context(), ca.Request{CSR: csr, ID: web})
				return err
			}
			require.NoError(t, sign())
			broken.Store(&full)
			require.ErrorIs(t, sign(), full)
			for _, err := range []error{a.Health().Signing, a.Health().Audit} {
				require.ErrorIs(t, err, full)
			}
			time.Sleep(11 * time.Second)
			if asked {
				require.ErrorIs(t, a.Health().Signing, full, "it says so itself")
			} else {
				require.NoError(t, a.Health().Signing, "so that it is tried again")
				require.ErrorIs(t, sign(), full)
				require.ErrorIs(t, a.Health().Signing, full)
			}
			broken.Store(nil)
			require.NoError(t, sign())
			require.NoError(t, a.Health().Signing)
		})
	}
}

// askedAuditor says itself whether it works.
type askedAuditor struct{ *auditor }

func (a askedAuditor) Err() error { return a.fail(context.Background()) }
