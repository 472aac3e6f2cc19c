// Package sds serves workload identities to Envoy: the Secret Discovery Service, version 3, as an [http.Handler].
// Envoy takes its certificate, key and trusted roots from it and gets each new version pushed, without restart or
// file.
//
// Most programs need two calls. The source is a *secretcache.Manager or a *workloadapi.Source:
//
//	handler, err := sds.NewHandler(manager, nil)
//	server := &unixsocket.Server{Path: "/run/identity/sds.sock", Handler: handler}
//	err = server.Run(ctx)
//
// Programs that are not Envoy can take secrets from such a socket with [NewClient].
//
// # What it serves
//
// A [Handler] serves all three methods of envoy.service.secret.v3.SecretDiscoveryService: StreamSecrets (state of the
// world), DeltaSecrets (incremental) and FetchSecrets, over gRPC. The [Source] decides which names exist.
//
// It also serves secrets by the Aggregated Discovery Service (ADS): an Envoy whose ads_config points here takes all
// its secrets on one stream instead of one stream each. A request for another type ends that stream. For Envoys that
// also have a control plane, see package sds/xdsproxy.
//
// A [pki.Secret] of each kind becomes the matching Envoy Secret, with its content inline: tls_certificate with a
// private_key or a private_key_provider; validation_context with trusted_ca and crl, or with the bundles of several
// trust domains for Envoy's SPIFFE validator (envoy.tls.cert_validator.spiffe); session_ticket_keys; generic_secret.
// With the SPIFFE validator, Envoy 1.40 refuses a peer that sends no certificate, and a peer whose ID has no path.
//
// # What it promises
//
//   - A certificate and its key travel in one secret. A version is a hash of the content: the same on all streams and,
//     except for passwords and other content that can be guessed, after a restart.
//   - Each name is served on its own. A name that does not exist yet, is not permitted yet, or could not be looked up
//     leaves the stream open, and is pushed once it can be served.
//   - A failed look-up withdraws nothing that is being served. A certificate that has expired goes to a new stream
//     only if the source still returns it.
//   - A slow client delays no other and costs one response. When it reads again it gets the newest content, not the
//     history.
//   - While a response is unanswered the next one waits, and then carries the newest of everything that changed.
//     Content that a client rejected (a NACK) is not sent to it again on that stream; new content is. A name list
//     that becomes empty means "nothing", never "everything".
//   - A changed secret is encoded once for all streams, and no nonce comes twice on a stream.
//
// # A certificate for each connection
//
// Since version 1.38 an Envoy listener can ask for a secret when a client connects, by the server name (SNI) that the
// client sends, so one Envoy serves any number of workloads. [Options].Resolve maps the server name to the source's
// name, such as a SPIFFE ID. Use delta: a name that does not exist or is withdrawn then fails at once and alone, and
// a withdrawn secret is no longer shown. See the example of Options, and examples/ENVOY.md for Envoy's configuration
// and figures.
//
// # What it does not do
//
// A Handler does not authenticate its callers: the permissions of the socket do, or the TLS of the http.Server.
// [Options].Resolve decides by caller and name. The node that a client sends about itself is used in logs only. A
// Handler does not check certificates, which is the source's job, and serves no other discovery service.
//
// It leaves out three fields of Envoy's Secret: OCSP responses, which expire sooner than certificates and which Envoy
// does without; passwords of keys, which would travel beside the keys that they protect; and names that peers must
// have, which Envoy would accept in addition to those in its configuration. An Envoy's node does not choose the form
// or the name of its secrets: [Options].Resolve and the source do.
//
// # In a server of your own
//
// The streams need HTTP/2. Envoy opens one long-lived request per secret, and net/http allows 250 on a connection:
// see the example of [NewHandler]. WriteTimeout and ReadTimeout of the http.Server must be zero, as they would end
// the streams. On a Unix socket set its ConnContext to unixsocket.ConnContext, so that peers are known.
//
// # Limits
//
//   - A request may have 1 MiB, a name 4 KiB, and a stream 1,000 names ([Options].MaxNames) of 256 KiB
//     together, or of 256 bytes each on average with a larger MaxNames.
//   - 20,000 streams and fetches may be open ([Options].MaxStreams), 5,000 of one peer ([Options].MaxPeerStreams).
//   - The names that clients ask for may take 128 MiB, a single peer's 32 MiB, or 2 KiB for each of its streams
//     if that is more. A name takes its length and 1 KiB, whether it exists and is permitted or not.
//   - A client has a minute to take a response; then the stream ends.
//   - Requests that are being received may take 64 MiB, a single peer's 16 MiB. The first 4 KiB of each do not
//     count.
//
// A larger request is refused before it is stored, and its stream ends; only a name too many on a delta stream fails
// alone (see [Options].MaxNames). A client that exceeds a limit gets code ResourceExhausted and the advice to come
// back after 10 seconds. Compressed requests are refused. A peer is a user (UID) on a Unix socket on Linux, and a
// connection otherwise.
package sds

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/report"
)

