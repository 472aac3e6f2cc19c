package authn_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func clientCertificate(t *testing.T, bundles spiffe.BundleSource, allow spiffe.Policy) authn.Authenticator {
	t.Helper()
	v := must.Get(spiffe.NewVerifier(bundles, allow, nil))(t)
	return authn.ClientCertificate(v)
}

func request(chain ...*x509.Certificate) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "https://ca.example.org/", nil)
	r.TLS = &tls.ConnectionState{PeerCertificates: chain}
	return r
}

func TestClientCertificate(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.SVID("/web")
	caller := must.Get(clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(web.ID())).Authenticate(request(web.Chain()...)))(t)
	assert.Equal(t, web.ID(), caller.ID)
	assert.Equal(t, "client-certificate", caller.Method)
	assert.Equal(t, web.NotAfter(), caller.NotAfter)
	assert.Nil(t, caller.DNSNames)
	assert.Nil(t, caller.Pod)
}

func TestLogValue(t *testing.T) {
	t.Parallel()
	logged := func(c *authn.Caller) string {
		var b strings.Builder
		h := slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
				return slog.Attr{}
			}
			return a
		}})
		slog.New(h).Info("-", "caller", c)
		return strings.TrimSpace(b.String())
	}
	c := &authn.Caller{ID: spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web"), Method: "kubernetes-token"}
	assert.Equal(t, `msg=- caller.id=spiffe://example.org/ns/prod/sa/web caller.method=kubernetes-token`, logged(c))
	c.NotAfter = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	c.DNSNames = []string{"web.prod.svc", "web"}
	c.Pod = &spiffe.Pod{Namespace: "prod", ServiceAccount: "web"}
	assert.Equal(t, `msg=- caller.id=spiffe://example.org/ns/prod/sa/web caller.method=kubernetes-token caller.not_after=2030-01-02T03:04:05.000Z `+
		`caller.dns_names="[web.prod.svc web]" caller.pod.namespace=prod caller.pod.service_account=web`, logged(c))
	c.Pod = &spiffe.Pod{Cluster: "west", Namespace: "prod", ServiceAccount: "web", Name: "web-0", UID: "u-1"}
	assert.Contains(t, logged(c), `caller.pod.cluster=west caller.pod.namespace=prod caller.pod.service_account=web caller.pod.name=web-0 caller.pod.uid=u-1`)
	assert.Equal(t, `msg=- caller.name=uid:1000 caller.method=unix-peer`, logged(&authn.Caller{Name: "uid:1000", Method: "unix-peer"}))
	assert.Equal(t, `msg=- caller.method=m caller.dns_names=[web.test]`, logged(&authn.Caller{DNSNames: []string{"web.test"}, Method: "m"}))
}

// A caller without a SPIFFE ID has one name for limits and records, which no other caller has.
func TestCallerString(t *testing.T) {
	t.Parallel()
	id := spiffe.MustParseID("spiffe://example.org/web")
	seen := map[string]bool{}
	for _, c := range []struct {
		caller *authn.Caller
		want   string
	}{
		{nil, ""},
		{&authn.Caller{}, ""},
		{&authn.Caller{Method: "m", NotAfter: time.Now(), Pod: &spiffe.Pod{Name: "web-0"}}, ""},
		{&authn.Caller{ID: id, Name: "web", Method: "m", DNSNames: []string{"web.test"}}, "spiffe://example.org/web"},
		{&authn.Caller{Name: "uid:1000", Method: "unix-peer"}, "unix-peer:uid:1000"},
		{&authn.Caller{Name: "web.test", Method: "m"}, "m:web.test"},
		{&authn.Caller{DNSNames: []string{"web.test", "b.test"}, Method: "m"}, "m DNS:web.test"},
		{&authn.Caller{Name: "DNS:web.test", Method: "m"}, "m:DNS:web.test"},
		{&authn.Caller{Name: "spiffe://example.org/web", Method: "jwt"}, "jwt:spiffe://example.org/web"},
	} {
		assert.Equal(t, c.want, c.caller.String())
		assert.False(t, seen[c.want] && c.want != "", c.want)
		seen[c.want] = true
	}
}

// A workload that renews with its certificate can have the same names again, if they are names.
func TestClientCertificateDNSNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.2-3")
	ca := spiffetest.NewCA(t, "example.org")
	a := clientCertificate(t, ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()))
	long := strings.Repeat("a", 63)
	longest := strings.Repeat(long+".", 3) + strings.Repeat("b", 61)
	require.Len(t, longest, 253)
	for _, c := range []struct{ in, want []string }{
		{[]string{"web.prod.svc"}, []string{"web.prod.svc"}},
		{[]string{"b.test", "a.test", "b.test"}, []string{"b.test", "a.test"}},
		{[]string{"web", "A_b-1.Test", "*.example.org", long + ".test", longest}, []string{"web", "A_b-1.Test", "*.example.org", long + ".test", longest}},
		{[]string{longest + "b"}, nil},
		{[]string{long + "a.test"}, nil},
		{[]string{"192.0.2.1"}, nil},
		{[]string{"-a.test"}, nil},
		{[]string{"a-.test"}, nil},
		{[]string{"a..test"}, nil},
		{[]string{"a.test."}, nil},
		{[]string{".test"}, nil},
		{[]string{"a b.test"}, nil},
		{[]string{"a,b.test"}, nil},
		{[]string{"a/b"}, nil},
		{[]string{"spiffe:"}, nil},
		{[]string{"*"}, nil},
		{[]string{"*.test"}, nil},
		{[]string{"a.*.test"}, nil},
		{[]string{"*a.test"}, nil},
		{[]string{"a..b", "ok.test", "*"}, []string{"ok.test"}},
	} {
		web := ca.SVID("/web", func(t *x509.Certificate) { t.DNSNames = c.in })
		caller := must.Get(a.Authenticate(request(web.Chain()...)))(t, "%q", c.in)
		assert.Equal(t, c.want, caller.DNSNames, "%q", c.in)
		if len(c.want) > 0 { // the caller's own copy
			caller.DNSNames[0] = "changed"
			assert.Equal(t, c.in, web.Leaf().DNSNames)
		}
	}

	// What this package takes for a DNS name, package pki signs.
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	for _, name := range []string{"web", "A_b-1.Test", "*.example.org", longest} {
		assert.NoError(t, must.Err(pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN(name)}})), name)
	}
}

