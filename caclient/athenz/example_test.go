package athenz_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/netip"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// A pod that registers itself with the token of its service account, and then renews with its certificate.
func Example() {
	td := spiffe.MustParseTrustDomain("athenz.example")
	service, err := athenzname.Mapping{AdminDomain: "k8s.admin"}.Service("media-sports", "frontend")
	if err != nil {
		fmt.Println(err)
		return
	}
	instance := athenzname.Instance{
		Provider: athenzname.Service{Domain: "k8s.admin", Name: "identityd"}, Service: service,
		ID: "8c5b0a3e-1d5c-4c6e-9b9c-0f5a3c1d2e4f", Suffix: "svc.cluster.local", IPs: []netip.Addr{netip.MustParseAddr("10.1.2.3")},
	}
	want, err := athenz.Expectation(instance, td)
	if err != nil {
		fmt.Println(err)
		return
	}
	var m *secretcache.Manager
	ca, err := athenz.New(athenz.Options{
		Endpoint: caclient.Endpoint{
			URL: "https://zts.athenz.svc:4443", TrustDomain: td, RootsFile: "/var/run/athenz/service-ca.pem",
			TokenFile: "/var/run/secrets/kubernetes.io/bound-serviceaccount/token",
		},
		Instance: instance,
		Certificate: func() *tls.Certificate {
			c, err := m.Credential()
			if err != nil {
				return nil // there is none yet
			}
			return c.TLSCertificate()
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	m, err = secretcache.New(secretcache.Config{Expect: want, CommonName: service.String(), CA: ca})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // the example ends here
	fmt.Println(m.Run(ctx))
	// Output: <nil>
}
