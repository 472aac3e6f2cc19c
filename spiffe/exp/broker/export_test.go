package broker

import (
	"context"
	"net"

	"github.com/svidkit/svidkit/spiffe/internal/workloadwire"
)

// ParseAddress parses an address as NewClient does.
func ParseAddress(s string) (workloadwire.Address, error) { return parseAddress(s) }

// DialBy has a Client without connections reach its server by another way.
func (c *Client) DialBy(dial func(ctx context.Context, network, address string) (net.Conn, error)) {
	c.dial = c.open.Dial(dial)
}
