package spiffegrpc

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// goAway is a GOAWAY frame (RFC 9113, section 6.8) with the last stream 2³¹-1 and no error: the first frame of a
// graceful shutdown. The server still serves every stream that the client begins before it reads the frame, and the
// client begins no other. A second frame with the real last stream is optional.
var goAway = [...]byte{0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0}

// drained is a connection below TLS that learns from a [spiffetls.Governor] when to drain.
type drained struct {
	net.Conn
	ctx    context.Context // done when draining begins
	cancel context.CancelFunc
}

func newDrained(c net.Conn) *drained {
	ctx, cancel := context.WithCancel(context.Background())
	return &drained{c, ctx, cancel}
}

// Drain implements the method that the Governor calls.
func (d *drained) Drain() { d.cancel() }

func (d *drained) leaves() bool { return d.ctx.Err() != nil }

// serverConn is the connection of a server above TLS. When it is drained it writes goAway between two frames.
type serverConn struct {
	net.Conn
	below *drained

	mu     sync.Mutex // held during a write
	frames frames
	told   bool
}

func newServerConn(conn *tls.Conn, below *drained) *serverConn {
	c := &serverConn{Conn: conn, below: below}
	context.AfterFunc(below.ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		_ = c.tell() // the next Write returns the error
	})
	return c
}

// tell writes goAway if it is time. The caller holds mu.
func (c *serverConn) tell() error {
	if c.told || !c.below.leaves() || !c.frames.between() {
		return nil
	}
	c.told = true
	_, err := c.Conn.Write(goAway[:])
	return err
}

// Write implements [net.Conn].
func (c *serverConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	written := 0
	if c.below.leaves() && !c.told {
		if n := c.frames.finish(p); n > 0 {
			var err error
			if written, err = c.Conn.Write(p[:n]); err != nil {
				return written, err
			}
		}
		if err := c.tell(); err != nil || written == len(p) {
			return written, err
		}
	}
	c.frames.pass(p[written:])
	n, err := c.Conn.Write(p[written:])
	return written + n, err
}

// clientConn is the connection of a client above TLS. When it is drained, its reader gets goAway between two frames
// of the server.
type clientConn struct {
	net.Conn
	below *drained

	// Only the goroutine that reads uses these.
	frames frames
	told   bool
	next   []byte // to be read before further data

	mu       sync.Mutex
	deadline time.Time // the read deadline of the caller
	waking   bool      // the deadline below differs, to interrupt a Read
}

func newClientConn(conn *tls.Conn, below *drained) *clientConn {
	c := &clientConn{Conn: conn, below: below}
	context.AfterFunc(below.ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.waking = true
		_ = c.Conn.SetReadDeadline(time.Unix(1, 0))
	})
	return c
}

// Read implements [net.Conn].
func (c *clientConn) Read(p []byte) (int, error) {
	for len(c.next) == 0 {
		if c.told {
			n, err := c.Conn.Read(p)
			if n == 0 && c.woken(err) {
				continue
			}
			return n, err
		}
		if c.below.leaves() && c.frames.between() {
			c.told, c.next = true, goAway[:]
			break
		}
		n, err := c.Conn.Read(p)
		switch {
		case n == 0 && c.woken(err):
			continue
		case err != nil || !c.below.leaves():
			c.frames.pass(p[:n])
			return n, err
		}
		end := c.frames.finish(p[:n])
		if c.frames.between() {
			c.told = true
			c.next = append(goAway[:len(goAway):len(goAway)], p[end:n]...)
		}
		if end > 0 {
			return end, nil
		}
	}
	n := copy(p, c.next)
	c.next = c.next[n:]
	return n, nil
}

// woken reports whether err comes from a Read that was interrupted to check whether the connection is drained.
func (c *clientConn) woken(err error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.waking || !errors.Is(err, os.ErrDeadlineExceeded) {
		return false
	}
	c.waking = false
	return c.Conn.SetReadDeadline(c.deadline) == nil
}

// SetReadDeadline implements [net.Conn].
func (c *clientConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	if c.waking {
		return nil
	}
	return c.Conn.SetReadDeadline(t)
}

// SetDeadline implements [net.Conn].
func (c *clientConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.Conn.SetWriteDeadline(t))
}

// frames follows the frames that a server sends (RFC 9113, section 4.1). The zero frames is at the start of a
// connection.
type frames struct {
	head  [9]byte
	have  int  // bytes of the head
	left  int  // bytes of the payload that are still to come
	some  bool // a frame was sent: the first one must be SETTINGS
	block bool // the next one must continue a block of header fields
}

// between reports whether another frame may be inserted here.
func (f *frames) between() bool { return f.some && f.have == 0 && !f.block }

// pass advances over all of p.
func (f *frames) pass(p []byte) {
	for len(p) > 0 {
		p = p[f.step(p):]
	}
}

// finish advances to the next place between two frames, or over all of p without one, and returns the number of
// bytes.
func (f *frames) finish(p []byte) int {
	n := 0
	for n < len(p) && !f.between() {
		n += f.step(p[n:])
	}
	return n
}

// step advances over a part of p and returns the number of bytes.
func (f *frames) step(p []byte) int {
	var n int
	if f.have < len(f.head) {
		n = copy(f.head[f.have:], p)
		f.have += n
		if f.have < len(f.head) {
			return n
		}
		f.left = int(binary.BigEndian.Uint32(f.head[:4]) >> 8)
	} else {
		n = min(len(p), f.left)
		f.left -= n
	}
	if f.left == 0 {
		const headers, pushPromise, continuation, endHeaders = 1, 5, 9, 0x4
		kind, flags := f.head[3], f.head[4]
		f.block = (kind == headers || kind == pushPromise || kind == continuation) && flags&endHeaders == 0
		f.have, f.some = 0, true
	}
	return n
}
