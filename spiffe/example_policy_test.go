package spiffe_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/svidkit/svidkit/spiffe"
)

func ExampleParsePolicy() {
	allow, err := spiffe.ParsePolicy("spiffe://example.org/ns/prod/*, spiffe://partner.test/gateway")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(allow.Check(spiffe.MustParseID("spiffe://partner.test/gateway")) == nil)

	_, err = spiffe.ParsePolicy("spiffe://example.org/ns/prod/*, spiffe://Partner.test/gateway")
	fmt.Println(err)
	// Output:
	// true
	// spiffe: invalid policy "spiffe://Partner.test/gateway" at byte 41: upper case is not allowed in a trust domain name
}

// A decision that rules cannot express is a function of the program.
func ExampleAllowFunc() {
	tenants := map[string]bool{"/tenant/7": true}
	allow := spiffe.AnyOf(
		spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/gateway")),
		spiffe.AllowFunc(func(id spiffe.ID) error {
			if !tenants[id.Path()] {
				return errors.New("no such tenant")
			}
			return nil
		}),
	)
	fmt.Println(allow.Check(spiffe.MustParseID("spiffe://example.org/tenant/7")) == nil)
	fmt.Println(allow.Check(spiffe.MustParseID("spiffe://example.org/tenant/8")))
	// Output:
	// true
	// spiffe: "spiffe://example.org/tenant/8": not allowed by policy, which allows spiffe://example.org/gateway, a function: no such tenant
}

// A policy that an operator can change while connections are open.
func ExampleLivePolicy() {
	var allow spiffe.LivePolicy // goes wherever a PolicySource is wanted
	web := spiffe.MustParseID("spiffe://example.org/web")
	fmt.Println(allow.Policy().Check(web) == nil)

	changed := allow.Changed()
	if err := allow.Set(spiffe.AllowIDs(web)); err != nil {
		log.Fatal(err)
	}
	<-changed
	fmt.Println(allow.Policy().Check(web) == nil)

	fmt.Println(allow.Set(spiffe.AllowIDs())) // a list that is empty by accident
	fmt.Println(allow.Policy().Check(web) == nil)
	// Output:
	// false
	// true
	// spiffe: set policy: the policy is not valid: AllowIDs needs at least one ID
	// true
}
