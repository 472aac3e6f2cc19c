package ra

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/spiffe"
)

// maxAnswer is the longest answer in bytes of PEM: a chain of 64 KiB in DER, and some text.
const maxAnswer = 128 << 10

// accept checks a signer's answer, and returns the chain to present and the leaf's issuer. If roots is nil, it learns
// them from the answer.
func (a *RA) accept(answer []byte, r *ca.Request, roots *spiffe.Bundle, now time.Time) (chain []*x509.Certificate,
	issuer *x509.Certificate, err error) {
	chain, err = parseAnswer(answer)
	if err != nil {
		return nil, nil, err
	}
	for i, c := range chain[1:] {
		if !c.BasicConstraintsValid || !c.IsCA {
			return nil, nil, fmt.Errorf("certificate %d of %d is not a CA, and the leaf comes first", i+2, len(chain))
		}
	}
	if err := a.checkLeaf(chain[0], r, now); err != nil {
		return nil, nil, fmt.Errorf("leaf: %w", err)
	}
	learned := roots == nil
	if learned {
		if len(chain) < 2 {
			return nil, nil, errors.New("the chain ends with the leaf, so that there is no root to learn: configure " +
				"the roots of the signer")
		}
		if roots, err = a.bundleOf(chain[len(chain)-1:]); err != nil {
			return nil, nil, err
		}
	}
	expected := pki.ExpectID(r.ID)
	if r.Profile == ca.DNSOnly {
		expected = pki.ExpectLeaf(a.cfg.TrustDomain, "names", nil, func(*x509.Certificate) error { return nil })
	}
	path, err := expected.Verify(chain, roots, spiffe.BothRoles, now)
	if err != nil {
		return nil, nil, err
	}
	if learned {
		if err := a.learn(chain[len(chain)-1], chain[0].NotAfter); err != nil {
			return nil, nil, err
		}
	}
	return tidy(chain, roots), path[1], nil
}

// parseAnswer reads the certificates of an answer. Like Kubernetes, it allows text around them.
func parseAnswer(answer []byte) ([]*x509.Certificate, error) {
	if len(answer) > maxAnswer {
		return nil, fmt.Errorf("%d bytes, the limit is %d", len(answer), maxAnswer)
	}
	const end = "-----END CERTIFICATE-----"
	i := bytes.LastIndex(answer, []byte(end))
	if i < 0 {
		return nil, errors.New("there is no certificate in PEM")
	}
	chain, err := pki.ParseCertificatesPEM(answer[:i+len(end)])
	if err == nil {
		err = certchain.CheckSize(chain)
	}
	return chain, err
}

// checkLeaf compares a certificate with the request.
func (a *RA) checkLeaf(leaf *x509.Certificate, r *ca.Request, now time.Time) error {
	switch {
	case !pki.PublicKeysEqual(leaf.PublicKey, r.CSR.PublicKey()):
		return errors.New("its public key is not that of the request")
	case leaf.NotAfter.Sub(now) > a.cfg.MaxTTL+clockSkew:
		return fmt.Errorf("it is valid until %s, and the longest lifetime is %v: have the signer give less, or "+
			"allow more", leaf.NotAfter.UTC().Format(time.RFC3339), a.cfg.MaxTTL)
	}
	if server, client := certchain.Roles([]*x509.Certificate{leaf}); !server || !client {
		return errors.New("its extended key usage does not allow both servers and clients; choose a signer that " +
			"gives both")
	}
	for _, attr := range leaf.Subject.Names {
		if attr.Type.Equal(oidCommonName()) && attr.Value != "" && attr.Value != r.CSR.CommonName() {
			return fmt.Errorf("its common name is %.80q, which was not asked for", attr.Value)
		}
	}
	return sameNames(leaf, r.CSR)
}

// tidy returns the chain without the roots, which peers have, and without duplicates.
func tidy(chain []*x509.Certificate, roots *spiffe.Bundle) []*x509.Certificate {
	known := slices.Collect(roots.X509Authorities())
	return slices.DeleteFunc(certchain.Tidy(chain, chain[0].PublicKey),
		func(c *x509.Certificate) bool { return slices.ContainsFunc(known, c.Equal) })
}
