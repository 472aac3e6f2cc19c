package vault_test

import (
	"fmt"
	"log"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
)

// An identity from Vault for a pod, which logs in with a token of its service account.
func Example() {
	ca, err := vault.New(vault.Options{
		Endpoint: caclient.Endpoint{
			URL:         "https://vault.vault.svc:8200",
			TrustDomain: spiffe.MustParseTrustDomain("example.org"),
			TokenFile:   "/var/run/secrets/tokens/vault", // projected, with the audience that the login wants
		},
		Role:      "web",
		LoginRole: "web",
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
	// vault.CA(https://vault.vault.svc:8200)
	// secretcache.Manager(spiffe://example.org/web)
}

// A CA whose private keys are in OpenBao, and whose record in the store is sealed there.
func ExampleNewTransit() {
	custodian, err := vault.NewTransit(vault.TransitOptions{
		Endpoint: caclient.Endpoint{
			URL:       "https://openbao.openbao.svc:8200",
			TokenFile: "/var/run/secrets/openbao/token", // a periodic one
		},
		SealKey: "seal",
	})
	if err != nil {
		log.Fatal(err)
	}
	cfg := ca.Config{
		TrustDomain: spiffe.MustParseTrustDomain("example.org"),
		Custody:     ca.Custody{Keys: custodian, Seal: custodian},
	}
	fmt.Println(custodian, cfg.Custody != nil)
	// Output:
	// vault.Transit(https://openbao.openbao.svc:8200) true
}
