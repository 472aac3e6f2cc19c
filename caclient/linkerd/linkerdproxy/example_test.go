package linkerdproxy_test

import (
	"context"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"

	"github.com/svidkit/svidkit/caclient/linkerd/linkerdproxy"
)

// A proxy beside a workload on port 8080, as an injector has configured it.
func Example() {
	ctx := context.Background()
	env, err := linkerdproxy.FromEnviron(os.Environ(), slog.Default())
	if err != nil {
		log.Fatal(err)
	}
	id, err := linkerdproxy.New(env.Config)
	if err != nil {
		log.Fatal(err)
	}
	proxy, err := linkerdproxy.NewProxy(linkerdproxy.ProxyConfig{Identity: id, Application: "127.0.0.1:8080", ClientID: true})
	if err != nil {
		log.Fatal(err)
	}
	l, err := net.Listen("tcp", ":4143")
	if err != nil {
		log.Fatal(err)
	}
	go func() { log.Fatal(proxy.ServeInbound(ctx, l)) }() // plaintext at once, TLS once it is certified
	go func() { log.Fatal(http.ListenAndServe(":4191", id.Handler(proxy))) }()
	log.Fatal(id.Run(ctx))
}

// A program that is a member of the mesh itself serves and dials without a proxy.
func ExampleIdentity_Dial() {
	ctx := context.Background()
	id, err := linkerdproxy.Start(ctx, linkerdproxy.Config{
		Name:        "web.emojivoto.serviceaccount.identity.linkerd.cluster.local",
		AnchorsFile: "/var/run/linkerd/identity/trust-roots/ca-bundle.crt",
		TokenFile:   "/var/run/secrets/tokens/linkerd-identity-token",
		Certifier: linkerdproxy.Service{
			Addr: "linkerd-identity-headless.linkerd.svc.cluster.local:8080",
			Name: "linkerd-identity.linkerd.serviceaccount.identity.linkerd.cluster.local",
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer id.Close()
	c, err := id.Dial(ctx, linkerdproxy.Endpoint{
		Addr:     "10.1.2.3:4143",
		Identity: "voting.emojivoto.serviceaccount.identity.linkerd.cluster.local",
	})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
}
