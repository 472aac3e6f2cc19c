package linkerdproxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/svidkit/svidkit/caclient/internal/caconn"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/renew"
)

const (
	getDestination   = "/io.linkerd.proxy.destination.Destination/Get"
	maxUpdate        = 4 << 20 // bytes of a message
	maxEndpoints     = 10_000  // of a service
	maxDestinations  = 1000    // that are followed
	idleDestination  = 10 * time.Minute
	destinationsPort = "8086"
)

var destinationBackoff = renew.Backoff{Low: 100 * time.Millisecond, First: 200 * time.Millisecond, High: 10 * time.Second, Wish: time.Minute}

// Endpoint is an address of a service, as the destination service of the mesh has it.
type Endpoint struct {
	Addr netip.AddrPort

	// Identity is what the server proves, and ServerName the name to ask for, if that is another: the arguments of
	// [Identity.ClientConfig]. An empty Identity means a connection without TLS.
	Identity, ServerName string
}

// Destinations asks the destination service of a mesh for the endpoints of services, by the method Get of Linkerd's destination
// API, and follows them while they are asked for. [NewDestinations] makes one. It is safe for concurrent use.
type Destinations struct {
	ctx context.Context
	log *slog.Logger
	rpc *grpchttp.Client

	mu    sync.Mutex
	known map[string]*destination // by authority
}

// destination is a service that is followed.
type destination struct {
	first chan struct{} // closed when there is an answer
	stop  context.CancelFunc
	idle  *time.Timer

	mu       sync.Mutex
	answered bool
	all      []Endpoint // never changed
	none     error      // why there are none
	failure  error      // of the last attempt
}

// NewDestinations returns a Destinations, which connects when it is first asked, and ends with ctx. The service is that of
// [Environment]. The client proves the workload, once it has a certificate, and the server the name of the service; on loopback
// neither does. A nil Identity is that of a proxy without one: the connection is not encrypted, and the name must be empty. The
// logger gets failures (Warn), and may be nil.
func NewDestinations(ctx context.Context, id *Identity, service Service, logger *slog.Logger) (*Destinations, error) {
	at, err := service.place(destinationsPort)
	switch {
	case err != nil:
	case id == nil && service.Name != "":
		err = errors.New("the name of the service is set, and a proxy without an identity cannot verify it")
	case id != nil:
		_, err = service.parse(destinationsPort)
	}
	cfg, scheme := caconn.Config{PriorKnowledge: true}, "http://"
	if err == nil && service.Name != "" {
		scheme = "https://"
		cfg.TLS = func(context.Context) (*tls.Config, error) { return id.ClientConfig(service.Name, "") }
		_, err = cfg.TLS(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("linkerdproxy: destination service: %w", err)
	}
	t := caconn.NewTransport(cfg)
	t.Proxy = nil
	context.AfterFunc(ctx, t.CloseIdleConnections)
	return &Destinations{
		ctx: ctx, log: ratelog.Patient(logger), known: map[string]*destination{},
		rpc: grpchttp.NewClient(&http.Client{Transport: t}, scheme+at.addr, maxUpdate),
	}, nil
}

// Endpoints returns the endpoints of a service, HOST:PORT, which are 10,000 at most. It waits for the first answer of the
// destination service; after that the newest one counts, also while the service cannot be reached. Endpoints that need more than
// TLS, such as another authority at a gateway, are left out: they are never ones without TLS. The caller must not change the
// slice.
//
// The error wraps [fs.ErrNotExist] if the destination service does not know the host, so that it may be looked for elsewhere. A
// service without endpoints is another error. At most 1,000 services are followed, each until nobody has asked for ten minutes.
func (d *Destinations) Endpoints(ctx context.Context, authority string) ([]Endpoint, error) {
	t, err := d.follow(authority)
	if err == nil {
		select {
		case <-t.first:
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-d.ctx.Done():
			err = context.Cause(d.ctx)
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.answered && t.none == nil {
			return t.all, nil
		}
		if err = cmp.Or(t.none, err); t.none == nil && t.failure != nil {
			err = fmt.Errorf("%w; the last attempt failed: %w", err, t.failure)
		}
	}
	return nil, fmt.Errorf("linkerdproxy: destination %.300q: %w", authority, err)
}

// follow returns the service, and begins to follow it if nobody does.
func (d *Destinations) follow(authority string) (*destination, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.known[authority]
	if t == nil {
		if len(d.known) >= maxDestinations {
			return nil, fmt.Errorf("%d services are followed, which is the limit: some end when nobody has asked for %v", maxDestinations, idleDestination)
		}
		ctx, cancel := context.WithCancel(d.ctx)
		t = &destination{first: make(chan struct{}), stop: cancel}
		t.idle = time.AfterFunc(idleDestination, func() { d.forget(authority, t) })
		d.known[authority] = t
		go d.run(ctx, authority, t)
	}
	t.idle.Reset(idleDestination)
	return t, nil
}

func (d *Destinations) forget(authority string, t *destination) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.known, authority)
	t.stop()
}

