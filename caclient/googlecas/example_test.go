package googlecas_test

import (
	"context"
	"fmt"
	"log"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// An identity from a CA pool, with an access token that the program gets.
func Example() {
	accessToken := func(context.Context) (string, error) { return "ya29.…", nil } // such as that of the metadata server
	ca, err := googlecas.New(googlecas.Options{
		Endpoint: caclient.Endpoint{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Token: accessToken},
		Pool:     "projects/my-project/locations/europe-west1/caPools/workloads",
	})
	if err != nil {
		log.Fatal(err)
	}
	m, err := secretcache.New(secretcache.Config{ID: spiffe.MustParseID("spiffe://example.org/web"), CA: ca})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(ca)
	fmt.Println(m)
	// Output:
	// googlecas.CA(https://privateca.googleapis.com)
	// secretcache.Manager(spiffe://example.org/web)
}
