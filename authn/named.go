package authn

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/svidkit/svidkit/internal/certs/certchain"
	"github.com/svidkit/svidkit/spiffe"
)

// NamedCertificate proves a caller by a client certificate that need not be an X.509-SVID: a certificate of Athenz,
// whose common name is the principal, or of Linkerd, which has a DNS name. The method of the Caller is
// "named-certificate", and its ID is zero.
//
// The chain is verified at every call, for a client, with only the bundle of td as roots. Then name returns the Name
// of the Caller, or why it refuses the leaf. It decides which names to admit, and must not keep the leaf. The CA of
// td must vouch for the names that name reads: the CA of a SPIFFE trust domain may sign any common name.
//
// The TLS server must ask for the certificate. The error wraps [ErrNoCredential] if there is no certificate and
// [ErrRefused] if it is not good; without a bundle it wraps none of them. The error of NamedCertificate itself says
// which argument is missing.
func NamedCertificate(td spiffe.TrustDomain, bundles spiffe.BundleSource,
	name func(leaf *x509.Certificate) (string, error)) (Authenticator, error) {
	if td.IsZero() || bundles == nil || name == nil {
		return nil, errors.New("authn: named certificate: the trust domain, the source of its bundle or the " +
			"function for names is missing")
	}
	return Func(func(r *http.Request) (*Caller, error) {
		if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
			return nil, fmt.Errorf("authn: named certificate: %w", ErrNoCredential)
		}
		chain := r.TLS.PeerCertificates
		b, err := bundles.Bundle(td)
		if err != nil {
			return nil, fmt.Errorf("authn: named certificate: %w", err)
		}
		if b == nil || b.TrustDomain() != td || len(slices.Collect(b.X509Authorities())) == 0 {
			return nil, fmt.Errorf("authn: named certificate: the source has no bundle of %q with an authority", td)
		}
		caller, err := named(chain, b, name)
		if err != nil {
			return nil, fmt.Errorf("authn: named certificate: %w: %w", ErrRefused, err)
		}
		return caller, nil
	}), nil
}

// named verifies the chain with the bundle, and returns the proven caller.
func named(chain []*x509.Certificate, b *spiffe.Bundle,
	name func(leaf *x509.Certificate) (string, error)) (*Caller, error) {
	if err := certchain.CheckSize(chain); err != nil {
		return nil, err
	}
	leaf := chain[0]
	if leaf.IsCA {
		return nil, errors.New("the leaf is the certificate of a CA")
	}
	path, err := certchain.Path(chain, b.CertPool(), certchain.Usages(int(spiffe.ClientRole)), time.Now(),
		spiffe.Algorithms{}.Check)
	if err != nil {
		return nil, err
	}
	proven, err := name(leaf)
	if err == nil && proven == "" {
		err = errors.New("the leaf has no name")
	}
	if err != nil {
		return nil, err
	}
	return &Caller{
		Name: proven, Method: "named-certificate", NotAfter: certchain.End(path), DNSNames: validNames(leaf.DNSNames),
		Certificate: leaf,
	}, nil
}
