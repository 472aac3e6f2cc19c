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

// Origins of variables.
const (
	Athenz  = "Athenz"
	here    = "this program"
	cluster = "cluster configuration"
)

// Variables that the agent of a node and the provider share. Both need the same values.
var (
	Provider = Var("PROVIDER_SERVICE", "", "name of the provider's service, such as k8s.admin.athenz-callback; "+
		"required", Athenz,
		check("set it to the name of a service with its domain in lower case, such as k8s.admin.athenz-callback",
			func(s string) bool {
				_, err := athenzname.ParseService(s)
				return err == nil
			}))
	Suffix      = Var("DNS_SUFFIX", "svc.cluster.local", "suffix of the provider's DNS names", Athenz, IsDNSName)
	AdminDomain = Var("ADMIN_DOMAIN", "", "domain of the system namespaces: kube-system is ADMIN_DOMAIN.kube-system",
		cluster,
		check("set it to a domain in lower case, such as k8s.admin", func(s string) bool {
			_, err := athenzname.Mapping{AdminDomain: s}.Domain("kube-system")
			return err == nil
		}))
	SystemNamespaces = List(Var("SYSTEM_NAMESPACES", "",
		"system namespaces beside those that begin with kube-, with commas between", cluster, AreNamespaces))
	TrustDomain = Var("SPIFFE_TRUST_DOMAIN", "", "trust domain of SPIFFE IDs with a namespace, "+
		"spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.SERVICE; not set: spiffe://DOMAIN/sa/SERVICE", here,
		check("set it to the name of a trust domain, such as athenz.io", func(s string) bool {
			_, err := spiffe.ParseTrustDomain(s)
			return err == nil
		}))
	HealthAddr = Var("HEALTH_ADDR", "127.0.0.1:9080", "address of /ready, /live and /metrics, or off", here, IsAddr)
	LogLevel   = Var("LOG_LEVEL", "info", "least level of what is logged: debug, info, warn, error", Athenz,
		OneOf("debug", "info", "warn", "error"))
)

// Mapping returns the mapping of namespaces to Athenz domains, from ADMIN_DOMAIN and SYSTEM_NAMESPACES.
func (s Settings) Mapping() athenzname.Mapping {
	return athenzname.Mapping{AdminDomain: s.Text("ADMIN_DOMAIN"), SystemNamespaces: s.List("SYSTEM_NAMESPACES")}
}

// Nameless is the trust domain of the roots if no certificate has a SPIFFE ID.
var Nameless = spiffe.MustParseTrustDomain("athenz.io")

// TrustDomain returns SPIFFE_TRUST_DOMAIN, and whether SPIFFE IDs have a namespace; without it the trust domain is
// [Nameless].
func (s Settings) TrustDomain() (td spiffe.TrustDomain, named bool) {
	if text := s.Text("SPIFFE_TRUST_DOMAIN"); text != "" {
		return spiffe.MustParseTrustDomain(text), true // already checked
	}
	return Nameless, false
}

// Pair reads CERT_FILE and KEY_FILE. It fails if the certificate has expired.
func (s Settings) Pair() (*pki.Credential, error) {
	certs, err1 := os.ReadFile(s.Text("CERT_FILE"))
	key, err2 := os.ReadFile(s.Text("KEY_FILE"))
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

// Roots returns an error for each variable that does not name a file of CA certificates.
func (s Settings) Roots(names ...string) error {
	var bad []error
	for _, name := range names {
		if _, err := ReadBundle(Nameless, s.Text(name)); err != nil {
			bad = append(bad, s.Reject(name, fmt.Errorf("%w; set it to a file of CA certificates in PEM", err)))
		}
	}
	return errors.Join(bad...)
}

// ReadBundle reads CA certificates in PEM as the bundle of a trust domain.
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

// AreCommonNames checks for Athenz common names separated by commas.
var AreCommonNames = check("set it to common names in lower case, such as k8s.admin.k8s-node",
	all(func(s string) bool {
		return s != "" && s == strings.ToLower(s) && !strings.ContainsAny(s, ": ")
	}))
