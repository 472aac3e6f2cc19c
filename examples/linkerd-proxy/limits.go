package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/svidkit/svidkit/spiffe/unixsocket"
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

// CloseWrite ends the writing side if the connection supports that.
func (c *counted) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(c io.Closer) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// connections are a server's outgoing connections, which end with it: net/http keeps idle ones, and cannot close one
// whose last request is just ending.
type connections struct {
	over context.Context // done when the server ends
	mu   sync.Mutex
	open map[*counted]struct{}

	http1 string    // the last address that answered HTTP/2 with HTTP/1
	until time.Time // do not try HTTP/2 there before: net/http keeps a failed connection for seconds
}

var errHTTP1 = errors.New("it has answered HTTP/2 with HTTP/1 a moment ago")

// asks returns an error for an address that must not get HTTP/2 now.
func (s *connections) asks(addr string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http1 == addr && time.Now().Before(s.until) {
		return errHTTP1
	}
	return nil
}

// sniffed is an HTTP/2 connection to an address.
type sniffed struct {
	net.Conn
	of   *connections
	addr string
	read bool
}

func (c *sniffed) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if !c.read && bytes.HasPrefix(p[:n], []byte("HTTP/1")) {
		c.of.mu.Lock()
		defer c.of.mu.Unlock()
		c.of.http1, c.of.until = c.addr, time.Now().Add(time.Second)
	}
	c.read = c.read || n > 0
	return n, err
}

// dial connects for a client's request, and gives up when the server ends.
func (s *connections) dial(ctx context.Context, addr string, control func(network, address string,
	c syscall.RawConn) error) (_ net.Conn, err error) {
	release := func() {}
	if client, ok := ctx.Value(connKey{}).(net.Conn); ok {
		if release, err = within(client); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			release()
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.over, cancel)()
	raw, err := (&net.Dialer{Control: control}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	c := &counted{Conn: raw}
	c.closed = func() {
		release()
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

// close closes the open connections below TLS, without waiting for close_notify. The server has already ended.
func (s *connections) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		_ = c.Conn.Close()
	}
}

// within counts a connection for a client in the process's budget until release is called, as if the client had
// opened it: one HTTP/2 connection of a client can lead to a thousand. It fails beyond the client's share.
func within(client net.Conn) (release func(), err error) {
	c, err := unixsocket.Limit(&pending{Conn: client}, 1, slog.New(slog.DiscardHandler)).Accept()
	if err != nil {
		return nil, err
	}
	return func() { _ = c.Close() }, nil
}

// pending stands for a connection that is not open yet, with its client's addresses. It is a listener that accepts
// itself once.
type pending struct {
	net.Conn
	taken bool
}

func (r *pending) Accept() (net.Conn, error) {
	if r.taken {
		return nil, errors.New("the client has too many connections, with those that its requests have opened")
	}
	r.taken = true
	return r, nil
}

func (r *pending) Addr() net.Addr { return r.LocalAddr() }

// Close leaves the client's connection open.
func (r *pending) Close() error { return nil }

// underWay counts requests under way, in total and for each address.
type underWay struct {
	mu  sync.Mutex
	all int
	of  map[string]int
}

// take adds n requests, and reports whether they are within the limits.
func (u *underWay) take(from string, n int) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n > 0 && (u.all+n > maxRequests || u.of[from]+n > maxRequests*2/3) {
		return false
	}
	if u.of == nil {
		u.of = map[string]int{}
	}
	u.all += n
	if u.of[from] += n; u.of[from] == 0 {
		delete(u.of, from)
	}
	return true
}

// within serves like next, and holds the slots until the client has read the answer. Beyond the limits it answers
// without a body, which would wait for the client.
func (u *underWay) within(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		n := 1
		if r.ContentLength != 0 {
			n = 2 // with the body on its way to the other side
		}
		if !u.take(from, n) {
			w.Header().Set("Retry-After", "1")
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		defer u.take(from, -n)
		next.ServeHTTP(w, r)
	})
}

// inTime limits the time of an HTTP/1 client for each part of a body, and for the rest of a body that next has not
// read: net/http reads that before the next request, without a limit. So a client that stops halfway holds neither
// its connection nor the application's, where its proxy has made HTTP/2 of the request. By HTTP/1 a client has long
// to read each part of the answer.
func inTime(next http.Handler, part, rest, long time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		http1 := r.ProtoMajor == 1 || r.Method == "PRI" // net/http calls it HTTP/2, on a connection of HTTP/1
		if http1 {
			w = &timedWriter{w, rc, long}
			defer func() { _ = rc.SetWriteDeadline(time.Now().Add(long)) }()
		}
		if r.ContentLength == 0 || !http1 && r.Header.Get(origProto) == "" {
			next.ServeHTTP(w, r)
			return
		}
		// net/http checks its own body, and ends the connection if a part of it is unread.
		r = r.WithContext(r.Context())
		r.Body = &timedBody{r.Body, rc, part}
		next.ServeHTTP(w, r)
		_ = rc.SetReadDeadline(time.Now().Add(rest)) // of this request only
	})
}

// timedWriter is an answer with a time limit for each part.
type timedWriter struct {
	http.ResponseWriter
	rc   *http.ResponseController
	part time.Duration
}

func (w *timedWriter) Write(p []byte) (int, error) {
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.part))
	return w.ResponseWriter.Write(p)
}

// Unwrap serves http.ResponseController.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// timedBody is a body with a time limit for each part.
type timedBody struct {
	io.ReadCloser
	rc   *http.ResponseController
	part time.Duration
}

func (b *timedBody) Read(p []byte) (int, error) {
	_ = b.rc.SetReadDeadline(time.Now().Add(b.part))
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF { // the answer may take longer
		_ = b.rc.SetReadDeadline(time.Time{})
	}
	return n, err
}
