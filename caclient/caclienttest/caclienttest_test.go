package caclienttest_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const path = "/ns/default/sa/web"

var _ local.Authority = (*caclienttest.Signer)(nil)

// api is a Fake with its client.
type api struct {
	fake   func(t testing.TB, ca *spiffetest.CA, path string) *caclienttest.Fake
	client func(*caclienttest.Fake) (caclient.CA, error)
}

var apis = map[string]api{
	"Istio": {caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
	}},
	"Linkerd": {caclienttest.NewLinkerd, func(f *caclienttest.Fake) (caclient.CA, error) {
		e := f.Endpoint()
		return linkerd.New(linkerd.Options{Endpoint: e, Mesh: caclienttest.Mesh(e.TrustDomain)})
	}},
	"step-ca": {caclienttest.NewStepCA, func(f *caclienttest.Fake) (caclient.CA, error) {
		return stepca.New(stepca.Options{Endpoint: f.Endpoint()})
	}},
}

func newCSR(t testing.TB, f *caclienttest.Fake) *pki.CSR {
	t.Helper()
	key, err := pki.NewKey(pki.ECDSAP256)
	require.NoError(t, err)
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: f.Expectation().Names()})
	require.NoError(t, err)
	return csr
}

// A wrong answer of the CA reaches the client, whatever the server in between would check.
func TestEditsReachTheWire(t *testing.T) {
	t.Parallel()
	for name, a := range apis {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			authority := spiffetest.NewCA(t, "example.org")
			f := a.fake(t, authority, path)
			c, err := a.client(f)
			require.NoError(t, err)
			authority.EditTemplates(func(c *x509.Certificate) { c.Subject.CommonName, c.IsCA = "edited", true })
			chain, err := c.Sign(t.Context(), newCSR(t, f), 0)
			require.NoError(t, err)
			assert.Equal(t, "edited", chain[0].Subject.CommonName)
			authority.EditTemplates(nil)
			authority.EditAnswers(func(c []*x509.Certificate) []*x509.Certificate { return append(c, c[0], authority.Root()) })
			chain, err = c.Sign(t.Context(), newCSR(t, f), 0)
			require.NoError(t, err)
			assert.Len(t, chain, 1, "the client tidies it")
			authority.EditAnswers(func([]*x509.Certificate) []*x509.Certificate { return nil })
			_, err = c.Sign(t.Context(), newCSR(t, f), 0)
			assert.ErrorIs(t, err, caclient.ErrBadAnswer)
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
			var c caclient.CA
			switch name {
			case "Istio":
				c, err = istioca.New(istioca.Options{Endpoint: e})
			case "Linkerd":
				c, err = linkerd.New(linkerd.Options{Endpoint: e, Mesh: caclienttest.Mesh(e.TrustDomain)})
			case "step-ca":
				c, err = stepca.New(stepca.Options{Endpoint: e})
			}
			require.NoError(t, err)
			_, err = c.Sign(t.Context(), newCSR(t, f), 0)
			failure, ok := errors.AsType[*caclient.Error](err)
			require.True(t, ok, "%v", err)
			assert.Contains(t, []error{caclient.ErrUnauthenticated, caclient.ErrInvalid}, failure.Kind)
			assert.Zero(t, authority.Signed())
		})
	}
}

