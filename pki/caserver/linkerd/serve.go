package linkerd

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	handshakeTimeout = 10 * time.Second
	drainTime        = 5 * time.Second
)

// ServeOptions say how [Serve] serves. Handler is required, and so is TLS or Plaintext.
type ServeOptions struct {
	Handler http.Handler

	// TLS is the configuration of the server. A copy is used, with "h2" and "http/1.1" as NextProtos if it
	// has none. Clients that do not negotiate a protocol, as Linkerd's proxies do not, speak HTTP/2.
	TLS *tls.Config

	// Plaintext serves without TLS. Tokens are readable on such a connection, so it is for a server
	// that is reached over loopback only, as behind the proxy of its own pod, which ends TLS.
	Plaintext bool

	// MaxConcurrentStreams is how many requests one connection may have at a time; 0 means 1,000.
	MaxConcurrentStreams int

	// Logger gets what net/http has to say, and failed handshakes, at level Debug. Nil means silence.
	Logger *slog.Logger
}

// Serve serves HTTP/2, and HTTP/1.1 for health checks and the like, on a listener, until ctx is done or
// accepting fails. HTTP/2 needs no ALPN: a client may begin with it once TLS stands, as Linkerd's
// proxies do, and as net/http alone does not allow. Each handshake has 10 seconds and delays nobody
// else. The requests have their TLS state.
//
// At the end Serve closes the listener, lets requests that are under way come to their end for up to 5
// seconds, cuts the connections that are left, and returns the cause of ctx's end, or what failed.
// Nothing that it started is left then, except for a Handler that does not heed the end of its
// request's context.
func Serve(ctx context.Context, l net.Listener, o ServeOptions) error {
	defer l.Close()
	switch {
	case o.Handler == nil:
		return errors.New("linkerd: serve: the Handler is nil")
	case o.TLS == nil && !o.Plaintext:
		return errors.New("linkerd: serve: TLS is nil; to serve without, set Plaintext")
	case o.TLS != nil && o.Plaintext:
		return errors.New("linkerd: serve: TLS and Plaintext are both set")
	case o.TLS != nil && len(o.TLS.Certificates) == 0 && o.TLS.GetCertificate == nil && o.TLS.GetConfigForClient == nil:
		return errors.New("linkerd: serve: TLS has no certificate; set Certificates or GetCertificate")
	case o.MaxConcurrentStreams < 0:
		return fmt.Errorf("linkerd: serve: MaxConcurrentStreams is negative (%d)", o.MaxConcurrentStreams)
	}
	log := cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	srv := &http.Server{
		Handler:           withTLS(o.Handler),
		Protocols:         new(http.Protocols),
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: cmp.Or(o.MaxConcurrentStreams, 1000), MaxReadFrameSize: 16 << 10},
		ConnContext:       connContext,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       5 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(true)
	if o.TLS != nil {
		cfg := o.TLS.Clone()
		if len(cfg.NextProtos) == 0 {
			cfg.NextProtos = []string{"h2", "http/1.1"}
		}
		s := newShaker(l, cfg, log)
		defer s.wg.Wait()
		defer s.Close()
		l = s
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
		err = fmt.Errorf("linkerd: serve: %w", err)
	}
	drain, stop := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
	defer stop()
	_ = srv.Shutdown(drain) // late is not an error: what is left is cut
	_ = srv.Close()
	return err
}

type stateKey struct{}

// connContext keeps the TLS state of a connection for its requests.
func connContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*hiddenTLS); ok {
		return context.WithValue(ctx, stateKey{}, &c.state)
	}
	return ctx
}

// withTLS puts the TLS state where handlers look for it. net/http does so itself for HTTP/2, but not
// for HTTP/1.1 on a connection that it does not know to be TLS.
func withTLS(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if state, ok := r.Context().Value(stateKey{}).(*tls.ConnectionState); ok && r.TLS == nil {
			r = r.WithContext(r.Context()) // a copy, as the server's own is not ours to change
			r.TLS = state
		}
		next.ServeHTTP(w, r)
	})
}

// hiddenTLS is a TLS connection after its handshake. It is a type of its own so that net/http does
// not see a *tls.Conn, for which it would want ALPN, and looks for the preface of HTTP/2 instead.
type hiddenTLS struct {
	net.Conn
	state tls.ConnectionState
}

// shaker is a listener whose connections have done their TLS handshake.
type shaker struct {
	net.Listener
	cfg   *tls.Config
	log   *slog.Logger
	ready chan net.Conn
	ctx   context.Context // of the handshakes
	end   context.CancelFunc
	wg    sync.WaitGroup
	err   error         // of Accept; set before done is closed
	done  chan struct{} // no more connections come
}

func newShaker(l net.Listener, cfg *tls.Config, log *slog.Logger) *shaker {
	s := &shaker{Listener: l, cfg: cfg, log: log, ready: make(chan net.Conn), done: make(chan struct{})}
	s.ctx, s.end = context.WithCancel(context.Background())
	s.wg.Go(s.accept)
	return s
}

func (s *shaker) accept() {
	defer close(s.done)
	for wait := time.Duration(0); ; {
		c, err := s.Listener.Accept()
		if err == nil {
			wait = 0
			s.wg.Go(func() { s.shake(c) })
			continue
		}
		//lint:ignore SA1019 net/http asks it, too: a process that is out of file descriptors is not at its end
		if ne, ok := errors.AsType[net.Error](err); !ok || !ne.Temporary() {
			s.err = err
			return
		}
		wait = min(max(2*wait, 5*time.Millisecond), time.Second)
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			s.err = net.ErrClosed
			return
		}
	}
}

func (s *shaker) shake(c net.Conn) {
	conn := tls.Server(c, s.cfg)
	ctx, cancel := context.WithTimeout(s.ctx, handshakeTimeout)
	defer cancel()
	if err := conn.HandshakeContext(ctx); err != nil { // closes c when ctx ends
		s.log.LogAttrs(ctx, slog.LevelDebug, "linkerd: TLS handshake failed", slog.String("peer", c.RemoteAddr().String()), slog.Any("err", err))
		_ = c.Close()
		return
	}
	select {
	case s.ready <- &hiddenTLS{conn, conn.ConnectionState()}:
	case <-s.ctx.Done():
		_ = conn.Close()
	}
}

// Accept returns the next connection.
func (s *shaker) Accept() (net.Conn, error) {
	select {
	case c := <-s.ready:
		return c, nil
	case <-s.done:
		return nil, s.err
	}
}

// Close closes the listener and cuts the connections that were not accepted, and does not wait for
// their goroutines: net/http calls it with its lock held.
func (s *shaker) Close() error {
	err := s.Listener.Close()
	s.end()
	return err
}
