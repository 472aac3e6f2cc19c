package secretcache_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// bundle returns a bundle of the trust domain example.org.
func bundle(t *testing.T, c spiffe.BundleContents) *spiffe.Bundle {
	t.Helper()
	return must.Get(spiffe.NewBundle(domain, c))(t)
}

func set(t *testing.T, bundles ...*spiffe.Bundle) *spiffe.BundleSet {
	t.Helper()
	return must.Get(spiffe.NewBundleSet(bundles...))(t)
}

// TestBundleFirst changes the root under two identities and records, in order, what was told and
// what could be read then. No reader sees a leaf before all subscribers were told of its root,
// although the subscriber is slow.
func TestBundleFirst(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-7.3-7")
	for name, c := range map[string]struct {
		wrap   func(*spiffetest.CA) caclient.CA
		change func(*spiffetest.CA)
	}{
		"found by a leaf": {
			func(ca *spiffetest.CA) caclient.CA { return unhurried{poll(ca), t} },
			func(ca *spiffetest.CA) { ca.Rotate() },
		},
		"told by a watch, and the old one is gone": {
			func(ca *spiffetest.CA) caclient.CA { return ca },
			func(ca *spiffetest.CA) {
				ca.Prepare()
				ca.Rotate()
				ca.DropOldRoots()
			},
		},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			m := newManager(t, secretcache.Config{CA: c.wrap(ca)})
			require.NoError(t, m.Add(worker))
			first, _ := ready(t, m)
			firstWorker := must.Get(m.GenerateSecret(t.Context(), worker.String()))(t)

			var events told
			look := func(name, when string) {
				snap, err := m.Snapshot()
				assert.NoError(t, err)
				svid, _ := snap.SVID()
				b, err := snap.Bundle(domain)
				assert.NoError(t, err)
				secret, err := m.GenerateSecret(t.Context(), worker.String())
				assert.NoError(t, err)
				if svid != first {
					assert.NoError(t, must.Err(verify(t, b, svid)), "a new leaf comes with its root")
				}
				events.add(fmt.Sprintf("%s %s: root %t, leaf %t, worker %t", name, when, trusts(b, ca.Root()), svid != first, secret != firstWorker))
			}
			m.Subscribe(func(name string) {
				look(name, "begins")
				time.Sleep(time.Second)
				look(name, "ends")
			})
			c.change(ca)
			time.Sleep(31 * time.Minute)
			got := events.take()
			require.GreaterOrEqual(t, len(got), 10)
			assert.Equal(t, []string{
				"ALL begins: root true, leaf false, worker false",
				"ALL ends: root true, leaf false, worker false",
				"ROOTCA begins: root true, leaf false, worker false",
				"ROOTCA ends: root true, leaf false, worker false",
				"spiffe://example.org begins: root true, leaf false, worker false",
				"spiffe://example.org ends: root true, leaf false, worker false",
			}, got[:6])
			for _, e := range got[6:] {
				switch {
				case strings.HasPrefix(e, worker.String()):
					assert.Contains(t, e, "worker true")
				case strings.HasPrefix(e, "default "), strings.HasPrefix(e, web.String()+" "):
					assert.Contains(t, e, "leaf true")
				default: // a watch that is quick sees the bundle with both roots, and that without the old one
					assert.Contains(t, e, "root true")
				}
			}
		})
	}
}

// unhurried is a CA that wants its bundles to be polled once an hour.
type unhurried struct {
	*polled
	t *testing.T
}

func (u unhurried) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if _, err := u.polled.FetchBundles(ctx); err != nil {
		return nil, err
	}
	return set(u.t, hourly(u.t, u.ca.Bundle())), nil
}

// hourly returns b with a refresh hint of an hour, and no sequence number.
func hourly(t *testing.T, b *spiffe.Bundle) *spiffe.Bundle {
	t.Helper()
	c := b.Contents()
	c.RefreshHint, c.Sequence = time.Hour, nil
	return bundle(t, c)
}

