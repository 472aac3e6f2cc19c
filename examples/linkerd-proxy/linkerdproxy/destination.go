package linkerdproxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/tlsalert"
)

const (
	maxUpdate       = 4 << 20 // bytes of a message
	maxEndpoints    = 10_000  // of a service
	maxDestinations = 1000    // followed at a time
	idleDestination = 10 * time.Minute
)

var destinationBackoff = renew.Backoff{Low: 100 * time.Millisecond, First: 200 * time.Millisecond,
	High: 10 * time.Second, Wish: time.Minute}

// Endpoint is an address of a service, from the mesh's destination service.
type Endpoint struct {
	Addr netip.AddrPort

	// Identity is the identity that the server must prove, and ServerName the server name for TLS, if that differs:
	// the arguments of [Identity.ClientConfig]. An empty Identity means a connection without TLS.
	Identity, ServerName string
}

// Destinations returns the endpoints of services from a mesh's destination service, by the method Get of Linkerd's
// destination API, and follows services that are in use. [NewDestinations] makes one. It is safe for concurrent use.
type Destinations struct {
	ctx context.Context
	log *slog.Logger
	rpc *grpchttp.Client

	mu    sync.Mutex
	known map[string]*destination // by authority
}

// destination is a followed service. The lock of the Destinations guards it.
type destination struct {
	first    chan struct{} // closed at the first answer
	answered bool
	idle     *time.Timer
	all      []Endpoint // never changed
	err      error      // why there are no endpoints; before the first answer, why there is no answer
}

// NewDestinations returns a Destinations, which connects at the first request, and ends with ctx. The service is
// [Environment]'s. The client presents the workload's certificate, once it has one, and the server must prove the
// name of the service; on loopback there is no TLS. A nil Identity is for a proxy without one: the connection is not
// encrypted, and the name must be empty. The logger gets failures (Warn), and may be nil.
func NewDestinations(ctx context.Context, id *Identity, service Service, logger *slog.Logger) (*Destinations, error) {
	at, err := service.parse("8086", id != nil)
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: destination service: %w", err)
	}
	scheme, config := "http://", (func(context.Context) (*tls.Config, error))(nil)
	if service.Name != "" {
		scheme, config = "https://", func(context.Context) (*tls.Config, error) {
			return id.ClientConfig(service.Name, "")
		}
	}
	t := tlsalert.NewTransport(config, true, nil)
	t.Proxy = nil
	context.AfterFunc(ctx, t.CloseIdleConnections)
	rpc := grpchttp.NewClient(&http.Client{Transport: t}, scheme+at.addr, maxUpdate)
	return &Destinations{ctx: ctx, log: ratelog.Patient(logger), rpc: rpc, known: map[string]*destination{}}, nil
}

// Endpoints returns the endpoints of a service, HOST:PORT, at most 10,000. It waits for the first answer of the
// destination service, and then returns the newest, even while the service cannot be reached. Endpoints that need
// more than TLS, such as another authority at a gateway, are left out; they never become endpoints without TLS. The
// caller must not change the slice.
//
// The error wraps [fs.ErrNotExist] if the destination service does not know the host, so that the caller may look
// elsewhere. A service without endpoints is another error. At most 1,000 services are followed, each until no caller
// has asked for ten minutes.
func (d *Destinations) Endpoints(ctx context.Context, authority string) ([]Endpoint, error) {
	t := d.follow(authority)
	if t == nil {
		return nil, fmt.Errorf("linkerdproxy: destination %.300q: %d services are followed, which is the limit",
			authority, maxDestinations)
	}
	select {
	case <-t.first:
	case <-ctx.Done():
	case <-d.ctx.Done():
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	err := t.err
	if !t.answered {
		// The error of the last attempt is text alone: one that wraps fs.ErrNotExist does not mean that there is no
		// such service.
		// see above
		err = fmt.Errorf("%w: %v", cmp.Or(context.Cause(ctx), context.Cause(d.ctx)), err)
	}
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: destination %.300q: %w", authority, err)
	}
	return t.all, nil
}

// follow returns the service, and starts to follow it if necessary. It returns nil beyond the limit.
func (d *Destinations) follow(authority string) *destination {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.known[authority]
	if t != nil && t.idle.Reset(idleDestination) || t == nil && len(d.known) >= maxDestinations {
		return t
	}
	ctx, cancel := context.WithCancel(d.ctx)
	t = &destination{first: make(chan struct{}), err: errors.New("the destination service has not answered yet")}
	t.idle = time.AfterFunc(idleDestination, func() {
		cancel()
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.known[authority] == t {
			delete(d.known, authority)
		}
	})
	d.known[authority] = t
	go d.run(ctx, authority, t)
	return t
}

