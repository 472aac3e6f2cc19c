package ca_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	td  = spiffe.MustParseTrustDomain("example.org")
	web = spiffe.MustParseID("spiffe://example.org/ns/shop/sa/web")
)

func newAuthority(t testing.TB, edit ...func(*ca.Config)) *ca.Authority {
	t.Helper()
	cfg := ca.Config{TrustDomain: td}
	for _, e := range edit {
		e(&cfg)
	}
	return must.Get(ca.New(cfg))(t)
}

func newCSR(t testing.TB, sans ...pki.SAN) *pki.CSR {
	t.Helper()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	return must.Get(pki.NewCSR(key, pki.CSROptions{SANs: sans}))(t)
}

// sign returns the leaf for web.
func sign(t testing.TB, a *ca.Authority, csr *pki.CSR, ttl time.Duration) *x509.Certificate {
	t.Helper()
	chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: web, TTL: ttl}))(t)
	require.Len(t, chain, 1)
	return chain[0]
}

// verify returns the error of a peer that trusts bundle and whose clock says now.
func verify(bundle *spiffe.Bundle, leaf *x509.Certificate, now time.Time) error {
	v, err := spiffe.NewVerifier(bundle, spiffe.AllowIDs(web), func() time.Time { return now })
	if err != nil {
		return err
	}
	_, err = v.VerifyChain([]*x509.Certificate{leaf}, spiffe.AnyRole)
	return err
}

func sequence(t testing.TB, b *spiffe.Bundle) uint64 {
	t.Helper()
	n, ok := b.Sequence()
	require.True(t, ok)
	return n
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		cfg  ca.Config
		says string
	}{
		{"no trust domain", ca.Config{}, "TrustDomain"},
		{"default over the maximum", ca.Config{TrustDomain: td, DefaultTTL: 2 * time.Hour, MaxTTL: time.Hour}, "DefaultTTL 2h0m0s is more than MaxTTL 1h0m0s"},
		{"default over the default maximum", ca.Config{TrustDomain: td, DefaultTTL: 91 * 24 * time.Hour}, "more than MaxTTL"},
		{"negative RootTTL", ca.Config{TrustDomain: td, Rotation: ca.Rotation{RootTTL: -1}}, "RootTTL is negative"},
		{"negative DefaultTTL", ca.Config{TrustDomain: td, DefaultTTL: -1}, "DefaultTTL is negative"},
		{"negative MaxTTL", ca.Config{TrustDomain: td, MaxTTL: -1}, "MaxTTL is negative"},
		{"negative Backdate", ca.Config{TrustDomain: td, Backdate: -1}, "Backdate is negative"},
		{"negative RefreshHint", ca.Config{TrustDomain: td, RefreshHint: -1}, "RefreshHint is negative"},
		{"negative Propagation", ca.Config{TrustDomain: td, Rotation: ca.Rotation{Propagation: -1}}, "Propagation is negative"},
		{"a hint of parts of seconds", ca.Config{TrustDomain: td, RefreshHint: 1500 * time.Millisecond}, "whole seconds"},
		{"a default of less than a second", ca.Config{TrustDomain: td, DefaultTTL: time.Second - 1}, "whole seconds"},
		{"a maximum of less than a second", ca.Config{TrustDomain: td, MaxTTL: time.Second - 1}, "whole seconds"},
		{"no room to rotate", ca.Config{TrustDomain: td, Rotation: ca.Rotation{RootTTL: 48 * time.Hour}}, "the root's lifetime 48h0m0s is not more than twice"},
		{"no room to propagate", ca.Config{TrustDomain: td, DefaultTTL: time.Minute, Rotation: ca.Rotation{RootTTL: 2 * time.Hour, Propagation: 59 * time.Minute}}, "is not more than twice"},
		{"no overflow", ca.Config{TrustDomain: td, Rotation: ca.Rotation{Propagation: 1<<63 - 1}}, "is not more than twice"},
		{"no overflow of a multiple", ca.Config{TrustDomain: td, RefreshHint: 60 * 365 * 24 * time.Hour}, "is not more than twice"},
		{"unreadable trust domain", ca.Config{TrustDomain: spiffe.MustParseTrustDomain("a..b")}, "crypto/x509 cannot read a trust domain name with an empty label"},
		{"unknown key algorithm", ca.Config{TrustDomain: td, Rotation: ca.Rotation{KeyAlgorithm: "rsa"}}, "new root of example.org"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a, err := ca.New(tt.cfg)
			require.ErrorContains(t, err, tt.says)
			assert.Regexp(t, `^ca: `, err.Error())
			assert.Nil(t, a)
		})
	}
}

func TestNewAcceptsEdges(t *testing.T) {
	t.Parallel()
	for name, edit := range map[string]func(*ca.Config){
		"default equals maximum":         func(c *ca.Config) { c.DefaultTTL, c.MaxTTL = time.Hour, time.Hour },
		"a small maximum lowers default": func(c *ca.Config) { c.MaxTTL = time.Hour },
		"just enough room to rotate": func(c *ca.Config) {
			c.Rotation.RootTTL, c.DefaultTTL, c.Rotation.Propagation = 2*time.Hour+2, time.Minute, 59*time.Minute
		},
		"a trust domain longer than an organization may be": func(c *ca.Config) {
			c.TrustDomain = spiffe.MustParseTrustDomain(strings.Repeat("a", 60) + ".example.org")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newAuthority(t, edit)
		})
	}
}

