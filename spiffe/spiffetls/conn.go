package spiffetls

import (
	"crypto/tls"
	"net"
	"sync/atomic"
	"time"
)

// rawConn is a connection below TLS that knows the other side, and leaves the Governor when it is closed. It also
// records when bytes moved.
type rawConn struct {
	net.Conn
	e      *Endpoint
	client bool
	tls    *tls.Conn // of a server, above it
	proof  proof     // valid if the handshake succeeds

	born  time.Time
	moved atomic.Int64 // when bytes last moved, in nanoseconds after born; below 0 if they went out
}

// Read implements [net.Conn].
func (c *rawConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.moved.Store(int64(time.Since(c.born)))
	}
	return n, err
}

// Write implements [net.Conn].
func (c *rawConn) Write(p []byte) (int, error) {
	c.moved.Store(^int64(time.Since(c.born))) // before the answer can come
	return c.Conn.Write(p)
}

// Close implements [net.Conn].
func (c *rawConn) Close() error {
	c.e.config.Governor.remove(c)
	return c.Conn.Close()
}

// verified gets the other side from the handshake.
func (c *rawConn) verified(p proof, _ tls.ConnectionState) { c.proof = p }

func (c *rawConn) key() any { return c }
func (c *rawConn) cut()     { _ = c.Conn.Close() }

// drainer is a connection below TLS that can end by itself when told; see [Governor].
type drainer interface{ Drain() }

func (c *rawConn) drain() {
	if d, ok := c.Conn.(drainer); ok {
		d.Drain()
	}
}

// idle considers a client's connection idle when no byte has moved for some seconds and the last ones came in. Those
// may have been a frame or a ticket while a response is still awaited, so the time is long.
func (c *rawConn) idle() bool {
	_, ends := c.Conn.(drainer)
	moved := time.Duration(c.moved.Load())
	return c.client && !ends && moved >= 0 && time.Since(c.born)-moved >= silence
}
