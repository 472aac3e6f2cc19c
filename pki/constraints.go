package pki

import (
	"crypto/x509"
	"crypto/x509/pkix"
	encasn1 "encoding/asn1"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

const maxPermitted = 100 // names in one list of constraints

func oidNameConstraints() encasn1.ObjectIdentifier { return encasn1.ObjectIdentifier{2, 5, 29, 30} }
func oidAuthorityKeyID() encasn1.ObjectIdentifier  { return encasn1.ObjectIdentifier{2, 5, 29, 35} }

// constrain puts the permitted names into tmpl.
func (o *CertificateOptions) constrain(tmpl *x509.Certificate) error {
	if len(o.PermittedTrustDomains) > maxPermitted || len(o.PermittedDNSDomains) > maxPermitted {
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
	for _, name := range o.PermittedDNSDomains {
		if err := checkDNSName(name); err != nil {
			return fmt.Errorf("permit: %w", err)
		}
		if strings.HasPrefix(name, "*") {
			return fmt.Errorf("permit %q: a domain covers what is below it, without a wildcard", name)
		}
		tmpl.PermittedDNSDomains = append(tmpl.PermittedDNSDomains, name)
	}
	// of all kinds
	tmpl.PermittedDNSDomainsCritical = len(tmpl.PermittedURIDomains) > 0 || len(tmpl.PermittedDNSDomains) > 0
	return nil
}

// checkPermitted reports whether the name constraints of ca allow the names of a certificate below it. It answers as
// crypto/x509 does, so that we sign nothing that a verifier would refuse.
func checkPermitted(ca *x509.Certificate, sans []SAN) error {
	if !slices.ContainsFunc(ca.Extensions, func(e pkix.Extension) bool { return e.Id.Equal(oidNameConstraints()) }) {
		return nil
	}
	for _, s := range sans {
		var allowed bool
		switch s.Type {
		case DNS:
			name := strings.ToLower(s.Value)
			allowed = inDomains(ca.PermittedDNSDomains, ca.ExcludedDNSDomains, name) &&
				!coversExcluded(ca.ExcludedDNSDomains, name)
		case URI:
			host, ok := constrainedHost(s.Value)
			allowed = ok && inDomains(ca.PermittedURIDomains, ca.ExcludedURIDomains, host)
		case IP:
			ip := net.IP(s.Value)
			allowed = (len(ca.PermittedIPRanges) == 0 || inRanges(ca.PermittedIPRanges, ip)) &&
				!inRanges(ca.ExcludedIPRanges, ip)
		}
		if !allowed {
			return fmt.Errorf("%w: the name constraints of the issuer %.300q do not permit %.300s", errSAN,
				ca.Subject, s)
		}
	}
	return nil
}

// constrainedHost returns the host of a URI, if name constraints can be compared with it.
func constrainedHost(uri string) (host string, ok bool) {
	u, err := url.Parse(uri)
	if err != nil {
		return "", false
	}
	host = strings.ToLower(u.Host)
	if strings.HasSuffix(host, "]") {
		return "", false
	}
	if strings.Contains(host, ":") {
		if host, _, err = net.SplitHostPort(host); err != nil {
			return "", false
		}
	}
	_, err = netip.ParseAddr(host)
	return host, err != nil && host != ""
}

func inDomains(permitted, excluded []string, name string) bool {
	covers := func(domain string) bool { return inDomain(strings.ToLower(domain), name) }
	return (len(permitted) == 0 || slices.ContainsFunc(permitted, covers)) && !slices.ContainsFunc(excluded, covers)
}

// inDomain reports whether name is domain or below it. A domain with a leading dot matches only names below it, and
// an empty domain matches every name.
func inDomain(domain, name string) bool {
	rest, ok := strings.CutSuffix(name, domain)
	return ok && (rest == "" && !strings.HasPrefix(domain, ".") || domain == "" || rest != "" &&
		(domain[0] == '.' || strings.HasSuffix(rest, ".")))
}

// coversExcluded reports whether name is a wildcard that covers an excluded domain.
func coversExcluded(excluded []string, name string) bool {
	parent, wild := strings.CutPrefix(name, "*")
	return wild && slices.ContainsFunc(excluded, func(domain string) bool {
		_, rest, ok := strings.Cut(strings.ToLower(domain), ".")
		return ok && "."+rest == parent
	})
}

func inRanges(ranges []*net.IPNet, ip net.IP) bool {
	return slices.ContainsFunc(ranges, func(r *net.IPNet) bool { return len(r.IP) == len(ip) && r.Contains(ip) })
}
