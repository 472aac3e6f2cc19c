package spiffetls

import (
	"crypto/tls"
	"math"
	"net"
	"net/http"
	"sync/atomic"
	"time"
	"weak"

	"github.com/svidkit/svidkit/spiffe"
)

// rawConn is a connection below TLS that knows the other side, and leaves the Governor when it is closed. For a
// client it also records when bytes moved.
type rawConn struct {
	net.Conn
	e       *Endpoint
	client  bool
	born    time.Time
	moved   atomic.Int64 // when bytes last moved, in nanoseconds after born; below 0 if they went out
	entry   atomic.Pointer[governed]
	peer    atomic.Pointer[spiffe.Peer] // proven if the handshake succeeds
	holds   func() error                // whether the server is still allowed where it was dialled; may be nil
	refused atomic.Pointer[error]       // from holds, for the reader, which sees only that the connection has ended
	closed  atomic.Bool

	tls   *tls.Conn // of a server, above it
	heard bool      // the client has sent a hello; only for the goroutine of the handshake
}

// Read implements [net.Conn].
func (c *rawConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 && c.client {
		c.moved.Store(int64(time.Since(c.born)))
	}
	if err != nil {
		if reason := c.refused.Load(); reason != nil {
			err = *reason
		}
	}
	return n, err
}

// Write implements [net.Conn].
func (c *rawConn) Write(p []byte) (int, error) {
	if c.holds != nil {
		if err := c.holds(); err != nil {
			c.refused.Store(&err)
			c.cut()
			return 0, err
		}
	}
	if c.client {
		c.moved.Store(^int64(time.Since(c.born))) // before the answer can come
	}
	return c.Conn.Write(p)
}

// Close implements [net.Conn].
func (c *rawConn) Close() error {
	c.closed.Store(true)
	if e := c.entry.Load(); e != nil {
		c.e.config.Governor.remove(e)
	}
	return c.Conn.Close()
}

// verified implements accepted. It puts the connection under the Governor, if there is one.
func (c *rawConn) verified(p proof, cs tls.ConnectionState) {
	c.peer.Store(p.peer)
	g, role := c.e.config.Governor, spiffe.ClientRole
	if g == nil {
		return
	}
	if c.client {
		role = spiffe.ServerRole
	}
	entry := c.e.govern(c, role, p, cs)
	g.add(entry)
	c.entry.Store(entry)
	if c.closed.Load() { // before the entry was there to be removed
		g.remove(entry)
	}
}

// finished implements accepted.
func (c *rawConn) finished() bool { return c.tls.ConnectionState().HandshakeComplete }

func (c *rawConn) cut()           { _ = c.Conn.Close() }
func (c *rawConn) gone() bool     { return c.closed.Load() }
func (c *rawConn) remote() string { return remote(c.Conn) }

// drainer is a connection below TLS that can end by itself when told; see [Governor].
type drainer interface{ Drain() }

func (c *rawConn) drain() {
	if d, ok := c.Conn.(drainer); ok {
		d.Drain()
	}
}

// idleIn considers a connection idle when no byte has moved for some seconds and the last ones came in. Those may
// have been a frame or a ticket while a response is still awaited, so the time is long.
func (c *rawConn) idleIn() time.Duration {
	if _, ends := c.Conn.(drainer); ends || !c.client {
		return math.MaxInt64
	}
	moved := time.Duration(c.moved.Load())
	if moved < 0 {
		return silence
	}
	return silence - (time.Since(c.born) - moved)
}

// served is a connection that net/http accepted. The pointer is weak, because net/http does not report the end of a
// hijacked connection.
type served struct {
	conn   weak.Pointer[tls.Conn]
	addr   string
	h2     bool
	born   time.Time
	active atomic.Bool  // not idle, as far as is known
	since  atomic.Int64 // nanoseconds after born at which it became idle
}

func (c *served) drain() {} // net/http checks whether it should leave

func (c *served) cut() {
	if conn := c.conn.Value(); conn != nil {
		_ = conn.NetConn().Close() // conn.Close would wait for a peer that does not read
	}
}

// idleIn adds a moment for HTTP/2, as net/http reports a connection idle before it has flushed the last response.
func (c *served) idleIn() time.Duration {
	switch {
	case c.active.Load():
		return quiet
	case c.h2:
		return quiet - (time.Since(c.born) - time.Duration(c.since.Load()))
	}
	return 0
}

func (c *served) gone() bool     { return c.conn.Value() == nil }
func (c *served) remote() string { return c.addr }

// connState is the ConnState hook of net/http.
func (g *Governor) connState(conn net.Conn, s http.ConnState) {
	tc, ok := conn.(*tls.Conn)
	if !ok {
		return
	}
	v, ok := g.hooked.Load(weak.Make(tc))
	if !ok {
		return // not verified yet, or not governed
	}
	c := v.(*governed)
	link := c.link.(*served)
	switch s {
	case http.StateIdle:
		link.since.Store(int64(time.Since(link.born)))
		link.active.Store(false)
		if c.leave.Load() && !link.h2 {
			_ = conn.Close()
		}
	case http.StateClosed:
		g.remove(c)
	default: // a hijacked connection stays active and governed
		link.active.Store(true)
	}
}
