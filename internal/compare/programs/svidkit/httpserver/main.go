// Command httpserver serves one client over HTTP, with svidkit:
//
//	httpserver ADDRESS
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	defer me.Close()
	server := &http.Server{Addr: os.Args[1], Handler: http.HandlerFunc(hello)}
	client := spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/client"))
	endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: client})
	if err != nil {
		return err
	}
	if err := endpoint.ConfigureServer(server); err != nil {
		return err
	}
	return server.ListenAndServeTLS("", "")
}

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "Success!!!") }
