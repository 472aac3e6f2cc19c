package memconn

import (
	"net"
	"sync"
	"sync/atomic"
)

// Counting is a listener, of any network, that counts its connections that are open.
type Counting struct {
	net.Listener
	Open *atomic.Int64
}

// Accept implements [net.Listener].
func (l Counting) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.Open.Add(1)
	return &counted{Conn: c, closed: sync.OnceFunc(func() { l.Open.Add(-1) })}, nil
}

type counted struct {
	net.Conn
	closed func()
}

func (c *counted) Close() error {
	c.closed()
	return c.Conn.Close()
}
