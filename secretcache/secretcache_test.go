package secretcache_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/rsa"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var (
	web    = spiffe.MustParseID("spiffe://example.org/web")
	worker = spiffe.MustParseID("spiffe://example.org/worker")
	domain = web.TrustDomain()

	errStop = errors.New("the test stops")
	errDown = errors.New("the CA is down")
)

// polled is a CA that cannot be watched. It counts calls, and answers otherwise when told to.
type polled struct {
	ca              *spiffetest.CA
	signer          atomic.Pointer[spiffetest.CA]    // signs instead, if not nil
	bundles         atomic.Pointer[spiffe.BundleSet] // is fetched instead, if not nil
	fetched, signed atomic.Int64
}

func poll(ca *spiffetest.CA) *polled { return &polled{ca: ca} }

func (p *polled) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	p.signed.Add(1)
	if s := p.signer.Load(); s != nil {
		return s.Sign(ctx, csr, lifetime)
	}
	return p.ca.Sign(ctx, csr, lifetime)
}

func (p *polled) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	p.fetched.Add(1)
	if b := p.bundles.Load(); b != nil {
		return b, nil
	}
	return p.ca.FetchBundles(ctx)
}

// newManager keeps the random part of the lifetime small, so that tests can say when things happen.
func newManager(t *testing.T, cfg secretcache.Config) *secretcache.Manager {
	t.Helper()
	if cfg.ID.IsZero() {
		cfg.ID = web
	}
	if cfg.RenewIn == nil {
		cfg.Jitter = cmp.Or(cfg.Jitter, 0.01)
	}
	m := must.Get(secretcache.New(cfg))(t)
	secretcache.Unhurried(m)
	return m
}

// start runs m until stop is called, which waits for it and checks what Run returned. The end of
// the test stops it too.
func start(t *testing.T, m *secretcache.Manager) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(t.Context())) // t.Context ends before the cleanup
	ended := make(chan error, 1)
	go func() { ended <- m.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel(errStop)
		assert.NoError(t, <-ended)
	})
	t.Cleanup(stop)
	return stop
}

// ready runs m and returns its first identity.
func ready(t *testing.T, m *secretcache.Manager) (first *spiffe.SVID, stop func()) {
	t.Helper()
	stop = start(t, m)
	synctest.Wait()
	first = must.Get(m.SVID())(t)
	return first, stop
}

func current(t *testing.T, m *secretcache.Manager) *spiffe.SVID {
	t.Helper()
	return must.Get(m.SVID())(t)
}

// told records what subscribers are told.
type told struct {
	mu    sync.Mutex
	names []string
}

func (r *told) add(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names = append(r.names, name)
}

// take returns what was recorded and forgets it.
func (r *told) take() []string {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	names := r.names
	r.names = nil
	return names
}

// status returns the row of id.
func status(t *testing.T, m *secretcache.Manager, id spiffe.ID) secretcache.Status {
	t.Helper()
	for _, s := range m.Status() {
		if s.ID == id {
			return s
		}
	}
	require.FailNow(t, "no status", "of %s", id)
	return secretcache.Status{}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	for want, cfg := range map[string]secretcache.Config{
		"Config.ID is required":            {CA: ca},
		"names a trust domain":             {ID: domain.ID(), CA: ca},
		"Config.CA is required":            {ID: web},
		"Config.Role is 4":                 {ID: web, CA: ca, Role: 4},
		"Lifetime is -1s":                  {ID: web, CA: ca, Lifetime: -time.Second},
		"Timeout -1s":                      {ID: web, CA: ca, Timeout: -time.Second},
		"GraceRatio is 1 ":                 {ID: web, CA: ca, GraceRatio: 1},
		"GraceRatio is -0.5 ":              {ID: web, CA: ca, GraceRatio: -0.5},
		"GraceRatio is 0.9 and Jitter 0.1": {ID: web, CA: ca, GraceRatio: 0.9, Jitter: 0.1},
		"Jitter -0.1":                      {ID: web, CA: ca, Jitter: -0.1},
		"Jitter NaN":                       {ID: web, CA: ca, Jitter: nan()},
	} {
		_, err := secretcache.New(cfg)
		assert.ErrorContains(t, err, want)
		assert.ErrorContains(t, err, "secretcache: new: ")
	}
	assert.ErrorIs(t, must.Err(secretcache.New(secretcache.Config{CA: ca})), spiffe.ErrZero)
}

