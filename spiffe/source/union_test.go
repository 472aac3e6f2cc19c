package source_test

import (
	"bytes"
	"crypto/x509"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/tokens/jws"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/source"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func rootsIn(t testing.TB, m interface {
	Snapshot() (*spiffe.Snapshot, error)
}, td spiffe.TrustDomain) []*x509.Certificate {
	t.Helper()
	snap, err := m.Snapshot()
	require.NoError(t, err)
	b, err := snap.Bundle(td)
	require.NoError(t, err)
	return slices.Collect(b.X509Authorities())
}

// hasRoots checks that there are these roots, in their order.
func hasRoots(t testing.TB, m source.Source, td spiffe.TrustDomain, cas ...*spiffetest.CA) {
	t.Helper()
	var want []*x509.Certificate
	for _, ca := range cas {
		want = append(want, ca.Root())
	}
	slices.SortFunc(want, func(a, b *x509.Certificate) int { return bytes.Compare(a.Raw, b.Raw) })
	assert.Equal(t, want, rootsIn(t, m, td))
	b, err := m.Bundle(td)
	require.NoError(t, err)
	assert.Equal(t, want, slices.Collect(b.X509Authorities()))
}

func configured(t testing.TB, entries ...source.Roots) *source.Configured {
	t.Helper()
	c := new(source.Configured)
	require.NoError(t, c.Set(entries))
	return c
}

func of(td spiffe.TrustDomain, cas ...*spiffetest.CA) source.Roots {
	r := source.Roots{TrustDomains: []spiffe.TrustDomain{td}}
	for _, ca := range cas {
		r.PEM = append(r.PEM, ca.Bundle().MarshalPEM()...)
	}
	return r
}

// TestUnion joins what an identity's source, files, the configuration of a mesh and federation have.
func TestUnion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca, more, file := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
		partner, other := spiffetest.NewCA(t, "partner.test"), spiffetest.NewCA(t, "partner.test")
		own, abroadTD := ca.TrustDomain(), partner.TrustDomain()
		src := &flip{Source: ca.Source("/web")}
		var files, federated abroad
		files.put(t, file.Bundle())
		federated.put(t, partner.Bundle())
		mesh := configured(t, of(own, more, ca), of(abroadTD, other, partner))
		m, err := source.NewUnion(own, src, &files, mesh, &federated)
		require.NoError(t, err)
		defer m.Close()
		hasRoots(t, m, own, ca, more, file)
		hasRoots(t, m, abroadTD, partner, other)
		_, err = m.Bundle(spiffe.MustParseTrustDomain("unknown.test"))
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

		// The place of a root does not matter, nor a renewal: the bundles stay the same.
		before, err := m.Snapshot()
		require.NoError(t, err)
		files.put(t, more.Bundle())
		require.NoError(t, mesh.Set([]source.Roots{of(own, file, ca), of(abroadTD, partner, other)}))
		src.Renew()
		after, err := m.Snapshot()
		require.NoError(t, err)
		assert.NotSame(t, before, after)
		assert.Same(t, before.Bundles(), after.Bundles())

		// What one takes away is away, unless another has it.
		changed := m.Changed()
		require.NoError(t, mesh.Set([]source.Roots{of(own), of(abroadTD, partner)}))
		<-changed
		hasRoots(t, m, own, ca, more)
		hasRoots(t, m, abroadTD, partner)
		changed = m.Changed()
		federated.put(t)
		<-changed
		hasRoots(t, m, abroadTD, partner)
		require.NoError(t, mesh.Set(nil))
		_, err = m.Bundle(abroadTD)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		hasRoots(t, m, own, ca, more)
		files.put(t)
		hasRoots(t, m, own, ca)

		// What is too much replaces nothing.
		var crowd []*x509.Certificate
		for i := range jws.MaxSetKeys {
			c := *more.Root()
			c.Raw = append([]byte{byte(i), byte(i >> 8)}, c.Raw...)
			crowd = append(crowd, &c)
		}
		b, err := spiffe.NewBundle(own, spiffe.BundleContents{X509Authorities: crowd})
		require.NoError(t, err)
		files.put(t, b)
		hasRoots(t, m, own, ca)
		fresh, err := source.NewUnion(own, src, &files)
		require.NoError(t, err)
		defer fresh.Close()
		_, err = fresh.Snapshot()
		require.ErrorIs(t, err, spiffe.ErrTooLarge)
		files.put(t, more.Bundle())
		hasRoots(t, m, own, ca, more)
	})
}

