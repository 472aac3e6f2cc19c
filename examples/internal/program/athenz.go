package program

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/svidkit/svidkit/authn/athenz/athenzname"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

// The variables that the agent of a node and the provider have in common, which have to be the same at both.
var (
	Provider = Variable{
		"PROVIDER_SERVICE", "", "name of the provider's service, such as k8s.admin.athenz-callback; required", "Athenz", func(s string) error {
			if _, err := athenzname.ParseService(s); err != nil {
				return errors.New("set it to the name of a service with its domain in lower case, such as k8s.admin.athenz-callback")
			}
			return nil
		},
	}
	Suffix      = Variable{"DNS_SUFFIX", "svc.cluster.local", "suffix of the provider's DNS names", "Athenz", IsDNSName}
	AdminDomain = Variable{
		"ADMIN_DOMAIN", "", "domain of the system namespaces: kube-system is ADMIN_DOMAIN.kube-system", "cluster configuration", func(s string) error {
			if _, err := (athenzname.Mapping{AdminDomain: s}).Domain("kube-system"); err != nil {
				return errors.New("set it to a domain in lower case, such as k8s.admin")
			}
			return nil
		},
	}
	SystemNamespaces = Variable{
		"SYSTEM_NAMESPACES", "", "system namespaces beside those that begin with kube-, with commas between", "cluster configuration", AreNamespaces,
	}
	TrustDomain = Variable{
		"SPIFFE_TRUST_DOMAIN", "", "trust domain of SPIFFE IDs with a namespace, spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.SERVICE; " +
			"not set: spiffe://DOMAIN/sa/SERVICE", "this program", func(s string) error {
			if _, err := spiffe.ParseTrustDomain(s); err != nil {
				return errors.New("set it to the name of a trust domain, such as athenz.io")
			}
			return nil
		},
	}
	HealthAddr = Variable{"HEALTH_ADDR", "127.0.0.1:9080", "address of /ready, /live and /metrics, or off", "this program", IsAddr}
	LogLevel   = Variable{"LOG_LEVEL", "info", "least level of what is logged: debug, info, warn, error", "Athenz", OneOf("debug", "info", "warn", "error")}
)

// Mapping returns how namespaces are domains of Athenz, by ADMIN_DOMAIN and SYSTEM_NAMESPACES.
func (s Settings) Mapping() athenzname.Mapping {
	return athenzname.Mapping{AdminDomain: s["ADMIN_DOMAIN"], SystemNamespaces: s.List("SYSTEM_NAMESPACES")}
}

// Nameless is the trust domain of the roots where no certificate has a SPIFFE ID of it.
var Nameless = spiffe.MustParseTrustDomain("athenz.io")

// TrustDomain returns SPIFFE_TRUST_DOMAIN, and whether SPIFFE IDs have a namespace; if not, it is [Nameless].
func (s Settings) TrustDomain() (td spiffe.TrustDomain, named bool) {
	if text := s["SPIFFE_TRUST_DOMAIN"]; text != "" {
		return spiffe.MustParseTrustDomain(text), true // it was checked
	}
	return Nameless, false
}

// Pair reads CERT_FILE and KEY_FILE, whose certificate must not have expired.
func (s Settings) Pair() (*pki.Credential, error) {
	certs, err1 := os.ReadFile(s["CERT_FILE"])
	key, err2 := os.ReadFile(s["KEY_FILE"])
	c, err := pki.ParseCredentialPEM(certs, key)
	switch err = cmp.Or(err1, err2, err); {
	case err != nil:
		err = fmt.Errorf("%w; set it to a file with certificates in PEM, and KEY_FILE to one with their key", err)
	case !time.Now().Before(c.NotAfter()):
		err = errors.New("the certificate there has expired")
	default:
		return c, nil
	}
	return nil, s.Reject("CERT_FILE", err)
}

// Roots returns an error for each of the variables that names no file of CA certificates.
func (s Settings) Roots(names ...string) error {
	var bad []error
	for _, name := range names {
		if _, err := ReadBundle(Nameless, s[name]); err != nil {
			bad = append(bad, s.Reject(name, fmt.Errorf("%w; set it to a file of CA certificates in PEM", err)))
		}
	}
	return errors.Join(bad...)
}

// ReadBundle returns the CA certificates in a file, in PEM, as the bundle of a trust domain.
func ReadBundle(td spiffe.TrustDomain, file string) (*spiffe.Bundle, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	b, err := spiffe.ParseBundlePEM(td, data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return b, nil
}

// AreCommonNames is a check for common names of Athenz with commas between.
func AreCommonNames(s string) error {
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.TrimSpace(name); name == "" || name != strings.ToLower(name) || strings.ContainsAny(name, ": ") {
			return errors.New("set it to a common name in lower case, such as k8s.admin.k8s-node")
		}
	}
	return nil
}
