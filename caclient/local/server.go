package local

import (
	"context"
	"fmt"
	"net"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// NewServer returns a CA for the certificate of one server, usually the server in front of the authority: see
// caserver.Options. All its certificates have the ID and the names, which are DNS names and IP addresses. With a
// registration authority, requests must name them too: set them in secretcache.Config.Names.
func NewServer(authority ca.Signer, id spiffe.ID, names ...pki.SAN) (*CA, error) {
	c, err := New(authority, id)
	if err != nil {
		return nil, err
	}
	c.server = &ca.Request{Method: "self"}
	for _, name := range names {
		switch name.Type {
		case pki.DNS:
			c.server.DNSNames = append(c.server.DNSNames, name.Value)
		case pki.IP:
			c.server.IPs = append(c.server.IPs, net.IP(name.Value))
		default:
			return nil, fmt.Errorf("local: %v is neither a DNS name nor an IP address", name)
		}
	}
	return c, nil
}

// learn requests a certificate for a throwaway key if the authority has no roots yet: a registration authority may
// learn its roots from certificates.
func (c *CA) learn(ctx context.Context) error {
	if b := c.authority.Bundle(); b != nil && len(b.MarshalPEM()) > 0 {
		return nil
	}
	id, err := c.decide(ctx, nil)
	if err != nil {
		return err
	}
	key, err := pki.NewKey("ecdsa-p256")
	if err != nil {
		return err
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: []pki.SAN{pki.IDSAN(id)}})
	if err != nil {
		return err
	}
	_, err = c.Sign(ctx, csr, 0)
	return err
}
