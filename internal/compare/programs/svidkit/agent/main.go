// Command agent serves the Workload API to three users of this machine, each with an identity and tokens of its own,
// and readiness and metrics over HTTP, with svidkit:
//
//	agent SOCKET ADDRESS
package main

import (
	"context"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

var workloads = map[uint32]spiffe.ID{
	1001: spiffe.MustParseID("spiffe://example.org/web"),
	1002: spiffe.MustParseID("spiffe://example.org/db"),
	1003: spiffe.MustParseID("spiffe://example.org/batch"),
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	authority, err := ca.New(ca.Config{TrustDomain: workloads[1001].TrustDomain(), JWT: new(ca.JWTConfig)})
	if err != nil {
		return err
	}
	go func() { log.Print(authority.Run(ctx)) }()
	managers := make(map[uint32]*secretcache.Manager)
	var parts []health.Part
	for uid, id := range workloads {
		issuer, err := local.New(authority, id)
		if err != nil {
			return err
		}
		m, err := secretcache.Start(ctx, secretcache.Config{ID: id, CA: issuer})
		if err != nil {
			return err
		}
		defer m.Close()
		managers[uid] = m
		parts = append(parts, health.Part{Name: id.Path(), Source: m})
	}
	validator, err := jwtsvid.NewAgentValidator(managers[1001], nil)
	if err != nil {
		return err
	}
	handler, err := workloadserver.NewHandler(managers[1001], &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			peer, known := unixsocket.PeerFromContext(ctx)
			if m := managers[peer.UID]; known && m != nil {
				return []workloadserver.Identity{{Provider: m}}, nil
			}
			return nil, nil // no identity
		},
		IssueJWTSVID:    authority.IssueJWTSVID,
		ValidateJWTSVID: validator.ValidateJWTSVID,
	})
	if err != nil {
		return err
	}
	defer handler.Close()
	report, err := health.New(append(parts, health.Part{Name: "api", Source: handler})...)
	if err != nil {
		return err
	}
	go func() { log.Print(http.ListenAndServe(os.Args[2], report)) }()
	server := &unixsocket.Server{Path: os.Args[1], SocketMode: 0o666, Handler: handler}
	return server.Run(ctx)
}
