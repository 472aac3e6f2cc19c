package gospiffe_test

import (
	"crypto"
	"crypto/ed25519"
	"errors"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	"github.com/spiffe/go-spiffe/v2/bundle/spiffebundle"
	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var (
	td      = spiffe.MustParseTrustDomain("example.org")
	theirTD = spiffeid.RequireTrustDomainFromString("example.org")
)

func newKey(t testing.TB) crypto.PublicKey {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return key.Public()
}

// fullBundle has all that a bundle can have.
func fullBundle(t testing.TB, ca *spiffetest.CA) *spiffe.Bundle {
	t.Helper()
	c := ca.Bundle().Contents()
	c.JWTAuthorities = map[string]crypto.PublicKey{"jwt-1": newKey(t), "jwt-2": newKey(t)}
	c.WITAuthorities = map[string]crypto.PublicKey{"wit-1": newKey(t)}
	c.Sequence, c.RefreshHint = new(uint64(1<<63+1)), time.Minute
	return must.Get(spiffe.NewBundle(ca.TrustDomain(), c))(t)
}

func toBundle(t testing.TB, b *spiffe.Bundle) *spiffebundle.Bundle {
	t.Helper()
	theirs, err := gospiffe.ToBundleSource(b).GetBundleForTrustDomain(spiffeid.RequireTrustDomainFromString(b.TrustDomain().String()))
	require.NoError(t, err)
	return theirs
}

func TestBundles(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ca.Rotate()
	empty := must.Get(spiffe.NewBundle(td, spiffe.BundleContents{}))(t)
	for _, ours := range []*spiffe.Bundle{fullBundle(t, ca), ca.Bundle(), empty} {
		theirs := toBundle(t, ours)
		back := must.Get(gospiffe.FromBundleSource(theirs).Bundle(td))(t)
		assert.True(t, ours.Equal(back))

		// They write the same document, so that go-spiffe has it as it would have read it.
		doc := must.Get(ours.Marshal())(t)
		read := must.Get(spiffebundle.Parse(theirTD, doc))(t)
		assert.True(t, read.Equal(theirs))

		// Changes of theirs do not reach ours.
		theirs.SetX509Authorities(nil)
		theirs.SetJWTAuthorities(nil)
		assert.True(t, ours.Equal(back))
	}
	_, err := gospiffe.ToBundleSource(&spiffe.Bundle{}).GetBundleForTrustDomain(spiffeid.TrustDomain{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

func TestBundlesRefused(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ed, _ := must.Get2(ed25519.GenerateKey(nil))(t)
	for name, spoil := range map[string]func(*spiffebundle.Bundle){
		"a leaf as authority":     func(b *spiffebundle.Bundle) { b.AddX509Authority(ca.SVID("/web").Leaf()) },
		"a kind of key":           func(b *spiffebundle.Bundle) { require.NoError(t, b.AddJWTAuthority("ed", ed)) },
		"no key":                  func(b *spiffebundle.Bundle) { require.NoError(t, b.AddJWTAuthority("nil", nil)) },
		"no key ID":               func(b *spiffebundle.Bundle) { b.SetJWTAuthorities(map[string]crypto.PublicKey{"": newKey(t)}) },
		"a key ID for two uses":   func(b *spiffebundle.Bundle) { require.NoError(t, b.AddWITAuthority("jwt-1", newKey(t))) },
		"a negative refresh hint": func(b *spiffebundle.Bundle) { b.SetRefreshHint(-time.Second) },
		"half a second":           func(b *spiffebundle.Bundle) { b.SetRefreshHint(time.Second / 2) },
	} {
		theirs := toBundle(t, fullBundle(t, ca))
		spoil(theirs)
		b, err := gospiffe.FromBundleSource(theirs).Bundle(td)
		assert.Nil(t, b, name)
		assert.ErrorContains(t, err, `"example.org"`, name)
	}
	_, err := gospiffe.FromBundleSource((*spiffebundle.Bundle)(nil)).Bundle(spiffe.TrustDomain{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

func TestBundleSourceSuite(t *testing.T) {
	t.Parallel()
	one, two := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	set := must.Get(spiffe.NewBundleSet(fullBundle(t, one), fullBundle(t, two)))(t)
	theirs := gospiffe.ToBundleSource(set)
	for name, src := range map[string]spiffe.BundleSource{
		"X.509": gospiffe.FromX509BundleSource(theirs), "JWT": gospiffe.FromJWTBundleSource(theirs), "both": gospiffe.FromBundleSource(theirs),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
				return src, []spiffe.TrustDomain{one.TrustDomain(), two.TrustDomain()}
			})
		})
	}
}

// An authority that is added or removed in place counts at once, and what does not change is the same value.
func TestFromBundleSources(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	full := fullBundle(t, ca)
	old, key := ca.Root(), newKey(t)
	ca.Rotate()
	added := ca.Root()

	x509Only, jwtOnly := x509bundle.NewSet(toBundle(t, full).X509Bundle()), jwtbundle.NewSet(toBundle(t, full).JWTBundle())
	both := spiffebundle.NewSet(toBundle(t, full))
	x, _ := x509Only.Get(theirTD)
	j, _ := jwtOnly.Get(theirTD)
	s, _ := both.Get(theirTD)
	for name, c := range map[string]struct {
		src                 spiffe.BundleSource
		add, remove, forget func()
		count               func(*spiffe.Bundle) int
	}{
		"X.509": {
			gospiffe.FromX509BundleSource(x509Only), func() { x.AddX509Authority(added) }, func() { x.RemoveX509Authority(old) },
			func() { x509Only.Remove(theirTD) },
			func(b *spiffe.Bundle) int { return len(b.Contents().X509Authorities) },
		},
		"JWT": {
			gospiffe.FromJWTBundleSource(jwtOnly), func() { _ = j.AddJWTAuthority("new", key) }, func() { j.RemoveJWTAuthority("jwt-2") },
			func() { jwtOnly.Remove(theirTD) },
			func(b *spiffe.Bundle) int { return len(b.Contents().JWTAuthorities) - 1 },
		},
		"both": {
			gospiffe.FromBundleSource(both), func() { s.AddX509Authority(added) }, func() { s.RemoveX509Authority(old) },
			func() { both.Remove(theirTD) },
			func(b *spiffe.Bundle) int { return len(b.Contents().X509Authorities) },
		},
		// Each call of this one gives another X.509 bundle with the same contents.
		"parts of both": {
			gospiffe.FromX509BundleSource(s), func() {}, func() {}, func() {}, nil,
		},
	} {
		first := must.Get(c.src.Bundle(td))(t, name)
		again := must.Get(c.src.Bundle(td))(t, name)
		assert.Same(t, first, again, name)
		if c.count == nil {
			continue
		}
		assert.Equal(t, 1, c.count(first), name)
		for _, want := range []struct {
			change func()
			n      int
		}{{c.add, 2}, {c.remove, 1}} {
			want.change()
			b := must.Get(c.src.Bundle(td))(t, name)
			assert.NotSame(t, again, b, name)
			assert.Equal(t, want.n, c.count(b), name)
			again = b
		}
		assert.Equal(t, 1, c.count(first), "%s: what was handed out does not change", name)
		c.forget()
		_, err := c.src.Bundle(td)
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, name)
	}
}

// crossed is a source that has the wrong bundle for every trust domain, or none.
type crossed struct{ none bool }

func (c crossed) GetBundleForTrustDomain(spiffeid.TrustDomain) (*spiffebundle.Bundle, error) {
	if c.none {
		return nil, nil
	}
	return spiffebundle.New(spiffeid.RequireTrustDomainFromString("evil.test")), nil
}

func (c crossed) GetX509BundleForTrustDomain(td spiffeid.TrustDomain) (*x509bundle.Bundle, error) {
	b, _ := c.GetBundleForTrustDomain(td)
	if b == nil {
		return nil, nil
	}
	return b.X509Bundle(), nil
}

func (c crossed) GetJWTBundleForTrustDomain(td spiffeid.TrustDomain) (*jwtbundle.Bundle, error) {
	b, _ := c.GetBundleForTrustDomain(td)
	if b == nil {
		return nil, nil
	}
	return b.JWTBundle(), nil
}

func (c crossed) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	if c.none {
		return nil, nil
	}
	return spiffe.NewBundle(spiffe.MustParseTrustDomain("evil.test"), spiffe.BundleContents{})
}

// A source that answers for another trust domain, or with nothing, is not believed in either direction.
func TestBundleSourcesCrossed(t *testing.T) {
	t.Parallel()
	for _, c := range []crossed{{false}, {true}} {
		for _, src := range []spiffe.BundleSource{gospiffe.FromBundleSource(c), gospiffe.FromX509BundleSource(c), gospiffe.FromJWTBundleSource(c)} {
			b, err := src.Bundle(td)
			assert.Nil(t, b)
			assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
			_, err = src.Bundle(spiffe.TrustDomain{})
			assert.ErrorIs(t, err, spiffe.ErrZero)
		}
		theirs := gospiffe.ToBundleSource(c)
		_, err := theirs.GetBundleForTrustDomain(theirTD)
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		_, err = theirs.GetX509BundleForTrustDomain(theirTD)
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		_, err = theirs.GetJWTBundleForTrustDomain(theirTD)
		assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	}
}

func TestToBundleSource(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	full := fullBundle(t, ca)
	src := gospiffe.ToBundleSource(full)
	want := toBundle(t, full)
	for range 2 { // a reader that adds an authority adds it to its own bundle
		all := must.Get(src.GetBundleForTrustDomain(theirTD))(t)
		assert.True(t, want.Equal(all))
		x := must.Get(src.GetX509BundleForTrustDomain(theirTD))(t)
		assert.True(t, want.X509Bundle().Equal(x))
		j := must.Get(src.GetJWTBundleForTrustDomain(theirTD))(t)
		assert.True(t, want.JWTBundle().Equal(j))
		ca.Rotate()
		all.AddX509Authority(ca.Root())
		x.AddX509Authority(ca.Root())
		j.RemoveJWTAuthority("jwt-1")
	}
	other := spiffeid.RequireTrustDomainFromString("other.test")
	_, err := src.GetX509BundleForTrustDomain(other)
	assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	_, err = src.GetJWTBundleForTrustDomain(spiffeid.TrustDomain{})
	assert.ErrorIs(t, err, spiffe.ErrZero)

	down := errors.New("down")
	live := ca.Source("/web")
	live.Fail(down)
	_, err = gospiffe.ToBundleSource(live).GetBundleForTrustDomain(theirTD)
	assert.ErrorIs(t, err, down)

	assert.Panics(t, func() { gospiffe.ToBundleSource(nil) })
	assert.Panics(t, func() { gospiffe.FromBundleSource(nil) })
	assert.Panics(t, func() { gospiffe.FromX509BundleSource(nil) })
	assert.Panics(t, func() { gospiffe.FromJWTBundleSource(nil) })
}