func TestDial(t *testing.T) {
	t.Parallel()
	authority := spiffetest.NewCA(t, "example.org")
	f := caclienttest.NewStepCA(t, authority, path)
	client := f.Endpoint().HTTPClient
	url := f.Endpoint().URL + "/roots"
	get := func() (int, string, error) {
		resp, err := client.Get(url)
		if err != nil {
			return 0, "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return resp.StatusCode, string(body), err
	}
	code, _, err := get()
	require.NoError(t, err)
	assert.Equal(t, http.StatusCreated, code)
	f.Deny()
	code, body, err := get()
	require.NoError(t, err)
	assert.Equal(t, http.StatusForbidden, code)
	assert.JSONEq(t, `{"status":403,"message":"denied by the test"}`, body)
	open, err := tls.Dial("tcp", strings.TrimPrefix(f.Endpoint().URL, "https://"), &tls.Config{RootCAs: authority.Bundle().CertPool(), ServerName: "localhost"})
	require.NoError(t, err)
	defer open.Close()
	f.Drop()
	require.NoError(t, open.SetReadDeadline(time.Now().Add(5*time.Second)))
	_, err = open.Read(make([]byte, 1))
	assert.NotErrorIs(t, err, os.ErrDeadlineExceeded, "an open connection is cut")
	require.Error(t, err)
	_, _, err = get()
	assert.Error(t, err)
	f.Hang()
	hung := make(chan error)
	go func() {
		_, _, err := get()
		hung <- err
	}()
	time.Sleep(20 * time.Millisecond)
	f.Mend()
	require.NoError(t, <-hung, "what hung is answered")
	assert.GreaterOrEqual(t, f.Requests(), 3)
	f.Refuse(&caclient.Error{Kind: caclient.ErrUnavailable, Err: errors.New("later"), RetryAfter: 1500 * time.Millisecond})
	resp, err := client.Get(url)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, "2", resp.Header.Get("Retry-After"))

	// Another name or another root is not this server.
	tr := client.Transport.(*http.Transport).Clone()
	tr.TLSClientConfig = &tls.Config{RootCAs: x509.NewCertPool()}
	defer tr.CloseIdleConnections()
	_, err = (&http.Client{Transport: tr}).Get(url)
	assert.ErrorContains(t, err, "unknown authority")
	token, err := f.Endpoint().Token(t.Context())
	require.NoError(t, err)
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		assert.NotContains(t, fmt.Sprintf(format, f), token)
	}
	assert.NotContains(t, f.LogValue().String(), token)
}

// In a bubble, a day passes at once.
func TestInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		authority := spiffetest.NewCA(t, "example.org")
		f := caclienttest.NewIstio(caclienttest.InMemory(t), authority, path)
		c, err := istioca.New(istioca.Options{Endpoint: f.Endpoint()})
		require.NoError(t, err)
		m, err := secretcache.New(secretcache.Config{ID: f.Expectation().ID(), CA: c, Lifetime: time.Hour})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- m.Run(ctx) }()
		time.Sleep(time.Second)
		for i, fault := range []func(){f.Deny, f.Garble, f.Drop, f.Hang} {
			fault()
			time.Sleep(25 * time.Minute)
			svid, err := m.SVID()
			require.NoError(t, err, "fault %d", i)
			f.Mend()
			left := time.Until(svid.NotAfter())
			if left < 30*time.Minute {
				time.Sleep(left / 20)
				now, err := m.SVID()
				require.NoError(t, err)
				assert.NotSame(t, svid, now, "fault %d: back within 5%% of what remains", i)
			}
		}
		cancel()
		<-done
	})
}

// Linkerd's API in memory is without TLS, as its clients have no other way in.
func TestLinkerdInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		authority := spiffetest.NewCA(t, "example.org")
		f := caclienttest.NewLinkerd(caclienttest.InMemory(t), authority, path)
		inner, err := linkerd.New(linkerd.Options{Endpoint: f.Endpoint(), Mesh: caclienttest.Mesh(authority.TrustDomain())})
		require.NoError(t, err)
		c, err := caclient.New(inner, &caclient.Options{Expect: f.Expectation()})
		require.NoError(t, err)
		for range 3 {
			_, err = c.Sign(t.Context(), newCSR(t, f), 0)
			require.NoError(t, err)
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
	assert.Equal(t, authority.TrustDomain(), s.TrustDomain())
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
		failed, ok := errors.AsType[*ca.SignError](err)
		require.True(t, ok)
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