// A small maximum lowers the default, as a request without a lifetime must not be refused.
func TestDefaultTTLFollowsMaxTTL(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, func(c *ca.Config) { c.MaxTTL = time.Hour })
	leaf := sign(t, a, newCSR(t), 0)
	assert.WithinDuration(t, time.Now().Add(time.Hour), leaf.NotAfter, 5*time.Second)
}

func TestFirstRoot(t *testing.T) {
	conformance.Covers(t, "IST-2.1-3", "IST-3.2-5", "IST-3.5-4")
	bubble.Test(t, func(t *testing.T) {
		now := time.Now()
		a := newAuthority(t)
		roots := a.Roots()
		require.Len(t, roots, 1)
		r := roots[0]
		assert.Equal(t, "active", r.Phase)
		assert.Equal(t, now.Round(0), r.Prepared)
		assert.Equal(t, now.Round(0), r.Activates)
		assert.Zero(t, r.Retires)
		assert.Equal(t, r.Certificate.SerialNumber.Text(16), r.ID)

		c := r.Certificate
		assert.Equal(t, now.Add(-2*time.Minute).UTC(), c.NotBefore, "backdated, for clocks that are slow")
		assert.Equal(t, now.Add(3650*24*time.Hour).UTC(), c.NotAfter)
		assert.True(t, c.IsCA)
		assert.Equal(t, x509.KeyUsageCertSign|x509.KeyUsageCRLSign, c.KeyUsage)
		require.Len(t, c.URIs, 1)
		assert.Equal(t, "spiffe://example.org", c.URIs[0].String())
		assert.NoError(t, c.CheckSignatureFrom(c))

		b := a.Bundle()
		assert.Equal(t, td, b.TrustDomain())
		assert.Equal(t, td, a.TrustDomain())
		assert.EqualValues(t, 1, sequence(t, b))
		hint, ok := b.RefreshHint()
		assert.True(t, ok)
		assert.Equal(t, 5*time.Minute, hint)
		assert.Equal(t, []*x509.Certificate{c}, slices.Collect(b.X509Authorities()))
		assert.Same(t, b, a.Bundle(), "nothing changed")
		assert.Equal(t, a.Changed(), a.Changed())

		// A verifier whose clock is two minutes slow accepts a leaf that is made this moment.
		assert.NoError(t, verify(b, sign(t, a, newCSR(t), 0), now.Add(-2*time.Minute)))
		assert.Error(t, verify(b, sign(t, a, newCSR(t), 0), now.Add(-2*time.Minute-time.Second)))
	})
}

func TestBundleDocument(t *testing.T) {
	t.Parallel()
	a := newAuthority(t, func(c *ca.Config) { c.RefreshHint = 42 * time.Second })
	must.Get(a.Rotate(t.Context()))(t)
	doc := must.Get(a.Bundle().Marshal())(t)
	b := must.Get(spiffe.ParseBundle(td, doc))(t)
	assert.True(t, b.Equal(a.Bundle()))
	assert.Contains(t, string(doc), `"spiffe_sequence":2`)
	assert.Contains(t, string(doc), `"spiffe_refresh_hint":42`)
	assert.Equal(t, 2, strings.Count(string(doc), `"x5c"`))
}

func TestKeyAlgorithms(t *testing.T) {
	t.Parallel()
	for _, alg := range []string{"ecdsa-p256", "ecdsa-p384", "rsa-2048", "ed25519"} {
		t.Run(fmt.Sprint(alg), func(t *testing.T) {
			t.Parallel()
			a := newAuthority(t, func(c *ca.Config) { c.Rotation.KeyAlgorithm = alg })
			key := must.Get(pki.NewKey(alg))(t)
			csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
			leaf := sign(t, a, csr, 0)
			assert.NoError(t, verify(a.Bundle(), leaf, time.Now()))
			assert.True(t, pki.PublicKeysEqual(leaf.PublicKey, key.Public()))
		})
	}
}

func TestLog(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		var buf bytes.Buffer
		a := newAuthority(t, func(c *ca.Config) {
			c.MaxTTL = time.Hour
			c.Logger = slog.New(slog.NewTextHandler(&buf, &slog.HandlerOptions{ReplaceAttr: func(_ []string, at slog.Attr) slog.Attr {
				if at.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return at
			}}))
		})
		sign(t, a, newCSR(t), time.Hour)
		r := must.Get(a.Rotate(t.Context()))(t)
		old := a.Roots()[0].ID
		time.Sleep(25 * time.Minute)
		a.Bundle()
		time.Sleep(2 * time.Hour)
		a.Bundle()
		assert.Equal(t, "level=INFO msg=\"CA created\" trust_domain=example.org serial="+old+" not_after=2009-12-29T00:00:00.000Z where=\"in memory\"\n"+
			"level=INFO msg=\"root prepared\" trust_domain=example.org serial="+r.ID+" detail=\"asked for; signs from 2000-01-01T00:25:00Z\"\n"+
			"level=INFO msg=\"root activated\" trust_domain=example.org serial="+r.ID+"\n"+
			"level=INFO msg=\"root retired\" trust_domain=example.org serial="+old+"\n", buf.String())
	})
}

func TestReadingIsFree(t *testing.T) {
	a := newAuthority(t)
	must.Get(a.Rotate(t.Context()))(t) // so that there is a step to come
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		_ = a.Bundle()
		_ = a.Changed()
	}))
}

func TestDoneContext(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	cause := fmt.Errorf("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	_, err := a.Sign(ctx, ca.Request{CSR: newCSR(t), ID: web})
	assert.ErrorIs(t, err, cause)
	_, err = a.Rotate(ctx)
	assert.ErrorIs(t, err, cause)
	assert.NoError(t, a.Run(ctx))
	assert.Len(t, a.Roots(), 1)
}
