package compare

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"path"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pb "github.com/spiffe/go-spiffe/v2/exp/proto/spiffe/broker"
	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// brokerPeer is a server of the peer's generated code. answer gets the number of the call, of a method for a pod.
type brokerPeer struct {
	pb.UnimplementedAPIServer
	answer func(ctx context.Context, c brokerCalled) error
	calls  sync.Map // counters
	mu     sync.Mutex
	proved []*x509.Certificate // by clients
}

// brokerCalled is a call that the peer's server gets.
type brokerCalled struct {
	method, pod string
	n           int64 // of the method for the pod
	request     brokerRequest
	send        func(any) error
}

type brokerRequest interface {
	proto.Message
	GetReference() *pb.WorkloadReference
}

func (p *brokerPeer) call(ctx context.Context, r brokerRequest, send func(any) error) error {
	md, _ := metadata.FromIncomingContext(ctx)
	reference, err := r.GetReference().GetReference().UnmarshalNew()
	if err != nil || !slices.Equal(md[brokerHeader], []string{"true"}) || md["workload.spiffe.io"] != nil {
		return status.Errorf(codes.InvalidArgument, "%v, %v", md, err)
	}
	object, _ := reference.(*pb.KubernetesObjectReference)
	method, _ := grpc.Method(ctx)
	c := brokerCalled{method: path.Base(method), pod: object.GetKey().GetName(), request: r, send: send}
	n, _ := p.calls.LoadOrStore(c.method+c.pod, new(atomic.Int64))
	c.n = n.(*atomic.Int64).Add(1)
	return p.answer(ctx, c)
}

func (p *brokerPeer) SubscribeToX509SVID(r *pb.SubscribeToX509SVIDRequest,
	s grpc.ServerStreamingServer[pb.SubscribeToX509SVIDResponse]) error {
	return p.call(s.Context(), r, s.SendMsg)
}

func (p *brokerPeer) SubscribeToX509Bundles(r *pb.SubscribeToX509BundlesRequest,
	s grpc.ServerStreamingServer[pb.SubscribeToX509BundlesResponse]) error {
	return p.call(s.Context(), r, s.SendMsg)
}

func (p *brokerPeer) SubscribeToJWTBundles(r *pb.SubscribeToJWTBundlesRequest,
	s grpc.ServerStreamingServer[pb.SubscribeToJWTBundlesResponse]) error {
	return p.call(s.Context(), r, s.SendMsg)
}

func (p *brokerPeer) FetchJWTSVID(ctx context.Context, r *pb.FetchJWTSVIDRequest) (*pb.FetchJWTSVIDResponse, error) {
	m := new(pb.FetchJWTSVIDResponse)
	err := p.call(ctx, r, func(answer any) error { m = answer.(*pb.FetchJWTSVIDResponse); return nil })
	return m, err
}

// start runs the peer's server until the test ends or stop is called, and returns a client of ours.
func (p *brokerPeer) start(w *brokerWorld, l net.Listener) (client *broker.Client, stop func()) {
	w.t.Helper()
	agent := rpcSource{w.Source, w.t}
	s := grpc.NewServer(grpc.Creds(grpccredentials.MTLSServerCredentials(agent, agent,
		func(id spiffeid.ID, chains [][]*x509.Certificate) error {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.proved = append(p.proved, chains[0][0])
			return spiffeid.MatchID(peerID(w.id("/broker")))(id)
		})))
	pb.RegisterAPIServer(s, p)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	stop = sync.OnceFunc(func() { s.Stop(); assert.NoError(w.t, <-done) })
	w.t.Cleanup(stop)
	return w.client(l.Addr(), "/agent"), stop
}

// connections returns the certificates that clients have proved, one for each connection.
func (p *brokerPeer) connections() []*x509.Certificate {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.proved)
}

