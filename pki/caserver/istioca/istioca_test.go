package istioca_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/asn1"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/internal/test/caservertest"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/programtest"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/auditlog"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

const (
	unauthenticated = "request authenticate failure"
	impersonation   = "request impersonation authentication failure"
)

func TestNew(t *testing.T) {
	t.Parallel()
	good := istioca.Options{Signer: authority(t), Authenticator: callers}
	must.Get(istioca.New(good))(t)
	for want, edit := range map[string]func(*istioca.Options){
		"istioca: invalid Options: Signer is nil":        func(o *istioca.Options) { o.Signer = nil },
		"istioca: invalid Options: Authenticator is nil": func(o *istioca.Options) { o.Authenticator = nil },
	} {
		bad := good
		edit(&bad)
		require.ErrorContains(t, must.Err(istioca.New(bad)), want)
	}
}

// What a stock client looks at: leaf first, roots last, the profile of the leaf.
func TestIssue(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-3", "IST-4.4-1", "IST-4.4-5")
	a := authority(t)
	s := serve(t, istioca.Options{Signer: a})
	before := time.Now().Truncate(time.Second)
	chain := s.issue(t, "web", &wire.IstioCertificateRequest{
		Csr: newCSR(t, pki.CSROptions{SANs: []pki.SAN{
			pki.IDSAN(spiffe.MustParseID("spiffe://example.org/ns/kube-system/sa/admin")), pki.DNSSAN("admin.test"),
		}}),
		ValidityDuration: 3600,
	})
	require.Len(t, chain, 2)
	require.Len(t, chain[0], 1)
	leaf := chain[0][0]
	assert.Equal(t, []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: "/ns/prod/sa/web"}}, leaf.URIs)
	assert.Empty(t, leaf.DNSNames)
	assert.Empty(t, leaf.IPAddresses)
	assert.Empty(t, leaf.EmailAddresses)
	for _, e := range leaf.Extensions {
		if e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) {
			assert.False(t, e.Critical, "there is a subject")
		}
	}
	assert.Equal(t, "O=svidkit", leaf.Subject.String())
	assert.Equal(t, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, leaf.ExtKeyUsage)
	assert.False(t, leaf.IsCA)
	assert.True(t, pki.PublicKeysEqual(testKey().Public(), leaf.PublicKey))
	assert.WithinRange(t, leaf.NotBefore, before.Add(-2*time.Minute), time.Now().Add(-2*time.Minute))
	assert.WithinRange(t, leaf.NotAfter, before.Add(time.Hour), time.Now().Add(time.Hour))
	assert.Equal(t, raw(chain[1]), raw([]*x509.Certificate{a.Status().Roots[0].Certificate}))

	v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowIDs(spiffe.MustParseID(webID)), nil))(t)
	must.Get(v.VerifyChain(chain[0], spiffe.AnyRole))(t)
}

// The common name is the ID if the request has one at all, and if the ID fits.
func TestCommonName(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-11", "IST-2.5-1", "IST-2.6-13", "IST-3.4-8")
	fits := "spiffe://example.org/" + strings.Repeat("a", 64-len("spiffe://example.org/"))
	s := serve(t, istioca.Options{Authenticator: tokens{"fits": caller(fits), "long": caller(fits + "a"), "web": caller(webID)}})
	for _, test := range []struct{ token, asked, want string }{
		{"web", "", ""},
		{"web", "x", webID},
		{"web", "spiffe://example.org/admin", webID},
		{"fits", "x", fits},
		{"long", "x", ""},
		{"long", "", ""},
	} {
		leaf := s.issue(t, test.token, &wire.IstioCertificateRequest{Csr: newCSR(t, pki.CSROptions{CommonName: test.asked})})[0][0]
		assert.Equal(t, test.want, leaf.Subject.CommonName, "%+v", test)
		assert.Len(t, leaf.URIs, 1)
	}
}

func TestUnauthenticated(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-1", "IST-4.2-2", "IST-4.2-7", "IST-4.3-2", "IST-4.3-3", "IST-5.1-3")
	s := serve(t, istioca.Options{Authenticator: tokens{
		"web":         caller(webID),
		"refused":     fmt.Errorf("tokens: secret reason: %w", authn.ErrRefused),
		"no caller":   (*authn.Caller)(nil),
		"no identity": &authn.Caller{Method: "test"},
		"a name":      &authn.Caller{Method: "unix-peer", Name: "uid:1000", NotAfter: time.Now().Add(time.Hour)},
		"a DNS name":  &authn.Caller{Method: "test", DNSNames: []string{"web.test"}, Pod: &spiffe.Pod{Namespace: "prod", ServiceAccount: "web", Name: "web-0", UID: "u-1"}},
		"never":       final{},
	}})
	must.Get(s.call(t, "web", goodRequest(t)))(t)
	for name, header := range map[string][]string{
		"no token":           nil,
		"empty":              {""},
		"another scheme":     {"Basic web"},
		"lower case":         {"bearer web"},
		"Istio":              {"Istio web"},
		"unknown":            {"Bearer nothing"},
		"refused":            {"Bearer refused"},
		"no caller":          {"Bearer no caller"},
		"no identity":        {"Bearer no identity"},
		"a name":             {"Bearer a name"},
		"a DNS name":         {"Bearer a DNS name"},
		"never":              {"Bearer never"},
		"the blank is a tab": {"Bearer\tweb"},
	} {
		_, err := callWith(t.Context(), s.client, s.url, http.Header{"Authorization": header}, goodRequest(t))
		refused(t, err, grpchttp.Unauthenticated, unauthenticated)
		assert.NotContains(t, err.Error(), "secret", name)
	}
	assert.Equal(t, "13", s.metric(t, "authentication_failure_count"))
	assert.Equal(t, "14", s.metric(t, "csr_count"))
	assert.Equal(t, "1", s.metric(t, "success_cert_issuance_count"))
	assert.Regexp(t, `peer=127\.0\.0\.1:\d+ code=unauthenticated err=".*secret reason.*"`, s.logs.String())
	assert.Contains(t, s.logs.String(), "neither a caller with a SPIFFE ID nor an error")
}

