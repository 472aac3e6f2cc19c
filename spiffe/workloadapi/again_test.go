package workloadapi_test

import (
	"context"
	"crypto/ecdsa"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// What a Run has ended with is not told of the next one: it is waited for, its silence is its own, and no stream of the one before
// is open.
func TestRunsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home := workloadtest.NewDomain(t, "example.org")
		web, key := home.SVID("/web"), workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
		var refuse, mute atomic.Bool
		s := must.Get(workloadapi.New(workloadapi.Config{JWTBundles: true, Client: inMemory(t, fake(t, func(c *call) {
			switch {
			case refuse.Load():
				c.end(workloadtest.InvalidArgument, "no")
				return
			case mute.Load():
				c.wait()
				return
			}
			c.sleep(5 * time.Second)
			if c.rpc == "FetchJWTBundles" {
				c.send(&wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): jwks(t, nil, key)}})
			} else {
				c.send(response(t, home, web))
			}
			c.wait()
		}))}))(t)
		ready := func(patience time.Duration) error {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			return s.Ready(ctx)
		}
		// It is refused for good, and says so before anyone's patience is over.
		refuse.Store(true)
		begun := time.Now()
		require.Error(t, s.Run(t.Context()))
		require.ErrorIs(t, ready(time.Hour), spiffe.ErrNotReady)
		require.Zero(t, time.Since(begun))
		require.Zero(t, s.Status().X509.NextAttempt, "there is none")

		// It is silent, for as long as this Run lasts.
		refuse.Store(false)
		mute.Store(true)
		for _, silent := range []time.Duration{10 * time.Second, 3 * time.Second} {
			stop := workloadtest.Run(t, s)
			synctest.Wait()
			require.ErrorIs(t, ready(silent), context.DeadlineExceeded)
			require.NoError(t, stop())
			time.Sleep(time.Minute)
		}
		mute.Store(false)
		stop := workloadtest.Run(t, s)
		synctest.Wait()
		begun = time.Now()
		require.NoError(t, ready(time.Minute), "it is waited for")
		require.Equal(t, 5*time.Second, time.Since(begun))
		require.True(t, s.Status().X509.Open)
		require.True(t, s.Status().JWT.Open)
		require.Zero(t, s.Status().X509.Failures)
		require.NoError(t, s.Status().X509.Err)
		require.NoError(t, stop())
		require.False(t, s.Status().X509.Open)
		require.False(t, s.Status().JWT.Open)
		require.NoError(t, ready(time.Minute), "what was received stays")
	})
}

// That the server refuses the keys for tokens for good ends the wait for them, as the refusal of certificates does.
func TestRefusedForGood(t *testing.T) {
	t.Parallel()
	for _, refused := range []string{"FetchJWTBundles", "FetchX509SVID"} {
		for _, code := range []int{workloadtest.InvalidArgument, workloadtest.Unimplemented} {
			synctest.Test(t, func(t *testing.T) {
				home := workloadtest.NewDomain(t, "example.org")
				web := home.SVID("/web")
				s, err := workloadapi.New(workloadapi.Config{JWTBundles: true, Client: inMemory(t, fake(t, func(c *call) {
					if c.rpc == refused {
						c.end(code, "no")
						return
					}
					if c.rpc != "FetchJWTBundles" {
						c.send(response(t, home, web))
					}
					c.wait()
				}))})
				require.NoError(t, err)
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error, 1)
				go func() { ended <- s.Run(ctx) }()
				begun := time.Now()
				patience, end := context.WithTimeout(t.Context(), time.Hour)
				err = s.Ready(patience)
				end()
				require.ErrorIs(t, err, spiffe.ErrNotReady)
				require.NotErrorIs(t, err, context.DeadlineExceeded, "%s with %d", refused, code)
				require.Zero(t, time.Since(begun))
				cancel()
				<-ended
			})
		}
	}
}

// What was left out of an answer is told as long as that answer counts, and what a caller does with the list is its own.
func TestSkippedIsForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		home, other := workloadtest.NewDomain(t, "example.org"), workloadtest.NewDomain(t, "other.test")
		web, key := home.SVID("/web"), workloadtest.NewKey(t).Public().(*ecdsa.PublicKey)
		many := slices.Repeat([]*ecdsa.PublicKey{key}, jws.MaxSetKeys)
		x509s, jwts := make(feed), make(feed)
		s := source(t, workloadapi.Config{JWTBundles: true}, func(c *call) {
			if c.rpc == "FetchJWTBundles" {
				jwts.serve(c)
			} else {
				x509s.serve(c)
			}
		})
		keys := func(all ...*ecdsa.PublicKey) {
			jwts.send(&wire.JWTBundlesResponse{Bundles: map[string][]byte{home.Key(): jwks(t, nil, all...)}})
		}
		broken := response(t, home, web, other)
		broken.FederatedBundles["spiffe://broken.test"] = []byte("broken")
		for range 2 {
			x509s.send(broken)
			keys(many...)
			st := s.Status()
			require.Len(t, st.X509.Skipped, 1)
			require.Len(t, st.JWT.Skipped, 1, "together they are too many")
			require.ErrorIs(t, st.JWT.Skipped[0], spiffe.ErrTooLarge)
			b := must.Get(s.Bundle(home.TrustDomain()))(t)
			workloadtest.SameRoots(t, home, b)
			require.Empty(t, b.Contents().JWTAuthorities)
			keys(key)
			require.Empty(t, s.Status().JWT.Skipped)
			require.Len(t, s.Status().X509.Skipped, 1)

			// Withdrawn, with what was told of it.
			keys(many...)
			x509s.do(func(c *call) { c.end(workloadtest.PermissionDenied, "") })
			require.Empty(t, s.Status().X509.Skipped)
			require.Empty(t, s.Status().JWT.Skipped, "alone they are not too many")
			x509s.send(response(t, home, web))
			require.Empty(t, s.Status().X509.Skipped)
			require.Len(t, s.Status().JWT.Skipped, 1)
			keys(key)
			require.Empty(t, s.Status().JWT.Skipped)
		}
	})
}
