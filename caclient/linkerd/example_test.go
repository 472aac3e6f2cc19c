package linkerd_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// exampleT is what a test function is given; an example has none, and this one does not fail.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (*exampleT) Helper() {}

func (t *exampleT) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

func Example() {
	t := new(exampleT)
	defer t.end()
	certifier := caclienttest.NewLinkerd(t, spiffetest.NewCA(t, "cluster.local"), "/ns/emojivoto/sa/web")

	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
	inner, err := linkerd.New(linkerd.Options{
		Endpoint: certifier.Endpoint(), // in a mesh: its URL, the files with the trust anchors and the token
		Mesh:     mesh,
	})
	if err != nil {
		panic(err)
	}
	name, err := mesh.Name("emojivoto", "web")
	if err != nil {
		panic(err)
	}
	want := pki.ExpectDNSName(certifier.Endpoint().TrustDomain, name)
	ca, err := caclient.New(inner, &caclient.Options{Expect: want})
	if err != nil {
		panic(err)
	}

	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: want.Names()})
	if err != nil {
		panic(err)
	}
	chain, err := ca.Sign(context.Background(), csr, 0)
	if err != nil {
		panic(err)
	}
	web, err := pki.NewCredential(chain, key)
	fmt.Println(web, err)
	// Output: pki.Credential([DNS:web.emojivoto.serviceaccount.identity.linkerd.cluster.local]) <nil>
}
