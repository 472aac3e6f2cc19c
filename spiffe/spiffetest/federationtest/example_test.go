package federationtest_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/federationtest"
)

// exampleT is what a test function is given; an example has none, and this one does not fail.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (*exampleT) Helper() {}

func (t *exampleT) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}

func Example() {
	t := new(exampleT)
	defer t.end()

	partner := federationtest.NewEndpoint(t, spiffetest.NewCA(t, "partner.test"))
	bundle, err := federation.Fetch(context.Background(), partner.Relationship(), nil)
	fmt.Println(bundle.TrustDomain(), err)

	partner.Deny()
	_, err = federation.Fetch(context.Background(), partner.Relationship(), nil)
	fmt.Println(err != nil)
	// Output:
	// partner.test <nil>
	// true
}