// client returns our client, which expects a server with the path.
func (w *brokerWorld) client(at net.Addr, path string) *broker.Client {
	w.t.Helper()
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: w.broker, Peers: w.broker,
		Allow: spiffe.AllowIDs(w.id(path))}))(w.t)
	c := must.Get(broker.NewClient(at.Network()+"://"+at.String(), endpoint))(w.t)
	w.t.Cleanup(func() { assert.NoError(w.t, c.Close()) })
	return c
}

// brokerSource is a source of ours, which runs until the test ends or stop is called.
func brokerSource(t *testing.T, c *broker.Client, r broker.Reference, cfg workloadapi.Config) (
	src *workloadapi.Source, stop func() error) {
	t.Helper()
	cfg.Client = must.Get(c.For(r))(t)
	src = must.Get(workloadapi.New(cfg))(t)
	return src, workloadtest.Run(t, src)
}

// The peer's server decodes each field of each request of our client, for references of each kind, and our client
// each field of its responses.
func TestBrokerPeerServer(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-1", "BRK-2", "BRK-3", "BRK-4", "BRK-9", "BRK-11", "BRK-13", "BRK-14", "BRK-15",
		"BRK-16", "BRK-17", "BRK-18", "AMB-26")
	for network, l := range map[string]net.Listener{
		"unix": must.Get(net.Listen("unix", socket(t)))(t), "tcp": must.Get(net.Listen("tcp", "127.0.0.1:0"))(t),
	} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			ctx, w := timeout(t), newBrokerWorld(t)
			ids, asked, tokens := *w.ids.Load(), sync.Map{}, &pb.FetchJWTSVIDResponse{}
			for _, id := range ids {
				tokens.Svids = append(tokens.Svids, &pb.JWTSVID{SpiffeId: id.SVID.ID().String(), Hint: id.Hint,
					Svid: w.ca.JWTSVID(id.SVID.ID().Path(), "db", "cache")})
			}
			client, _ := (&brokerPeer{answer: func(ctx context.Context, c brokerCalled) error {
				asked.Store(c.method, c.request)
				if c.method == "FetchJWTSVID" {
					return c.send(tokens)
				}
				_ = c.send(w.responses(ids...)[c.method])
				<-ctx.Done()
				return nil
			}}).start(w, l)
			for _, one := range brokerReferences {
				workload, err := client.For(one)
				if one.PID > 0 && network == "tcp" {
					assert.Error(t, err, "a PID of this machine")
					break
				}
				require.NoError(t, err)
				for n, cfg := range []workloadapi.Config{
					{JWTBundles: true}, {JWTBundles: true, Hint: "external"}, {JWTBundles: true, BundlesOnly: true},
				} {
					src, stop := brokerSource(t, client, one, cfg)
					require.NoError(t, src.Ready(ctx))
					assert.True(t, sameAuthorities(must.Get(w.Snapshot())(t).Bundles(), src.Bundles()))
					assert.Equal(t, w.CRLs(), src.CRLs())
					assert.Empty(t, src.Report().Problems)
					if !cfg.BundlesOnly {
						sameSVID(t, ids[n].SVID, must.Get(src.SVID())(t)) // the default one, and that with the hint
						assert.Len(t, src.SVIDs(), 2)
					}
					require.NoError(t, stop())
				}
				got := must.Get(workload.FetchJWTSVIDs(ctx, spiffe.ID{}, "db", "cache"))(t)
				require.Len(t, got, 2)
				for i, s := range got {
					sameMessage(t, tokens.Svids[i], &pb.JWTSVID{SpiffeId: s.ID.String(), Svid: s.Token(), Hint: s.Hint})
				}
				_, err = workload.FetchJWTSVIDs(ctx, ids[0].SVID.ID(), "db", "cache")
				assert.ErrorIs(t, err, workloadapi.ErrBadResponse, "it has tokens of another identity")
				r := peerReference(one)
				for method, want := range map[string]proto.Message{
					"SubscribeToX509SVID":    &pb.SubscribeToX509SVIDRequest{Reference: r},
					"SubscribeToX509Bundles": &pb.SubscribeToX509BundlesRequest{Reference: r},
					"SubscribeToJWTBundles":  &pb.SubscribeToJWTBundlesRequest{Reference: r},
					"FetchJWTSVID": &pb.FetchJWTSVIDRequest{Reference: r, Audience: []string{"db", "cache"},
						SpiffeId: "spiffe://example.org/web"},
				} {
					m, _ := asked.LoadAndDelete(method)
					require.NotNil(t, m, method)
					sameMessage(t, want, m.(proto.Message))
				}
			}
			other := w.client(l.Addr(), "/other")
			_, err := must.Get(other.For(pod("web")))(t).FetchJWTSVIDs(ctx, spiffe.ID{}, "db")
			assert.ErrorContains(t, err, "spiffe://example.org/agent", "the server has another ID")
			_, sent := asked.Load("FetchJWTSVID")
			assert.False(t, sent)
		})
	}
}

