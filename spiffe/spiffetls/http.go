package spiffetls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
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
	switch {
	case e.asServer() != nil:
		return fmt.Errorf("spiffetls: configure server: %w", e.asServer())
	case s == nil:
		return errors.New("spiffetls: configure server: no server")
	case s.TLSConfig != nil:
		return errors.New("spiffetls: configure server: the server has a TLSConfig; leave it nil")
	}
	base := e.serverConfig()
	if base.NextProtos == nil {
		base.NextProtos = []string{"h2", "http/1.1"}
	}
	base.VerifyConnection = e.verifyClient
	base.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		conn, ok := hello.Context().Value(connKey{}).(*connection)
		switch {
		case ok && conn.e == e: // otherwise a server with another configuration accepted it
		case e.config.Governor != nil:
			return nil, e.failed(true, remote(hello.Conn), errForeign)
		default: // not accepted by s: checked too, but without a request
			conn = &connection{e: e}
		}
		c := e.configFor(base, hello, conn)
		c.NextProtos = e.config.NextProtos
		if c.NextProtos == nil {
			c.NextProtos = protocols(s)
		}
		return c, nil
	}
	s.TLSConfig = base
	if s.ErrorLog == nil && e.log != nil {
		s.ErrorLog = ratelog.ErrorLog(e.log, slog.LevelDebug)
	} else if s.ErrorLog == nil {
		s.ErrorLog = ratelog.ErrorLog(ratelog.New(slog.Default(), 0), slog.LevelWarn)
	}
	e.hook(s)
	return nil
}

// hook wraps the hooks of s that report connections, for requests and the Governor.
func (e *Endpoint) hook(s *http.Server) {
	inner, state := s.ConnContext, s.ConnState
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		if inner != nil {
			if ctx = inner(ctx, c); ctx == nil {
				return nil // net/http reports that
			}
		}
		conn := &connection{e: e}
		if tc, ok := c.(*tls.Conn); ok {
			conn.tls = weak.Make(tc)
		}
		return context.WithValue(ctx, connKey{}, conn)
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
	s.Handler = leaving{s.Handler}
}

var errForeign = errors.New("the connection was not accepted by the configured server, so the Governor cannot end it")

// connKey is the key of a *connection in the context of a connection. net/http passes that context to the handshake,
// which stores the peer, and to every request.
type connKey struct{}

type connection struct {
	e     *Endpoint
	tls   weak.Pointer[tls.Conn]
	peer  atomic.Pointer[spiffe.Peer] // nil until the handshake is done, and for a client without a certificate
	entry atomic.Pointer[governed]    // nil without a Governor
}

// finished implements accepted.
func (c *connection) finished() bool {
	tc := c.tls.Value()
	return tc == nil || tc.ConnectionState().HandshakeComplete
}

// verified implements accepted.
func (c *connection) verified(p proof, cs tls.ConnectionState) {
	c.peer.Store(p.peer) // requests are read only after a successful handshake
	g, tc := c.e.config.Governor, c.tls.Value()
	if g == nil || tc == nil {
		return
	}
	link := &served{conn: c.tls, addr: remote(tc), h2: cs.NegotiatedProtocol == "h2", born: time.Now()}
	link.active.Store(true) // until net/http says otherwise
	entry := c.e.govern(link, spiffe.ClientRole, p, cs)
	c.entry.Store(entry)
	g.hooked.Store(c.tls, entry)
	g.add(entry)
}

// leaving tells the clients of draining connections to connect anew.
type leaving struct{ http.Handler }

// ServeHTTP implements [http.Handler].
func (h leaving) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if conn, ok := r.Context().Value(connKey{}).(*connection); ok {
		if entry := conn.entry.Load(); entry != nil && entry.leave.Load() {
			w.Header().Set("Connection", "close") // in HTTP/2 this sends GOAWAY
		}
	}
	if h.Handler == nil {
		http.DefaultServeMux.ServeHTTP(w, r)
		return
	}
	h.Handler.ServeHTTP(w, r)
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
