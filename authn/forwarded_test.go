package authn_test

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

func forwardedCertificate(t testing.TB, proxies ...netip.Prefix) authn.Authenticator {
	t.Helper()
	return must.Get(authn.ForwardedCertificate(spiffe.AllowMembersOf(spiffe.MustParseTrustDomain("example.org")), proxies...))(t)
}

// forwarded is a request with these headers that comes from an address.
func forwarded(from string, headers ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/", nil)
	r.RemoteAddr = from
	r.Header["X-Forwarded-Client-Cert"] = headers
	return r
}

const loopback = "127.0.0.1:4711"

// web is what Envoy writes for the certificate of web.
const web = `By=spiffe://example.org/gateway;Hash=468ed33be74eee6556d90c0149c1309e9ba61d6425303443c0748a02dd8de688;` +
	`Subject="CN=web,O=Shop\, Inc.";URI=spiffe://example.org/web;DNS=web.prod.svc;DNS=web`

func TestForwardedCertificate(t *testing.T) {
	t.Parallel()
	a := forwardedCertificate(t)
	for header, want := range map[string]authn.Caller{
		web:                             {ID: spiffe.MustParseID("spiffe://example.org/web"), DNSNames: []string{"web.prod.svc", "web"}},
		"URI=spiffe://example.org/web":  {ID: spiffe.MustParseID("spiffe://example.org/web")},
		"uri=spiffe://example.org/web;": {}, // refused: something has to follow
		"URI=https://a.test/?b=c;URI=spiffe://example.org/web;URI=":                                      {ID: spiffe.MustParseID("spiffe://example.org/web")},
		`URI="spiffe://example.org/web"`:                                                                 {ID: spiffe.MustParseID("spiffe://example.org/web")},
		`By=a;By=b;Hash=;Subject="";URI=;DNS=web.test`:                                                   {DNSNames: []string{"web.test"}},
		`Hash=00;Cert="-----BEGIN%20CERTIFICATE-----%0AMII%3D%0A";Chain="";URI=spiffe://example.org/web`: {ID: spiffe.MustParseID("spiffe://example.org/web")},
		`DNS=*.web.test;DNS=192.0.2.1;DNS=a..b;DNS=*.web.test`:                                           {DNSNames: []string{"*.web.test"}},
		`SUBJECT="OU=x+cn=a\2C b\, \"c\" \\ d\#\ü"`:                                                      {}, // refused: not ASCII
		// As Envoy 1.40 writes subjects that have a backslash at the end of a value, and a quote.
		`By=spiffe://example.org/gateway;Hash=00;Subject="CN=end\\,O=Shop";URI=spiffe://example.org/web`: {ID: spiffe.MustParseID("spiffe://example.org/web")},
		`Hash=00;Subject="CN=x\"\,URI=spiffe://example.org/admin\;Subject=\"y";URI=;DNS=web.test`:        {DNSNames: []string{"web.test"}},
		// The last element counts: what the nearest proxy has added.
		web + ",URI=spiffe://example.org/gateway":                                         {ID: spiffe.MustParseID("spiffe://example.org/gateway")},
		"URI=spiffe://example.org/admin;DNS=admin.test,By=x;URI=spiffe://example.org/web": {ID: spiffe.MustParseID("spiffe://example.org/web")},
		"URI=spiffe://a.test/x, By=x;URI=spiffe://example.org/web":                        {ID: spiffe.MustParseID("spiffe://example.org/web")},
		`Subject="CN=a,URI=spiffe://example.org/admin";DNS=web.test`:                      {DNSNames: []string{"web.test"}},
		`Subject="CN=a\",URI=spiffe://example.org/admin";DNS=web.test`:                    {DNSNames: []string{"web.test"}},
	} {
		c, err := a.Authenticate(forwarded(loopback, header))
		if want.String() == "" {
			require.ErrorIs(t, err, authn.ErrRefused, header)
			continue
		}
		require.NoError(t, err, header)
		want.Method = "forwarded-certificate"
		assert.Equal(t, &want, c, header)
	}
}

