package inject_test

import (
	"fmt"
	"os"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/inject"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

func Example() {
	anchors, err := os.ReadFile("testdata/anchors.pem")
	if err != nil {
		panic(err)
	}
	injector, err := inject.New(inject.Config{
		Mesh:          linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"},
		TrustAnchors:  anchors,
		TokenAudience: "identity.l5d.io",
	})
	if err != nil {
		panic(err)
	}
	pod := `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web-1"},"spec":{"serviceAccountName":"web","containers":[{"name":"web"},{"name":"linkerd-proxy"}]}}`
	got, err := injector.Inject([]byte(pod), "emojivoto")
	if err != nil {
		panic(err)
	}
	fmt.Println(got.Enabled, got.Identity)
	// Output: true web.emojivoto.serviceaccount.identity.linkerd.cluster.local
}
