package secretcache_test

import (
	"context"
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net/url"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// faults are the ways to spoil a CA's answer, by what the error says.
var faults = map[string]func(*spiffetest.CA, *polled){
	"the chain is empty":                     chain(func(*spiffetest.CA, answer) answer { return nil }),
	"the chain has a nil certificate":        chain(func(_ *spiffetest.CA, c answer) answer { return append(c, nil) }),
	"17 certificates":                        chain(func(_ *spiffetest.CA, c answer) answer { return slices.Repeat(c, 17) }),
	"the private key does not belong":        chain(func(ca *spiffetest.CA, _ answer) answer { return ca.SVID("/web").Chain() }),
	"no URI name, so no SPIFFE ID":           template(func(c *x509.Certificate) { c.URIs, c.DNSNames = nil, []string{"web.test"} }),
	"there are 2 URI names":                  template(func(c *x509.Certificate) { c.URIs = append(c.URIs, worker.URL()) }),
	"its ID has no path":                     template(func(c *x509.Certificate) { c.URIs = []*url.URL{domain.ID().URL()} }),
	`it is for "spiffe://example.org/admin"`: template(func(c *x509.Certificate) { c.URIs[0].Path = "/admin" }),
	`it is for "spiffe://other.test/web"`:    template(func(c *x509.Certificate) { c.URIs[0].Host = "other.test" }),
	"it is a CA certificate":                 template(func(c *x509.Certificate) { c.IsCA = true }),
	"keyCertSign or cRLSign":                 template(func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageCertSign }),
	"lacks digitalSignature":                 template(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement }),
	"incompatible key usage":                 template(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning} }),
	"chain: x509: certificate specifies":     template(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }),
	"it is valid from 1999-12-31":            template(func(c *x509.Certificate) { c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore }),
	"compare the clocks":                     template(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(time.Minute) }),
	"unhandled critical extension": template(func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 3, 6, 1, 4, 1, 99999, 1}, Critical: true, Value: []byte{5, 0}}}
	}),
	"bytes of certificates": template(func(c *x509.Certificate) {
		c.DNSNames = slices.Repeat([]string{strings.Repeat("a", 60) + ".test"}, 1000)
	}),
	"signed by unknown authority": func(ca *spiffetest.CA, p *polled) { p.signer.Store(strangerTo(ca)) },
	"sign: the CA is down":        func(ca *spiffetest.CA, _ *polled) { ca.FailNext(1<<30, errDown) },
}

type answer = []*x509.Certificate

func template(edit func(*x509.Certificate)) func(*spiffetest.CA, *polled) {
	return func(ca *spiffetest.CA, _ *polled) { ca.EditTemplates(edit) }
}

func chain(edit func(*spiffetest.CA, answer) answer) func(*spiffetest.CA, *polled) {
	return func(ca *spiffetest.CA, _ *polled) {
		ca.EditAnswers(func(c answer) answer { return edit(ca, c) })
	}
}

// strangerTo returns another CA for the same trust domain: an intermediate of ca whose own
// certificate is left out.
func strangerTo(ca *spiffetest.CA) *spiffetest.CA {
	lone := ca.Intermediate()
	lone.EditAnswers(func(c answer) answer { return c[:1] })
	return lone
}

// TestBrokenAnswers has the CA answer badly, one fault at a time, from the first renewal on. What
// works stays, the fault is reported, and the first good answer is taken.
func TestBrokenAnswers(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for want, spoil := range faults {
		bubble.Run(t, want, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			p := poll(ca)
			m := newManager(t, secretcache.Config{CA: p})
			var heard told
			m.Subscribe(heard.add)
			first, _ := ready(t, m)
			snap := must.Get(m.Snapshot())(t)
			secret := must.Get(m.GenerateSecret(t.Context(), "default"))(t)
			heard.take()

			spoil(ca, p)
			time.Sleep(34 * time.Minute)
			assert.Empty(t, heard.take())
			assert.Same(t, first, current(t, m))
			assert.Same(t, snap, must.Get(m.Snapshot())(t))
			assert.Same(t, secret, must.Get(m.GenerateSecret(t.Context(), "default"))(t))
			st := status(t, m, web)
			assert.ErrorContains(t, st.Err, want)
			assert.Greater(t, st.Failures, 5, "it is tried again and again")
			assert.Less(t, st.Failures, 1000, "and not all the time")

			ca.EditTemplates(nil)
			ca.EditAnswers(nil)
			ca.FailNext(0, nil)
			p.signer.Store(nil)
			time.Sleep(65 * time.Second) // 4 % of what remains
			assert.Equal(t, []string{"default", web.String()}, heard.take())
			assert.NotSame(t, first, current(t, m))
			assert.NoError(t, status(t, m, web).Err)
		})
	}
}

