package athenz_test

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	authnathenz "github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The owner of a registered key is certified by it alone, as the services of the control plane are: a service token in the header,
// a CSR that the key has signed, with the common name, the DNS name and the SPIFFE ID of the service, and an expiry in minutes. What
// is not of that key, and of that service, is refused.
func TestOwnerOfKey(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.1-5", "ATH-15-1", "ATH-15-2", "ATH-15-4", "ATH-15-7")
	ca := spiffetest.NewCA(t, "athenz.io")
	zts := cafake.NewZTS(t, ca, "/ns/media-sports/sa/frontend")
	service := athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}
	srv := httptest.NewTLSServer(nil)
	srv.Close()
	key := srv.TLS.Certificates[0].PrivateKey.(*rsa.PrivateKey) // the original has one of RSA, too
	other := must.Get(pki.NewKey("ecdsa-p256"))(t)
	zts.Change(func(r *cafake.ZTSRules) {
		r.Keys = map[string]crypto.PublicKey{service.String() + " v1": key.Public(), "media.sports.frontend v1": other.Public()}
	})
	id := must.Get(service.ID())(t)
	instance := athenzname.Instance{Service: service, Suffix: "svc.cluster.local", SPIFFE: id}
	want := must.Get(athenz.Expectation(instance, ca.TrustDomain()))(t)
	assert.Equal(t, []pki.SAN{pki.DNSSAN("athenz-callback.k8s-admin.svc.cluster.local"), pki.IDSAN(id)}, want.Names())

	tokens := 0
	token := func(s athenzname.Service, id string, by crypto.Signer) func(context.Context) (string, error) {
		return func(context.Context) (string, error) {
			tokens++
			return authnathenz.SignServiceToken(authnathenz.ServiceToken{Service: s, KeyID: id}, by)
		}
	}
	type recorded struct {
		path   string
		header http.Header
		body   map[string]any
	}
	var requests []recorded
	client := func(edit func(*athenz.Options)) *athenz.CA {
		e := zts.Endpoint()
		base := e.HTTPClient.Transport
		hc := *e.HTTPClient
		hc.Transport = roundTripper(func(r *http.Request) (*http.Response, error) {
			data := must.Get(io.ReadAll(r.Body))(t)
			r.Body = io.NopCloser(bytes.NewReader(data))
			got := recorded{path: r.Method + " " + r.URL.Path, header: r.Header.Clone()}
			require.NoError(t, json.Unmarshal(data, &got.body))
			requests = append(requests, got)
			return base.RoundTrip(r)
		})
		e.HTTPClient, e.Token = &hc, token(service, "v1", key)
		o := athenz.Options{Endpoint: e, Instance: instance, KeyID: "v1"}
		if edit != nil {
			edit(&o)
		}
		return must.Get(athenz.New(o))(t)
	}
	request := func(by crypto.Signer, cn string, names ...pki.SAN) *pki.CSR {
		return must.Get(pki.NewCSR(by, pki.CSROptions{CommonName: cn, SANs: names}))(t)
	}
	csr := request(key, service.String(), want.Names()...)
	c := client(nil)
	for range 2 { // each has a token of its own, and no certificate is presented
		chain := must.Get(c.Sign(t.Context(), csr, 7*24*time.Hour))(t)
		require.NoError(t, cafake.Check(chain, csr, want, ca.Bundle()))
		assert.WithinDuration(t, time.Now().Add(7*24*time.Hour), chain[0].NotAfter, time.Minute)
		assert.Equal(t, service.String(), chain[0].Subject.CommonName)
	}
	require.Len(t, requests, 2)
	assert.Equal(t, 2, tokens)
	assert.Equal(t, "POST /zts/v1/instance/k8s.admin/athenz-callback/refresh", requests[0].path)
	assert.True(t, strings.HasPrefix(requests[0].header.Get("Athenz-Principal-Auth"), "v=S1;d=k8s.admin;n=athenz-callback;k=v1;"))
	assert.Equal(t, []string{"csr", "expiryTime", "keyId"}, slices.Sorted(maps.Keys(requests[0].body)))
	assert.InEpsilon(t, 7*24*60, requests[0].body["expiryTime"], 0, "minutes, where the original sends seconds")
	assert.Equal(t, "v1", requests[0].body["keyId"])

	frontend := athenzname.Service{Domain: "media.sports", Name: "frontend"}
	for name, bad := range map[string]struct {
		csr  *pki.CSR
		edit func(*athenz.Options)
		kind error
	}{
		"token of another key":     {csr, func(o *athenz.Options) { o.Token = token(service, "v1", other) }, caclient.ErrUnauthenticated},
		"token of another version": {csr, func(o *athenz.Options) { o.Token = token(service, "v2", key) }, caclient.ErrUnauthenticated},
		"token of another service": {csr, func(o *athenz.Options) { o.Token = token(frontend, "v1", other) }, caclient.ErrInvalid},
		"another version":          {csr, func(o *athenz.Options) { o.KeyID = "v2" }, caclient.ErrInvalid},
		"another key":              {request(other, service.String(), want.Names()...), nil, caclient.ErrInvalid},
		"another common name":      {request(key, "media.sports.frontend", want.Names()...), nil, caclient.ErrInvalid},
		"another DNS name":         {request(key, service.String(), pki.DNSSAN("zts.k8s-admin.svc.cluster.local")), nil, caclient.ErrInvalid},
		"no token":                 {csr, func(o *athenz.Options) { o.Token = nil }, caclient.ErrUnauthenticated},
	} {
		_, err := client(bad.edit).Sign(t.Context(), bad.csr, 0)
		require.ErrorIs(t, err, bad.kind, name)
		assert.NotContains(t, err.Error(), ";s=", name)
	}

	for name, edit := range map[string]func(*athenz.Options){
		"Provider":    func(o *athenz.Options) { o.Instance.Provider = service },
		"an ID":       func(o *athenz.Options) { o.Instance.ID = "callback-0" },
		"both":        func(o *athenz.Options) { o.Instance = cafake.AthenzInstance(zts.Fake) },
		"a token":     func(o *athenz.Options) { o.WithServiceToken = true },
		"no suffix":   func(o *athenz.Options) { o.Instance.Suffix = "" },
		"no service":  func(o *athenz.Options) { o.Instance.Service.Name = "" },
		"without key": func(o *athenz.Options) { o.KeyID = "" },
	} {
		o := athenz.Options{Endpoint: zts.Endpoint(), Instance: instance, KeyID: "v1"}
		edit(&o)
		require.ErrorContains(t, must.Err(athenz.New(o)), "invalid Options", name)
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func instance() athenzname.Instance {
	return athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, Service: athenzname.Service{Domain: "media.sports", Name: "frontend"},
		ID: "web-0", Suffix: "svc.cluster.local", IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("fd00::3")},
		SPIFFE: spiffe.MustParseID("spiffe://media.sports/sa/frontend"),
	}
}