func verify(t *testing.T, b *spiffe.Bundle, s *spiffe.SVID) (*spiffe.Peer, error) {
	t.Helper()
	return must.Get(spiffe.NewVerifier(b, spiffe.AllowAnyPeer(), nil))(t).VerifyChain(s.Chain(), spiffe.AnyRole)
}

func trusts(b *spiffe.Bundle, root *x509.Certificate) bool {
	for c := range b.X509Authorities() {
		if c.Equal(root) {
			return true
		}
	}
	return false
}

// TestCallbackThatHangs shows what a subscriber can hold back: certificates of a new root, and
// nothing else.
func TestCallbackThatHangs(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		first, stop := ready(t, m)
		release := make(chan struct{})
		m.Subscribe(func(name string) {
			if name == "ROOTCA" {
				<-release
			}
		})
		ca.Prepare()
		synctest.Wait()
		assert.Len(t, bundleOf(t, m, domain), 2, "the bundle is published")
		time.Sleep(30 * time.Minute)
		synctest.Wait()
		second := current(t, m)
		assert.NotSame(t, first, second, "renewed by the old root")

		ca.Rotate()
		time.Sleep(40 * time.Minute)
		assert.Same(t, second, current(t, m))
		assert.ErrorContains(t, status(t, m, web).Err, "a subscriber that was told of a new bundle has not returned")
		close(release)
		time.Sleep(time.Minute)
		assert.NotSame(t, second, current(t, m))
		stop()
	})
}

// TestCallbackAsks shows that a subscriber may ask for the name that it was told and wait for it, also
// if no subscriber was told of the bundle yet.
func TestCallbackAsks(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		m.Subscribe(func(name string) {
			assert.NoError(t, must.Err(m.GenerateSecret(ctx, name)), name)
		})
		require.NoError(t, m.Add(worker))
		start(t, m)
		begin := time.Now()
		must.Get(m.GenerateSecret(ctx, "default"))(t)
		must.Get(m.GenerateSecret(ctx, worker.String()))(t)
		assert.Less(t, time.Since(begin), time.Minute)
	})
}

// TestCallbackIsSlow shows that a certificate of a new root waits for a callback of its own name too, and so
// for the one of the bundle, as long as there is another to serve; and that there is a way out when
// there is none any more.
func TestCallbackIsSlow(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		first, _ := ready(t, m)
		entered, release := make(chan struct{}), make(chan struct{})
		var slow sync.Once
		m.Subscribe(func(name string) {
			if name != "default" {
				return
			}
			slow.Do(func() {
				close(entered)
				<-release
				s, err := m.GenerateSecret(t.Context(), name)
				if assert.NoError(t, err) {
					assert.True(t, s.NotAfter().After(time.Now()))
				}
			})
		})
		<-entered
		second := current(t, m)
		require.NotSame(t, first, second)
		ca.Rotate()
		time.Sleep(40 * time.Minute)
		assert.Same(t, second, current(t, m), "the subscriber was not told of the bundle")
		assert.ErrorContains(t, status(t, m, web).Err, "a subscriber that was told of a new bundle has not returned")

		ca.FailNext(1<<30, errDown)
		time.Sleep(time.Until(second.NotAfter()))
		close(release)
		synctest.Wait()
		ca.FailNext(0, nil)
		time.Sleep(time.Minute)
		third := current(t, m)
		assert.NotSame(t, second, third)
		must.Get(verify(t, ca.Bundle(), third))(t)
	})
}

