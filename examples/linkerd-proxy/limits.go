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

// CloseWrite says that nothing more follows, if the connection can.
func (c *counted) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(c io.Closer) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// connections are those of a server to others, which end with it: net/http keeps those that are idle, and cannot
// close one whose last request is just ending.
type connections struct {
	over context.Context // of the server
	mu   sync.Mutex
	open map[*counted]struct{}

	http1 string    // the address that answered HTTP/2 with HTTP/1 last
	until time.Time // and until when it is not asked again: net/http keeps a connection that has failed for seconds
}

var errHTTP1 = errors.New("it has answered HTTP/2 with HTTP/1 a moment ago")

// asks returns an error for an address that is not to be asked by HTTP/2 now.
func (s *connections) asks(addr string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.http1 == addr && time.Now().Before(s.until) {
		return errHTTP1
	}
	return nil
}

// sniffed is a connection for HTTP/2 to an address.
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

// dial connects for a client's request, and gives up when the server is over.
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

// close closes those that are open, below TLS, which would wait to say that it ends. The server is over already.
func (s *connections) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		_ = c.Conn.Close()
	}
}

// within counts a connection that is to be opened for a client in the budget of the process until release is called,
// as if the client had opened it: by HTTP/2 one connection of a client can lead to a thousand. It fails beyond the
// client's share.
func within(client net.Conn) (release func(), err error) {
	c, err := unixsocket.Limit(&pending{Conn: client}, 1, slog.New(slog.DiscardHandler)).Accept()
	if err != nil {
		return nil, err
	}
	return func() { _ = c.Close() }, nil
}

// pending stands for a connection that is not open yet and has the addresses of its client's. It is the listener that
// accepts itself, once.
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

// underWay counts the requests that are under way, in total and of each address.
type underWay struct {
	mu  sync.Mutex
	all int
	of  map[string]int
}

// take counts n requests more, and reports whether there is room for them.
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

// within serves as next does, until the client has taken the answer, and refuses what there is no room for, without a
// body that would wait for the client.
func (u *underWay) within(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		n := 1
		if r.ContentLength != 0 {
			n = 2 // with the body that is on its way to the other side
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

// inTime gives a client of HTTP/1 some time for each part of a body, and to send the rest of one that next has not
// read: net/http reads it before the next request, without a limit. So a client that stops in the middle does not
// keep its connection, or that to the application, where its proxy has made HTTP/2 of the request. By HTTP/1 a client
// has long to take each part of the answer.
func inTime(next http.Handler, part, rest, long time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		http1 := r.ProtoMajor == 1 || r.Method == "PRI" // which net/http has as HTTP/2, on a connection of HTTP/1
		if http1 {
			w = &timedWriter{w, rc, long}
			defer func() { _ = rc.SetWriteDeadline(time.Now().Add(long)) }()
		}
		if r.ContentLength == 0 || !http1 && r.Header.Get(origProto) == "" {
			next.ServeHTTP(w, r)
			return
		}
		// net/http looks at the body of its own, and ends the connection if a part of that was left
		r = r.WithContext(r.Context())
		r.Body = &timedBody{r.Body, rc, part}
		next.ServeHTTP(w, r)
		_ = rc.SetReadDeadline(time.Now().Add(rest)) // of this request only
	})
}

// timedWriter is an answer of which the client has to take each part in time.
type timedWriter struct {
	http.ResponseWriter
	rc   *http.ResponseController
	part time.Duration
}

func (w *timedWriter) Write(p []byte) (int, error) {
	_ = w.rc.SetWriteDeadline(time.Now().Add(w.part))
	return w.ResponseWriter.Write(p)
}

// Unwrap is for http.ResponseController.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

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
