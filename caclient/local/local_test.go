package local_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	td  = spiffe.MustParseTrustDomain("example.org")
	web = spiffe.MustParseID("spiffe://example.org/web")
	api = spiffe.MustParseID("spiffe://example.org/api")

	_ caclient.CA = (*local.CA)(nil)
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
	return cafake.NewCSR(t, pki.CSROptions{SANs: sans})
}

func failure(t testing.TB, err error) *caclient.Error {
	t.Helper()
	return must.As[*caclient.Error](err)(t)
}

func kind(t testing.TB, err error) error {
	t.Helper()
	return failure(t, err).Kind
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	decide := func(context.Context, *pki.CSR) (spiffe.ID, error) { return web, nil }
	_, err := local.New(nil, web)
	assert.EqualError(t, err, "local: New needs an authority and an ID")
	assert.Error(t, must.Err(local.NewFunc(nil, decide)))
	assert.Error(t, must.Err(local.NewFunc(a, nil)))
	for _, id := range []spiffe.ID{{}, td.ID(), spiffe.MustParseID("spiffe://example.com/web")} {
		assert.ErrorContains(t, must.Err(local.New(a, id)), `is not the ID of a workload in the trust domain "example.org"`)
	}
}

// A server's certificate has its names and its ID, whatever the request names.
func TestServer(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	require.ErrorContains(t, must.Err(local.NewServer(a, web, pki.IDSAN(web))), "neither a DNS name nor an IP address")
	require.Error(t, must.Err(local.NewServer(a, td.ID())))
	c := must.Get(local.NewServer(a, web, pki.DNSSAN("ca.example.org"), pki.IPSAN(net.IPv4(127, 0, 0, 1))))(t)
	chain := must.Get(c.Sign(t.Context(), newCSR(t, pki.DNSSAN("evil.example.org")), 0))(t)
	assert.Equal(t, []string{"ca.example.org"}, chain[0].DNSNames)
	assert.True(t, net.IPv4(127, 0, 0, 1).Equal(chain[0].IPAddresses[0]))
	assert.Equal(t, web.String(), chain[0].URIs[0].String())
}

// The request's wish is compared, never obeyed.
func TestOneIdentity(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	c := must.Get(local.New(a, web))(t)
	page := pki.SAN{Type: pki.URI, Value: "https://example.org/web"}
	for _, tt := range []struct {
		name string
		sans []pki.SAN
		good bool
	}{
		{"no names", nil, true},
		{"its own ID", []pki.SAN{pki.IDSAN(web)}, true},
		{"another ID", []pki.SAN{pki.IDSAN(api)}, false},
		{"both", []pki.SAN{pki.IDSAN(web), pki.IDSAN(api)}, false},
		{"an ID of another trust domain", []pki.SAN{pki.IDSAN(spiffe.MustParseID("spiffe://example.com/web"))}, false},
		{"no SPIFFE ID", []pki.SAN{page}, false},
		{"DNS names are ignored", []pki.SAN{pki.DNSSAN("admin.example.org")}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			csr := newCSR(t, tt.sans...)
			asked := time.Now()
			chain, err := c.Sign(t.Context(), csr, time.Hour)
			if !tt.good {
				assert.Equal(t, caclient.ErrDenied, kind(t, err))
				assert.ErrorContains(t, err, `the caller is "spiffe://example.org/web"`)
				assert.Nil(t, chain)
				return
			}
			require.NoError(t, err)
			require.NoError(t, cafake.Check(chain, csr, pki.ExpectID(web), a.Bundle()))
			assert.Empty(t, chain[0].DNSNames)
			assert.WithinRange(t, chain[0].NotAfter, asked.Add(time.Hour-time.Second), time.Now().Add(time.Hour+time.Second))
		})
	}
}

// A program that knows its workloads by their keys.
func TestManyIdentities(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	known := map[*pki.CSR]spiffe.ID{newCSR(t): web, newCSR(t, pki.IDSAN(api)): api}
	c, err := local.NewFunc(a, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
		for k, id := range known {
			if pki.PublicKeysEqual(k.PublicKey(), csr.PublicKey()) {
				return id, nil
			}
		}
		return spiffe.ID{}, errors.New("no workload has this key")
	})
	require.NoError(t, err)
	for csr, id := range known {
		chain := must.Get(c.Sign(t.Context(), csr, 0))(t)
		assert.NoError(t, cafake.Check(chain, csr, pki.ExpectID(id), a.Bundle()))
	}
	_, err = c.Sign(t.Context(), newCSR(t, pki.IDSAN(web)), 0)
	assert.Equal(t, caclient.ErrDenied, kind(t, err))
	assert.ErrorContains(t, err, "no workload has this key")
}

