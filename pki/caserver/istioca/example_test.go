package istioca_test

import (
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/spiffe"
)

// A CA whose clients renew with the certificates that they have.
func Example() {
	td := spiffe.MustParseTrustDomain("example.org")
	authority, err := ca.New(ca.Config{TrustDomain: td})
	if err != nil {
		log.Fatal(err)
	}
	renewals, err := istioca.ClientCertificates(authority, td, 30*24*time.Hour) // then a token, again
	if err != nil {
		log.Fatal(err)
	}
	srv, err := istioca.New(istioca.Options{
		Signer:        authority,
		Authenticator: authn.FirstOf(renewals /* then tokens */),
	})
	if err != nil {
		log.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(istioca.CreateCertificate, srv)
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4")
		_ = srv.Report().Metrics(w)
	})
	// Its TLSConfig asks for certificates and does not demand them; package authn verifies them.
	server := &http.Server{Addr: ":15012", Handler: mux}

	fmt.Println(server.Addr, istioca.CreateCertificate)
	// Output: :15012 /istio.v1.auth.IstioCertificateService/CreateCertificate
}
