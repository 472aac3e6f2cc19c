package vault_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/logtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

var _ caclient.CA = (*vault.CA)(nil)

// Each login with each way in which a role takes names.
func TestSign(t *testing.T) {
	t.Parallel()
	for _, login := range []string{"token", "file", "kubernetes"} {
		for _, ignore := range []bool{false, true} {
			t.Run(fmt.Sprint(login, ignore), func(t *testing.T) {
				t.Parallel()
				ca := spiffetest.NewCA(t, "example.org")
				v := cafake.NewVault(t, ca.Intermediate(), "/web")
				v.Change(func(r *cafake.VaultRules) {
					r.IgnoreCSRSANs, r.Kubernetes, r.Namespace = ignore, login == "kubernetes", "team/prod"
				})
				o := vault.Options{Endpoint: v.Endpoint(), Role: "workload", Namespace: "/team/prod/"}
				switch login {
				case "file":
					token := must.Get(o.Token(t.Context()))(t)
					o.Token, o.TokenFile = nil, filepath.Join(t.TempDir(), "token")
					require.NoError(t, os.WriteFile(o.TokenFile, []byte(token+"\n"), 0o600))
				case "kubernetes":
					o.LoginRole = "workload"
				}
				client := must.Get(caclient.New(newCA(t, o), nil))(t)
				for range 3 {
					csr := webCSR(t)
					chain := must.Get(client.Sign(t.Context(), csr, 90*time.Minute))(t)
					assert.NoError(t, cafake.Check(chain, csr, pki.ExpectID(webID), ca.Bundle()))
					assert.Len(t, chain, 2, "the intermediate and no root")
					assert.WithinDuration(t, time.Now().Add(90*time.Minute), chain[0].NotAfter, time.Minute)
				}
				if login == "kubernetes" {
					assert.Equal(t, 1, v.Logins(), "the token is kept")
				}
			})
		}
	}
}

// Other names than a SPIFFE ID, and the common name, which becomes none of them.
func TestOtherNames(t *testing.T) {
	t.Parallel()
	for _, ignore := range []bool{false, true} {
		v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
		v.Change(func(r *cafake.VaultRules) {
			r.IgnoreCSRSANs, r.RequireCN = ignore, true
			r.AllowedDomains = []string{"web.test", "db.test", "cn.test"}
		})
		c := newCA(t, vault.Options{Endpoint: v.Endpoint(), Role: "workload"})
		names := []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("web.test"), pki.DNSSAN("db.test"), pki.IPSAN([]byte{192, 0, 2, 1}), pki.IPSAN(make([]byte, 15+1))}
		chain, err := c.Sign(t.Context(), cafake.NewCSR(t, pki.CSROptions{CommonName: "cn.test", SANs: names}), 0)
		require.NoError(t, err)
		assert.ElementsMatch(t, names, must.Get(pki.ParseSANs(chain[0].Extensions))(t))
		assert.Equal(t, "cn.test", chain[0].Subject.CommonName)
		assert.WithinDuration(t, time.Now().Add(time.Hour), chain[0].NotAfter, time.Minute, "the role's")

		_, err = c.Sign(t.Context(), cafake.NewCSR(t, pki.CSROptions{SANs: names}), 0)
		require.ErrorIs(t, err, caclient.ErrInvalid)
		assert.ErrorContains(t, err, "common_name field is required")
	}
}