// TestRootGone shows that identities are renewed at once when their root leaves the bundle, and
// served until then.
func TestRootGone(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		for i := range 20 {
			require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w/%d", i))))
		}
		first, _ := ready(t, m)
		assert.Equal(t, 21, ca.Signed())
		ca.Rotate()
		synctest.Wait()
		assert.Equal(t, 21, ca.Signed(), "the old root is still in the bundle")

		ca.Delay(time.Minute)
		ca.DropOldRoots()
		synctest.Wait()
		assert.Same(t, first, current(t, m), "served until replaced")
		begin := time.Now()
		ca.Delay(0)
		time.Sleep(time.Minute)
		synctest.Wait()
		assert.Equal(t, 42, ca.Signed())
		assert.NotSame(t, first, current(t, m))
		assert.Equal(t, time.Minute, time.Since(begin))
		time.Sleep(10 * time.Minute)
		assert.Equal(t, 42, ca.Signed(), "and no second time")
	})
}

// TestRootGoneIsUrgent shows that a certificate that peers do not accept any more counts as none for how
// long to wait, however long it has to live.
func TestRootGoneIsUrgent(t *testing.T) {
	rounds.NotShort(t)
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p, Lifetime: 20 * time.Hour})
		first, _ := ready(t, m)
		require.Greater(t, time.Until(first.NotAfter()), 19*time.Hour)
		p.signer.Store(spiffetest.NewCA(t, "example.org")) // which is not trusted
		ca.Rotate()
		ca.DropOldRoots()
		time.Sleep(30 * time.Minute)
		assert.Same(t, first, current(t, m))
		assert.Greater(t, status(t, m, web).Failures, 60)
		p.signer.Store(nil)
		time.Sleep(31 * time.Second)
		assert.NotSame(t, first, current(t, m))
	})
}

// TestReissuedRoot shows that a root that was issued anew for the same name and key is the same.
func TestReissuedRoot(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		root := func(years int) *pki.Issuer {
			i, err := pki.NewRoot(key, pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: time.Now(), NotAfter: time.Now().AddDate(years, 0, 0)})
			require.NoError(t, err)
			return i
		}
		old := root(1)
		ca := &issuerCA{issuer: old}
		ca.bundles.Store(set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{old.Certificate()}})))
		m := newManager(t, secretcache.Config{CA: ca})
		var heard told
		m.Subscribe(heard.add)
		first, _ := ready(t, m)
		heard.take()
		ca.bundles.Store(set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{root(2).Certificate()}})))
		time.Sleep(6 * time.Minute)
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org"}, heard.take())
		assert.Same(t, first, current(t, m))
	})
}

// issuerCA is a CA over a bare issuer.
type issuerCA struct {
	issuer   *pki.Issuer
	tail     answer    // what follows the leaf
	notAfter time.Time // of the leaf; zero means in an hour
	signed   atomic.Int64
	bundles  atomic.Pointer[spiffe.BundleSet]
}

func (c *issuerCA) Sign(_ context.Context, csr *pki.CSR, _ time.Duration) ([]*x509.Certificate, error) {
	c.signed.Add(1)
	end := c.notAfter
	if end.IsZero() {
		end = time.Now().Add(time.Hour)
	}
	leaf, err := c.issuer.Issue(pki.CertificateOptions{PublicKey: csr.PublicKey(), SANs: []pki.SAN{pki.IDSAN(web)}, NotBefore: time.Now(), NotAfter: end})
	return append(answer{leaf}, c.tail...), err
}

func (c *issuerCA) FetchBundles(context.Context) (*spiffe.BundleSet, error) {
	return c.bundles.Load(), nil
}

