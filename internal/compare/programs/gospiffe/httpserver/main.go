// Command httpserver serves one client over HTTP, with go-spiffe:
//
//	httpserver ADDRESS
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

func main() {
	if err := run(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context) error {
	source, err := workloadapi.NewX509Source(ctx)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	defer source.Close()
	client := tlsconfig.AuthorizeID(spiffeid.RequireFromString("spiffe://example.org/client"))
	server := &http.Server{
		Addr:      os.Args[1],
		Handler:   http.HandlerFunc(hello),
		TLSConfig: tlsconfig.MTLSServerConfig(source, source, client),
	}
	return server.ListenAndServeTLS("", "")
}

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "Success!!!") }