func TestClientCertificateAbsent(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.2-1")
	a := clientCertificate(t, spiffetest.NewCA(t, "example.org").Bundle(), spiffe.AllowAnyPeer())
	plain := httptest.NewRequest(http.MethodGet, "/", nil)
	plain.Header.Set("X-Forwarded-Client-Cert", "URI=spiffe://example.org/web") // is not looked at
	for name, r := range map[string]*http.Request{"no TLS": plain, "no certificate": request()} {
		_, err := a.Authenticate(r)
		require.ErrorIs(t, err, authn.ErrNoCredential, name)
		assert.NotErrorIs(t, err, authn.ErrRefused, name)
	}
}

func TestClientCertificateRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.2-2", "IST-5.2-4")
	ca := spiffetest.NewCA(t, "example.org")
	allow := spiffe.AllowMembersOf(ca.TrustDomain())
	a := clientCertificate(t, ca.Bundle(), allow)
	for _, f := range spiffetest.Faults() {
		if !slices.Contains(f.Refused, spiffe.ClientRole) {
			continue
		}
		t.Run(f.Name, func(t *testing.T) {
			chain, _ := ca.Broken(f.Name)
			_, err := a.Authenticate(request(chain...))
			require.ErrorIs(t, err, authn.ErrRefused)
			assert.NotErrorIs(t, err, authn.ErrNoCredential)
			e, ok := errors.AsType[*spiffe.VerifyError](err)
			require.True(t, ok)
			assert.Equal(t, f.Stage, e.Stage)
		})
	}
	t.Run("policy", func(t *testing.T) {
		_, err := clientCertificate(t, ca.Bundle(), spiffe.AllowIDs(ca.SVID("/db").ID())).Authenticate(request(ca.SVID("/web").Chain()...))
		must.Fail(t, err, authn.ErrRefused, spiffe.ErrDenied)
	})
}

// A request on a connection that is older than the newest bundle is judged by the newest.
func TestClientCertificateFollowsTheBundle(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.SVID("/web")
	a := clientCertificate(t, bundleFunc(func(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return ca.Bundle().Bundle(td) }), spiffe.AllowAnyPeer())
	require.NoError(t, must.Err(a.Authenticate(request(web.Chain()...))))
	ca.Rotate()
	ca.DropOldRoots()
	require.ErrorIs(t, must.Err(a.Authenticate(request(web.Chain()...))), authn.ErrRefused)
}

type bundleFunc func(spiffe.TrustDomain) (*spiffe.Bundle, error)

func (f bundleFunc) Bundle(td spiffe.TrustDomain) (*spiffe.Bundle, error) { return f(td) }

func TestFirstOf(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.1-2")
	none := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, fmt.Errorf("none: %w", authn.ErrNoCredential) })
	bad := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, fmt.Errorf("bad: %w", authn.ErrRefused) })
	good := authn.Func(func(*http.Request) (*authn.Caller, error) {
		return &authn.Caller{ID: spiffe.MustParseID("spiffe://example.org/web"), Method: "good"}, nil
	})
	never := authn.Func(func(*http.Request) (*authn.Caller, error) {
		t.Error("asked though an earlier one answered")
		return nil, nil
	})

	c := must.Get(authn.FirstOf(none, bad, good, never).Authenticate(request()))(t)
	assert.Equal(t, "good", c.Method)

	// Neither a caller nor an error proves nothing, and does not keep others from proving something.
	silent := authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, nil })
	nobody := authn.Func(func(*http.Request) (*authn.Caller, error) { return &authn.Caller{Method: "nobody"}, nil })
	c = must.Get(authn.FirstOf(silent, nobody, good).Authenticate(request()))(t)
	assert.Equal(t, "good", c.Method)
	for _, m := range []authn.Authenticator{silent, nobody} {
		c, err := authn.FirstOf(m).Authenticate(request())
		require.ErrorIs(t, err, authn.ErrNoCredential)
		assert.Nil(t, c)
	}

	// A name that is no SPIFFE ID is a proof, too.
	for _, named := range []*authn.Caller{{Method: "m", Name: "uid:1000"}, {Method: "m", DNSNames: []string{"web.test"}}} {
		c := must.Get(authn.FirstOf(silent, nobody, authn.Func(func(*http.Request) (*authn.Caller, error) { return named, nil }), never).Authenticate(request()))(t)
		assert.Same(t, named, c)
	}

	must.Fail(t, must.Err(authn.FirstOf(none, bad).Authenticate(request())), authn.ErrNoCredential, authn.ErrRefused)

	require.ErrorIs(t, must.Err(authn.FirstOf().Authenticate(request())), authn.ErrNoCredential)
}
