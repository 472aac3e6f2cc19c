// Command grpc serves workloads of its trust domain over gRPC, and asks the database on their behalf, with svidkit:
//
//	grpc ADDRESS DATABASE
package main

import (
	"context"
	"log"
	"net"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

var db = spiffe.MustParseID("spiffe://example.org/db")

type service struct {
	grpc_health_v1.UnimplementedHealthServer
	db grpc_health_v1.HealthClient
}

func (s service) Check(ctx context.Context, req *grpc_health_v1.HealthCheckRequest) (
	*grpc_health_v1.HealthCheckResponse, error) {
	peer, _ := spiffegrpc.PeerFromContext(ctx)
	log.Println("hello", peer)
	if req.GetService() == "db" {
		return s.db.Check(ctx, new(grpc_health_v1.HealthCheckRequest))
	}
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

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
	config := spiffetls.Config{
		Self: me, Peers: me, Allow: spiffe.AllowMembersOf(db.TrustDomain()),
		Hosts: map[string]spiffe.PolicySource{os.Args[2]: spiffe.AllowIDs(db)},
	}
	out, err := spiffegrpc.ClientCredentials(config)
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient(os.Args[2], grpc.WithTransportCredentials(out))
	if err != nil {
		return err
	}
	defer conn.Close()
	in, err := spiffegrpc.ServerCredentials(config)
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.Creds(in))
	grpc_health_v1.RegisterHealthServer(server, service{db: grpc_health_v1.NewHealthClient(conn)})
	context.AfterFunc(ctx, server.GracefulStop)
	return server.Serve(l)
}
