package tpmkey_test

import (
	"context"
	"crypto"
	"fmt"
	"log"
	"net/http"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/tpmkey"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// The client of the CA that a program has.
var authority caclient.CA

// A server whose identity cannot be copied to another machine.
func Example() {
	tpm, err := tpmkey.Open("/dev/tpmrm0")
	if err != nil {
		log.Fatal(err)
	}
	defer tpm.Close()
	web := spiffe.MustParseID("spiffe://example.org/web")
	m, err := secretcache.Start(context.Background(), secretcache.Config{
		ID: web, CA: authority,
		NewKey: func() (crypto.Signer, error) { return tpm.NewKey("ecdsa-p256") }, // for each renewal
	})
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	endpoint, err := spiffetls.New(spiffetls.Config{Self: m, Peers: m, Allow: spiffe.AllowMembersOf(web.TrustDomain())})
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{Addr: ":8443"}
	if err := endpoint.ConfigureServer(server); err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.ListenAndServeTLS("", ""))
}

// A CA whose keys only this machine can use, and whose store gives no key without it.
func ExampleTPM_Custodian() {
	tpm, err := tpmkey.Open("/dev/tpmrm0")
	if err != nil {
		log.Fatal(err)
	}
	defer tpm.Close()
	keys, err := tpm.Custodian("/var/lib/svidkit/keys")
	if err != nil {
		log.Fatal(err)
	}
	store, err := ca.NewDirStore("/var/lib/svidkit/ca")
	if err != nil {
		log.Fatal(err)
	}
	a, err := ca.Open(context.Background(), ca.Config{
		TrustDomain: spiffe.MustParseTrustDomain("example.org"),
		Custody:     ca.Custody{Keys: keys, Seal: keys},
	}, store)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(a)
}
