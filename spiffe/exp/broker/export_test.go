package broker

import (
	"context"
	"net"
)

// DialBy has a Client without connections reach its server by another way.
func (c *Client) DialBy(dial func(ctx context.Context, network, address string) (net.Conn, error)) {
	c.dial = c.open.Dial(dial)
}
