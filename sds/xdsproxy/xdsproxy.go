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
// (state of the world) and DeltaAggregatedResources (incremental). Other methods, such as the Secret Discovery
// Service, go to [Config].Secrets, so that one socket serves both. Each stream of an Envoy is one stream to the
// control plane, which begins with the first request that is not for secrets.
//
// Messages pass byte by byte, whatever fields and types they have: a Handler reads only their type URL and node. An
// Envoy may send its node only in the first message of a stream. If that message goes to one of the two servers, the
// Handler puts the node in front of the first message to the other. Metadata of Envoy is not forwarded.
//
// [Handler.ServeDebug] serves debug information from the control plane to operators, on a separate port.
//
// # Secrets
//
// Requests for secrets go to [Config].Secrets, as a stream of StreamSecrets or DeltaSecrets in this process, with the
// context, the address and the header of Envoy's request: the limits, the hook Resolve and the logs of a sds.Handler
// see the same caller. They never reach the control plane. Secrets from the control plane are dropped, so it cannot
// replace the identity of the workload. If a limit ends the stream of secrets, the ADS stream ends with the same
// status.
//
// # When a side ends
//
// If either side ends, the stream ends with the status of the control plane. Envoy reconnects, after 0.5 seconds at
// first and 30 at most, and says what it wants and what it has (initial_resource_versions in delta). A Handler could
// do so for Envoy only if it stored all resources.
//
// Traffic goes on without a control plane, as Envoy keeps its configuration. So that its certificates are renewed
// meanwhile, a stream whose control plane has gone stays open for secrets for 2 seconds and drops other requests:
// Envoy repeats them on the next stream, where all secrets are served first. An Envoy that must start without a
// control plane needs its secrets by SDS and not by ADS, as in the examples of package sds.
//
// # Back-pressure
//
// An Envoy that does not read holds up the control plane, and the other way round. The two directions do not wait for
// each other, as some control planes read nothing while they write, and both have a time limit. Each stream has two
// queues for requests, one for secrets and one for the control plane, of 8 MiB or one larger message. While a queue
// is full, the Handler does not read from Envoy; after 30 seconds without progress the stream ends with code
// Unavailable. Responses have no queue: if Envoy does not take one within a minute, the stream is reset. A client
// must read while it writes, as Envoy does, because net/http takes at most a MiB of requests on a stream whose
// response waits.
//
// # Limits
//
//   - A request may have 4 MiB, a response 64 MiB.
//   - 1,000 streams may be open, 250 of one peer. An Envoy has one.
//   - Requests in the queues may take 64 MiB, a single peer's 12 MiB, and the same again while they are received.
//
// Requests beyond a limit are refused with code ResourceExhausted. A peer is a user (UID) on a Unix socket on Linux,
// and a connection otherwise.
//
// # What it does not do
//
// A Handler does not authenticate its callers: the permissions of the socket do. A process that can connect speaks to
// the control plane with the credentials of [Config]. A Handler asks for nothing itself, rewrites nothing and
// generates nothing but secrets, so that configuration has one author, the control plane: it has no DNS proxy and
// fetches no WebAssembly modules.
//
// # In a server of your own
//
// As for package sds: the streams need HTTP/2, and WriteTimeout and ReadTimeout of the http.Server must be zero.
//
// With 1,000 open streams, each of which began with a request of 50 kB, a stream takes 48 KiB and 4 goroutines;
// net/http itself takes 45 KiB and 2 (BenchmarkStreams). If the control plane accepts larger frames than the 16 KiB
// of grpc-go, which istiod has, net/http keeps a buffer of that size for each stream, up to 512 KiB.
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

	maxWaiting     = 64 << 20 // bytes of requests in queues, and as many that are being received
	maxPeerWaiting = 12 << 20
	maxQueue       = 8 << 20 // bytes of one queue; a larger message must be alone in it
	besideMessage  = 64      // bytes kept for each message, besides the message
	stalled        = 30 * time.Second
	linger         = 2 * time.Second // how long a stream outlives its control plane
	sendTime       = time.Minute     // in which Envoy must take a response
	maxToken       = 64 << 10
)

type redacted = redact.Text

// Config configures a [Handler]. URL and HTTPClient are required. [NewHandler] copies it.
type Config struct {
	redacted // URL and Header may have secrets

	// URL is the control plane's, such as https://istiod.istio-system.svc:15012, without a path.
	URL string

	// HTTPClient reaches the control plane, by HTTP/2. Its transport decides which servers are trusted and which
	// client certificate is presented, such as a client of caclient.NewHTTPClient or the Transport of a
	// spiffetls.Endpoint. It should detect a dead peer, as with http.HTTP2Config.SendPingTimeout. Its Timeout must be
	// zero: it would end the streams.
	HTTPClient *http.Client

	// Token returns the bearer token for a stream, such as the method Token of a *tokensource.Source; an empty token
	// is not sent. An error ends the stream, unless it is an fs.ErrNotExist: then the stream begins without a token,
	// as the transport may have a certificate. Nil means no token.
	Token func(ctx context.Context) (string, error)

	// Header is metadata to send with each stream, such as ClusterID.
	Header http.Header

	// AllowPlaintext lets URL begin with http, for tests and for a proxy on the same host that adds TLS. Tokens can
	// be read on the connection.
	AllowPlaintext bool

	// Secrets, such as a *sds.Handler, answers requests for secrets, and all methods other than ADS. If nil, requests
	// for secrets go to the control plane as well, and other methods do not exist.
	Secrets http.Handler

	// Logger gets warnings: failed streams, refused requests, dropped responses. The first of a kind is logged at
	// once, and then their number each minute. Nil means no logs.
	Logger *slog.Logger

	limits struct{ request, response, streams, peerStreams int } // for tests; 0 means the constants
}

