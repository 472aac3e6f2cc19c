// Grpc shows grpc-go with identities from svidkit, in one process:
//
//	cd examples/grpc && go run .
//
// It is a separate module, like package spiffegrpc, so that svidkit itself requires no gRPC. Each side's source keeps
// its identity fresh, and a policy says for each method which clients may call it.
//
// A server answers health checks. One client may call Check but not List; a client that the server does not know is
// refused before its first call. Then an operator removes the first client from the policy, and the Governor ends its
// open connection. At the end the server drains: it reports NOT_SERVING while it answers the remaining calls.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"os/signal"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := show(ctx, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// The workloads, and the operators.
var (
	greeter = spiffe.MustParseID("spiffe://example.org/greeter")
	web     = spiffe.MustParseID("spiffe://example.org/web")
	other   = spiffe.MustParseID("spiffe://example.org/other")
	ops     = spiffe.MustParseID("spiffe://example.org/ops")
)

// show runs everything and stops all of it before it returns.
func show(ctx context.Context, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()

	authority, err := ca.New(ca.Config{TrustDomain: greeter.TrustDomain()})
	if err != nil {
		return err
	}
	workloads := make(map[spiffe.ID]*secretcache.Manager)
	for _, id := range []spiffe.ID{greeter, web, other, ops} {
		issuer, err := local.New(authority, id)
		if err != nil {
			return err
		}
		if workloads[id], err = secretcache.Start(ctx, secretcache.Config{ID: id, CA: issuer}); err != nil {
			return err
		}
		defer workloads[id].Close()
	}

	// The server: the policy can change while it runs, and the Governor closes connections that it no longer allows.
	var allow spiffe.LivePolicy
	if err := allow.Set(spiffe.AllowIDs(web, ops)); err != nil {
		return err
	}
	governor := &spiffetls.Governor{Jitter: -1}
	running.Go(func() { _ = governor.Run(ctx) })
	me := workloads[greeter]
	creds, err := spiffegrpc.ServerCredentials(spiffetls.Config{Self: me, Peers: me, Allow: &allow,
		Governor: governor})
	if err != nil {
		return err
	}
	unary, stream, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{
		"/grpc.health.v1.Health/":      spiffe.AllowIDs(ops),
		"/grpc.health.v1.Health/Check": spiffe.AllowIDs(ops, web),
	})
	if err != nil {
		return err
	}
	logged := func(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		peer, _ := spiffegrpc.PeerFromContext(ctx) // unary has required a peer
		fmt.Fprintln(out, "server:", info.FullMethod, "by", peer.ID())
		return next(ctx, req)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.Creds(creds), grpc.ChainUnaryInterceptor(unary, logged),
		grpc.ChainStreamInterceptor(stream),
		grpc.MaxConcurrentStreams(100)) // of a connection; grpc-go has no limit of its own
	var draining atomic.Bool
	state, err := health.New(
		health.Part{Name: "identity", Source: me},
		health.Part{Name: "service", Check: func() error {
			if draining.Load() {
				return errors.New("draining")
			}
			return nil
		}},
	)
	if err != nil {
		return err
	}
	grpc_health_v1.RegisterHealthServer(server, spiffegrpc.Health(state))
	running.Go(func() { _ = server.Serve(listener) })
	defer server.Stop()

	// Each client names the server that it expects at the address.
	conns := make(map[spiffe.ID]*grpc.ClientConn)
	for _, id := range []spiffe.ID{web, other, ops} {
		self := workloads[id]
		creds, err := spiffegrpc.ClientCredentials(spiffetls.Config{
			Self: self, Peers: self, Hosts: map[string]spiffe.PolicySource{"127.0.0.1": spiffe.AllowIDs(greeter)},
		})
		if err != nil {
			return err
		}
		conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(creds))
		if err != nil {
			return err
		}
		defer conn.Close()
		conns[id] = conn
	}
	check := func(id spiffe.ID) {
		r, err := grpc_health_v1.NewHealthClient(conns[id]).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		if err != nil {
			fmt.Fprintln(out, id.Path()[1:]+": Check:", status.Code(err))
			return
		}
		fmt.Fprintln(out, id.Path()[1:]+": Check:", r.GetStatus())
	}
	check(web)
	_, err = grpc_health_v1.NewHealthClient(conns[web]).List(ctx, &grpc_health_v1.HealthListRequest{})
	fmt.Fprintln(out, "web: List:", status.Code(err))
	check(other)

	fmt.Fprintln(out, "operator: only", ops, "from now on")
	if err := allow.Set(spiffe.AllowIDs(ops)); err != nil {
		return err
	}
	conns[web].WaitForStateChange(ctx, connectivity.Ready) // at most a second
	fmt.Fprintln(out, "governor: the connection of web has ended")
	check(web)

	check(ops)
	draining.Store(true)
	check(ops) // the client must connect elsewhere
	cut := time.AfterFunc(5*time.Second, server.Stop)
	defer cut.Stop()
	server.GracefulStop()
	fmt.Fprintln(out, "server: ended")
	return ctx.Err()
}
