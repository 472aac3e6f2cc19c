package broker

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/protofield"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/exp/broker/internal/descriptors"
	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
	"github.com/svidkit/svidkit/spiffe/spiffetls"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// Grant is what a broker may ask for. The zero Grant permits nothing. In each list "*" permits everything.
type Grant struct {
	// References are kinds of references: see [Reference.Kind].
	References []string

	// Namespaces are the namespaces in which workloads may be, as Options.Resolve reports them. A workload without
	// a namespace needs "*".
	Namespaces []string

	// Audiences are the audiences for which the broker may have JWT-SVIDs, if the workload may have them.
	Audiences []string

	// Identities permits the IDs of workloads. The zero Policy permits none.
	Identities spiffe.Policy
}

// permits reports whether a list has a text, or "*".
func permits(list []string, text string) bool {
	return slices.Contains(list, text) || slices.Contains(list, "*")
}

// Options are the options of a [Handler]. Their functions are called from many goroutines and should not block.
type Options struct {
	// Grant returns what the broker with an ID may ask for; nil for a client that is no broker. It is required, and
	// called for each decision: after a change, call Refresh of the Workload API's handler.
	Grant func(broker spiffe.ID) *Grant

	// Resolve finds the workload that a reference names, by itself: it believes nothing that a broker says about it.
	// ctx is that of the request. It returns a context, derived from ctx, in which the hooks of the Workload API's
	// handler find the workload instead of the broker. That context ends when the workload does, with a cause that
	// wraps [io/fs.ErrNotExist], which ends the streams. namespace is where the workload is, "" if it has none.
	//
	// An error that wraps [io/fs.ErrNotExist] says that there is no such workload; one that wraps
	// workloadserver.ErrDenied, that it gets nothing; and one that wraps [io/fs.ErrInvalid], that the reference is of
	// a kind that the server does not know. After any other error the broker is told to try again.
	//
	// Nil means [unixsocket.WithProcess] for PIDs, without a namespace, and no other references. A Resolve for
	// objects passes it the PID 0, so that the workload is not taken for the broker's own process.
	Resolve func(ctx context.Context, r Reference) (workload context.Context, namespace string, err error)
}

// Handler serves the Broker API. It needs a server that proves its clients by [spiffetls.Endpoint.ConfigureServer],
// such as a unixsocket.Server whose Serve is that of an Endpoint. It is safe for concurrent use.
//
// A client whose certificate has expired is told so with Unauthenticated, on open streams too. A broker has as many
// streams at a time as the Workload API's handler permits one peer, over all its connections.
type Handler struct {
	workload http.Handler
	opts     Options
}

// NewHandler returns a handler that gets the identities of a workload from a handler of the Workload API: in the
// context that Resolve returns, its hooks say what the workload may have, as if that had called itself.
// AnyNetwork and the header of the Workload API do not matter. The log, the metrics and the limits are its own too;
// after its Close the streams end.
func NewHandler(workload *workloadserver.Handler, opts Options) (*Handler, error) {
	if workload == nil || opts.Grant == nil {
		return nil, errors.New("broker: new handler: it needs a handler of the Workload API and Options.Grant")
	}
	if opts.Resolve == nil {
		opts.Resolve = resolvePID
	}
	return &Handler{workload, opts}, nil
}

func resolvePID(ctx context.Context, r Reference) (context.Context, string, error) {
	if r.PID == 0 {
		return nil, "", fs.ErrInvalid
	}
	ctx, err := unixsocket.WithProcess(ctx, r.PID)
	return ctx, "", err
}

// ServeHTTP serves one request; a stream lasts until its workload ends.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{h: h, headers: r.Header.Values(header)}
	ctx := workloadwire.WithFront(r.Context(), c)
	if peer, ok := spiffetls.PeerFromContext(ctx); ok {
		c.broker = peer.ID()
		ctx = peerkey.NewContext(ctx, c.broker.String())
		cut, cancel := context.WithDeadlineCause(ctx, peer.NotAfter(), unauthenticated("its certificate has expired"))
		defer cancel()
		ctx = cut
	}
	r = r.Clone(ctx)
	if strings.HasPrefix(r.URL.Path, workloadwire.Service) {
		r.URL.Path = "/" // it is not the API of this handler
	}
	for theirs, ours := range methods {
		if r.URL.Path == service+ours {
			c.method, r.URL.Path = theirs, workloadwire.Service+theirs
		}
	}
	h.workload.ServeHTTP(w, r)
}

// Descriptors describes the API for server reflection.
func (c *call) Descriptors() []byte { return descriptors.BrokerAPI }

// call is one request.
type call struct {
	h         *Handler
	headers   []string
	method    string    // of the Workload API
	broker    spiffe.ID // zero for a client without a certificate
	admitted  bool
	kind      string // of the reference
	namespace string // of the workload
}

func unauthenticated(why string) *grpchttp.Error {
	return grpchttp.Errorf(grpchttp.Unauthenticated, "broker: the client is not authenticated: %s", why)
}

