// Package sds serves workload identities to Envoy: the Secret Discovery Service, version 3, as an
// [http.Handler]. Envoy takes its certificate, key and trusted roots from it and gets each new
// version pushed, with no restart and no file.
//
// Most programs need two calls, with a manager of package secretcache, or a source of package workloadapi, as the
// source:
//
//	handler, err := sds.NewHandler(manager, nil)
//	server := &unixsocket.Server{Path: "/run/identity/sds.sock", Handler: handler}
//	err = server.Run(ctx)
//
// Programs that are not Envoy can take secrets from such a socket with [NewClient].
//
// # What it serves
//
// A [Handler] serves all three methods of envoy.service.secret.v3.SecretDiscoveryService: StreamSecrets
// (state of the world), DeltaSecrets (incremental) and FetchSecrets, the last both in gRPC and as
// POST /v3/discovery:secrets with JSON. The [Source] decides which names exist. Each name is served on
// its own: a name that is unknown or late does not delay the others.
//
// A [pki.Secret] of each kind becomes the Secret that Envoy has for it, with its content inline: tls_certificate with a
// private_key or a private_key_provider; validation_context with trusted_ca and crl, or with the bundles of several trust
// domains for Envoy's SPIFFE validator (envoy.tls.cert_validator.spiffe); session_ticket_keys; and generic_secret. One
// with a private_key_provider is not served in JSON. With the SPIFFE validator Envoy 1.40 refuses a peer without a
// certificate, or whose ID has no path.
//
// # What it promises
//
// A certificate and its key travel in one secret. A version is a hash of the content: the same on
// all streams, for all proxies, and, but for what can be guessed, such as passwords, after a restart. A change is encoded once, however many streams it
// goes to; streams that receive the same bytes receive the same nonce, and no nonce comes twice on a
// stream.
//
// A name that does not exist (yet), one that the caller may not have (yet), and one whose look-up fails
// leave the stream open: what exists and is permitted is served, and the rest is pushed when it appears or is
// permitted. What is being served is never withdrawn because
// a look-up failed, but a certificate that has expired goes to a new stream only if the source still
// returns it. Streams are independent: a client that reads slowly, or not at all, delays no other and
// costs one response; when it reads again it gets the newest content, not the history.
//
// While a response is not answered by the client the next one waits, and then carries the newest of
// everything that changed. Content that a client rejected (a NACK) is not sent to it again on that
// stream; new content is. A name list that becomes empty means "nothing", never "everything".
//
// # What it does not do
//
// A Handler does not authenticate its callers: the permissions of the socket do, or the TLS of the
// http.Server. [Options].Resolve decides by caller and name. What a client says about itself (its node) is used in
// logs only, and may be missing. A Handler does not check certificates, which is the source's job. It
// serves none of Envoy's other discovery services.
//
// # In a server of your own
//
// The streams need HTTP/2, and each secret of each Envoy is one long-lived request, while net/http
// allows 250 on a connection: see the example of [NewHandler]. WriteTimeout and ReadTimeout of the
// http.Server must be zero, as they would end the streams. On a Unix socket set its ConnContext to
// unixsocket.ConnContext, so that peers are known.
//
// # Limits
//
// A request may have 1 MiB (256 KiB in JSON), a name 4 KiB, a stream 1,000 names ([Options].MaxNames) of
// 256 KiB together, or of 256 bytes each on average where MaxNames is more than 1,024;
// what is larger is refused before it is kept, and ends the stream. Compressed requests are refused.
//
// 20,000 streams may be open at the same time ([Options].MaxStreams), of one peer 5,000
// ([Options].MaxPeerStreams). The names that all clients ask for may take 128 MiB, those of one peer 32 MiB,
// or 2 KiB for each of the streams where that is more; a name counts with its length and 1 KiB for what is
// kept beside it. Names count whether they exist or
// not, are permitted or not, and whether they are the same or not; what [Options].Resolve returns for them
// does not count. Requests that are being received may take
// 256 MiB, those of one peer 64 MiB, beyond the first 4 KiB of each. A fetch counts like a stream, until it
// is answered. What goes over these limits is refused with code ResourceExhausted (429 in REST) and the
// advice to come back after 10 seconds. A peer is a user (UID) on a Unix socket on Linux, and a connection
// otherwise, so that no user takes the room of the others.
package sds

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/pki"
)

// Limits on what a client may send.
const (
	maxMessage  = 1 << 20   // bytes of one gRPC message
	maxJSON     = 256 << 10 // bytes of a REST request; its parser needs more memory than the input
	maxName     = 4 << 10   // bytes of a resource name
	maxNames    = 1000      // names of one stream, by default
	maxText     = 1 << 10   // bytes that are kept of a text for logs and status
	maxResponse = 1 << 20   // bytes after which a response with several secrets is split
)