func TestForwardedRefused(t *testing.T) {
	t.Parallel()
	a := forwardedCertificate(t)
	const uri = "URI=spiffe://example.org/web"
	for header, want := range map[string]string{
		"":                                          "without =",
		",":                                         "without =",
		uri + ",":                                   "without =",
		"," + uri:                                   `the key ",uri"`,
		uri + ";":                                   "without =",
		";" + uri:                                   `the key`,
		uri + ";;DNS=a":                             "the key",
		"URI":                                       "without =",
		"=spiffe://example.org/web":                 `the key ""`,
		" ;" + uri:                                  "the key",
		uri + "; DNS=a":                             `the key " dns"`,
		"URI =spiffe://example.org/web":             `the key "uri "`,
		"Issuer=x;" + uri:                           `the key "issuer"`,
		"Hash=00;Hash=00;" + uri:                    `"hash" twice`,
		`Subject="";Subject="";` + uri:              `"subject" twice`,
		`Cert="a";Cert="b";` + uri:                  `"cert" twice`,
		`URI="spiffe://example.org/web`:             "a quote is not closed",
		`URI="spiffe://example.org/web\"`:           "a quote is not closed",
		`URI="spiffe://example.org/web\`:            "a quote is not closed",
		`URI="spiffe://example.org/web"x`:           "something follows the quote",
		`URI="spiffe://example.org/web" `:           "something follows the quote",
		`URI=spiffe://"example.org/web"`:            "does not begin with a quote",
		`URI=spiffe://example.org/web\;DNS=a`:       "does not begin with a quote",
		`Subject="CN=a\\";` + uri:                   "more than one backslash",
		`Subject="CN=a\\\";` + uri:                  "more than one backslash",
		uri + ";URI=spiffe://example.org/db":        "more than one SPIFFE ID",
		uri + ";" + uri:                             "more than one SPIFFE ID",
		"URI=spiffe://example.org/web/":             "trailing slash",
		"URI=SPIFFE://example.org/web":              "spiffe://",
		"URI=spiffe:example.org":                    "spiffe://",
		"URI=spiffe://evil.test/web":                "not allowed by policy",
		"URI=spiffe://example.org":                  "not allowed by policy",
		"By=spiffe://example.org/web;Hash=00":       "neither a SPIFFE ID",
		"URI=https://example.org/web":               "neither a SPIFFE ID",
		"DNS=192.0.2.1":                             "neither a SPIFFE ID",
		`Subject="CN=web"`:                          "neither a SPIFFE ID",
		"URI=spiffe://example.org/w\u00e9b":         "printable ASCII",
		"DNS=a\tb":                                  "printable ASCII",
		uri + ";DNS=" + strings.Repeat("a", 16<<10): "the limit is 16384",
		// An element that a client has begun, and in which the one of the proxy ends up.
		`Subject="CN=a,By=spiffe://example.org/gateway;Subject="CN=web";` + uri: "something follows the quote",
		`URI=spiffe://example.org/admin;Subject="x,By=x;Hash=00;` + uri:         "a quote is not closed",
		`x,` + uri: "the key",
	} {
		c, err := a.Authenticate(forwarded(loopback, header))
		require.Error(t, err, "%q is accepted as %v", header, c)
		require.ErrorIs(t, err, authn.ErrRefused, header)
		assert.ErrorContains(t, err, want, header)
		assert.Less(t, len(err.Error()), 500)
	}
	_, err := a.Authenticate(forwarded(loopback, web, web))
	require.ErrorIs(t, err, authn.ErrRefused)
	require.ErrorContains(t, err, "more than once")
	require.ErrorIs(t, must.Err(a.Authenticate(forwarded(loopback, "URI=spiffe://evil.test/web"))), spiffe.ErrDenied)
}

// The header counts only from peers that the operator names.
func TestForwardedPeers(t *testing.T) {
	t.Parallel()
	own := forwardedCertificate(t)
	gateways := forwardedCertificate(t, netip.MustParsePrefix("10.1.2.3/16"), netip.MustParsePrefix("2001:db8::1/64"), netip.MustParsePrefix("192.0.2.7/32"))
	for from, believed := range map[string][2]bool{
		"127.0.0.1:1":          {true, true},
		"127.8.8.8:1":          {true, true},
		"[::1]:1":              {true, true},
		"[::ffff:127.0.0.1]:1": {true, true},
		"10.1.255.255:1":       {false, true},
		"[::ffff:10.1.0.1]:1":  {false, true},
		"10.2.0.1:1":           {false, false},
		"192.0.2.7:1":          {false, true},
		"192.0.2.8:1":          {false, false},
		"[2001:db8::9]:1":      {false, true},
		"[2001:db8::9%eth0]:1": {false, true},
		"[2001:db8:0:1::9]:1":  {false, false},
		"[fe80::1%lo]:1":       {false, false},
		"0.0.0.0:1":            {false, false},
		"127.0.0.1":            {false, false}, // no address of a connection
		"localhost:1":          {false, false},
		"":                     {false, false},
		"@":                    {false, false},
	} {
		for i, a := range []authn.Authenticator{own, gateways} {
			c, err := a.Authenticate(forwarded(from, web))
			if believed[i] {
				require.NoError(t, err, from)
				assert.Equal(t, "spiffe://example.org/web", c.ID.String())
				continue
			}
			require.ErrorIs(t, err, authn.ErrNoCredential, from)
			assert.NotErrorIs(t, err, authn.ErrRefused, from)
			_, err = a.Authenticate(forwarded(from, "nonsense"))
			require.NotErrorIs(t, err, authn.ErrRefused, "it is not even read: %q", from)
		}
	}
	_, err := own.Authenticate(httptest.NewRequest(http.MethodGet, "/", nil))
	require.ErrorIs(t, err, authn.ErrNoCredential)

	local := forwarded(loopback, web) // a Unix socket has no addresses
	local = local.WithContext(context.WithValue(local.Context(), http.LocalAddrContextKey, net.Addr(&net.UnixAddr{Net: "unix", Name: "/x"})))
	require.ErrorIs(t, must.Err(own.Authenticate(local)), authn.ErrNoCredential)
}