// TestAcceptedAnswers are answers that are unusual and good.
func TestAcceptedAnswers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		prepare func(*spiffetest.CA, *polled)
		length  int // of the chain that is presented
	}{
		"an intermediate": {func(ca *spiffetest.CA, p *polled) { p.signer.Store(ca.Intermediate()) }, 2},
		"with the root, twice": {func(ca *spiffetest.CA, p *polled) {
			below := ca.Intermediate()
			below.EditAnswers(func(c answer) answer { return append(c, ca.Root(), ca.Root()) })
			p.signer.Store(below)
		}, 2},
		"no extended key usage":  {template(func(c *x509.Certificate) { c.ExtKeyUsage = nil }), 1},
		"any extended key usage": {template(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} }), 1},
		"a new root":             {func(ca *spiffetest.CA, p *polled) { ca.Rotate() }, 1},
		"backdated":              {template(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(-time.Hour) }), 1},
		"as long as the one it replaces": {template(func(c *x509.Certificate) {
			c.NotAfter = time.Date(2000, 1, 1, 1, 0, 0, 0, time.UTC) // the CA itself ends then
		}), 1},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			p := poll(ca)
			m := newManager(t, secretcache.Config{CA: p})
			first, _ := ready(t, m)
			c.prepare(ca, p)
			time.Sleep(30 * time.Minute)
			synctest.Wait()
			assert.NotSame(t, first, current(t, m))
			assert.Len(t, current(t, m).Chain(), c.length)
			assert.NoError(t, status(t, m, web).Err)
		})
	}
}

// TestOneRole shows that a CA that certifies one role only works for a Manager that needs no other.
func TestOneRole(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		ca.EditTemplates(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
		m := newManager(t, secretcache.Config{CA: poll(ca), Role: spiffe.ClientRole})
		first, _ := ready(t, m)
		ca.EditTemplates(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
		time.Sleep(50 * time.Minute)
		assert.Same(t, first, current(t, m))
		assert.ErrorContains(t, status(t, m, web).Err, "incompatible key usage")
	})
}

// TestShorterLives shows that a CA that lowers lifetimes has its way at the first renewal, and is not asked for
// thousands of certificates until the last long one ends.
func TestShorterLives(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, short := range []time.Duration{time.Hour, 10 * time.Minute, time.Minute, 21 * time.Second} {
		bubble.Run(t, short.String(), func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			p := poll(ca)
			m := newManager(t, secretcache.Config{CA: p, Lifetime: 24 * time.Hour})
			first, _ := ready(t, m)
			ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(short) })
			<-m.Changed()
			assert.EqualValues(t, 2, p.signed.Load(), "the first short one is taken")
			assert.LessOrEqual(t, time.Since(first.Leaf().NotBefore), 12*time.Hour+time.Minute)
			lives := rounds.Of(10)
			for range lives * 10 {
				time.Sleep(short / 10)
				require.True(t, time.Now().Before(current(t, m).NotAfter()))
			}
			assert.Less(t, int(p.signed.Load()), 2+4*lives, "one for each renewal")
			assert.NoError(t, status(t, m, web).Err)
		})
	}
}