// Limits on what a client may send.
const (
	maxMessage  = 1 << 20 // bytes of one gRPC message
	maxName     = 4 << 10 // bytes of a resource name
	maxNames    = 1000    // names of one stream, by default
	maxText     = 1 << 10 // bytes of a text kept for logs and status
	maxResponse = 1 << 20 // bytes after which a response with several secrets is split
)

const (
	service    = "/envoy.service.secret.v3.SecretDiscoveryService/"
	aggregated = "/envoy.service.discovery.v3.AggregatedDiscoveryService/" // one stream for all secrets of an Envoy
	typeURL    = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

	securityHeader = "workload.spiffe.io"
)

// Source provides the secrets: a *secretcache.Manager, a *workloadapi.Source, or a source of package sdssource, which
// reads files or combines other sources. Its methods are called from many goroutines.
type Source interface {
	// GenerateSecret returns the current secret with that name. It may block, for instance for a CA, until ctx is
	// done; ctx carries no request values, because one call serves all waiting streams.
	//
	// An error that wraps [io/fs.ErrNotExist] means that there is no such name; the Handler asks for it again only
	// after it has been passed to Subscribe's function. After any other error the Handler calls again: after 0.5 s at
	// first, then after at most 5 s, or, while it has a secret to serve, after 4 % of the secret's remaining life and
	// at most 30 s. An error can ask for 30 s, or half of that life: see [spiffe.ErrNotReady].
	GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error)

	// Subscribe registers f to be called with each name for which GenerateSecret would answer differently: its secret
	// is new, has appeared or is gone. f must return at once. cancel ends the subscription.
	Subscribe(f func(resourceName string)) (cancel func())
}

// Options configures a [Handler]. The zero value suits Envoy.
type Options struct {
	// Resolve decides whether the caller of a request may have a name, and which secret it gets under that name: it
	// returns the name to ask the Source for. So each caller can have a "default" of its own. The caller receives the
	// secret under the name that it asked for. Streams whose names resolve to the same source name share one look-up
	// and one encoding. Nil lets every caller have every name: access to the socket is the only check.
	//
	// Any error means no: for that caller the name does not exist. Resolve should not block.
	//
	// It is called when a stream asks for the name, when a version of the secret is about to be sent, and, for each
	// stream that has the name or was refused it, when its secret changes and after [Handler.Refresh]. For a refused
	// stream, the secret is the one that the Source has under the requested name. So a later permission, or another
	// secret, reaches a waiting stream within a second. A stream that loses the right to a name gets no more updates
	// and keeps the secret that it has. A delta stream is told that the name is removed, but Envoy uses the secret
	// until it restarts, unless it asked for it on demand. SotW cannot say so. The certificate stays valid until it
	// expires.
	//
	// Its context is the request's: unixsocket.PeerFromContext finds the process on the other side of a Unix socket,
	// and spiffetls.PeerFromContext the authenticated client of a server that spiffetls.Endpoint.ConfigureServer
	// prepared. For the rest of a request, such as its TLS and RemoteAddr, wrap the Handler in one that adds it with
	// http.Request.WithContext; see the examples.
	Resolve func(ctx context.Context, resourceName string) (sourceName string, err error)

	// RequireHeader refuses requests without the header "workload.spiffe.io: true", which a client that was tricked
	// into making a request does not send. Envoy sends it if its gRPC service has it in initial_metadata.
	RequireHeader bool

	// MaxNames is how many names one stream may ask for; 0 means 1,000. Raise it where an Envoy takes all its secrets
	// on one stream. A delta stream with too many names is told that the excess names do not exist, and may ask again
	// when there is room; at twice as many it ends with code ResourceExhausted. A SotW stream ends at the first excess
	// name.
	MaxNames int

	// MaxStreams is how many streams may be open at the same time; 0 means 20,000. An Envoy opens one for each secret,
	// or one of ADS for all. Fetches under way count as well. More are refused with ResourceExhausted.
	MaxStreams int

	// MaxPeerStreams is how many of them one peer may have: a user (UID) on a Unix socket, a connection otherwise. 0
	// means 5,000: 20 Envoys with 250 secrets each. Raise it where the Envoys of a large node run as one user.
	MaxPeerStreams int

	// Logger gets warnings: rejected responses, refused or missing names, failed look-ups and refused requests. Since
	// clients can cause them at will, only the first of each kind is logged at once, for each of the first 12 clients;
	// then their number is logged each minute. Lines about callers have uid and pid, or remote. Nil: no logs.
	Logger *slog.Logger
}