// TestUnionOfTooManyAbroad has a partner with more roots than a bundle has: this is no reason to have no identity.
func TestUnionOfTooManyAbroad(t *testing.T) {
	t.Parallel()
	ca, partner := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "partner.test")
	var crowd []*x509.Certificate
	for i := range jws.MaxSetKeys {
		c := *partner.Root()
		c.Raw = append([]byte{byte(i), byte(i >> 8)}, c.Raw...)
		crowd = append(crowd, &c)
	}
	many, err := spiffe.NewBundle(partner.TrustDomain(), spiffe.BundleContents{X509Authorities: crowd})
	require.NoError(t, err)
	set, err := spiffe.NewBundleSet(ca.Bundle(), many)
	require.NoError(t, err)
	own := &static{flip{Source: ca.Source("/web")}, spiffe.NewSnapshot(ca.SVID("/web"), set)}
	mesh := configured(t, of(partner.TrustDomain(), partner))
	m, err := source.NewUnion(ca.TrustDomain(), own, mesh)
	require.NoError(t, err)
	defer m.Close()
	hasRoots(t, m, ca.TrustDomain(), ca)
	snap, err := m.Snapshot()
	require.NoError(t, err)
	_, err = snap.Bundle(partner.TrustDomain())
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, "none rather than some of them")
	_, err = m.Bundle(partner.TrustDomain())
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = m.Bundle(spiffe.MustParseTrustDomain("unknown.test"))
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	own.snap = spiffe.NewSnapshot(ca.SVID("/web"), ca.Bundles())
	hasRoots(t, m, partner.TrustDomain(), partner)
}

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
	m, err := source.NewMerge(ca.TrustDomain(), own)
	require.NoError(t, err)
	defer m.Close()
	late := make(chan *spiffe.Snapshot)
	go func() {
		snap, _ := m.Snapshot()
		late <- snap
	}()
	<-own.read
	now, err := m.Snapshot()
	require.NoError(t, err)
	close(own.goOn)
	assert.Same(t, now, <-late)
	again, err := m.Snapshot()
	require.NoError(t, err)
	assert.Same(t, now, again, "it is the same until something changes")
}

// TestUnionKeepsTheRest has the keys for tokens and the sequence of the own source.
func TestUnionKeepsTheRest(t *testing.T) {
	t.Parallel()
	ca, more := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	n := uint64(7)
	c := ca.Bundle().Contents()
	c.Sequence = &n
	b, err := spiffe.NewBundle(ca.TrustDomain(), c)
	require.NoError(t, err)
	set, err := spiffe.NewBundleSet(b)
	require.NoError(t, err)
	m, err := source.NewUnion(ca.TrustDomain(), &static{flip{Source: ca.Source("/web")}, spiffe.NewSnapshot(ca.SVID("/web"), set)}, configured(t, of(ca.TrustDomain(), more)))
	require.NoError(t, err)
	defer m.Close()
	got, err := m.Bundle(ca.TrustDomain())
	require.NoError(t, err)
	seq, ok := got.Sequence()
	assert.True(t, ok && seq == 7)
	assert.Len(t, rootsIn(t, m, ca.TrustDomain()), 2)
}

// static is a source with a snapshot of its own.
type static struct {
	flip
	snap *spiffe.Snapshot
}

func (s *static) Snapshot() (*spiffe.Snapshot, error)                  { return s.snap, nil }
func (s *static) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return s.snap.Bundle(td) }