// A program with a set of identities, each of which is named in the requests for it.
func TestSetOfIdentities(t *testing.T) {
	t.Parallel()
	a := newAuthority(t)
	c := must.Get(local.New(a, web, api))(t)
	for _, id := range []spiffe.ID{web, api} {
		csr := newCSR(t, pki.IDSAN(id))
		chain := must.Get(c.Sign(t.Context(), csr, 0))(t)
		assert.NoError(t, cafake.Check(chain, csr, pki.ExpectID(id), a.Bundle()))
	}
	other := pki.IDSAN(spiffe.MustParseID("spiffe://example.org/admin"))
	for name, csr := range map[string]*pki.CSR{
		"none": newCSR(t), "another": newCSR(t, other), "two": newCSR(t, pki.IDSAN(web), pki.IDSAN(api)),
		"one that is no ID": newCSR(t, pki.SAN{Type: pki.URI, Value: "https://example.org/web"}),
	} {
		assert.Equal(t, caclient.ErrDenied, kind(t, must.Err(c.Sign(t.Context(), csr, 0))), name)
	}
	for _, ids := range [][]spiffe.ID{nil, {web, spiffe.MustParseID("spiffe://example.com/web")}, {web, td.ID()}} {
		assert.Error(t, must.Err(local.New(a, ids...)))
	}
}

func TestErrors(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		decide func() (spiffe.ID, error)
		csr    *pki.CSR
		ttl    time.Duration
		age    time.Duration // of the root
		kind   error
		is     error
		retry  bool
	}{
		{"too long", func() (spiffe.ID, error) { return web, nil }, newCSR(t), 91 * 24 * time.Hour, 0, caclient.ErrInvalid, ca.ErrTTL, false},
		{"a decision for another trust domain", func() (spiffe.ID, error) { return spiffe.ParseID("spiffe://example.com/web") },
			newCSR(t), 0, 0, caclient.ErrInvalid, ca.ErrIdentity, false},
		{"no decision", func() (spiffe.ID, error) { return spiffe.ID{}, nil }, newCSR(t), 0, 0, caclient.ErrInvalid, ca.ErrIdentity, false},
		{"a decision for the trust domain", func() (spiffe.ID, error) { return td.ID(), nil }, newCSR(t), 0, 0, caclient.ErrInvalid, ca.ErrIdentity, false},
		{"no request", func() (spiffe.ID, error) { return web, nil }, nil, 0, 0, caclient.ErrInvalid, nil, false},
		{"an empty request", func() (spiffe.ID, error) { return web, nil }, new(pki.CSR), 0, 0, caclient.ErrInvalid, ca.ErrCSR, false},
		{"an expired root", func() (spiffe.ID, error) { return web, nil }, newCSR(t), 0, 3650 * 24 * time.Hour, caclient.ErrUnavailable, spiffe.ErrNotReady, true},
		{"a refusal", func() (spiffe.ID, error) { return spiffe.ID{}, io.ErrNoProgress }, newCSR(t), 0, 0, caclient.ErrDenied, io.ErrNoProgress, false},
		{"a refusal with a code", func() (spiffe.ID, error) {
			return spiffe.ID{}, &caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, Err: io.ErrNoProgress}
		}, newCSR(t), 0, 0, caclient.ErrUnavailable, io.ErrNoProgress, true},
	} {
		bubble.Run(t, tt.name, func(t *testing.T) {
			c := must.Get(local.NewFunc(newAuthority(t), func(context.Context, *pki.CSR) (spiffe.ID, error) { return tt.decide() }))(t)
			time.Sleep(tt.age)
			chain, err := c.Sign(t.Context(), tt.csr, tt.ttl)
			require.Error(t, err)
			assert.Nil(t, chain)
			e := failure(t, err)
			assert.Equal(t, tt.kind, e.Kind)
			if tt.is != nil {
				assert.ErrorIs(t, err, tt.is)
			}
			_, retry := e.Retryable()
			assert.Equal(t, tt.retry, retry)
		})
	}
}

type noAudit struct{}

func (noAudit) Record(context.Context, *ca.Issuance) error { return io.ErrShortWrite }

// What the authority cannot do now can be asked for again, and when to is passed on.
func TestAgain(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		c, err := local.New(newAuthority(t, func(cfg *ca.Config) { cfg.Limits.Rate = 0.1 }), web)
		require.NoError(t, err)
		must.Get(c.Sign(t.Context(), newCSR(t), 0))(t)
		_, err = c.Sign(t.Context(), newCSR(t), 0)
		e := failure(t, err)
		assert.Equal(t, caclient.ErrUnavailable, e.Kind)
		after, ok := e.Retryable()
		assert.True(t, ok)
		assert.Equal(t, 10*time.Second, after)

		c = must.Get(local.New(newAuthority(t, func(cfg *ca.Config) { cfg.Auditor = noAudit{} }), web))(t)
		_, err = c.Sign(t.Context(), newCSR(t), 0)
		assert.Equal(t, caclient.ErrUnavailable, kind(t, err))
		assert.ErrorIs(t, err, ca.ErrAudit)
	})
}