// temporary is an error that says that it passes.
type temporary time.Duration

func (temporary) Error() string                      { return "secret reason: the API server is away" }
func (e temporary) Retryable() (time.Duration, bool) { return time.Duration(e), true }

// final says that it does not pass.
type final struct{}

func (final) Error() string                    { return "secret reason: never" }
func (final) Retryable() (time.Duration, bool) { return 0, false }

// Who cannot be told now is not told that the credential is bad.
func TestAuthenticatorUnavailable(t *testing.T) {
	t.Parallel()
	o := istioca.Options{
		Authenticator: authn.FirstOf(tokens{}, tokens{
			"no answer": errors.New("secret reason: no connection"),
			"away":      temporary(0),
			"later":     temporary(1500 * time.Millisecond),
			"wrapped":   fmt.Errorf("tokens: %w", fmt.Errorf("%w", temporary(0))),
			"two": authn.FirstOf(tokens{"two": fmt.Errorf("tokens: %w", authn.ErrRefused)},
				tokens{"two": errors.New("secret reason: no connection")}).Authenticate,
			"cause": fmt.Errorf("tokens: %w: %w", authn.ErrRefused, errors.New("secret reason: expired")),
			"never": errors.Join(fmt.Errorf("tokens: %w", authn.ErrNoCredential), final{}),
			"hangs": func(r *http.Request) (*authn.Caller, error) {
				<-r.Context().Done()
				return nil, fmt.Errorf("tokens: %w: %w", authn.ErrRefused, r.Context().Err())
			},
		}, tokens{}),
	}
	s := serve(t, o)
	for token, want := range map[string]time.Duration{"no answer": 0, "away": 0, "later": 1501 * time.Millisecond, "wrapped": 0, "two": 0} {
		_, err := s.call(t, token, goodRequest(t))
		assert.Equal(t, want, refused(t, err, grpchttp.Unavailable, unauthenticated).RetryAfter)
	}
	for _, token := range []string{"never", "cause", "unknown"} {
		_, err := s.call(t, token, goodRequest(t))
		refused(t, err, grpchttp.Unauthenticated, unauthenticated)
	}
	assert.Equal(t, "8", s.metric(t, "authentication_failure_count"))
	assert.Contains(t, s.logs.String(), "secret reason: no connection")
	bubble.Run(t, "a hanging one", func(t *testing.T) {
		o.AllowPlaintext = true
		hanging := serve(t, o)
		_, err := call(t.Context(), hanging.client, hanging.url, "hangs", goodRequest(t))
		refused(t, err, grpchttp.Unavailable, unauthenticated)
	})
}

func TestPlaintext(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-11", "IST-4.3-4", "IST-5.1-4")
	for allow, code := range map[bool]grpchttp.Code{false: grpchttp.Unauthenticated, true: 0} {
		l := new(programtest.Log)
		s := newServer(t, istioca.Options{Signer: authority(t), Authenticator: callers, AllowPlaintext: allow, Logger: caservertest.Logger(l)})
		url := "http" + caservertest.Start(t, s, func(hs *http.Server, l net.Listener) error { return hs.Serve(l) })
		_, err := call(t.Context(), caservertest.HTTP2Client(t, nil), url, "web", goodRequest(t))
		if allow {
			require.NoError(t, err)
			continue
		}
		refused(t, err, code, unauthenticated)
		assert.Contains(t, l.String(), "not encrypted")
	}
}

