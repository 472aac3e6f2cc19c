package compare

import (
	"context"
	"crypto/x509"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/x509bundle"
	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/spiffe/go-spiffe/v2/svid/x509svid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	testpb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffegrpc"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
)

// rpcSource is one identity for both libraries.
type rpcSource struct {
	*spiffetest.Source
	t testing.TB
}

func (s rpcSource) GetX509SVID() (*x509svid.SVID, error) {
	svid, err := s.SVID()
	if err != nil {
		return nil, err
	}
	return peerSVID(s.t, svid), nil
}

func (s rpcSource) GetX509BundleForTrustDomain(td spiffeid.TrustDomain) (*x509bundle.Bundle, error) {
	ours, err := spiffe.ParseTrustDomain(td.Name())
	if err != nil {
		return nil, err
	}
	b, err := s.Bundle(ours)
	if err != nil {
		return nil, err
	}
	return peerBundle(s.t, b).X509Bundle(), nil
}

// rpcID returns the proven ID of a peer by the library that has made the credentials.
func rpcID(p *peer.Peer) string {
	if info, ok := p.AuthInfo.(spiffegrpc.AuthInfo); ok && info.Peer != nil {
		return info.Peer.ID().String()
	}
	if id, ok := grpccredentials.PeerIDFromPeer(p); ok {
		return id.String()
	}
	return "none"
}

type rpcService struct {
	testpb.UnimplementedTestServiceServer
}

func (rpcService) UnaryCall(ctx context.Context, _ *testpb.SimpleRequest) (*testpb.SimpleResponse, error) {
	p, _ := peer.FromContext(ctx)
	return &testpb.SimpleResponse{Username: rpcID(p)}, nil
}

func (rpcService) FullDuplexCall(stream grpc.BidiStreamingServer[testpb.StreamingOutputCallRequest, testpb.StreamingOutputCallResponse]) error {
	for {
		m, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = stream.Send(&testpb.StreamingOutputCallResponse{Payload: m.GetPayload()})
		}
		if err != nil {
			return err
		}
	}
}

// rpcPair is a server and a client of it.
func rpcPair(t *testing.T, server, client credentials.TransportCredentials) testpb.TestServiceClient {
	t.Helper()
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := grpc.NewServer(grpc.Creds(server))
	testpb.RegisterTestServiceServer(s, rpcService{})
	var wg sync.WaitGroup
	wg.Go(func() { assert.NoError(t, s.Serve(l)) })
	conn := must.Get(grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(client)))(t)
	t.Cleanup(func() {
		_ = conn.Close()
		s.Stop()
		wg.Wait()
	})
	return testpb.NewTestServiceClient(conn)
}

