package spiffetest_test

import (
	"crypto/x509"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The sources of package spiffe keep the promises.
func TestSources(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ID-28", "BND-3", "BND-4")
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	both := ca.Bundles().With(other.Bundle())
	svid := ca.SVID("/web")
	snap := spiffe.NewSnapshot(svid, both)
	for _, s := range []spiffe.SVIDSource{svid, snap} {
		spiffetest.TestSVIDSource(t, func(testing.TB) spiffe.SVIDSource { return s })
	}
	for _, s := range []spiffe.BundleSource{both, snap} {
		spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
			return s, []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}
		})
	}
	spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
		return ca.Bundle(), []spiffe.TrustDomain{ca.TrustDomain()}
	})
}

// listener is a testing.TB that takes note of what is wrong.
type listener struct {
	testing.TB
	mu     sync.Mutex
	faults []string
}

func (l *listener) Helper() {}

func (l *listener) Errorf(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults = append(l.faults, fmt.Sprintf(format, args...))
}

type svidFunc func() (*spiffe.SVID, error)

func (f svidFunc) SVID() (*spiffe.SVID, error) { return f() }

// whole is a source with a Snapshot of its own.
type whole struct {
	svidFunc
	snap func() (*spiffe.Snapshot, error)
}

func (w whole) Snapshot() (*spiffe.Snapshot, error) { return w.snap() }

type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

// Sources that break one promise each.
func TestBrokenSVIDSources(t *testing.T) {
	t.Parallel()
	ca, stranger := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "example.org")
	svid := ca.SVID("/web")
	good := svidFunc(svid.SVID)
	fail := errors.New("out of order")
	for want, source := range map[string]spiffe.SVIDSource{
		"newSource returned nil":                                                nil,
		"it returned neither an identity nor an error":                          svidFunc(func() (*spiffe.SVID, error) { return nil, nil }),
		"it returned an identity and an error":                                  svidFunc(func() (*spiffe.SVID, error) { return svid, fail }),
		"it returned an SVID that was not made by a function of package spiffe": svidFunc(func() (*spiffe.SVID, error) { return new(spiffe.SVID), nil }),
		"no identity, though it should have one: out of order":                  svidFunc(func() (*spiffe.SVID, error) { return nil, fail }),
		"it returned neither a snapshot nor an error":                           whole{good, func() (*spiffe.Snapshot, error) { return nil, nil }},
		"it returned a snapshot and an error":                                   whole{good, func() (*spiffe.Snapshot, error) { return spiffe.NewSnapshot(svid, ca.Bundles()), fail }},
		"no snapshot, though it has an identity: out of order":                  whole{good, func() (*spiffe.Snapshot, error) { return nil, fail }},
		"the identity of a snapshot is not verified by its bundles: spiffe: ver": whole{good, func() (*spiffe.Snapshot, error) {
			return spiffe.NewSnapshot(svid, stranger.Bundles()), nil
		}},
	} {
		l := &listener{TB: t}
		spiffetest.TestSVIDSource(l, func(testing.TB) spiffe.SVIDSource { return source })
		require.Len(t, l.faults, 1, "%s: once, although many readers see it", want)
		assert.Contains(t, l.faults[0], "spiffetest: SVID source: "+want)
	}
}

func TestBrokenBundleSources(t *testing.T) {
	t.Parallel()
	ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
	known := []spiffe.TrustDomain{ca.TrustDomain()}
	fail := errors.New("out of order")
	// instead answers the question about one domain, and the bundle all others.
	instead := func(name string, b *spiffe.Bundle, err error) spiffe.BundleSource {
		return bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
			if td.String() == name {
				return b, err
			}
			return ca.Bundle().Bundle(td)
		})
	}
	zero := spiffe.TrustDomain{}.String()
	for want, source := range map[string]spiffe.BundleSource{
		"newSource returned nil":                                                                  nil,
		"it returned neither a bundle of example.org nor an error":                                instead("example.org", nil, nil),
		"it returned a bundle of example.org and an error":                                        instead("example.org", ca.Bundle(), fail),
		"asked for example.org it returned the bundle of other.test":                              instead("example.org", other.Bundle(), nil),
		`"example.org": no bundle, though it should have one: out of order`:                       instead("example.org", nil, fail),
		`asked for sub.example.org it returned the bundle of example.org`:                         instead("sub.example.org", ca.Bundle(), nil),
		`asked for example.org. it returned the bundle of example.org`:                            instead("example.org.", ca.Bundle(), nil),
		`"spiffetest.invalid": the error does not wrap spiffe.ErrUnknownTrustDomain: out of`:      instead("spiffetest.invalid", nil, fail),
		`"spiffetest.invalid": the error does not name the trust domain: no trust bundle`:         instead("spiffetest.invalid", nil, spiffe.ErrUnknownTrustDomain),
		"the zero trust domain: want an error that wraps spiffe.ErrUnknownTrustDomain, got <nil>": instead(zero, nil, fail),
	} {
		l := &listener{TB: t}
		spiffetest.TestBundleSource(l, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) { return source, known })
		require.Len(t, l.faults, 1, "%s: once, although many readers see it", want)
		assert.Contains(t, l.faults[0], "spiffetest: bundle source: "+want)
	}
}

// A source that blocks is found out, at the first answer or among many readers.
func TestBlockingSources(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		svid, open := ca.SVID("/web"), make(chan struct{})
		defer close(open)
		for name, after := range map[string]int64{"at once": 0, "later": 1} {
			var asked atomic.Int64
			block := func() {
				if asked.Add(1) > after {
					<-open
				}
			}
			start := time.Now()
			l := &listener{TB: t}
			spiffetest.TestSVIDSource(l, func(testing.TB) spiffe.SVIDSource {
				return svidFunc(func() (*spiffe.SVID, error) { block(); return svid, nil })
			})
			require.Len(t, l.faults, 1, name)
			assert.Contains(t, l.faults[0], "it blocks", name)

			asked.Store(0)
			l = &listener{TB: t}
			spiffetest.TestBundleSource(l, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
				return bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) {
					if td == ca.TrustDomain() {
						block()
					}
					return ca.Bundle().Bundle(td)
				}), []spiffe.TrustDomain{ca.TrustDomain()}
			})
			require.Len(t, l.faults, 1, name)
			assert.Contains(t, l.faults[0], "it blocks", name)
			assert.Equal(t, time.Minute, time.Since(start))
		}
	})
}

// What a signing certificate should not have, and may (AMB-14).
func TestSigningCertificateWithDigitalSignature(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "AMB-14")
	ca := spiffetest.NewCA(t, "example.org")
	svid := ca.Intermediate(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageDigitalSignature }).SVID("/web")
	_, err := verify(t, ca.Bundle(), svid.Chain(), spiffe.ServerRole)
	assert.NoError(t, err)
}
