package source_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// abroad has bundles that a test changes.
type abroad struct {
	mu   sync.Mutex
	set  *spiffe.BundleSet
	news renew.Signal
}

func (a *abroad) put(t testing.TB, bundles ...*spiffe.Bundle) {
	t.Helper()
	set := must.Get(spiffe.NewBundleSet(bundles...))(t)
	a.mu.Lock()
	a.set = set
	a.mu.Unlock()
	a.news.Notify()
}

func (a *abroad) Bundles() *spiffe.BundleSet {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.set
}

func (a *abroad) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return a.Bundles().Bundle(td) }
func (a *abroad) Changed() <-chan struct{}                             { return a.news.Changed() }

func TestMerge(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, impostor := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
		one, two := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "partner.test")
		third := spiffetest.NewCA(t, "third.test")
		ca.Federate(third.Bundle())
		own := &flip{Source: ca.Source("/web")}
		var a, b abroad
		a.put(t)
		b.put(t, two.Bundle(), impostor.Bundle())
		m := must.Get(source.NewMerge(td, own, &a, &b))(t)
		defer m.Close()
		from := func(want *spiffetest.CA) {
			t.Helper()
			got := must.Get(m.Bundle(want.TrustDomain()))(t)
			assert.True(t, sameRoots(got, want.Bundle()))
			in := must.Get(must.Get(m.Snapshot())(t).Bundle(want.TrustDomain()))(t)
			assert.Same(t, got, in, "a snapshot has the same")
		}
		from(ca) // and not the impostor
		from(two)
		from(third)
		_, err := m.Bundle(spiffe.MustParseTrustDomain("unknown.test"))
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		snap := must.Get(m.Snapshot())(t)
		assert.Equal(t, 3, snap.Bundles().Len())
		assert.Same(t, snap, must.Get(m.Snapshot())(t))

		// Either side's changes are told, and what the first has counts.
		changed := m.Changed()
		assert.Equal(t, changed, m.Changed())
		synctest.Wait()
		select {
		case <-changed:
			t.Fatal("nothing has changed")
		default:
		}
		a.put(t, one.Bundle())
		<-changed
		from(one)
		changed = m.Changed()
		own.Renew()
		<-changed
		assert.Equal(t, serial(t, own), must.Get(m.SVID())(t).Leaf().SerialNumber.String())
		assert.Equal(t, serial(t, own), serial(t, m))
		a.put(t)
		from(two)
		b.put(t)
		require.ErrorIs(t, must.Err(m.Bundle(partner)), spiffe.ErrUnknownTrustDomain)

		// Without the own source no other speaks for the own trust domain.
		own.Fail(errAway)
		b.put(t, impostor.Bundle())
		require.ErrorIs(t, must.Err(m.Bundle(td)), errAway)
		require.ErrorIs(t, must.Err(m.Snapshot()), errAway)
		require.ErrorIs(t, must.Err(m.SVID()), errAway)
		own.Fail(nil)

		var seen []string
		for snap := range renew.Follow(t.Context(), m.Changed, func() *spiffe.Snapshot { snap, _ := m.Snapshot(); return snap }) {
			seen = append(seen, serial(t, snap))
			if len(seen) == 3 {
				break
			}
			time.AfterFunc(time.Second, func() { own.Renew() })
		}
		assert.Equal(t, serial(t, own), seen[2])
		require.NoError(t, m.Ready(t.Context()))
	})
}

// homeless is a source of an identity that has no bundle of its own trust domain.
type homeless struct{ *flip }

func (h homeless) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	return h.Bundles().Bundle(td)
}

func (h homeless) Bundles() *spiffe.BundleSet { return new(spiffe.BundleSet) }

func (h homeless) Snapshot() (*spiffe.Snapshot, error) {
	svid, err := h.SVID()
	if err != nil {
		return nil, err
	}
	return spiffe.NewSnapshot(svid, h.Bundles()), nil
}

// A federated source speaks for the own trust domain at no time, not even while nobody else does.
func TestMergeOwnIsNotForOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, impostor := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
		one := spiffetest.NewCA(t, "partner.test")
		var a abroad
		a.put(t, impostor.Bundle(), one.Bundle())
		m := must.Get(source.NewMerge(td, homeless{&flip{Source: ca.Source("/web")}}, &a))(t)
		defer m.Close()
		for name, bundles := range map[string]spiffe.BundleSource{"merge": m, "snapshot": must.Get(m.Snapshot())(t)} {
			require.ErrorIs(t, must.Err(bundles.Bundle(td)), spiffe.ErrUnknownTrustDomain, name)
			assert.True(t, sameRoots(must.Get(bundles.Bundle(partner))(t, name), one.Bundle()), name)
		}
	})
}

// A mistake in the configuration is not a hole.
func TestMergeMistakes(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	own := &flip{Source: ca.Source("/web")}
	var a abroad
	a.put(t)
	require.ErrorIs(t, must.Err(source.NewMerge(spiffe.TrustDomain{}, own, &a)), spiffe.ErrZero)
	require.ErrorContains(t, must.Err(source.NewMerge(td, nil, &a)), "nil")
	require.ErrorContains(t, must.Err(source.NewMerge(td, own, &a, nil)), "nil")
	m := must.Get(source.NewMerge(partner, own, &a))(t)
	require.ErrorContains(t, must.Err(m.SVID()), `has an identity of "example.org"`)
	require.ErrorContains(t, must.Err(m.Snapshot()), `has an identity of "example.org"`)
	require.NoError(t, m.Close())
}

// Close ends all goroutines, or else the bubble would fail, and wakes those that wait.
func TestMergeClose(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		var a abroad
		a.put(t)
		m := must.Get(source.NewMerge(td, &flip{Source: ca.Source("/web")}, &a))(t)
		require.NoError(t, m.Close())
		m = must.Get(source.NewMerge(td, &flip{Source: ca.Source("/web")}, &a))(t)
		changed := m.Changed()
		require.NoError(t, m.Close())
		<-changed
		after := m.Changed()
		synctest.Wait()
		select {
		case <-after:
			t.Fatal("a loop would spin")
		default:
		}
		require.NoError(t, m.Close())
	})
}

// static is a source with a snapshot of its own.
type static struct {
	flip
	snap *spiffe.Snapshot
}

func (s *static) Snapshot() (*spiffe.Snapshot, error)                  { return s.snap, nil }
func (s *static) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return s.snap.Bundle(td) }

// slow is a source whose first reader is held up with what it has read.
type slow struct {
	static
	next       *spiffe.Snapshot
	calls      atomic.Int32
	read, goOn chan struct{}
}

func (s *slow) Snapshot() (*spiffe.Snapshot, error) {
	if s.calls.Add(1) == 1 {
		close(s.read)
		<-s.goOn
		return s.snap, nil
	}
	return s.next, nil
}

// TestMergeSlowReader has a reader that was overtaken by a rotation: it must not bring the identity before it back.
func TestMergeSlowReader(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	own := &slow{
		static: static{flip{Source: ca.Source("/web")}, spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())},
		next:   spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles()), read: make(chan struct{}), goOn: make(chan struct{}),
	}
	m := must.Get(source.NewMerge(ca.TrustDomain(), own))(t)
	defer m.Close()
	late := make(chan *spiffe.Snapshot)
	go func() {
		snap, _ := m.Snapshot()
		late <- snap
	}()
	<-own.read
	now := must.Get(m.Snapshot())(t)
	close(own.goOn)
	assert.Same(t, now, <-late)
	assert.Same(t, now, must.Get(m.Snapshot())(t), "it is the same until something changes")
}
