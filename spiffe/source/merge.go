package source

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/certs/certchain"
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

// merge is a [Source] with the identity of one source and the bundles of several.
type merge struct {
	td        spiffe.TrustDomain
	own       Source
	federated []Federated
	union     bool // see NewUnion

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

// NewMerge returns a Source with the identity of own, which must be of td, and the bundles of own and of the federated
// sources. The bundle of td is always that of own. The bundle of another trust domain comes from the first of the federated
// sources that has it, and from own if none has.
//
// The program starts and closes the sources. Ready waits for own alone. Changed tells of changes of any of them: while
// its channel is waited for there is a goroutine for each source. Close ends these, and closes no source.
func NewMerge(td spiffe.TrustDomain, own Source, federated ...Federated) (Source, error) {
	m, err := newMerge(td, own, federated)
	if err != nil {
		return nil, err // and not a nil *merge
	}
	return m, nil
}

func newMerge(td spiffe.TrustDomain, own Source, federated []Federated) (*merge, error) {
	switch {
	case td.IsZero():
		return nil, fmt.Errorf("source: merge: %w: the own trust domain is required, as no other source may speak for it", spiffe.ErrZero)
	case own == nil || slices.Contains(federated, nil):
		return nil, errors.New("source: merge: a source is nil")
	}
	return &merge{td: td, own: own, federated: slices.Clone(federated)}, nil
}

// NewUnion is NewMerge for sources that add to each other: a trust domain, the own one included, has the X.509
// authorities of all sources that have a bundle of it, each once and in an order that does not depend on the source.
// Everything else in the bundle, such as the keys for tokens, is that of the own source, or else of the first that has
// it.
//
// So each of the sources can make the own trust domain trust a root. Files and configuration of the operator may be
// such sources; a *federation.Manager speaks only for the trust domains that the program has listed for it.
//
// A root is trusted while any of the sources has it: what all of them take away is gone, and a bundle without
// authorities adds nothing. If the union would have more than [spiffe.MaxBundleKeys] authorities, the previous one
// stays; if there is none, Bundle returns an error that wraps [spiffe.ErrTooLarge], and so does Snapshot for the own
// trust domain, while it leaves out another one.
func NewUnion(td spiffe.TrustDomain, own Source, sources ...Federated) (Source, error) {
	m, err := newMerge(td, own, sources)
	if err != nil {
		return nil, err
	}
	m.union = true
	return m, nil
}

// SVID returns the identity of the own source. One of another trust domain is an error.
func (m *merge) SVID() (*spiffe.SVID, error) {
	svid, err := m.own.SVID()
	if err != nil {
		return nil, err
	}
	if err := m.check(svid); err != nil {
		return nil, err
	}
	return svid, nil
}

func (m *merge) check(svid *spiffe.SVID) error {
	if td := svid.ID().TrustDomain(); td != m.td {
		return fmt.Errorf("source: merge: the own source has an identity of %q, and was said to be of %q", td, m.td)
	}
	return nil
}

// Bundle returns the bundle of td. The error for an unknown one wraps [spiffe.ErrUnknownTrustDomain].
func (m *merge) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if m.union {
		return m.unionOf(td)
	}
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
// own source, or of SVID.
func (m *merge) Snapshot() (*spiffe.Snapshot, error) {
	own, err := m.own.Snapshot()
	if err != nil {
		return nil, err
	}
	if c := m.cur.Load(); c != nil && c.own == own && m.unchanged(c.sets) {
		return c.snap, nil
	}
	m.mu.Lock() // or else two readers would make two of it, or one that was held up would bring back what was before
	defer m.mu.Unlock()
	if own, err = m.own.Snapshot(); err != nil {
		return nil, err
	}
	svid, _ := own.SVID() // of a snapshot: never an error
	if err := m.check(svid); err != nil {
		return nil, err
	}
	if c := m.cur.Load(); c != nil && c.own == own && m.unchanged(c.sets) {
		return c.snap, nil
	}
	c := &merged{own: own, sets: make([]*spiffe.BundleSet, len(m.federated))}
	for i, f := range m.federated {
		c.sets[i] = f.Bundles()
	}
	bundles := c.merged
	if m.union {
		bundles = c.united
	}
	before, _ := spiffe.NewBundleSet()
	if last := m.cur.Load(); last != nil {
		before = last.snap.Bundles()
	}
	set, err := bundles(m.td, before)
	if err != nil {
		return nil, fmt.Errorf("source: merge: %w", err)
	}
	if set.Equal(before) { // so that readers see that nothing has changed
		set = before
	}
	c.snap = spiffe.NewSnapshot(svid, set)
	m.cur.Store(c)
	return c.snap, nil
}

// merged returns the bundles of NewMerge.
func (c *merged) merged(td spiffe.TrustDomain, _ *spiffe.BundleSet) (*spiffe.BundleSet, error) {
	all := map[spiffe.TrustDomain]*spiffe.Bundle{}
	add := func(set *spiffe.BundleSet) {
		for b := range set.All() {
			all[b.TrustDomain()] = b
		}
	}
	add(c.own.Bundles())
	for _, set := range slices.Backward(c.sets) { // the first one last, which replaces the others
		add(set)
	}
	delete(all, td)
	if b, err := c.own.Bundle(td); err == nil {
		all[td] = b
	}
	return spiffe.NewBundleSet(slices.Collect(maps.Values(all))...) // fails for a nil or a second bundle only
}

// united returns the bundles of NewUnion.
func (c *merged) united(own spiffe.TrustDomain, before *spiffe.BundleSet) (*spiffe.BundleSet, error) {
	parts := map[spiffe.TrustDomain][]*spiffe.Bundle{}
	for _, set := range append([]*spiffe.BundleSet{c.own.Bundles()}, c.sets...) {
		for b := range set.All() {
			parts[b.TrustDomain()] = append(parts[b.TrustDomain()], b)
		}
	}
	var all []*spiffe.Bundle
	for td, bundles := range parts {
		b, err := unite(bundles)
		if err == nil {
			b = known(before, b)
		} else if b, _ = before.Bundle(td); b == nil && td == own {
			return nil, err
		}
		if b != nil { // without another trust domain there is an identity all the same
			all = append(all, b)
		}
	}
	return spiffe.NewBundleSet(all...)
}

// unite returns the first of the bundles of a trust domain with the X.509 authorities of all of them.
func unite(bundles []*spiffe.Bundle) (*spiffe.Bundle, error) {
	c := bundles[0].Contents()
	for _, b := range bundles[1:] {
		c.X509Authorities = slices.AppendSeq(c.X509Authorities, b.X509Authorities())
	}
	c.X509Authorities = certchain.Set(c.X509Authorities)
	return spiffe.NewBundle(bundles[0].TrustDomain(), c)
}

// unionOf is Bundle of a NewUnion, which has bundles while there is no identity, too, and says why there is none.
func (m *merge) unionOf(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if snap, err := m.Snapshot(); err == nil {
		if b, err := snap.Bundle(td); err == nil {
			return b, nil
		}
	}
	first, err := m.own.Bundle(td)
	var parts []*spiffe.Bundle
	if err == nil {
		parts = append(parts, first)
	}
	for _, f := range m.federated {
		if b, err := f.Bundle(td); err == nil {
			parts = append(parts, b)
		}
	}
	if len(parts) == 0 {
		return nil, err
	}
	return unite(parts)
}

func (m *merge) unchanged(sets []*spiffe.BundleSet) bool {
	for i, f := range m.federated {
		if f.Bundles() != sets[i] {
			return false
		}
	}
	return true
}

// Changed returns a channel that is closed when one of the sources changes. Take it before reading, so that no
// change is missed. While a channel is waited for there is a goroutine for each source, which Close ends.
func (m *merge) Changed() <-chan struct{} {
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

// Ready waits until the own source is ready. It does not wait for the federated ones.
func (m *merge) Ready(ctx context.Context) error { return m.own.Ready(ctx) }

// Close ends what waits for changes, and returns nil. It does not close the sources.
func (m *merge) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.closed && m.stop != nil {
		m.stop()
	}
	m.closed = true
	return nil
}