func TestBundles(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		start := time.Now()
		a := newAuthority(t, func(c *ca.Config) { c.MaxTTL = time.Hour })
		c := must.Get(local.New(a, web))(t)
		set := must.Get(c.FetchBundles(t.Context()))(t)
		require.Equal(t, 1, set.Len())
		b := must.Get(set.Bundle(td))(t)
		require.Same(t, a.Bundle(), b)

		go func() { _ = a.Run(t.Context()) }()
		must.Get(c.Sign(t.Context(), newCSR(t), time.Hour))(t)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		time.AfterFunc(time.Minute, func() { _, _ = a.Rotate(ctx) })
		var seen []string
		for set, err := range c.WatchBundles(ctx) {
			require.NoError(t, err)
			b := must.Get(set.Bundle(td))(t)
			n, _ := b.Sequence()
			seen = append(seen, fmt.Sprintf("%v: %d, %d roots", time.Since(start), n, len(slices.Collect(b.X509Authorities()))))
		}
		// The activation, at 26 minutes, changes nothing in the bundle.
		assert.Equal(t, []string{"0s: 1, 1 roots", "1m0s: 2, 2 roots", "1h28m0s: 3, 1 roots"}, seen)
		assert.Equal(t, 3*time.Hour, time.Since(start))
		for range c.WatchBundles(t.Context()) {
			break // a reader may stop
		}
	})
}

func ExampleNewFunc() {
	authority, err := ca.New(ca.Config{TrustDomain: td})
	if err != nil {
		panic(err)
	}
	// This program starts its workloads itself and knows which ones there are. A request that
	// names another one is refused.
	workloads := map[string]spiffe.ID{web.String(): web, api.String(): api}
	c, err := local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
		for _, san := range csr.SANs() {
			if id, ok := workloads[san.Value]; ok {
				return id, nil
			}
		}
		return spiffe.ID{}, errors.New("not one of ours")
	})
	if err != nil {
		panic(err)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"spiffe://example.org/web", "spiffe://example.org/admin"} {
		csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(spiffe.MustParseID(name))}})
		if err != nil {
			panic(err)
		}
		chain, err := c.Sign(context.Background(), csr, time.Hour)
		fmt.Println(len(chain), err)
	}
	// Output:
	// 1 <nil>
	// 0 caclient: sign: denied: not one of ours
}

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, nil, func(f *caclienttest.Fake) (caclient.CA, error) {
		return local.New(f.Signer(), f.Expectation().ID())
	})
}

var (
	_ ca.Signer = (*ca.Authority)(nil)
	_ ca.Signer = (*ra.RA)(nil)
)

// plain is an authority that tells nothing of changes.
type plain struct{ *ca.Authority }

func (plain) Changed() {}

// Roots of an authority without Changed are seen after the next Sign.
func TestWatchWithoutChanged(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := newAuthority(t)
		c := must.Get(local.New(plain{a}, web))(t)
		ctx, cancel := context.WithCancel(t.Context())
		var seen []*spiffe.Bundle
		done := make(chan struct{})
		go func() {
			defer close(done)
			for set, err := range c.WatchBundles(ctx) {
				if !assert.NoError(t, err) {
					return
				}
				b, err := set.Bundle(td)
				assert.NoError(t, err)
				seen = append(seen, b)
			}
		}()
		synctest.Wait()
		require.Equal(t, []*spiffe.Bundle{a.Bundle()}, seen)
		must.Get(a.Rotate(ctx))(t)
		must.Get(c.Sign(ctx, newCSR(t), 0))(t)
		synctest.Wait()
		require.Len(t, seen, 2, "after a Sign")
		assert.Same(t, a.Bundle(), seen[1])
		go func() { _ = a.Run(ctx) }()
		time.Sleep(time.Hour) // the new root signs
		synctest.Wait()
		before := len(seen)
		must.Get(a.Rotate(ctx))(t)
		time.Sleep(31 * time.Second)
		synctest.Wait()
		require.Len(t, seen, before+1, "after half a minute")
		cancel()
		<-done
	})
}

// late is a registration authority that learns its roots from what is signed.
type late struct {
	*ca.Authority
	signed bool
	err    error
}

func (l *late) Bundle() *spiffe.Bundle {
	if !l.signed {
		return nil
	}
	return l.Authority.Bundle()
}

func (l *late) Sign(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
	if l.err != nil {
		return nil, l.err
	}
	l.signed = true
	return l.Authority.Sign(ctx, r)
}

func TestServerLearnsRoots(t *testing.T) {
	t.Parallel()
	signer := &late{Authority: newAuthority(t), err: errors.New("not now")}
	own := must.Get(local.NewServer(signer, web))(t)
	require.ErrorContains(t, must.Err(own.FetchBundles(t.Context())), "not now")
	signer.err = nil
	assert.Equal(t, 1, must.Get(own.FetchBundles(t.Context()))(t).Len())
}