// check returns what is wrong with the configuration, and removes a slash behind URL.
func (c *Config) check() error {
	u, err := url.Parse(c.URL)
	switch {
	case err != nil:
		return errors.New("URL is not a URL") // the cause repeats the URL, which may contain a password
	case u.Scheme == "http" && !c.AllowPlaintext:
		return errors.New("URL is without TLS; set AllowPlaintext if tokens may be read on the way")
	case u.Scheme != "https" && u.Scheme != "http" || u.Host == "":
		return errors.New("URL has to be https://host:port")
	case u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "":
		return errors.New("URL has more than a scheme, a host and a port")
	case c.HTTPClient == nil:
		return errors.New("HTTPClient is nil; caclient.NewHTTPClient makes one")
	case c.HTTPClient.Timeout != 0:
		return fmt.Errorf("HTTPClient has a Timeout of %v, which would end the streams; set it to 0",
			c.HTTPClient.Timeout)
	}
	for name := range c.Header {
		if c.Token != nil && http.CanonicalHeaderKey(name) == "Authorization" {
			return errors.New("both Token and the authorization of Header are set")
		}
	}
	c.URL = u.Scheme + "://" + u.Host
	return nil
}

// Handler serves the Aggregated Discovery Service. It is safe for concurrent use. Only open streams have goroutines.
type Handler struct {
	redacted
	cfg       Config
	client    *grpchttp.Client
	grpc      *grpchttp.Handler
	log       *ratelog.Log
	metrics   proxyMetrics
	plane     plane
	envoys    envoys
	open      *limit.Shares[peerkey.Holder] // streams
	waiting   *limit.Shares[peerkey.Holder] // bytes of requests
	debugging chan struct{}                 // has one while there is a debug request
	unread    *limit.Shares[string]         // answers to debug requests
	ctx       context.Context               // done when the handler is closed
	closeAll  context.CancelFunc
}

// NewHandler returns a handler that forwards streams to the control plane of cfg. It connects for the first stream.
func NewHandler(cfg Config) (*Handler, error) {
	if err := cfg.check(); err != nil {
		return nil, fmt.Errorf("xdsproxy: new handler: %w", err)
	}
	cfg.Header = cfg.Header.Clone()
	hc := *cfg.HTTPClient
	hc.Jar = nil
	h := &Handler{
		redacted: redact.New("xdsproxy.Handler(" + cfg.URL + ")"),

		cfg:    cfg,
		client: grpchttp.NewClient(&hc, cfg.URL, cmp.Or(cfg.limits.response, maxResponse)),
		log:    ratelog.New(cfg.Logger, 0),
		open: limit.NewShares[peerkey.Holder](cmp.Or(cfg.limits.streams, maxStreams),
			cmp.Or(cfg.limits.peerStreams, maxPeerStreams)),
		waiting: limit.NewShares[peerkey.Holder](maxWaiting, maxPeerWaiting),

		debugging: make(chan struct{}, 1),
		unread:    limit.NewShares[string](maxUnread, 1),
	}
	h.ctx, h.closeAll = context.WithCancel(context.Background())
	h.grpc = &grpchttp.Handler{
		Methods: map[string]grpchttp.Method{
			service + "StreamAggregatedResources": h.serveStream("Stream", sotwRequest),
			service + "DeltaAggregatedResources":  h.serveStream("Delta", deltaRequest),
		},
		Name: "xdsproxy", MaxMessage: cmp.Or(cfg.limits.request, maxRequest), SendTimeout: sendTime,
		Incoming: grpchttp.NewIncoming("xdsproxy", maxWaiting, maxPeerWaiting),
	}
	h.metrics.init(h)
	return h, nil
}

// ServeHTTP serves one request; for a stream it returns when the stream ends. RPCs in other forms than gRPC are
// answered with 415, and requests of other methods by [Config].Secrets.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h.cfg.Secrets != nil && h.grpc.Methods[r.URL.Path] == nil {
		h.cfg.Secrets.ServeHTTP(w, r)
		return
	}
	h.grpc.ServeHTTP(w, r)
}

// Close ends all ADS streams with code Unavailable. It does not wait for them: they belong to the http.Server. Later
// streams are refused. [Config].Secrets and the connections of the HTTPClient stay open. Close may be called more
// than once. It returns nil.
func (h *Handler) Close() error {
	h.closeAll()
	return nil
}
