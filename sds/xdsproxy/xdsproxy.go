// Package xdsproxy lets an Envoy reach its control plane through the socket that its secrets come from: the Aggregated
// Discovery Service (ADS), version 3, as an [http.Handler] that forwards each stream to the control plane and answers
// for secrets itself.
//
//	secrets, err := sds.NewHandler(manager, nil)
//	client, err := caclient.NewHTTPClient(caclient.TLSOptions{RootsFile: "/etc/certs/root-cert.pem"})
//	handler, err := xdsproxy.NewHandler(xdsproxy.Config{
//		URL: "https://istiod.istio-system.svc:15012", HTTPClient: client, Token: tokens.Token, Secrets: secrets,
//	})
//	server := &unixsocket.Server{Path: "/run/identity/xds.sock", Handler: handler}
//	err = server.Run(ctx)
//
// # What it serves
//
// A [Handler] serves both methods of envoy.service.discovery.v3.AggregatedDiscoveryService: StreamAggregatedResources
// (state of the world) and DeltaAggregatedResources (incremental). Everything else, such as the methods of the Secret
// Discovery Service, is for [Config].Secrets, so that one socket has both. Any number of Envoys may be connected; each
// stream of an Envoy is one stream to the control plane, which begins with the first request that is not for secrets.
//
// Messages pass as they are, byte by byte, whatever fields and types they have: a Handler reads no more of them than
// the type URL and the node. There is one exception: an Envoy may introduce itself
// (its node) in the first message of a stream only. If that one is for the other server, the node is put in front of
// the first message to this one. Header fields and other metadata of Envoy are not forwarded.
//
// A program that probes its workload tells the control plane of it with [Handler.ReportHealth]. What the control plane
// answers to that is not for Envoy, and is dropped.
//
// Operators ask the control plane for debug information with [Handler.ServeDebug], on a port of its own, or by ADS on
// the socket of Envoy, where types such as istio.io/debug pass like all others.
//
// # Secrets
//
// Requests with the type URL of secrets go to [Config].Secrets, as a stream of StreamSecrets or DeltaSecrets in this
// process, with the context, the address and the header of Envoy's request: so the limits of a sds.Handler, its hook
// Resolve and its logs see the same caller. They never reach the control plane. A response of the control plane that
// has secrets is dropped, so that it cannot replace the identity of the workload. If the stream of
// secrets ends, which it does for a limit or in strict mode, the ADS stream ends with the same status.
//
// # When a side ends
//
// An end on either side ends both, with the status of the control plane. A Handler does not connect
// again by itself: Envoy does, after 0.5 seconds at first and 30 at most, and then says what it wants and what it has
// (initial_resource_versions in delta). A Handler could not say this for it without keeping all of it.
//
// As Envoy keeps what it has, traffic goes on without a control plane. So that its certificates go on, too, a stream
// whose control plane has gone stays open for secrets for 2 seconds, while other requests are dropped: Envoy names
// them again on the next stream, where all secrets are served first. An Envoy that is to start without a control plane
// wants its secrets by SDS and not by ADS, as in the examples of package sds.
//
// # Back-pressure
//
// An Envoy that does not read holds up the control plane, and a control plane that does not read holds up Envoy. The
// two directions do not wait for each other, and neither waits for ever, as some control planes read nothing while
// they write. Requests have a queue for each server of a stream, of 8 MiB, or one larger message; so secrets are
// served while the control plane is slow. If a queue is full, Envoy is not read from until there is room; if that
// takes 30 seconds without any progress, the stream ends with code Unavailable. Responses have no queue. If Envoy does
// not take one within a minute, the stream is reset: a client has to read while it writes, as Envoy does, because
// net/http takes no more than a MiB of requests on a stream whose response waits.
//
// # Limits
//
// A request may have 4 MiB ([Config].MaxRequest), a response 64 MiB ([Config].MaxResponse). 1,000 streams may be open
// at the same time ([Config].MaxStreams), of one peer 250 ([Config].MaxPeerStreams). Requests in
// the queues may take 256 MiB, those of one peer 64 MiB, and so may requests that are being received. What goes over a
// limit is refused with code ResourceExhausted. A peer is a user (UID) on a Unix socket on Linux, and a connection
// otherwise.
//
// # What it does not do
//
// A Handler does not authenticate its callers: the permissions of the socket do. A process that can connect speaks to
// the control plane with the credentials of [Config]. It has no DNS proxy and no generator of
// configuration of its own: types such as istio.networking.nds.v1.NameTable pass like all others, if Envoy asks for
// them, and it asks for none of them itself. It does not rewrite extension configurations that name WebAssembly modules.
//
// # What it costs
//
// With 1,000 streams open, each of which began with a request of 50 kB, a stream takes 48 KiB and 4 goroutines, where
// the least that net/http can do for it takes 45 KiB and 2; a request of 500 bytes and its response take 0.2 ms at most
// in 99 of 100 cases, where those take 0.15 ms and 0.09 ms without a proxy (BenchmarkStreams, two cores). net/http has a
// buffer of the largest frame that the control plane takes, up to 512 KiB, for each stream; that of grpc-go, which
// istiod has, is 16 KiB.
//
// # In a server of your own
//
// As for package sds: the streams need HTTP/2, and WriteTimeout and ReadTimeout of the http.Server must be zero.
package xdsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/svidkit/svidkit/internal/grpchttp"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/internal/redact"
)