// What is sent, field for field.
func TestWire(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	s := &cafake.Script{Answer: func(c cafake.Call) (int, any) {
		switch c.URL.Path {
		case "/v1/ns/pki-2/issuers":
			return 200, doc{"data": doc{"keys": []string{"a-1"}}}
		case "/v1/ns/pki-2/issuer/a-1/json":
			return 200, doc{"data": doc{"certificate": string(pki.MarshalCertificatesPEM(ca.Root()))}}
		case "/v1/auth/a/b/login":
			return 200, loginAnswer("hvs.1", 3600)
		}
		return signed(ca, c)
	}}
	c := newCA(t, vault.Options{Endpoint: endpoint(s), Mount: "ns/pki-2/", Role: "my.role_1", Namespace: "team", LoginRole: "r", LoginMount: "/a/b/"})
	csr := cafake.NewCSR(t, pki.CSROptions{CommonName: "cn", SANs: []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("a.test"), pki.DNSSAN("b.test"), pki.IPSAN([]byte{192, 0, 2, 1})}})
	for _, lifetime := range []time.Duration{0, time.Millisecond, 90*time.Second + time.Millisecond} {
		must.Get(c.Sign(t.Context(), csr, lifetime))(t)
	}
	set := must.Get(c.FetchBundles(t.Context()))(t)
	assert.True(t, set.Equal(must.Get(spiffe.NewBundleSet(must.Get(spiffe.NewBundle(domain, spiffe.BundleContents{X509Authorities: []*x509.Certificate{ca.Root()}}))(t)))(t)))
	assert.Equal(t, []string{
		"POST /v1/auth/a/b/login",
		"POST /v1/ns/pki-2/sign/my.role_1", "POST /v1/ns/pki-2/sign/my.role_1", "POST /v1/ns/pki-2/sign/my.role_1",
		"GET /v1/ns/pki-2/issuers?list=true", "GET /v1/ns/pki-2/issuer/a-1/json",
	}, s.Paths())
	assert.JSONEq(t, `{"role":"r","jwt":"`+secret+`"}`, s.Calls()[0].Raw)
	for i, ttl := range []any{nil, "1s", "90s"} {
		want := doc{"csr": string(csr.PEM()), "common_name": "cn", "alt_names": "a.test,b.test", "uri_sans": webID.String(),
			"ip_sans": "192.0.2.1", "format": "pem", "exclude_cn_from_sans": true}
		if ttl != nil {
			want["ttl"] = ttl
		}
		assert.Equal(t, want, s.Calls()[1+i].Body)
	}
	for i, r := range s.Calls() {
		assert.Equal(t, "team/", r.Header.Get("X-Vault-Namespace"))
		assert.Equal(t, "true", r.Header.Get("X-Vault-Request"))
		assert.Equal(t, map[bool]string{true: "hvs.1"}[i >= 1 && i <= 3], r.Header.Get("X-Vault-Token"), r.URL)
		assert.Empty(t, r.Header.Get("Authorization"))
	}

	// Without a login and a token: a proxy of Vault adds its own.
	e := endpoint(s)
	e.Token = nil
	must.Get(newCA(t, vault.Options{Endpoint: e, Role: "r"}).Sign(t.Context(), csr, 0))(t)
	last := s.Calls()[len(s.Calls())-1]
	assert.Equal(t, "/v1/pki/sign/r", last.URL.Path)
	assert.NotContains(t, last.Header, "X-Vault-Token")
	assert.NotContains(t, last.Header, "X-Vault-Namespace")
}

// Requests that cannot be asked of Vault are refused before anything is sent.
func TestBadRequests(t *testing.T) {
	t.Parallel()
	s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return 500, "" }}
	c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "r"})
	comma := cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{{Type: pki.URI, Value: "urn:a,spiffe://example.org/admin"}}})
	for name, f := range map[string]func() error{
		"no request":        func() error { _, err := c.Sign(t.Context(), nil, 0); return err },
		"negative lifetime": func() error { _, err := c.Sign(t.Context(), webCSR(t), -1); return err },
		"two names in one":  func() error { _, err := c.Sign(t.Context(), comma, 0); return err },
	} {
		e := must.As[*caclient.Error](f())(t, name)
		assert.Equal(t, caclient.ErrInvalid, e.Kind, name)
		_, again := e.Retryable()
		assert.False(t, again, name)
	}
	assert.Empty(t, s.Paths())
}