const (
	service = "/envoy.service.secret.v3.SecretDiscoveryService/"
	restURL = "/v3/discovery:secrets"
	typeURL = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

	securityHeader = "workload.spiffe.io"
)

// Source provides the secrets; a *secretcache.Manager is one, and so is a *workloadapi.Source. Package sdssource makes
// others, of files and of any source, and puts several together. Its methods are called from many goroutines.
type Source interface {
	// GenerateSecret returns the secret with that name as it is now. It may block, for instance
	// for a CA, until ctx is done; ctx carries no values of a request, as one call serves all
	// streams that wait. An error that wraps [io/fs.ErrNotExist] says that there is no such name,
	// and the name is not asked for again until Subscribe's function is called with it. After any
	// other error the call is repeated, after 0.5 s first and then 5 s at most, or, while there is a secret to
	// serve, 4 % of the life that it has left and 30 s at most. An error with a method
	// Retryable() (after time.Duration, ok bool) can ask for 30 s, or half of that life.
	GenerateSecret(ctx context.Context, resourceName string) (*pki.Secret, error)

	// Subscribe registers f, to be called whenever GenerateSecret would answer differently for a
	// name: it has a new secret, or appeared, or is gone. f returns at once. cancel ends that.
	Subscribe(f func(resourceName string)) (cancel func())
}

// Options are the choices of a [Handler]. The zero value is what Envoy wants.
type Options struct {
	// Resolve decides whether the caller of a request may have a name, and which secret it gets under that
	// name: it returns the name that the Source is asked for, which may be another. So each caller can have
	// a "default" of its own. The caller receives the secret under the name that it has asked for. All
	// streams for which a name resolves to the same share one look-up and one encoding. It is asked about the
	// names of Wildcard, too. Nil means that the Source is asked for the same name, for all: the socket is the
	// guard.
	//
	// Any error means no. To that caller the name then is like one that does not exist, and it is not looked
	// up for it. Resolve should not block.
	//
	// It is called when a stream asks for the name, when a version of it is about to be sent, and, for
	// each stream that has it or was refused it, when its secret changes and after [Handler.Refresh]. For a
	// stream that was refused, its secret is the one that the Source has under the name that was asked for.
	// So a permission that comes later, or another secret, reaches a stream that waits within a second. A
	// stream that loses the right to a name gets nothing more of it, but what it has it keeps: a delta stream is told that the
	// name is removed, which Envoy acknowledges, using the secret that it has until it restarts; in SotW
	// there is no way to say so. A certificate that a client has kept is good until it ends.
	//
	// It is called with the context of the request. In it, unixsocket.PeerFromContext finds the process on
	// the other side of a Unix socket, and spiffetls.PeerFromContext the proven client of a server
	// that spiffetls.ConfigureServer has prepared. The rest of a request, such as its TLS and RemoteAddr,
	// is there if a handler in front puts it there with http.Request.WithContext; see the examples.
	Resolve func(ctx context.Context, resourceName string) (sourceName string, err error)

	// Wildcard lists the names that a client receives when it asks for everything: when it has never
	// named anything, or names "*". Empty means that it receives nothing.
	Wildcard []string

	// Strict ends a stream with code NotFound when it asks for a name that does not exist, or that it may
	// not have, or no longer, for clients that should fail instead of waiting.
	//
	// It is not for Envoy, which opens the stream again, after waits of 0.5 s at first and 30 s at most. A
	// secret that appears later then arrives after seconds instead of milliseconds (3 and 19 s were seen
	// with Envoy 1.40, ten seconds after its start), and an Envoy with delta, which without Strict is live at
	// once, is so after its initial_fetch_timeout.
	Strict bool

	// RequireHeader refuses requests without the header "workload.spiffe.io: true", which a
	// client that was tricked into making a request does not send. Envoy sends it when
	// initial_metadata of its gRPC service says so.
	RequireHeader bool

	// MaxNames is how many names one stream may ask for; 0 means 1,000.
	MaxNames int

	// MaxStreams is how many streams may be open at the same time, in total; 0 means 20,000. An Envoy
	// opens one for each secret. One more is refused with code ResourceExhausted. Fetches that are under
	// way count as well.
	MaxStreams int

	// MaxPeerStreams is how many of them one peer may have, so that no peer takes them all: a user (UID) on
	// a Unix socket, and a connection otherwise; 0 means 5,000, as 20 Envoys of one user with 250 secrets
	// each have. Raise it where the Envoys of a large node run as one user.
	MaxPeerStreams int

	// Logger gets warnings: rejected responses, names that were refused or do not exist, look-ups that
	// failed, and requests that were refused. As clients can cause them at will, the first of a kind is
	// logged at once, and then their number each minute. Lines about callers have uid and pid, or remote.
	// Nil means silence.
	Logger *slog.Logger
}

