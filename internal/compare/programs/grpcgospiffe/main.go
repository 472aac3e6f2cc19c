// Command grpcgospiffe is a gRPC service with go-spiffe, to be compared with grpcsvidkit: web may call Check, and ops
// may call every method.
package main

import (
	"context"
	"log"
	"net"
	"os"

	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/workloadapi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

var (
	web = spiffeid.RequireFromString("spiffe://example.org/web")
	ops = spiffeid.RequireFromString("spiffe://example.org/ops")
)

type health struct {
	grpc_health_v1.UnimplementedHealthServer
}

func (health) Check(ctx context.Context, _ *grpc_health_v1.HealthCheckRequest) (
	*grpc_health_v1.HealthCheckResponse, error) {
	id, _ := grpccredentials.PeerIDFromContext(ctx)
	log.Print("a call from ", id)
	return &grpc_health_v1.HealthCheckResponse{Status: grpc_health_v1.HealthCheckResponse_SERVING}, nil
}

func check(ctx context.Context, method string) error {
	id, ok := grpccredentials.PeerIDFromContext(ctx)
	if !ok {
		return status.Error(codes.Unauthenticated, "unauthenticated")
	}
	if id == ops || id == web && method == grpc_health_v1.Health_Check_FullMethodName {
		return nil
	}
	return status.Error(codes.PermissionDenied, "permission denied")
}

func unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	if err := check(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	return next(ctx, req)
}

func stream(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := check(ss.Context(), info.FullMethod); err != nil {
		return err
	}
	return next(srv, ss)
}

func main() {
	source, err := workloadapi.NewX509Source(context.Background(),
		workloadapi.WithClientOptions(workloadapi.WithAddr(os.Args[1])))
	if err != nil {
		log.Fatal(err)
	}
	defer source.Close()
	creds := grpccredentials.MTLSServerCredentials(source, source, tlsconfig.AuthorizeOneOf(web, ops))
	server := grpc.NewServer(grpc.Creds(creds), grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream))
	grpc_health_v1.RegisterHealthServer(server, health{})
	listener, err := net.Listen("tcp", os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(server.Serve(listener))
}
