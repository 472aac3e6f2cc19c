// Command http serves workloads of its trust domain over HTTP, and asks the database on their behalf, with svidkit:
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

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var db = spiffe.MustParseID("spiffe://example.org/db")

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	me, err := workloadapi.Start(ctx, workloadapi.Config{Address: os.Getenv(workloadapi.SocketEnv)})
	if err != nil {
		return err
	}
	defer me.Close()
	hosts := map[string]spiffe.PolicySource{os.Args[2]: spiffe.AllowIDs(db)}
	members := spiffe.AllowMembersOf(db.TrustDomain())
	endpoint, err := spiffetls.New(spiffetls.Config{Self: me, Peers: me, Allow: members, Hosts: hosts})
	if err != nil {
		return err
	}
	transport, err := endpoint.Transport()
	server := &http.Server{Addr: os.Args[1]}
	if err := errors.Join(err, endpoint.ConfigureServer(server)); err != nil {
		return err
	}
	client := &http.Client{Transport: transport}
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		peer, _ := spiffetls.PeerFromContext(r.Context())
		fmt.Fprintln(w, "hello", peer)
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
	context.AfterFunc(ctx, func() { _ = server.Shutdown(context.Background()) })
	if err := server.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