// However often a caller is refused, the log has a line for each reason, and a count.
func TestRefusalsAreCounted(t *testing.T) {
	t.Parallel()
	l := new(programtest.Log)
	limited := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Limits: ca.Limits{CallerRate: 1e-6}}))(t)
	both := authn.FirstOf(authn.Func(func(*http.Request) (*authn.Caller, error) { return nil, authn.ErrNoCredential }), callers)
	s := serve(t, istioca.Options{Signer: limited, Authenticator: both, Logger: slog.New(slog.NewTextHandler(l, nil))})
	good := goodRequest(t)
	for range rounds.Of(50) {
		_, _ = s.call(t, "web", good) // the first is served
		_, _ = s.call(t, "unknown", good)
		_, _ = s.call(t, "web", &wire.IstioCertificateRequest{Csr: rand.Text()})
	}
	assert.Equal(t, 3, strings.Count(l.String(), "\n"), l.String())
	assert.NotContains(t, l.String(), `\n`, "nor in a value")
	for _, line := range []string{`level=WARN msg="istioca: certificate refused" reason="too many requests"`, `level=INFO msg="istioca: certificate refused" reason="credential refused"`, "reason=invalid_argument"} {
		assert.Contains(t, l.String(), line)
	}
}

// A node's proxy has the share of each workload that it asks for, and a pod one of its own.
func TestLimitKeys(t *testing.T) {
	t.Parallel()
	limited, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Limits: ca.Limits{CallerRate: 1e-6, CallerBurst: 2}})
	require.NoError(t, err)
	pod := func(uid string) *authn.Caller {
		c := caller(webID)
		c.Pod = &spiffe.Pod{Namespace: "prod", ServiceAccount: "web", UID: uid}
		return c
	}
	node := caller(nodeID)
	node.Pod = &spiffe.Pod{Namespace: "kube-system", ServiceAccount: "ztunnel", UID: "n1"}
	s := serve(t, istioca.Options{
		Signer: limited, Authenticator: tokens{"web": caller(webID), "1": pod("1"), "2": pod("2"), "node": node},
		NodeAuthorizer: func(context.Context, *authn.Caller, spiffe.ID) error { return nil },
	})
	ask := func(token, as string) grpchttp.Code {
		m := goodRequest(t)
		if as != "" {
			m = impersonate(t, structpb.NewStringValue(as))
		}
		_, err := s.call(t, token, m)
		e, _ := errors.AsType[*grpchttp.Error](err)
		if e == nil {
			return grpchttp.OK
		}
		return e.Code
	}
	for _, tc := range [][2]string{{"web", ""}, {"1", ""}, {"2", ""}, {"node", ""}, {"node", webID}, {"node", webID + "2"}, {"node", webID + "3"}} {
		for n, want := range []grpchttp.Code{grpchttp.OK, grpchttp.OK, grpchttp.ResourceExhausted} {
			assert.Equal(t, want, ask(tc[0], tc[1]), "request %d of %s for %q", n+1, tc[0], tc[1])
		}
	}
}

// A workload renews with the certificate that it has.
func TestClientCertificate(t *testing.T) {
	t.Parallel()
	a := authority(t)
	v := must.Get(spiffe.NewVerifier(a.Bundle(), spiffe.AllowMembersOf(a.Bundle().TrustDomain()), nil))(t)
	s := serve(t, istioca.Options{Signer: a, Authenticator: authn.FirstOf(authn.ClientCertificate(v), callers)})
	renew := func(id string) [][]byte {
		key := must.Get(pki.NewKey("ecdsa-p256"))(t)
		csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
		chain := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID(id)}))(t)
		cfg := s.tls.Clone()
		cfg.Certificates = []tls.Certificate{{Certificate: raw(chain), PrivateKey: key}}
		resp := must.Get(call(t.Context(), caservertest.HTTP2Client(t, cfg), s.url, "", goodRequest(t)))(t)
		return raw(parse(t, resp.GetCertChain())[0])
	}
	leaf := must.Get(x509.ParseCertificate(renew("spiffe://example.org/batch")[0]))(t)
	assert.Equal(t, "spiffe://example.org/batch", must.Get(spiffe.IDFromCertificate(leaf))(t).String())

	// A certificate of another CA is not proof, and does not stand in the way of a token.
	cfg := s.tls.Clone()
	chain, key := spiffetest.NewCA(t, "example.org").Certificate("/batch")
	cfg.Certificates = []tls.Certificate{{Certificate: raw(chain), PrivateKey: key}}
	c := caservertest.HTTP2Client(t, cfg)
	_, err := call(t.Context(), c, s.url, "", goodRequest(t))
	refused(t, err, grpchttp.Unauthenticated, unauthenticated)
	resp := must.Get(call(t.Context(), c, s.url, "web", goodRequest(t)))(t)
	assert.Equal(t, webID, must.Get(spiffe.IDFromCertificate(parse(t, resp.GetCertChain())[0][0]))(t).String())
}