// Admit checks the header and the client (Broker Endpoint sections 3, 5 and 6).
func (c *call) Admit() *grpchttp.Error {
	switch {
	case len(c.headers) != 1 || c.headers[0] != "true":
		return grpchttp.Errorf(grpchttp.InvalidArgument, `broker: send the metadata "broker.spiffe.io: true", once`)
	case c.broker.IsZero():
		return unauthenticated("it has presented no X.509-SVID")
	case c.h.opts.Grant(c.broker) == nil:
		return grpchttp.Errorf(grpchttp.PermissionDenied, "broker: %q is no broker of this server", c.broker)
	}
	c.admitted = true
	return nil
}

// Workload finds the workload, and turns the request into one of the Workload API.
func (c *call) Workload(ctx context.Context, request []byte) (context.Context, []byte, *grpchttp.Error) {
	var r Reference
	var audience []string
	invalid := errors.New("there is no reference to a workload")
	inner, err := protofield.Write(func(w *protofield.Writer) {
		w.Fail(protofield.Read(request, func(f *protofield.Field) {
			switch {
			case f.Type != protowire.BytesType:
			case f.Number == 1:
				r, invalid = readReference(f)
			case f.Number <= 3 && c.method == workloadwire.FetchJWTSVID:
				if w.AddBytes(f.Number-1, f.Data); f.Number == 2 {
					audience = append(audience, string(f.Data))
				}
			}
		}))
	})
	if err != nil || invalid != nil {
		return nil, nil, c.refuse(r, errors.Join(fs.ErrInvalid, invalid, err))
	}
	g, in := c.h.opts.Grant(c.broker), r.Object.Namespace
	if c.kind = r.Kind(); g == nil || !permits(g.References, c.kind) || in != "" && !permits(g.Namespaces, in) ||
		slices.ContainsFunc(audience, func(one string) bool { return !permits(g.Audiences, one) }) {
		return nil, nil, c.refuse(r, workloadserver.ErrDenied)
	}
	if ctx, c.namespace, err = c.h.opts.Resolve(ctx, r); err != nil {
		return nil, nil, c.refuse(r, err)
	}
	return ctx, inner, nil
}

// refuse returns the answer for a reference that names no workload of the broker (Broker API section 4.8).
func (c *call) refuse(r Reference, err error) *grpchttp.Error {
	code, text := grpchttp.Unavailable, "the server cannot find workloads now; try again later"
	switch {
	case errors.Is(err, fs.ErrInvalid):
		code, text = grpchttp.InvalidArgument, strings.ReplaceAll(err.Error(), "\n", ": ")
	case errors.Is(err, fs.ErrNotExist):
		code, text = grpchttp.NotFound, "there is no such workload"
	case errors.Is(err, workloadserver.ErrDenied):
		code, text = grpchttp.PermissionDenied, "the broker may not have it"
	}
	e := grpchttp.Errorf(code, "broker: %q: %s: %s", c.broker, r, text)
	e.Err = fmt.Errorf("%s: %w", e.Message, err) // for the log
	if code == grpchttp.InvalidArgument {
		e.Reason = "WORKLOAD_REFERENCE_INVALID"
	}
	return e
}

// Permits reports whether the broker may have an identity of the workload.
func (c *call) Permits(id spiffe.ID) bool {
	g := c.h.opts.Grant(c.broker)
	return g != nil && permits(g.References, c.kind) && permits(g.Namespaces, c.namespace) &&
		g.Identities.Check(id) == nil
}

// Tell adds the reason (Broker API section 4.8).
func (c *call) Tell(e *grpchttp.Error) {
	switch {
	case !c.admitted:
	case e.Code == grpchttp.PermissionDenied:
		e.Reason = "WORKLOAD_NOT_ENTITLED"
	case e.Code == grpchttp.NotFound:
		e.Reason = "WORKLOAD_NOT_FOUND"
	}
}

// readReference reads the WorkloadReference in a field.
func readReference(f *protofield.Field) (r Reference, err error) {
	var url string
	var value []byte
	f.Message(func(f *protofield.Field) {
		if f.Number == 1 && f.Type == protowire.BytesType {
			url, value = f.Any()
		}
	})
	switch o := &r.Object; url {
	case typePID:
		err = protofield.Read(value, func(f *protofield.Field) {
			if f.Number == 1 {
				f.Int32(&r.PID)
			}
		})
	case typeObject:
		err = protofield.Read(value, func(f *protofield.Field) {
			switch f.Number {
			case 1:
				f.Message(protofield.Texts(&o.Plural, &o.Group))
			case 2:
				o.Name = cmp.Or(o.Name, "/") // which check refuses: a key has a name
				f.Message(protofield.Texts(&o.Namespace, &o.Name))
			case 3:
				f.Text(&o.UID)
			}
		})
	default:
		err = fmt.Errorf("the server knows no references of the type %.100q", url)
	}
	return r, cmp.Or(err, r.check())
}
