package pki

import (
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

const maxPermitted = 100 // trust domains

func oidNameConstraints() encasn1.ObjectIdentifier { return encasn1.ObjectIdentifier{2, 5, 29, 30} }
func oidAuthorityKeyID() encasn1.ObjectIdentifier  { return encasn1.ObjectIdentifier{2, 5, 29, 35} }

// constrain puts the permitted trust domains into tmpl.
func (o *CertificateOptions) constrain(tmpl *x509.Certificate) error {
	if len(o.PermittedTrustDomains) > maxPermitted {
		return fmt.Errorf("more than %d permitted names: %w", maxPermitted, spiffe.ErrTooLarge)
	}
	for n, td := range o.PermittedTrustDomains {
		host := td.String()
		if td.IsZero() {
			return fmt.Errorf("permitted trust domain %d is empty", n+1)
		}
		if err := checkReadable(td); err != nil {
			return fmt.Errorf("permit %s: %w", td, err)
		}
		if _, err := netip.ParseAddr(host); err == nil {
			return fmt.Errorf("permit %s: name constraints cannot express a trust domain that "+
				"looks like an IP address", td)
		}
		for _, other := range o.PermittedTrustDomains[:n] {
			a, b := host, other.String()
			if a == b || strings.HasSuffix(a, "."+b) || strings.HasSuffix(b, "."+a) {
				return fmt.Errorf("permit %s and %s: name constraints cannot tell a trust domain from one "+
					"below it, use a CA for each", b, a)
			}
		}
		tmpl.PermittedURIDomains = append(tmpl.PermittedURIDomains, host)
		tmpl.ExcludedURIDomains = append(tmpl.ExcludedURIDomains, "."+host)
	}
	tmpl.PermittedDNSDomainsCritical = len(tmpl.PermittedURIDomains) > 0 // of all kinds
	return nil
}

// checkPermitted reports whether a verifier accepts cert below a chain of CAs, if one of them has name constraints.
func checkPermitted(cert *x509.Certificate, chain []*x509.Certificate) error {
	now, constrained := cert.NotBefore, false
	for _, c := range chain {
		if c.NotBefore.After(now) { // certificates may begin before their CA's
			now = c.NotBefore
		}
		constrained = constrained || slices.ContainsFunc(c.Extensions, func(e pkix.Extension) bool {
			return e.Id.Equal(oidNameConstraints())
		})
	}
	if !constrained {
		return nil
	}
	if _, err := findPaths(cert, chain, chain[len(chain)-1:], now); err != nil {
		return fmt.Errorf("%w: the name constraints of the issuer: %w", errSAN, err)
	}
	return nil
}