// run follows a service until ctx is done.
func (d *Destinations) run(ctx context.Context, authority string, t *destination) {
	defer t.idle.Stop()
	for failures := 1; ; failures++ {
		err := d.stream(ctx, authority, func(all []Endpoint, none error) {
			failures = 0
			d.set(t, true, all, none)
		})
		if ctx.Err() != nil {
			return
		}
		f := renew.NewFailure(failures, err)
		if e, ok := errors.AsType[*grpchttp.Error](err); ok && e.Remote && (e.Code == grpchttp.InvalidArgument ||
			e.Code == grpchttp.FailedPrecondition) {
			f.Final = true // not a service of the mesh
			d.set(t, true, nil, fmt.Errorf("the destination service does not resolve it (%.300q): %w", e.Message,
				fs.ErrNotExist))
		} else {
			d.set(t, false, nil, err)
			d.log.Warn("linkerdproxy: the destination service does not answer, or has ended its answers; it is "+
				"asked again", "destination", authority, "err", err)
		}
		if renew.Sleep(ctx, destinationBackoff.Wait(f, rand.Float64())) != nil {
			return
		}
	}
}

// set publishes an answer, or the reason why there is none yet.
func (d *Destinations) set(t *destination, answered bool, all []Endpoint, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if answered || !t.answered {
		t.all, t.err = all, err
	}
	if answered && !t.answered {
		t.answered = true
		close(t.first)
	}
}

// stream reports each update until the stream ends. The first one replaces the state of an earlier stream.
func (d *Destinations) stream(ctx context.Context, authority string, tell func(all []Endpoint, none error)) error {
	request, err := protofield.Write(func(w *protofield.Writer) { // a GetDestination
		w.Text(1, "k8s")
		w.Text(2, authority)
	})
	if err != nil {
		return err
	}
	s, err := d.rpc.Stream(ctx, "/io.linkerd.proxy.destination.Destination/Get", nil, request)
	if err != nil {
		return err
	}
	defer s.Close()
	for u := (update{addrs: map[netip.AddrPort]Endpoint{}}); ; {
		message, err := s.Receive()
		if err = cmp.Or(err, protofield.Read(message, u.read)); err != nil {
			return err
		}
		tell(u.endpoints())
	}
}

// update accumulates the messages of a stream.
type update struct {
	addrs  map[netip.AddrPort]Endpoint
	absent bool // the service does not exist
}

func (u *update) endpoints() ([]Endpoint, error) {
	switch {
	case u.absent:
		return nil, fmt.Errorf("the destination service knows no such service: %w", fs.ErrNotExist)
	case len(u.addrs) == 0:
		return nil, errors.New("the service has no endpoints that this proxy can use")
	}
	return slices.SortedFunc(maps.Values(u.addrs), func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) }), nil
}

// first returns a reader of messages that keeps only field 1.
func first(read func(*protofield.Field)) func(*protofield.Field) {
	return func(f *protofield.Field) {
		if f.Number == 1 {
			read(f)
		}
	}
}

// read reads an Update.
func (u *update) read(f *protofield.Field) {
	switch f.Number {
	case 1: // a WeightedAddrSet
		u.absent = false
		f.Message(first(u.add))
	case 2: // an AddrSet
		f.Message(first(func(f *protofield.Field) { delete(u.addrs, readAddr(f)) }))
	case 3: // a NoEndpoints
		clear(u.addrs)
		u.absent = true
		f.Message(first(func(f *protofield.Field) { u.absent = f.Value == 0 }))
	}
}

// add reads a WeightedAddr.
func (u *update) add(f *protofield.Field) {
	var e Endpoint
	var unusable bool
	f.Message(func(f *protofield.Field) {
		switch f.Number {
		case 1:
			e.Addr = readAddr(f)
		case 5: // a TlsIdentity
			f.Message(func(f *protofield.Field) {
				switch f.Number {
				case 1, 3: // dns_like_identity, uri_like_identity
					f.Message(first(func(f *protofield.Field) { f.Text(&e.Identity) }))
				case 4: // server_name
					f.Message(first(func(f *protofield.Field) { f.Text(&e.ServerName) }))
				}
			})
			unusable = unusable || e.Identity == ""
		case 7: // an AuthorityOverride
			unusable = true
		}
	})
	delete(u.addrs, e.Addr)
	if !unusable && e.Addr.IsValid() && len(u.addrs) < maxEndpoints {
		u.addrs[e.Addr] = e
	}
}

// readAddr reads a TcpAddress. An invalid one is zero.
func readAddr(f *protofield.Field) netip.AddrPort {
	var ip netip.Addr
	var port int32
	f.Message(func(f *protofield.Field) {
		switch f.Number {
		case 1: // an IPAddress
			f.Message(func(f *protofield.Field) {
				var part [2]uint64
				switch f.Number {
				case 1: // IPv4
					f.Fixed(&part[0])
					// it has 32 bits
					ip = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, uint32(part[0]))))
				case 2: // IPv6, in two numbers
					f.Message(func(f *protofield.Field) { f.Fixed(&part[(f.Number-1)%2]) })
					ip = netip.AddrFrom16([16]byte(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil,
						part[0]), part[1]))).Unmap()
				}
			})
		case 2:
			f.Int32(&port)
		}
	})
	if !ip.IsValid() || ip.IsUnspecified() || port < 1 || port > 65535 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip, uint16(port))
}
