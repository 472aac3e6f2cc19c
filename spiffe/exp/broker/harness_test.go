package broker_test

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker"
	"github.com/svidkit/svidkit/spiffe/exp/broker/internal/descriptors"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

func TestMain(m *testing.M) {
	if relay() {
		return
	}
	rounds.Parallel(8)
	m.Run()
}

// relaySocket is the variable with the socket that a copy of this test connects to its standard input and output.
const relaySocket = "BROKER_TEST_RELAY"

// relay reports whether this process is such a copy, after its end.
func relay() bool {
	path := os.Getenv(relaySocket)
	if path == "" {
		return false
	}
	c := must.Do(net.Dial("unix", path))
	go func() {
		_, _ = io.Copy(c, os.Stdin)
		os.Exit(0)
	}()
	_, _ = io.Copy(os.Stdout, c)
	return true
}

const (
	patient = workloadtest.Patient
	service = "https://broker/spiffe.broker.API/"
	svids   = "SubscribeToX509SVID"
	header  = "Broker.spiffe.io" // as net/http spells it inside
)

// hub is a server of the Broker API in the trust domain example.org.
type hub struct {
	t        testing.TB
	ca       workloadtest.Domain
	agent    *provider // of the bundles
	workload *workloadserver.Handler
	handler  http.Handler
	self     *spiffetest.Source // of the server in TLS
	allow    spiffe.Policy      // of clients, in TLS
	anyone   bool               // clients need no certificate
	address  string
	conns    atomic.Int32 // connections of clients so far

	mu      sync.Mutex
	way     dialer                  // to the server
	grants  map[string]broker.Grant // by the paths of brokers
	objects map[string]*object      // by their names or UIDs
	asked   []broker.Reference      // of Resolve
	failing error                   // of Resolve
	svids   map[string]*spiffe.SVID // of processes, by program
	users   []uint32                // of processes
}

type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// dial connects to the server that was the last to begin.
func (h *hub) dial(ctx context.Context, network, address string) (net.Conn, error) {
	h.mu.Lock()
	way := h.way
	h.mu.Unlock()
	c, err := way(ctx, network, address)
	if err == nil {
		h.conns.Add(1)
	}
	return c, err
}

// object is a workload that is an object of Kubernetes.
type object struct {
	namespace string
	ids       []workloadserver.Identity
	ended     context.Context
	end       context.CancelCauseFunc
}

type objectKey struct{}

// provider is a source with revocation lists.
type provider struct {
	*spiffetest.Source
	crls [][]byte
}

func (p *provider) CRLs() [][]byte { return p.crls }

// everything is a grant without limits.
var everything = broker.Grant{
	References: []string{"*"}, Namespaces: []string{"*"}, Audiences: []string{"*"}, Identities: spiffe.AllowAnyPeer(),
}

// newHub returns a server without objects. The client /broker may have everything, and so may /other.
func newHub(t testing.TB, edit ...func(*workloadserver.Options)) *hub {
	t.Helper()
	h := &hub{
		t: t, ca: workloadtest.NewDomain(t, "example.org"), allow: spiffe.AllowAnyPeer(),
		grants:  map[string]broker.Grant{"/broker": everything, "/other": everything},
		objects: make(map[string]*object), svids: make(map[string]*spiffe.SVID),
	}
	h.ca.JWTSVID("/agent", "x") // from now on the bundle has JWT authorities
	h.agent = &provider{Source: h.ca.Source("/agent")}
	issue := func(_ context.Context, id spiffe.ID, audience []string) (string, error) {
		return h.ca.JWTSVID(id.Path(), audience...), nil
	}
	opts := workloadserver.Options{Identities: h.identities, IssueJWTSVID: issue}
	for _, e := range edit {
		e(&opts)
	}
	h.workload = must.Get(workloadserver.NewHandler(h.agent, &opts))(t)
	h.handler = must.Get(broker.NewHandler(h.workload, broker.Options{Grant: h.grant, Resolve: h.resolve}))(t)
	return h
}

func (h *hub) grant(id spiffe.ID) *broker.Grant {
	h.mu.Lock()
	defer h.mu.Unlock()
	g, ok := h.grants[id.Path()]
	if !ok || id.TrustDomain() != h.ca.TrustDomain() {
		return nil
	}
	return &g
}