func TestBadOptions(t *testing.T) {
	t.Parallel()
	good := func() vault.Options {
		return vault.Options{Endpoint: caclient.Endpoint{URL: "https://vault.test:8200", TrustDomain: domain, Token: cafake.Give(secret)}, Role: "web"}
	}
	must.Get(vault.New(good()))(t)
	for name, c := range map[string]struct {
		edit func(*vault.Options)
		want string
	}{
		"no URL":            {func(o *vault.Options) { o.URL = "" }, "URL"},
		"no TLS":            {func(o *vault.Options) { o.URL = "http://vault.test" }, "AllowPlaintext"},
		"path":              {func(o *vault.Options) { o.URL += "/v1" }, "URL"},
		"no trust domain":   {func(o *vault.Options) { o.TrustDomain = spiffe.TrustDomain{} }, "TrustDomain"},
		"two tokens":        {func(o *vault.Options) { o.TokenFile = "x" }, "TokenFile"},
		"no role":           {func(o *vault.Options) { o.Role = "" }, "Role"},
		"role with a path":  {func(o *vault.Options) { o.Role = "web/../../sys" }, "Role"},
		"role with a query": {func(o *vault.Options) { o.Role = "web?x" }, "Role"},
		"role with period":  {func(o *vault.Options) { o.Role = "web." }, "Role"},
		"long role":         {func(o *vault.Options) { o.Role = strings.Repeat("r", 256) }, "Role"},
		"mount upwards":     {func(o *vault.Options) { o.Mount = "pki/../kv" }, "Mount"},
		"empty segment":     {func(o *vault.Options) { o.Mount = "a//b" }, "Mount"},
		"escaped mount":     {func(o *vault.Options) { o.Mount = "a%2fb" }, "Mount"},
		"long mount":        {func(o *vault.Options) { o.Mount = strings.Repeat("mount/", 100) }, "Mount"},
		"namespace":         {func(o *vault.Options) { o.Namespace = "a\r\nX-Vault-Token: b" }, "Namespace"},
		"login role":        {func(o *vault.Options) { o.LoginRole = "a b" }, "LoginRole"},
		"no login role":     {func(o *vault.Options) { o.LoginMount = "jwt" }, "LoginRole"},
		"login mount":       {func(o *vault.Options) { o.LoginRole, o.LoginMount = "web", ".." }, "LoginMount"},
		"nothing to log in": {func(o *vault.Options) { o.LoginRole, o.Token = "web", nil }, "LoginRole"},
	} {
		o := good()
		c.edit(&o)
		_, err := vault.New(o)
		require.Error(t, err, name)
		assert.ErrorContains(t, err, "vault: invalid Options: ", name)
		assert.ErrorContains(t, err, c.want, name)
		assert.NotContains(t, err.Error(), secret)
	}
}