// After each status, with and without details, our source keeps or drops what it has, and ends for good or waits.
func TestBrokerPeerServerStatuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-8", "BRK-20", "BRK-21", "BRK-23", "AMB-9")
	type details = []protoadapt.MessageV1
	info := func(reason, domain string) details {
		return details{&errdetails.ErrorInfo{Reason: reason, Domain: domain, Metadata: map[string]string{"pid": "7"}}}
	}
	busy := append(info("BUSY", "spiffe.io"), &errdetails.RetryInfo{RetryDelay: durationpb.New(20 * time.Second)})
	rows := map[string]struct {
		code         codes.Code
		details      details
		keeps, final bool
		is           error
		wait         time.Duration // at least; 0 means not for long
	}{
		"ended":           {codes.OK, nil, true, false, nil, 0},
		"unavailable":     {codes.Unavailable, nil, true, false, nil, 0},
		"busy":            {codes.Unavailable, busy, true, false, nil, 20 * time.Second},
		"internal":        {codes.Internal, nil, true, false, nil, 0},
		"exhausted":       {codes.ResourceExhausted, nil, true, false, nil, 0},
		"unauthenticated": {codes.Unauthenticated, nil, true, false, nil, 0},
		"invalid": {codes.InvalidArgument, info("WORKLOAD_REFERENCE_INVALID", "spiffe.io"), true, true,
			workloadapi.ErrRefused, 0},
		"header":       {codes.InvalidArgument, nil, true, true, workloadapi.ErrRefused, 0},
		"switched-off": {codes.Unimplemented, nil, true, true, errors.ErrUnsupported, 0},
		"gone":         {codes.NotFound, info("WORKLOAD_NOT_FOUND", "spiffe.io"), false, true, broker.ErrEnded, 0},
		"gone-plainly": {codes.NotFound, nil, false, true, broker.ErrEnded, 0},
		"not-entitled": {codes.PermissionDenied, info("WORKLOAD_NOT_ENTITLED", "spiffe.io"), false, false,
			workloadapi.ErrDenied, 0},
		"no-broker": {codes.PermissionDenied, nil, false, false, workloadapi.ErrDenied, 2 * time.Minute},
		"other-domain": {codes.PermissionDenied, info("WORKLOAD_NOT_ENTITLED", "a.test"), false, false,
			workloadapi.ErrDenied, 2 * time.Minute},
	}
	ctx, w := t.Context(), newBrokerWorld(t)
	p := &brokerPeer{answer: func(ctx context.Context, c brokerCalled) error {
		r, found := rows[c.pod]
		if c.method != "FetchJWTSVID" && found == (c.n == 1) {
			_ = c.send(w.responses(*w.ids.Load()...)[c.method])
		}
		if !found { // the pod "late"
			if r.code = codes.NotFound; c.n > 1 {
				<-ctx.Done()
			}
		} else if r.code == codes.OK {
			return nil
		}
		return must.Do(status.New(r.code, "text").WithDetails(r.details...)).Err()
	}}
	client, _ := p.start(w, must.Get(net.Listen("unix", socket(t)))(t))
	late, _ := brokerSource(t, client, pod("late"), workloadapi.Config{})
	require.NoError(t, late.Ready(ctx)) // NotFound was not final, as there was nothing before
	w.broker.Renew()
	for name, r := range rows {
		t.Run(name, func(t *testing.T) {
			src, stop := brokerSource(t, client, pod(name), workloadapi.Config{})
			var e *workloadapi.Error
			require.Eventually(t, func() bool {
				return errors.As(src.Report().Upstreams[0].Err, &e) && (e.Final || e.RetryIn > 0)
			}, time.Minute, 5*time.Millisecond)
			assert.Equal(t, int(r.code), e.Code)
			assert.Equal(t, r.final, e.Final)
			assert.GreaterOrEqual(t, e.RetryIn, r.wait)
			assert.Less(t, e.RetryIn, r.wait*6/5+6*time.Second)
			_, err := src.SVID()
			_, errBundle := src.Bundle(w.ca.TrustDomain())
			if r.keeps {
				assert.NoError(t, errors.Join(err, errBundle))
			} else {
				assert.ErrorIs(t, err, spiffe.ErrNotReady)
				assert.ErrorIs(t, errBundle, spiffe.ErrNotReady)
			}
			assert.Equal(t, r.final, stop() != nil)
			if _, err := must.Get(client.For(pod(name)))(t).FetchJWTSVIDs(ctx, spiffe.ID{}, "db"); r.is != nil {
				assert.ErrorIs(t, e, r.is)
				assert.ErrorIs(t, err, r.is)
			}
		})
	}
	must.Get(late.SVID())(t, "another workload")
	renewed := must.Get(w.broker.SVID())(t).Leaf()
	assert.True(t, slices.ContainsFunc(p.connections(), renewed.Equal), "Unauthenticated asks for a new certificate")
}

