package secretcache_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// outage is a CA that is away from one moment on for 45 % of a lifetime.
type outage struct {
	life time.Duration
	down func(ca *spiffetest.CA)
	up   func(ca *spiffetest.CA)
}

// TestOutage starts the outage at any moment. Every reader is served all the time, and when the CA
// is back, the identity is renewed before another 5 % of its remaining life are gone. TestOutageSweep has all starts and
// lengths.
func TestOutage(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for name, o := range map[string]outage{
		"refuses for an hour": {time.Hour, func(ca *spiffetest.CA) { ca.FailNext(1<<30, errDown) }, func(ca *spiffetest.CA) { ca.FailNext(0, nil) }},
		"refuses for a day":   {24 * time.Hour, func(ca *spiffetest.CA) { ca.FailNext(1<<30, errDown) }, func(ca *spiffetest.CA) { ca.FailNext(0, nil) }},
		"hangs for a day":     {24 * time.Hour, func(ca *spiffetest.CA) { ca.Delay(1000 * time.Hour) }, func(ca *spiffetest.CA) { ca.Delay(0) }},
		"twenty seconds":      {20 * time.Second, func(ca *spiffetest.CA) { ca.FailNext(1<<30, errDown) }, func(ca *spiffetest.CA) { ca.FailNext(0, nil) }},
	} {
		step, lengths := max(1, 60/rounds.Of(1)), []int{45}
		if *long {
			step, lengths = 1, []int{1, 5, 10, 15, 20, 25, 30, 35, 40, 45}
		}
		for percent := 45 % step; percent <= 100; percent += step {
			for _, length := range lengths {
				t.Run(fmt.Sprintf("%s from %d%% for %d%%", name, percent, length), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) { o.test(t, o.life*time.Duration(percent)/100, o.life*time.Duration(length)/100) })
				})
			}
		}
	}
}

func (o outage) test(t *testing.T, after, length time.Duration) {
	ca := spiffetest.NewCA(t, "example.org")
	m := newManager(t, secretcache.Config{CA: poll(ca), Lifetime: o.life})
	ready(t, m)
	var seen *spiffe.SVID
	watch := func(d time.Duration, until func() bool) time.Duration {
		begin := time.Now()
		for step := o.life / 500; time.Since(begin) < d && !until(); {
			time.Sleep(min(step, d-time.Since(begin)))
			synctest.Wait()
			svid := current(t, m)
			require.True(t, time.Now().Before(svid.NotAfter()), "the identity has expired")
			require.True(t, seen == nil || !svid.NotAfter().Before(seen.NotAfter()), "the identity went back")
			seen = svid
			ctx, cancel := context.WithCancel(t.Context())
			cancel() // a new subscriber does not wait at all
			for _, name := range []string{"default", "ROOTCA", "spiffe://example.org/web", "spiffe://example.org"} {
				must.Get(m.GenerateSecret(ctx, name))(t)
			}
		}
		return time.Since(begin)
	}
	never := func() bool { return false }

	watch(after, never)
	o.down(ca)
	watch(length, never)
	o.up(ca)
	svid := current(t, m)
	left := time.Until(svid.NotAfter())
	if left > o.life/2 {
		return // renewal did not come due
	}
	took := watch(left, func() bool { return current(t, m) != svid })
	assert.LessOrEqual(t, took, left*5/100+o.life/500, "recovery, with %v left", left)
	st := status(t, m, web)
	assert.NoError(t, st.Err)
	assert.Zero(t, st.Failures)
}

// TestOutageFromTheStart shows what readers learn while there is nothing yet, and that no
// caller has to ask again.
func TestOutageFromTheStart(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.FailNext(1<<30, errDown)
		stand := poll(ca)
		m := newManager(t, secretcache.Config{CA: stand})
		start(t, m)

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		_, err := m.GenerateSecret(ctx, "default")
		assert.ErrorIs(t, err, spiffe.ErrNotReady)
		assert.ErrorIs(t, err, context.DeadlineExceeded)
		assert.ErrorIs(t, err, errDown)
		assert.ErrorIs(t, must.Err(m.SVID()), errDown)
		assert.ErrorIs(t, must.Err(m.Bundle(domain)), errDown)
		assert.LessOrEqual(t, stand.fetched.Load(), int64(70), "in ten minutes, at 15 s on the average")
		assert.GreaterOrEqual(t, stand.fetched.Load(), int64(20))
		assert.Zero(t, stand.signed.Load(), "no request while nothing could be verified")

		time.AfterFunc(time.Minute, func() { ca.FailNext(0, nil) })
		begin := time.Now()
		must.Get(m.GenerateSecret(t.Context(), "default"))(t)
		assert.LessOrEqual(t, time.Since(begin), 91*time.Second)
	})
}

