package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe/report"
	"github.com/svidkit/svidkit/spiffe/unixsocket"
)

// config configures a proxy: application is required for inbound connections, and route for outbound ones.
type config struct {
	// name is the identity of the workload. The proxy neither starts nor closes identity. Without both it forwards
	// without TLS both ways.
	name     string
	identity *linkerdproxy.Identity

	// anonymous says that the identity connects without its certificate after that has expired.
	anonymous bool

	// application is the workload's address, host:port, to which inbound connections are forwarded. It speaks HTTP/1
	// or HTTP/2 without TLS, and gets each request in the client's version, without trailers.
	application string

	// opaque says that the application speaks another protocol: inbound bytes are forwarded unchanged, and the
	// application learns nothing of the client.
	opaque bool

	// route returns the endpoint of an outbound request, by its Host, in the form of [authority]. Its error is
	// answered with 502. It must be safe for concurrent use.
	route func(ctx context.Context, authority string) (endpoint, error)

	// clientID tells the application the client's verified identity, in the header l5d-client-id of each HTTP
	// request. Without it the application gets no such header; a client's own header of that name is always removed.
	// With it nothing is forwarded byte for byte: the application could see a request in bytes that the proxy reads
	// otherwise.
	clientID bool

	// requireTLS refuses inbound connections unless the proxy terminates their TLS. requireIdentity also refuses
	// clients without an identity.
	requireTLS, requireIdentity bool

	// logger gets refused connections and requests that cannot be forwarded (Warn): each reason, and each of the
	// first 12 refused clients, at once, and then once a minute with a count. Nil means no logs.
	logger *slog.Logger
}

// endpoint is the destination of a connection.
type endpoint struct {
	addr     string // host:port
	identity string // required of the server; empty means a connection without TLS

	serverName string // for SNI; empty means the identity
}

// proxy forwards connections. newProxy makes one. It is safe for concurrent use.
type proxy struct {
	cfg     config
	log     *ratelog.Log
	metrics metrics.Set
	inbound map[string]*metrics.Counter // connections, by their kind
	failed  map[string]*metrics.Counter // requests, by their direction

	mu  sync.Mutex
	own map[int]bool // ports that the proxy listens on
}

const (
	detectTime = 10 * time.Second // for the first bytes of a connection, and the handshake
	dialTime   = 10 * time.Second
	// Of clients; longer than the timeout of our own connections, so that no request meets a close.
	idleTimeout = 5 * time.Minute
	idleOut     = 90 * time.Second // of our own
	drainTime   = 5 * time.Second
	maxHeader   = 64 << 10
	maxStreams  = 100
	maxRequests = 1000             // under way; two thirds for one address
	bodyTime    = 30 * time.Second // for each part of a body by HTTP/1
	tunnelTime  = time.Hour        // without a byte in either direction
	maxHops     = 8                // of a request, through proxies of this kind
	clientID    = "L5d-Client-Id"
	requireID   = "L5d-Require-Id"
	origProto   = "L5d-Orig-Proto"
	hops        = "L5d-Hops"
)

// newProxy checks cfg and returns a proxy.
func newProxy(cfg config) (*proxy, error) {
	switch {
	case cfg.identity == nil && (cfg.requireTLS || cfg.requireIdentity || cfg.clientID):
		return nil, errors.New("without an identity there are no clients with one: -client-id cannot be set, and " +
			"no port can require TLS")
	case cfg.application == "" && cfg.route == nil:
		return nil, errors.New("there is neither an application nor a route: nothing could be forwarded")
	case cfg.opaque && cfg.clientID:
		return nil, errors.New("-client-id is for HTTP: it cannot be set with -opaque")
	}
	if cfg.application != "" {
		if _, _, err := net.SplitHostPort(cfg.application); err != nil {
			return nil, fmt.Errorf("the application: %w", err)
		}
	}
	cfg.logger = cmp.Or(cfg.logger, slog.New(slog.DiscardHandler))
	p := &proxy{cfg: cfg, log: ratelog.New(cfg.logger, 0)}
	p.inbound = p.metrics.Counters("svidkit_linkerdproxy_inbound_connections_total",
		"The number of inbound connections: with TLS that the proxy terminates, plaintext, passed through with "+
			"TLS for another name, or refused.",
		"kind", "tls", "plaintext", "passthrough", "refused")
	p.failed = p.metrics.Counters("svidkit_linkerdproxy_failed_requests_total",
		"The number of HTTP requests that could not be forwarded.", "direction", "inbound", "outbound")
	return p, nil
}

// Report implements [report.Reporter] with these metrics:
//
//	svidkit_linkerdproxy_inbound_connections_total   by kind: tls, plaintext, passthrough (other TLS), refused
//	svidkit_linkerdproxy_failed_requests_total       by direction, inbound or outbound: not forwarded
func (p *proxy) Report() report.Report {
	return report.Report{Metrics: p.metrics.Write}
}