// What Vault answers when it refuses, and what the caller learns.
func TestErrors(t *testing.T) {
	t.Parallel()
	const denied = "1 error occurred:\n\t* permission denied\n\n"
	for _, c := range []struct {
		name  string
		code  int
		body  any
		kind  error
		again bool
		says  string
	}{
		{"denied", 403, vaultErrors(denied), caclient.ErrDenied, false, "permission denied"},
		{"ended token", 403, vaultErrors("2 errors occurred:\n\t* permission denied\n\t* invalid token\n\n"), caclient.ErrUnauthenticated, false, "* permission denied * invalid token"},
		{"bad or missing token of OpenBao", 403, vaultErrors("permission denied"), caclient.ErrUnauthenticated, false, "permission denied"},
		{"no issuer", 500, vaultErrors("1 error occurred:\n\t* could not fetch the CA certificate (was one set?): no default issuer currently configured\n\n"),
			caclient.ErrUnavailable, true, "no default issuer"},
		{"bad token", 403, vaultErrors("permission denied", "invalid token"), caclient.ErrUnauthenticated, false, "permission denied; invalid token"},
		{"no token", 400, vaultErrors("missing client token"), caclient.ErrUnauthenticated, false, "missing client token"},
		{"bad request", 400, vaultErrors("unknown role: web"), caclient.ErrInvalid, false, "unknown role: web"},
		{"beyond the CA's end", 400, vaultErrors("cannot satisfy request, as TTL would result in notAfter beyond the expiration of the CA certificate"),
			caclient.ErrInvalid, false, "cannot satisfy"},
		{"no engine", 404, vaultErrors(`no handler for route "pki/sign/web"`), caclient.ErrInvalid, false, "no handler"},
		{"method", 405, vaultErrors("unsupported operation"), caclient.ErrInvalid, false, "unsupported"},
		{"not heard of yet", 412, vaultErrors("required index state not present"), caclient.ErrUnavailable, true, "required index"},
		{"too large", 413, vaultErrors("request body too large"), caclient.ErrInvalid, false, ""},
		{"quota", 429, vaultErrors("rate limit quota exceeded"), caclient.ErrUnavailable, true, "quota"},
		{"secondary", 472, "", caclient.ErrUnavailable, true, ""},
		{"standby", 473, "", caclient.ErrUnavailable, true, ""},
		{"internal", 500, vaultErrors("internal error"), caclient.ErrUnavailable, true, "internal"},
		{"not initialised", 501, vaultErrors("Vault is not initialized"), caclient.ErrUnavailable, true, "not initialized"},
		{"behind a proxy", 502, "<html>Bad Gateway", caclient.ErrUnavailable, true, "502"},
		{"sealed", 503, vaultErrors("Vault is sealed"), caclient.ErrUnavailable, true, "Vault is sealed"},
		{"standby without forwarding", 307, "", caclient.ErrUnavailable, true, "URL"},
		{"moved", 301, "", caclient.ErrUnavailable, true, "URL"},
		{"nothing", 204, "", caclient.ErrBadAnswer, false, "JSON"},
		{"no JSON", 200, "<html>", caclient.ErrBadAnswer, false, "JSON"},
		{"no certificate", 200, doc{}, caclient.ErrBadAnswer, false, "no certificate"},
		{"other type", 200, doc{"data": []int{1}}, caclient.ErrBadAnswer, false, "JSON"},
		{"no PEM", 200, doc{"data": doc{"certificate": "MII"}}, caclient.ErrBadAnswer, false, "chain"},
		{"too much", 200, strings.Repeat(" ", 3<<20), caclient.ErrBadAnswer, false, "bytes"},
		{"repeats the token", 400, vaultErrors("bad: " + secret), caclient.ErrInvalid, false, "bad: [redacted]"},
		{"long", 400, vaultErrors(strings.Repeat("x", 1<<20)), caclient.ErrInvalid, false, "xxx"},
		{"errors of another type", 400, doc{"errors": 7}, caclient.ErrInvalid, false, "400"},
	} {
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return c.code, c.body }}
		var log logtest.Buffer
		e := endpoint(s)
		e.Logger = log.Logger()
		_, err := newCA(t, vault.Options{Endpoint: e, Role: "web"}).Sign(t.Context(), webCSR(t), 0)
		told := must.As[*caclient.Error](err)(t, c.name)
		assert.Equal(t, c.kind, told.Kind, c.name)
		assert.Equal(t, "sign", told.Op, c.name)
		_, again := told.Retryable()
		assert.Equal(t, c.again, again, c.name)
		assert.ErrorContains(t, err, c.says, c.name)
		assert.NotContains(t, err.Error()+log.String(), secret, c.name)
		assert.Less(t, len(err.Error()), 700, c.name)
		assert.Len(t, s.Paths(), 1, c.name)

		// A login that fails is one of the caller, or may pass, and never "denied" or "invalid".
		_, err = newCA(t, vault.Options{Endpoint: e, Role: "web", LoginRole: "web"}).Sign(t.Context(), webCSR(t), 0)
		told = must.As[*caclient.Error](err)(t, c.name)
		want := c.kind
		if c.code == 400 || c.code == 403 {
			want = caclient.ErrUnauthenticated
		}
		assert.Equal(t, want, told.Kind, c.name)
		assert.ErrorContains(t, err, map[bool]string{true: "log in: "}[c.code != 200], c.name)
		assert.NotContains(t, err.Error()+log.String(), secret, c.name)
	}
}

