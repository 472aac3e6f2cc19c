package xdsproxy_test

import (
	"context"
	"log"

	"github.com/svidkit/svidkit/authn/tokensource"
	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// One socket for an Envoy of Istio: its secrets from manager, and its configuration from istiod.
func ExampleNewHandler() {
	serve := func(ctx context.Context, manager *secretcache.Manager) error {
		secrets, err := sds.NewHandler(manager, nil)
		if err != nil {
			return err
		}
		defer secrets.Close()
		client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: "/var/run/secrets/istio/root-cert.pem"})
		if err != nil {
			return err
		}
		token := tokensource.File("/var/run/secrets/tokens/istio-token")
		handler, err := xdsproxy.NewHandler(xdsproxy.Config{
			URL: "https://istiod.istio-system.svc:15012", HTTPClient: client, Token: token.Token, Secrets: secrets,
		})
		if err != nil {
			return err
		}
		defer handler.Close()
		server := &unixsocket.Server{Path: "/var/run/identity/xds.sock", Handler: handler}
		log.Print("point the ads_config of Envoy to ", server.Path)
		return server.Run(ctx)
	}
	_ = serve
}
