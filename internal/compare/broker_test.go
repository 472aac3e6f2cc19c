package compare

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spiffe/go-spiffe/v2/bundle/jwtbundle"
	pb "github.com/spiffe/go-spiffe/v2/exp/proto/spiffe/broker"
	"github.com/spiffe/go-spiffe/v2/spiffegrpc/grpccredentials"
	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	peerjwt "github.com/spiffe/go-spiffe/v2/svid/jwtsvid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// brokerWorld is a trust domain with an agent, which serves the Broker API, and the identities of every workload.
type brokerWorld struct {
	*spiffetest.Source // of the agent
	t                  *testing.T
	ca                 *spiffetest.CA
	broker             rpcSource
	ids                atomic.Pointer[[]workloadserver.Identity]
	asked              atomic.Pointer[broker.Reference] // of our server
	ends               chan context.CancelCauseFunc     // of the pod "mortal"
}

func newBrokerWorld(t *testing.T) *brokerWorld {
	t.Helper()
	ca := spiffetest.NewCA(t, "example.org")
	ca.JWTSVID("/web", "db") // from now on the bundle has a key for tokens
	w := &brokerWorld{Source: ca.Source("/agent"), t: t, ca: ca, broker: rpcSource{ca.Source("/broker"), t},
		ends: make(chan context.CancelCauseFunc, 1)}
	w.rotate("other.test")
	return w
}

// rotate replaces the root and the identities, and federates with another trust domain.
func (w *brokerWorld) rotate(federated string) {
	w.ca.Rotate()
	other := spiffetest.NewCA(w.t, federated)
	other.JWTSVID("/web", "db")
	w.ca.Federate(other.Bundle())
	w.set(workloadserver.Identity{SVID: w.ca.Intermediate().SVID("/web"), Hint: "internal"},
		workloadserver.Identity{SVID: w.ca.SVID("/batch"), Hint: "external"})
}

func (w *brokerWorld) set(ids ...workloadserver.Identity) {
	w.ids.Store(&ids)
	w.Renew()
	w.broker.Renew()
}

func (w *brokerWorld) id(path string) spiffe.ID {
	return spiffe.MustParseID("spiffe://example.org" + path)
}

func (*brokerWorld) CRLs() [][]byte { return [][]byte{[]byte("list 1"), []byte("list 2")} }

// responses are those of the streams, by method, made of the peer's values.
func (w *brokerWorld) responses(ids ...workloadserver.Identity) map[string]proto.Message {
	w.t.Helper()
	svids := &pb.SubscribeToX509SVIDResponse{Crl: w.CRLs(), FederatedBundles: map[string][]byte{}}
	bundles := &pb.SubscribeToX509BundlesResponse{Crl: w.CRLs(), Bundles: map[string][]byte{}}
	jwt := &pb.SubscribeToJWTBundlesResponse{Bundles: map[string][]byte{}}
	for b := range must.Get(w.Snapshot())(w.t).Bundles().All() {
		td := b.TrustDomain().ID().String()
		bundles.Bundles[td] = roots(peerBundle(w.t, b).X509Bundle())
		jwt.Bundles[td] = must.Get(peerBundle(w.t, b).JWTBundle().Marshal())(w.t)
	}
	maps.Copy(svids.FederatedBundles, bundles.Bundles)
	delete(svids.FederatedBundles, "spiffe://example.org")
	for _, id := range ids {
		certs, key := must.Get2(peerSVID(w.t, id.SVID).MarshalRaw())(w.t)
		svids.Svids = append(svids.Svids, &pb.X509SVID{SpiffeId: id.SVID.ID().String(), X509Svid: certs,
			X509SvidKey: key, Bundle: bundles.Bundles["spiffe://example.org"], Hint: id.Hint})
	}
	return map[string]proto.Message{brokerMethods[0]: svids, brokerMethods[1]: bundles, brokerMethods[2]: jwt}
}

