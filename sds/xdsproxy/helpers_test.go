package xdsproxy_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/wire/envoysds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/sds"
	"github.com/svidkit/svidkit/sds/xdsproxy"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

const (
	service    = "/envoy.service.discovery.v3.AggregatedDiscoveryService/"
	stream     = service + "StreamAggregatedResources"
	delta      = service + "DeltaAggregatedResources"
	secretType = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
	clusters   = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
	endpoints  = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
	patient    = 20 * time.Second // for what takes no time unless something is broken
	maxMessage = 64 << 20
)

// network is where servers listen: real sockets, or memory in tests with virtual time.
type network struct {
	listen func(name string) net.Listener
	dial   func(name string) func(context.Context, string, string) (net.Conn, error)
}

// sockets returns the network of loopback addresses.
func sockets(t testing.TB) network {
	at := map[string]string{}
	return network{
		listen: func(name string) net.Listener {
			addr := at[name]
			if addr == "" {
				addr = "127.0.0.1:0"
			}
			l := must.Get(net.Listen("tcp", addr))(t)
			at[name] = l.Addr().String()
			return l
		},
		dial: func(name string) func(context.Context, string, string) (net.Conn, error) {
			return func(ctx context.Context, _, _ string) (net.Conn, error) {
				var d net.Dialer
				return d.DialContext(ctx, "tcp", at[name])
			}
		},
	}
}

// memory returns a network in memory. A server that has stopped refuses connections.
func memory() network {
	at := map[string]*memconn.Listener{}
	var mu sync.Mutex
	return network{
		listen: func(name string) net.Listener {
			mu.Lock()
			defer mu.Unlock()
			at[name] = memconn.Listen()
			return at[name]
		},
		dial: func(name string) func(context.Context, string, string) (net.Conn, error) {
			return func(ctx context.Context, n, a string) (net.Conn, error) {
				mu.Lock()
				l := at[name]
				mu.Unlock()
				return l.DialContext(ctx, n, a)
			}
		},
	}
}

// serve serves h under a name until the test ends or stop is called, which cuts all connections.
func (n network) serve(t testing.TB, name string, h http.Handler) (stop func()) {
	srv := &http.Server{Handler: h, Protocols: new(http.Protocols), ErrorLog: log.New(io.Discard, "", 0)}
	srv.Protocols.SetUnencryptedHTTP2(true)
	srv.HTTP2 = &http.HTTP2Config{MaxReadFrameSize: 16 << 10} // as grpc-go and Envoy have; a client has a buffer of this size
	l := n.listen(name)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(l)
	}()
	stop = sync.OnceFunc(func() {
		_ = srv.Close()
		<-done
	})
	t.Cleanup(stop)
	return stop
}

// client returns a client of the server with that name.
func (n network) client(t testing.TB, name string) *http.Client {
	tr := &http.Transport{Protocols: new(http.Protocols), DialContext: n.dial(name)}
	tr.Protocols.SetUnencryptedHTTP2(true)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// through serves h as "proxy" until the test ends, and returns a client of it.
func (n network) through(t testing.TB, h http.Handler) *grpchttp.Client {
	n.serve(t, "proxy", h)
	return grpchttp.NewClient(n.client(t, "proxy"), "http://localhost", maxMessage)
}

// control returns the handler of a control plane.
func control(f func(ctx context.Context, c *grpchttp.Call, delta bool) error) http.Handler {
	method := func(delta bool) grpchttp.Method {
		return func(ctx context.Context, c *grpchttp.Call) error {
			if err := c.SendHeader(); err != nil {
				return err
			}
			return f(ctx, c, delta)
		}
	}
	return &grpchttp.Handler{Methods: map[string]grpchttp.Method{stream: method(false), delta: method(true)}, MaxMessage: maxMessage}
}

// newProxy returns a handler whose control plane is the server "control".
func newProxy(t testing.TB, n network, edit ...func(*xdsproxy.Config)) *xdsproxy.Handler {
	cfg := xdsproxy.Config{URL: "http://localhost", AllowPlaintext: true, HTTPClient: n.client(t, "control")}
	for _, f := range edit {
		f(&cfg)
	}
	h := must.Get(xdsproxy.NewHandler(cfg))(t)
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	return h
}

// onSocket serves h on a Unix socket, and returns a client.
func onSocket(t testing.TB, h http.Handler) *grpchttp.Client {
	dir := must.Get(os.MkdirTemp("", "xds"))(t) // the directories of t.TempDir are too long for a socket
	s := &unixsocket.Server{Path: filepath.Join(dir, "s"), Handler: h}
	require.NoError(t, s.Listen())
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	c := sds.UnixClient(s.Path)
	t.Cleanup(func() {
		c.CloseIdleConnections()
		cancel()
		<-done
		_ = os.RemoveAll(dir)
	})
	return grpchttp.NewClient(c, "http://localhost", maxMessage)
}

// secretSource is a sds.Source that tests fill.
type secretSource struct {
	mu      sync.Mutex
	secrets map[string]*pki.Secret
	subs    []func(string)
}

func (f *secretSource) GenerateSecret(_ context.Context, name string) (*pki.Secret, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.secrets[name]; s != nil {
		return s, nil
	}
	return nil, fmt.Errorf("test: %q: %w", name, fs.ErrNotExist)
}

func (f *secretSource) Subscribe(fn func(string)) (cancel func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.subs = append(f.subs, fn)
	return func() {}
}

func (f *secretSource) put(t testing.TB, ca *spiffetest.CA, name string) {
	f.set(name, must.Get(pki.NewKeyPairSecret(name, ca.SVID("/web")))(t))
}

func (f *secretSource) set(name string, s *pki.Secret) {
	f.mu.Lock()
	if f.secrets == nil {
		f.secrets = map[string]*pki.Secret{}
	}
	f.secrets[name] = s
	subs := slices.Clone(f.subs)
	f.mu.Unlock()
	for _, fn := range subs {
		fn(name)
	}
}

// secrets returns a handler of src.
func secrets(t testing.TB, src sds.Source, opts *sds.Options) func(*xdsproxy.Config) {
	h := must.Get(sds.NewHandler(src, opts))(t)
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	return func(c *xdsproxy.Config) { c.Secrets = h }
}

func encode(t testing.TB, m proto.Message) []byte {
	return must.Get(proto.Marshal(m))(t)
}

func ask(t testing.TB, typeURL string, names ...string) []byte {
	return encode(t, &envoysds.DiscoveryRequest{TypeUrl: typeURL, ResourceNames: names})
}

func askDelta(t testing.TB, typeURL string, names ...string) []byte {
	return encode(t, &envoysds.DeltaDiscoveryRequest{TypeUrl: typeURL, ResourceNamesSubscribe: names})
}

// receive returns the next response of s, a DiscoveryResponse.
func receive(t testing.TB, s *grpchttp.Stream) *envoysds.DiscoveryResponse {
	t.Helper()
	msg := must.Get(s.Receive())(t)
	var r envoysds.DiscoveryResponse
	require.NoError(t, proto.Unmarshal(msg, &r))
	return &r
}

func asError(t testing.TB, err error) *grpchttp.Error {
	t.Helper()
	e, ok := errors.AsType[*grpchttp.Error](err)
	require.True(t, ok, "%v", err)
	return e
}
