package linkerdproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/metrics"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe/report"
)

// ProxyConfig configures a [Proxy]. Identity is required, Application for inbound connections, and Route for outbound ones.
type ProxyConfig struct {
	// Identity is that of the workload. The Proxy does not start and does not close it.
	Identity *Identity

	// Application is the address, host:port, of the workload, which inbound connections are forwarded to. It speaks HTTP/1
	// or HTTP/2 without TLS, and each request arrives by the version that the client has sent it in, without trailers.
	Application string

	// Opaque says that the application speaks another protocol: what comes in is forwarded byte for byte, and the
	// application learns nothing of the client.
	Opaque bool

	// Route returns where an outbound request goes, by its Host, which may have a port. Its error is answered with 502. It
	// must be safe for concurrent use.
	Route func(ctx context.Context, authority string) (Endpoint, error)

	// ClientID tells the application the proven identity of the client, in the header l5d-client-id of each HTTP request.
	// Without it the application gets no such header, and what a client sends under that name arrives in neither case.
	ClientID bool

	// RequireTLS refuses inbound connections that the Proxy does not terminate TLS for. RequireIdentity refuses clients
	// without an identity, too.
	RequireTLS, RequireIdentity bool

	// Logger gets connections that are refused and requests that cannot be forwarded: the first of each reason at once and a
	// count of the others every minute (Warn). Nil means no logs.
	Logger *slog.Logger
}

// Proxy forwards connections. [NewProxy] makes one. It is safe for concurrent use.
type Proxy struct {
	cfg     ProxyConfig
	log     *ratelog.Log
	metrics metrics.Set
	inbound map[string]*metrics.Counter // connections, by their kind
	failed  map[string]*metrics.Counter // requests, by their direction
}

const (
	detectTime  = 10 * time.Second // for the first bytes of a connection, and the handshake
	dialTime    = 10 * time.Second
	idleTimeout = 5 * time.Minute  // of clients; longer than that of our own connections, so that no request meets a close
	idleOut     = 90 * time.Second // of our own
	drainTime   = 5 * time.Second
	maxHeader   = 64 << 10
	maxStreams  = 1000
	maxConns    = 32_768
	clientID    = "L5d-Client-Id"
	requireID   = "L5d-Require-Id"
)

// NewProxy checks cfg and returns a Proxy. It does nothing else.
func NewProxy(cfg ProxyConfig) (*Proxy, error) {
	switch {
	case cfg.Identity == nil:
		return nil, errors.New("linkerdproxy: new proxy: ProxyConfig.Identity is required")
	case cfg.Application == "" && cfg.Route == nil:
		return nil, errors.New("linkerdproxy: new proxy: ProxyConfig has neither an Application nor a Route: nothing could be forwarded")
	case cfg.Opaque && cfg.ClientID:
		return nil, errors.New("linkerdproxy: new proxy: ProxyConfig.ClientID is for HTTP: it cannot be set with Opaque")
	}
	if cfg.Application != "" {
		if _, _, err := net.SplitHostPort(cfg.Application); err != nil {
			return nil, fmt.Errorf("linkerdproxy: new proxy: ProxyConfig.Application: %w", err)
		}
	}
	p := &Proxy{cfg: cfg, log: ratelog.New(cfg.Logger, 0)}
	p.inbound = p.metrics.Counters("svidkit_linkerdproxy_inbound_connections_total", "The number of inbound connections: with TLS that the proxy terminates, plaintext, passed through with TLS for another name, or refused.", "kind", "tls", "plaintext", "passthrough", "refused")
	p.failed = p.metrics.Counters("svidkit_linkerdproxy_failed_requests_total", "The number of HTTP requests that could not be forwarded.", "direction", "inbound", "outbound")
	return p, nil
}

// Report implements [report.Reporter] with these metrics:
//
//	svidkit_linkerdproxy_inbound_connections_total   by kind: tls, plaintext, passthrough for TLS with another name, or refused
//	svidkit_linkerdproxy_failed_requests_total       by direction, inbound or outbound: those that could not be forwarded
func (p *Proxy) Report() report.Report { return report.Report{Metrics: p.metrics.Write} }