// TestUnionWithoutAnIdentity verifies peers before there is an identity.
func TestUnionWithoutAnIdentity(t *testing.T) {
	t.Parallel()
	ca, more := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	src := ca.Source("/web")
	src.Fail(assert.AnError)
	m, err := source.NewUnion(ca.TrustDomain(), &flip{Source: src}, configured(t, of(ca.TrustDomain(), more)))
	require.NoError(t, err)
	defer m.Close()
	_, err = m.Snapshot()
	require.ErrorIs(t, err, assert.AnError)
	b, err := m.Bundle(ca.TrustDomain())
	require.NoError(t, err)
	assert.Contains(t, slices.Collect(b.X509Authorities()), more.Root())
	_, err = source.NewUnion(spiffe.TrustDomain{}, src2(src))
	require.ErrorIs(t, err, spiffe.ErrZero)
}

func src2(s *spiffetest.Source) source.Source { return &flip{Source: s} }

// TestConfigured sets roots, good and bad.
func TestConfigured(t *testing.T) {
	t.Parallel()
	one, two := spiffetest.NewCA(t, "one.test"), spiffetest.NewCA(t, "two.test")
	a, b := one.TrustDomain(), two.TrustDomain()
	var c source.Configured
	assert.Same(t, c.Bundles(), c.Bundles())
	assert.Zero(t, c.Bundles().Len())
	_, err := c.Bundle(a)
	require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)

	changed := c.Changed()
	good := []source.Roots{{PEM: one.Bundle().MarshalPEM(), TrustDomains: []spiffe.TrustDomain{a, b}}, of(b, two, two)}
	require.NoError(t, c.Set(good))
	<-changed
	set := c.Bundles()
	in := func(td spiffe.TrustDomain) int {
		bundle, err := c.Bundle(td)
		require.NoError(t, err)
		return len(slices.Collect(bundle.X509Authorities()))
	}
	assert.Equal(t, []int{1, 2}, []int{in(a), in(b)})

	_, key, err := one.SVID("/x").MarshalPEM()
	require.NoError(t, err)
	certs, _, err := one.SVID("/x").MarshalPEM()
	require.NoError(t, err)
	changed = c.Changed()
	for name, bad := range map[string]source.Roots{
		"no trust domain":   {PEM: one.Bundle().MarshalPEM()},
		"zero trust domain": {PEM: one.Bundle().MarshalPEM(), TrustDomains: []spiffe.TrustDomain{{}}},
		"empty, and zero":   {TrustDomains: []spiffe.TrustDomain{{}}},
		"a key":             {PEM: key, TrustDomains: []spiffe.TrustDomain{a}},
		"a leaf":            {PEM: certs, TrustDomains: []spiffe.TrustDomain{a}},
		"text":              {PEM: []byte("roots"), TrustDomains: []spiffe.TrustDomain{a}},
		"half":              {PEM: one.Bundle().MarshalPEM()[:100], TrustDomains: []spiffe.TrustDomain{a}},
		"too many":          {PEM: bytes.Repeat(one.Bundle().MarshalPEM(), 3000), TrustDomains: []spiffe.TrustDomain{a}},
	} {
		err := c.Set([]source.Roots{of(a, one), bad})
		require.ErrorContains(t, err, "source: configured: ", name)
		assert.NotContains(t, err.Error(), strings.Split(string(key), "\n")[1], name)
		assert.Same(t, set, c.Bundles(), name)
	}
	require.NoError(t, c.Set([]source.Roots{of(b, two), of(b, one), of(a, one)}))
	assert.Same(t, set, c.Bundles(), "the same roots")
	select {
	case <-changed:
		t.Error("nothing has changed")
	default:
	}

	require.NoError(t, c.Set([]source.Roots{of(a), of(b, two)}))
	<-changed
	assert.Equal(t, []int{0, 1}, []int{in(a), in(b)}, "an empty entry is a statement")
	changed = c.Changed()
	require.NoError(t, c.Set(nil))
	<-changed
	assert.Zero(t, c.Bundles().Len())
}
