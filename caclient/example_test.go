package caclient_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

func Example() {
	// Any CA will do; this one lives in the same process.
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}
	web := spiffe.MustParseID("spiffe://example.org/web")
	inner, err := local.New(authority, web)
	if err != nil {
		panic(err)
	}

	client, err := caclient.New(inner, &caclient.Options{Timeout: 5 * time.Second})
	if err != nil {
		panic(err)
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		panic(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(web)}})
	if err != nil {
		panic(err)
	}
	chain, err := client.Sign(context.Background(), csr, time.Hour)
	if err != nil {
		panic(err)
	}
	svid, err := spiffe.NewSVID(chain, key)
	fmt.Println(svid, err)
	// Output: spiffe://example.org/web <nil>
}

func ExampleError_Retryable() {
	failed := fmt.Errorf("renew: %w", &caclient.Error{Op: "sign", Kind: caclient.ErrUnavailable, RetryAfter: 30 * time.Second, Err: errors.New("too many requests")})
	if e, ok := errors.AsType[*caclient.Error](failed); ok {
		fmt.Println(e.Retryable())
	}

	denied := &caclient.Error{Op: "sign", Kind: caclient.ErrDenied, Err: errors.New("not on this node")}
	fmt.Println(denied.Retryable())
	fmt.Println(denied)
	// Output:
	// 30s true
	// 0s false
	// caclient: sign: denied: not on this node
}
