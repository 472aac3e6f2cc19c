package kubesecret_test

import (
	"context"
	"fmt"
	"net/http/httptest"

	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/kubesecret"
	"github.com/svidkit/svidkit/spiffe"
)

// Two replicas of a CA share one root. In a pod, Options may be empty: the API server, the
// credentials and the namespace are then those of the pod.
func ExampleNew() {
	cluster := httptest.NewServer(kubetest.New(1))
	defer cluster.Close()
	ctx := context.Background()

	var replicas []*ca.Authority
	for range 2 {
		store, err := kubesecret.New(kubesecret.Options{Namespace: "istio-system", APIServer: cluster.URL, HTTPClient: cluster.Client()})
		if err != nil {
			fmt.Println(err)
			return
		}
		a, err := ca.Open(ctx, ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: true}, store)
		if err != nil {
			fmt.Println(err)
			return
		}
		replicas = append(replicas, a)
	}
	fmt.Println("roots:", len(replicas[0].Status().Roots))
	fmt.Println("the same:", replicas[0].Bundle().Equal(replicas[1].Bundle()))

	// Output:
	// roots: 1
	// the same: true
}
