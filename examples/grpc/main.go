// Grpc shows grpc-go with identities from svidkit, in one process and about a second:
//
//	cd examples/grpc && go run .
//
// It is a module of its own, so that svidkit itself requires no gRPC. What it takes is the
// configurations of package spiffetls in credentials.NewTLS, on both sides: the identity of each side is
// kept fresh by its source, and a policy says which clients may call.
//
// A server answers health checks for the one ID that its policy names. That client is served, and a
// client with another ID in the same trust domain is refused. Then an operator takes the client out of the policy
// while its connection is open, and the Governor ends the connection.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := show(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "grpc:", err)
		os.Exit(1)
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
	run := func(f func(context.Context) error) { running.Go(func() { _ = f(ctx) }) } // ends when ctx does

	authority, err := ca.New(ca.Config{TrustDomain: greeter.TrustDomain()})
	if err != nil {
		return err
	}
	workloads := make(map[spiffe.ID]*secretcache.Manager)
	for _, id := range []spiffe.ID{greeter, web, other} {
		if workloads[id], err = workload(authority, id); err != nil {
			return err
		}
		run(workloads[id].Run)
	}
	for _, m := range workloads {
		if err := ready(ctx, m); err != nil {
			return err
		}
	}

	// The server: the policy can change while it runs, and the Governor sees to open connections.
	var allow spiffe.LivePolicy
	if err := allow.Set(spiffe.AllowIDs(web)); err != nil {
		return err
	}
	governor, err := spiffetls.NewGovernor(&spiffetls.GovernorOptions{Grace: 200 * time.Millisecond, Jitter: -1})
	if err != nil {
		return err
	}
	run(governor.Run)
	me := workloads[greeter]
	config, err := spiffetls.ServerConfig(me, me, &allow, &spiffetls.Options{Governor: governor})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)), grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			id, err := caller(ctx)
			if err != nil {
				return nil, status.Error(codes.Unauthenticated, "no identity")
			}
			fmt.Fprintln(out, "server: a call from", id)
			return next(ctx, req)
		}))
	grpc_health_v1.RegisterHealthServer(server, health.NewServer())
	running.Go(func() { _ = server.Serve(governor.Listener(listener)) })
	defer server.Stop()

	// The clients dial an address, and require that the server there has the ID of the greeter.
	open := make(map[spiffe.ID]*grpc.ClientConn)
	for _, id := range []spiffe.ID{web, other} {
		self := workloads[id]
		config, err := spiffetls.ClientConfig(self, self, spiffe.AllowIDs(greeter), nil)
		if err != nil {
			return err
		}
		conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(credentials.NewTLS(config)))
		if err != nil {
			return err
		}
		defer conn.Close()
		open[id] = conn
	}
	call := func(id spiffe.ID) error {
		answer, err := grpc_health_v1.NewHealthClient(open[id]).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
		switch {
		case err == nil:
			fmt.Fprintf(out, "%s: %s\n", id.Path()[1:], answer.GetStatus())
		case status.Code(err) == codes.Unavailable:
			fmt.Fprintf(out, "%s: refused\n", id.Path()[1:])
		default:
			return fmt.Errorf("call of %s: %w", id, err)
		}
		return nil
	}
	for _, id := range []spiffe.ID{web, web, other} {
		if err := call(id); err != nil {
			return err
		}
	}

	fmt.Fprintln(out, "operator: only", ops, "from now on")
	if err := allow.Set(spiffe.AllowIDs(ops)); err != nil {
		return err
	}
	for governor.Status().Ended == 0 { // at most a second, and the grace
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return errors.New("the connection was not ended")
		}
	}
	fmt.Fprintln(out, "governor: connections ended:", governor.Status().Ended)
	return call(web)
}

// workload returns an identity that renews itself, from a CA in this process.
func workload(authority *ca.Authority, id spiffe.ID) (*secretcache.Manager, error) {
	issuer, err := local.New(authority, id)
	if err != nil {
		return nil, err
	}
	return secretcache.New(secretcache.Config{ID: id, CA: issuer})
}

// ready waits until m has its identity.
func ready(ctx context.Context, m *secretcache.Manager) error {
	for range m.Updates(ctx) {
		return nil
	}
	_, err := m.Snapshot()
	return err
}

// caller returns the ID that the client of a call has proved: the handshake did that, and here it is
// only read from the leaf.
func caller(ctx context.Context) (spiffe.ID, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return spiffe.ID{}, errors.New("no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.PeerCertificates) == 0 {
		return spiffe.ID{}, errors.New("no certificate")
	}
	return spiffe.IDFromCertificate(info.State.PeerCertificates[0])
}