// Handler serves the Secret Discovery Service. It is safe for concurrent use, and keeps an idle
// stream with the one goroutine of its request. It has a goroutine of its own, and is subscribed to the
// source, until Close.
type Handler struct {
	opts        Options
	table       *table
	frames      *frames
	unsubscribe func()
	grpc        *grpchttp.Handler
	log         *ratelog.Log

	open     *limit.Shares[peerkey.Holder] // streams, and fetches that are under way
	names    *limit.Shares[peerkey.Holder] // bytes
	incoming *grpchttp.Incoming
	streams  atomic.Int64

	counts counts

	mu     sync.Mutex
	nacks  uint64
	last   *nack
	pushes pushes
}

// NewHandler returns a handler that serves the secrets of src. It subscribes to src until
// [Handler.Close], and asks it for nothing before a client does. opts may be nil, and is copied.
func NewHandler(src Source, opts *Options) (*Handler, error) {
	if src == nil {
		return nil, errors.New("sds: new handler: the source is nil")
	}
	h := &Handler{frames: newFrames()}
	if opts != nil {
		h.opts = *opts
	}
	if h.opts.MaxNames < 0 || h.opts.MaxStreams < 0 || h.opts.MaxPeerStreams < 0 {
		return nil, errors.New("sds: new handler: a limit is negative; 0 means the default")
	}
	if slices.Contains(h.opts.Wildcard, "") || slices.Contains(h.opts.Wildcard, "*") {
		return nil, errors.New(`sds: new handler: Wildcard lists "" or "*"; it wants the names that these stand for`)
	}
	if slices.ContainsFunc(h.opts.Wildcard, func(name string) bool { return !utf8.ValidString(name) }) {
		return nil, errors.New("sds: new handler: Wildcard lists a name that is not UTF-8")
	}
	h.opts.Wildcard = slices.Clone(h.opts.Wildcard)
	h.opts.MaxNames = cmp.Or(h.opts.MaxNames, maxNames)
	h.opts.Logger = cmp.Or(h.opts.Logger, slog.New(slog.DiscardHandler))
	total, each := cmp.Or(h.opts.MaxStreams, maxStreams), cmp.Or(h.opts.MaxPeerStreams, maxPeerStreams)
	h.open = limit.NewShares[peerkey.Holder](total, each)
	h.names = limit.NewShares[peerkey.Holder](max(maxNamesBytes, bytesOf(total)), max(maxPeerBytes, bytesOf(each)))
	h.incoming = grpchttp.NewIncoming("sds", maxIncoming, maxPeerIncoming)

	h.counts.init(h)
	h.table = newTable(src, h.opts.Logger)
	h.log = h.table.sums
	h.grpc = &grpchttp.Handler{
		Methods: map[string]grpchttp.Method{
			service + "StreamSecrets": h.serveStream(false),
			service + "DeltaSecrets":  h.serveStream(true),
			service + "FetchSecrets":  h.serveFetch,
		},
		Name: "sds", Admit: h.admit, MaxMessage: maxMessage, Incoming: h.incoming,
	}
	h.unsubscribe = sync.OnceFunc(src.Subscribe(h.table.changed))
	return h, nil
}

// ServeHTTP serves one request: a stream for as long as it lasts. Paths that are not of this
// service are answered with 404, other forms of RPC than gRPC with 415.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path == restURL:
		h.serveREST(w, r)
	case h.grpc.Methods[r.URL.Path] == nil:
		http.NotFound(w, r)
	default:
		h.grpc.ServeHTTP(w, r)
	}
}

// admit runs before anything of a request is read.
func (h *Handler) admit(r *http.Request) error {
	if h.opts.RequireHeader && r.Header.Get(securityHeader) != "true" {
		err := grpchttp.Errorf(grpchttp.InvalidArgument, `sds: the header "workload.spiffe.io: true" is missing; send it as metadata`)
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

// Close ends all streams with code Unavailable, cancels the subscription to the source and waits for
// look-ups that are under way. It does not wait for the streams: those belong to the http.Server, and
// a stream whose client does not read ends with its connection. Later requests are refused. Close may
// be called twice. It returns nil.
func (h *Handler) Close() error {
	h.unsubscribe()
	h.table.close()
	return nil
}

// Refresh has [Options].Resolve asked again about each name of each stream. Call it when the hook would
// answer differently although no secret has changed, for instance after a workload was registered or
// removed. It returns at once, and what the hook then says takes effect within a second, as described there.
func (h *Handler) Refresh() {
	if h.opts.Resolve != nil {
		h.table.refresh()
	}
}

func (h *Handler) nacked(ctx context.Context, p peerkey.Holder, n *nack) {
	h.mu.Lock()
	h.nacks++
	h.last = n
	h.pushes.rejected(n)
	h.mu.Unlock()
	h.log.Warn("sds: client rejected a response", "NACK", append(attrs(ctx, p), slog.String("node", n.Node),
		slog.Any("names", n.Names), slog.String("version", n.Version), slog.String("message", n.Message))...)
}
