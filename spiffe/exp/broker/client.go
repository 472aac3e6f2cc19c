package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/spiffe/internal/process"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// unauthorized is how long a client waits after PermissionDenied for the broker itself: the policies of servers are
// static, and the standards disagree about whether to try again.
const unauthorized = 2 * time.Minute

// Client is a client of a Broker API, with one connection for all workloads. It is safe for concurrent use.
type Client struct {
	at       workloadwire.Address
	endpoint *spiffetls.Endpoint
	open     conns.Dialed
	dial     func(ctx context.Context, network, address string) (net.Conn, error)
	http     atomic.Pointer[http.Transport]
}

// NewClient returns a client for the server at address, which is unix:///PATH or tcp://HOST:PORT, where HOST is an IP
// address or a DNS name. A program takes it from its configuration, or else from [SocketEnv]. The endpoint has the
// broker's own identity, and allows the ID of the server. NewClient does not connect.
func NewClient(address string, endpoint *spiffetls.Endpoint) (*Client, error) {
	at, err := parseAddress(address)
	if err != nil {
		return nil, err
	}
	c := &Client{at: at, endpoint: endpoint}
	c.dial = c.open.Dial((&net.Dialer{Timeout: 30 * time.Second}).DialContext)
	if err := c.renew(nil); err != nil {
		return nil, fmt.Errorf("broker: new client: %w", err)
	}
	return c, nil
}

func parseAddress(s string) (workloadwire.Address, error) {
	return workloadwire.ParseAddress("broker", s, SocketEnv, hostForm.MatchString)
}

// renew replaces a transport, whose connection has proved an identity that the server does not accept any more.
func (c *Client) renew(old *http.Transport) error {
	t, err := c.endpoint.Transport()
	if err != nil {
		return err
	}
	t.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
		return c.dial(ctx, c.at.Network, c.at.Target)
	}
	t.MaxConnsPerHost = 1 // to dial: one that is full is followed by another
	t.HTTP2 = &http.HTTP2Config{SendPingTimeout: 6 * time.Minute, WriteByteTimeout: 30 * time.Second}
	if c.http.CompareAndSwap(old, t) && old != nil {
		old.CloseIdleConnections()
	}
	return nil
}

// For returns a client of the Workload API that calls the server for one workload, for a workloadapi.Source and for
// calls for JWT-SVIDs. Its errors wrap [ErrEnded] once the workload has ended; the workload may not be there yet, and
// then a Source waits for it. WIT-SVIDs and the validation of tokens are not in the Broker API: those calls fail with
// an error that wraps [errors.ErrUnsupported].
//
// A PID is that of the process that has it now: For fails with an error that wraps [io/fs.ErrNotExist] if there is
// none, and with another one if the server is not on a Unix socket. Elsewhere than on Linux the caller must make sure
// that the process still runs.
//
// A denial of the broker, and not of the workload, makes a Source wait for two minutes before it tries again.
func (c *Client) For(r Reference) (*workloadapi.Client, error) {
	err := r.check()
	var of process.Started
	switch {
	case err != nil:
	case r.PID > 0 && c.at.Network != "unix":
		err = errors.New("a PID is sent to Unix sockets only, because it means nothing on another machine")
	case r.PID > 0 && runtime.GOOS == "linux":
		if of = process.Find(r.PID); of.Ended() {
			err = fs.ErrNotExist
		}
	}
	if err != nil {
		return nil, fmt.Errorf("broker: %s: %w", r, err)
	}
	return workloadapi.NewClient("", &http.Client{Transport: &workload{c: c, r: r, process: of}})
}

// Close ends all connections, and with them the streams of all workloads. Their Sources keep what they have, and do
// not connect again. The error is always nil.
func (c *Client) Close() error {
	c.open.End(lifecycle.ErrClosed)
	return nil
}

// workload is the [workloadwire.API] of a server for one workload.
type workload struct {
	c       *Client
	r       Reference
	process process.Started                // of a PID, on Linux
	used    atomic.Pointer[http.Transport] // for the last request
}

func (w *workload) String() string { return fmt.Sprintf("%s (%s)", w.c.at, w.r) }

func (w *workload) RoundTrip(r *http.Request) (*http.Response, error) {
	t := w.c.http.Load()
	w.used.Store(t)
	return t.RoundTrip(r)
}

// Request adds the reference. The other fields of a request have the numbers of the Workload API plus one.
func (w *workload) Request(name string, message []byte) (string, http.Header, []byte, error) {
	method, known := methods[name]
	if !known {
		return "", nil, nil, &grpchttp.Error{Code: grpchttp.Unimplemented, Remote: true,
			Message: "the Broker API has no such method"}
	}
	if w.process.PID > 0 && w.process.Ended() {
		return "", nil, nil, &grpchttp.Error{Code: grpchttp.NotFound, Remote: true, Message: "the process has ended"}
	}
	request, err := protofield.Write(func(out *protofield.Writer) {
		w.r.write(out)
		out.Fail(protofield.Read(message, func(f *protofield.Field) {
			if f.Type == protowire.BytesType {
				out.AddBytes(f.Number+1, f.Data)
			}
		}))
	})
	h := make(http.Header)
	h.Set(header, "true")
	return "https://broker" + service + method, h, request, err
}

// Failed reads a status by the tables of the standard (Broker Endpoint section 6, Broker API section 4.8).
func (w *workload) Failed(status *grpchttp.Error) error {
	switch code := status.Code; {
	case code == grpchttp.NotFound:
		return ErrEnded
	case code == grpchttp.PermissionDenied && status.Reason == "": // of the broker
		status.RetryAfter = cmp.Or(status.RetryAfter, unauthorized)
	case code == grpchttp.Unauthenticated:
		_ = w.c.renew(w.used.Load()) // it succeeded before
	}
	return nil
}

// write adds a WorkloadReference as the first field of a request.
func (r Reference) write(w *protofield.Writer) {
	w.Message(1, func(w *protofield.Writer) {
		if r.PID != 0 {
			w.Any(1, typePID, func(w *protofield.Writer) { w.Varint(1, uint64(r.PID)) })
			return
		}
		o := r.Object
		w.Any(1, typeObject, func(w *protofield.Writer) {
			w.Message(1, func(w *protofield.Writer) { w.Texts(o.Plural, o.Group) })
			if o.Name != "" {
				w.Message(2, func(w *protofield.Writer) { w.Texts(o.Namespace, o.Name) })
			}
			w.Text(3, o.UID)
		})
	})
}
