// Command http serves workloads of its trust domain over HTTP, and asks the database on their behalf, with go-spiffe:
//
//	http ADDRESS DATABASE
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
)

var db = spiffeid.RequireFromString("spiffe://example.org/db")

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	source, err := workloadapi.NewX509Source(ctx)
	if err != nil {
		return err
	}
	defer source.Close()
	client := &http.Client{Transport: &http.Transport{
		TLSClientConfig:   tlsconfig.MTLSClientConfig(source, source, tlsconfig.AuthorizeID(db)),
		ForceAttemptHTTP2: true,
	}}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		id, err := x509svid.IDFromCert(r.TLS.PeerCertificates[0])
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		fmt.Fprintln(w, "hello", id)
	})
	http.HandleFunc("/db", func(w http.ResponseWriter, _ *http.Request) {
		resp, err := client.Get("https://" + os.Args[2])
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer resp.Body.Close()
		_, _ = io.Copy(w, resp.Body)
	})
	server := &http.Server{
		Addr:      os.Args[1],
		TLSConfig: tlsconfig.MTLSServerConfig(source, source, tlsconfig.AuthorizeMemberOf(db.TrustDomain())),
	}
	context.AfterFunc(ctx, func() { _ = server.Shutdown(context.Background()) })
	if err := server.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