func nan() float64 {
	zero := 0.0
	return zero / zero
}

func TestNewDoesNothing(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := poll(spiffetest.NewCA(t, "example.org"))
		m := newManager(t, secretcache.Config{CA: ca})
		time.Sleep(time.Hour)
		assert.Zero(t, ca.fetched.Load()+ca.signed.Load())
		for _, read := range []func() error{
			func() error { _, err := m.SVID(); return err },
			func() error { _, err := m.Snapshot(); return err },
			func() error { _, err := m.Bundle(domain); return err },
		} {
			assert.ErrorIs(t, read(), spiffe.ErrNotReady)
			assert.ErrorContains(t, read(), "has neither called Start nor Run")
		}
	})
}

// TestTiming shows when renewal starts by default, and where there is less room.
func TestTiming(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.6-1", "IST-7.6-8")
	for name, c := range map[string]struct {
		grace            float64
		earliest, latest time.Duration
	}{
		"default":       {0, 18 * time.Minute, 30 * time.Minute},
		"a large ratio": {0.8, 6 * time.Minute, 12 * time.Minute},
		"a small ratio": {0.1, 42 * time.Minute, 54 * time.Minute},
	} {
		bubble.Run(t, name, func(t *testing.T) {
			m := must.Get(secretcache.New(secretcache.Config{ID: web, CA: spiffetest.NewCA(t, "example.org"), GraceRatio: c.grace}))(t)
			secretcache.Unhurried(m)
			start(t, m)
			var took []time.Duration
			last := time.Time{}
			ctx, cancel := context.WithTimeout(t.Context(), 12*time.Hour)
			defer cancel()
			for range updates(ctx, m) {
				if !last.IsZero() {
					took = append(took, time.Since(last))
				}
				last = time.Now()
			}
			shortest, longest := slices.Min(took), slices.Max(took)
			assert.GreaterOrEqual(t, shortest, c.earliest-time.Second) // certificates count in whole seconds
			assert.LessOrEqual(t, longest, c.latest)
			assert.Greater(t, longest-shortest, (c.latest-c.earliest)/4, "it is spread")
		})
	}
}

// TestRenewsForDays follows one identity through ten days, and looks at each moment of renewal.
func TestRenewsForDays(t *testing.T) {
	conformance.Covers(t, "IST-7.3-5", "IST-7.5-7", "IST-7.6-1", "IST-7.6-2")
	bubble.Test(t, func(t *testing.T) {
		const life = 24 * time.Hour
		ca := spiffetest.NewCA(t, "example.org")
		ca.EditTemplates(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(-10 * time.Hour) })
		m := newManager(t, secretcache.Config{CA: ca, Lifetime: life})
		stop := start(t, m)

		begin, last := time.Now(), time.Time{}
		var renewals int
		var old *spiffe.SVID
		ctx, cancel := context.WithTimeout(t.Context(), 10*24*time.Hour)
		defer cancel()
		for snap := range updates(ctx, m) {
			svid := must.Get(snap.SVID())(t)
			b := must.Get(snap.Bundle(domain))(t)
			assert.Equal(t, ca.Bundle(), b)
			if old != nil {
				renewals++
				took := time.Since(last)
				assert.GreaterOrEqual(t, took, life*49/100-time.Second) // certificates count in whole seconds
				assert.LessOrEqual(t, took, life*50/100)
				assert.NotEqual(t, old.Signer().Public(), svid.Signer().Public(), "each certificate has a key of its own")
			}
			assert.Equal(t, time.Now().Add(life).Unix(), svid.NotAfter().Unix())
			old, last = svid, time.Now()
		}
		assert.Equal(t, 10*24*time.Hour, time.Since(begin))
		assert.Equal(t, 20, renewals)
		assert.Equal(t, 21, ca.Signed())
		stop()
		assert.Same(t, old, current(t, m), "reads work after Run")
	})
}

