package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"
)

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

// connections are those of a server to others, which end with it: net/http keeps those that are idle, and cannot close one
// whose last request is just ending.
type connections struct {
	over context.Context // of the server
	mu   sync.Mutex
	open map[*counted]struct{}
}

// dial connects, and gives up when the server is over.
func (s *connections) dial(ctx context.Context, addr string, control func(network, address string, c syscall.RawConn) error) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.over, cancel)()
	raw, err := (&net.Dialer{Control: control}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &counted{Conn: raw}
	c.closed = func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, c)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.over.Err() != nil {
		_ = raw.Close()
		return nil, net.ErrClosed
	}
	if s.open == nil {
		s.open = map[*counted]struct{}{}
	}
	s.open[c] = struct{}{}
	return c, nil
}

// close closes those that are open, below TLS, which would wait to say that it ends. The server is over already.
func (s *connections) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		_ = c.Conn.Close()
	}
}

// inTime gives a client of HTTP/1 some time for each part of a body, and to send the rest of one that next has not read: net/http
// reads it before the next request, without a limit. So a client that stops in the middle does not keep its connection.
func inTime(next http.Handler, part, rest time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 1 || r.ContentLength == 0 {
			next.ServeHTTP(w, r)
			return
		}
		rc := http.NewResponseController(w)
		r.Body = &timedBody{r.Body, rc, part}
		next.ServeHTTP(w, r)
		_ = rc.SetReadDeadline(time.Now().Add(rest)) // of this request only
	})
}

// timedBody is a body of which each part has to come in time.
type timedBody struct {
	io.ReadCloser
	rc   *http.ResponseController
	part time.Duration
}

func (b *timedBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(b.part))
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF { // the answer may take its time
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}