// A response in which a mandatory field is empty is discarded, and the stream goes on. Unknown fields do not matter.
func TestBrokerPeerServerMessages(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-22")
	ctx, w := timeout(t), newBrokerWorld(t)
	good := w.responses(*w.ids.Load()...)
	svid := func(change func(*pb.X509SVID)) proto.Message {
		m := proto.CloneOf(good["SubscribeToX509SVID"]).(*pb.SubscribeToX509SVIDResponse)
		change(m.Svids[1])
		return m
	}
	unknown := func(m proto.Message) proto.Message {
		m = proto.CloneOf(m)
		m.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 99, protowire.BytesType), "new"))
		return m
	}
	token := func(id, token string) proto.Message {
		return &pb.FetchJWTSVIDResponse{Svids: []*pb.JWTSVID{{SpiffeId: id, Svid: token}}}
	}
	one, bad := w.ca.JWTSVID("/web", "db"), -1
	rows := map[string]struct {
		m    proto.Message
		left int // identities in it
	}{
		"no-svids":       {&pb.SubscribeToX509SVIDResponse{Crl: w.CRLs()}, bad},
		"svid-empty":     {svid(func(s *pb.X509SVID) { proto.Reset(s) }), bad},
		"svid-id":        {svid(func(s *pb.X509SVID) { s.SpiffeId = "" }), bad},
		"svid-other-id":  {svid(func(s *pb.X509SVID) { s.SpiffeId = "spiffe://example.org/other" }), bad},
		"svid-chain":     {svid(func(s *pb.X509SVID) { s.X509Svid = nil }), bad},
		"svid-key":       {svid(func(s *pb.X509SVID) { s.X509SvidKey = nil }), bad},
		"svid-bundle":    {svid(func(s *pb.X509SVID) { s.Bundle = nil }), bad},
		"svid-hint":      {svid(func(s *pb.X509SVID) { s.Hint = "internal" }), 1},
		"svid-unknown":   {unknown(good["SubscribeToX509SVID"]), 2},
		"no-bundles":     {&pb.SubscribeToX509BundlesResponse{}, bad},
		"bundle-unknown": {unknown(good["SubscribeToX509Bundles"]), 0},
		"no-jwt-bundles": {&pb.SubscribeToJWTBundlesResponse{}, bad},
		"jwt-unknown":    {unknown(good["SubscribeToJWTBundles"]), 0},
		"no-tokens":      {&pb.FetchJWTSVIDResponse{}, bad},
		"token-id":       {token("", one), bad},
		"token-svid":     {token("spiffe://example.org/web", ""), bad},
		"token-unknown":  {unknown(token("spiffe://example.org/web", one)), 1},
	}
	client, _ := (&brokerPeer{answer: func(ctx context.Context, c brokerCalled) error {
		if c.method == "FetchJWTSVID" {
			return c.send(rows[c.pod].m)
		}
		for _, m := range []any{good[c.method], rows[c.pod].m, good[c.method]} {
			_ = c.send(m)
		}
		<-ctx.Done()
		return nil
	}}).start(w, must.Get(net.Listen("unix", socket(t)))(t))
	for name, r := range rows {
		t.Run(name, func(t *testing.T) {
			workload := must.Get(client.For(pod(name)))(t)
			watch := workload.WatchX509SVIDs
			switch r.m.(type) {
			case *pb.SubscribeToX509BundlesResponse:
				watch = workload.WatchX509Bundles
			case *pb.SubscribeToJWTBundlesResponse:
				watch = workload.WatchJWTBundles
			case *pb.FetchJWTSVIDResponse:
				all, err := workload.FetchJWTSVIDs(ctx, spiffe.ID{}, "db")
				assert.Equal(t, r.left == bad, errors.Is(err, workloadapi.ErrBadResponse), "%v", err)
				assert.Len(t, all, max(r.left, 0))
				return
			}
			left := []int(nil)
			for u, err := range watch(ctx) {
				if errors.Is(err, workloadapi.ErrBadResponse) {
					left = append(left, bad)
				} else if assert.NoError(t, err) {
					left = append(left, len(u.Identities))
				}
				if len(left) == 3 {
					break
				}
			}
			require.Len(t, left, 3)
			assert.Equal(t, r.left, left[1])
			assert.Equal(t, left[0], left[2])
		})
	}
}

