// Command grpc serves workloads of its trust domain over gRPC, and asks the database on their behalf, with go-spiffe:
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

	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
)

var db = spiffeid.RequireFromString("spiffe://example.org/db")

type service struct {
	grpc_health_v1.UnimplementedHealthServer
	db grpc_health_v1.HealthClient
}

func (s service) Check(ctx context.Context, req *grpc_health_v1.HealthCheckRequest) (
	*grpc_health_v1.HealthCheckResponse, error) {
	id, _ := grpccredentials.PeerIDFromContext(ctx)
	log.Println("hello", id)
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
	source, err := workloadapi.NewX509Source(ctx)
	if err != nil {
		return err
	}
	defer source.Close()
	out := grpccredentials.MTLSClientCredentials(source, source, tlsconfig.AuthorizeID(db))
	conn, err := grpc.NewClient(os.Args[2], grpc.WithTransportCredentials(out))
	if err != nil {
		return err
	}
	defer conn.Close()
	in := grpccredentials.MTLSServerCredentials(source, source, tlsconfig.AuthorizeMemberOf(db.TrustDomain()))
	l, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.Creds(in))
	grpc_health_v1.RegisterHealthServer(server, service{db: grpc_health_v1.NewHealthClient(conn)})
	context.AfterFunc(ctx, server.GracefulStop)
	return server.Serve(l)
}
