package conns

import (
	"context"
	"errors"
	"net"
	"sync"
)

// Dialed are the connections of a client, so that its end can be theirs: net/http keeps those of a Transport that are idle, and
// what it has begun to dial for a request that was given up. The zero value has none. It is safe for concurrent use.
type Dialed struct {
	mu     sync.Mutex
	closes int
	open   map[*dialed]struct{}
}

// Dial returns dial with its connections in d.
func (d *Dialed) Dial(dial func(ctx context.Context, network, addr string) (net.Conn, error)) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		d.mu.Lock()
		closes := d.closes
		d.mu.Unlock()
		raw, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		c := &dialed{Conn: raw, of: d}
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.closes != closes {
			_ = raw.Close()
			return nil, &net.OpError{Op: "dial", Net: network, Addr: raw.RemoteAddr(), Err: net.ErrClosed}
		}
		if d.open == nil {
			d.open = map[*dialed]struct{}{}
		}
		d.open[c] = struct{}{}
		return c, nil
	}
}

// Close closes the connections that there are, and those that are being made now. Later ones are not affected.
func (d *Dialed) Close() {
	d.mu.Lock()
	open := d.open
	d.open = nil
	d.closes++
	d.mu.Unlock()
	for c := range open {
		_ = c.Conn.Close() // below TLS, which would wait to say that it ends
	}
}

// dialed is a connection that is in the set until it is closed.
type dialed struct {
	net.Conn
	of *Dialed
}

func (c *dialed) Close() error {
	c.of.mu.Lock()
	delete(c.of.open, c)
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// CloseWrite says that nothing more follows, if the connection can.
func (c *dialed) CloseWrite() error {
	if h, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return errors.ErrUnsupported
}
