package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"
	"weak"

	"github.com/svidkit/svidkit/internal/ratelog"
	"github.com/svidkit/svidkit/spiffe"
)

// ConfigureServer makes s serve HTTP/2 and HTTP/1.1 over TLS, with Self as its identity, and makes the proven client
// of each request available through [PeerFromContext]. Call it once, before s serves, then call s.ServeTLS or
// s.ListenAndServeTLS with empty file names.
//
// It sets s.TLSConfig as [Endpoint.ServerConfig] describes; an s that already has one is an error. It wraps
// s.ConnContext, so set your own ConnContext before; with a Governor it also wraps s.ConnState and s.Handler.
// s.Protocols decides which versions of HTTP are offered, unless NextProtos does.
//
// If s.ErrorLog is nil, it is set, so that clients cannot fill the log. At most once a minute, a line of net/http
// about failed handshakes goes to the Logger at Debug, as the reason is there at Warn already, or without a Logger
// to [slog.Default] at Warn. Other lines go to the standard logger.
func (e *Endpoint) ConfigureServer(s *http.Server) error {
	if err := e.meets(spiffe.ClientRole); err != nil {
		return fmt.Errorf("spiffetls: configure server: %w", err)
	}
	if s.TLSConfig != nil {
		return errors.New("spiffetls: configure server: the server has a TLSConfig; leave it nil")
	}
	base := e.serverConfig()
	if base.NextProtos == nil {
		base.NextProtos = []string{"h2", "http/1.1"}
	}
	base.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, ok := hello.Context().Value(connKey{}).(*connection)
		switch {
		case ok && conn.e == e: // otherwise a server with another configuration accepted it
		case e.config.Governor != nil:
			return nil, e.failed(true, remote(hello.Conn), errForeign)
		default: // not accepted by s: checked too, but without a request
			conn = &connection{e: e}
		}
		c, err := e.configFor(base, hello, conn.tls.Value(), conn.verified)
		if err != nil {
			return nil, err
		}
		if c.NextProtos = e.config.NextProtos; c.NextProtos == nil { // net/http has changed those of base
			c.NextProtos = protocols(s)
		}
		return c, nil
	}
	s.TLSConfig = base
	if s.ErrorLog == nil && e.config.Logger != nil {
		s.ErrorLog = ratelog.ErrorLog(e.log, slog.LevelDebug)
	} else if s.ErrorLog == nil {
		s.ErrorLog = ratelog.ErrorLog(ratelog.New(slog.Default(), 0), slog.LevelWarn)
	}
	e.hook(s)
	return nil
}

// Serve calls [Endpoint.ConfigureServer] and s.ServeTLS. It is the Serve of a unixsocket.Server.
func (e *Endpoint) Serve(s *http.Server, l net.Listener) error {
	if err := e.ConfigureServer(s); err != nil {
		return err
	}
	return s.ServeTLS(l, "", "")
}

// hook wraps the hooks of s that report connections, for requests and the Governor.
func (e *Endpoint) hook(s *http.Server) {
	inner, state := s.ConnContext, s.ConnState
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if inner != nil {
			ctx = inner(ctx, c)
		}
		tc, _ := c.(*tls.Conn)
		return context.WithValue(ctx, connKey{}, &connection{e: e, tls: weak.Make(tc)})
	}
	g := e.config.Governor
	if g == nil {
		return
	}
	s.ConnState = func(c net.Conn, to http.ConnState) {
		g.connState(c, to)
		if state != nil {
			state(c, to)
		}
	}
	s.Handler = leaving(s.Handler)
}

var errForeign = errors.New("the connection was not accepted by the configured server, so the Governor cannot end it")

// connKey is the key of a *connection in the context of a connection. net/http passes that context to the handshake,
// which stores the peer, and to every request.
type connKey struct{}

type connection struct {
	e     *Endpoint
	tls   weak.Pointer[tls.Conn]      // net/http does not report the end of a hijacked connection
	peer  atomic.Pointer[spiffe.Peer] // nil until the handshake is done, and for a client without a certificate
	leave atomic.Bool                 // it is draining
	h2    bool
	rests atomic.Pointer[time.Time] // since when it is idle; nil if it is not, as far as is known
}

// verified gets the client from the handshake.
func (c *connection) verified(p proof, cs tls.ConnectionState) {
	c.peer.Store(p.peer) // requests are read only after a successful handshake
	c.h2 = cs.NegotiatedProtocol == "h2"
	if tc, g := c.tls.Value(), c.e.config.Governor; tc != nil && g != nil {
		c.e.govern(c, spiffe.ClientRole, remote(tc), p)
		runtime.AddCleanup(tc, g.remove, c.key())
	}
}

func (c *connection) key() any { return c.tls }
func (c *connection) drain()   { c.leave.Store(true) } // connState looks at rests and leave in the other order

func (c *connection) cut() {
	if conn := c.tls.Value(); conn != nil {
		_ = conn.NetConn().Close() // conn.Close would wait for a peer that does not read
	}
}

// idle waits a moment for HTTP/2, as net/http reports a connection idle before it has flushed the last response.
func (c *connection) idle() bool {
	since := c.rests.Load()
	return since != nil && (!c.h2 || time.Since(*since) >= quiet)
}

// connState is the ConnState hook of net/http.
func (g *Governor) connState(conn net.Conn, s http.ConnState) {
	tc, _ := conn.(*tls.Conn)
	g.mu.Lock()
	c := g.conns[weak.Make(tc)]
	g.mu.Unlock()
	if c == nil {
		return // not verified yet, not governed, or without TLS
	}
	link := c.link.(*connection)
	switch s {
	case http.StateIdle:
		link.rests.Store(new(time.Now()))
		if link.leave.Load() && !link.h2 {
			_ = conn.Close()
		}
	case http.StateClosed:
		g.remove(link.key())
	default: // a hijacked connection stays active and governed
		link.rests.Store(nil)
	}
}

// leaving returns a handler that tells the clients of draining connections to connect anew.
func leaving(next http.Handler) http.Handler {
	if next == nil {
		next = http.DefaultServeMux
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if conn, ok := r.Context().Value(connKey{}).(*connection); ok && conn.leave.Load() {
			w.Header().Set("Connection", "close") // in HTTP/2 this sends GOAWAY
		}
		next.ServeHTTP(w, r)
	})
}

// protocols returns the protocols that s negotiates. net/http sets them when it starts to serve, in a
// configuration that GetConfigForClient replaces.
func protocols(s *http.Server) []string {
	protos := make([]string, 0, 2)
	if _, ok := s.TLSNextProto["h2"]; ok && (s.Protocols == nil || s.Protocols.HTTP2()) {
		protos = append(protos, "h2")
	}
	if s.Protocols == nil || s.Protocols.HTTP1() {
		protos = append(protos, "http/1.1")
	}
	return protos
}
