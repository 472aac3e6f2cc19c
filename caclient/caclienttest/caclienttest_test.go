package caclienttest_test

import (
	"context"
	"crypto/x509"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const path = "/ns/default/sa/web"

// fake is what the tests need of a CA.
type fake interface {
	Endpoint() caclient.Endpoint
	Expectation() pki.Expectation
}

// api is a Fake with its client.
type api struct {
	fake   func(t testing.TB, ca *spiffetest.CA, path string) fake
	client func(caclient.Endpoint) (caclient.CA, error)
}

// apis are those of this package, and one whose server is made for tests.
var apis = map[string]api{
	"Istio": {
		func(t testing.TB, ca *spiffetest.CA, path string) fake { return caclienttest.NewIstio(t, ca, path) },
		func(e caclient.Endpoint) (caclient.CA, error) { return istioca.New(istioca.Options{Endpoint: e}) },
	},
	"Linkerd": {
		func(t testing.TB, ca *spiffetest.CA, path string) fake { return caclienttest.NewLinkerd(t, ca, path) },
		func(e caclient.Endpoint) (caclient.CA, error) {
			return linkerd.New(linkerd.Options{Endpoint: e, Mesh: mesh(e.TrustDomain)})
		},
	},
	"step-ca": {
		func(t testing.TB, ca *spiffetest.CA, path string) fake { return cafake.NewStepCA(t, ca, path) },
		func(e caclient.Endpoint) (caclient.CA, error) { return stepca.New(stepca.Options{Endpoint: e}) },
	},
}

// mesh is that of NewLinkerd.
func mesh(td spiffe.TrustDomain) linkerdname.Mesh {
	return linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: td.String()}
}

func newCSR(t testing.TB, f fake) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: f.Expectation().Names()})
}

// A wrong answer of the CA reaches the client, whatever the server in between would check.
func TestEditsReachTheWire(t *testing.T) {
	t.Parallel()
	for name, a := range apis {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			authority := spiffetest.NewCA(t, "example.org")
			f := a.fake(t, authority, path)
			c := must.Get(a.client(f.Endpoint()))(t)
			authority.EditTemplates(func(c *x509.Certificate) { c.Subject.CommonName, c.IsCA = "edited", true })
			assert.Equal(t, "edited", must.Get(c.Sign(t.Context(), newCSR(t, f), 0))(t)[0].Subject.CommonName)
			authority.EditTemplates(nil)
			authority.EditAnswers(func(c []*x509.Certificate) []*x509.Certificate { return append(c, c[0], authority.Root()) })
			assert.Len(t, must.Get(c.Sign(t.Context(), newCSR(t, f), 0))(t), 1, "the client tidies it")
			authority.EditAnswers(func([]*x509.Certificate) []*x509.Certificate { return nil })
			assert.ErrorIs(t, must.Err(c.Sign(t.Context(), newCSR(t, f), 0)), caclient.ErrBadAnswer)
		})
	}
}

// A Fake has the rules of its API: a caller with the token of another one gets nothing.
func TestOtherCallersAreRefused(t *testing.T) {
	t.Parallel()
	for name, a := range apis {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			authority := spiffetest.NewCA(t, "example.org")
			f, other := a.fake(t, authority, path), a.fake(t, authority, path)
			token, err := other.Endpoint().Token(t.Context())
			require.NoError(t, err)
			e := f.Endpoint()
			e.Token = func(context.Context) (string, error) { return token, nil }
			c := must.Get(a.client(e))(t)
			_, err = c.Sign(t.Context(), newCSR(t, f), 0)
			failure := must.As[*caclient.Error](err)(t)
			assert.Contains(t, []error{caclient.ErrUnauthenticated, caclient.ErrInvalid}, failure.Kind)
			assert.Zero(t, authority.Signed())
		})
	}
}