// set changes what the server knows, and tells it.
func (h *hub) set(change func()) {
	h.mu.Lock()
	change()
	h.mu.Unlock()
	h.workload.Refresh()
}

// add adds an object with identities, whose hints are their paths unless there is only one.
func (h *hub) add(namespace, name string, paths ...string) *object {
	o := &object{namespace: namespace}
	o.ended, o.end = context.WithCancelCause(context.Background())
	for _, path := range paths {
		id := workloadserver.Identity{Provider: h.ca.Source(path)}
		if len(paths) > 1 {
			id.Hint = path
		}
		o.ids = append(o.ids, id)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.objects[name] = o
	return o
}

// taken returns what Resolve was asked for since the last call.
func (h *hub) taken() (asked []broker.Reference) {
	h.mu.Lock()
	defer h.mu.Unlock()
	asked, h.asked = h.asked, nil
	return asked
}

func (h *hub) remove(name string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.objects[name].end(fmt.Errorf("object %s: %w", name, fs.ErrNotExist))
	delete(h.objects, name)
}

func (h *hub) resolve(ctx context.Context, r broker.Reference) (context.Context, string, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked = append(h.asked, r)
	if h.failing != nil {
		return nil, "", h.failing
	}
	if r.PID > 0 {
		ctx, err := unixsocket.WithProcess(ctx, r.PID)
		return ctx, "", err
	}
	o := h.objects[r.Object.Name]
	if o == nil {
		o = h.objects[r.Object.UID]
	}
	if o == nil {
		return nil, "", fs.ErrNotExist
	}
	ctx, err := unixsocket.WithProcess(ctx, 0)
	ctx, end := context.WithCancelCause(context.WithValue(ctx, objectKey{}, o))
	context.AfterFunc(o.ended, func() { end(context.Cause(o.ended)) })
	return ctx, o.namespace, err
}

// identities are those of an object, or one with the path /PROGRAM of a process.
func (h *hub) identities(ctx context.Context) ([]workloadserver.Identity, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if o, ok := ctx.Value(objectKey{}).(*object); ok {
		return o.ids, nil
	}
	p, err := unixsocket.ProcessFromContext(ctx)
	if err != nil || p.Executable == "" {
		return nil, err
	}
	path := "/" + filepath.Base(p.Executable)
	if h.svids[path] == nil {
		h.svids[path] = h.ca.SVID(path)
	}
	peer, _ := unixsocket.PeerFromContext(ctx)
	h.users = append(h.users, peer.UID)
	return []workloadserver.Identity{{SVID: h.svids[path]}}, nil
}

// serve serves on a listener, or without one on a new socket, until the test ends or stop is called.
func (h *hub) serve(l net.Listener) (stop func() error) {
	h.t.Helper()
	h.self = h.ca.Source("/agent")
	e := must.Get(spiffetls.New(spiffetls.Config{
		Self: h.self, Peers: h.self, Allow: h.allow, AllowAnonymousClients: h.anyone,
	}))(h.t)
	s := &unixsocket.Server{
		Listener: l, Handler: h.handler, Serve: e.Serve,
	}
	var way dialer
	switch l := l.(type) {
	case nil:
		s.Path = filepath.Join(workloadtest.SocketDir(h.t), "s")
		h.address = "unix://" + s.Path
	case *memconn.Listener:
		s.Listener, way = likeSocket{l}, l.DialContext
		h.address = "unix:///broker.sock"
	default:
		h.address = "tcp://" + l.Addr().String()
	}
	if network, target, _ := strings.Cut(h.address, "://"); way == nil {
		way = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, target)
		}
	}
	require.NoError(h.t, s.Listen())
	h.set(func() { h.way = way })
	return workloadtest.Run(h.t, s)
}

// likeSocket is a listener in memory with the limits of a Unix socket.
type likeSocket struct{ *memconn.Listener }

func (likeSocket) Addr() net.Addr { return &net.UnixAddr{Net: "unix"} }

// endpoint proves the identity of a broker, and allows the server with a path.
func (h *hub) endpoint(own *spiffetest.Source, server string) *spiffetls.Endpoint {
	allow := spiffe.AllowIDs(h.ca.SVID(server).ID())
	return must.Get(spiffetls.New(spiffetls.Config{Self: own, Peers: own, Allow: allow}))(h.t)
}