func TestForwardedArguments(t *testing.T) {
	t.Parallel()
	all, ten := spiffe.AllowAnyPeer(), netip.MustParsePrefix("10.0.0.0/8")
	for _, policy := range []spiffe.PolicySource{nil, spiffe.Policy{}} {
		require.ErrorContains(t, must.Err(authn.ForwardedCertificate(policy)), "authn: forwarded certificate:")
	}
	for _, proxies := range [][]netip.Prefix{
		{netip.MustParsePrefix("0.0.0.0/0")}, {netip.MustParsePrefix("::/0")}, {{}}, {ten, {}},
		{netip.PrefixFrom(netip.MustParseAddr("::ffff:10.0.0.0"), 104)},
	} {
		require.ErrorContains(t, must.Err(authn.ForwardedCertificate(all, proxies...)), "authn: forwarded certificate:", "%v", proxies)
	}
	prefixes := []netip.Prefix{ten}
	a := forwardedCertificate(t, prefixes...)
	prefixes[0] = netip.MustParsePrefix("192.0.2.0/24")
	require.NoError(t, must.Err(a.Authenticate(forwarded("10.0.0.1:1", web))), "they are copied")
}

// FuzzForwardedCertificate reads any header. A header that is accepted is still accepted, as the same caller, behind any
// other that is accepted: what the nearest proxy adds counts, whatever its client has sent.
func FuzzForwardedCertificate(f *testing.F) {
	for _, header := range []string{
		web, "URI=spiffe://example.org/web", `Subject="CN=a\,b,O=c";DNS=web.test`, `By=a;Cert="%20";Chain="";Hash=00`, `URI="a\"b",URI=spiffe://example.org/x`, `"`, `\`, `=`, `;`, `,`,
	} {
		f.Add(header, web)
		f.Add("URI=spiffe://example.org/admin,", header)
	}
	a := forwardedCertificate(f)
	f.Fuzz(func(t *testing.T, first, last string) {
		before, errBefore := a.Authenticate(forwarded(loopback, first))
		c, err := a.Authenticate(forwarded(loopback, last))
		for _, err := range []error{errBefore, err} {
			if err != nil && (!errors.Is(err, authn.ErrRefused) || authn.Unavailable(err) || len(err.Error()) > 20_000) {
				t.Fatal(err)
			}
		}
		if err == nil && c.String() == "" || errBefore == nil && before.String() == "" {
			t.Fatalf("%v, %v", before, c)
		}
		if err != nil || len(first)+len(last) > 16<<10-1 {
			return
		}
		both, errBoth := a.Authenticate(forwarded(loopback, first+","+last))
		switch {
		case errBefore == nil && errBoth != nil:
			t.Fatalf("%q then %q: %v", first, last, errBoth)
		case errBoth == nil && both.String() != c.String() && !strings.Contains(last, `=";`) && !strings.Contains(last, `=",`): // what no certificate has
			t.Fatalf("%q then %q is %v and not %v", first, last, both, c)
		}
	})
}

// Each request is judged by the policy as it is then.
func TestForwardedPolicy(t *testing.T) {
	t.Parallel()
	policy := policies{p: spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/web"))}
	a := must.Get(authn.ForwardedCertificate(&policy))(t)
	require.NoError(t, must.Err(a.Authenticate(forwarded(loopback, web))))
	policy.p = spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/db"))
	require.ErrorIs(t, must.Err(a.Authenticate(forwarded(loopback, web))), spiffe.ErrDenied)
}

// policies is a source of a policy that changes.
type policies struct{ p spiffe.Policy }

func (p *policies) Policy() spiffe.Policy { return p.p }