// TestRefusedBundles shows which answers replace nothing.
func TestRefusedBundles(t *testing.T) {
	t.Parallel()
	other := spiffetest.NewCA(t, "other.test")
	for want, bad := range map[string]func(*spiffetest.CA) *spiffe.BundleSet{
		"no trust bundle": func(*spiffetest.CA) *spiffe.BundleSet { return set(t, other.Bundle()) },
		"sequence number 1, and 3 was seen before": func(ca *spiffetest.CA) *spiffe.BundleSet {
			return set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{ca.Root()}, Sequence: new(uint64(1))}))
		},
		"sequence number 0, and 3": func(*spiffetest.CA) *spiffe.BundleSet {
			return set(t, bundle(t, spiffe.BundleContents{Sequence: new(uint64(0))}))
		},
		"it has no bundles": nil,
	} {
		bubble.Run(t, want, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			ca.Rotate()
			ca.Rotate()
			p := &nilBundles{polled: poll(ca)}
			m := newManager(t, secretcache.Config{CA: p})
			var heard told
			m.Subscribe(heard.add)
			ready(t, m)
			before := must.Get(m.Bundle(domain))(t)
			heard.take()

			if bad != nil {
				p.bundles.Store(bad(ca))
			} else {
				p.nothing.Store(true)
			}
			time.Sleep(20 * time.Minute)
			assert.Same(t, before, must.Get(m.Bundle(domain))(t))
			assert.Empty(t, heard.take())
			st := status(t, m, domain.ID())
			assert.ErrorContains(t, st.Err, want)
			assert.Greater(t, st.Failures, 4)
			assert.Less(t, st.Failures, 40)

			p.bundles.Store(nil)
			p.nothing.Store(false)
			time.Sleep(6 * time.Minute)
			assert.NoError(t, status(t, m, domain.ID()).Err)
		})
	}
}

// TestImplausibleBundles shows that a CA that is wrong for a moment decides nothing, and one that insists does.
func TestImplausibleBundles(t *testing.T) {
	t.Parallel()
	thief := spiffetest.NewCA(t, "example.org")
	roots := answer{thief.Root()}
	for name, bad := range map[string]spiffe.BundleContents{
		"the highest number":     {X509Authorities: roots, Sequence: new(uint64(math.MaxUint64))},
		"a time after a counter": {X509Authorities: roots, Sequence: new(uint64(946684800000))},
		"no number":              {X509Authorities: roots},
		"nothing":                {},
		"nothing, same number":   {Sequence: new(uint64(1))},
		"nothing, highest":       {Sequence: new(uint64(math.MaxUint64))},
	} {
		for _, td := range []spiffe.TrustDomain{domain, spiffe.MustParseTrustDomain("other.test")} {
			bubble.Run(t, name+"/"+td.String(), func(t *testing.T) {
				ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
				ca.Federate(other.Bundle())
				p := poll(ca)
				m := newManager(t, secretcache.Config{CA: p})
				var heard told
				m.Subscribe(heard.add)
				ready(t, m)
				before := must.Get(m.Bundle(td))(t)
				heard.take()
				wrong := must.Get(spiffe.NewBundle(td, bad))(t)
				all := ca.Bundles().With(wrong)

				p.bundles.Store(all)
				time.Sleep(10 * time.Minute)
				assert.Same(t, before, must.Get(m.Bundle(td))(t))
				assert.Empty(t, heard.take())
				st := status(t, m, domain.ID())
				assert.ErrorContains(t, st.Err, "\""+td.String()+"\": the bundle is held")
				assert.Greater(t, st.Failures, 4)
				assert.Less(t, st.Failures, 40)

				// Its next answer counts.
				p.bundles.Store(nil)
				time.Sleep(6 * time.Minute)
				assert.NoError(t, status(t, m, domain.ID()).Err)

				// It insists.
				p.bundles.Store(all)
				time.Sleep(bundleorder.Time - time.Minute)
				assert.Same(t, before, must.Get(m.Bundle(td))(t))
				assert.NotContains(t, heard.take(), "spiffe://"+td.String())
				time.Sleep(12 * time.Minute)
				assert.Same(t, wrong, must.Get(m.Bundle(td))(t))
				assert.Contains(t, heard.take(), "spiffe://"+td.String())
				assert.NoError(t, status(t, m, domain.ID()).Err)
			})
		}
	}
}

