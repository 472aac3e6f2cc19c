// Package faulty serves HTTP for tests, with faults that a test injects by a [Dial]. It works on sockets and, in a
// testing/synctest bubble, on listeners in memory.
package faulty

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Position of a Dial says how a server answers requests.
type Position int

// The positions.
const (
	Good   Position = iota // the handler answers
	Deny                   // the handler for denials answers
	Hang                   // no answer, until the position changes or the client goes
	Garble                 // the handler for nonsense answers
	Drop                   // connections are cut, those that are open and those that come
)

// Config configures [Start].
type Config struct {
	Listener              net.Listener
	Handler, Deny, Garble http.Handler
	TLS                   *tls.Config // nil means HTTP/2 without TLS
	ConnContext           func(context.Context, net.Conn) context.Context
	Turned                func() // called after each turn of the dial; may be nil

	// Serve serves h until ctx is done, in place of a server of net/http with TLS and ConnContext. Nil means that
	// server.
	Serve func(ctx context.Context, l net.Listener, h http.Handler) error
}

// Dial injects faults into a server. A test server embeds it, so that its methods become the server's own. They are
// safe for concurrent use.
type Dial struct {
	cfg Config

	mu       sync.Mutex
	position Position
	moved    chan struct{} // closed when position changes
	conns    map[net.Conn]bool
	requests int
}

// Start serves until the test is over.
func Start(t testing.TB, cfg Config) *Dial {
	d := &Dial{cfg: cfg, moved: make(chan struct{}), conns: map[net.Conn]bool{}}
	if cfg.Serve != nil {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() { _ = cfg.Serve(ctx, listener{cfg.Listener, d}, http.HandlerFunc(d.serve)) })
		t.Cleanup(func() {
			d.turn(Drop) // so that nothing hangs
			cancel()
			wg.Wait()
		})
		return d
	}
	srv := &http.Server{
		Handler:     http.HandlerFunc(d.serve),
		TLSConfig:   cfg.TLS,
		ConnContext: d.opened,
		ConnState:   d.state,
		ErrorLog:    slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	serve := func() error { return srv.ServeTLS(cfg.Listener, "", "") }
	if cfg.TLS == nil {
		srv.Protocols = new(http.Protocols)
		srv.Protocols.SetUnencryptedHTTP2(true)
		serve = func() error { return srv.Serve(cfg.Listener) }
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = serve() }) // always http.ErrServerClosed, or a listener that a test has closed
	t.Cleanup(func() {
		_ = srv.Close()
		wg.Wait()
	})
	return d
}

// Deny has every request refused: with status 403 by a bundle endpoint, with PermissionDenied by a
// Workload API, which ends open streams with it too.
func (d *Dial) Deny() { d.turn(Deny) }

// Hang has no request answered until [Dial.Mend]. Open streams stay open and silent.
func (d *Dial) Hang() { d.turn(Hang) }

// Garble cuts the open connections, and has every request answered with a message that makes no sense.
func (d *Dial) Garble() { d.turn(Garble) }

// Drop cuts the open connections, and each new one before it carries a byte, as a server does that keeps
// crashing.
func (d *Dial) Drop() { d.turn(Drop) }

// Mend turns the dial back: the server works, and requests that hung are answered.
func (d *Dial) Mend() { d.turn(Good) }

// Requests returns the number of requests so far, whatever their answer. A stream is one. Connections that [Dial.Drop]
// has cut do not count.
func (d *Dial) Requests() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.requests
}

// PositionOf returns where a dial is.
func PositionOf(d *Dial) Position {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.position
}

// Ending returns an edit of a certificate that makes it end in d, which may be in the past.
func Ending(d time.Duration) func(*x509.Certificate) {
	end := time.Now().Add(d)
	return func(c *x509.Certificate) {
		c.NotAfter = end
		if !c.NotBefore.Before(end) {
			c.NotBefore = end.Add(-time.Hour)
		}
	}
}

func (d *Dial) turn(p Position) {
	d.mu.Lock()
	if d.position != p {
		d.position = p
		close(d.moved)
		d.moved = make(chan struct{})
		if p == Drop || p == Garble { // so that a client in the middle of an answer comes back
			for c := range d.conns {
				cut(c)
			}
		}
	}
	d.mu.Unlock()
	if d.cfg.Turned != nil {
		d.cfg.Turned()
	}
}

// serve answers a request as the position of the dial says.
func (d *Dial) serve(w http.ResponseWriter, r *http.Request) {
	d.mu.Lock()
	d.requests++
	d.mu.Unlock()
	for {
		d.mu.Lock()
		position, moved := d.position, d.moved
		d.mu.Unlock()
		switch position {
		case Deny:
			d.cfg.Deny.ServeHTTP(w, r)
		case Garble:
			d.cfg.Garble.ServeHTTP(w, r)
		case Hang:
			select {
			case <-moved:
				continue
			case <-r.Context().Done():
			}
		case Drop:
			panic(http.ErrAbortHandler)
		default:
			d.cfg.Handler.ServeHTTP(w, r)
		}
		return
	}
}

// listener tells a Dial of the connections of a server that is not of net/http.
type listener struct {
	net.Listener
	d *Dial
}

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.d.opened(context.Background(), c)
	return &conn{Conn: c, d: l.d}, nil
}

type conn struct {
	net.Conn
	d *Dial
}

func (c *conn) Close() error {
	c.d.state(c.Conn, http.StateClosed)
	return c.Conn.Close()
}

func (d *Dial) opened(ctx context.Context, c net.Conn) context.Context {
	d.mu.Lock()
	d.conns[c] = true
	if d.position == Drop {
		cut(c)
	}
	d.mu.Unlock()
	if d.cfg.ConnContext != nil {
		ctx = d.cfg.ConnContext(ctx, c)
	}
	return ctx
}

func (d *Dial) state(c net.Conn, state http.ConnState) {
	if state == http.StateClosed {
		d.mu.Lock()
		delete(d.conns, c)
		d.mu.Unlock()
	}
}

// cut closes a connection without an alert.
func cut(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	_ = c.Close()
}