// After an answer of a server that does not work, the next call makes a new connection, which a proxy may give to another
// server.
func TestAnotherServer(t *testing.T) {
	t.Parallel()
	var conns atomic.Int32
	var code atomic.Int32
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(code.Load())) }))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	c := newCA(t, vault.Options{Endpoint: caclient.Endpoint{URL: srv.URL, TrustDomain: domain, AllowPlaintext: true}, Role: "web"})
	want := int32(1)
	for _, n := range []int32{400, 472, 473, 412, 307, 501, 503, 404, 400} {
		code.Store(n)
		_, err := c.Sign(t.Context(), webCSR(t), 0)
		require.Error(t, err)
		assert.Equal(t, want, conns.Load(), n)
		if errors.Is(err, caclient.ErrUnavailable) {
			want++
		}
	}
	assert.EqualValues(t, 7, want)

	before := conns.Load()
	c = newCA(t, vault.Options{Endpoint: caclient.Endpoint{URL: srv.URL, TrustDomain: domain, AllowPlaintext: true,
		HTTPClient: srv.Client()}, Role: "web", LoginRole: "web"})
	for range 3 { // the certificate of a connection may have ended
		must.Err(c.Sign(t.Context(), webCSR(t), 0))
	}
	assert.Equal(t, before+3, conns.Load(), "logins that are refused")
}

// The wait that Vault asks for is in the error.
func TestRetryAfter(t *testing.T) {
	t.Parallel()
	v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
	v.Refuse(&caclient.Error{Kind: caclient.ErrUnavailable, RetryAfter: 7 * time.Second, Err: errors.New("rate limit quota exceeded")})
	c := newCA(t, vault.Options{Endpoint: v.Endpoint(), Role: "workload"})
	_, signErr := c.Sign(t.Context(), webCSR(t), 0)
	_, fetchErr := c.FetchBundles(t.Context())
	for _, err := range []error{signErr, fetchErr} {
		e := must.As[*caclient.Error](err)(t)
		after, again := e.Retryable()
		assert.True(t, again)
		assert.Equal(t, 7*time.Second, after)
	}
}

// A mount without an issuer is worth another try, for certificates and for roots.
func TestNoIssuer(t *testing.T) {
	t.Parallel()
	v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
	v.Change(func(r *cafake.VaultRules) { r.NoIssuer = true })
	c := newCA(t, vault.Options{Endpoint: v.Endpoint(), Role: "workload"})
	_, err := c.Sign(t.Context(), webCSR(t), 0)
	require.ErrorIs(t, err, caclient.ErrUnavailable)
	_, err = c.FetchBundles(t.Context())
	require.ErrorIs(t, err, caclient.ErrUnavailable)
	assert.ErrorContains(t, err, "the mount has no issuer yet")
}

// The longest lifetime of the role is what a longer wish gets.
func TestLifetimeOfTheRole(t *testing.T) {
	t.Parallel()
	v := cafake.NewVault(t, spiffetest.NewCA(t, "example.org"), "/web")
	chain := must.Get(newCA(t, vault.Options{Endpoint: v.Endpoint(), Role: "workload"}).Sign(t.Context(), webCSR(t), 1000*time.Hour))(t)
	assert.WithinDuration(t, time.Now().Add(24*time.Hour), chain[0].NotAfter, time.Minute)
}

func TestConformance(t *testing.T) {
	cafake.Fewer(t) // package local takes all
	t.Parallel()
	cafake.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake {
		return cafake.NewVault(t, ca, path).Fake
	}, func(f *cafake.Fake) (caclient.CA, error) {
		return vault.New(vault.Options{Endpoint: f.Endpoint(), Role: "workload"})
	})
}

