package main

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// maxConns is how many connections a port has at a time, unless the process has too few descriptors for that.
const maxConns = 32_768

// admitted accepts connections within limits, so that no client takes the descriptors that the renewal of the certificate
// needs, or all of those that other clients need. A connection beyond them is closed at once. It is for one goroutine.
type admitted struct {
	net.Listener
	total   int // connections
	last    int // the highest descriptor that one may have; 0 means any
	refused func(c net.Conn, why string)

	mu   sync.Mutex
	held int
	each map[netip.Addr]int
}

func admit(l net.Listener, refused func(c net.Conn, why string)) *admitted {
	a := &admitted{Listener: l, total: maxConns, refused: refused, each: map[netip.Addr]int{}}
	if usable, known := usableDescriptors(); known {
		a.total, a.last = min(maxConns, usable), usable-1
	}
	return a
}

// Accept returns the next connection within the limits. It counts until it is closed.
func (a *admitted) Accept() (net.Conn, error) {
	for {
		c, err := a.Listener.Accept()
		if err != nil {
			return nil, err
		}
		var from netip.Addr // of a connection that is not TCP the zero one, as in tests
		if at, ok := c.RemoteAddr().(*net.TCPAddr); ok {
			from = at.AddrPort().Addr().Unmap()
		}
		if why := a.take(c, from); why != "" {
			a.refused(c, why)
			_ = c.Close()
			continue
		}
		return &counted{Conn: c, closed: sync.OnceFunc(func() { a.give(from) })}, nil
	}
}

// take counts a connection, or returns why there is no room for it. An address may have half of the connections, and twice
// as many as are free, which leaves room for others even if several take what they can.
func (a *admitted) take(c net.Conn, from netip.Addr) (why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	fd, known := descriptor(c)
	switch has := a.each[from]; {
	case known && a.last > 0 && fd > a.last:
		return "the other file descriptors are kept for the program itself"
	case a.held >= a.total:
		return "there are too many connections"
	case has >= max(a.total/2, 1) || has >= 2*(a.total-a.held):
		return "the address has too many connections"
	}
	a.held++
	a.each[from]++
	return ""
}

func (a *admitted) give(from netip.Addr) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.held--
	if a.each[from]--; a.each[from] == 0 {
		delete(a.each, from)
	}
}

// usableOf is how many of a number of descriptors accepted connections may have: all but a quarter, or 1,024.
func usableOf(most int) int { return most - min(max(most/4, 64), 1024, most/2) }

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
func (s *connections) dial(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.over, cancel)()
	raw, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
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

// inTime gives a client of HTTP/1 some time to send the rest of a body that next has not read. net/http reads it before the next
// request, without a limit, so that a client that never sends it would keep its connection.
func inTime(next http.Handler, long time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		next.ServeHTTP(w, r)
		if r.ProtoMajor == 1 && r.ContentLength != 0 {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(long)) // of this request only
		}
	})
}
