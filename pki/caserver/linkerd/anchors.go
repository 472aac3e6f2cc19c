package linkerd

import (
	"crypto/x509"
	"errors"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
)

// anchors returns the current trust anchors, or nil if there are none.
func (s *Server) anchors() *spiffe.Bundle {
	if b := s.opts.Signer.Bundle(); b != nil {
		for range b.X509Authorities() {
			return b
		}
	}
	return nil
}

// inTime reports whether an anchor is valid now.
func inTime(anchors *spiffe.Bundle) bool {
	for c := range anchors.X509Authorities() {
		if certchain.InTime(c, certchain.Now()) == nil {
			return true
		}
	}
	return false
}

// above returns the certificates above the leaf of a chain that leads to the anchors now, the direct issuer first. It
// verifies the chain as proxies do, for servers.
func above(chain []*x509.Certificate, anchors *spiffe.Bundle) ([]*x509.Certificate, error) {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	paths, err := chain[0].Verify(x509.VerifyOptions{Roots: anchors.CertPool(), Intermediates: between,
		CurrentTime: certchain.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	if err != nil {
		return nil, err
	}
	for _, p := range paths {
		switch {
		case len(p) < 2: // the leaf is a trust anchor
		case len(chain) == 1:
			return p[1:2], nil
		case p[1].Equal(chain[1]):
			return chain[1:], nil
		}
	}
	return nil, errors.New("the leaf is a trust anchor itself, or is not signed by what follows it in the chain")
}
