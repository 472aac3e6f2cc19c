package spiffegrpc_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/health"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestHealth: grpc.health.v1 says what the health handler says, a Watch that it has changed, and neither the reason.
func TestHealth(t *testing.T) {
	t.Parallel()
	const serving, not = healthpb.HealthCheckResponse_SERVING, healthpb.HealthCheckResponse_NOT_SERVING
	ca := spiffetest.NewCA(t, "example.org")
	self := ca.SVID("/db")
	var draining atomic.Bool
	state := must.Get(health.New(
		health.Part{Name: "identity", Source: health.FromSources(self, ca.Bundle())},
		health.Part{Name: "service", Check: func() error {
			if draining.Load() {
				return errors.New("draining")
			}
			return nil
		}},
	))(t)
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	server := grpc.NewServer(grpc.Creds(serverCreds(t, self, ca.Bundle(), spiffe.AllowIDs(web), nil)))
	healthpb.RegisterHealthServer(server, spiffegrpc.Health(state))
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, server.Serve(l)) })
	t.Cleanup(func() {
		server.Stop()
		wg.Wait()
	})
	conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(clientCreds(t, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil)))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, conn.Close()) })
	client := healthpb.NewHealthClient(conn)
	check := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r := must.Get(client.Check(callContext(t), &healthpb.HealthCheckRequest{}))(t)
		assert.Equal(t, want, r.GetStatus())
		all := must.Get(client.List(callContext(t), &healthpb.HealthListRequest{}))(t)
		require.Len(t, all.GetStatuses(), 1)
		assert.Equal(t, want, all.GetStatuses()[""].GetStatus())
	}
	check(serving)
	ctx, cancel := context.WithCancel(callContext(t))
	watch := must.Get(client.Watch(ctx, &healthpb.HealthCheckRequest{}))(t)
	next := func(want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		r := must.Get(watch.Recv())(t)
		assert.Equal(t, want, r.GetStatus())
	}
	next(serving)
	draining.Store(true)
	check(not)
	next(not)
	draining.Store(false)
	next(serving)
	cancel()
	_, err = watch.Recv()
	assert.Equal(t, codes.Canceled, status.Code(err))

	_, err = client.Check(callContext(t), &healthpb.HealthCheckRequest{Service: "billing.Invoices"})
	assert.Equal(t, codes.NotFound, status.Code(err))
	brief, end := context.WithTimeout(t.Context(), 1500*time.Millisecond) // in which it looks again
	defer end()
	watch = must.Get(client.Watch(brief, &healthpb.HealthCheckRequest{Service: "billing.Invoices"}))(t)
	next(healthpb.HealthCheckResponse_SERVICE_UNKNOWN)
	_, err = watch.Recv()
	assert.Equal(t, codes.DeadlineExceeded, status.Code(err), "a Watch goes on, as the service may appear")
}
