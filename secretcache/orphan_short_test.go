package secretcache_test

import (
	"context"
	"crypto/x509"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

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
