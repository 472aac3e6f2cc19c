// Package tlsalert makes TLS client connections on which a refused client learns the reason. With TLS 1.3 a server
// checks the client's certificate after the client's handshake is done. A client that then writes may find the
// connection closed by its write or, if it reads and writes concurrently as net/http does, by its reader, before it
// has read the server's alert.
package tlsalert

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Client performs a client handshake over below, which it closes on an error. If the server then sends an alert, a
// failing write returns that alert. first, from 0 to 2, is the number of writes with which the client always begins,
// such as an HTTP request. With ALPN h2 a nonzero first means 2: the preface, and a request. A reader that finds the
// alert waits for these writes, and a quarter of a second for another.
func Client(ctx context.Context, below net.Conn, config *tls.Config, first int32) (*tls.Conn, error) {
	c := &conn{Conn: below, first: first, ended: make(chan struct{}), mu: make(chan struct{}, 1)}
	c.over = sync.OnceFunc(func() { close(c.ended) })
	c.tls = tls.Client(c, config)
	if err := c.tls.HandshakeContext(ctx); err != nil {
		_ = below.Close()
		return nil, err
	}
	if first > 0 && c.tls.ConnectionState().NegotiatedProtocol == "h2" {
		c.first = 2
	}
	c.ready.Store(true)
	return c.tls, nil
}

// Below returns the connection under c, whether [Client] made c or not.
func Below(c *tls.Conn) net.Conn {
	if a, ok := c.NetConn().(*conn); ok {
		return a.Conn
	}
	return c.NetConn()
}

const (
	sizeOfAlert = 5 + 2 + 1 + 16         // of TLS 1.3: header, alert, type, and the tag of an AEAD
	firstWrites = 5 * time.Second        // for the client's first writes, and all others
	quiet       = 250 * time.Millisecond // in which a client with an incomplete request writes again
	stuck       = time.Second            // how long to wait for a Write: crypto/tls answers a damaged record
)

type conn struct {
	net.Conn
	tls    *tls.Conn
	first  int32
	ready  atomic.Bool  // the handshake is done
	writes atomic.Int32 // since the handshake
	over   func()       // ends the wait
	ended  chan struct{}

	mu    chan struct{} // has an element during a read of Conn; a mutex would stop a synctest bubble's time
	got   int           // bytes since the handshake
	like  bool          // the first bytes look like an alert
	ahead []byte        // read during a Write
	err   error         // follows ahead
}

// Read implements [net.Conn].
func (c *conn) Read(p []byte) (n int, err error) {
	if !c.ready.Load() {
		return c.Conn.Read(p)
	}
	c.mu <- struct{}{}
	may := false
	if n = copy(p, c.ahead); n > 0 {
		c.ahead = c.ahead[n:]
	} else if err = c.err; err == nil {
		n, err = c.Conn.Read(p)
		may = c.note(p[:n])
	}
	<-c.mu
	if may && c.first > 0 {
		c.wait()
	}
	return n, err
}

// note counts the bytes just read, and reports whether they are the first and may be an alert.
func (c *conn) note(p []byte) bool {
	may := c.got == 0 && len(p) == sizeOfAlert && p[0] == 23 && int(p[4]) == sizeOfAlert-5
	c.like = c.like || may
	c.got += len(p)
	return may
}

// wait waits until no more writes are expected, or a write fails. net/http closes the connection once the reader has
// the alert; a request whose body is still being written would then only report that the connection is closed.
func (c *conn) wait() {
	last := int32(-1)
	for end := time.Now().Add(firstWrites); time.Now().Before(end); {
		writes := c.writes.Load()
		if writes >= c.first && writes == last {
			return
		}
		last = writes
		select {
		case <-c.ended:
			return
		case <-time.After(quiet):
		}
	}
}

// Write implements [net.Conn].
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if !c.ready.Load() {
		return n, err
	}
	c.writes.Add(1)
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, net.ErrClosed) {
		c.over()
		if alert := c.alert(); alert != nil {
			err = alert
		}
	}
	return n, err
}

// alert returns the alert of an ended connection, or nil.
func (c *conn) alert() error {
	found := make(chan error, 1)
	go func() {
		if c.all() {
			_, err := c.tls.Read(make([]byte, 1))
			found <- err
		}
		close(found)
	}()
	select {
	case err := <-found:
		if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "remote error" {
			return err
		}
	case <-time.After(stuck):
	}
	return nil
}

// all reports whether the possible alert is all that has arrived.
func (c *conn) all() bool {
	c.mu <- struct{}{}
	defer func() { <-c.mu }()
	if c.got <= sizeOfAlert && c.err == nil {
		more := make([]byte, sizeOfAlert+1-c.got)
		n, err := c.Conn.Read(more)
		c.note(more[:n])
		c.ahead, c.err = append(c.ahead, more[:n]...), err
	}
	return c.like && c.got == sizeOfAlert
}

// Close implements [net.Conn].
func (c *conn) Close() error {
	c.over()
	return c.Conn.Close()
}

// Suites returns the cipher suites of TLS 1.2 that are forward-secret and AEAD. TLS 1.3 has no others.
func Suites() []uint16 {
	return []uint16{
		tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
		tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
		tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
		tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
		tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
	}
}
