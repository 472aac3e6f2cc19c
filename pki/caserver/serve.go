package caserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/internal/conns"
	"github.com/svidkit/svidkit/internal/limit"
	"github.com/svidkit/svidkit/internal/peerkey"
	"github.com/svidkit/svidkit/internal/ratelog"
)

const (
	drainTime  = 5 * time.Second
	maxStreams = 250 // at a time on a connection

	maxConns          = 32_768
	maxHandshakesEach = 512 // incomplete handshakes of one address
)

// ServeOptions are the options of [Serve]. Handler is required, and either TLS or Plaintext.
type ServeOptions struct {
	Handler http.Handler

	// TLS is the configuration of the server. It is copied; NextProtos is "h2" and "http/1.1" if it has none.
	TLS *tls.Config

	// Plaintext serves without TLS. Tokens are readable on such a connection: use it only for a server that is
	// reached over loopback, such as behind a proxy in its own pod that terminates TLS.
	Plaintext bool

	// Logger gets failed handshakes (Info), and connections beyond a limit (Warn): at once the first of each reason
	// and, for the first 12 addresses, of each address, and a count of the others every minute. It also gets
	// net/http's log (Debug). Nil discards all of it.
	Logger *slog.Logger
}

// Serve serves HTTP/2 and HTTP/1.1 on a listener until ctx is done or the listener fails. It takes over
// the listener and closes it.
//
// HTTP/2 over TLS does not need ALPN: a client may use it right after the handshake, as Linkerd's proxies do and
// net/http alone does not allow. Handlers find the state of the connection in [http.Request].TLS. A client has 10
// seconds to complete the handshake and to send the header of its first request, 5 minutes between requests, and 250
// concurrent requests on a connection.
//
// A server has at most 32,768 connections, or the process's file descriptors minus a reserve, if that is less. The
// reserve is a quarter of the descriptors, at least 64 and at most 1,024. One IP address has at most half of the
// connections: a NAT, a gateway or a node's proxy has one address for many clients. With Plaintext there is no such
// limit, as all connections may come from the proxy in front. Connections beyond a limit are closed at once, which
// delays no other client. An address (on loopback, a local user) also gets no further connection while it has twice
// as many as are free, at this server or for all servers of this library in the process, so that a few clients leave
// room for others. Connections without a complete handshake are closed beyond half of the limit in total and, for one
// address, beyond 512 or a quarter of the limit.
//
// Active requests are bounded in the same way: 832 in the process, of which an address has no more than twice as many
// as are free, from before the handler runs until the answer is written. A request with a large message counts half
// as much again. Requests beyond that are refused with 503, or gRPC's ResourceExhausted. An answer that its client
// does not read within 30 seconds ends, unless the handler sets another time.
//
// When ctx is done, Serve closes the listener and aborts handshakes. Requests in progress have 5 seconds to end
// before their connections are closed. Serve then returns nil. Only handlers that ignore the end of their request's
// context leave goroutines behind.
func Serve(ctx context.Context, l net.Listener, o ServeOptions) error {
	defer l.Close()
	if err := o.check(); err != nil {
		return fmt.Errorf("caserver: serve: %w", err)
	}
	log := ratelog.Patient(o.Logger)
	refusals := ratelog.New(log, 0)
	accepted, handshaking := limited(l, o, conns.Max(maxConns), refusals)
	srv := accepted.Server(withTLS(o.Handler), maxStreams, log.Handler())
	count := srv.ConnContext
	srv.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		ctx = count(ctx, c)
		return context.WithValue(ctx, connKey{}, c.(interface{ NetConn() net.Conn }).NetConn())
	}
	handshakes, cut := context.WithCancel(ctx)
	defer cut()
	l = accepted
	if o.TLS != nil {
		cfg := o.TLS.Clone()
		if len(cfg.NextProtos) == 0 {
			cfg.NextProtos = []string{"h2", "http/1.1"}
		}
		l = &tlsListener{accepted, handshakes, cfg, handshaking, refusals}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(conns.Patient(l)) })
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
		err = fmt.Errorf("caserver: serve: %w", err)
	}
	cut()
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // close the remaining connections next
	_ = srv.Close()
	return err
}

func (o *ServeOptions) check() error {
	switch {
	case o.Handler == nil:
		return errors.New("ServeOptions.Handler is nil")
	case o.TLS == nil && !o.Plaintext:
		return errors.New("TLS is nil; set Plaintext to serve without it")
	case o.TLS != nil && o.Plaintext:
		return errors.New("TLS and Plaintext are both set")
	case o.TLS != nil && len(o.TLS.Certificates) == 0 && o.TLS.GetCertificate == nil &&
		o.TLS.GetConfigForClient == nil:
		return errors.New("TLS has no certificate; set Certificates or GetCertificate")
	}
	return nil
}

