package source

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

// Federated has the bundles of other trust domains: a *federation.Manager, or a *filesource.Source.
type Federated interface {
	spiffe.BundleSource

	// Bundles returns all bundles. It must return the same set until one changes.
	Bundles() *spiffe.BundleSet

	// Changed returns a channel that is closed when a bundle changes.
	Changed() <-chan struct{}
}

// Merge is a [Source] with the identity of one source and the bundles of several. The bundle of the own trust domain
// is always the one of the own source. That of another trust domain comes from the first of the federated sources
// that has it, and from the own source if none has.
//
// It runs nothing: its sources are started and closed by the program. Its methods are safe for concurrent use.
type Merge struct {
	td        spiffe.TrustDomain
	own       Source
	federated []Federated

	cur atomic.Pointer[merged]

	mu      sync.Mutex
	changed chan struct{} // nil before the first
	stop    func()        // closes it
	closed  bool
}

// merged is a snapshot, and what it was made of.
type merged struct {
	own  *spiffe.Snapshot
	sets []*spiffe.BundleSet
	snap *spiffe.Snapshot
}

// NewMerge returns the Merge of own, which has an identity of td, and of the federated sources.
func NewMerge(td spiffe.TrustDomain, own Source, federated ...Federated) (*Merge, error) {
	switch {
	case td.IsZero():
		return nil, fmt.Errorf("source: merge: %w: the own trust domain is required, as no other source may speak for it", spiffe.ErrZero)
	case own == nil || slices.Contains(federated, nil):
		return nil, errors.New("source: merge: a source is nil")
	}
	return &Merge{td: td, own: own, federated: slices.Clone(federated)}, nil
}

// SVID returns the identity of the own source. One of another trust domain is an error.
func (m *Merge) SVID() (*spiffe.SVID, error) {
	svid, err := m.own.SVID()
	if err != nil {
		return nil, err
	}
	if err := m.check(svid); err != nil {
		return nil, err
	}
	return svid, nil
}

func (m *Merge) check(svid *spiffe.SVID) error {
	if td := svid.ID().TrustDomain(); td != m.td {
		return fmt.Errorf("source: merge: the own source has an identity of %q, and was said to be of %q", td, m.td)
	}
	return nil
}

// Bundle returns the bundle of td; see [Merge]. The error for an unknown one wraps [spiffe.ErrUnknownTrustDomain].
func (m *Merge) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if td != m.td {
		for _, f := range m.federated {
			if b, err := f.Bundle(td); err == nil && b.TrustDomain() == td {
				return b, nil
			}
		}
	}
	return m.own.Bundle(td)
}

// Snapshot returns the identity with all bundles. It is the same until one of them changes. The error is that of the
// own source, or of [Merge.SVID].
func (m *Merge) Snapshot() (*spiffe.Snapshot, error) {
	own, err := m.own.Snapshot()
	if err != nil {
		return nil, err
	}
	svid, _ := own.SVID() // of a snapshot: never an error
	if err := m.check(svid); err != nil {
		return nil, err
	}
	if c := m.cur.Load(); c != nil && c.own == own && m.unchanged(c.sets) {
		return c.snap, nil
	}
	m.mu.Lock() // or else two readers would make two of it
	defer m.mu.Unlock()
	if c := m.cur.Load(); c != nil && c.own == own && m.unchanged(c.sets) {
		return c.snap, nil
	}
	c := &merged{own: own, sets: make([]*spiffe.BundleSet, len(m.federated))}
	all := map[spiffe.TrustDomain]*spiffe.Bundle{}
	add := func(set *spiffe.BundleSet) {
		for b := range set.All() {
			all[b.TrustDomain()] = b
		}
	}
	add(own.Bundles())
	for i, f := range slices.Backward(m.federated) { // the first one last, which replaces the others
		c.sets[i] = f.Bundles()
		add(c.sets[i])
	}
	delete(all, m.td)
	if b, err := own.Bundle(m.td); err == nil {
		all[m.td] = b
	}
	set, _ := spiffe.NewBundleSet(slices.Collect(maps.Values(all))...) // fails for a nil or a second bundle only
	c.snap = spiffe.NewSnapshot(svid, set)
	m.cur.Store(c)
	return c.snap, nil
}

func (m *Merge) unchanged(sets []*spiffe.BundleSet) bool {
	for i, f := range m.federated {
		if f.Bundles() != sets[i] {
			return false
		}
	}
	return true
}

// Changed returns a channel that is closed when one of the sources changes. Take it before reading, so that no
// change is missed. While a channel is waited for there is a goroutine for each source, which [Merge.Close] ends.
func (m *Merge) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.changed != nil {
		select {
		case <-m.changed:
		default:
			return m.changed
		}
	}
	all := make(chan struct{})
	stop := sync.OnceFunc(func() { close(all) })
	m.changed, m.stop = all, stop
	if m.closed {
		return all
	}
	wait := func(one <-chan struct{}) {
		go func() {
			select {
			case <-one:
				stop()
			case <-all:
			}
		}()
	}
	wait(m.own.Changed())
	for _, f := range m.federated {
		wait(f.Changed())
	}
	return all
}

// Updates returns the current snapshot first, if there is one, and then each newer one until ctx is done. A loop that
// is slow skips to the newest.
func (m *Merge) Updates(ctx context.Context) iter.Seq[*spiffe.Snapshot] {
	return renew.Follow(ctx, m.Changed, func() *spiffe.Snapshot {
		snap, _ := m.Snapshot() // nil if there is none
		return snap
	})
}

// Ready waits until the own source is ready. It does not wait for the federated ones.
func (m *Merge) Ready(ctx context.Context) error { return m.own.Ready(ctx) }

// Close ends what waits for changes, and returns nil. It does not close the sources.
func (m *Merge) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed && m.stop != nil {
		m.stop()
	}
	m.closed = true
	return nil
}