// A chain of renewals by certificate alone has an end, however often the caller renews: each certificate carries when the caller
// was proven otherwise. Another proof begins a new chain.
func TestRenewalsEnd(t *testing.T) {
	t.Parallel()
	a := authority(t)
	td := a.Bundle().TrustDomain()
	key := must.Get(pki.NewKey("ecdsa-p256"))(t)
	csr := must.Get(pki.NewCSR(key, pki.CSROptions{}))(t)
	// serveFor serves callers that may renew for that long. What it returns renews a chain, with a token beside it or "".
	serveFor := func(signer ca.Signer, longest time.Duration) func(chain []*x509.Certificate, token string) ([]*x509.Certificate, error) {
		proof := must.Get(istioca.ClientCertificates(signer, td, longest))(t)
		s := serve(t, istioca.Options{Signer: signer, Authenticator: authn.FirstOf(callers, proof), CertificateTTL: 10 * time.Minute})
		return func(chain []*x509.Certificate, token string) ([]*x509.Certificate, error) {
			cfg := s.tls.Clone()
			cfg.Certificates = []tls.Certificate{{Certificate: raw(chain), PrivateKey: key}}
			resp, err := call(t.Context(), caservertest.HTTP2Client(t, cfg), s.url, token, &wire.IstioCertificateRequest{Csr: string(csr.PEM()), ValidityDuration: 3600})
			if err != nil {
				return nil, err
			}
			return parse(t, resp.GetCertChain())[0], nil
		}
	}
	proven := func(ago time.Duration) (time.Time, []*x509.Certificate) {
		at := time.Now().Add(-ago)
		return at, must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID(webID), Proven: at}))(t)
	}

	hour := serveFor(a, time.Hour)
	at, chain := proven(50 * time.Minute)
	for range 3 {
		chain = must.Get(hour(chain, ""))(t)
		require.Equal(t, at.Unix(), a.Proven(chain[0]).Unix(), "a certificate is no new proof")
		require.LessOrEqual(t, time.Until(chain[0].NotAfter), 10*time.Minute, "and CertificateTTL is for it")
	}
	_, late := proven(time.Hour + time.Minute)
	_, err := hour(late, "")
	refused(t, err, grpchttp.Unauthenticated, unauthenticated)
	again := must.Get(hour(late, "web"))(t)
	require.WithinDuration(t, time.Now(), a.Proven(again[0]), time.Minute, "another proof")
	require.Greater(t, time.Until(again[0].NotAfter), 10*time.Minute)
	must.Get(hour(again, ""))(t)

	require.NoError(t, must.Err(serveFor(a, 0)(late, "")), "without end")
	for _, longest := range []time.Duration{time.Hour, math.MaxInt64} { // of a signer that cannot tell
		_, err = serveFor(wrap(a), longest)(again, "")
		refused(t, err, grpchttp.Unauthenticated, unauthenticated)
	}
	require.Error(t, must.Err(istioca.ClientCertificates(a, td, -1)))
}

