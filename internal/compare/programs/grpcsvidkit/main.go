// Command grpcsvidkit is a gRPC service with svidkit, to be compared with grpcgospiffe: web may call Check, and ops
// may call every method.
package main

import (
	"context"
	"log"
	"net"
	"os"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var (
	web = spiffe.MustParseID("spiffe://example.org/web")
	ops = spiffe.MustParseID("spiffe://example.org/ops")
)

type health struct {
	grpc_health_v1.UnimplementedHealthServer
}

func (health) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (
	*grpc_health_v1.HealthCheckResponse, error) {
	peer, _ := spiffegrpc.PeerFromContext(ctx)
	log.Print("a call from ", peer.ID())
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func main() {
	source, err := workloadapi.Start(context.Background(), workloadapi.Config{Address: os.Args[1]})
	if err != nil {
		log.Fatal(err)
	}
	defer source.Close()
	creds, err := spiffegrpc.ServerCredentials(spiffetls.Config{Self: source, Peers: source,
		Allow: spiffe.AllowIDs(web, ops)})
	if err != nil {
		log.Fatal(err)
	}
	unary, stream, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{
		"/grpc.health.v1.Health/":      spiffe.AllowIDs(ops),
		"/grpc.health.v1.Health/Check": spiffe.AllowIDs(web, ops),
	})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(creds), grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream))
	grpc_health_v1.RegisterHealthServer(server, health{})
	listener, err := net.Listen("tcp", os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.Serve(listener))
}