// serve runs our server, and returns its address for the peer's client. Pods are what their names say.
func (w *brokerWorld) serve(network string) string {
	w.t.Helper()
	type podKey struct{}
	workload := must.Get(workloadserver.NewHandler(w, &workloadserver.Options{
		Identities: func(ctx context.Context) ([]workloadserver.Identity, error) {
			if ctx.Value(podKey{}) == "unregistered" {
				return nil, nil
			}
			return slices.Clone(*w.ids.Load()), nil
		},
		IssueJWTSVID: func(_ context.Context, id spiffe.ID, audience []string) (string, error) {
			return w.ca.JWTSVID(id.Path(), audience...), nil
		}}))(w.t)
	all, ids := []string{"*"}, spiffe.AllowAnyPeer()
	grants := map[string]*broker.Grant{
		"/operator": {References: all, Namespaces: all, Audiences: all, Identities: ids},
		"/broker":   {References: []string{"pods"}, Namespaces: []string{"shop"}, Audiences: all, Identities: ids},
	}
	failures := map[string]error{"gone": fs.ErrNotExist, "secret": workloadserver.ErrDenied, "odd": fs.ErrInvalid,
		"down": errors.New("no answer")}
	h := must.Get(broker.NewHandler(workload, broker.Options{
		Grant: func(id spiffe.ID) *broker.Grant { return grants[id.Path()] },
		Resolve: func(ctx context.Context, r broker.Reference) (context.Context, string, error) {
			w.asked.Store(&r)
			ctx, err := unixsocket.WithProcess(ctx, r.PID)
			if err = errors.Join(err, failures[r.Object.Name]); err != nil {
				return nil, "", err
			}
			if r.Object.Name == "mortal" {
				mortal, end := context.WithCancelCause(ctx)
				ctx = mortal
				w.ends <- end
			}
			return context.WithValue(ctx, podKey{}, r.Object.Name), r.Object.Namespace, nil
		}}))(w.t)
	endpoint := must.Get(spiffetls.New(spiffetls.Config{Self: w, Peers: w, Allow: spiffe.AllowAnyPeer(),
		MinVersion: tls.VersionTLS12}))(w.t)
	s := &unixsocket.Server{Path: socket(w.t), Handler: h, Serve: endpoint.Serve}
	address := "unix://" + s.Path
	if network == "tcp" {
		s.Listener = must.Get(net.Listen("tcp", "127.0.0.1:0"))(w.t)
		address = s.Listener.Addr().String()
	}
	require.NoError(w.t, s.Listen())
	workloadtest.Run(w.t, s)
	return address
}