// What a proxy forwards proves its client and never the proxy, and nothing while a root is tainted.
func TestForwardedCertificates(t *testing.T) {
	t.Parallel()
	a := authority(t)
	td := a.Bundle().TrustDomain()
	forwarded := must.Get(istioca.ForwardedCertificates(a, td, nil))(t)
	csr := must.Get(pki.NewCSR(testKey(), pki.CSROptions{}))(t)
	gateway := must.Get(a.Sign(t.Context(), ca.Request{CSR: csr, ID: spiffe.MustParseID("spiffe://example.org/gateway")}))(t)
	all := authn.FirstOf(must.Get(istioca.ClientCertificates(a, td, 0))(t), forwarded)
	ask := func(header ...string) (string, error) {
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.RemoteAddr, r.TLS = "127.0.0.1:1", &tls.ConnectionState{PeerCertificates: gateway}
		if header != nil {
			r.Header["X-Forwarded-Client-Cert"] = header
		}
		c, err := all.Authenticate(r)
		if err != nil {
			return "", err
		}
		return c.ID.String(), nil
	}
	const behind = "URI=" + webID
	require.Equal(t, "spiffe://example.org/gateway", must.Get(ask())(t))
	require.Equal(t, webID, must.Get(ask(behind))(t))
	for _, header := range []string{"", "x", "DNS=web.example.org", "URI=spiffe://evil.test/web"} {
		require.Error(t, must.Err(ask(header)), header)
	}
	require.NoError(t, a.Taint(t.Context(), a.Status().Roots[0].ID))
	_, err := ask(behind)
	require.ErrorIs(t, err, authn.ErrRefused)
	require.ErrorContains(t, err, "tainted")
	_, err = istioca.ForwardedCertificates(a, td, []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")})
	require.Error(t, err)
}

func TestPolicy(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-3")
	named := caller(webID)
	named.DNSNames = []string{"web.test", "www.web.test"}
	known := tokens{"web": named}
	names := func(p func(context.Context, *authn.Caller) (istioca.Grant, error)) []string {
		leaf := serve(t, istioca.Options{Authenticator: known, Policy: p}).issue(t, "web", goodRequest(t))[0][0]
		sans := append([]string{}, leaf.DNSNames...)
		for _, u := range leaf.URIs {
			sans = append(sans, u.String())
		}
		for _, ip := range leaf.IPAddresses {
			sans = append(sans, ip.String())
		}
		return sans
	}
	assert.Equal(t, []string{webID}, names(nil))
	assert.Equal(t, []string{"web.test", "www.web.test", webID}, names(func(_ context.Context, c *authn.Caller) (istioca.Grant, error) {
		return istioca.Grant{ID: c.ID, DNSNames: c.DNSNames}, nil
	}), "as Istio's CA does")
	assert.Equal(t, []string{"other.test", "spiffe://example.org/other", "10.0.0.1"}, names(func(_ context.Context, c *authn.Caller) (istioca.Grant, error) {
		assert.Same(t, named, c)
		return istioca.Grant{ID: spiffe.MustParseID("spiffe://example.org/other"), DNSNames: []string{"other.test"}, IPs: []net.IP{net.IPv4(10, 0, 0, 1)}}, nil
	}))

	for name, test := range map[string]struct {
		grant istioca.Grant
		err   error
		code  grpchttp.Code
		text  string
		after time.Duration
		id    string // of id_extraction_err_count
	}{
		"refused":              {err: errors.New("secret reason"), code: grpchttp.PermissionDenied, text: "the CA does not certify this caller"},
		"refused for good":     {err: final{}, code: grpchttp.PermissionDenied, text: "the CA does not certify this caller"},
		"no answer now":        {err: temporary(0), code: grpchttp.Unavailable, text: "the CA cannot answer now; try again later"},
		"no answer for a time": {err: temporary(2 * time.Second), code: grpchttp.Unavailable, text: "the CA cannot answer now; try again later", after: 2001 * time.Millisecond},
		"nothing":              {code: grpchttp.PermissionDenied, text: "the CA does not certify this caller"},
		"a foreign ID": {
			grant: istioca.Grant{ID: spiffe.MustParseID("spiffe://other.test/web")}, code: grpchttp.PermissionDenied, text: "the CA does not certify this caller",
		},
		"a trust domain": {
			grant: istioca.Grant{ID: spiffe.MustParseID("spiffe://example.org")}, code: grpchttp.PermissionDenied, text: "the CA does not certify this caller",
		},
	} {
		a := wrap(authority(t))
		s := serve(t, istioca.Options{Signer: a, Policy: func(context.Context, *authn.Caller) (istioca.Grant, error) { return test.grant, test.err }})
		_, err := s.call(t, "web", goodRequest(t))
		assert.Equal(t, test.after, refused(t, err, test.code, "CSR signing error ("+test.text+")").RetryAfter)
		assert.Equal(t, test.grant.ID, a.asked().ID, "%s: the signer is asked for no other", name)
		assert.Equal(t, !test.grant.ID.IsZero(), a.asked().CSR != nil, "%s: and not for nothing", name)
		assert.Equal(t, "1", s.metric(t, "id_extraction_err_count"), name)
		assert.Equal(t, "1", s.metric(t, `csr_sign_err_count{error="ID_ERROR"}`), name)
	}
}

func impersonate(t testing.TB, v *structpb.Value) *wire.IstioCertificateRequest {
	t.Helper()
	m := goodRequest(t)
	m.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{"ImpersonatedIdentity": v}}
	return m
}

func TestImpersonation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-13", "IST-4.2-4", "IST-4.3-9")
	a := wrap(authority(t))
	policy := func(_ context.Context, c *authn.Caller) (istioca.Grant, error) {
		return istioca.Grant{ID: c.ID, DNSNames: []string{"own.test"}}, nil
	}
	var mu sync.Mutex
	var asked []string
	s := serve(t, istioca.Options{Signer: a, Policy: policy, NodeAuthorizer: func(_ context.Context, c *authn.Caller, id spiffe.ID) error {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, c.ID.String()+" "+id.String())
		if c.ID.String() != nodeID {
			return errors.New("secret reason")
		}
		return nil
	}})
	leaf := s.issue(t, "node", impersonate(t, structpb.NewStringValue(webID)))[0][0]
	require.Len(t, leaf.URIs, 1)
	assert.Equal(t, webID, leaf.URIs[0].String())
	assert.Empty(t, leaf.DNSNames, "the node's own names are not the workload's")
	assert.Equal(t, nodeID, a.asked().Caller, "the record names the caller")
	assert.Equal(t, []string{nodeID + " " + webID}, asked)

	_, err := s.call(t, "web", impersonate(t, structpb.NewStringValue(nodeID)))
	refused(t, err, grpchttp.Unauthenticated, impersonation)
	assert.Contains(t, s.logs.String(), "secret reason")
	asked = nil
	for _, id := range []string{
		"web", " " + webID, webID + "/", "spiffe://Example.org/ns/a/sa/b", "SPIFFE://example.org/a", "spiffe://other.test/ns/prod/sa/web", webID + "," + webID,
		"spiffe://example.org.evil.test/a", strings.Repeat("a", 10000), "spiffe://example.org",
	} {
		_, err := s.call(t, "node", impersonate(t, structpb.NewStringValue(id)))
		refused(t, err, grpchttp.Unauthenticated, impersonation)
	}
	assert.Empty(t, asked)
	assert.Equal(t, "11", s.metric(t, "authentication_failure_count"))

	// What is not a text, or empty, is none: the caller is itself.
	for _, v := range []*structpb.Value{
		structpb.NewStringValue(""), structpb.NewNullValue(), structpb.NewBoolValue(true), structpb.NewNumberValue(1),
		structpb.NewListValue(&structpb.ListValue{Values: []*structpb.Value{structpb.NewStringValue(webID)}}),
		structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"ImpersonatedIdentity": structpb.NewStringValue(webID)}}),
	} {
		leaf := s.issue(t, "node", impersonate(t, v))[0][0]
		assert.Equal(t, nodeID, leaf.URIs[0].String())
	}

	// A question that could not be answered is no refusal for good, and a limit costs no connection.
	for text, cause := range map[string]error{
		"the CA cannot answer now; try again later": fmt.Errorf("no answer: %w", temporary(time.Minute)),
		"too many requests; try again later":        fmt.Errorf("too many: %w", &limit.Error{Reason: limit.CallerRate, RetryAfter: time.Minute}),
	} {
		code := grpchttp.Unavailable
		if strings.HasPrefix(text, "too many") {
			code = grpchttp.ResourceExhausted
		}
		busy := serve(t, istioca.Options{NodeAuthorizer: func(context.Context, *authn.Caller, spiffe.ID) error { return cause }})
		_, err = busy.call(t, "node", impersonate(t, structpb.NewStringValue(webID)))
		assert.InDelta(t, time.Minute, refused(t, err, code, text).RetryAfter, float64(2*time.Millisecond))
		assert.Equal(t, "0", busy.metric(t, "authentication_failure_count"))
	}

	without := serve(t, istioca.Options{})
	_, err = without.call(t, "node", impersonate(t, structpb.NewStringValue(webID)))
	refused(t, err, grpchttp.Unauthenticated, impersonation)
	_, err = without.call(t, "node", impersonate(t, structpb.NewStringValue(nodeID))) // not even itself
	refused(t, err, grpchttp.Unauthenticated, impersonation)
}

