package spiffe_test

import (
	"encoding/json"
	"fmt"
	"log"

	"github.com/svidkit/svidkit/spiffe"
)

func ExampleParsePolicy() {
	allow, err := spiffe.ParsePolicy("spiffe://example.org/ns/prod/*, spiffe://partner.test/gateway")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(allow.Allows(spiffe.MustParseID("spiffe://partner.test/gateway")))

	_, err = spiffe.ParsePolicy("spiffe://example.org/ns/prod/*, spiffe://Partner.test/gateway")
	fmt.Println(err)
	// Output:
	// true
	// spiffe: invalid policy "spiffe://Partner.test/gateway" at byte 41: upper case is not allowed in a trust domain name
}

// One segment can be anything, exceptions take away, and a set gives rules a name.
func ExampleParsePolicy_language() {
	allow, err := spiffe.ParsePolicy(`teams = spiffe://example.org/ns/*/sa/web, spiffe://example.org/ns/*/sa/worker;
teams, spiffe://partner.test/gateway except spiffe://example.org/ns/dev/*`)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(allow)
	for _, name := range []string{"spiffe://example.org/ns/prod/sa/web", "spiffe://example.org/ns/dev/sa/web"} {
		fmt.Println(allow.Explain(spiffe.MustParseID(name)))
	}
	// Output:
	// spiffe://example.org/ns/*/sa/web, spiffe://example.org/ns/*/sa/worker, spiffe://partner.test/gateway except spiffe://example.org/ns/dev/*
	// spiffe://example.org/ns/*/sa/web (of the set "teams") <nil>
	//  spiffe: "spiffe://example.org/ns/dev/sa/web": not allowed by policy: the exception "spiffe://example.org/ns/dev/*" takes it away from "spiffe://example.org/ns/*/sa/web" (of the set "teams")
}

func ExamplePolicy_Except() {
	home := spiffe.MustParseTrustDomain("example.org")
	allow := spiffe.AllowMembersOf(home).Except(spiffe.AllowPathPrefix(home, "/ns/dev"))
	fmt.Println(allow)
	fmt.Println(allow.Allows(spiffe.MustParseID("spiffe://example.org/ns/dev/sa/web")))
	// Output:
	// spiffe://example.org/* except spiffe://example.org/ns/dev/*
	// false
}

// A program that reads a policy logs what is probably not meant.
func ExamplePolicy_Warnings() {
	allow, err := spiffe.ParsePolicy("spiffe://example.org/ns/prod")
	if err != nil {
		log.Fatal(err)
	}
	for _, warning := range allow.Warnings() {
		fmt.Println(warning)
	}
	// Output: the rule "spiffe://example.org/ns/prod" is one exact ID; write "spiffe://example.org/ns/prod/*" for what is below it
}

// A narrower policy is tried before it is set.
func ExampleLivePolicy_Try() {
	home := spiffe.MustParseTrustDomain("example.org")
	var allow spiffe.LivePolicy // goes wherever a PolicySource is wanted
	if err := allow.Set(spiffe.AllowMembersOf(home)); err != nil {
		log.Fatal(err)
	}
	counts, err := allow.Try(spiffe.AllowPathPrefix(home, "/ns/prod"))
	if err != nil {
		log.Fatal(err)
	}

	// Peers come and are allowed as before.
	for _, name := range []string{"spiffe://example.org/ns/prod/sa/web", "spiffe://example.org/batch", "spiffe://example.org/batch"} {
		if err := allow.Policy().Check(spiffe.MustParseID(name)); err != nil {
			log.Fatal(err)
		}
	}

	trial := counts()
	fmt.Println(trial.Decisions, "decisions")
	for id, times := range trial.Refuses {
		_, why := trial.Policy.Explain(id)
		fmt.Println(times, "would be refused:", why)
	}
	// Output:
	// 3 decisions
	// 2 would be refused: spiffe: "spiffe://example.org/batch": not allowed by policy: the one rule about its trust domain is "spiffe://example.org/ns/prod/*"
}

// A policy is a value in a configuration file.
func ExamplePolicy_UnmarshalText() {
	var config struct{ Allow spiffe.Policy }
	if err := json.Unmarshal([]byte(`{"allow": "spiffe://example.org/*"}`), &config); err != nil {
		log.Fatal(err)
	}
	fmt.Println(config.Allow)
	// Output: spiffe://example.org/*
}

func ExamplePolicy_Explain() {
	allow := spiffe.AnyOf(
		spiffe.AllowIDs(spiffe.MustParseID("spiffe://partner.test/gateway")),
		spiffe.AllowPathPrefix(spiffe.MustParseTrustDomain("example.org"), "/ns/prod"),
	)
	for _, name := range []string{"spiffe://example.org/ns/prod/sa/web", "spiffe://example.org/ns/production/sa/web", "spiffe://sub.example.org/ns/prod/sa/web"} {
		rule, err := allow.Explain(spiffe.MustParseID(name))
		if err != nil {
			fmt.Println(err)
			continue
		}
		fmt.Println(name, "is allowed by", rule)
	}
	// Output:
	// spiffe://example.org/ns/prod/sa/web is allowed by spiffe://example.org/ns/prod/*
	// spiffe: "spiffe://example.org/ns/production/sa/web": not allowed by policy: the one rule about its trust domain is "spiffe://example.org/ns/prod/*"
	// spiffe: "spiffe://sub.example.org/ns/prod/sa/web": not allowed by policy: no rule is about the trust domain "sub.example.org"
}

// While a trust domain is renamed, its workloads come under both names.
func ExamplePolicy_WithAliases() {
	home, old := spiffe.MustParseTrustDomain("example.org"), spiffe.MustParseTrustDomain("cluster.local")
	allow := spiffe.AllowPathPrefix(home, "/ns/prod").WithAliases(home, old)
	fmt.Println(allow)
	// Output: spiffe://cluster.local/ns/prod/*, spiffe://example.org/ns/prod/*
}

// A policy that an operator can change while connections are open.
func ExampleLivePolicy() {
	var allow spiffe.LivePolicy // goes wherever a PolicySource is wanted
	web := spiffe.MustParseID("spiffe://example.org/web")
	fmt.Println(allow.Policy().Allows(web))

	changed := allow.Changed()
	if err := allow.Set(spiffe.AllowIDs(web)); err != nil {
		log.Fatal(err)
	}
	<-changed
	fmt.Println(allow.Policy().Allows(web))

	fmt.Println(allow.Set(spiffe.AllowIDs())) // a list that is empty by accident
	fmt.Println(allow.Policy().Allows(web))
	// Output:
	// false
	// true
	// spiffe: set policy: the policy is not valid: AllowIDs needs at least one ID
	// true
}
