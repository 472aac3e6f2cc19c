package secretcache_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"crypto/x509"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// clocked is a CA that notes when it was asked.
type clocked struct {
	*spiffetest.CA
	mu  sync.Mutex
	at  []time.Time
	err error
}

func (c *clocked) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.mu.Lock()
	c.at = append(c.at, time.Now())
	err := c.err
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return c.CA.Sign(ctx, csr, lifetime)
}

func (c *clocked) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

// gaps returns the times between the last n requests.
func (c *clocked) gaps(n int) (gaps []time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := len(c.at) - n; i < len(c.at); i++ {
		gaps = append(gaps, c.at[i].Sub(c.at[i-1]))
	}
	return gaps
}

// later is an error that asks for a wait.
type later time.Duration

func (later) Error() string                      { return "later" }
func (l later) Retryable() (time.Duration, bool) { return time.Duration(l), true }

// never is an error that says that asking again will not help.
type never struct{}

func (never) Error() string                    { return "never" }
func (never) Retryable() (time.Duration, bool) { return 0, false }

// RenewIn says when the CA is asked, after answers and after failures. A CA that asks for more time gets it, up to half of the
// life that is left.
func TestRenewIn(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		const life = 10 * time.Hour
		ca := &clocked{CA: spiffetest.NewCA(t, "example.org")}
		type call struct {
			left     time.Duration
			failures int
		}
		var mu sync.Mutex
		var calls []call
		m := newManager(t, secretcache.Config{CA: ca, Lifetime: life, RenewIn: func(left time.Duration, failures int) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, call{left, failures})
			if failures > 0 {
				return time.Minute
			}
			return left / 10 * 7
		}})
		ready(t, m)
		for range 3 {
			time.Sleep(7 * time.Hour)
			synctest.Wait()
		}
		assert.Equal(t, []time.Duration{7 * time.Hour, 7 * time.Hour, 7 * time.Hour}, ca.gaps(3))

		ca.fail(errors.New("down"))
		time.Sleep(7*time.Hour + 3*time.Minute)
		synctest.Wait()
		assert.Equal(t, []time.Duration{7 * time.Hour, time.Minute, time.Minute, time.Minute}, ca.gaps(4))
		mu.Lock()
		assert.Equal(t, call{3*time.Hour - 3*time.Minute, 4}, calls[len(calls)-1])
		mu.Unlock()

		ca.fail(never{}) // no refusal is for good
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		assert.Equal(t, []time.Duration{time.Minute, time.Minute}, ca.gaps(2))

		ca.fail(later(30 * time.Minute))
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.GreaterOrEqual(t, ca.gaps(1)[0], 30*time.Minute)
		assert.Less(t, ca.gaps(1)[0], 34*time.Minute)

		ca.fail(later(10 * time.Hour)) // more than is left
		svid := current(t, m)
		time.Sleep(time.Until(svid.NotAfter()))
		synctest.Wait()
		assert.Less(t, ca.gaps(1)[0], time.Hour)

		ca.fail(errors.New("down"))
		time.Sleep(3 * time.Hour)
		synctest.Wait()
		mu.Lock()
		assert.Equal(t, time.Duration(0), calls[len(calls)-1].left, "it has expired")
		mu.Unlock()
		ca.fail(later(30 * time.Minute))
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		assert.GreaterOrEqual(t, ca.gaps(1)[0], 30*time.Minute)
		ca.fail(nil)
		time.Sleep(40 * time.Minute)
		synctest.Wait()
		assert.True(t, time.Now().Before(current(t, m).NotAfter()))
	})
}

// A RenewIn that returns nothing sensible does not make a tight loop.
func TestRenewInNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := &clocked{CA: spiffetest.NewCA(t, "example.org")}
		m := newManager(t, secretcache.Config{CA: ca, RenewIn: func(time.Duration, int) time.Duration { return -time.Hour }})
		ready(t, m)
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []time.Duration{50 * time.Millisecond}, ca.gaps(1))
		ca.fail(errors.New("down"))
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Equal(t, []time.Duration{50 * time.Millisecond}, ca.gaps(1))
	})
	_, err := secretcache.New(secretcache.Config{ID: web, CA: spiffetest.NewCA(t, "example.org"), GraceRatio: 0.3, RenewIn: func(time.Duration, int) time.Duration { return 0 }})
	require.ErrorContains(t, err, "RenewIn")
}

// A clock that was an hour ahead, and is set right, leaves a certificate that no peer accepts before the hour is over: it is
// replaced at once. One that is valid by the new time as well stays.
func TestClockSetBack(t *testing.T) {
	for name, test := range map[string]struct {
		life, back time.Duration
		signed     int
	}{
		"for an hour": {24 * time.Hour, time.Hour, 2}, "for much more than a life": {10 * time.Second, time.Hour, 2},
		"within what the CA dates back": {24 * time.Hour, time.Minute, 1},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			ca.EditTemplates(func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Minute), time.Now().Add(test.life)
			})
			m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: ca, Timeout: time.Minute}))(t)
			var ahead atomic.Int64
			ahead.Store(int64(test.back))
			secretcache.SetClock(m, 0, func() (mono, wall time.Time) { return time.Now(), time.Now().Round(0).Add(time.Duration(ahead.Load())) })
			ctx, cancel := context.WithCancel(t.Context())
			var all sync.WaitGroup
			all.Go(func() { assert.NoError(t, m.Run(ctx)) })
			defer all.Wait()
			defer cancel()
			soon, stop := context.WithTimeout(ctx, time.Hour) // of the bubble, and not of the test
			require.NoError(t, m.Ready(soon))
			stop()
			time.Sleep(time.Second)
			before := must.Get(m.SVID())(t)
			secretcache.Leap(m, -test.back) // by the right time, at which the bubble is
			ahead.Store(0)
			time.Sleep(time.Second)
			synctest.Wait()
			assert.Equal(t, test.signed, ca.Signed())
			assert.Equal(t, test.signed == 1, must.Get(m.SVID())(t) == before)
			time.Sleep(test.life / 5)
			assert.Equal(t, test.signed, ca.Signed(), "and it is renewed as usual from then on")
		})
	}
}