// What the signer is asked for.
func TestRequest(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-12", "IST-4.1-14", "IST-4.2-5")
	a := wrap(authority(t))
	s := serve(t, istioca.Options{Signer: a})
	m := goodRequest(t)
	m.ValidityDuration = 60
	m.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		"CertSigner": structpb.NewStringValue("special"), "WorkloadName": structpb.NewStringValue("x"), "ClusterID": structpb.NewListValue(&structpb.ListValue{}),
	}}
	s.issue(t, "web", m)
	got := a.asked()
	require.NotNil(t, got.CSR)
	got.CSR = nil
	assert.Equal(t, ca.Request{ID: spiffe.MustParseID(webID), TTL: time.Minute, Signer: "special", Caller: webID, Method: "test-token"}, got)
}

// TestAuditRecord reads the audit record back, which has all of the caller: also of one that asks for another workload.
func TestAuditRecord(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.jsonl")
	audit := must.Get(auditlog.Open(path, nil))(t)
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Auditor: audit}))(t)
	node := caller(nodeID)
	node.Pod = &spiffe.Pod{Cluster: "east", Namespace: "kube-system", ServiceAccount: "ztunnel", Name: "ztunnel-x", UID: "u-1", Node: "n1"}
	s := serve(t, istioca.Options{
		Signer: a, Authenticator: tokens{"node": node, "web": caller(webID)},
		NodeAuthorizer: func(context.Context, *authn.Caller, spiffe.ID) error { return nil },
	})
	s.issue(t, "node", goodRequest(t))
	s.issue(t, "node", impersonate(t, structpb.NewStringValue(webID)))
	s.issue(t, "web", goodRequest(t))
	require.NoError(t, audit.Close())
	text := must.Get(os.ReadFile(path))(t)
	var got []ca.Issuance
	for line := range bytes.Lines(text) {
		var i ca.Issuance
		require.NoError(t, json.Unmarshal(line, &i))
		if i.Kind != "" { // and no change of keys
			got = append(got, ca.Issuance{ID: i.ID, Caller: i.Caller, Method: i.Method, Pod: i.Pod})
		}
	}
	pod := spiffe.Pod{Cluster: "east", Namespace: "kube-system", ServiceAccount: "ztunnel", Name: "ztunnel-x", UID: "u-1", Node: "n1"}
	assert.Equal(t, []ca.Issuance{
		{ID: spiffe.MustParseID(nodeID), Caller: nodeID, Method: "test-token", Pod: pod},
		{ID: spiffe.MustParseID(webID), Caller: nodeID, Method: "test-token", Pod: pod},
		{ID: spiffe.MustParseID(webID), Caller: webID, Method: "test-token"},
	}, got)
}