// In a bubble, a day passes at once.
func TestInMemory(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		authority := spiffetest.NewCA(t, "example.org")
		f := caclienttest.NewIstio(caclienttest.InMemory(t), authority, path)
		c := must.Get(istioca.New(istioca.Options{Endpoint: f.Endpoint()}))(t)
		m := must.Get(secretcache.New(secretcache.Config{ID: f.Expectation().ID(), CA: c, Lifetime: time.Hour}))(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		time.Sleep(time.Second)
		for i, fault := range []func(){f.Deny, f.Garble, f.Drop, f.Hang} {
			fault()
			time.Sleep(25 * time.Minute)
			svid := must.Get(m.SVID())(t, "fault %d", i)
			f.Mend()
			left := time.Until(svid.NotAfter())
			if left < 30*time.Minute {
				time.Sleep(left / 20)
				assert.NotSame(t, svid, must.Get(m.SVID())(t), "fault %d: back within 5%% of what remains", i)
			}
		}
		cancel()
		<-done
	})
}

// Linkerd's API in memory is without TLS, as its clients have no other way in.
func TestLinkerdInMemory(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		authority := spiffetest.NewCA(t, "example.org")
		f := caclienttest.NewLinkerd(caclienttest.InMemory(t), authority, path)
		inner := must.Get(linkerd.New(linkerd.Options{Endpoint: f.Endpoint(), Mesh: mesh(authority.TrustDomain())}))(t)
		c := must.Get(caclient.New(inner, &caclient.Options{Expect: f.Expectation()}))(t)
		for range 3 {
			must.Get(c.Sign(t.Context(), newCSR(t, f), 0))(t)
			authority.Rotate()
			time.Sleep(time.Hour)
		}
	})
}

// The Signer stands behind the servers of this library.
func TestSigner(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	f := caclienttest.NewIstio(t, authority, path)
	s := f.Signer()
	assert.Same(t, authority.Bundle(), s.Bundle())
	assert.Same(t, authority.Bundle(), s.CallerBundle())
	assert.True(t, s.Proven(nil).IsZero())
	csr := newCSR(t, f)
	id := spiffe.MustParseID("spiffe://example.org/other")
	chain, err := s.Sign(t.Context(), ca.Request{CSR: csr, ID: id, DNSNames: []string{"web.test"}, TTL: time.Minute})
	require.NoError(t, err)
	assert.Equal(t, id.String(), chain[0].URIs[0].String(), "what is granted counts, and not what is asked for")
	assert.Equal(t, []string{"web.test"}, chain[0].DNSNames)
	for kind, want := range map[error]error{
		caclient.ErrUnavailable: spiffe.ErrNotReady, caclient.ErrInvalid: ca.ErrCSR, caclient.ErrDenied: ca.ErrIdentity, io.EOF: spiffe.ErrNotReady,
	} {
		authority.FailNext(1, &caclient.Error{Op: "sign", Kind: kind, Err: io.EOF, RetryAfter: time.Minute})
		_, err = s.Sign(t.Context(), ca.Request{CSR: csr, ID: id})
		failed := must.As[*ca.SignError](err)(t)
		assert.Equal(t, want, failed.Kind)
		assert.Equal(t, time.Minute, failed.RetryAfter)
	}
}

// failT ends its goroutine where a test would end.
type failT struct {
	testing.TB
	said string
}

func (*failT) Helper() {}

func (t *failT) Fatalf(format string, args ...any) {
	t.said = fmt.Sprintf(format, args...)
	panic(t)
}

func TestBadPaths(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	for name, a := range apis {
		for _, bad := range []string{"", "web", "/", "/a b", "/.."} {
			f := &failT{TB: t}
			assert.Panics(t, func() { a.fake(f, authority, bad) }, "%s %q", name, bad)
			assert.True(t, strings.HasPrefix(f.said, "caclienttest: the path "), f.said)
		}
	}
	f := &failT{TB: t}
	assert.Panics(t, func() { caclienttest.NewLinkerd(f, authority, "/web") }, "Linkerd has service accounts alone")
	assert.Contains(t, f.said, `caclienttest: the path "/web"`)
}