// TestImplausibleFirstBundles shows that a number that leaves no room for another one is held even if there is nothing
// else yet: that of another trust domain does not hold up the own one.
func TestImplausibleFirstBundles(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		highest := func(ca *spiffetest.CA) *spiffe.Bundle {
			c := ca.Bundle().Contents()
			c.Sequence = new(uint64(math.MaxUint64))
			return must.Get(spiffe.NewBundle(ca.TrustDomain(), c))(t)
		}
		p := poll(ca)
		p.bundles.Store(set(t, highest(ca), other.Bundle()))
		m := newManager(t, secretcache.Config{CA: p})
		start(t, m)
		time.Sleep(time.Minute)
		_, err := m.Bundle(domain)
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		require.ErrorContains(t, err, "too high for a counter and for a clock")

		p.bundles.Store(set(t, ca.Bundle(), highest(other)))
		time.Sleep(time.Minute)
		assert.Len(t, bundleOf(t, m, domain), 1)
		require.ErrorIs(t, must.Err(m.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain)
		must.Get(m.GenerateSecret(t.Context(), "default"))(t)
		assert.ErrorContains(t, status(t, m, domain.ID()).Err, `"other.test": the bundle is held`)
	})
}

// nilBundles is a CA that can forget to answer.
type nilBundles struct {
	*polled
	nothing atomic.Bool
}

func (n *nilBundles) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if n.nothing.Load() {
		return nil, nil
	}
	return n.polled.FetchBundles(ctx)
}

// TestRollbackOfOne shows that the other bundles of an answer are taken.
func TestRollbackOfOne(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		old := ca.Bundle()
		ca.Rotate()
		ca.Federate(other.Bundle())
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p})
		ready(t, m)
		other.Rotate()
		p.bundles.Store(set(t, old, other.Bundle()))
		time.Sleep(6 * time.Minute)
		assert.Len(t, bundleOf(t, m, domain), 2)
		assert.Len(t, bundleOf(t, m, other.TrustDomain()), 2)
		assert.ErrorContains(t, status(t, m, domain.ID()).Err, `bundle of "example.org" has sequence number 1`)

		p.bundles.Store(set(t, ca.Bundle()))
		time.Sleep(6 * time.Minute)
		assert.ErrorIs(t, must.Err(m.Bundle(other.TrustDomain())), spiffe.ErrUnknownTrustDomain, "what is not in the newest set is gone")
	})
}

// TestEmptyBundle follows the revocation of everything (BND-10), and the way back.
func TestEmptyBundle(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p})
		var heard told
		m.Subscribe(heard.add)
		first, _ := ready(t, m)
		heard.take()
		changed := m.Changed()
		p.bundles.Store(set(t, bundle(t, spiffe.BundleContents{Sequence: new(uint64(2))})))
		time.Sleep(6 * time.Minute)
		<-changed
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org"}, heard.take())
		assert.Empty(t, bundleOf(t, m, domain), "no peer is trusted any more")
		_, err := m.GenerateSecret(t.Context(), "ROOTCA")
		assert.ErrorIs(t, err, spiffe.ErrNoAuthority)
		assert.Same(t, first, current(t, m), "our own identity is for others to judge")
		assert.EqualValues(t, 1, p.signed.Load(), "no certificate could be good: none is asked for")
		require.NoError(t, m.Add(worker))
		_, err = m.GenerateSecret(t.Context(), worker.String())
		assert.ErrorIs(t, err, spiffe.ErrNoAuthority)
		time.Sleep(30 * time.Minute) // renewal came due
		assert.EqualValues(t, 1, p.signed.Load())
		assert.Zero(t, status(t, m, web).Failures, "that is not a failure of its own")
		assert.ErrorIs(t, err, spiffe.ErrNotReady)

		p.bundles.Store(nil)
		ca.Rotate()
		ca.Rotate()
		ca.DropOldRoots()
		time.Sleep(6 * time.Minute)
		synctest.Wait()
		assert.NotSame(t, first, current(t, m))
		assert.NoError(t, must.Err(m.GenerateSecret(t.Context(), worker.String())))
		assert.NoError(t, must.Err(m.GenerateSecret(t.Context(), "ROOTCA")))
	})
}