// dial returns the peer's connection of a broker, by TCP with TLS 1.2.
func (w *brokerWorld) dial(address, path string, edit ...func(*x509.Certificate)) *grpc.ClientConn {
	w.t.Helper()
	self, allow := rpcSource{w.ca.Source(path, edit...), w.t}, tlsconfig.AuthorizeID(peerID(w.id("/agent")))
	security := grpccredentials.MTLSClientCredentials(self, self, allow)
	if !strings.HasPrefix(address, "unix:") {
		c := tlsconfig.MTLSClientConfig(self, self, allow)
		c.MaxVersion = tls.VersionTLS12
		security = credentials.NewTLS(c)
	}
	conn := must.Get(grpc.NewClient(address, grpc.WithTransportCredentials(security)))(w.t)
	w.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

const brokerHeader, podUID = "broker.spiffe.io", "a1b2c3d4-e5f6-7890-abcd-ef1234567890"

func pod(name string) broker.Reference { return object("pods", "core", "shop", name, "") }

func object(plural, group, namespace, name, uid string) broker.Reference {
	return broker.Reference{Object: broker.Object{Plural: plural, Group: group, Namespace: namespace, Name: name,
		UID: uid}}
}

// brokerReferences are references of each kind, of which the last one is for this machine only.
var brokerReferences = []broker.Reference{pod("web"), object("pods", "core", "", "", podUID),
	object("pods", "core", "shop", "web", podUID), object("deployments", "apps", "shop", "web", ""),
	object("nodes", "core", "", "ip-10-0-1-42.ec2.internal", ""), {PID: int32(os.Getpid())}}

// peerReference is a reference in the peer's types.
func peerReference(r broker.Reference) *pb.WorkloadReference {
	o := r.Object
	if o == (broker.Object{}) {
		return anyReference(&pb.WorkloadPIDReference{Pid: r.PID})
	}
	m := &pb.KubernetesObjectReference{Uid: o.UID, Type: &pb.KubernetesObjectType{Plural: o.Plural, Group: o.Group}}
	if o.Namespace+o.Name != "" {
		m.Key = &pb.KubernetesObjectKey{Namespace: o.Namespace, Name: o.Name}
	}
	return anyReference(m)
}

func anyReference(m proto.Message) *pb.WorkloadReference {
	return &pb.WorkloadReference{Reference: must.Do(anypb.New(m))}
}

var brokerMethods = []string{"SubscribeToX509SVID", "SubscribeToX509Bundles", "SubscribeToJWTBundles", "FetchJWTSVID"}

// brokerCall begins a call of the peer's generated client, and returns what receives the responses.
func brokerCall(ctx context.Context, on grpc.ClientConnInterface, method string, r *pb.WorkloadReference,
	audience ...string) func() (proto.Message, error) {
	c := pb.NewAPIClient(on)
	switch method {
	case "SubscribeToX509SVID":
		return received(c.SubscribeToX509SVID(ctx, &pb.SubscribeToX509SVIDRequest{Reference: r}))
	case "SubscribeToX509Bundles":
		return received(c.SubscribeToX509Bundles(ctx, &pb.SubscribeToX509BundlesRequest{Reference: r}))
	case "SubscribeToJWTBundles":
		return received(c.SubscribeToJWTBundles(ctx, &pb.SubscribeToJWTBundlesRequest{Reference: r}))
	}
	return func() (proto.Message, error) {
		return c.FetchJWTSVID(ctx, &pb.FetchJWTSVIDRequest{Reference: r, Audience: audience})
	}
}

func received[M any](s grpc.ServerStreamingClient[M], err error) func() (proto.Message, error) {
	return func() (proto.Message, error) {
		if err != nil {
			return nil, err
		}
		m, err := s.Recv()
		return any(m).(proto.Message), err
	}
}

// sameMessage compares messages, in which there must be no unknown fields.
func sameMessage(t *testing.T, want, got proto.Message) {
	t.Helper()
	assert.True(t, proto.Equal(want, got), "want %v\ngot %v", want, got)
}

// refused compares a status with the tables of the standard.
func refused(t *testing.T, err error, code codes.Code, reason string) {
	t.Helper()
	s := status.Convert(err)
	assert.Equal(t, code, s.Code(), "%v", err)
	if reason == "" {
		assert.Empty(t, s.Details())
	} else if assert.Len(t, s.Details(), 1, "%v", err) {
		sameMessage(t, &errdetails.ErrorInfo{Reason: reason, Domain: "spiffe.io"}, s.Details()[0].(proto.Message))
	}
}

// The peer's client gets each field of each response of our server, for references of each kind, again after a
// rotation, and until the workload ends.
func TestBrokerPeerClient(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-1", "BRK-3", "BRK-9", "BRK-11", "BRK-13", "BRK-15", "BRK-18", "BRK-22", "BRK-23")
	for _, network := range []string{"unix", "tcp"} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			ctx, w := metadata.AppendToOutgoingContext(timeout(t), brokerHeader, "true"), newBrokerWorld(t)
			conn := w.dial(w.serve(network), "/operator")
			streams, set := map[string]func() (proto.Message, error){}, jwtbundle.NewSet()
			var r *pb.WorkloadReference
			check := func() {
				t.Helper()
				for method, want := range w.responses(*w.ids.Load()...) {
					got := must.Get(streams[method]())(t)
					if jwt, ok := got.(*pb.SubscribeToJWTBundlesResponse); ok {
						for td, doc := range jwt.Bundles { // in the peer's own form
							b := must.Get(jwtbundle.Parse(spiffeid.RequireTrustDomainFromString(td), doc))(t)
							jwt.Bundles[td] = must.Get(b.Marshal())(t)
							set.Add(b)
						}
					}
					sameMessage(t, want, got)
				}
				all := []*pb.JWTSVID{{SpiffeId: "spiffe://example.org/web", Hint: "internal"},
					{SpiffeId: "spiffe://example.org/batch", Hint: "external"}}
				for id, want := range map[string][]*pb.JWTSVID{"": all, all[1].SpiffeId: all[1:]} {
					got := must.Get(pb.NewAPIClient(conn).FetchJWTSVID(ctx, &pb.FetchJWTSVIDRequest{Reference: r,
						Audience: []string{"db", "cache"}, SpiffeId: id}))(t)
					for _, one := range got.Svids {
						svid := must.Get(peerjwt.ParseAndValidate(one.Svid, set, []string{"db"}))(t)
						assert.Equal(t, []string{"db", "cache"}, svid.Audience)
						assert.Equal(t, one.SpiffeId, svid.ID.String())
						one.Svid = ""
					}
					sameMessage(t, &pb.FetchJWTSVIDResponse{Svids: want}, got)
				}
			}
			for _, one := range brokerReferences {
				if one.PID > 0 && network == "tcp" { // of another machine, for all that the server knows
					_, err := brokerCall(ctx, conn, brokerMethods[0], peerReference(one))()
					refused(t, err, codes.InvalidArgument, "WORKLOAD_REFERENCE_INVALID")
					break
				}
				r = peerReference(one)
				for _, method := range brokerMethods {
					streams[method] = brokerCall(ctx, conn, method, r)
				}
				check()
				assert.Equal(t, one, *w.asked.Load())
			}
			mortal, end := pod("mortal"), func() { (<-w.ends)(fs.ErrNotExist) }
			if network == "unix" {
				cmd := exec.Command("sleep", "100")
				require.NoError(t, cmd.Start())
				end = func() { _, _ = cmd.Process.Kill(), cmd.Wait() }
				t.Cleanup(end)
				mortal = broker.Reference{PID: int32(cmd.Process.Pid)}
			}
			receive := brokerCall(ctx, conn, brokerMethods[0], peerReference(mortal))
			must.Get(receive())(t)
			end()
			refused(t, must.Err(receive()), codes.NotFound, "WORKLOAD_NOT_FOUND")
			w.rotate("third.test") // the other streams of the connection go on
			check()
			batch, svids := (*w.ids.Load())[1], brokerMethods[0]
			w.set(batch)
			sameMessage(t, w.responses(batch)[svids], must.Get(streams[svids]())(t))
			w.set()
			for _, method := range brokerMethods[:3] {
				refused(t, must.Err(streams[method]()), codes.PermissionDenied, "WORKLOAD_NOT_ENTITLED")
			}
		})
	}
}

