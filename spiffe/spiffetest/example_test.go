package spiffetest_test

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// t is what a test function is given; an example has none, and these do not fail.
var t testing.TB = exampleTB{}

type exampleTB struct{ testing.TB }

func (exampleTB) Helper() {}

func Example() {
	ca := spiffetest.NewCA(t, "example.org")
	web := ca.SVID("/web")

	verifier, err := spiffe.NewVerifier(ca.Bundle(), spiffe.AllowIDs(web.ID()), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	peer, err := verifier.VerifyChain(web.Chain(), spiffe.ClientRole)
	fmt.Println(peer, err)
	// Output: spiffe://example.org/web <nil>
}

func ExampleCA_Broken() {
	ca := spiffetest.NewCA(t, "example.org")
	verifier, err := spiffe.NewVerifier(ca.Bundle(), spiffe.AllowMembersOf(ca.TrustDomain()), nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, f := range []string{"TwoURIs", "UnknownDomain", "Expired"} {
		chain, _ := ca.Broken(f)
		_, err := verifier.VerifyChain(chain, spiffe.ClientRole)
		if e, ok := errors.AsType[*spiffe.VerifyError](err); ok {
			fmt.Println(f, e.Stage, e.Rule)
		}
	}
	// Output:
	// TwoURIs leaf X5-36
	// UnknownDomain bundle X5-38
	// Expired chain X5-30
}

func ExampleCA_Certificate() {
	ca := spiffetest.NewCA(t, "example.org")
	chain, _ := ca.Certificate("/web", func(c *x509.Certificate) {
		c.NotAfter = c.NotBefore.Add(5 * time.Minute)
		c.ExtKeyUsage = nil
	})
	fmt.Println(chain[0].URIs, chain[0].NotAfter.Sub(chain[0].NotBefore), len(chain[0].ExtKeyUsage))
	// Output: [spiffe://example.org/web] 5m0s 0
}

func ExampleCA_Rotate() {
	ca := spiffetest.NewCA(t, "example.org")
	old := ca.SVID("/web")
	check := func(when string, svid *spiffe.SVID) {
		verifier, err := spiffe.NewVerifier(ca.Bundle(), spiffe.AllowIDs(svid.ID()), nil)
		if err == nil {
			_, err = verifier.VerifyChain(svid.Chain(), spiffe.AnyRole)
		}
		fmt.Println(when, err == nil)
	}
	ca.Rotate()
	check("old, after Rotate:", old)
	check("new, after Rotate:", ca.SVID("/web"))
	ca.DropOldRoots()
	check("old, after DropOldRoots:", old)
	// Output:
	// old, after Rotate: true
	// new, after Rotate: true
	// old, after DropOldRoots: false
}

func ExampleCA_FailNext() {
	ca := spiffetest.NewCA(t, "example.org")
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		fmt.Println(err)
		return
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.DNSSAN("web.test"), pki.IDSAN(spiffe.MustParseID("spiffe://example.org/web"))}})
	if err != nil {
		fmt.Println(err)
		return
	}
	ca.FailNext(2, errors.New("the CA is down"))
	for range 3 {
		chain, err := ca.Sign(context.Background(), csr, time.Hour)
		fmt.Println(len(chain), err)
	}
	// Output:
	// 0 the CA is down
	// 0 the CA is down
	// 1 <nil>
}