// TestPoll shows that the bundle's own hint is the interval, and five minutes without (FED-7, FED-8).
func TestPoll(t *testing.T) {
	t.Parallel()
	for _, hint := range []time.Duration{0, 2 * time.Minute, 3 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			p := poll(ca)
			p.bundles.Store(set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{ca.Root()}, RefreshHint: hint})))
			m := newManager(t, secretcache.Config{CA: p})
			ready(t, m)
			interval := hint
			if hint == 0 {
				interval = 5 * time.Minute
			}
			for range 5 {
				before := p.fetched.Load()
				wait := time.Until(status(t, m, domain.ID()).NextAttempt)
				assert.InDelta(t, interval, wait, float64(interval/10))
				time.Sleep(wait - time.Millisecond)
				assert.Equal(t, before, p.fetched.Load())
				time.Sleep(2 * time.Millisecond)
				synctest.Wait()
				assert.Equal(t, before+1, p.fetched.Load())
			}
		})
	}
}

// TestWatch shows that changes arrive at once, and that there is no polling besides.
func TestWatch(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := &watched{polled: poll(spiffetest.NewCA(t, "example.org"))}
		m := newManager(t, secretcache.Config{CA: ca})
		ready(t, m)
		for n := range 5 {
			time.Sleep(time.Hour)
			changed := m.Changed()
			ca.ca.Prepare()
			<-changed
			assert.Len(t, bundleOf(t, m, domain), n+2)
		}
		assert.EqualValues(t, 1, ca.fetched.Load())
		assert.EqualValues(t, 1, ca.watches.Load())
	})
}

// watched is a CA with a watch that can break.
type watched struct {
	*polled
	watches atomic.Int64
	broken  atomic.Pointer[string] // how the watch misbehaves; nil if it does not
}

func (w *watched) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	w.watches.Add(1)
	return func(yield func(*spiffe.BundleSet, error) bool) {
		var how string
		if s := w.broken.Load(); s != nil {
			how = *s
		}
		switch how {
		case "":
			for b, err := range w.ca.WatchBundles(ctx) {
				if !yield(b, err) || w.broken.Load() != nil {
					return
				}
			}
		case "ends after one":
			yield(w.ca.Bundles(), nil)
		case "errors without end":
			for n := 1; yield(nil, fmt.Errorf("the %dth error", n)); n++ {
				w.watches.Add(1)
			}
		case "one old bundle":
			yield(w.bundles.Load(), nil)
			<-ctx.Done()
		}
	}
}

// TestWatchBreaks shows that a watch that ends or fails is started again, not too often, and that
// bundles are polled meanwhile.
func TestWatchBreaks(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"ends at once", "ends after one", "errors without end"} {
		bubble.Run(t, how, func(t *testing.T) {
			ca := &watched{polled: poll(spiffetest.NewCA(t, "example.org"))}
			m := newManager(t, secretcache.Config{CA: ca})
			ready(t, m)
			time.Sleep(10 * time.Minute)
			ca.broken.Store(&how)
			ca.ca.Prepare() // the watch breaks after that
			synctest.Wait()
			assert.Len(t, bundleOf(t, m, domain), 2)

			ca.watches.Store(0)
			fetched := ca.fetched.Load()
			ca.ca.Prepare()
			time.Sleep(6 * time.Minute)
			assert.Len(t, bundleOf(t, m, domain), 3)
			assert.GreaterOrEqual(t, ca.watches.Load(), int64(8))
			assert.LessOrEqual(t, ca.watches.Load(), int64(360))
			if how != "ends after one" {
				assert.Greater(t, ca.fetched.Load(), fetched, "polled instead")
			}

			ca.broken.Store(nil)
			time.Sleep(time.Minute)
			changed := m.Changed()
			ca.ca.Prepare()
			synctest.Wait()
			if how == "errors without end" {
				return // that watch never ends, and its polls are what remains
			}
			<-changed
			assert.Len(t, bundleOf(t, m, domain), 4)
		})
	}
}