func TestValidity(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-7", "IST-4.2-5", "IST-4.3-7", "IST-3.4-5")
	a := must.Get(ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), DefaultTTL: time.Hour, MaxTTL: 2 * time.Hour}))(t)
	s := serve(t, istioca.Options{Signer: a})
	ask := func(seconds int64) (*wire.IstioCertificateResponse, error) {
		m := goodRequest(t)
		m.ValidityDuration = seconds
		return s.call(t, "web", m)
	}
	for seconds, want := range map[int64]time.Duration{
		0: time.Hour, -1: time.Hour, math.MinInt64: time.Hour, 1: time.Second, 7200: 2 * time.Hour,
	} {
		before := time.Now().Truncate(time.Second)
		resp := must.Get(ask(seconds))(t)
		assert.WithinRange(t, parse(t, resp.GetCertChain())[0][0].NotAfter, before.Add(want), time.Now().Add(want), "%d", seconds)
	}
	tooLong := []int64{7201, math.MaxInt64 / int64(time.Second), math.MaxInt64/int64(time.Second) + 1, 1 << 62, math.MaxInt64}
	for _, seconds := range tooLong {
		_, err := ask(seconds)
		asked := time.Duration(math.MaxInt64)
		if seconds <= math.MaxInt64/int64(time.Second) {
			asked = time.Duration(seconds) * time.Second
		}
		refused(t, err, grpchttp.InvalidArgument, fmt.Sprintf("CSR signing error (the CA does not grant the lifetime: %v was asked for, the longest is 2h0m0s)", asked))
	}
	assert.Equal(t, strconv.Itoa(len(tooLong)), s.metric(t, `csr_sign_err_count{error="TTL_ERROR"}`))
}

func TestBadCSR(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-5", "IST-4.3-6", "IST-3.4-2")
	good := newCSR(t, pki.CSROptions{})
	lines := strings.Split(good, "\n")
	broken := strings.Replace(good, lines[2], strings.Repeat("A", len(lines[2])), 1)
	s := serve(t, istioca.Options{})
	bad := []string{"", "x", good[:len(good)/2], broken, good + good, strings.ReplaceAll(good, "CERTIFICATE REQUEST", "CERTIFICATE"), strings.Repeat("\n", 150<<10) + good}
	for _, csr := range bad {
		_, err := s.call(t, "web", &wire.IstioCertificateRequest{Csr: csr})
		e := must.As[*grpchttp.Error](err)(t)
		assert.Equal(t, grpchttp.InvalidArgument, e.Code)
		assert.Regexp(t, `^CSR signing error \(pki: invalid certificate signing request.*\)$`, e.Message)
	}
	assert.Equal(t, strconv.Itoa(len(bad)), s.metric(t, "csr_parsing_err_count"))
	assert.Equal(t, strconv.Itoa(len(bad)), s.metric(t, `csr_sign_err_count{error="CSR_ERROR"}`))
}

func TestSignerErrors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.2-5", "IST-3.4-9")
	kind := func(k error, after time.Duration) error {
		return &ca.SignError{Kind: k, ID: spiffe.MustParseID(webID), Err: errors.New("secret reason"), RetryAfter: after}
	}
	for name, test := range map[string]struct {
		err   error
		code  grpchttp.Code
		label string
		text  string
		after time.Duration
	}{
		"CSR":              {kind(ca.ErrCSR, 0), grpchttp.InvalidArgument, "CSR_ERROR", "the key of the request must not be certified", 0},
		"TTL":              {kind(ca.ErrTTL, 0), grpchttp.InvalidArgument, "TTL_ERROR", "the CA does not grant the lifetime", 0},
		"identity":         {kind(ca.ErrIdentity, 0), grpchttp.PermissionDenied, "ID_ERROR", "the CA does not certify this caller", 0},
		"not ready":        {kind(spiffe.ErrNotReady, 0), grpchttp.Unavailable, "CA_NOT_READY", "the CA is not ready to sign; try again later", 0},
		"not ready, until": {kind(spiffe.ErrNotReady, time.Minute), grpchttp.Unavailable, "CA_NOT_READY", "the CA is not ready to sign; try again later", time.Minute + time.Millisecond},
		"generation":       {kind(ca.ErrGeneration, 0), grpchttp.Internal, "CERT_GEN_ERROR", "the certificate could not be made", 0},
		"limit":            {kind(ca.ErrLimit, 0), grpchttp.ResourceExhausted, "LIMIT_ERROR", "too many requests; try again later", 0},
		"limit, until":     {kind(ca.ErrLimit, 250*time.Millisecond), grpchttp.ResourceExhausted, "LIMIT_ERROR", "too many requests; try again later", 251 * time.Millisecond},
		"limit, soon":      {kind(ca.ErrLimit, 1), grpchttp.ResourceExhausted, "LIMIT_ERROR", "too many requests; try again later", time.Millisecond},
		"audit":            {kind(ca.ErrAudit, 0), grpchttp.Unavailable, "AUDIT_ERROR", "the CA cannot answer now; try again later", 0},
		"another":          {errors.New("secret reason"), grpchttp.Internal, "UNKNOWN", "the certificate could not be made", 0},
		"another, final":   {final{}, grpchttp.Internal, "UNKNOWN", "the certificate could not be made", 0},
		"passing":          {fmt.Errorf("ra: %w", temporary(time.Second)), grpchttp.Unavailable, "UNKNOWN", "the CA cannot answer now; try again later", 1001 * time.Millisecond},
		"no chain":         {nil, grpchttp.Internal, "CERT_GEN_ERROR", "the answer of the signer cannot be used", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := wrap(authority(t))
			a.sign = func(context.Context, ca.Request) ([]*x509.Certificate, error) { return nil, test.err }
			s := serve(t, istioca.Options{Signer: a})
			_, err := s.call(t, "web", goodRequest(t))
			assert.Equal(t, test.after, refused(t, err, test.code, "CSR signing error ("+test.text+")").RetryAfter)
			assert.Equal(t, "1", s.metric(t, `csr_sign_err_count{error="`+test.label+`"}`))
			assert.Equal(t, "0", s.metric(t, "success_cert_issuance_count"))
			if test.err != nil {
				assert.Contains(t, s.logs.String(), "secret reason")
			}
			assert.Contains(t, s.logs.String(), "caller.id="+webID)
		})
	}
}

