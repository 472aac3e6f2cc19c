// Command jwtserver serves clients with a token of their own over HTTP, with svidkit:
//
//	jwtserver ADDRESS
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv), JWTBundles: true})
	if err != nil {
		return err
	}
	defer me.Close()
	validator, err := jwtsvid.NewValidator(me, []string{"jwtserver"}, nil)
	if err != nil {
		return err
	}
	protect, err := jwtsvid.Middleware(validator, spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/client")),
		nil)
	if err != nil {
		return err
	}
	server := &http.Server{Addr: os.Args[1], Handler: protect(http.HandlerFunc(hello))}
	endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: spiffe.AllowAnyPeer(),
		AllowAnonymousClients: true})
	if err != nil {
		return err
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		return err
	}
	return server.ListenAndServeTLS("", "")
}

func hello(w http.ResponseWriter, r *http.Request) {
	token, _ := jwtsvid.FromContext(r.Context())
	fmt.Fprintln(w, "hello", token.ID())
}