// downCA is a CA whose watch fails, and whose bundles cannot be fetched either if err is set.
type downCA struct {
	caclient.CA
	err atomic.Pointer[error]
}

func (d *downCA) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if err := d.err.Load(); err != nil {
		return nil, *err
	}
	return d.CA.FetchBundles(ctx)
}

func (d *downCA) WatchBundles(context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) { yield(nil, errors.New("no watch")) }
}

// TestWatchFailsOnce: a failure of the watch is one line, and none while the bundles cannot be fetched either, which has its own.
func TestWatchFailsOnce(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var buf bytes.Buffer
		ca := &downCA{CA: spiffetest.NewCA(t, "example.org")}
		ca.err.Store(new(errors.New("the CA is down")))
		m := newManager(t, secretcache.Config{CA: ca, Logger: slog.New(slog.NewTextHandler(lockedWriter{&mu, &buf}, nil))})
		start(t, m)
		logged := func(what string) int {
			mu.Lock()
			defer mu.Unlock()
			return strings.Count(buf.String(), what)
		}
		time.Sleep(10 * time.Minute)
		assert.Greater(t, logged("the CA is down"), 5)
		assert.Zero(t, logged("bundle watch failed"))
		ca.err.Store(nil)
		time.Sleep(time.Hour)
		assert.Greater(t, logged("no watch"), 5)
		assert.Zero(t, logged("the watch ended"))
	})
}

// TestWatchRollback shows that bundles of a watch are checked as those of a fetch are.
func TestWatchRollback(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := &watched{polled: poll(spiffetest.NewCA(t, "example.org"))}
		ca.broken.Store(new("one old bundle"))
		old := ca.ca.Bundles()
		ca.ca.Prepare()
		ca.polled.bundles.Store(ca.ca.Bundles())
		m := newManager(t, secretcache.Config{CA: ca})
		must.Get(m.GenerateSecret(t.Context(), "ROOTCA"))(t)
		ca.polled.bundles.Store(old)
		start(t, m)
		time.Sleep(time.Hour)
		assert.Len(t, bundleOf(t, m, domain), 2)
	})
}

// TestWatchOfNothingGood shows that a watch whose bundles are refused does not replace polling.
func TestWatchOfNothingGood(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := &watched{polled: poll(spiffetest.NewCA(t, "example.org"))}
		ca.broken.Store(new("one old bundle"))
		ca.polled.bundles.Store(set(t, spiffetest.NewCA(t, "other.test").Bundle()))
		m := newManager(t, secretcache.Config{CA: ca})
		start(t, m)
		synctest.Wait()
		ca.polled.bundles.Store(nil)
		time.Sleep(time.Hour)
		assert.Len(t, bundleOf(t, m, domain), 1)
		ca.ca.Prepare()
		time.Sleep(time.Hour)
		assert.Len(t, bundleOf(t, m, domain), 2)
	})
}

// TestWatchOvertakesFetch shows that what a watch brought while a fetch was under way is not replaced by
// what that brings.
func TestWatchOvertakesFetch(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		numberless := func() *spiffe.BundleSet {
			c := ca.Bundle().Contents()
			c.Sequence = nil
			return set(t, bundle(t, c))
		}
		p := &overtaken{polled: poll(ca), news: make(chan *spiffe.BundleSet)}
		p.polled.bundles.Store(numberless())
		m := newManager(t, secretcache.Config{CA: p})
		ready(t, m)
		p.slow.Store(true)
		for p.fetched.Load() < 2 {
			time.Sleep(time.Second)
		}
		ca.Prepare()
		p.news <- numberless()
		synctest.Wait()
		require.Len(t, bundleOf(t, m, domain), 2)
		time.Sleep(time.Minute)
		assert.Len(t, bundleOf(t, m, domain), 2)
		assert.EqualValues(t, 2, p.fetched.Load())
	})
}

