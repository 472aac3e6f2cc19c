package spiffegrpc

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/spiffe/health"
)

// Health returns the service grpc.health.v1 for the parts of h. Kubernetes, load balancers and clients check it:
//
//	healthpb.RegisterHealthServer(server, spiffegrpc.Health(h))
//
// It knows one service, the server as a whole, whose name is empty: SERVING while h is ready, and otherwise
// NOT_SERVING, without a reason; /ready of h has the reason. A part with a Check that fails takes the server out of
// balancing before it ends. For other services Check returns NOT_FOUND, and Watch SERVICE_UNKNOWN. Watch checks each
// second. A GracefulStop waits for it: bound that with a Stop.
//
// Every client gets the same answer. With [RequirePeer] the method needs a policy, such as [spiffe.AllowAnyPeer].
func Health(h *health.Handler) healthpb.HealthServer { return checked{h: h} }

type checked struct {
	healthpb.UnimplementedHealthServer
	h *health.Handler
}

func (c checked) status(service string) *healthpb.HealthCheckResponse {
	s := healthpb.HealthCheckResponse_SERVING
	switch {
	case service != "":
		s = healthpb.HealthCheckResponse_SERVICE_UNKNOWN
	case c.h.Ready() != nil:
		s = healthpb.HealthCheckResponse_NOT_SERVING
	}
	return &healthpb.HealthCheckResponse{Status: s}
}

// Check implements [healthpb.HealthServer].
func (c checked) Check(_ context.Context, r *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	if r.GetService() != "" {
		return nil, status.Error(codes.NotFound, "unknown service; that of the whole server has an empty name")
	}
	return c.status(""), nil
}

// List implements [healthpb.HealthServer].
func (c checked) List(context.Context, *healthpb.HealthListRequest) (*healthpb.HealthListResponse, error) {
	return &healthpb.HealthListResponse{Statuses: map[string]*healthpb.HealthCheckResponse{"": c.status("")}}, nil
}

// Watch implements [healthpb.HealthServer].
func (c checked) Watch(
	r *healthpb.HealthCheckRequest, stream grpc.ServerStreamingServer[healthpb.HealthCheckResponse],
) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	told := healthpb.HealthCheckResponse_UNKNOWN
	for {
		if now := c.status(r.GetService()); now.GetStatus() != told {
			if err := stream.Send(now); err != nil {
				return err
			}
			told = now.GetStatus()
		}
		select {
		case <-tick.C:
		case <-stream.Context().Done():
			return status.FromContextError(stream.Context().Err()).Err()
		}
	}
}