// limited returns l within the limits, and the limits on handshakes.
func limited(l net.Listener, o ServeOptions, total int, log *ratelog.Log) (*conns.Listener, *handshakes) {
	half := max(total/2, 1)
	refused := func(c net.Conn, what, reason string) {
		at, _ := peerkey.Address(c)
		log.LogOf(slog.LevelWarn, at.String(), "caserver: "+what, reason,
			slog.String("peer", c.RemoteAddr().String()), slog.String("address", l.Addr().String()))
	}
	each := half
	if o.TLS == nil {
		each = 0 // all may come from the proxy in front
	}
	accepted := conns.Listen(l, conns.Options{Total: total, Each: each,
		Refused: func(c net.Conn, what string, err *limit.Error) { refused(c, what, err.Reason) }})
	return accepted, &handshakes{accepted, limit.NewShares[any](half, min(maxHandshakesEach, max(total/4, 1))),
		func(c net.Conn, reason string) { refused(c, "connection closed at once", reason) }}
}

// handshakes bounds the connections whose handshake is incomplete.
type handshakes struct {
	of      *conns.Listener
	held    *limit.Shares[any]
	refused func(c net.Conn, reason string)
}

// begin reports whether c may do its handshake. If so, the caller calls end once, when the handshake is over.
func (h *handshakes) begin(c net.Conn) (end func(), ok bool) {
	var from any = c // a peer without a name counts only in total
	if name := h.of.PeerOf(c); name != "" {
		from = name
	}
	if err, ok := errors.AsType[*limit.Error](h.held.Take(from, 1)); ok {
		reason := "there are too many handshakes that are not complete"
		if err.Reason == limit.CallerShare {
			reason = "the address has too many handshakes that are not complete"
		}
		h.refused(c, reason)
		return nil, false
	}
	return sync.OnceFunc(func() { h.held.Give(from, 1) }), true
}

// tlsListener accepts TLS connections and shows them to net/http as unencrypted ones: net/http insists on ALPN for
// connections that it knows to be TLS, and looks for the HTTP/2 preface on the others.
type tlsListener struct {
	*conns.Listener
	ctx   context.Context // of the handshakes
	cfg   *tls.Config
	limit *handshakes
	log   *ratelog.Log
}

func (l *tlsListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		end, ok := l.limit.begin(c)
		if !ok {
			conns.RefuseHandshake()
			_ = c.Close()
			l.Closed(c)
			continue
		}
		tc := tls.Server(c, l.cfg)
		return &hiddenTLS{Conn: tc, l: l, raw: c, tls: tc, end: end,
			state: sync.OnceValue(func() *tls.ConnectionState {
				state := tc.ConnectionState()
				return &state
			})}, nil
	}
}

// hiddenTLS is a TLS connection that is not a *tls.Conn and has no method ConnectionState.
type hiddenTLS struct {
	net.Conn // tls
	l        *tlsListener
	raw      net.Conn // below tls
	tls      *tls.Conn
	end      func()                      // ends the handshake's slot
	state    func() *tls.ConnectionState // call it only after the handshake
	failed   bool
}

// Read does the handshake first. net/http sets the deadline, and calls it in a goroutine of the connection.
func (c *hiddenTLS) Read(p []byte) (int, error) {
	if err := c.tls.HandshakeContext(c.l.ctx); err != nil {
		if !c.failed && c.l.ctx.Err() == nil { // unless the server is ending
			at, _ := peerkey.Address(c)
			c.l.log.LogOf(slog.LevelInfo, at.String(), "caserver: TLS handshake failed", handshakeFailure(err),
				slog.String("peer", c.RemoteAddr().String()), slog.Any("err", err))
		}
		c.failed = true
		return 0, err
	}
	c.end()
	return c.tls.Read(p)
}

// NetConn returns the connection below TLS.
func (c *hiddenTLS) NetConn() net.Conn { return c.raw }

// Close closes the connection.
func (c *hiddenTLS) Close() error {
	c.end()
	return c.Conn.Close()
}

// handshakeFailure is the kind of a failed handshake, for the log.
func handshakeFailure(err error) string {
	// such as a client that does not trust our roots
	if alert, ok := errors.AsType[*net.OpError](err); ok && alert.Op == "remote error" {
		return "the client ended it: " + alert.Err.Error()
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return "the client does not speak TLS"
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "the client took too long"
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return "the client closed the connection"
	}
	return "no agreement"
}

type connKey struct{}

// withTLS sets the TLS field of requests, which net/http leaves empty here.
func withTLS(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*hiddenTLS); ok {
			r = r.WithContext(r.Context()) // a copy, as the original belongs to net/http
			r.TLS = c.state()
		}
		next.ServeHTTP(w, r)
	})
}
