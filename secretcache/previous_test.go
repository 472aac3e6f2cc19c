package secretcache_test

import (
	"bytes"
	"context"
	"log/slog"
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// What an earlier run has obtained is there at once, while the CA is away too, and is renewed when it is due.
func TestPrevious(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		earlier := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())
		svid, _ := earlier.SVID()
		time.Sleep(10 * time.Minute)
		ca.FailNext(-1, errDown)
		stand := poll(ca)
		m := newManager(t, secretcache.Config{CA: stand, Previous: earlier})
		assert.Same(t, svid, current(t, m))
		for _, name := range []string{"default", web.String(), "ROOTCA", "ALL"} {
			require.NoError(t, must.ErrorOf(m.GenerateSecret(done, name)), name)
		}
		stop := start(t, m)
		require.NoError(t, m.Ready(t.Context()))
		time.Sleep(5 * time.Minute)
		assert.Zero(t, stand.signed.Load())
		assert.Positive(t, stand.fetched.Load(), "the CA is asked for bundles")
		ca.FailNext(0, nil)
		time.Sleep(6 * time.Minute)
		assert.Zero(t, stand.signed.Load(), "half of the life is not over")
		assert.Same(t, svid, current(t, m))
		time.Sleep(time.Until(svid.NotAfter()) - 29*time.Minute)
		assert.Equal(t, int64(1), stand.signed.Load())
		assert.NotSame(t, svid, current(t, m))
		stop()
	})
}

// The bundles of an earlier run give way to the first that the CA has, which need not follow them, and with them what
// their root has signed.
func TestPreviousOfOldRoot(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.Rotate()
		ca.Rotate() // a sequence number that the other CA has not reached
		earlier := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())
		other, federated := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
		var f bundles
		f.set.Store(set(t, federated.Bundle()))
		m := newManager(t, secretcache.Config{CA: poll(other), Federated: &f, Previous: earlier})
		ready(t, m)
		assert.True(t, must.Get(m.Bundle(domain))(t).Equal(other.Bundle()))
		must.Get(m.Bundle(federated.TrustDomain()))(t)
		assert.Equal(t, 1, other.Signed())
		assert.NoError(t, status(t, m, web).Err)
	})
}

// What is not good is not used: the program starts as if there were nothing.
func TestPreviousRefused(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca, stranger, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
		expired := ca.SVID("/web")
		time.Sleep(time.Until(expired.NotAfter()))
		for want, s := range map[string]*spiffe.Snapshot{
			"now is":                      spiffe.NewSnapshot(expired, ca.Bundles()),
			"not allowed by policy":       spiffe.NewSnapshot(ca.SVID("/other"), ca.Bundles()),
			"signed by unknown authority": spiffe.NewSnapshot(ca.SVID("/web"), stranger.Bundles()),
			"no trust bundle for":         spiffe.NewSnapshot(ca.SVID("/web"), partner.Bundles()),
		} {
			var log bytes.Buffer
			stand := poll(ca)
			m := newManager(t, secretcache.Config{CA: stand, Previous: s, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			assert.Contains(t, log.String(), "the identity of the previous run is not used")
			assert.Contains(t, log.String(), want)
			_, err := m.SVID()
			require.ErrorIs(t, err, spiffe.ErrNotReady, want)
			require.ErrorIs(t, must.ErrorOf(m.Bundle(domain)), spiffe.ErrNotReady, want)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			_, err = m.GenerateSecret(ctx, "default")
			cancel()
			require.NoError(t, err)
			assert.Equal(t, int64(1), stand.signed.Load())
		}
		_, err := secretcache.New(secretcache.Config{
			Expect: pki.ExpectDNSName(domain, "web.test"), CA: ca, Previous: spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles()),
		})
		require.ErrorContains(t, err, "Config.Previous")
		_, err = secretcache.New(secretcache.Config{ID: web, CA: ca, Previous: new(spiffe.Snapshot)})
		require.ErrorContains(t, err, "Config.Previous")
	})
}

// The key of an earlier run is not kept once there is a newer one.
func TestPreviousIsNotKept(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	m, earlier := func() (*secretcache.Manager, weak.Pointer[spiffe.Snapshot]) {
		s := spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())
		return newManager(t, secretcache.Config{CA: poll(ca), Previous: s}), weak.Make(s)
	}()
	require.Eventually(t, func() bool {
		runtime.GC()
		return earlier.Value() == nil
	}, time.Minute, time.Millisecond)
	must.Get(m.SVID())(t)
}
