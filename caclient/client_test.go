package caclient_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/x509"
	"errors"
	"io"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The fixture is a CA.
var _ caclient.CA = (*spiffetest.CA)(nil)

// plain records when a CA is called.
type plain struct {
	ca      caclient.CA
	start   time.Time
	calls   []time.Duration
	fetches []time.Duration
	before  func(ctx context.Context, n int) error // of each Sign; may be nil
}

func newPlain(ca caclient.CA) *plain { return &plain{ca: ca, start: time.Now()} }

func (p *plain) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	p.calls = append(p.calls, time.Since(p.start))
	if p.before != nil {
		if err := p.before(ctx, len(p.calls)); err != nil {
			return nil, err
		}
	}
	return p.ca.Sign(ctx, csr, lifetime)
}

func (p *plain) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	p.fetches = append(p.fetches, time.Since(p.start))
	return p.ca.FetchBundles(ctx)
}

func newClient(t testing.TB, ca caclient.CA, opts *caclient.Options) caclient.CA {
	t.Helper()
	return must.Get(caclient.New(ca, opts))(t)
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := caclient.New(nil, nil)
	assert.EqualError(t, err, "caclient: New needs a CA")
	_, err = caclient.New(spiffetest.NewCA(t, "example.org"), &caclient.Options{Timeout: -1})
	assert.ErrorContains(t, err, "may not be negative")
	for _, role := range []spiffe.Role{-1, spiffe.BothRoles + 1} {
		_, err := caclient.New(spiffetest.NewCA(t, "example.org"), &caclient.Options{Role: role})
		assert.ErrorContains(t, err, "want ServerRole, ClientRole or BothRoles")
	}
}

// A CA that certifies one role only is good for callers that say so.
func TestRole(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	ca.EditTemplates(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })
	for role, good := range map[spiffe.Role]bool{0: false, spiffe.BothRoles: false, spiffe.ServerRole: false, spiffe.ClientRole: true} {
		inner := newPlain(ca)
		_, err := newClient(t, inner, &caclient.Options{Role: role}).Sign(t.Context(), newCSR(t, web), 0)
		assert.Len(t, inner.fetches, 1, "no bundle mends a key usage")
		if good {
			assert.NoError(t, err)
		} else {
			requireBadAnswer(t, err)
		}
	}
}

func TestSign(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	inner := newPlain(ca.Intermediate())
	c := newClient(t, inner, nil)
	for range 3 {
		asked := time.Now()
		chain := must.Get(c.Sign(t.Context(), newCSR(t, web), 10*time.Minute))(t)
		assert.Len(t, chain, 2)
		assert.WithinRange(t, chain[0].NotAfter, asked.Add(10*time.Minute-time.Second), time.Now().Add(10*time.Minute+time.Second))
	}
	assert.Len(t, inner.calls, 3)
	assert.Len(t, inner.fetches, 1, "bundles are remembered")
}

func TestSignRefusesRequests(t *testing.T) {
	t.Parallel()
	inner := newPlain(spiffetest.NewCA(t, "example.org"))
	c := newClient(t, inner, nil)
	api := spiffe.MustParseID("spiffe://example.org/api")
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	page, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN("web"), {Type: pki.URI, Value: "https://example.org/web"}}})
	require.NoError(t, err)
	for name, csr := range map[string]*pki.CSR{
		"none": nil, "no ID": newCSR(t), "two IDs": newCSR(t, web, api), "no SPIFFE ID": page,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := c.Sign(t.Context(), csr, 0)
			assert.Equal(t, caclient.ErrInvalid, must.As[*caclient.Error](err)(t).Kind)
		})
	}
	assert.Empty(t, inner.calls, "the CA was not asked")
}

// A failure is the caller's, as the CA has told it, and the CA is not asked again.
func TestFailuresAreHandedOn(t *testing.T) {
	t.Parallel()
	for _, failure := range []error{
		&caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, RetryAfter: 3 * time.Second, Err: errors.New("down")},
		&caclient.Error{Op: "sign", Kind: caclient.ErrDenied, Err: io.EOF},
		io.ErrUnexpectedEOF,
	} {
		inner := newPlain(spiffetest.NewCA(t, "example.org"))
		inner.before = func(context.Context, int) error { return failure }
		chain, err := newClient(t, inner, nil).Sign(t.Context(), newCSR(t, web), 0)
		assert.Equal(t, failure, err)
		assert.Nil(t, chain)
		assert.Len(t, inner.calls, 1)
	}
}

