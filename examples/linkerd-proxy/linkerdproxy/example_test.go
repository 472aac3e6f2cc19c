package linkerdproxy_test

import (
	"context"
	"crypto/tls"
	"log"
	"log/slog"
	"net/http"
	"os"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
)

// A server beside its application on port 8080, as an injector has configured it: it terminates the TLS of the mesh.
func Example() {
	ctx := context.Background()
	env, err := linkerdproxy.FromEnviron(os.Environ(), slog.Default())
	if err != nil {
		log.Fatal(err)
	}
	id, err := linkerdproxy.Start(ctx, env.Config)
	if err != nil {
		log.Fatal(err)
	}
	defer id.Close()
	l, err := tls.Listen("tcp", ":4143", id.ServerConfig())
	if err != nil {
		log.Fatal(err)
	}
	go func() { log.Fatal(http.ListenAndServe(":4191", id.Handler())) }()
	for {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		_ = c // examples/linkerd-proxy forwards it
	}
}

// A program that is a member of the mesh itself calls another workload.
func ExampleIdentity_ClientConfig() {
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
	cfg, err := id.ClientConfig("voting.emojivoto.serviceaccount.identity.linkerd.cluster.local", "")
	if err != nil {
		log.Fatal(err)
	}
	c, err := (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", "10.1.2.3:4143")
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
}
