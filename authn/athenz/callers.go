package athenz

import (
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/spiffe"
)

// ClientCertificate proves a caller by the common name of its client certificate, which must chain to the roots of
// td. The common name is the principal of a service, such as k8s.admin.k8s-node, or the name of ZTS, such as
// zts.example.cloud. Only the given names, at least one, are admitted; a role certificate proves no service. The Name
// of the Caller is the common name in lower case. Otherwise it behaves like [authn.NamedCertificate].
func ClientCertificate(td spiffe.TrustDomain, bundles spiffe.BundleSource,
	names ...string) (authn.Authenticator, error) {
	for _, name := range names {
		if name == "" || name != strings.ToLower(name) || strings.Contains(name, ":") {
			return nil, fmt.Errorf("athenz: client certificate: the name %.100q is not the common name of a "+
				"service in lower case", name)
		}
	}
	if len(names) == 0 {
		return nil, errors.New("athenz: client certificate: no names are let in: give those of the callers")
	}
	names = slices.Clone(names)
	return authn.NamedCertificate(td, bundles, func(leaf *x509.Certificate) (string, error) {
		name := strings.ToLower(leaf.Subject.CommonName)
		if !slices.Contains(names, name) {
			return "", fmt.Errorf("the common name %.200q is not one that is let in", leaf.Subject.CommonName)
		}
		return name, nil
	})
}