const (
	service       = "/envoy.service.discovery.v3.AggregatedDiscoveryService/"
	secretService = "/envoy.service.secret.v3.SecretDiscoveryService/"
	secretType    = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"

	maxRequest  = 4 << 20
	maxResponse = 64 << 20

	maxStreams     = 1000
	maxPeerStreams = 250

	maxWaiting     = 256 << 20 // bytes of requests in queues, and as many that are being received
	maxPeerWaiting = 64 << 20
	maxQueue       = 8 << 20 // bytes of one queue; a larger message has it for itself
	besideMessage  = 64      // bytes that are kept for a message beside it
	stalled        = 30 * time.Second
	slow           = 10 * time.Second // after which a message that the control plane does not take is logged
	linger         = 2 * time.Second  // of a stream whose control plane has gone
	sendTime       = time.Minute      // in which Envoy has to take a response
	retryFull      = 10 * time.Second // after which a client that found no room is to come back
	maxToken       = 64 << 10
)

type redacted = redact.Text

// Config says where the control plane is, and what the [Handler] does itself. URL and HTTPClient are required. It is
// copied.
type Config struct {
	redacted // URL and Header may have secrets

	// URL is where the control plane is, such as https://istiod.istio-system.svc:15012, without a path.
	URL string

	// HTTPClient reaches the control plane, by HTTP/2. Its transport decides which servers are trusted and which
	// client certificate is presented, such as one of caclient.NewHTTPClient or spiffetls.Transport. Its Timeout must
	// be zero, as it would end the streams. Its transport should find out when the other side has gone, as
	// http.HTTP2Config.SendPingTimeout does.
	HTTPClient *http.Client

	// Token returns the bearer token to send, for each stream; empty means none. Its error ends the stream, unless it
	// is an fs.ErrNotExist: then the stream begins without a token, as the transport may have a certificate. The
	// method Token of a *tokensource.Source is one. Nil means no token.
	Token func(ctx context.Context) (string, error)

	// Header is metadata to send with each stream, such as ClusterID.
	Header http.Header

	// AllowPlaintext lets URL begin with http, for tests and for a proxy on the same host that adds TLS. The token is
	// readable on the connection.
	AllowPlaintext bool

	// Secrets answers requests for secrets, and all requests of other methods than those of ADS; a *sds.Handler is
	// one. Nil means that requests for secrets go to the control plane as well, and other methods are not there.
	Secrets http.Handler

	// MaxRequest and MaxResponse are the largest messages of Envoy and of the control plane, in bytes; 0 means 4 MiB
	// and 64 MiB.
	MaxRequest, MaxResponse int

	// MaxStreams is how many ADS streams may be open at the same time, and MaxPeerStreams how many of one peer; 0 means
	// 1,000 and 250. An Envoy has one.
	MaxStreams, MaxPeerStreams int

	// Logger gets warnings: streams that failed, requests that were refused, responses that were dropped. The
	// first of a kind is logged at once, and then their number each minute. Nil means silence.
	Logger *slog.Logger
}

// url returns URL without what may be secret in it.
func (c Config) url() string {
	u, err := url.Parse(c.URL)
	if err != nil {
		return "malformed URL"
	}
	return u.Scheme + "://" + u.Host
}

