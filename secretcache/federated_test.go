package secretcache_test

import (
	"context"
	"io/fs"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
)

// TestFederated joins the bundles of a federation.Manager, which change, appear and end.
func TestFederated(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		partner, given := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "given.test")
		ca := spiffetest.NewCA(t, "example.org")
		ca.Federate(given.Bundle())
		endpoint := federationtest.NewInMemory(t, partner)
		f := must.Get(federation.New(federation.Config{DialContext: federationtest.Dial(endpoint)}))(t)
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
		assert.ErrorIs(t, must.Err(m.GenerateSecret(t.Context(), name)), fs.ErrNotExist)
		own := must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t)
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
		first := must.Get(m.GenerateSecret(t.Context(), name))(t)

		endpoint.Rotate()
		time.Sleep(10 * time.Minute)
		assert.Equal(t, []string{"ALL", name}, heard.take())
		assert.NotSame(t, first, must.Get(m.GenerateSecret(t.Context(), name))(t))
		assert.True(t, vouches())
		assert.Len(t, bundleOf(t, m, partner.TrustDomain()), 2)

		// What the CA says stays beside it, and its news does not disturb it.
		ca.Prepare()
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org"}, heard.take())
		assert.True(t, vouches())
		assert.Len(t, bundleOf(t, m, given.TrustDomain()), 1)
		assert.NotSame(t, own, must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t))

		require.NoError(t, f.Remove(partner.TrustDomain()))
		assert.Equal(t, []string{"ALL", name}, heard.take())
		assert.False(t, vouches())
		assert.ErrorIs(t, must.Err(m.GenerateSecret(t.Context(), name)), fs.ErrNotExist)
	})
}

// accepts reports whether a verifier that asks s accepts what ca issues.
func accepts(t *testing.T, s spiffe.BundleSource, ca *spiffetest.CA) bool {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(s, spiffe.AllowMembersOf(ca.TrustDomain()), nil))(t)
	return must.Err(v.VerifyChain(ca.SVID("/workload").Chain(), spiffe.ClientRole)) == nil
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
	bubble.Test(t, func(t *testing.T) {
		ca, unknown, theirs, ours := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test"), spiffetest.NewCA(t, "other.test")
		ca.Federate(theirs.Bundle())
		b := &bundles{}
		b.set.Store(set(t, unknown.Bundle()).With(ours.Bundle()))
		m := newManager(t, secretcache.Config{CA: ca, Federated: b})

		// Also before Run, and for bundles that a first call brings.
		must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t)
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

// hasty are bundles that become others while the Manager asks to be told of changes.
type hasty struct {
	bundles
	next atomic.Pointer[spiffe.BundleSet]
}

func (h *hasty) Changed() <-chan struct{} {
	if next := h.next.Swap(nil); next != nil {
		h.set.Store(next)
		h.changed.Notify()
	}
	return h.bundles.Changed()
}

// Bundles that change between two looks at them are taken over at once, and not when the CA is asked next.
func TestFederatedWhileLooking(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		of := func() *spiffe.BundleSet { return set(t, spiffetest.NewCA(t, "partner.test").Bundle()) }
		h := new(hasty)
		h.set.Store(of())
		m := newManager(t, secretcache.Config{CA: poll(spiffetest.NewCA(t, "example.org")), Federated: h})
		ready(t, m)
		for range 3 {
			time.Sleep(time.Second)
			last := of()
			h.next.Store(last)
			h.set.Store(of())
			h.changed.Notify()
			synctest.Wait()
			require.Nil(t, h.next.Load())
			want := must.Get(last.Bundle(spiffe.MustParseTrustDomain("partner.test")))(t)
			assert.Same(t, want, must.Get(m.Bundle(want.TrustDomain()))(t))
		}
	})
}

// A CA that insists on an implausible bundle begins anew after each answer that says something else: the one in force, an older one, or none.
func TestInsistingBeginsAnew(t *testing.T) {
	t.Parallel()
	for name, between := range map[string]func(own, older *spiffe.BundleSet) *spiffe.BundleSet{
		"the one in force": func(_, _ *spiffe.BundleSet) *spiffe.BundleSet { return nil },
		"an older one":     func(_, older *spiffe.BundleSet) *spiffe.BundleSet { return older },
		"none":             func(own, _ *spiffe.BundleSet) *spiffe.BundleSet { return own },
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
			older := set(t, ca.Bundle(), other.Bundle())
			other.Rotate()
			ca.Federate(other.Bundle())
			p := poll(ca)
			m := newManager(t, secretcache.Config{CA: p})
			ready(t, m)
			contents := other.Bundle().Contents()
			contents.Sequence = new(uint64(math.MaxUint64))
			wrong := must.Get(spiffe.NewBundle(other.TrustDomain(), contents))(t)
			all := ca.Bundles().With(wrong)
			inForce := func() bool {
				b, err := m.Bundle(other.TrustDomain())
				return err == nil && b.Equal(wrong)
			}
			for range 3 {
				p.bundles.Store(all)
				time.Sleep(bundleorder.Time - 10*time.Minute)
				require.False(t, inForce())
				p.bundles.Store(between(set(t, ca.Bundle()), older))
				time.Sleep(6 * time.Minute)
				require.False(t, inForce())
			}
			p.bundles.Store(all)
			time.Sleep(bundleorder.Time + 12*time.Minute)
			assert.True(t, inForce(), "it insists")
		})
	}
}

// flaky is a CA whose watch ends at once while it is down.
type flaky struct {
	*polled
	mu    sync.Mutex
	down  chan struct{} // closed when it is
	tries []time.Time
}

func (f *flaky) set(down chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down, f.tries = down, nil
}

func (f *flaky) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		f.mu.Lock()
		f.tries = append(f.tries, time.Now())
		down := f.down
		f.mu.Unlock()
		select {
		case <-down:
			yield(nil, errDown)
			return
		default:
		}
		if !yield(f.ca.FetchBundles(ctx)) {
			return
		}
		select {
		case <-down:
		case <-ctx.Done():
		}
	}
}

// A watch that was good once is asked again soon after its next end, however often it failed before.
func TestWatchAgainSoon(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		f := &flaky{polled: poll(spiffetest.NewCA(t, "example.org")), down: make(chan struct{})}
		m := newManager(t, secretcache.Config{CA: f})
		ready(t, m)
		for range 8 {
			f.mu.Lock()
			down := f.down
			f.tries = nil
			f.mu.Unlock()
			began := time.Now()
			close(down)
			time.Sleep(10 * time.Minute) // of failures
			f.mu.Lock()
			tries := f.tries
			f.mu.Unlock()
			require.Greater(t, len(tries), 10)
			assert.LessOrEqual(t, tries[0].Sub(began), 2*time.Second)
			f.set(make(chan struct{}))
			time.Sleep(10 * time.Minute)
			f.mu.Lock()
			require.Len(t, f.tries, 1, "it lasts")
			f.mu.Unlock()
		}
	})
}
