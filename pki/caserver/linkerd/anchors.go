package linkerd

import (
	"crypto/x509"
	"errors"
	"fmt"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// anchors are the trust anchors of a moment. They never change.
type anchors struct {
	bundle *spiffe.Bundle
	certs  []*x509.Certificate // at least one
	pool   *x509.CertPool
}

// currentAnchors returns the trust anchors, or nil if there are none.
func (s *Server) currentAnchors() *anchors {
	b := s.opts.Signer.Bundle()
	if b == nil {
		return nil
	}
	if a := s.anchors.Load(); a != nil && a.bundle == b {
		return a
	}
	a := &anchors{bundle: b, pool: x509.NewCertPool()}
	for c := range b.X509Authorities() {
		a.certs = append(a.certs, c)
		a.pool.AddCert(c)
	}
	if len(a.certs) == 0 {
		return nil
	}
	s.anchors.Store(a)
	return a
}

// verifyIssuer reports whether what signs can lead to a good certificate now, as far as that is known
// before it has signed.
func (a *anchors) verifyIssuer(issuer func() []*x509.Certificate) error {
	now := time.Now()
	if issuer != nil {
		if chain := issuer(); len(chain) > 0 {
			if !chain[0].BasicConstraintsValid || !chain[0].IsCA {
				return errors.New("it is not the certificate of a CA")
			}
			_, err := chain[0].Verify(x509.VerifyOptions{Roots: a.pool, Intermediates: pool(chain[1:]), CurrentTime: now, KeyUsages: purpose()})
			return err
		}
	}
	for _, c := range a.certs {
		if !now.Before(c.NotBefore) && !now.After(c.NotAfter) {
			return nil
		}
	}
	return fmt.Errorf("none of the %d trust anchors is valid at %s", len(a.certs), now.UTC().Format(time.RFC3339))
}

// purpose is what proxies verify for.
func purpose() []x509.ExtKeyUsage { return []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }

// verify verifies a chain against the anchors at the present moment and returns what stands above
// the leaf, the direct issuer first.
func (a *anchors) verify(chain []*x509.Certificate) ([]*x509.Certificate, error) {
	above := chain[1:]
	paths, err := chain[0].Verify(x509.VerifyOptions{Roots: a.pool, Intermediates: pool(above), KeyUsages: purpose()})
	if err != nil {
		return nil, err
	}
	for _, p := range paths {
		switch {
		case len(p) < 2: // the leaf is a trust anchor
		case len(above) == 0:
			return p[1:2], nil
		case p[1].Equal(above[0]):
			return above, nil
		}
	}
	return nil, errors.New("the leaf is a trust anchor itself, or is not signed by what follows it in the chain")
}

func pool(certs []*x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	for _, c := range certs {
		p.AddCert(c)
	}
	return p
}