func TestEachCallHasADeadline(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		for timeout, want := range map[time.Duration]time.Duration{0: 10 * time.Second, time.Second: time.Second} {
			ca := spiffetest.NewCA(t, "example.org")
			inner := newPlain(ca)
			ca.Delay(time.Hour)
			_, err := newClient(t, inner, &caclient.Options{Timeout: timeout}).Sign(t.Context(), newCSR(t, web), 0)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.Equal(t, want, time.Since(inner.start))
		}
	})
}

func TestCancel(t *testing.T) {
	t.Parallel()
	cause := errors.New("going home")
	for name, says := range map[string]error{"the CA says why": nil, "the CA says another thing": io.EOF} {
		bubble.Run(t, name, func(t *testing.T) {
			inner := newPlain(spiffetest.NewCA(t, "example.org"))
			inner.before = func(ctx context.Context, _ int) error {
				<-ctx.Done()
				return cmp.Or(says, context.Cause(ctx))
			}
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(3*time.Second, func() { cancel(cause) })
			c := newClient(t, inner, nil)
			_, err := c.Sign(ctx, newCSR(t, web), 0)
			assert.ErrorIs(t, err, cause)
			if says != nil {
				assert.ErrorIs(t, err, says)
			}
			assert.Equal(t, 3*time.Second, time.Since(inner.start))
			assert.Len(t, inner.calls, 1)

			for _, c := range []caclient.CA{c, newClient(t, inner, nil)} {
				assert.ErrorIs(t, must.Err(c.Sign(ctx, newCSR(t, web), 0)), cause)
				assert.ErrorIs(t, must.Err(c.FetchBundles(ctx)), cause)
			}
			assert.Len(t, inner.calls, 1, "the CA is not asked for a caller that has gone")
			assert.Len(t, inner.fetches, 1, "the CA is not asked for a caller that has gone")
		})
	}
}

// What CAs send, and what the caller gets.
func TestChainsAreTidied(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	root := ca.Root()
	for name, edit := range map[string]func(c []*x509.Certificate) []*x509.Certificate{
		"as it should be":      func(c []*x509.Certificate) []*x509.Certificate { return c },
		"with the root":        func(c []*x509.Certificate) []*x509.Certificate { return append(c, root) },
		"with the root, twice": func(c []*x509.Certificate) []*x509.Certificate { return append(c, root, root) },
		"the root first":       func(c []*x509.Certificate) []*x509.Certificate { return append([]*x509.Certificate{root}, c...) },
		"everything twice":     func(c []*x509.Certificate) []*x509.Certificate { return append(c, c...) },
		"backwards":            func(c []*x509.Certificate) []*x509.Certificate { slices.Reverse(c); return append(c, root) },
		"copies of a certificate": func(c []*x509.Certificate) []*x509.Certificate {
			return append(c, must.Get(x509.ParseCertificate(c[1].Raw))(t))
		},
	} {
		t.Run(name, func(t *testing.T) {
			issuer := ca.Intermediate()
			issuer.EditAnswers(edit)
			chain := must.Get(newClient(t, issuer, nil).Sign(t.Context(), newCSR(t, web), 0))(t)
			require.Len(t, chain, 2)
			assert.NoError(t, chain[0].CheckSignatureFrom(chain[1]))
			assert.NoError(t, chain[1].CheckSignatureFrom(root))
		})
	}
	t.Run("a link from an old root to a new one stays", func(t *testing.T) {
		// The CA's own name, its new key, signed with its old one.
		link, _ := ca.Certificate("/x", func(c *x509.Certificate) {
			c.URIs, c.ExtKeyUsage, c.IsCA, c.BasicConstraintsValid = nil, nil, true, true
			c.KeyUsage, c.RawSubject, c.SubjectKeyId = x509.KeyUsageCertSign, root.RawSubject, []byte("new")
		})
		require.Equal(t, link[0].RawSubject, link[0].RawIssuer)
		issuer := ca.Intermediate()
		issuer.EditAnswers(func(c []*x509.Certificate) []*x509.Certificate { return append(c, root, link[0]) })
		assert.Len(t, must.Get(newClient(t, issuer, nil).Sign(t.Context(), newCSR(t, web), 0))(t), 3)
	})
}