// Our server refuses by the tables of the Broker Endpoint, section 6, and of the Broker API, section 4.8.
func TestBrokerPeerClientRefused(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-2", "BRK-3", "BRK-6", "BRK-8", "BRK-12", "BRK-14", "BRK-15", "BRK-16", "BRK-17",
		"BRK-20")
	w := newBrokerWorld(t)
	address, good, denied := w.serve("unix"), peerReference(pod("web")), codes.PermissionDenied
	const yes, none, gone = brokerHeader + " true", "WORKLOAD_NOT_ENTITLED", "WORKLOAD_NOT_FOUND"
	type row struct {
		as, metadata string
		r            *pb.WorkloadReference
		code         codes.Code
		reason       string
	}
	rows := map[string]row{
		"no metadata":         {"/operator", "", good, codes.InvalidArgument, ""},
		"in upper case":       {"/operator", brokerHeader + " TRUE", good, codes.InvalidArgument, ""},
		"of the Workload API": {"/operator", "workload.spiffe.io true", good, codes.InvalidArgument, ""},
		"twice":               {"/operator", yes + " " + yes, good, codes.InvalidArgument, ""},
		"no broker":           {"/stranger", yes, good, denied, ""},
		"server fails":        {"/operator", yes, peerReference(pod("down")), codes.Unavailable, ""},
		"no such workload":    {"/operator", yes, peerReference(pod("gone")), codes.NotFound, gone},
		"no such process":     {"/operator", yes, peerReference(broker.Reference{PID: 1 << 30}), codes.NotFound, gone},
		"not for a broker":    {"/operator", yes, peerReference(pod("secret")), denied, none},
		"no identity":         {"/operator", yes, peerReference(pod("unregistered")), denied, none},
		"another kind":        {"/broker", yes, peerReference(brokerReferences[3]), denied, none},
		"another namespace":   {"/broker", yes, peerReference(object("pods", "core", "b", "web", "")), denied, none},
	}
	for name, r := range map[string]*pb.WorkloadReference{
		"no reference":    nil,
		"empty reference": {},
		"empty Any":       {Reference: &anypb.Any{}},
		"vendor's type":   anyReference(wrapperspb.String("x")),
		"another prefix": {Reference: &anypb.Any{TypeUrl: "a.test/spiffe.broker.KubernetesObjectReference",
			Value: good.Reference.Value}},
		"malformed":         {Reference: &anypb.Any{TypeUrl: good.Reference.TypeUrl, Value: []byte{8}}},
		"PID 0":             peerReference(broker.Reference{}),
		"PID -1":            peerReference(broker.Reference{PID: -1}),
		"no plural":         peerReference(object("", "core", "shop", "web", "")),
		"no group":          peerReference(object("pods", "", "shop", "web", "")),
		"no key and no UID": peerReference(object("pods", "core", "", "", "")),
		"key without name": anyReference(&pb.KubernetesObjectReference{Key: &pb.KubernetesObjectKey{},
			Type: &pb.KubernetesObjectType{Plural: "pods", Group: "core"}, Uid: podUID}),
		"no UUID":               peerReference(object("pods", "core", "", "", "1")),
		"kind that is not here": peerReference(pod("odd")),
	} {
		rows[name] = row{"/operator", yes, r, codes.InvalidArgument, "WORKLOAD_REFERENCE_INVALID"}
	}
	for name, r := range rows {
		ctx := metadata.AppendToOutgoingContext(timeout(t), strings.Fields(r.metadata)...)
		conn := w.dial(address, r.as)
		for _, method := range brokerMethods {
			t.Run(name+" "+method, func(t *testing.T) {
				refused(t, must.Err(brokerCall(ctx, conn, method, r.r, "db")()), r.code, r.reason)
			})
		}
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), brokerHeader, "true")
	_, err := brokerCall(ctx, w.dial(address, "/operator"), "FetchJWTSVID", good)()
	refused(t, err, codes.InvalidArgument, "") // no audience
	foreign := &brokerWorld{t: t, ca: spiffetest.NewCA(t, "example.org")}
	bare := must.Get(grpc.NewClient(address, grpc.WithTransportCredentials(
		grpccredentials.TLSClientCredentials(w.broker, tlsconfig.AuthorizeAny()))))(t)
	t.Cleanup(func() { _ = bare.Close() })
	for _, conn := range []*grpc.ClientConn{foreign.dial(address, "/operator"), bare} { // refused by the handshake
		refused(t, must.Err(brokerCall(ctx, conn, brokerMethods[0], good)()), codes.Unavailable, "")
	}
	for life := 2 * time.Second; ; life *= 2 {
		short := func(c *x509.Certificate) { c.NotAfter = time.Now().Add(life) }
		receive := brokerCall(ctx, w.dial(address, "/operator", short), brokerMethods[0], good)
		if _, err := receive(); err == nil { // otherwise this machine is too slow
			refused(t, must.Err(receive()), codes.Unauthenticated, "")
			return
		}
		require.Less(t, life, time.Minute)
	}
}

