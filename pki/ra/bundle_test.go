package ra_test

import (
	"crypto/x509"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// source is a bundle that changes.
type source struct {
	mu  sync.Mutex
	b   *spiffe.Bundle
	err error
}

func (s *source) Bundle(spiffe.TrustDomain) (*spiffe.Bundle, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b, s.err
}

func (s *source) set(b *spiffe.Bundle, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.b, s.err = b, err
}

func roots(a *ra.RA) []string {
	var names []string
	for c := range a.Bundle().X509Authorities() {
		names = append(names, c.Subject.CommonName)
	}
	slices.Sort(names)
	return names
}

func TestBundle(t *testing.T) {
	t.Parallel()
	one, two := newAuthority(t, "one", nil), newAuthority(t, "two", nil)
	s := &source{b: bundle(t, one)}
	a := start(t, bubble(t), nil).ra(func(c *ra.Config) {
		c.Roots, c.SignerDomain = s, "signers.test"
	})
	b := a.Bundle()
	assert.Equal(t, []string{"one"}, roots(a))
	assert.Equal(t, td, b.TrustDomain())
	_, has := b.Sequence()
	assert.False(t, has)
	assert.Same(t, b, a.Bundle(), "nothing has changed")
	s.set(bundle(t, one), nil)
	assert.Same(t, b, a.Bundle(), "the same roots, in a new bundle")

	s.set(bundle(t, one, two), nil)
	assert.Equal(t, []string{"one", "two"}, roots(a))
	assert.NotSame(t, b, a.Bundle())

	// what a source gave last
	b = a.Bundle()
	for _, fails := range []func(){func() { s.set(nil, errors.New("down")) }, func() { s.set(nil, nil) }} {
		fails()
		assert.Same(t, b, a.Bundle())
	}
	s.set(bundle(t, two), nil)
	assert.Equal(t, []string{"two"}, roots(a))
}

// A source that has nothing to give yet.
func TestBundleNotReady(t *testing.T) {
	t.Parallel()
	root := newAuthority(t, "root", nil)
	s := &source{err: errors.New("not fetched yet")}
	c := start(t, bubble(t), certifying(t, root))
	a := c.ra(func(c *ra.Config) { c.Roots = s })
	require.NotNil(t, a.Bundle())
	assert.Empty(t, roots(a))
	_, err := a.Sign(t.Context(), web(t))
	signError(t, err, spiffe.ErrNotReady, "not fetched yet")
	s.set(nil, nil)
	_, err = a.Sign(t.Context(), web(t))
	signError(t, err, spiffe.ErrNotReady)
	foreign, err := spiffe.NewBundle(spiffe.MustParseTrustDomain("example.com"), spiffe.BundleContents{X509Authorities: []*x509.Certificate{root.cert}})
	require.NoError(t, err)
	s.set(foreign, nil)
	_, err = a.Sign(t.Context(), web(t))
	signError(t, err, spiffe.ErrNotReady, "of another trust domain")
	assert.Empty(t, roots(a))
	assert.Zero(t, c.Count("POST", csrs), "for nothing")

	s.set(bundle(t, root), nil)
	must.Get(a.Sign(t.Context(), web(t)))(t)
	assert.Equal(t, []string{"root"}, roots(a))
}

// Roots that change while a signer works are those of the end.
func TestRootsRotate(t *testing.T) {
	t.Parallel()
	old, next := newAuthority(t, "old", nil), newAuthority(t, "new", nil)
	s := &source{b: bundle(t, old)}
	c := start(t, bubble(t), func(o *object) {
		s.set(bundle(t, old, next), nil)
		certifying(t, next)(o)
	})
	must.Get(c.ra(func(c *ra.Config) { c.Roots = s }).Sign(t.Context(), web(t)))(t)

	// and those of the beginning, if the source fails meanwhile
	s.set(bundle(t, old), nil)
	c = start(t, bubble(t), func(o *object) {
		s.set(nil, errors.New("down"))
		certifying(t, old)(o)
	})
	must.Get(c.ra(func(c *ra.Config) { c.Roots = s }).Sign(t.Context(), web(t)))(t)
}

func learning(c *ra.Config) { c.LearnRoots = true }

func TestLearnRoots(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-6")
	synctest.Test(t, func(t *testing.T) {
		root, other := newAuthority(t, "root", nil), newAuthority(t, "other", nil)
		between := newAuthority(t, "between", root)
		var answer func(o *object)
		c := start(t, bubble(t), func(o *object) { answer(o) })
		a := c.ra(learning)
		assert.Empty(t, roots(a), "nothing is known yet")
		sign := func(life time.Duration, by *authority, rest ...*x509.Certificate) ([]*x509.Certificate, error) {
			answer = func(o *object) {
				o.Status.Certificate = encode(append([]*x509.Certificate{by.leaf(t, o.csr(t), life)}, rest...)...)
			}
			return a.Sign(t.Context(), web(t))
		}
		chain := must.Get(sign(time.Hour, between, between.cert, root.cert))(t)
		assert.Equal(t, []*x509.Certificate{between.cert}, chain[1:])
		assert.Equal(t, []string{"root"}, roots(a))
		b := a.Bundle()
		chain = must.Get(sign(2*time.Hour, root, root.cert))(t)
		assert.Len(t, chain, 1)
		assert.Same(t, b, a.Bundle(), "known already")

		chain = must.Get(sign(time.Hour, other, other.cert))(t)
		assert.Len(t, chain, 1)
		assert.Equal(t, []string{"other", "root"}, roots(a))

		// a CA that is no root counts, too, and then stays out of the chain
		chain = must.Get(sign(time.Minute, between, between.cert))(t)
		assert.Len(t, chain, 1)
		assert.Equal(t, []string{"between", "other", "root"}, roots(a))
		must.Get(chain[0].Verify(x509.VerifyOptions{Roots: a.Bundle().CertPool()}))(t)

		// what answers with nothing to trust, or with something that does not fit, teaches nothing
		b = a.Bundle()
		unrelated := newAuthority(t, "unrelated", nil)
		_, err := sign(time.Hour, unrelated)
		signError(t, err, ca.ErrGeneration, "there is no root to learn: configure the roots of the signer")
		_, err = sign(time.Hour, root, unrelated.cert)
		signError(t, err, ca.ErrGeneration, "signed by unknown authority")
		_, err = sign(time.Hour, unrelated, root.leaf(t, &x509.CertificateRequest{PublicKey: unrelated.key.Public()}, time.Hour))
		signError(t, err, ca.ErrGeneration, "not a CA")
		_, err = sign(91*24*time.Hour, unrelated, unrelated.cert)
		signError(t, err, ca.ErrGeneration, "the longest lifetime is 2160h0m0s")
		assert.Same(t, b, a.Bundle())

		// a root goes when the last certificate that leads to it has ended
		time.Sleep(2 * time.Minute)
		assert.Equal(t, []string{"other", "root"}, roots(a))
		time.Sleep(59 * time.Minute)
		assert.Equal(t, []string{"root"}, roots(a))
		time.Sleep(time.Hour)
		assert.Empty(t, roots(a))
	})
}

// Where roots are configured, answers teach nothing.
func TestLearnRootsOnlyWhereNone(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-3.8-6")
	root, unrelated := newAuthority(t, "root", nil), newAuthority(t, "unrelated", nil)
	c := start(t, bubble(t), func(o *object) {
		o.Status.Certificate = encode(unrelated.leaf(t, o.csr(t), time.Hour), unrelated.cert)
	})
	a := c.ra(trust(t, root), learning)
	_, err := a.Sign(t.Context(), web(t))
	signError(t, err, ca.ErrGeneration, "signed by unknown authority")
	assert.Equal(t, []string{"root"}, roots(a))
}

// A signer with a new root for each certificate does not fill the memory.
func TestLearnRootsBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := instant(func(o *object) []byte {
			root := newAuthority(t, "root", nil)
			return encode(root.leaf(t, o.csr(t), time.Hour), root.cert)
		}).ra(t, learning)
		for range 64 {
			must.Get(a.Sign(t.Context(), web(t)))(t)
		}
		_, err := a.Sign(t.Context(), web(t))
		signError(t, err, ca.ErrGeneration, "64 roots with valid certificates already: configure the roots of the signers")
		assert.Len(t, roots(a), 64)
		time.Sleep(2 * time.Hour)
		_, err = a.Sign(t.Context(), web(t))
		require.NoError(t, err, "there is room again")
		assert.Len(t, roots(a), 1)
	})
}