// A CA that answers nonsense is not believed, and not asked again.
func TestBadAnswers(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	other, _ := spiffetest.NewCA(t, "example.org").Certificate("/web")
	theirs, _ := ca.Certificate("/web")
	for name, edit := range map[string]func(c []*x509.Certificate) []*x509.Certificate{
		"nothing":           func([]*x509.Certificate) []*x509.Certificate { return nil },
		"a hole":            func([]*x509.Certificate) []*x509.Certificate { return []*x509.Certificate{nil} },
		"a hole at the end": func(c []*x509.Certificate) []*x509.Certificate { return append(c, nil) },
		"too much":          func(c []*x509.Certificate) []*x509.Certificate { return append(c, slices.Repeat(c, 16)...) },
		"another key":       func([]*x509.Certificate) []*x509.Certificate { return theirs },
		"another CA":        func([]*x509.Certificate) []*x509.Certificate { return other },
		"only the root":     func([]*x509.Certificate) []*x509.Certificate { return []*x509.Certificate{ca.Root()} },
		"two leaves":        func(c []*x509.Certificate) []*x509.Certificate { return append(c, theirs...) },
		"no intermediate":   func(c []*x509.Certificate) []*x509.Certificate { return c[:1] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			issuer := ca.Intermediate()
			issuer.EditAnswers(edit)
			inner := newPlain(issuer)
			chain, err := newClient(t, inner, nil).Sign(t.Context(), newCSR(t, web), 0)
			requireBadAnswer(t, err)
			assert.Nil(t, chain)
			assert.Len(t, inner.calls, 1)
			if name != "no intermediate" { // which looks like a new root
				assert.Len(t, inner.fetches, 1, "new bundles would not make it better")
			}
		})
	}
	for name, edit := range map[string]func(c *x509.Certificate){
		"another ID": func(c *x509.Certificate) { c.URIs[0] = spiffe.MustParseID("spiffe://example.org/api").URL() },
		"two IDs":    func(c *x509.Certificate) { c.URIs = append(c.URIs, c.URIs[0]) },
		"expired": func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = c.NotBefore.Add(-48*time.Hour), c.NotBefore.Add(-time.Hour)
		},
		"in the future": func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) },
		"a CA":          func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true },
		"no signing":    func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageKeyAgreement },
		"too large": func(c *x509.Certificate) {
			c.Subject.OrganizationalUnit = []string{strings.Repeat("x", 64<<10)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			issuer := ca.Intermediate()
			issuer.EditTemplates(edit)
			chain, err := newClient(t, issuer, nil).Sign(t.Context(), newCSR(t, web), 0)
			requireBadAnswer(t, err)
			assert.Nil(t, chain)
		})
	}
}

// The CA has a new root that the client has not heard of.
func TestNewRootIsFetched(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	inner := newPlain(ca)
	c := newClient(t, inner, nil)
	_, err := c.Sign(t.Context(), newCSR(t, web), 0)
	require.NoError(t, err)
	ca.Rotate()
	must.Get(c.Sign(t.Context(), newCSR(t, web), 0))(t)
	assert.Len(t, inner.fetches, 2)
	must.Get(c.Sign(t.Context(), newCSR(t, web), 0))(t)
	assert.Len(t, inner.fetches, 2)

	// If the bundles cannot be had, that is the error, with what it says about another try.
	ca.Rotate()
	broken := &failingFetch{CA: ca, err: &caclient.Error{Op: "fetch bundles", Kind: caclient.ErrDenied, Err: io.EOF}}
	assert.ErrorIs(t, must.Err(newClient(t, broken, nil).Sign(t.Context(), newCSR(t, web), 0)), broken.err)
	assert.Zero(t, broken.signed.Load(), "nothing is signed that cannot be checked")
	broken.good.Store(1)
	c = newClient(t, broken, nil)
	must.Get(c.Sign(t.Context(), newCSR(t, web), 0))(t)
	ca.Rotate()
	assert.ErrorIs(t, must.Err(c.Sign(t.Context(), newCSR(t, web), 0)), broken.err)
}

// failingFetch answers good.Load() calls of FetchBundles and fails from then on.
type failingFetch struct {
	caclient.CA
	err          error
	good, signed atomic.Int32
}

func (f *failingFetch) Sign(ctx context.Context, csr *pki.CSR, lifetime time.Duration) ([]*x509.Certificate, error) {
	f.signed.Add(1)
	return f.CA.Sign(ctx, csr, lifetime)
}

func (f *failingFetch) FetchBundles(ctx context.Context) (*spiffe.BundleSet, error) {
	if f.good.Add(-1) < 0 {
		return nil, f.err
	}
	return f.CA.FetchBundles(ctx)
}

func TestFetchBundles(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		c := newClient(t, ca, nil)
		set, err := c.FetchBundles(t.Context())
		require.NoError(t, err)
		assert.True(t, set.Equal(ca.Bundles()))

		ca.FailNext(1, &caclient.Error{Op: "fetch bundles", Kind: caclient.ErrUnauthenticated, Err: io.EOF})
		assert.EqualError(t, must.Err(c.FetchBundles(t.Context())), "caclient: fetch bundles: not authenticated: EOF")

		_, err = newClient(t, nothing{}, nil).FetchBundles(t.Context())
		requireBadAnswer(t, err)
	})
}