// The time of the server for a call, the deadline of the client, and its cancellation are told apart.
func TestTimeout(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		a := wrap(authority(t))
		entered := make(chan struct{}, 8)
		a.sign = func(ctx context.Context, _ ca.Request) ([]*x509.Certificate, error) {
			entered <- struct{}{}
			<-ctx.Done()
			return nil, fmt.Errorf("ca: sign: %w", context.Cause(ctx))
		}
		s, m, began := serve(t, istioca.Options{Signer: a, AllowPlaintext: true}), goodRequest(t), time.Now()
		_, err := call(t.Context(), s.client, s.url, "web", m)
		refused(t, err, grpchttp.Unavailable, "CSR signing error (the CA cannot answer now; try again later)")
		assert.Equal(t, 75*time.Second, time.Since(began))
		<-entered

		began = time.Now()
		hurry := func(r *http.Request) { r.Header.Set("Grpc-Timeout", "2S") }
		resp, _ := post(t.Context(), t, s.client, s.url, "web", bytes.NewReader(frame(0, marshal(t, m))), hurry)
		assert.Equal(t, "4", resp.Trailer.Get("Grpc-Status"))
		require.Equal(t, "CSR signing error (the deadline of the call has passed)", resp.Trailer.Get("Grpc-Message"))
		assert.Equal(t, 2*time.Second, time.Since(began))
		assert.Contains(t, s.logs.String(), "code=deadline_exceeded")
		<-entered

		ctx, cancel := context.WithCancel(t.Context())
		gone := make(chan error, 1)
		go func() {
			_, err := call(ctx, s.client, s.url, "web", m)
			gone <- err
		}()
		<-entered // the signer waits
		cancel()
		require.ErrorIs(t, <-gone, context.Canceled)
		synctest.Wait()
		assert.Contains(t, s.logs.String(), "code=canceled")
		assert.Equal(t, "3", s.metric(t, `csr_sign_err_count{error="UNKNOWN"}`))
	})
}

// A panic ends one call.
func TestPanics(t *testing.T) {
	t.Parallel()
	a := wrap(authority(t))
	sign := a.sign
	a.sign = func(ctx context.Context, r ca.Request) ([]*x509.Certificate, error) {
		if r.Signer == "panic" {
			panic("secret reason")
		}
		return sign(ctx, r)
	}
	s := serve(t, istioca.Options{Signer: a, Authenticator: tokens{"web": caller(webID), "panic": func(*http.Request) (*authn.Caller, error) { panic("secret token") }}})
	_, err := s.call(t, "panic", goodRequest(t))
	refused(t, err, grpchttp.Internal, "internal error")
	m := goodRequest(t)
	m.Metadata = &structpb.Struct{Fields: map[string]*structpb.Value{"CertSigner": structpb.NewStringValue("panic")}}
	_, err = s.call(t, "web", m)
	refused(t, err, grpchttp.Internal, "internal error")
	s.issue(t, "web", goodRequest(t))
	assert.Equal(t, 2, strings.Count(s.logs.String(), "level=ERROR"))
	assert.Contains(t, s.logs.String(), "secret reason")
}

// Many at once, each with its own identity.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	known, n := tokens{}, rounds.Of(8)
	for i := range n {
		known[fmt.Sprint(i)] = caller(fmt.Sprintf("spiffe://example.org/w/%d", i))
	}
	a := authority(t)
	s := serve(t, istioca.Options{Signer: a, Authenticator: known})
	var wg sync.WaitGroup
	for i := range n {
		csr := newCSR(t, pki.CSROptions{})
		c := caservertest.HTTP2Client(t, s.tls)
		wg.Go(func() {
			for range 4 {
				resp, err := call(t.Context(), c, s.url, fmt.Sprint(i), &wire.IstioCertificateRequest{Csr: csr})
				if !assert.NoError(t, err) {
					return
				}
				certs, err := pki.ParseCertificatesPEM([]byte(resp.GetCertChain()[0]))
				if assert.NoError(t, err) && assert.Len(t, certs[0].URIs, 1) {
					assert.Equal(t, known[fmt.Sprint(i)].(*authn.Caller).ID.String(), certs[0].URIs[0].String())
				}
			}
		})
	}
	wg.Wait()
	assert.Equal(t, fmt.Sprint(4*n), s.metric(t, "success_cert_issuance_count"))
}