// run follows a service until ctx is done.
func (d *Destinations) run(ctx context.Context, authority string, t *destination) {
	defer t.idle.Stop()
	for failures := 1; ; failures++ {
		some, err := d.stream(ctx, authority, t)
		if ctx.Err() != nil {
			return
		}
		if some {
			failures = 1
		}
		f := renew.NewFailure(failures, err)
		e, ok := errors.AsType[*grpchttp.Error](err)
		if ok {
			f.Wish = e.RetryAfter
		}
		if ok && e.Remote && (e.Code == grpchttp.InvalidArgument || e.Code == grpchttp.FailedPrecondition) {
			f.Final = true // it is no service of the mesh
			t.answer(nil, fmt.Errorf("the destination service does not resolve it (%.300q): %w", e.Message, fs.ErrNotExist))
		} else {
			t.fail(err)
			d.log.Warn("linkerdproxy: the destination service does not answer", "destination", authority, "err", err)
		}
		if renew.Sleep(ctx, destinationBackoff.Wait(f, rand.Float64())) != nil {
			return
		}
	}
}

// stream takes updates until there are no more, and reports whether there were some. The first takes the place of what an
// earlier stream has said.
func (d *Destinations) stream(ctx context.Context, authority string, t *destination) (some bool, err error) {
	request, err := protofield.Write(func(w *protofield.Writer) { // a GetDestination
		w.Text(1, "k8s")
		w.Text(2, authority)
	})
	if err != nil {
		return false, err
	}
	s, err := d.rpc.Stream(ctx, getDestination, nil, request)
	if err != nil {
		return false, err
	}
	defer s.Close()
	for u := (update{addrs: map[netip.AddrPort]Endpoint{}}); ; {
		message, err := s.Receive()
		if err == io.EOF {
			err = errors.New("the server has ended the stream")
		}
		if err == nil {
			err = u.read(message)
		}
		if err != nil {
			return some, err
		}
		if u.known {
			some = true
			t.answer(u.endpoints())
		}
	}
}

// answer publishes what there is, or why there is none.
func (t *destination) answer(all []Endpoint, none error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all, t.none, t.failure = all, none, nil
	if !t.answered {
		t.answered = true
		close(t.first)
	}
}

func (t *destination) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failure = err
}

// update is what the messages of a stream have said.
type update struct {
	addrs  map[netip.AddrPort]Endpoint
	absent bool // there is no such service
	known  bool // the last message was one of those that there are
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

// read reads an Update.
func (u *update) read(message []byte) error {
	u.known = false
	return protofield.Read(message, func(f *protofield.Field) {
		if f.Data == nil || f.Number < 1 || f.Number > 3 {
			return
		}
		u.known, u.absent = true, f.Number == 3
		switch f.Number {
		case 1: // a WeightedAddrSet
			f.Message(func(f *protofield.Field) {
				if f.Number == 1 {
					u.add(f)
				}
			})
		case 2: // an AddrSet
			f.Message(func(f *protofield.Field) {
				if f.Number == 1 {
					delete(u.addrs, readAddr(f))
				}
			})
		case 3: // a NoEndpoints
			clear(u.addrs)
			f.Message(func(f *protofield.Field) {
				if exists := false; f.Number == 1 {
					f.Bool(&exists)
					u.absent = !exists
				}
			})
		}
	})
}

// add reads a WeightedAddr.
func (u *update) add(f *protofield.Field) {
	var e Endpoint
	var secure bool
	var override string
	first := func(to *string) func(*protofield.Field) { // of messages with one text
		return func(f *protofield.Field) {
			if f.Number == 1 {
				f.Text(to)
			}
		}
	}
	f.Message(func(f *protofield.Field) {
		switch f.Number {
		case 1:
			e.Addr = readAddr(f)
		case 5: // a TlsIdentity
			secure = true
			f.Message(func(f *protofield.Field) {
				switch f.Number {
				case 1, 3: // dns_like_identity, uri_like_identity
					f.Message(first(&e.Identity))
				case 4:
					f.Message(first(&e.ServerName))
				}
			})
		case 7:
			f.Message(first(&override))
		}
	})
	switch _, there := u.addrs[e.Addr]; {
	case !e.Addr.IsValid() || secure && e.Identity == "" || override != "":
		delete(u.addrs, e.Addr)
	case there || len(u.addrs) < maxEndpoints:
		u.addrs[e.Addr] = e
	}
}

// readAddr reads a TcpAddress. It is zero if it is none.
func readAddr(f *protofield.Field) netip.AddrPort {
	var ip netip.Addr
	var port uint32
	f.Message(func(f *protofield.Field) {
		switch f.Number {
		case 1: // an IPAddress
			f.Message(func(f *protofield.Field) {
				var v4 uint32
				var v6 [2]uint64
				switch f.Number {
				case 1:
					f.Fixed32(&v4)
					ip = netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v4)))
				case 2: // an IPv6
					f.Message(func(f *protofield.Field) {
						if f.Number == 1 || f.Number == 2 {
							f.Fixed64(&v6[f.Number-1])
						}
					})
					ip = netip.AddrFrom16([16]byte(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, v6[0]), v6[1]))).Unmap()
				}
			})
		case 2:
			f.Uint32(&port)
		}
	})
	if !ip.IsValid() || ip.IsUnspecified() || port == 0 || port > 65535 {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(ip, uint16(port))
}
