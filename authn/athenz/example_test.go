package athenz_test

import (
	"crypto/tls"
	"fmt"
	"net/http"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/spiffe"
)

// The provider that ZTS asks about pods. The verifier has the public keys of the signing service.
func ExampleNewProvider() {
	td := spiffe.MustParseTrustDomain("athenz.example")
	verifier, err := athenz.NewVerifier("/var/keys/public", "")
	if err != nil {
		fmt.Println(err)
		return
	}
	bundle, err := spiffe.NewBundle(td, spiffe.BundleContents{}) // with the roots of ZTS
	if err != nil {
		fmt.Println(err)
		return
	}
	zts, err := athenz.ClientCertificate(td, bundle, "zts.example.cloud")
	if err != nil {
		fmt.Println(err)
		return
	}
	pods, err := athenz.NewAPIServer("https://kubernetes.default.svc", new(http.Client)) // which authenticates itself
	if err != nil {
		fmt.Println(err)
		return
	}
	provider, err := athenz.NewProvider(athenz.ProviderConfig{
		Service: athenzname.Service{Domain: "k8s.admin", Name: "athenz-callback"}, ZTS: zts, Verifier: verifier, Pods: pods, Suffix: "svc.cluster.local",
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	server := &http.Server{Addr: ":4443", Handler: provider, TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert}}
	fmt.Println(server.Addr)
	// Output: :4443
}
