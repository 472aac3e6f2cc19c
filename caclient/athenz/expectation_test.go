package athenz_test

import (
	"crypto/x509"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

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
		require.Error(t, must.ErrorOf(athenz.Expectation(i, spiffe.MustParseTrustDomain("athenz.example"))))
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
		return must.ErrorOf(want.Verify(chain, ca.Bundle(), spiffe.BothRoles, time.Now()))
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