// FuzzAnswers gives one status and one body to every request, in the place of Vault: those that sign, log in, list issuers and
// show one.
func FuzzAnswers(f *testing.F) {
	ca := spiffetest.NewCA(f, "example.org")
	csr := webCSR(f)
	chain := must.Get(ca.Intermediate().Sign(f.Context(), csr, 0))(f)
	leaf, middle, root := pem(chain[0]), pem(chain[1]), pem(ca.Root())
	good := doc{"certificate": leaf, "issuing_ca": middle, "ca_chain": []string{middle, root}, "keys": []string{"id-1"}}
	for _, body := range []any{
		"", "{", doc{}, doc{"data": nil}, doc{"data": good}, doc{"data": good, "auth": doc{"client_token": "hvs.1", "lease_duration": 60}},
		doc{"data": doc{"certificate": leaf, "issuing_ca": root}}, doc{"data": doc{"certificate": root, "keys": []string{"a"}}},
		doc{"data": doc{"certificate": root, "revocation_time": 7, "keys": []string{"a", "b"}}}, doc{"data": doc{"certificate": leaf + leaf}},
		doc{"data": doc{"certificate": root, "ca_chain": []string{middle, root}, "revocation_time": "0", "keys": []string{"../x"}}},
		doc{"auth": doc{"client_token": "a b", "lease_duration": -1}}, doc{"auth": doc{"client_token": "x", "lease_duration": 1e40}},
		vaultErrors("permission denied"), vaultErrors("invalid token", secret), doc{"errors": "x"}, `{"data":{"certificate":"x","certificate":"y"}}`,
	} {
		text := must.Get(cafake.Text(body))(f)
		for _, code := range []int{200, 400, 403, 412, 307} {
			f.Add(code, text)
		}
	}
	f.Fuzz(func(t *testing.T, code int, body string) {
		if code < 200 || code > 999 {
			code = 200
		}
		s := &cafake.Script{Answer: func(cafake.Call) (int, any) { return code, body }}
		judge := func(err error) {
			told := must.As[*caclient.Error](err)(t)
			require.NotNil(t, told.Kind)
			if told.Op == "sign" { // the other requests have no token
				require.NotContains(t, err.Error(), secret)
			}
			require.Less(t, len(err.Error()), 2000)
		}
		for _, login := range []string{"", "web"} {
			c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web", LoginRole: login})
			got, err := c.Sign(t.Context(), csr, 0)
			if err != nil {
				require.Empty(t, got)
				judge(err)
				continue
			}
			require.True(t, pki.PublicKeysEqual(got[0].PublicKey, csr.PublicKey()))
			for i, c := range got[1:] {
				require.False(t, c.Equal(got[i]))
			}
		}
		c := newCA(t, vault.Options{Endpoint: endpoint(s), Role: "web"})
		roots, err := rootsOf(t, c)
		if err != nil {
			judge(err)
		} else {
			require.NotEmpty(t, roots)
			for _, root := range roots {
				require.True(t, root.IsCA)
				require.NoError(t, root.CheckSignatureFrom(root))
			}
		}
		for _, path := range s.Paths() {
			require.NotContains(t, path, "..")
			require.False(t, strings.Contains(path, "verbatim"))
		}
		require.LessOrEqual(t, len(s.Paths()), 4+1+64)
	})
}

const secret = "eyJhbGciOi.token.c2VjcmV0" // what must not be seen

var (
	domain = spiffe.MustParseTrustDomain("example.org")
	webID  = spiffe.MustParseID("spiffe://example.org/web")
)

func webCSR(t testing.TB) *pki.CSR {
	return cafake.NewCSR(t, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(webID)}})
}

func newCA(t testing.TB, o vault.Options) *vault.CA {
	t.Helper()
	return must.Get(vault.New(o))(t)
}

func logins(s *cafake.Script) (n int) {
	for _, p := range s.Paths() {
		if strings.HasSuffix(p, "/login") {
			n++
		}
	}
	return n
}

func endpoint(s *cafake.Script) caclient.Endpoint {
	return s.Endpoint("https://vault.test", domain, secret)
}

// doc is a JSON object.
type doc = map[string]any

func vaultErrors(texts ...string) doc { return doc{"errors": texts} }

func loginAnswer(token string, lease any) doc {
	return doc{"auth": doc{"client_token": token, "lease_duration": lease, "renewable": true}}
}

// signed returns the answer of sign/ROLE for the CSR in a call.
func signed(ca *spiffetest.CA, c cafake.Call) (int, any) {
	csr, err := pki.ParseCSRPEM([]byte(c.Body["csr"].(string)))
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		return 400, vaultErrors(err.Error())
	}
	return 200, doc{"data": doc{"certificate": string(pki.MarshalCertificatesPEM(chain[0])), "issuing_ca": string(pki.MarshalCertificatesPEM(ca.Root()))}}
}