// What server reflection of our server shows is the API of the peer.
func TestBrokerPeerReflection(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "BRK-9", "BRK-10", "BRK-11", "BRK-13", "BRK-27")
	ctx, w := metadata.AppendToOutgoingContext(timeout(t), brokerHeader, "true"), newBrokerWorld(t)
	conn := w.dial(w.serve("unix"), "/operator")
	theirs := protodesc.ToFileDescriptorProto(pb.File_api_proto)
	for _, version := range []string{"v1", "v1alpha"} { // with the same messages
		service := "grpc.reflection." + version + ".ServerReflection"
		s := must.Get(conn.NewStream(ctx, bidi, "/"+service+"/ServerReflectionInfo"))(t)
		ask := func(r *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
			require.NoError(t, s.SendMsg(r))
			answer := new(reflectionpb.ServerReflectionResponse)
			require.NoError(t, s.RecvMsg(answer))
			return answer
		}
		var services []string
		list := ask(&reflectionpb.ServerReflectionRequest{
			MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}})
		for _, one := range list.GetListServicesResponse().GetService() {
			services = append(services, one.GetName())
		}
		assert.ElementsMatch(t, []string{"spiffe.broker.API", service}, services)
		for _, m := range append(theirs.MessageType, &descriptorpb.DescriptorProto{Name: new("API")}) {
			name, set := "spiffe.broker."+m.GetName(), &descriptorpb.FileDescriptorSet{}
			answer := ask(&reflectionpb.ServerReflectionRequest{
				MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: name}})
			for _, encoded := range answer.GetFileDescriptorResponse().GetFileDescriptorProto() {
				set.File = append(set.File, &descriptorpb.FileDescriptorProto{})
				require.NoError(t, proto.Unmarshal(encoded, set.File[len(set.File)-1]))
			}
			d := must.Get(must.Get(protodesc.NewFiles(set))(t).FindDescriptorByName(protoreflect.FullName(name)))(t)
			ours := protodesc.ToFileDescriptorProto(d.ParentFile())
			ours.Name, ours.Options = theirs.Name, theirs.Options // the peer's language
			sameMessage(t, theirs, ours)
		}
	}
}
