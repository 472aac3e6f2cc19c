package gospiffe_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	theirapi "github.com/spiffe/go-spiffe/v2/workloadapi"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// A program that keeps its source of go-spiffe has its TLS and its tokens from svidkit.
func Example_keepSource() {
	ctx := context.Background()
	theirs, err := theirapi.NewX509Source(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer theirs.Close()
	self, peers := gospiffe.FromSVIDSource(theirs), gospiffe.FromX509BundleSource(theirs)
	endpoint, err := spiffetls.New(spiffetls.Config{Self: self, Peers: peers, Allow: spiffe.AllowMembersOf(spiffe.MustParseTrustDomain("example.org"))})
	if err != nil {
		log.Fatal(err)
	}
	config, err := endpoint.ServerConfig()
	if err != nil {
		log.Fatal(err)
	}
	_ = config

	theirTokens, err := theirapi.NewJWTSource(ctx)
	if err != nil {
		log.Fatal(err)
	}
	defer theirTokens.Close()
	tokens, err := jwtsvid.NewCache(gospiffe.FromTokenSource(theirTokens), nil)
	if err != nil {
		log.Fatal(err)
	}
	_ = tokens
}

// A program that keeps its TLS configuration of go-spiffe has its identity from svidkit.
func Example_keepTLS() {
	ours, err := workloadapi.Start(context.Background(), workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		log.Fatal(err)
	}
	defer ours.Close()
	config := tlsconfig.MTLSServerConfig(gospiffe.ToSVIDSource(ours), gospiffe.ToBundleSource(ours), tlsconfig.AuthorizeAny())
	_ = config
}

// A policy of svidkit decides in a program of go-spiffe.
func ExampleToMatcher() {
	policy, err := spiffe.ParsePolicy("spiffe://example.org/ns/*/sa/web")
	if err != nil {
		log.Fatal(err)
	}
	authorize := tlsconfig.AdaptMatcher(gospiffe.ToMatcher(policy))
	fmt.Println(authorize(spiffeid.RequireFromString("spiffe://example.org/ns/prod/sa/web"), nil) == nil)
	fmt.Println(authorize(spiffeid.RequireFromString("spiffe://example.org/ns/prod/sa/db"), nil) == nil)
	// Output:
	// true
	// false
}
