// Package faulty serves HTTP for tests, and misbehaves when it is told to. [Start] serves, and
// [Server.Turn] says how. It works on sockets and, in a testing/synctest bubble, on listeners in memory.
package faulty

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
)

// Position is what a [Server] does with requests.
type Position int

// The positions.
const (
	Good   Position = iota // the handler answers
	Deny                   // the handler for denials answers
	Hang                   // no answer, until the position changes or the client goes
	Garble                 // the handler for nonsense answers
	Drop                   // connections are cut, those that are open and those that come
)

// Config is what a [Server] serves.
type Config struct {
	Listener              net.Listener
	Handler, Deny, Garble http.Handler
	TLS                   *tls.Config // nil means HTTP/2 without TLS
	ConnContext           func(context.Context, net.Conn) context.Context
}

// Server is a server with a dial. [Start] makes one. Its methods are safe for concurrent use.
type Server struct {
	cfg Config

	mu       sync.Mutex
	position Position
	moved    chan struct{} // closed when position changes
	conns    map[net.Conn]bool
	requests int
}

// Start serves until the test is over.
func Start(t testing.TB, cfg Config) *Server {
	s := &Server{cfg: cfg, moved: make(chan struct{}), conns: map[net.Conn]bool{}}
	srv := &http.Server{
		Handler:     s,
		TLSConfig:   cfg.TLS,
		ConnContext: s.opened,
		ConnState:   s.state,
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
	return s
}

// Turn sets the dial. With Drop and Garble the connections that are open are cut, so that a client in
// the middle of an answer comes back to the new position.
func (s *Server) Turn(p Position) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.position == p {
		return
	}
	s.position = p
	close(s.moved)
	s.moved = make(chan struct{})
	if p == Drop || p == Garble {
		for c := range s.conns {
			cut(c)
		}
	}
}

// Position returns where the dial is.
func (s *Server) Position() Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.position
}

// Requests returns how many requests have come so far, whatever became of them.
func (s *Server) Requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests
}

// ServeHTTP does what the dial says.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.requests++
	s.mu.Unlock()
	for {
		s.mu.Lock()
		position, moved := s.position, s.moved
		s.mu.Unlock()
		switch position {
		case Deny:
			s.cfg.Deny.ServeHTTP(w, r)
		case Garble:
			s.cfg.Garble.ServeHTTP(w, r)
		case Hang:
			select {
			case <-moved:
				continue
			case <-r.Context().Done():
			}
		case Drop:
			panic(http.ErrAbortHandler)
		default:
			s.cfg.Handler.ServeHTTP(w, r)
		}
		return
	}
}

func (s *Server) opened(ctx context.Context, c net.Conn) context.Context {
	s.mu.Lock()
	s.conns[c] = true
	if s.position == Drop {
		cut(c)
	}
	s.mu.Unlock()
	if s.cfg.ConnContext != nil {
		ctx = s.cfg.ConnContext(ctx, c)
	}
	return ctx
}

func (s *Server) state(c net.Conn, state http.ConnState) {
	if state == http.StateClosed {
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}
}

// cut closes a connection without a word.
func cut(c net.Conn) {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	_ = c.Close()
}
