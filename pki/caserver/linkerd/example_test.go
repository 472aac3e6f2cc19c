package linkerd_test

import (
	"context"
	"crypto/tls"
	"log"
	"net"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/pki/linkerdname"
	"github.com/svidkit/svidkit/spiffe"
)

// A certifier for a mesh, which asks the API server of its cluster about tokens.
func Example() {
	ctx := context.Background()
	reviewer, err := kube.NewReviewer(nil)
	if err != nil {
		log.Fatal(err)
	}
	authority, err := ca.New(ca.Config{TrustDomain: spiffe.MustParseTrustDomain("cluster.local")})
	if err != nil {
		log.Fatal(err)
	}
	srv, err := linkerd.New(linkerd.Options{
		Mesh:   linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"},
		Signer: authority,
		Review: reviewer.Review,
	})
	if err != nil {
		log.Fatal(err)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS13 /* and the certificate of the certifier */}
	l, err := net.Listen("tcp", ":8080")
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(caserver.Serve(ctx, l, caserver.ServeOptions{Handler: srv, TLS: cfg}))
}