// requests is a CA that keeps the names of each request.
type requests struct {
	caclient.CA
	names sync.Map // the ID in a request: its names
}

func (r *requests) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	r.names.Store(csr.SANs()[0].Value, csr.SANs())
	return r.CA.Sign(ctx, csr, lifetime)
}

// Requests for the default identity have the names of the Config, and those for others do not.
func TestRequestedNames(t *testing.T) {
	t.Parallel()
	r := &requests{CA: spiffetest.NewCA(t, "example.org")}
	names := []pki.SAN{pki.DNSSAN("web.example.org"), {Type: pki.IP, Value: "\x7f\x00\x00\x01"}}
	m := newManager(t, secretcache.Config{CA: r, Names: names})
	other := spiffe.MustParseID("spiffe://example.org/other")
	require.NoError(t, m.Add(other))
	start(t, m)
	for _, name := range []string{"default", other.String()} {
		must.Get(m.GenerateSecret(t.Context(), name))(t)
	}
	got, _ := r.names.Load(web.String())
	assert.Equal(t, append([]pki.SAN{pki.IDSAN(web)}, names...), got)
	got, _ = r.names.Load(other.String())
	assert.Equal(t, []pki.SAN{pki.IDSAN(other)}, got)
}

// A Manager with a TrustDomain has the identities that were added, and no other: it is ready with its bundles alone, before
// the first identity and after the last.
func TestWithoutDefaultIdentity(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		td := spiffe.MustParseTrustDomain("example.org")
		authority, err := ca.New(ca.Config{TrustDomain: td})
		require.NoError(t, err)
		issuer := must.Get(local.NewFunc(authority, func(_ context.Context, csr *pki.CSR) (spiffe.ID, error) {
			return csr.ID()
		}))(t)
		m := must.Get(secretcache.New(secretcache.Config{TrustDomain: td, CA: issuer}))(t)
		secretcache.Unhurried(m)
		assert.Nil(t, m.Bundles())
		assert.ErrorIs(t, m.Report().NotReady, spiffe.ErrNotReady)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		require.NoError(t, m.Ready(ctx))
		must.Get(m.Bundles().Bundle(td))(t)
		require.NoError(t, m.Report().NotReady)
		assert.Empty(t, m.Report().Identities)

		assert.ErrorIs(t, must.Err(m.SVID()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.Err(m.Snapshot()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.Err(m.Credential()), errors.ErrUnsupported)
		assert.ErrorIs(t, must.Err(m.GenerateSecret(ctx, "default")), fs.ErrNotExist)

		web := spiffe.MustParseID("spiffe://example.org/web")
		require.NoError(t, m.Add(web))
		first := must.Get(m.GenerateSecret(ctx, web.String()))(t)
		time.Sleep(time.Hour) // of a day
		synctest.Wait()
		require.Len(t, m.Report().Identities, 1)
		assert.False(t, m.Report().Identities[0].Own)
		time.Sleep(20 * time.Hour)
		synctest.Wait()
		second := must.Get(m.GenerateSecret(ctx, web.String()))(t)
		assert.True(t, second.NotAfter().After(first.NotAfter()), "it was renewed")
		var out strings.Builder
		require.NoError(t, m.Report().Metrics(&out))
		assert.Contains(t, out.String(), `svidkit_secretcache_identities{state="valid"} 1`)

		m.Remove(web)
		assert.ErrorIs(t, must.Err(m.GenerateSecret(ctx, web.String())), fs.ErrNotExist)
		require.NoError(t, m.Ready(ctx))
		cancel()
		require.NoError(t, <-done)

		assert.ErrorContains(t, must.Err(secretcache.New(secretcache.Config{TrustDomain: td, ID: web, CA: issuer})), "has its own")
	})
}

// kept is a CA that keeps what it is asked for.
type kept struct {
	caclient.CA
	requests  []*x509.CertificateRequest
	lifetimes []time.Duration
}

func (k *kept) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	r, err := x509.ParseCertificateRequest(csr.DER())
	if err != nil {
		return nil, err
	}
	k.requests, k.lifetimes = append(k.requests, r), append(k.lifetimes, lifetime)
	return k.CA.Sign(ctx, csr, lifetime)
}

