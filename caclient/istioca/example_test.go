package istioca_test

import (
	"fmt"
	"log"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// An identity from istiod, with the files that Istio mounts in a pod.
func Example() {
	td := spiffe.MustParseTrustDomain("cluster.local")
	istiod, err := istioca.New(istioca.Options{
		Endpoint: caclient.Endpoint{
			URL:         "https://istiod.istio-system.svc:15012",
			TrustDomain: td,
			TokenFile:   "/var/run/secrets/tokens/istio-token",
			RootsFile:   "/var/run/secrets/istio/root-cert.pem", // of the workloads, and of istiod itself
		},
		ClusterID: "Kubernetes",
	})
	if err != nil {
		log.Fatal(err)
	}
	m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://cluster.local/ns/prod/sa/web"), CA: istiod})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(istiod)
	fmt.Println(m)
	// Output:
	// istioca.CA(https://istiod.istio-system.svc:15012)
	// secretcache.Manager(spiffe://cluster.local/ns/prod/sa/web)
}
