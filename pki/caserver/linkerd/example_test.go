package linkerd_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
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
	mesh, err := linkerd.NewMesh("linkerd", "cluster.local", linkerd.Current)
	if err != nil {
		log.Fatal(err)
	}
	srv, err := linkerd.New(linkerd.Options{Mesh: mesh, Signer: authority, Review: reviewBy(reviewer)})
	if err != nil {
		log.Fatal(err)
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS13 /* and the certificate of the certifier */}
	l, err := net.Listen("tcp", ":8080")
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(linkerd.Serve(ctx, l, linkerd.ServeOptions{Handler: srv, TLS: cfg}))
}

// reviewBy translates the answers of a reviewer.
func reviewBy(reviewer *kube.Reviewer) linkerd.ReviewFunc {
	return func(ctx context.Context, token string, audiences []string) (*linkerd.Account, error) {
		a, err := reviewer.Review(ctx, token, audiences)
		switch {
		case errors.Is(err, kube.ErrNotAuthenticated):
			return nil, fmt.Errorf("%w: %w", authn.ErrRefused, err)
		case errors.Is(err, kube.ErrInvalidToken):
			return nil, fmt.Errorf("%w: %w", linkerd.ErrInvalidToken, err)
		case err != nil:
			return nil, err
		}
		return &linkerd.Account{Namespace: a.Namespace, ServiceAccount: a.ServiceAccount}, nil
	}
}

// An injector and a destination service have the names of a mesh in common with its certifier.
func ExampleMesh() {
	mesh, err := linkerd.NewMesh("linkerd", "cluster.local", linkerd.Current)
	if err != nil {
		log.Fatal(err)
	}
	name, err := mesh.Name("emojivoto", "web")
	fmt.Println(name, err)
	name, err = mesh.Parse("voting.emojivoto.serviceaccount.identity.linkerd.cluster.local")
	fmt.Println(name.ServiceAccount(), name.Namespace(), err)
	all, err := mesh.Namespace("emojivoto")
	fmt.Println(all, all.Matches(name.String()), err)
	// Output:
	// web.emojivoto.serviceaccount.identity.linkerd.cluster.local <nil>
	// voting emojivoto <nil>
	// *.emojivoto.serviceaccount.identity.linkerd.cluster.local true <nil>
}
