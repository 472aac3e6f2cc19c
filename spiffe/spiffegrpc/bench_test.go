package spiffegrpc_test

import (
	"context"
	"github.com/svidkit/svidkit/internal/test/must"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	testpb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/svidkit/svidkit/authn/jwt"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// BenchmarkInterceptor is what the interceptors add to a call, beside the call itself.
func BenchmarkInterceptor(b *testing.B) {
	ca := spiffetest.NewCA(b, "example.org")
	authority, bundle := issuer(b, ca)
	validator := must.Get(jwtsvid.NewValidator(bundle, []string{"db"}, nil))(b)
	method := must.Get(jwt.SVID(validator, spiffe.AllowIDs(ops)))(b)
	tokens, _, err := spiffegrpc.RequireCaller(proven(method, nil))
	require.NoError(b, err)
	peers, _, err := spiffegrpc.RequirePeer(spiffegrpc.Methods{unaryCall: spiffe.AllowIDs(web)})
	require.NoError(b, err)
	text := must.Get(authority.Issue(jwtsvid.Request{ID: ops, Audience: []string{"db"}}))(b)
	var call context.Context
	addr := serve(b, serverCreds(b, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), nil), &service{}, grpc.UnaryInterceptor(
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			call = context.WithoutCancel(ctx)
			return next(ctx, req)
		}))
	client := connect(b, addr, clientCreds(b, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), nil),
		grpc.WithPerRPCCredentials(spiffegrpc.TokenCredentials(func(context.Context) (string, error) { return text, nil })))
	ctx := callContext(b)
	must.Get(client.UnaryCall(ctx, &testpb.SimpleRequest{}))(b)
	seen := call
	b.Run("call", func(b *testing.B) {
		for b.Loop() {
			if _, err := client.UnaryCall(ctx, &testpb.SimpleRequest{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	next := func(context.Context, any) (any, error) { return nil, nil }
	for name, i := range map[string]grpc.UnaryServerInterceptor{"peer": peers, "token": tokens} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := i(seen, nil, &grpc.UnaryServerInfo{FullMethod: unaryCall}, next); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkGoverned compares calls on connections that a Governor can drain with calls on others.
func BenchmarkGoverned(b *testing.B) {
	for _, governed := range []bool{false, true} {
		b.Run(map[bool]string{false: "without", true: "with"}[governed], func(b *testing.B) {
			ca := spiffetest.NewCA(b, "example.org")
			var opts spiffetls.Config
			if governed {
				opts.Governor = governor(b, time.Minute)
			}
			addr := serve(b, serverCreds(b, ca.SVID("/db"), ca.Bundle(), spiffe.AllowIDs(web), &opts), &service{})
			client := connect(b, addr, clientCreds(b, ca.SVID("/web"), ca.Bundle(), spiffe.AllowIDs(db), &opts))
			for b.Loop() {
				if _, err := client.UnaryCall(context.Background(), &testpb.SimpleRequest{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