// TestTooShortLives shows that a certificate that would end before it could be renewed does not displace one that lives
// for long, that few are asked for meanwhile, and that they are better than nothing at its end.
func TestTooShortLives(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := poll(ca)
		m := newManager(t, secretcache.Config{CA: p, Lifetime: 24 * time.Hour})
		var heard told
		m.Subscribe(heard.add)
		first, _ := ready(t, m)
		heard.take()
		ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(10 * time.Second) })
		time.Sleep(23*time.Hour + 59*time.Minute)
		assert.Same(t, first, current(t, m))
		assert.Empty(t, heard.take())
		st := status(t, m, web)
		assert.ErrorContains(t, st.Err, "before it could be renewed again, and the certificate that it is to replace at 2000-01-02T00:00:00Z")
		assert.Greater(t, p.signed.Load(), int64(10))
		assert.Less(t, p.signed.Load(), int64(40))
		for range 1200 {
			time.Sleep(100 * time.Millisecond)
			require.True(t, time.Now().Before(current(t, m).NotAfter()), "%v", time.Now())
		}
		assert.NotSame(t, first, current(t, m))
	})

	// A CA that finds its way back is asked again in time.
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: poll(ca), Lifetime: 24 * time.Hour})
		first, _ := ready(t, m)
		ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(10 * time.Second) })
		time.Sleep(20 * time.Hour)
		ca.EditTemplates(nil)
		time.Sleep(3 * time.Hour)
		assert.NotSame(t, first, current(t, m))
		assert.NoError(t, status(t, m, web).Err)
	})
}

// TestLinkBetweenRoots shows that a certificate that looks like a root, and links a new one to the
// old one, stays in the chain.
func TestLinkBetweenRoots(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		template := &x509.Certificate{
			SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "root"}, NotBefore: time.Now(), NotAfter: time.Now().AddDate(1, 0, 0),
			KeyUsage: x509.KeyUsageCertSign, BasicConstraintsValid: true, IsCA: true,
		}
		sign := func(parent *x509.Certificate, pub crypto.PublicKey, key crypto.Signer) *x509.Certificate {
			der := must.Get(x509.CreateCertificate(nil, template, parent, pub, key))(t)
			return must.Get(x509.ParseCertificate(der))(t)
		}
		oldKey := must.Get(pki.NewKey("ecdsa-p256"))(t)
		old := sign(template, oldKey.Public(), oldKey)
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		link := sign(old, key.Public(), oldKey)
		next := must.Get(pki.NewIssuer(answer{link}, key))(t)
		ca := &issuerCA{issuer: next, tail: answer{link}}
		ca.bundles.Store(set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{old}})))
		m := newManager(t, secretcache.Config{CA: ca})
		svid, _ := ready(t, m)
		assert.Equal(t, link, svid.Chain()[1])
	})
}

// TestEndlessCertificate shows that a certificate without an end, which has the year 9999, is one that
// lives long: nanoseconds since 1970 end in 2262, and durations after 292 years.
func TestEndlessCertificate(t *testing.T) {
	t.Parallel()
	for _, year := range []int{2262, 2263, 2300, 2600, 2900, 9999} {
		synctest.Test(t, func(t *testing.T) {
			end := time.Date(year, 12, 31, 23, 59, 59, 0, time.UTC)
			key := must.Get(pki.NewKey("ecdsa-p256"))(t)
			root, err := pki.NewRoot(key, pki.CertificateOptions{PublicKey: key.Public(), SANs: []pki.SAN{pki.IDSAN(domain.ID())}, NotBefore: time.Now(), NotAfter: end})
			require.NoError(t, err)
			ca := &issuerCA{issuer: root, notAfter: end}
			ca.bundles.Store(set(t, bundle(t, spiffe.BundleContents{X509Authorities: answer{root.Certificate()}})))
			m := newManager(t, secretcache.Config{CA: ca})
			start(t, m)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			assert.True(t, end.Equal(must.Get(m.GenerateSecret(ctx, "default"))(t).NotAfter()))
			time.Sleep(24 * time.Hour)
			assert.EqualValues(t, 1, ca.signed.Load())
			assert.True(t, status(t, m, web).NextAttempt.After(time.Now().AddDate(50, 0, 0)))
		})
	}
}