// ServeInbound accepts the connections of clients on l, and forwards them to the application, until ctx is done; then it
// gives requests 5 seconds to end, and returns nil. It takes over l and closes it. What it forwards byte for byte ends at
// once, and upgraded connections, such as WebSockets, do with the last requests.
//
// TLS with the server name of the workload is terminated. While there is no valid certificate such connections are closed,
// with none of their bytes forwarded. TLS with another server name is forwarded as it is, and so is what is not TLS, unless
// RequireTLS is set. A client has 10 seconds to begin; one that has sent nothing by then, as with protocols in which the
// server speaks first, counts as not TLS.
func (p *Proxy) ServeInbound(ctx context.Context, l net.Listener) error {
	if p.cfg.Application == "" {
		_ = l.Close()
		return errors.New("linkerdproxy: serve inbound: ProxyConfig.Application is empty")
	}
	ready := &queue{Listener: l, conns: make(chan net.Conn)}
	return p.serve(ctx, l, ready, p.inboundHandler, func(ctx context.Context, c net.Conn) { p.accept(ctx, c, ready) })
}

// ServeOutbound accepts HTTP/1 and HTTP/2 requests of the application on l, without TLS, and forwards them by Route, until
// ctx is done; then it gives them 5 seconds to end, and returns nil. It takes over l and closes it.
//
// A request with the header l5d-require-id fails unless its route has that identity.
func (p *Proxy) ServeOutbound(ctx context.Context, l net.Listener) error {
	if p.cfg.Route == nil {
		_ = l.Close()
		return errors.New("linkerdproxy: serve outbound: ProxyConfig.Route is nil")
	}
	ready := &queue{Listener: l, conns: make(chan net.Conn)}
	return p.serve(ctx, l, ready, p.outboundHandler, func(_ context.Context, c net.Conn) { ready.put(c) })
}

// queue is a listener of connections that are ready for net/http. They are not *tls.Conn, so that it looks for the preface of
// HTTP/2, as the TLS of the mesh has no ALPN.
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

// serve accepts connections on l until ctx is done. Each is for begin, which puts those for net/http into ready.
func (p *Proxy) serve(ctx context.Context, l net.Listener, ready *queue, handler func(*conns.Dialed) http.Handler, begin func(context.Context, net.Conn)) error {
	accepting, stop := context.WithCancel(ctx)
	defer stop()
	open, cut := context.WithCancel(context.WithoutCancel(ctx)) // of requests, and connections that net/http does not end
	defer cut()
	ready.ctx = accepting
	total := conns.Max(maxConns)
	accepted := conns.Listen(l, conns.Options[netip.Addr]{
		Total: total, Each: max(total/2, 1),
		Peer: peerkey.Address,
		Refused: func(c net.Conn, err *limit.Error) {
			p.log.Warn("linkerdproxy: connection closed at once", err.Reason, slog.String("peer", c.RemoteAddr().String()))
		},
	})
	var dialed conns.Dialed
	srv := &http.Server{
		Handler:           conns.Body(handler(&dialed), detectTime),
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams},
		BaseContext:       func(net.Listener) context.Context { return open },
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ReadHeaderTimeout: detectTime,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,

		DisableGeneralOptionsHandler: true, // OPTIONS * is for the application

		ErrorLog: slog.NewLogLogger(cmp.Or(p.cfg.Logger, slog.New(slog.DiscardHandler)).Handler(), slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	var wg sync.WaitGroup
	failed := make(chan error, 1)
	wg.Go(func() { _ = srv.Serve(ready) })
	wg.Go(func() {
		for wait := time.Duration(0); ; {
			raw, err := accepted.Accept()
			if passes(err) {
				p.log.Warn("linkerdproxy: connections cannot be accepted", "the system refuses them", slog.Any("err", err))
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
			c := &counted{Conn: raw, closed: sync.OnceFunc(func() { accepted.Closed(raw) })}
			wg.Go(func() { begin(open, c) })
		}
	})
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("linkerdproxy: serve: %w", err)
	}
	_ = l.Close()
	stop()
	drain, done := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer done()
	_ = srv.Shutdown(drain) // connections that are left are closed next
	_ = srv.Close()
	cut()
	dialed.Close()
	wg.Wait()
	return err
}

// passes reports whether connections can be accepted again after err, which says that the system has no room for one now.
func passes(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ENOMEM)
}

type connKey struct{}

// counted is a connection that counts until it is closed.
type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

// CloseWrite says that nothing more follows, if the connection can.
func (c *counted) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}
