package ca_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func Example() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}

	// The workload makes a key and a request. Whatever it asks for, only the key counts.
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}

	// We know who is asking, and say so.
	web := spiffe.MustParseID("spiffe://example.org/web")
	chain, err := authority.Sign(context.Background(), ca.Request{CSR: csr, ID: web, TTL: time.Hour})
	if err != nil {
		panic(err)
	}

	// A peer verifies it with the authority's bundle.
	v, err := spiffe.NewVerifier(authority.Bundle(), spiffe.AllowIDs(web), nil)
	if err != nil {
		panic(err)
	}
	peer, err := v.VerifyChain(chain, spiffe.ClientRole)
	fmt.Println(peer, err)
	// Output: spiffe://example.org/web <nil>
}

func ExampleAuthority_Rotate() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}
	next, err := authority.Rotate(context.Background())
	if err != nil {
		panic(err)
	}
	fmt.Println("the new root signs after", next.Activates.Sub(next.Prepared))
	for _, r := range authority.Roots() {
		fmt.Println(r.Phase)
	}
	_, err = authority.Rotate(context.Background())
	fmt.Println(errors.Is(err, ca.ErrRotating))
	// Output:
	// the new root signs after 25m0s
	// active
	// distributing
	// true
}

func ExampleAuthority_Sign_refused() {
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), MaxTTL: time.Hour})
	if err != nil {
		panic(err)
	}
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{})
	if err != nil {
		panic(err)
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	_, err = authority.Sign(context.Background(), ca.Request{CSR: csr, ID: web, TTL: 2 * time.Hour})
	fmt.Println(errors.Is(err, ca.ErrTTL))
	fmt.Println(err)
	// Output:
	// true
	// ca: sign "spiffe://example.org/web": bad lifetime: 2h0m0s was asked for, the longest is 1h0m0s
}