func TestExpectationNames(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-9-3", "ATH-9-6", "ATH-9-8", "ATH-9-9", "ATH-9-10", "ATH-9-13")
	want := must.Get(athenz.Expectation(instance(), spiffe.MustParseTrustDomain("athenz.example")))(t)
	var text []string
	for _, name := range want.Names() {
		text = append(text, name.String())
	}
	assert.Equal(t, []string{
		"DNS:frontend.media-sports.svc.cluster.local", "DNS:web-0.instanceid.athenz.svc.cluster.local", "IP:10.1.2.3", "IP:fd00::3", "URI:spiffe://media.sports/sa/frontend",
	}, text)
	for _, edit := range []func(*athenzname.Instance){
		func(i *athenzname.Instance) { i.Service.Name = "" },
		func(i *athenzname.Instance) { i.Provider = athenzname.Service{} },
		func(i *athenzname.Instance) { i.ID = "" },
	} {
		i := instance()
		edit(&i)
		require.Error(t, must.Err(athenz.Expectation(i, spiffe.MustParseTrustDomain("athenz.example"))))
	}
}

// athenzURI adds a URI that ZTS puts into certificates.
func athenzURI(rest string) func(*x509.Certificate) {
	return func(c *x509.Certificate) {
		u, _ := url.Parse("athenz://" + rest)
		c.URIs = append(c.URIs, u)
	}
}