// TestIssuerEndsFirst shows that the end that counts is the earliest in the chain.
func TestIssuerEndsFirst(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		p := poll(ca)
		p.signer.Store(ca.Intermediate(func(c *x509.Certificate) { c.NotAfter = c.NotBefore.Add(20 * time.Minute) }))
		m := newManager(t, secretcache.Config{CA: p})
		first, _ := ready(t, m)
		assert.Equal(t, time.Hour, time.Until(first.NotAfter()))
		assert.Equal(t, 20*time.Minute, time.Until(status(t, m, web).NotAfter))
		p.signer.Store(nil)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		assert.NotSame(t, first, current(t, m))
	})
}

// refused is an error that knows whether and when to ask again.
type refused struct {
	after time.Duration
	again bool
}

func (refused) Error() string                               { return "refused" }
func (r refused) Retryable() (after time.Duration, ok bool) { return r.after, r.again }

// TestWish shows that the CA decides when it is asked again, within bounds that the remaining life sets.
func TestWish(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		err       error
		low, high time.Duration // until the next attempt, with 30 minutes left
	}{
		"nothing said":        {errors.New("down"), time.Second, 2 * time.Second},
		"in ten minutes":      {refused{10 * time.Minute, true}, 10 * time.Minute, 11 * time.Minute},
		"tomorrow":            {refused{24 * time.Hour, true}, 15 * time.Minute, 15*time.Minute + 10*time.Second},
		"never":               {refused{0, false}, 36 * time.Second, 73 * time.Second},
		"soon, or less":       {refused{time.Millisecond, true}, time.Second, 2 * time.Second},
		"below another error": {errors.Join(errors.New("x"), refused{10 * time.Minute, true}), 10 * time.Minute, 11 * time.Minute},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			m := newManager(t, secretcache.Config{CA: ca, Jitter: 1e-9})
			ready(t, m)
			ca.FailNext(1, c.err)
			time.Sleep(30 * time.Minute)
			synctest.Wait()
			st := status(t, m, web)
			require.ErrorIs(t, st.Err, c.err)
			assert.Equal(t, 1, st.Failures)
			assert.GreaterOrEqual(t, time.Until(st.NextAttempt), c.low-time.Second)
			assert.LessOrEqual(t, time.Until(st.NextAttempt), c.high)
			time.Sleep(c.high + time.Second)
			synctest.Wait()
			assert.NoError(t, status(t, m, web).Err)
		})
	}
}

// TestRefusedForGood shows that callers do not wait for a CA that has refused, and that the Manager asks it
// again all the same.
func TestRefusedForGood(t *testing.T) {
	t.Parallel()
	no := refused{again: false}
	for _, running := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ca := spiffetest.NewCA(t, "example.org")
			m := newManager(t, secretcache.Config{CA: ca})
			_, err := m.GenerateSecret(t.Context(), "ROOTCA")
			require.NoError(t, err)
			ca.FailNext(1<<30, no)
			if running {
				start(t, m)
			}
			begin := time.Now()
			for range 10 {
				_, err = m.GenerateSecret(t.Context(), "default")
				assert.ErrorIs(t, err, spiffe.ErrNotReady)
				assert.ErrorIs(t, err, no)
			}
			assert.Zero(t, time.Since(begin))
			assert.Equal(t, 1, status(t, m, web).Failures)

			ca.FailNext(0, nil)
			time.Sleep(30 * time.Second)
			synctest.Wait()
			assert.Equal(t, running, must.Err(m.SVID()) == nil, "Run asks by itself")
			assert.NoError(t, must.Err(m.GenerateSecret(t.Context(), "default")))
		})
	}
}

func TestKeyFailure(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		broken := errors.New("the token is gone")
		m := newManager(t, secretcache.Config{CA: spiffetest.NewCA(t, "example.org"), NewKey: newKeyFails(broken)})
		start(t, m)
		synctest.Wait()
		assert.ErrorIs(t, must.Err(m.SVID()), broken)
		assert.NotEmpty(t, bundleOf(t, m, domain))
	})
}

func bundleOf(t *testing.T, m *secretcache.Manager, td spiffe.TrustDomain) []*x509.Certificate {
	t.Helper()
	return slices.Collect(must.Get(m.Bundle(td))(t).X509Authorities())
}
