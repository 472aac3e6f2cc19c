package spiffe_test

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

func ExampleParseID() {
	id, err := spiffe.ParseID("spiffe://example.org/ns/prod/sa/web")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(id.TrustDomain(), id.Path())

	_, err = spiffe.ParseID("spiffe://Example.org/web")
	fmt.Println(err)
	if e, ok := errors.AsType[*spiffe.ParseError](err); ok {
		fmt.Println(e.Rule, e.Offset)
	}
	// Output:
	// example.org /ns/prod/sa/web
	// spiffe: invalid ID "spiffe://Example.org/web" at byte 9: upper case is not allowed in a trust domain name
	// ID-8 9
}

func ExampleTrustDomain_WorkloadID() {
	td := spiffe.MustParseTrustDomain("example.org")
	id, err := td.WorkloadID("region", "eu", "web")
	fmt.Println(id, err)
	_, err = td.WorkloadID("region", "eu/web")
	fmt.Println(err)
	// Output:
	// spiffe://example.org/region/eu/web <nil>
	// spiffe: invalid path segment "eu/web" at byte 2: a slash is not allowed inside a segment
}

func ExampleID_Kubernetes() {
	id := spiffe.MustParseID("spiffe://cluster.local/ns/prod/sa/web")
	ns, sa, ok := id.Kubernetes()
	fmt.Println(ns, sa, ok)
	// Output: prod web true
}

func ExampleAnyOf() {
	home := spiffe.MustParseTrustDomain("example.org")
	allow := spiffe.AnyOf(
		spiffe.AllowIDs(spiffe.MustParseID("spiffe://partner.test/gateway")),
		spiffe.AllowPathPrefix(home, "/ns/prod"),
	)
	fmt.Println(allow)
	fmt.Println(allow.Check(spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")) == nil)
	fmt.Println(allow.Check(spiffe.MustParseID("spiffe://example.org/ns/production/sa/web")))
	// Output:
	// spiffe://example.org/ns/prod/*, spiffe://partner.test/gateway
	// true
	// spiffe: "spiffe://example.org/ns/production/sa/web": not allowed by policy, which allows spiffe://example.org/ns/prod/*, spiffe://partner.test/gateway
}

// A mistake in a policy shows when the program starts.
func ExampleNewVerifier() {
	bundles, err := spiffe.NewBundleSet()
	if err != nil {
		log.Fatal(err)
	}
	var fromConfig []spiffe.ID // empty by accident
	_, err = spiffe.NewVerifier(bundles, spiffe.AllowIDs(fromConfig...), nil)
	fmt.Println(err)
	// Output: spiffe: new verifier: the policy is not valid: AllowIDs needs at least one ID
}

func ExampleVerifier_VerifyChain() {
	doc, err := os.ReadFile("testdata/kat/bundle.json")
	if err != nil {
		log.Fatal(err)
	}
	home := spiffe.MustParseTrustDomain("example.org")
	bundle, err := spiffe.ParseBundle(home, doc)
	if err != nil {
		log.Fatal(err)
	}
	allow := spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web"))
	v, err := spiffe.NewVerifier(bundle, allow, func() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) })
	if err != nil {
		log.Fatal(err)
	}

	peer, err := v.VerifyChain(exampleChain(), spiffe.ClientRole) // a server has this from its TLS connection
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(peer.ID(), "until", peer.NotAfter().Year())
	// Output: spiffe://example.org/ns/prod/sa/web until 2045
}

func ExampleIDFromCertificate() {
	id, err := spiffe.IDFromCertificate(exampleChain()[0])
	fmt.Println(id, err)
	_, err = spiffe.IDFromCertificate(new(x509.Certificate))
	if e, ok := errors.AsType[*spiffe.ParseError](err); ok && e.Rule == "X5-3" {
		fmt.Println("a certificate of another kind")
	}
	// Output:
	// spiffe://example.org/ns/prod/sa/web <nil>
	// a certificate of another kind
}

func exampleChain() []*x509.Certificate {
	data, err := os.ReadFile("testdata/kat/leaf.pem")
	if err != nil {
		log.Fatal(err)
	}
	b, _ := pem.Decode(data)
	leaf, err := x509.ParseCertificate(b.Bytes)
	if err != nil {
		log.Fatal(err)
	}
	return []*x509.Certificate{leaf}
}