func (c *Config) check() error {
	u, err := url.Parse(c.URL)
	switch {
	case err != nil:
		return errors.New("URL is not a URL") // the cause repeats it, and it may have a password
	case u.Scheme == "http" && !c.AllowPlaintext:
		return errors.New("URL is without TLS; set AllowPlaintext if tokens may be read on the way")
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return errors.New("URL has to be https://host:port")
	case u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return errors.New("URL has more than a scheme, a host and a port")
	case c.HTTPClient == nil:
		return errors.New("HTTPClient is nil; caclient.NewHTTPClient makes one")
	case c.HTTPClient.Timeout != 0:
		return fmt.Errorf("HTTPClient has a Timeout of %v, which would end the streams; set it to 0", c.HTTPClient.Timeout)
	case c.MaxRequest < 0 || c.MaxResponse < 0 || c.MaxStreams < 0 || c.MaxPeerStreams < 0:
		return errors.New("a limit is negative; 0 means the default")
	}
	for name := range c.Header {
		if c.Token != nil && http.CanonicalHeaderKey(name) == "Authorization" {
			return errors.New("both Token and the authorization of Header are set")
		}
	}
	return nil
}

// Handler serves the Aggregated Discovery Service. It is safe for concurrent use, and starts no goroutine but those of
// streams.
type Handler struct {
	redacted
	cfg       Config
	client    *grpchttp.Client
	grpc      *grpchttp.Handler
	log       *ratelog.Log
	metrics   proxyMetrics
	plane     plane
	health    reports
	envoys    envoys
	open      *limit.Shares[peerkey.Holder] // streams
	waiting   *limit.Shares[peerkey.Holder] // bytes of requests
	debugging chan struct{}                 // has one while there is a debug request
	ctx       context.Context               // done when the handler is closed
	closeAll  context.CancelFunc
}

// NewHandler returns a handler that forwards streams to the control plane of cfg. It connects when the first stream
// does.
func NewHandler(cfg Config) (*Handler, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("xdsproxy: new handler: %w", err)
	}
	cfg.Header = cfg.Header.Clone()
	cfg.MaxRequest, cfg.MaxResponse = cmp.Or(cfg.MaxRequest, maxRequest), cmp.Or(cfg.MaxResponse, maxResponse)
	hc := *cfg.HTTPClient
	hc.Jar = nil
	h := &Handler{
		redacted: redact.New("xdsproxy.Handler(" + cfg.url() + ")"),

		cfg:     cfg,
		client:  grpchttp.NewClient(&hc, cfg.url(), cfg.MaxResponse),
		log:     ratelog.New(cfg.Logger, 0),
		open:    limit.NewShares[peerkey.Holder](cmp.Or(cfg.MaxStreams, maxStreams), cmp.Or(cfg.MaxPeerStreams, maxPeerStreams)),
		waiting: limit.NewShares[peerkey.Holder](maxWaiting, maxPeerWaiting),

		debugging: make(chan struct{}, 1),
	}
	h.ctx, h.closeAll = context.WithCancel(context.Background())
	h.grpc = &grpchttp.Handler{
		Methods: map[string]grpchttp.Method{
			service + "StreamAggregatedResources": h.serveStream(false),
			service + "DeltaAggregatedResources":  h.serveStream(true),
		},
		Name: "xdsproxy", MaxMessage: cfg.MaxRequest, SendTimeout: sendTime,
		Incoming: grpchttp.NewIncoming("xdsproxy", maxWaiting, maxPeerWaiting),
	}
	h.metrics.init(h)
	return h, nil
}

// ServeHTTP serves one request: a stream for as long as it lasts. Other forms of RPC than gRPC are answered with 415,
// and requests of other methods by [Config].Secrets.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h.cfg.Secrets != nil && h.grpc.Methods[r.URL.Path] == nil {
		h.cfg.Secrets.ServeHTTP(w, r)
		return
	}
	h.grpc.ServeHTTP(w, r)
}

// Close ends all ADS streams with code Unavailable. It does not wait for them: they belong to the http.Server. Later
// ones are refused. It closes neither [Config].Secrets nor the connections of the HTTPClient. Close may be called
// twice. It returns nil.
func (h *Handler) Close() error {
	h.closeAll()
	return nil
}
