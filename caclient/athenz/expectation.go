package athenz

import (
	"crypto/x509"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// Expectation describes a certificate of the instance. Its common name is the principal, or is empty if the
// certificate has the instance's SPIFFE ID. It has only names of the instance, and URIs of the scheme athenz, which
// ZTS adds. It chains to the roots of td.
//
// Its Names belong in a signing request for the instance: DNS names, addresses and SPIFFE ID. The request's common
// name is the principal. A service that proves itself with its own key has no name with an ID.
func Expectation(i athenzname.Instance, td spiffe.TrustDomain) (pki.Expectation, error) {
	if err := i.Check(); err != nil {
		return pki.Expectation{}, err
	}
	names := names(i)
	return pki.ExpectLeaf(td, fmt.Sprintf("the Athenz service %s", i.Service), names,
		func(leaf *x509.Certificate) error {
			has, err := pki.ParseSANs(leaf.Extensions)
			if err != nil {
				return err
			}
			for k, name := range has {
				switch {
				case described(i, name):
				case !slices.Contains(names, name):
					return fmt.Errorf("the leaf has a name that was not asked for: %.300v", name)
				case slices.Contains(has[:k], name):
					return fmt.Errorf("the leaf has a name twice: %.300v", name)
				}
			}
			switch cn := leaf.Subject.CommonName; {
			case strings.EqualFold(cn, i.Service.String()):
			case cn == "" && !i.SPIFFE.IsZero() && slices.Contains(has, pki.IDSAN(i.SPIFFE)):
			default:
				return fmt.Errorf("the common name of the leaf is %.300q, want the principal %q", cn, i.Service)
			}
			return nil
		}), nil
}

// names returns the names for a signing request of the instance: its DNS names, its addresses and its SPIFFE ID. The
// request's common name is the principal.
func names(i athenzname.Instance) []pki.SAN {
	names := []pki.SAN{pki.DNSSAN(i.Service.DNSName(i.Suffix))}
	if !i.OwnsKey() {
		names = append(names, pki.DNSSAN(i.InstanceName()))
	}
	for _, ip := range i.IPs {
		names = append(names, pki.IPSAN(ip.Unmap().AsSlice()))
	}
	if !i.SPIFFE.IsZero() {
		names = append(names, pki.IDSAN(i.SPIFFE))
	}
	return names
}

// described reports whether ZTS may have put a URI of its own scheme into the certificate of i: any URI that names no
// other instance and no other principal.
func described(i athenzname.Instance, name pki.SAN) bool {
	rest, ok := strings.CutPrefix(name.Value, "athenz://")
	if name.Type != pki.URI || !ok {
		return false
	}
	switch kind, value, _ := strings.Cut(rest, "/"); kind {
	case "instanceid":
		return value == i.Provider.String()+"/"+i.ID
	case "principal":
		return strings.EqualFold(value, i.Service.String())
	}
	return true
}