// Handler serves the Secret Discovery Service. It is safe for concurrent use. Until Close it is subscribed to the
// source and has one goroutine, in addition to the goroutines of the requests.
type Handler struct {
	opts        Options
	table       *table
	unsubscribe func()
	grpc        *grpchttp.Handler

	open  *limit.Shares[peerkey.Holder] // streams, and fetches that are under way
	names *limit.Shares[peerkey.Holder] // bytes
	nacks atomic.Uint64

	counts counts

	mu         sync.Mutex    // guards the rest
	pushes     []report.Push // the newest last
	rejections []report.Push
}

// NewHandler returns a handler that serves the secrets of src. It subscribes to src until [Handler.Close], and asks
// src for a secret only when a client does. opts may be nil, and is copied.
func NewHandler(src Source, opts *Options) (*Handler, error) {
	if src == nil {
		return nil, errors.New("sds: new handler: the source is nil")
	}
	h := new(Handler)
	if opts != nil {
		h.opts = *opts
	}
	if h.opts.MaxNames < 0 || h.opts.MaxStreams < 0 || h.opts.MaxPeerStreams < 0 {
		return nil, errors.New("sds: new handler: a limit is negative; 0 means the default")
	}
	h.opts.MaxNames = cmp.Or(h.opts.MaxNames, maxNames)
	h.opts.Logger = ratelog.Patient(h.opts.Logger)
	total, each := cmp.Or(h.opts.MaxStreams, maxStreams), cmp.Or(h.opts.MaxPeerStreams, maxPeerStreams)
	h.open = limit.NewShares[peerkey.Holder](total, each)
	h.names = limit.NewShares[peerkey.Holder](max(maxNamesBytes, bytesOf(total)), max(maxPeerBytes, bytesOf(each)))

	h.counts.init(h)
	h.table = newTable(src, h.opts.Logger)
	h.grpc = &grpchttp.Handler{
		Methods: map[string]grpchttp.Method{
			service + "StreamSecrets":                h.serveStream(false),
			service + "DeltaSecrets":                 h.serveStream(true),
			service + "FetchSecrets":                 h.serveFetch,
			aggregated + "StreamAggregatedResources": h.serveStream(false),
			aggregated + "DeltaAggregatedResources":  h.serveStream(true),
		},
		Name: "sds", Admit: h.admit, MaxMessage: maxMessage, SendTimeout: sendTime,
		Incoming: grpchttp.NewIncoming("sds", maxIncoming, maxPeerIncoming),
	}
	h.unsubscribe = sync.OnceFunc(src.Subscribe(h.table.changed))
	return h, nil
}

// ServeHTTP serves one request; for a stream it returns when the stream ends. Paths of other services are answered
// with 404, and RPCs in other forms than gRPC with 415.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h.grpc.Methods[r.URL.Path] == nil {
		http.NotFound(w, r)
		return
	}
	h.grpc.ServeHTTP(w, r)
}

// admit decides whether to serve a request, before anything of it is read.
func (h *Handler) admit(r *http.Request) error {
	if h.opts.RequireHeader && r.Header.Get(securityHeader) != "true" {
		err := grpchttp.Errorf(grpchttp.InvalidArgument,
			`sds: the header "workload.spiffe.io: true" is missing; send it as metadata`)
		h.badRequest(r.Context(), peerkey.HolderOf(r), err)
		return err
	}
	if h.table.ctx.Err() != nil {
		return errClosing()
	}
	return nil
}

func errClosing() error {
	return grpchttp.Errorf(grpchttp.Unavailable, "sds: the server is shutting down")
}

// Close ends all streams with code Unavailable, cancels the subscription to the source and waits for look-ups under
// way. It does not wait for the streams: those belong to the http.Server, and a stream whose client does not read
// ends with its connection. Later requests are refused. Close may be called more than once. It returns nil.
func (h *Handler) Close() error {
	h.unsubscribe()
	h.table.close()
	return nil
}

// Refresh calls [Options].Resolve again for each name of each stream. Call it when the hook would answer differently
// although no secret has changed, for instance after a workload was registered or removed. It returns at once, and
// the answers take effect within a second.
func (h *Handler) Refresh() {
	if h.opts.Resolve != nil {
		h.table.refresh()
	}
}