// nothing is a CA that has nothing to say, without an error.
type nothing struct{}

func (nothing) Sign(context.Context, *pki.CSR, time.Duration) ([]*x509.Certificate, error) {
	return nil, nil
}
func (nothing) FetchBundles(context.Context) (*spiffe.BundleSet, error) { return nil, nil }

func TestKinds(t *testing.T) {
	t.Parallel()
	kinds := []error{caclient.ErrUnavailable, caclient.ErrInvalid, caclient.ErrUnauthenticated, caclient.ErrDenied, caclient.ErrBadAnswer, nil}
	for i, text := range []string{"unavailable: ", "invalid request: ", "not authenticated: ", "denied: ", "bad answer: ", ""} {
		cause := errors.New("cause")
		e := &caclient.Error{Op: "sign", Kind: kinds[i], RetryAfter: 3 * time.Second, Err: cause}
		assert.Equal(t, "caclient: sign: "+text+"cause", e.Error())
		assert.ErrorIs(t, e, cause)
		for _, other := range kinds[:5] {
			assert.Equal(t, other == kinds[i], errors.Is(e, other))
		}
		after, ok := e.Retryable()
		assert.Equal(t, i == 0, ok)
		if ok {
			assert.Equal(t, 3*time.Second, after)
		} else {
			assert.Zero(t, after)
		}
		e.MayPass = true
		after, ok = e.Retryable()
		assert.True(t, ok, "it says so itself")
		assert.Equal(t, 3*time.Second, after)
	}
}

var web = spiffe.MustParseID("spiffe://example.org/web")

func csrFor(t testing.TB, key crypto.Signer, ids ...spiffe.ID) *pki.CSR {
	t.Helper()
	var opts pki.CSROptions
	for _, id := range ids {
		opts.SANs = append(opts.SANs, pki.IDSAN(id))
	}
	return must.Get(pki.NewCSR(key, opts))(t)
}

func newCSR(t testing.TB, ids ...spiffe.ID) *pki.CSR {
	t.Helper()
	return csrFor(t, must.Get(pki.NewKey("ecdsa-p256"))(t), ids...)
}

func requireBadAnswer(t testing.TB, err error) {
	t.Helper()
	e := must.As[*caclient.Error](err)(t)
	require.Equal(t, caclient.ErrBadAnswer, e.Kind)
	_, ok := e.Retryable()
	require.False(t, ok, "a CA that sent nonsense is not asked again")
}

// fixed is a CA with one answer.
type fixed struct {
	chain   []*x509.Certificate
	bundles *spiffe.BundleSet
}

func (f fixed) Sign(context.Context, *pki.CSR, time.Duration) ([]*x509.Certificate, error) {
	return f.chain, nil
}
func (f fixed) FetchBundles(context.Context) (*spiffe.BundleSet, error) { return f.bundles, nil }

// Every way of being no identity that the fixtures know.
func TestFaults(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	refused := 0
	for _, f := range spiffetest.Faults() {
		if !slices.Contains(f.Refused, spiffe.BothRoles) {
			continue
		}
		refused++
		t.Run(f.Name, func(t *testing.T) {
			chain, key := ca.Broken(f.Name)
			// Even a caller that wants exactly the ID in the leaf does not get it.
			id, err := spiffe.IDFromCertificate(chain[0])
			if err != nil {
				id = spiffe.MustParseID("spiffe://example.org/broken")
			}
			c := newClient(t, fixed{chain, ca.Bundles()}, &caclient.Options{Expect: pki.ExpectID(id)})
			requireBadAnswer(t, must.Err(c.Sign(t.Context(), csrFor(t, key), 0)))
		})
	}
	assert.Greater(t, refused, 17)
}

// A flipped bit anywhere in the certificate: either it does not parse, or it is refused.
func TestDamage(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	chain, key := ca.Certificate("/web")
	csr, raw := csrFor(t, key, web), chain[0].Raw
	parsed := 0
	for i := range raw {
		damaged := slices.Clone(raw)
		damaged[i] ^= 1 << (i % 8)
		c, err := x509.ParseCertificate(damaged)
		if err != nil {
			continue
		}
		parsed++
		client := newClient(t, fixed{[]*x509.Certificate{c}, ca.Bundles()}, nil)
		require.Error(t, must.Err(client.Sign(t.Context(), csr, 0)), "byte %d", i)
	}
	assert.Greater(t, parsed, 100)
}
