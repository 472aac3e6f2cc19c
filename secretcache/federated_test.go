package secretcache_test

import (
	"context"
	"io/fs"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
)

// TestFederated joins the bundles of a federation.Manager, which change, appear and end.
func TestFederated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		partner, given := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "given.test")
		ca := spiffetest.NewCA(t, "example.org")
		ca.Federate(given.Bundle())
		endpoint := federationtest.NewInMemory(t, partner)
		f, err := federation.New(federation.Config{DialContext: federationtest.Dial(endpoint)})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() { _ = f.Run(ctx) })
		defer wg.Wait()
		defer cancel()

		m := newManager(t, secretcache.Config{CA: ca, Federated: f})
		var heard told
		m.Subscribe(heard.add)
		ready(t, m)
		heard.take()
		name := partner.TrustDomain().ID().String()
		_, err = m.GenerateSecret(t.Context(), name)
		assert.ErrorIs(t, err, fs.ErrNotExist)
		own, err := m.GenerateSecret(t.Context(), "ROOTCA")
		require.NoError(t, err)
		vouches := func() bool {
			snap, err := m.Snapshot()
			require.NoError(t, err)
			_, err = snap.Bundle(partner.TrustDomain())
			_, direct := m.Bundle(partner.TrustDomain())
			assert.Equal(t, direct == nil, err == nil, "a snapshot and the Manager say the same")
			return err == nil && accepts(t, m, partner) && accepts(t, snap, partner)
		}
		assert.False(t, vouches())

		require.NoError(t, f.Add(endpoint.Relationship()))
		assert.Equal(t, []string{"ALL", name}, heard.take(), "nothing else has changed")
		assert.True(t, vouches())
		first, err := m.GenerateSecret(t.Context(), name)
		require.NoError(t, err)

		endpoint.Rotate()
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"ALL", name}, heard.take())
		second, err := m.GenerateSecret(t.Context(), name)
		require.NoError(t, err)
		assert.NotSame(t, first, second)
		assert.True(t, vouches())
		assert.Len(t, bundleOf(t, m, partner.TrustDomain()), 2)

		// What the CA says stays beside it, and its news does not disturb it.
		ca.Prepare()
		assert.Equal(t, []string{"ROOTCA", "spiffe://example.org", "ALL"}, heard.take())
		assert.True(t, vouches())
		assert.Len(t, bundleOf(t, m, given.TrustDomain()), 1)
		now, err := m.GenerateSecret(t.Context(), "ROOTCA")
		require.NoError(t, err)
		assert.NotSame(t, own, now)

		require.NoError(t, f.Remove(partner.TrustDomain()))
		assert.Equal(t, []string{"ALL", name}, heard.take())
		assert.False(t, vouches())
		_, err = m.GenerateSecret(t.Context(), name)
		assert.ErrorIs(t, err, fs.ErrNotExist)
	})
}

// accepts reports whether a verifier that asks s accepts what ca issues.
func accepts(t *testing.T, s spiffe.BundleSource, ca *spiffetest.CA) bool {
	t.Helper()
	v, err := spiffe.NewVerifier(s, spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	require.NoError(t, err)
	_, err = v.VerifyChain(ca.SVID("/workload").Chain(), spiffe.ClientRole)
	return err == nil
}

// bundles is a source that says what it is told to.
type bundles struct {
	set     atomic.Pointer[spiffe.BundleSet]
	changed renew.Signal
}

func (b *bundles) Bundles() *spiffe.BundleSet { return b.set.Load() }
func (b *bundles) Changed() <-chan struct{}   { return b.changed.Changed() }

// TestFederatedDoesNotSpeakForUs gives a bundle of the own trust domain, and one of a domain that the CA
// knows too.
func TestFederatedDoesNotSpeakForUs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, unknown, theirs, ours := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test"), spiffetest.NewCA(t, "other.test")
		ca.Federate(theirs.Bundle())
		b := &bundles{}
		b.set.Store(set(t, unknown.Bundle()).With(ours.Bundle()))
		m := newManager(t, secretcache.Config{CA: ca, Federated: b})

		// Also before Run, and for bundles that a first call brings.
		_, err := m.GenerateSecret(t.Context(), "ROOTCA")
		require.NoError(t, err)
		for running := range 2 {
			if running == 1 {
				ready(t, m)
			}
			assert.True(t, accepts(t, m, ca))
			assert.False(t, accepts(t, m, unknown))
			assert.True(t, accepts(t, m, ours), "the operator's choice counts")
			assert.False(t, accepts(t, m, theirs))
		}
		changed := m.Changed()
		b.set.Store(nil)
		b.changed.Notify()
		<-changed
		assert.True(t, accepts(t, m, theirs))
		assert.False(t, accepts(t, m, ours))
	})
}
