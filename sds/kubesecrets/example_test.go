package kubesecrets_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/kubesecrets"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The agent of a gateway, which serves the Secrets of its namespace.
func Example() {
	ctx := context.Background()
	api, stop := apiForExample()
	defer stop()

	src, err := kubesecrets.New(kubesecrets.Config{
		Namespace: "istio-ingress", APIServer: api.URL(), HTTPClient: api.Client(), // none of these in a pod
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer src.Close()
	go func() { _ = src.Run(ctx) }()
	handler, err := sds.NewHandler(src, nil) // for a unixsocket.Server
	if err != nil {
		fmt.Println(err)
		return
	}
	defer handler.Close()

	for _, name := range []string{"kubernetes://shop", "kubernetes://shop-cacert", "kubernetes://istio-ingress/shop"} {
		secret, err := src.GenerateSecret(ctx, name)
		if err != nil {
			fmt.Println(err)
			return
		}
		_, _, isPair := secret.KeyPair()
		fmt.Println(secret.Name(), isPair)
	}
	// Output:
	// kubernetes://shop true
	// kubernetes://shop-cacert false
	// kubernetes://istio-ingress/shop true
}

// apiForExample is an API server with one Secret.
func apiForExample() (api *kubetest.Server, stop func()) {
	t := &exampleTB{}
	ca := spiffetest.NewCA(t, "example.org")
	certs, key, _ := ca.SVID("/shop").MarshalPEM()
	api = kubetest.Start(t)
	put(api, "istio-ingress/shop", data{"tls.crt": certs, "tls.key": key, "ca.crt": ca.Bundle().MarshalPEM()}, "type", "kubernetes.io/tls")
	return api, t.end
}

// exampleTB is what a test function is given; an example has none.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (*exampleTB) Helper()            {}
func (t *exampleTB) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }
func (t *exampleTB) end() {
	for _, f := range t.cleanups {
		f()
	}
}