func TestExpectation(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-10.4-10", "ATH-2-10")
	ca := spiffetest.NewCA(t, "athenz.example")
	good := func(c *x509.Certificate) {
		c.Subject.CommonName = "media.sports.frontend"
		c.URIs = []*url.URL{instance().SPIFFE.URL()}
		c.DNSNames = []string{"frontend.media-sports.svc.cluster.local", "web-0.instanceid.athenz.svc.cluster.local"}
		c.IPAddresses = nil
	}
	without := instance()
	without.SPIFFE = spiffe.ID{}
	verify := func(i athenzname.Instance, edit func(*x509.Certificate)) error {
		want := must.Get(athenz.Expectation(i, ca.TrustDomain()))(t)
		chain, _ := ca.Certificate("/x", good, edit)
		return must.Err(want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now()))
	}
	for _, edit := range []func(*x509.Certificate){
		func(*x509.Certificate) {},
		func(c *x509.Certificate) { c.Subject.CommonName = "Media.Sports.Frontend" },
		func(c *x509.Certificate) { c.Subject.CommonName = "" },
		func(c *x509.Certificate) { c.URIs = nil },
		func(c *x509.Certificate) { c.IPAddresses = append(c.IPAddresses, []byte{10, 1, 2, 3}) },
		func(c *x509.Certificate) { slices.Reverse(c.DNSNames) },
		athenzURI("instanceid/k8s.admin.athenz-callback/web-0"),
		athenzURI("hostname/web-0.example.org"),
		athenzURI("instancename/account/web-0"),
		athenzURI("principal/media.sports.frontend"),
	} {
		require.NoError(t, verify(instance(), edit))
	}
	for name, edit := range map[string]func(*x509.Certificate){
		"another principal": func(c *x509.Certificate) { c.Subject.CommonName = "media.sports.backend" },
		"a role":            func(c *x509.Certificate) { c.Subject.CommonName = "media.sports:role.frontend" },
		"no name":           func(c *x509.Certificate) { c.Subject.CommonName, c.URIs = "", nil },
		"another SPIFFE ID": func(c *x509.Certificate) {
			c.URIs = []*url.URL{{Scheme: "spiffe", Host: "media.sports", Path: "/sa/root"}}
		},
		"another instance":   athenzURI("instanceid/k8s.admin.athenz-callback/web-1"),
		"another provider":   athenzURI("instanceid/k8s.admin.other/web-0"),
		"principal of a URI": athenzURI("principal/media.sports.backend"),
		"two URIs":           func(c *x509.Certificate) { c.URIs = append(c.URIs, c.URIs...) },
		"another DNS name":   func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, "x.svc.cluster.local") },
		"a DNS name twice":   func(c *x509.Certificate) { c.DNSNames = append(c.DNSNames, c.DNSNames[0]) },
		"another's address":  func(c *x509.Certificate) { c.IPAddresses = append(c.IPAddresses, []byte{10, 1, 2, 4}) },
		"an address of mail": func(c *x509.Certificate) { c.EmailAddresses = []string{"joe@example.org"} },
	} {
		require.Error(t, verify(instance(), edit), name)
	}
	require.Error(t, verify(without, func(*x509.Certificate) {}), "a SPIFFE ID that was not asked for")
	require.Error(t, verify(without, func(c *x509.Certificate) { c.Subject.CommonName, c.URIs = "", nil }))
	require.NoError(t, verify(without, func(c *x509.Certificate) { c.URIs = nil }))
}

func ExampleExpectation() {
	i := athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"},
		Service:  athenzname.Service{Domain: "media.sports", Name: "frontend"},
		ID:       "web-0", Suffix: "svc.cluster.local",
	}
	e, err := athenz.Expectation(i, spiffe.MustParseTrustDomain("media.sports"))
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, name := range e.Names() {
		fmt.Println(name)
	}
	// Output:
	// DNS:frontend.media-sports.svc.cluster.local
	// DNS:web-0.instanceid.athenz.svc.cluster.local
}
