package caclienttest_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
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

	ca := spiffetest.NewCA(t, "example.org")
	istiod := caclienttest.NewIstio(t, ca, "/ns/default/sa/web")
	client, err := istioca.New(istioca.Options{Endpoint: istiod.Endpoint()})
	if err != nil {
		panic(err)
	}

	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: istiod.Expectation().Names()})
	if err != nil {
		panic(err)
	}
	chain, err := client.Sign(context.Background(), csr, time.Hour)
	fmt.Println(chain[0].URIs[0], err)

	istiod.Refuse(&caclient.Error{Kind: caclient.ErrUnavailable, Err: errors.New("the CA restarts"), RetryAfter: 5 * time.Second})
	_, err = client.Sign(context.Background(), csr, time.Hour)
	fmt.Println(err)
	if e, ok := errors.AsType[*caclient.Error](err); ok {
		fmt.Println(e.Retryable())
	}

	istiod.Refuse(nil)
	istiod.Deny()
	_, err = client.Sign(context.Background(), csr, time.Hour)
	fmt.Println(errors.Is(err, caclient.ErrDenied))
	// Output:
	// spiffe://example.org/ns/default/sa/web <nil>
	// caclient: sign: unavailable: istioca: the CA says unavailable: "the CA restarts"
	// 5.001s true
	// true
}