// TestExpired shows the end of an outage that was too long: what has expired is not handed out as
// a secret, and recovery takes half a minute at most.
func TestExpired(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: poll(ca)})
		first, _ := ready(t, m)
		ca.FailNext(1<<30, errDown)
		time.Sleep(time.Until(first.NotAfter()) - time.Nanosecond)
		ended, end := context.WithCancel(t.Context())
		end()
		_, err := m.GenerateSecret(ended, "default")
		require.NoError(t, err, "to the last moment")
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, must.Err(m.GenerateSecret(ended, "default")), spiffe.ErrNotReady)
		time.Sleep(10 * time.Minute)
		assert.Same(t, first, current(t, m), "SVID does not look at the clock")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = m.GenerateSecret(ctx, "default")
		assert.ErrorIs(t, err, spiffe.ErrNotReady)
		assert.ErrorIs(t, err, errDown)

		ca.FailNext(0, nil)
		begin := time.Now()
		assert.True(t, must.Get(m.GenerateSecret(t.Context(), "default"))(t).NotAfter().After(time.Now()))
		assert.LessOrEqual(t, time.Since(begin), 30*time.Second)
		assert.NotSame(t, first, current(t, m))
	})
}

// TestHangingCA shows that an attempt without an answer ends.
func TestHangingCA(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: poll(ca), Timeout: 10 * time.Second})
		ready(t, m)
		ca.Delay(1000 * time.Hour)
		time.Sleep(30*time.Minute + 11*time.Second) // half of the life, and the timeout
		synctest.Wait()
		assert.ErrorIs(t, status(t, m, web).Err, context.DeadlineExceeded)
	})
}

// TestRootHasLeft: an identity whose root has left the bundle is not ready while the CA gives no other, and stays as it is.
func TestRootHasLeft(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		before, _ := ready(t, m)
		require.NoError(t, m.Report().NotReady)
		ca.FailNext(1, errors.New("busy"))
		ca.Rotate()
		ca.DropOldRoots()
		synctest.Wait()
		require.ErrorContains(t, m.Report().NotReady, `no peer that has the trust bundle accepts the identity spiffe://example.org/web, whose root has left it`)
		require.Same(t, before, current(t, m))
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		require.NoError(t, m.Report().NotReady)
	})
}

// brief is a CA whose certificates live as long as it is told.
type brief struct {
	*polled
	life atomic.Int64
}

func (b *brief) Sign(ctx context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	return b.polled.Sign(ctx, csr, time.Duration(b.life.Load()))
}

// A certificate that ends too soon to be renewed takes the place of none that is good, and of one whose root has left: which no peer accepts.
func TestOrphanTakesTheShorter(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		b := &brief{polled: poll(ca)}
		b.life.Store(int64(time.Hour))
		m := newManager(t, secretcache.Config{CA: b})
		before, _ := ready(t, m)
		b.life.Store(int64(15 * time.Second))
		time.Sleep(40 * time.Minute)
		require.Same(t, before, current(t, m))
		require.ErrorContains(t, status(t, m, web).Err, "before it could be renewed again")
		ca.Rotate()
		ca.DropOldRoots()
		time.Sleep(6 * time.Minute) // the bundles are read
		now := current(t, m)
		assert.NotSame(t, before, now)
		assert.Less(t, time.Until(now.NotAfter()), time.Minute)
		assert.NoError(t, m.Report().NotReady)

		// It is none any more: of two good ones the longer stays.
		b.life.Store(int64(time.Hour))
		time.Sleep(time.Minute)
		long := current(t, m)
		require.Greater(t, time.Until(long.NotAfter()), 50*time.Minute)
		b.life.Store(int64(15 * time.Second))
		time.Sleep(40 * time.Minute)
		assert.Same(t, long, current(t, m))
	})
}