// client returns a client of the server with the identity of a broker.
func (h *hub) client(own *spiffetest.Source) *broker.Client {
	c := must.Get(broker.NewClient(h.address, h.endpoint(own, "/agent")))(h.t)
	c.DialBy(h.dial)
	h.t.Cleanup(func() { _ = c.Close() })
	return c
}

// source returns a source for a workload that runs, and how to stop it.
func source(t testing.TB, c *broker.Client, r broker.Reference, cfg ...workloadapi.Config) (
	s *workloadapi.Source, stop func() error) {
	t.Helper()
	cfg = append(cfg, workloadapi.Config{})
	cfg[0].Client = must.Get(c.For(r))(t)
	s = must.Get(workloadapi.New(cfg[0]))(t)
	return s, workloadtest.Run(t, s)
}

// ready is [source], once it is ready.
func ready(t testing.TB, c *broker.Client, r broker.Reference, cfg ...workloadapi.Config) *workloadapi.Source {
	t.Helper()
	s, _ := source(t, c, r, cfg...)
	ctx, cancel := context.WithTimeout(t.Context(), patient)
	defer cancel()
	require.NoError(t, s.Ready(ctx))
	return s
}

// pod is the reference to a pod in the namespace shop.
func pod(name string) broker.Reference {
	return broker.Reference{Object: broker.Object{Plural: "pods", Group: "core", Namespace: "shop", Name: name}}
}

// raw returns an HTTP client with the certificate of a broker, without one if path is "".
func (h *hub) raw(path string) *http.Client {
	var e *spiffetls.Endpoint
	if path == "" {
		e = must.Get(spiffetls.New(spiffetls.Config{Peers: h.ca.Bundle(), OptionalIdentity: true,
			Allow: spiffe.AllowAnyPeer()}))(h.t)
	} else {
		e = h.endpoint(h.ca.Source(path), "/agent")
	}
	t := must.Get(e.Transport())(h.t)
	t.DialContext = h.dial
	h.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t}
}

// call calls a method with the header. The request is text.
func (h *hub) call(c *http.Client, method, text string) *workloadtest.RPC {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(h.t.Context(), patient)
	h.t.Cleanup(cancel)
	return workloadtest.Post(ctx, h.t, c, service+method, h.request(method, text), header, "true")
}

// request encodes the request of a method, by the descriptors of the standard.
func (h *hub) request(method, text string) []byte {
	h.t.Helper()
	var set descriptorpb.FileDescriptorSet
	require.NoError(h.t, proto.Unmarshal(descriptors.BrokerAPI, &set))
	files := must.Get(protodesc.NewFiles(&set))(h.t)
	name := protoreflect.FullName("spiffe.broker." + method + "Request")
	d := must.Get(files.FindDescriptorByName(name))(h.t)
	m := dynamicpb.NewMessage(d.(protoreflect.MessageDescriptor))
	require.NoError(h.t, prototext.UnmarshalOptions{Resolver: dynamicpb.NewTypes(files)}.Unmarshal([]byte(text), m))
	return workloadtest.Frame(m)
}

// reference is the text of a reference of a type.
func reference(name, fields string) string {
	return fmt.Sprintf("reference { reference { [type.googleapis.com/spiffe.broker.%s] { %s } } }", name, fields)
}

// named is the text of the reference to a pod in the namespace shop.
func named(pod string) string {
	return reference("KubernetesObjectReference",
		fmt.Sprintf(`type { plural: "pods" group: "core" } key { namespace: "shop" name: %q }`, pod))
}

func process(pid int) string { return reference("WorkloadPIDReference", fmt.Sprintf("pid: %d", pid)) }

// refused returns the code of an answer and the reason in its details, of the domain spiffe.io.
func refused(r *workloadtest.RPC) (code int, reason string) {
	r.T.Helper()
	code, _ = r.Status()
	if detail, ok := r.Details()["type.googleapis.com/google.rpc.ErrorInfo"]; ok {
		fields := workloadtest.Fields(r.T, detail)
		require.Equal(r.T, "spiffe.io", string(fields[2][0]))
		reason = string(fields[1][0])
	}
	return code, reason
}
