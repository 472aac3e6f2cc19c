package source

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/spiffe"
)

type federated = interface {
	Bundles() *spiffe.BundleSet
	Changed() <-chan struct{}
}

// merge is a [Source] with the identity of one source and the bundles of several.
type merge struct {
	td        spiffe.TrustDomain
	own       Source
	federated []federated

	cur  atomic.Pointer[merged]
	mu   sync.Mutex // held while cur is replaced
	news renew.Signal

	forward sync.Once
	stop    func()
	done    <-chan struct{} // closed by stop
}

// merged is a snapshot and its parts.
type merged struct {
	own  *spiffe.Snapshot
	sets []*spiffe.BundleSet
	snap *spiffe.Snapshot
}

// NewMerge returns a Source with the identity of own, which must be of td, and the bundles of own and of the federated
// sources. The bundle of td always comes from own. The bundle of another trust domain comes from the first federated
// source that has it, or from own if none has.
//
// The program starts and closes the sources. Ready waits only for own. Changed reports changes of any source; its
// first call starts a goroutine for each source. Close ends these goroutines and closes no source.
//
// A federated source is like a *federation.Manager or a *filesource.Source: Bundles returns the same set until a
// bundle changes, and then the channel of Changed is closed.
func NewMerge(td spiffe.TrustDomain, own Source, federated ...interface {
	Bundles() *spiffe.BundleSet
	Changed() <-chan struct{}
}) (Source, error) {
	switch {
	case td.IsZero():
		return nil, fmt.Errorf("source: merge: %w: the own trust domain is required, as no other source may "+
			"speak for it", spiffe.ErrZero)
	case own == nil || slices.Contains(federated, nil):
		return nil, errors.New("source: merge: a source is nil")
	}
	ctx, stop := context.WithCancel(context.Background())
	return &merge{td: td, own: own, federated: slices.Clone(federated), stop: stop, done: ctx.Done()}, nil
}

// SVID returns the identity of the own source. An identity of another trust domain is an error.
func (m *merge) SVID() (*spiffe.SVID, error) {
	snap, err := m.Snapshot()
	if err != nil {
		return nil, err
	}
	return snap.SVID()
}

// Bundle returns the bundle of td. The error for an unknown one wraps [spiffe.ErrUnknownTrustDomain].
func (m *merge) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if td != m.td {
		for _, f := range m.federated {
			if b, err := f.Bundles().Bundle(td); err == nil {
				return b, nil
			}
		}
	}
	return m.own.Bundle(td)
}

// Snapshot returns the identity with all bundles. The same snapshot is returned until one of them changes. It fails
// like the own source, or like SVID.
func (m *merge) Snapshot() (*spiffe.Snapshot, error) {
	if snap, _, err := m.current(); snap != nil || err != nil {
		return snap, err
	}
	m.mu.Lock() // otherwise two readers could make two snapshots, or a slow one could restore an old state
	defer m.mu.Unlock()
	snap, own, err := m.current()
	if snap != nil || err != nil {
		return snap, err
	}
	svid, _ := own.SVID() // of a snapshot: never an error
	if td := svid.ID().TrustDomain(); td != m.td {
		return nil, fmt.Errorf("source: merge: the own source has an identity of %q, and was said to be of %q", td,
			m.td)
	}
	c := &merged{own: own, sets: make([]*spiffe.BundleSet, len(m.federated))}
	for i, f := range m.federated {
		c.sets[i] = f.Bundles()
	}
	set, err := c.bundles(m.td)
	if err != nil {
		return nil, fmt.Errorf("source: merge: %w", err)
	}
	if last := m.cur.Load(); last != nil && set.Equal(last.snap.Bundles()) {
		set = last.snap.Bundles() // so that readers see that nothing has changed
	}
	c.snap = spiffe.NewSnapshot(svid, set)
	m.cur.Store(c)
	return c.snap, nil
}

// current returns the snapshot of the own source, and the last result of Snapshot if no source has changed since.
func (m *merge) current() (snap, own *spiffe.Snapshot, err error) {
	if own, err = m.own.Snapshot(); err != nil {
		return nil, nil, err
	}
	c := m.cur.Load()
	if c == nil || c.own != own {
		return nil, own, nil
	}
	for i, f := range m.federated {
		if f.Bundles() != c.sets[i] {
			return nil, own, nil
		}
	}
	return c.snap, own, nil
}

// bundles returns the bundle of td from the own source, and the bundles of the other trust domains.
func (c *merged) bundles(td spiffe.TrustDomain) (*spiffe.BundleSet, error) {
	all := map[spiffe.TrustDomain]*spiffe.Bundle{}
	add := func(set *spiffe.BundleSet) {
		for b := range set.All() {
			all[b.TrustDomain()] = b
		}
	}
	add(c.own.Bundles())
	for _, set := range slices.Backward(c.sets) { // the first set comes last, as it has priority
		add(set)
	}
	delete(all, td)
	if b, err := c.own.Bundle(td); err == nil {
		all[td] = b
	}
	return spiffe.NewBundleSet(slices.Collect(maps.Values(all))...) // fails only for a nil or duplicate bundle
}

// Changed returns a channel that is closed when one of the sources changes. Take the channel before reading, so that
// no change is missed.
func (m *merge) Changed() <-chan struct{} {
	m.forward.Do(func() {
		go m.follow(m.own.Changed(), m.own.Changed)
		for _, f := range m.federated {
			go m.follow(f.Changed(), f.Changed)
		}
	})
	return m.news.Changed()
}

// follow passes on the changes of a source until Close.
func (m *merge) follow(news <-chan struct{}, changed func() <-chan struct{}) {
	for {
		select {
		case <-news:
			news = changed()
			m.news.Notify()
		case <-m.done:
			return
		}
	}
}

// Ready waits until the own source is ready. It does not wait for the federated ones.
func (m *merge) Ready(ctx context.Context) error { return m.own.Ready(ctx) }

// Close ends the goroutines that wait for changes, and returns nil. It does not close the sources.
func (m *merge) Close() error {
	m.forward.Do(func() {}) // none from now on
	m.stop()
	m.news.Notify()
	return nil
}