// A hundred workloads share a connection. One of them ends alone; the others outlast the server, and have what it
// answers after it is back.
func TestBrokerPeerServerMany(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-21", "BRK-23", "BRK-24")
	ctx, w, over := t.Context(), newBrokerWorld(t), make(chan struct{})
	p := &brokerPeer{answer: func(ctx context.Context, c brokerCalled) error {
		_ = c.send(w.responses(workloadserver.Identity{SVID: w.ca.SVID("/" + c.pod)})[c.method])
		if c.pod == "w-7" {
			<-over
			return status.Error(codes.NotFound, "ended")
		}
		<-ctx.Done()
		return nil
	}}
	l := must.Get(net.Listen("unix", socket(t)))(t)
	client, stop := p.start(w, l)
	var sources []*workloadapi.Source
	for i := range 100 {
		src, _ := brokerSource(t, client, pod(fmt.Sprint("w-", i)), workloadapi.Config{})
		sources = append(sources, src)
		if i == 0 { // the others wait for its connection
			require.NoError(t, src.Ready(ctx))
		}
	}
	before := map[*workloadapi.Source]*spiffe.SVID{}
	for i, src := range sources {
		require.NoError(t, src.Ready(ctx))
		before[src] = must.Get(src.SVID())(t)
		assert.Equal(t, w.id(fmt.Sprint("/w-", i)), before[src].ID())
	}
	assert.Len(t, p.connections(), 1)
	until := func(ok func() bool) { require.Eventually(t, ok, time.Minute, time.Millisecond) }
	close(over)
	until(func() bool { return errors.Is(must.Err(sources[7].SVID()), broker.ErrEnded) })
	stop()
	sources = slices.Delete(sources, 7, 8)
	for _, src := range sources {
		until(func() bool { return src.Report().Upstreams[0].Err != nil })
		assert.Same(t, before[src], must.Get(src.SVID())(t))
	}
	p.start(w, must.Get(net.Listen("unix", l.Addr().String()))(t))
	for _, src := range sources {
		until(func() bool { return must.Get(src.SVID())(t) != before[src] })
	}
}