// serveInbound accepts clients' connections on l, and forwards them to the application, until ctx is done; then it
// gives requests 5 seconds to end, and returns nil. It owns l and closes it. Connections that it forwards byte for
// byte end at once; upgraded ones, such as WebSockets, end with the last requests.
//
// It terminates TLS with the workload's server name. While there is no valid certificate it closes such connections,
// and forwards none of their bytes. Unless requireTLS or clientID is set, it forwards TLS with another server name,
// and connections without TLS, unchanged. A client has 10 seconds to begin; a client that has sent nothing by then,
// as in protocols where the server speaks first, counts as one without TLS.
func (p *proxy) serveInbound(ctx context.Context, l net.Listener) error {
	if p.cfg.application == "" {
		_ = l.Close()
		return errors.New("serve inbound: there is no application")
	}
	ready := &queue{Listener: l, conns: make(chan net.Conn)}
	return p.serve(ctx, l, ready, p.inboundHandler, func(ctx context.Context, c net.Conn) { p.accept(ctx, c, ready) })
}

// serveOutbound accepts the application's HTTP/1 and HTTP/2 requests on l, without TLS, and forwards them by their
// routes, until ctx is done; then it gives them 5 seconds to end, and returns nil. It owns l and closes it.
//
// A request with the header l5d-require-id fails unless its route has that identity. To servers, any program of this
// machine that reaches the port is the application.
func (p *proxy) serveOutbound(ctx context.Context, l net.Listener) error {
	if p.cfg.route == nil {
		_ = l.Close()
		return errors.New("serve outbound: there is no route")
	}
	ready := &queue{Listener: l, conns: make(chan net.Conn)}
	return p.serve(ctx, l, ready, p.outboundHandler, func(_ context.Context, c net.Conn) { ready.put(c) })
}

// queue is a listener of connections for net/http. They are not *tls.Conn, so that net/http looks for the HTTP/2
// preface: the mesh's TLS has no ALPN.
type queue struct {
	net.Listener
	conns chan net.Conn
	ctx   context.Context
}

// put waits until net/http has accepted c.
func (q *queue) put(c net.Conn) {
	select {
	case q.conns <- c:
	case <-q.ctx.Done():
		_ = c.Close()
	}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.ctx.Done():
		return nil, net.ErrClosed
	}
}

// serve accepts connections on l until ctx is done. It passes each to begin, which puts those for net/http into
// ready.
func (p *proxy) serve(ctx context.Context, l net.Listener, ready *queue, handler func(*connections) http.Handler,
	begin func(context.Context, net.Conn)) error {
	accepting, stop := context.WithCancel(ctx)
	defer stop()
	// The context of requests, and of connections that net/http does not end.
	open, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	ready.ctx = accepting
	accepted := unixsocket.Limit(l, 1, p.cfg.logger) // outgoing connections count too
	p.listens(l)
	others := connections{over: open}
	srv := &http.Server{
		Handler:   inTime(new(underWay).within(handler(&others)), bodyTime, detectTime, idleTimeout),
		Protocols: new(http.Protocols),
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerConnection: 128 << 10,
			MaxReceiveBufferPerStream: 64 << 10, WriteByteTimeout: time.Minute},
		BaseContext: func(net.Listener) context.Context { return open },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, c)
		},
		ReadHeaderTimeout: detectTime,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,

		DisableGeneralOptionsHandler: true, // OPTIONS * is for the application

		ErrorLog: slog.NewLogLogger(p.cfg.logger.Handler(), slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	wg.Go(func() { _ = srv.Serve(ready) })
	wg.Go(func() {
		for wait := time.Duration(0); ; {
			c, err := accepted.Accept()
			if passes(err) {
				p.log.Warn("connections cannot be accepted", "the system refuses them", slog.Any("err", err))
				wait = min(max(2*wait, 5*time.Millisecond), time.Second)
				select {
				case <-accepting.Done():
					return
				case <-time.After(wait):
				}
				continue
			}
			if err != nil {
				failed <- err
				return
			}
			wait = 0
			wg.Go(func() { begin(open, c) })
		}
	})
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("serve: %w", err)
	}
	_ = l.Close()
	stop()
	drain, done := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer done()
	_ = srv.Shutdown(drain) // remaining connections are closed next
	_ = srv.Close()
	cut()
	others.close()
	wg.Wait()
	return err
}

// passes reports whether err is temporary: the system has no resources for another connection now.
func passes(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOBUFS) ||
		errors.Is(err, syscall.ENOMEM)
}

type connKey struct{}