// TestGRPCCredentials connects our credentials with the peer's, both ways: each side finds the other one's ID, refuses
// another ID, another trust domain and an expired SVID, and keeps serving while leaf and root are rotated. With our
// Governor on one side, the peer's connections are ended, too, and no call fails.
func TestGRPCCredentials(t *testing.T) {
	t.Parallel()
	for _, ours := range []string{"server", "client"} {
		t.Run(ours, func(t *testing.T) {
			t.Parallel()
			ca := spiffetest.NewCA(t, "example.org")
			web, db := rpcSource{ca.Source("/web"), t}, rpcSource{ca.Source("/db"), t}
			other := rpcSource{ca.Source("/other"), t}
			past := func(c *x509.Certificate) {
				c.NotBefore, c.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(-time.Hour)
			}
			expiredWeb, expiredDB := rpcSource{ca.Source("/web", past), t}, rpcSource{ca.Source("/db", past), t}
			foreign := rpcSource{spiffetest.NewCA(t, "other.test").Source("/web"), t}
			id := func(path string) spiffe.ID { return spiffe.MustParseID("spiffe://example.org" + path) }
			pair := func(server, client rpcSource, governor *spiffetls.Governor) testpb.TestServiceClient {
				var s, c credentials.TransportCredentials
				var err error
				if ours == "server" {
					s, err = spiffegrpc.ServerCredentials(spiffetls.Config{Self: server, Peers: server, Allow: spiffe.AllowIDs(id("/web")), Governor: governor})
					c = grpccredentials.MTLSClientCredentials(client, client, tlsconfig.AuthorizeID(peerID(id("/db"))))
				} else {
					s = grpccredentials.MTLSServerCredentials(server, server, tlsconfig.AuthorizeID(peerID(id("/web"))))
					c, err = spiffegrpc.ClientCredentials(spiffetls.Config{Self: client, Peers: client, Allow: spiffe.AllowIDs(id("/db")), Governor: governor})
				}
				require.NoError(t, err)
				return rpcPair(t, s, c)
			}
			var p peer.Peer
			resp := must.Get(pair(db, web, nil).UnaryCall(timeout(t), &testpb.SimpleRequest{}, grpc.Peer(&p)))(t)
			assert.Equal(t, "spiffe://example.org/web", resp.GetUsername())
			assert.Equal(t, "spiffe://example.org/db", rpcID(&p))
			for name, sides := range map[string][2]rpcSource{
				"another client": {db, other}, "another server": {other, web}, "foreign client": {db, foreign}, "foreign server": {foreign, web},
				"expired client": {db, expiredWeb}, "expired server": {expiredDB, web},
			} {
				_, err := pair(sides[0], sides[1], nil).UnaryCall(timeout(t), &testpb.SimpleRequest{})
				assert.Equal(t, codes.Unavailable, status.Code(err), name)
			}

			g := &spiffetls.Governor{Jitter: -1}
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			wg.Go(func() { _ = g.Run(ctx) })
			client := pair(db, web, g)
			must.Get(client.UnaryCall(timeout(t), &testpb.SimpleRequest{}))(t)
			var over atomic.Bool
			var calls atomic.Int64
			var load sync.WaitGroup
			for range 2 {
				load.Go(func() {
					for !over.Load() {
						calls.Add(1)
						if _, err := client.UnaryCall(ctx, &testpb.SimpleRequest{}); !assert.NoError(t, err) {
							return
						}
					}
				})
				load.Go(func() {
					for !over.Load() {
						if !assert.NoError(t, rpcStream(ctx, client)) {
							return
						}
					}
				})
			}
			for n := range uint64(2) {
				for _, change := range []func(){ca.Prepare, ca.Rotate, ca.DropOldRoots} {
					change()
					web.Renew()
					db.Renew()
				}
				require.Eventually(t, func() bool { return endedBy(t, g) > n }, time.Minute, 5*time.Millisecond)
			}
			over.Store(true)
			load.Wait()
			assert.Greater(t, calls.Load(), int64(100))
		})
	}
}

// rpcStream is a stream of 300 ms.
func rpcStream(ctx context.Context, client testpb.TestServiceClient) error {
	stream, err := client.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	for begin := time.Now(); time.Since(begin) < 300*time.Millisecond; {
		if err := stream.Send(&testpb.StreamingOutputCallRequest{Payload: &testpb.Payload{Body: make([]byte, 1000)}}); err != nil {
			return err
		}
		if _, err := stream.Recv(); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if _, err = stream.Recv(); err == io.EOF {
		err = nil
	}
	return err
}

// TestGRPCPrograms compares two services that do the same: identities from an agent, the caller's ID in the handler, and
// for each method who may call it, streams too.
func TestGRPCPrograms(t *testing.T) {
	t.Parallel()
	lines := func(program string) int {
		text := must.Get(os.ReadFile("programs/" + program + "/main.go"))(t)
		_, code, ok := strings.Cut(string(text), "\nimport (\n")
		require.True(t, ok)
		return strings.Count(code, "\n")
	}
	ours, theirs := lines("grpcsvidkit"), lines("grpcgospiffe")
	t.Logf("%d lines with svidkit, and %d with go-spiffe", ours, theirs)
	assert.Less(t, ours, theirs)
}

// endedBy returns how many connections g has ended.
func endedBy(t *testing.T, g *spiffetls.Governor) (n uint64) {
	t.Helper()
	var text strings.Builder
	require.NoError(t, g.Report().Metrics(&text))
	for line := range strings.Lines(text.String()) {
		if rest, ok := strings.CutPrefix(line, "svidkit_governor_ended_connections_total{"); ok {
			_, value, _ := strings.Cut(strings.TrimSpace(rest), "} ")
			one := must.Get(strconv.ParseUint(value, 10, 64))(t)
			n += one
		}
	}
	return n
}
