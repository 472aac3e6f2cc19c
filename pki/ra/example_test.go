package ra_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ra"
	"github.com/svidkit/svidkit/spiffe"
)

// A request that asks for more than the caller may have never gets to the signer.
func ExampleRA_Sign() {
	td := spiffe.MustParseTrustDomain("example.org")
	rootKey, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	root, err := pki.NewRoot(rootKey, pki.CertificateOptions{SANs: []pki.SAN{pki.IDSAN(td.ID())}, NotBefore: notBefore, NotAfter: notAfter})
	if err != nil {
		panic(err)
	}
	roots, err := spiffe.ParseBundlePEM(td, pki.MarshalCertificatesPEM(root.Certificate())) // the signer's, from a file
	if err != nil {
		panic(err)
	}
	a, err := ra.New(ra.Config{
		TrustDomain: td,
		Signer:      "example.com/mesh",
		Roots:       roots,
		APIServer:   "https://127.0.0.1:6443", // empty in a pod
	})
	if err != nil {
		panic(err)
	}

	web := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web), pki.DNSSAN("admin.example.org")}})
	if err != nil {
		panic(err)
	}
	_, err = a.Sign(context.Background(), ca.Request{CSR: csr, ID: web})
	fmt.Println(errors.Is(err, ca.ErrCSR))
	fmt.Println(err)
	// Output:
	// true
	// ca: sign "spiffe://example.org/ns/prod/sa/web": bad signing request: it asks for the name "DNS:admin.example.org", which is not granted to the caller
}