// A request has the identity, a new key of the kind that was chosen, the lifetime, and no subject.
func TestRequests(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-7.5-3", "IST-7.5-4")
	for kind, c := range map[string]struct {
		want     string
		requests int // keys of RSA cost much
	}{"ecdsa-p256": {"P-256", 4}, "ecdsa-p384": {"P-384", 4}, "rsa-2048": {"RSA 2048", 1}} {
		synctest.Test(t, func(t *testing.T) {
			k := &kept{CA: spiffetest.NewCA(t, "example.org")}
			m := newManager(t, secretcache.Config{CA: k, Lifetime: 2 * time.Hour, NewKey: func() (crypto.Signer, error) { return pki.NewKey(kind) }})
			start(t, m)
			time.Sleep(time.Duration(c.requests)*time.Hour - 30*time.Minute)
			synctest.Wait()
			require.Len(t, k.requests, c.requests)
			seen := map[string]bool{}
			for i, r := range k.requests {
				assert.Empty(t, r.Subject.Names)
				require.Len(t, r.URIs, 1)
				assert.Equal(t, web.String(), r.URIs[0].String())
				switch public := r.PublicKey.(type) {
				case *ecdsa.PublicKey:
					assert.Equal(t, c.want, public.Params().Name)
				case *rsa.PublicKey:
					assert.Equal(t, c.want, fmt.Sprint("RSA ", public.N.BitLen()))
				default:
					assert.Fail(t, "another kind of key", "%T", public)
				}
				assert.Equal(t, 2*time.Hour, k.lifetimes[i])
				key := fmt.Sprint(r.RawSubjectPublicKeyInfo)
				assert.False(t, seen[key], "a key is used twice")
				seen[key] = true
			}
		})
	}
}

// A Manager keeps what every source of identities and of bundles promises, also when it has renewed.
func TestPromisesOfSources(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca, other := spiffetest.NewCA(t, "example.org"), spiffetest.NewCA(t, "other.test")
		ca.Federate(other.Bundle())
		m := newManager(t, secretcache.Config{CA: ca})
		ready(t, m)
		check := func() {
			spiffetest.TestSVIDSource(t, func(testing.TB) spiffe.SVIDSource { return m })
			spiffetest.TestBundleSource(t, func(testing.TB) (spiffe.BundleSource, []spiffe.TrustDomain) {
				return m, []spiffe.TrustDomain{ca.TrustDomain(), other.TrustDomain()}
			})
		}
		check()
		changed := m.Changed()
		ca.Rotate()
		<-changed
		check()
	})
}

// While each renewal fails, there are as many attempts as the package comment says. A key that fails costs less than a request.
func TestAttemptsOverALife(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	for _, tt := range []struct {
		life, pause time.Duration // the shortest between two attempts
		most        int           // attempts
	}{
		{20 * time.Second, 50 * time.Millisecond, 160},
		{time.Minute, 120 * time.Millisecond, 160},
		{499 * time.Second, 998 * time.Millisecond, 160},
		{500 * time.Second, time.Second, 160},
		{time.Hour, time.Second, 280},
		{24 * time.Hour, time.Second, 460},
	} {
		bubble.Run(t, tt.life.String(), func(t *testing.T) {
			var times []time.Time
			m := newManager(t, secretcache.Config{CA: spiffetest.NewCA(t, "example.org"), Lifetime: tt.life, NewKey: func() (crypto.Signer, error) {
				if times = append(times, time.Now()); len(times) > 1 {
					return nil, errDown
				}
				return pki.NewKey("ecdsa-p256")
			}})
			svid, stop := ready(t, m)
			time.Sleep(time.Until(svid.NotAfter()))
			stop()
			t.Logf("%d attempts", len(times)-1)
			assert.LessOrEqual(t, len(times)-1, tt.most)
			for i := 2; i < len(times); i++ {
				assert.GreaterOrEqual(t, times[i].Sub(times[i-1]), tt.pause, "attempt %d", i)
			}
		})
	}
}
