package caserver

import (
	"cmp"
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

	"github.com/svidkit/svidkit/internal/summary"
)

const (
	firstRequest  = 10 * time.Second // for the handshake and the header of the first request
	idleTimeout   = 5 * time.Minute
	drainTime     = 5 * time.Second
	maxStreams    = 1000 // that a connection has at a time
	maxHeader     = 64 << 10
	maxHTTP2Frame = 16 << 10
)

// ServeOptions are the choices of [Serve]. Handler is required, and so is one of TLS and Plaintext.
type ServeOptions struct {
	Handler http.Handler

	// TLS is the configuration of the server. It is copied; the copy gets "h2" and "http/1.1" as NextProtos
	// if it has none.
	TLS *tls.Config

	// Plaintext serves without TLS. Tokens are readable on such a connection: use it only for a server that
	// is reached over loopback, such as one behind a proxy in its own pod that terminates TLS.
	Plaintext bool

	// Logger gets failed handshakes (Info): the first of each reason at once, and a count of the others every minute. It
	// gets what net/http logs (Debug). Nil discards them.
	Logger *slog.Logger
}

// Serve serves HTTP/2 and HTTP/1.1 on a listener until ctx is done or the listener fails. It takes over
// the listener and closes it.
//
// HTTP/2 over TLS does not need ALPN: a client may begin with it when the handshake is done, as Linkerd's
// proxies do and net/http alone does not allow. Handlers find the state of the connection in
// [http.Request].TLS. A client has 10 seconds to complete the handshake and to send the header of its first
// request, 5 minutes between requests, and 1,000 requests at a time on a connection.
//
// When ctx is done, Serve closes the listener and cuts handshakes. Requests in progress have 5 seconds to
// end before their connections are closed. Serve then returns the cause of ctx. The only goroutines left
// are those of handlers that ignore the end of their request's context.
func Serve(ctx context.Context, l net.Listener, o ServeOptions) error {
	defer l.Close()
	switch {
	case o.Handler == nil:
		return errors.New("caserver: serve: Handler is nil")
	case o.TLS == nil && !o.Plaintext:
		return errors.New("caserver: serve: TLS is nil; set Plaintext to serve without it")
	case o.TLS != nil && o.Plaintext:
		return errors.New("caserver: serve: TLS and Plaintext are both set")
	case o.TLS != nil && len(o.TLS.Certificates) == 0 && o.TLS.GetCertificate == nil && o.TLS.GetConfigForClient == nil:
		return errors.New("caserver: serve: TLS has no certificate; set Certificates or GetCertificate")
	}
	log := cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	srv := &http.Server{
		Handler:           withTLS(o.Handler),
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReadFrameSize: maxHTTP2Frame},
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
		ReadHeaderTimeout: firstRequest,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	handshakes, cut := context.WithCancel(ctx)
	defer cut()
	if o.TLS != nil {
		cfg := o.TLS.Clone()
		if len(cfg.NextProtos) == 0 {
			cfg.NextProtos = []string{"h2", "http/1.1"}
		}
		l = &tlsListener{l, handshakes, cfg, summary.New(log, 0)}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	failed := make(chan error, 1)
	wg.Go(func() { failed <- srv.Serve(l) })
	var err error
	select {
	case <-ctx.Done():
		err = context.Cause(ctx)
	case err = <-failed:
		err = fmt.Errorf("caserver: serve: %w", err)
	}
	cut()
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // connections that are left are closed next
	_ = srv.Close()
	return err
}

// tlsListener accepts TLS connections in the form that net/http takes for unencrypted ones: it insists
// on ALPN for those that it knows to be TLS, and looks for the preface of HTTP/2 on the others.
type tlsListener struct {
	net.Listener
	ctx context.Context // of the handshakes
	cfg *tls.Config
	log *summary.Log
}

func (l *tlsListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tc := tls.Server(c, l.cfg)
	return &hiddenTLS{Conn: tc, l: l, tls: tc, state: sync.OnceValue(func() *tls.ConnectionState {
		state := tc.ConnectionState()
		return &state
	})}, nil
}

// hiddenTLS is a TLS connection that is not a *tls.Conn and has no method ConnectionState.
type hiddenTLS struct {
	net.Conn // tls
	l        *tlsListener
	tls      *tls.Conn
	state    func() *tls.ConnectionState // to be called after the handshake
	failed   bool
}

// Read does the handshake first. net/http sets the deadline, and calls it in a goroutine of the connection.
func (c *hiddenTLS) Read(p []byte) (int, error) {
	if err := c.tls.HandshakeContext(c.l.ctx); err != nil {
		if !c.failed && c.l.ctx.Err() == nil { // or the server ends
			c.l.log.Log(slog.LevelInfo, "caserver: TLS handshake failed", handshakeFailure(err), slog.String("peer", c.RemoteAddr().String()), slog.Any("err", err))
		}
		c.failed = true
		return 0, err
	}
	return c.tls.Read(p)
}

// handshakeFailure is the kind of a failed handshake, for the log.
func handshakeFailure(err error) string {
	if alert, ok := errors.AsType[*net.OpError](err); ok && alert.Op == "remote error" { // such as a client that does not trust our roots
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

// withTLS sets the TLS field of requests, which net/http cannot know.
func withTLS(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c, ok := r.Context().Value(connKey{}).(*hiddenTLS); ok {
			r = r.WithContext(r.Context()) // a copy, as the original belongs to net/http
			r.TLS = c.state()
		}
		next.ServeHTTP(w, r)
	})
}
