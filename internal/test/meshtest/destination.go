package meshtest

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/spiffe"
)

// DestinationName is the identity of the destination service.
const DestinationName = "linkerd-destination.linkerd.serviceaccount.identity.linkerd.cluster.local"

// Destination is a destination service. Module internal/compare has one by Linkerd's own messages and grpc-go.
type Destination struct {
	Service linkerdproxy.Service

	mu       sync.Mutex
	begins   map[string][][]byte // by authority
	refusals map[string]error
	streams  map[*stream]bool
	asked    []Ask
	conns    map[net.Conn]bool
}

// Ask is a call.
type Ask struct{ Scheme, Authority, Client string }

type stream struct {
	authority string
	messages  chan []byte
	cut       chan struct{}
}

// NewDestination starts a destination service, with the TLS of the mesh, or without any on loopback if c is nil.
func NewDestination(t testing.TB, c *Controller) *Destination {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &Destination{
		Service: linkerdproxy.Service{Addr: l.Addr().String()},
		begins:  map[string][][]byte{}, refusals: map[string]error{}, streams: map[*stream]bool{}, conns: map[net.Conn]bool{},
	}
	var id *linkerdproxy.Identity
	if c != nil {
		c.mu.Lock()
		c.tokens[Token(DestinationName)] = spiffe.Pod{Namespace: "linkerd", ServiceAccount: "linkerd-destination"}
		c.mu.Unlock()
		id = c.Certified(t, DestinationName)
		addr := fmt.Sprintf("0.0.0.0:%d", l.Addr().(*net.TCPAddr).Port) // no loopback by its text
		d.Service = linkerdproxy.Service{Addr: addr, Name: DestinationName}
	}
	server := &http.Server{
		Handler:   &grpchttp.Handler{Methods: map[string]grpchttp.Method{"/io.linkerd.proxy.destination.Destination/Get": d.get}, MaxMessage: 1 << 16},
		Protocols: new(http.Protocols),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
	}
	server.Protocols.SetUnencryptedHTTP2(true)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(&secured{l, id, d})
	}()
	t.Cleanup(func() {
		d.Cut()
		_ = server.Close()
		<-done
	})
	return d
}

type connKey struct{}

// secured hides from net/http that a connection is TLS, as that of a mesh has no ALPN.
type secured struct {
	net.Listener
	id *linkerdproxy.Identity
	d  *Destination
}

type hidden struct {
	net.Conn
	tls *tls.Conn
}

func (s *secured) Accept() (net.Conn, error) {
	c, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	s.d.mu.Lock()
	s.d.conns[c] = true
	s.d.mu.Unlock()
	if s.id == nil {
		return c, nil
	}
	tc := tls.Server(c, s.id.ServerConfig())
	return hidden{tc, tc}, nil
}

func (d *Destination) get(ctx context.Context, c *grpchttp.Call) error {
	message, err := c.ReceiveOnly()
	if err != nil {
		return err
	}
	var a Ask
	if err := protofield.Read(message, func(f *protofield.Field) {
		switch f.Number {
		case 1:
			f.Text(&a.Scheme)
		case 2:
			f.Text(&a.Authority)
		}
	}); err != nil {
		return grpchttp.Errorf(grpchttp.Internal, "%w", err)
	}
	if h, ok := c.Request().Context().Value(connKey{}).(hidden); ok {
		a.Client, _ = linkerdproxy.PeerName(h.tls.ConnectionState())
	}
	s := &stream{a.Authority, make(chan []byte, 100), make(chan struct{})}
	d.mu.Lock()
	d.asked = append(d.asked, a)
	begin, refusal := d.begins[a.Authority], d.refusals[a.Authority]
	d.streams[s] = true
	d.mu.Unlock()
	defer func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.streams, s)
	}()
	if refusal != nil {
		return refusal
	}
	for _, m := range begin {
		if err := c.Send(m); err != nil {
			return err
		}
	}
	for {
		select {
		case m := <-s.messages:
			if err := c.Send(m); err != nil {
				return err
			}
		case <-s.cut:
			return grpchttp.Errorf(grpchttp.Unavailable, "the destination service is going away")
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Begin sets what streams of an authority begin with from now on.
func (d *Destination) Begin(authority string, messages ...[]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.begins[authority] = messages
}

// Refuse has streams of an authority fail from now on, unless err is nil.
func (d *Destination) Refuse(authority string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refusals[authority] = err
}

// Push sends messages to the streams of an authority.
func (d *Destination) Push(authority string, messages ...[]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s := range d.streams {
		for _, m := range messages {
			if s.authority == authority {
				s.messages <- m
			}
		}
	}
}

// Cut ends all streams and connections.
func (d *Destination) Cut() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s := range d.streams {
		close(s.cut)
	}
	clear(d.streams)
	for c := range d.conns {
		_ = c.Close()
	}
	clear(d.conns)
}

// Asked returns the calls.
func (d *Destination) Asked() []Ask {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]Ask(nil), d.asked...)
}

// Streams returns how many streams there are.
func (d *Destination) Streams() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.streams)
}

// Message returns what write makes.
func Message(write func(*protofield.Writer)) []byte {
	b, err := protofield.Write(write)
	if err != nil {
		panic(err)
	}
	return b
}

// Added returns an Update with endpoints.
func Added(all ...linkerdproxy.Endpoint) []byte {
	return Message(func(w *protofield.Writer) {
		w.Message(1, func(w *protofield.Writer) {
			for _, e := range all {
				w.Message(1, func(w *protofield.Writer) {
					Addr(w, 1, e.Addr)
					w.Varint(3, 10_000)
					if e.Identity != "" {
						w.Message(5, func(w *protofield.Writer) {
							w.Message(1, func(w *protofield.Writer) { w.Text(1, e.Identity) })
							w.Message(4, func(w *protofield.Writer) { w.Text(1, e.ServerName) })
						})
					}
				})
			}
		})
	})
}

// Removed returns an Update without some addresses.
func Removed(all ...netip.AddrPort) []byte {
	return Message(func(w *protofield.Writer) {
		w.Message(2, func(w *protofield.Writer) {
			for _, a := range all {
				Addr(w, 1, a)
			}
		})
	})
}

// None returns an Update that says that a service has no endpoints, or that there is none.
func None(exists bool) []byte {
	return Message(func(w *protofield.Writer) {
		w.Message(3, func(w *protofield.Writer) {
			if exists {
				w.Varint(1, 1)
			}
		})
	})
}

// Addr adds a TcpAddress.
func Addr(w *protofield.Writer, n protofield.Number, a netip.AddrPort) {
	w.Message(n, func(w *protofield.Writer) {
		w.Message(1, func(w *protofield.Writer) {
			if a.Addr().Is4() {
				v4 := a.Addr().As4()
				// a fixed32 of the number 1
				w.Raw(binary.LittleEndian.AppendUint32([]byte{1<<3 | 5}, binary.BigEndian.Uint32(v4[:])))
				return
			}
			v6 := a.Addr().As16()
			w.Message(2, func(w *protofield.Writer) {
				w.AddFixed64(1, binary.BigEndian.Uint64(v6[:]))
				w.AddFixed64(2, binary.BigEndian.Uint64(v6[8:]))
			})
		})
		w.Varint(2, uint64(a.Port()))
	})
}
