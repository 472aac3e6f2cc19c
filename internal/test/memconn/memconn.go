// Package memconn is a network in memory, for tests: connections with a buffer in each direction,
// and a listener to make them.
//
// net.Pipe has no buffer, so two sides that both write first wait for each other; a resumed TLS 1.3
// handshake does that. Here a write returns once there is room, as on a socket.
//
// Every wait is on a condition variable or channel made by [Pipe] or [Listen], which in a testing/synctest bubble
// counts as idle, so that time moves on while a peer is silent. No goroutine is started.
package memconn

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// bufferSize is how many bytes a direction holds before a writer waits, like that of a socket.
const bufferSize = 64 << 10

// Pipe returns the two ends of a connection. They behave like TCP connections: reads return what was
// written before the other end was closed and then io.EOF; writes after it was closed fail with an
// error that wraps syscall.EPIPE; deadlines apply to reads and writes that already wait; errors are
// [*net.OpError].
func Pipe() (a, b *Conn) {
	mu := new(sync.Mutex)
	ab, ba := newStream(mu), newStream(mu)
	return &Conn{in: ba, out: ab}, &Conn{in: ab, out: ba}
}

// Conn is one end of a connection. It is safe for concurrent use.
type Conn struct{ in, out *stream }

var _ net.Conn = (*Conn)(nil)

// Read implements [net.Conn].
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.in.read(p)
	if err != nil && err != io.EOF {
		err = opError("read", err)
	}
	return n, err
}

// Write implements [net.Conn]. Concurrent writes do not mix.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.out.write(p)
	if err != nil {
		err = opError("write", err)
	}
	return n, err
}

// CloseWrite ends this end's writing: the other end reads what is left and then io.EOF, and can
// still write.
func (c *Conn) CloseWrite() error {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.closeWriter()
	return nil
}

// Close implements [net.Conn]. What was written before can still be read by the other end. Closing
// again does nothing.
func (c *Conn) Close() error {
	c.in.mu.Lock() // shared by both directions, so that they end at the same moment
	defer c.in.mu.Unlock()
	c.out.closeWriter()
	c.in.closeReader()
	return nil
}

// LocalAddr implements [net.Conn].
func (c *Conn) LocalAddr() net.Addr { return addr{} }

// RemoteAddr implements [net.Conn].
func (c *Conn) RemoteAddr() net.Addr { return addr{} }

// SetDeadline implements [net.Conn].
func (c *Conn) SetDeadline(t time.Time) error {
	c.in.setDeadline(&c.in.readBy, t)
	c.out.setDeadline(&c.out.writeBy, t)
	return nil
}

// SetReadDeadline implements [net.Conn].
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.in.setDeadline(&c.in.readBy, t)
	return nil
}

// SetWriteDeadline implements [net.Conn].
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.out.setDeadline(&c.out.writeBy, t)
	return nil
}

// stream is one direction of a connection.
type stream struct {
	mu      *sync.Mutex // of both directions
	changed sync.Cond   // of anything below
	buf     bytes.Buffer
	writing bool // one write at a time
	ended   bool // by the writer
	gone    bool // the reader

	readBy, writeBy deadline
}

type deadline struct {
	timer  *time.Timer // nil if none is set
	passed bool
}

func newStream(mu *sync.Mutex) *stream {
	s := &stream{mu: mu}
	s.changed.L = mu
	return s
}

func (s *stream) read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		switch {
		case s.gone:
			return 0, net.ErrClosed
		case s.readBy.passed:
			return 0, os.ErrDeadlineExceeded
		case len(p) == 0:
			return 0, nil
		case s.buf.Len() > 0:
			s.changed.Broadcast()
			return s.buf.Read(p)
		case s.ended:
			return 0, io.EOF
		}
		s.changed.Wait()
	}
}

func (s *stream) write(p []byte) (n int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.writing {
		s.changed.Wait()
	}
	s.writing = true
	defer func() {
		s.writing = false
		s.changed.Broadcast()
	}()
	for {
		room := bufferSize - s.buf.Len()
		switch {
		case s.ended:
			return n, net.ErrClosed
		case s.gone:
			return n, syscall.EPIPE
		case s.writeBy.passed:
			return n, os.ErrDeadlineExceeded
		case n == len(p):
			return n, nil
		case room > 0:
			m, _ := s.buf.Write(p[n:min(len(p), n+room)]) // a Buffer does not fail
			n += m
			if n == len(p) {
				return n, nil
			}
			s.changed.Broadcast()
			continue
		}
		s.changed.Wait()
	}
}

// closeWriter ends the writing; mu is held.
func (s *stream) closeWriter() {
	s.ended = true
	s.writeBy.stop()
	s.changed.Broadcast()
}

// closeReader ends the reading; mu is held.
func (s *stream) closeReader() {
	s.gone = true
	s.buf = bytes.Buffer{} // no reader is left
	s.readBy.stop()
	s.changed.Broadcast()
}

func (s *stream) setDeadline(d *deadline, t time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.stop()
	d.passed = false
	if t.IsZero() || (d == &s.readBy && s.gone) || (d == &s.writeBy && s.ended) {
		return
	}
	wait := time.Until(t)
	if wait <= 0 {
		d.passed = true
		s.changed.Broadcast()
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(wait, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if d.timer == timer { // else another deadline was set while this one fired
			d.passed = true
			s.changed.Broadcast()
		}
	})
	d.timer = timer
}

func (d *deadline) stop() {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
}

// Listener hands connections from [Listener.Dial] to Accept. It is safe for concurrent use.
type Listener struct {
	conns  chan *Conn
	closed chan struct{}
	once   sync.Once
}

var _ net.Listener = (*Listener)(nil)

// Listen returns a new Listener.
func Listen() *Listener {
	return &Listener{conns: make(chan *Conn), closed: make(chan struct{})}
}

// Accept implements [net.Listener].
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, opError("accept", net.ErrClosed)
	}
}

// Close implements [net.Listener]. Connections stay open. Closing again does nothing.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements [net.Listener].
func (l *Listener) Addr() net.Addr { return addr{} }

// Dial connects to the listener once it accepts. After Close it fails with an error that wraps
// syscall.ECONNREFUSED.
func (l *Listener) Dial(ctx context.Context) (net.Conn, error) {
	client, server := Pipe()
	select {
	case l.conns <- server:
		return client, nil
	case <-l.closed:
		return nil, opError("dial", syscall.ECONNREFUSED)
	case <-ctx.Done():
		return nil, opError("dial", context.Cause(ctx))
	}
}

// DialContext is [Listener.Dial] in the form that http.Transport wants. Network and address are
// ignored: a listener has one address.
func (l *Listener) DialContext(ctx context.Context, _, _ string) (net.Conn, error) {
	return l.Dial(ctx)
}

func opError(op string, err error) error {
	return &net.OpError{Op: op, Net: addr{}.Network(), Addr: addr{}, Err: err}
}

// addr is the address of everything.
type addr struct{}

func (addr) Network() string { return "mem" }
func (addr) String() string  { return "mem" }
