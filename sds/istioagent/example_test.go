package istioagent_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"

	"github.com/svidkit/svidkit/sds/istioagent"
)

// The environment of a pod into which Istio's injector has put a proxy.
func Example() {
	run := func(ctx context.Context) error {
		cfg, err := istioagent.FromEnvironment(os.Environ())
		if err != nil {
			return err
		}
		cfg.Logger = slog.Default()
		cfg, err = istioagent.Choose(ctx, cfg)
		if err != nil {
			return err
		}
		agent, err := istioagent.New(cfg)
		if err != nil {
			return err
		}
		return agent.Run(ctx) // until ctx is done; it keeps asking a CA that refuses
	}
	_ = run
}

// All values that cannot be used are reported at once.
func ExampleFromEnvironment() {
	_, err := istioagent.FromEnvironment([]string{"SECRET_TTL=1d", "ECC_CURVE=P521", "POD_NAMESPACE=shop"})
	fmt.Println(err)
	// Output:
	// environment variable SECRET_TTL="1d": set it to a duration that is not negative, such as 24h, 90m or 100ms
	// environment variable ECC_CURVE="P521": set it to one of P256, P384
}
