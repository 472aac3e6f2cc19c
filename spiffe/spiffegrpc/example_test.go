package spiffegrpc_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// t stands for the testing.TB of a test.
var t testing.TB = exampleTB{}

type exampleTB struct{ testing.TB }

func (exampleTB) Helper()                   {}
func (exampleTB) Fatalf(f string, a ...any) { panic(fmt.Sprintf(f, a...)) }

func Example() {
	ca := spiffetest.NewCA(t, "example.org") // a program has a source, such as a workloadapi.Source
	creds, err := spiffegrpc.ServerCredentials(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(web)})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(creds), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			peer, _ := spiffegrpc.PeerFromContext(ctx)
			fmt.Println("a call by", peer.ID())
			return next(ctx, req)
		}))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go server.Serve(listener)
	defer server.Stop()

	creds, err = spiffegrpc.ClientCredentials(spiffetls.Config{Self: ca.SVID("/web"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(db)})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	resp, err := grpc_health_v1.NewHealthClient(conn).Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	fmt.Println(resp.GetStatus(), err)
	// Output:
	// a call by spiffe://example.org/web
	// SERVING <nil>
}

// Web may check, and only ops may list what there is to check.
func ExampleRequirePeer() {
	ca := spiffetest.NewCA(t, "example.org")
	unary, stream, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{
		"/grpc.health.v1.Health/":      spiffe.AllowIDs(ops),
		"/grpc.health.v1.Health/Check": spiffe.AllowIDs(ops, web),
	})
	if err != nil {
		log.Fatal(err)
	}
	creds, err := spiffegrpc.ServerCredentials(spiffetls.Config{Self: ca.SVID("/db"), Peers: ca.Bundle(), Allow: spiffe.AllowIDs(ops, web)})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(creds), grpc.ChainUnaryInterceptor(unary), grpc.ChainStreamInterceptor(stream))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	go server.Serve(listener)
	defer server.Stop()

	creds, err = spiffegrpc.ClientCredentials(spiffetls.Config{
		Self: ca.SVID("/web"), Peers: ca.Bundle(), Hosts: map[string]spiffe.PolicySource{"127.0.0.1": spiffe.AllowIDs(db)},
	})
	if err != nil {
		log.Fatal(err)
	}
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(creds))
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	client := grpc_health_v1.NewHealthClient(conn)
	_, err = client.Check(context.Background(), &grpc_health_v1.HealthCheckRequest{})
	fmt.Println("Check:", status.Code(err))
	_, err = client.List(context.Background(), &grpc_health_v1.HealthListRequest{})
	fmt.Println("List:", status.Code(err))
	// Output:
	// Check: OK
	// List: PermissionDenied
}

// A client shows a token that it gets from the function, in each of its calls.
func ExampleTokenCredentials() {
	tokens := spiffegrpc.TokenCredentials(func(context.Context) (string, error) { return "eyJ…", nil })
	target, creds := "dns:///db.example:8443", credentials.NewTLS(nil) // or those of ClientCredentials
	conn, err := grpc.NewClient(target, grpc.WithTransportCredentials(creds), grpc.WithPerRPCCredentials(tokens))
	if err != nil {
		log.Fatal(err)
	}
	_ = conn.Close()
}
