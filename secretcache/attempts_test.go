package secretcache_test

import (
	"context"
	"crypto/x509"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// timed notes when it was asked to sign.
type timed struct {
	caclient.CA
	mu    sync.Mutex
	times []time.Time
}

func (c *timed) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	c.mu.Lock()
	c.times = append(c.times, time.Now())
	c.mu.Unlock()
	return c.CA.Sign(ctx, csr, lifetime)
}

// A CA that is away from the first renewal to the end of the certificate is asked as often as the package comment says.
func TestAttemptsOverALife(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, tt := range []struct {
		life, pause time.Duration // the shortest between two attempts
		most        int           // attempts
	}{
		{20 * time.Second, 50 * time.Millisecond, 160},
		{time.Minute, 120 * time.Millisecond, 160},
		{499 * time.Second, 998 * time.Millisecond, 160},
		{500 * time.Second, time.Second, 160},
		{time.Hour, time.Second, 280},
		{24 * time.Hour, time.Second, 460},
	} {
		bubble.Run(t, tt.life.String(), func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			c := &timed{CA: ca}
			m := newManager(t, secretcache.Config{CA: c, Lifetime: tt.life})
			svid, _ := ready(t, m)
			ca.FailNext(1<<30, errDown)
			time.Sleep(time.Until(svid.NotAfter()))
			c.mu.Lock()
			defer c.mu.Unlock()
			t.Logf("%d attempts", len(c.times)-1)
			assert.LessOrEqual(t, len(c.times)-1, tt.most)
			for i := 2; i < len(c.times); i++ {
				assert.GreaterOrEqual(t, c.times[i].Sub(c.times[i-1]), tt.pause, "attempt %d", i)
			}
		})
	}
}
