package linkerd

import (
	"crypto/x509"
	"errors"
	"time"

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

// verifyIssuer reports whether the issuer chains to the anchors now, as far as that is known before signing.
func (s *Server) verifyIssuer(anchors *spiffe.Bundle) error {
	if s.opts.Issuer != nil {
		if chain := s.opts.Issuer(); len(chain) > 0 {
			if !chain[0].BasicConstraintsValid || !chain[0].IsCA {
				return errors.New("it is not the certificate of a CA")
			}
			_, err := verify(chain, anchors)
			return err
		}
	}
	now := time.Now()
	for c := range anchors.X509Authorities() {
		if !now.Before(c.NotBefore) && !now.After(c.NotAfter) {
			return nil
		}
	}
	return errors.New("no trust anchor is valid now")
}

// above returns the certificates above the leaf of a chain that leads to the anchors now, the direct issuer first.
func above(chain []*x509.Certificate, anchors *spiffe.Bundle) ([]*x509.Certificate, error) {
	paths, err := verify(chain, anchors)
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

// verify verifies a chain as proxies do, for servers.
func verify(chain []*x509.Certificate, anchors *spiffe.Bundle) ([][]*x509.Certificate, error) {
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	return chain[0].Verify(x509.VerifyOptions{Roots: anchors.CertPool(), Intermediates: between,
		CurrentTime: certchain.Now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
}