// overtaken is a CA with a watch, and fetches that take long and bring what was current at their start.
type overtaken struct {
	*polled
	slow atomic.Bool
	news chan *spiffe.BundleSet
}

func (o *overtaken) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	s, err := o.polled.FetchBundles(ctx)
	if o.slow.Load() {
		time.Sleep(10 * time.Second)
	}
	return s, err
}

func (o *overtaken) WatchBundles(ctx context.Context) iter.Seq2[*spiffe.BundleSet, error] {
	return func(yield func(*spiffe.BundleSet, error) bool) {
		for {
			select {
			case s := <-o.news:
				if !yield(s, nil) {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}
}

// TestOtherKeysInBundle shows that a change that does not concern X.509 is published too.
func TestOtherKeysInBundle(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p})
		var heard told
		m.Subscribe(heard.add)
		ready(t, m)
		heard.take()
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		c := ca.Bundle().Contents()
		c.JWTAuthorities = map[string]crypto.PublicKey{"one": key.Public()}
		c.Sequence = new(uint64(2))
		p.bundles.Store(set(t, bundle(t, c)))
		changed := m.Changed()
		time.Sleep(6 * time.Minute)
		<-changed
		snap := must.Get(m.Snapshot())(t)
		b := must.Get(snap.Bundle(domain))(t)
		_, ok := b.JWTAuthority("one")
		assert.True(t, ok)
		assert.Equal(t, []string{"ALL", "ROOTCA", "spiffe://example.org"}, heard.take())
	})
}

// TestUnknownRootIsCheap shows that many certificates without a known root do not cost a fetch each.
func TestUnknownRootIsCheap(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := unhurried{poll(ca), t}
		m := newManager(t, secretcache.Config{CA: p, Jitter: 1e-9})
		for i := range 14 {
			require.NoError(t, m.Add(spiffe.MustParseID(fmt.Sprintf("spiffe://example.org/w/%d", i))))
		}
		ready(t, m)
		p.signer.Store(strangerTo(ca))
		ca.Delay(100 * time.Millisecond)
		before := p.fetched.Load()
		time.Sleep(30*time.Minute + 500*time.Millisecond)
		for _, s := range m.Status() {
			if s.ID.Path() != "" {
				assert.ErrorContains(t, s.Err, "unknown authority")
				assert.Equal(t, 1, s.Failures)
			}
		}
		assert.LessOrEqual(t, p.fetched.Load()-before, int64(2), "one that was under way when others came, and one after it")

		ca.Delay(0)
		ca.FailNext(1<<30, errDown)
		time.Sleep(5 * time.Second)
		assert.ErrorContains(t, status(t, m, web).Err, "no newer bundles: fetch bundles: the CA is down")
	})
}

// TestBundleChangesMeanwhile changes the bundle while a certificate waits for a slow subscriber:
// it is judged by what is current when it is published.
func TestBundleChangesMeanwhile(t *testing.T) {
	t.Parallel()
	for _, stays := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			m := newManager(t, secretcache.Config{CA: ca, Jitter: 1e-9})
			first, _ := ready(t, m)
			slow := make(chan struct{})
			cancel := m.Subscribe(func(string) { <-slow })
			ca.Rotate()
			time.Sleep(30*time.Minute + time.Second) // the new leaf waits
			waiting := ca.Root()
			assert.Same(t, first, current(t, m))
			if stays {
				ca.Prepare()
			} else {
				ca.Rotate()
				ca.DropOldRoots()
			}
			synctest.Wait()
			signed := ca.Signed()
			cancel()
			close(slow)
			time.Sleep(time.Minute)
			assert.Equal(t, stays, current(t, m).Leaf().CheckSignatureFrom(waiting) == nil)
			assert.Equal(t, stays, ca.Signed() == signed, "another one was asked for")
			assert.NoError(t, must.Err(verify(t, ca.Bundle(), current(t, m))))
		})
	}
}
