package caserver_test

import (
	"net"
)

// elsewhere is a listener whose clients seem to be on another machine.
type elsewhere struct{ net.Listener }

func (e *elsewhere) Accept() (net.Conn, error) {
	c, err := e.Listener.Accept()
	return &farConn{c}, err
}

type farConn struct{ net.Conn }

func (c *farConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 5} }
