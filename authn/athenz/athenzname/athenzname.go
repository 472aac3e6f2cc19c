// Package athenzname implements the names of Athenz services: principals, the Kubernetes namespaces and service
// accounts that map to them, and the names in the certificates of their instances. Node agents, providers, and the
// clients and servers of ZTS share it:
//
//	mapping := athenzname.Mapping{AdminDomain: "k8s.admin"}
//	web, err := mapping.Service("media-sports", "frontend") // media.sports.frontend
//	…
//	instance := athenzname.Instance{Provider: provider, Service: web, ID: "web-0", Suffix: "svc.cluster.local"}
//	expectation, err := athenz.Expectation(instance, td) // of package caclient/athenz
//
// Names are lower case, as ZTS makes every name, and are compared byte for byte.
package athenzname

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// maxName is the longest principal in bytes. The limit is the one for DNS names; it also bounds a namespace.
const maxName = 253

// Service is a service of Athenz, a principal. It is comparable. The zero Service is not valid.
type Service struct {
	Domain string // such as media.sports
	Name   string // name of the service in the domain, without dots, such as frontend
}

// ParseService parses a principal, DOMAIN.NAME. The name follows the last dot. Letters must be lower case, although
// the common name of a certificate, also a principal, may contain others. The name in a role certificate, such as
// media.sports:role.reader, is not a service.
func ParseService(s string) (Service, error) {
	i := strings.LastIndexByte(s, '.')
	if i < 0 {
		return Service{}, fmt.Errorf("athenzname: service %.100q: it is not DOMAIN.NAME", s)
	}
	service := Service{s[:i], s[i+1:]}
	return service, service.Check()
}

// Check reports whether the domain and the name are valid.
func (s Service) Check() error {
	if !isDomain(s.Domain) || !isSimple(s.Name) || len(s.Domain)+len(s.Name) >= maxName {
		return fmt.Errorf("athenzname: service %.200q in domain %.200q: names consist of a-z, 0-9, _ and inner "+
			"hyphens, with dots between those of a domain, %d bytes in all at most", s.Name, s.Domain, maxName)
	}
	return nil
}

// String returns the principal, DOMAIN.NAME.
func (s Service) String() string { return s.Domain + "." + s.Name }

// ID returns the SPIFFE ID of the service, with its Athenz domain as the trust domain: spiffe://DOMAIN/sa/NAME.
func (s Service) ID() (spiffe.ID, error) {
	return s.id("spiffe://" + s.Domain + "/sa/" + s.Name)
}

// IDIn returns the SPIFFE ID of the service in a trust domain that contains several Athenz domains:
// spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.NAME. Outside Kubernetes the namespace is "default".
func (s Service) IDIn(td spiffe.TrustDomain, namespace string) (spiffe.ID, error) {
	if !isSimple(namespace) || td.IsZero() {
		return spiffe.ID{}, fmt.Errorf("athenzname: SPIFFE ID of %.300q: the trust domain is empty or the "+
			"namespace %.100q is not a name", s, namespace)
	}
	return s.id("spiffe://" + td.String() + "/ns/" + namespace + "/sa/" + s.String())
}

func (s Service) id(text string) (spiffe.ID, error) {
	if err := s.Check(); err != nil {
		return spiffe.ID{}, err
	}
	id, err := spiffe.ParseID(text)
	if err != nil {
		return spiffe.ID{}, fmt.Errorf("athenzname: SPIFFE ID of %.300q: %w", s, err)
	}
	return id, nil
}

// ServiceOfID returns the service that a SPIFFE ID of either form names. The namespace is empty for the form of
// [Service.ID].
func ServiceOfID(id spiffe.ID) (s Service, namespace string, err error) {
	parts := strings.Split(id.Path(), "/") // the first is empty
	switch {
	case len(parts) == 3 && parts[1] == "sa":
		s = Service{id.TrustDomain().String(), parts[2]}
		err = s.Check()
	case len(parts) == 5 && parts[1] == "ns" && isSimple(parts[2]) && parts[3] == "sa":
		namespace = parts[2]
		s, err = ParseService(parts[4])
	default:
		err = fmt.Errorf("athenzname: SPIFFE ID %.300q: it is neither spiffe://DOMAIN/sa/NAME nor "+
			"spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/DOMAIN.NAME", id)
	}
	if err != nil {
		return Service{}, "", err
	}
	return s, namespace, nil
}

// DNSName returns the DNS name of the service below a suffix: NAME.DASHED-DOMAIN.SUFFIX. DASHED-DOMAIN is the domain
// with hyphens for its dots.
func (s Service) DNSName(suffix string) string {
	return s.Name + "." + strings.ReplaceAll(s.Domain, ".", "-") + "." + suffix
}

// Mapping maps Kubernetes namespaces to Athenz domains: media-sports to media.sports, and foo-bar--baz to
// foo.bar-baz. Mappings with equal fields are the same.
type Mapping struct {
	// AdminDomain is the domain of the cluster's own namespaces: kube-system is ADMIN-DOMAIN.kube-system. If empty,
	// they are mapped like other namespaces.
	AdminDomain string

	// SystemNamespaces are the cluster's own namespaces, in addition to those that begin with "kube-".
	SystemNamespaces []string
}

func (m Mapping) isSystem(namespace string) bool {
	return m.AdminDomain != "" && (strings.HasPrefix(namespace, "kube-") ||
		slices.Contains(m.SystemNamespaces, namespace))
}

// Domain returns the domain of a namespace, which is an RFC 1123 label. It refuses a workload's namespace that would
// map to the domain of one of the cluster's own.
func (m Mapping) Domain(namespace string) (string, error) {
	if !isNamespace(namespace) || m.AdminDomain != "" && !isDomain(m.AdminDomain) {
		return "", fmt.Errorf("athenzname: domain of namespace %.100q: the namespace is not an RFC 1123 label, "+
			"or the AdminDomain %.100q not a domain", namespace, m.AdminDomain)
	}
	if m.isSystem(namespace) {
		return m.AdminDomain + "." + namespace, nil
	}
	domain := strings.ReplaceAll(strings.ReplaceAll(namespace, "-", "."), "..", "-")
	switch {
	case !isDomain(domain):
		return "", fmt.Errorf("athenzname: domain of namespace %q: %q is not a domain", namespace, domain)
	case m.AdminDomain != "" && strings.HasPrefix(domain, m.AdminDomain+"."):
		return "", fmt.Errorf("athenzname: domain of namespace %q: %q is below the AdminDomain, and the "+
			"namespace is not listed as a system namespace", namespace, domain)
	}
	return domain, nil
}

// Namespace returns the namespace that maps to domain.
func (m Mapping) Namespace(domain string) (string, error) {
	namespace, system := domain, false
	if m.AdminDomain != "" {
		namespace, system = strings.CutPrefix(domain, m.AdminDomain+".")
	}
	if !system {
		namespace = strings.ReplaceAll(strings.ReplaceAll(domain, "-", "--"), ".", "-")
	}
	if back, err := m.Domain(namespace); err != nil || back != domain {
		return "", fmt.Errorf("athenzname: namespace of domain %.200q: no namespace has this domain", domain)
	}
	return namespace, nil
}

// Service returns the service for a service account of a namespace. Its name is the account's name.
func (m Mapping) Service(namespace, account string) (Service, error) {
	domain, err := m.Domain(namespace)
	s := Service{domain, account}
	if err == nil {
		err = s.Check()
	}
	if err != nil {
		return Service{}, err
	}
	return s, nil
}

// Instance is one running instance of a service, such as a pod, with the names in its certificate. An Instance
// without a Provider and an ID proves itself to ZTS with its own key.
type Instance struct {
	Provider Service // the provider that vouches for it, such as k8s.admin.athenz-callback
	Service  Service
	ID       string // unique among the provider's instances of the service: the name or the UID of the pod
	Suffix   string // of the provider's DNS names, such as svc.cluster.local

	IPs []netip.Addr // addresses of the instance; may be empty

	// SPIFFE is the SPIFFE ID in the certificate, of either form; zero means none.
	SPIFFE spiffe.ID
}

// OwnsKey reports whether the service proves itself with a key of its own.
func (i Instance) OwnsKey() bool { return i.Provider == Service{} && i.ID == "" }

// Check reports whether the names are valid.
func (i Instance) Check() error {
	if err := i.Provider.Check(); err != nil && !i.OwnsKey() {
		return fmt.Errorf("provider: %w", err)
	}
	if err := i.Service.Check(); err != nil {
		return err
	}
	if !i.OwnsKey() && !isHost(i.ID) || !isHost(i.Suffix) || len(i.InstanceName()) > maxName {
		return fmt.Errorf("athenzname: instance %.100q with suffix %.100q: both have to be DNS names in lower "+
			"case, %d bytes with what is between them", i.ID, i.Suffix, maxName)
	}
	for _, ip := range i.IPs {
		if !ip.IsValid() || ip.Zone() != "" {
			return fmt.Errorf("athenzname: instance %q: an address is not valid or has a zone", i.ID)
		}
	}
	if i.SPIFFE.IsZero() {
		return nil
	}
	if s, _, err := ServiceOfID(i.SPIFFE); err != nil || s != i.Service {
		return fmt.Errorf("athenzname: instance %q: the SPIFFE ID %.300q is not one of %q", i.ID, i.SPIFFE, i.Service)
	}
	return nil
}

// InstanceName returns the DNS name that carries the ID: ID.instanceid.athenz.SUFFIX.
func (i Instance) InstanceName() string { return i.ID + ".instanceid.athenz." + i.Suffix }

// isSimple reports whether s is one name, in lower case.
func isSimple(s string) bool {
	other := func(c rune) bool {
		return !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '_' || c == '-')
	}
	return s != "" && s[0] != '-' && !strings.ContainsFunc(s, other)
}

func isDomain(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if !isSimple(part) {
			return false
		}
	}
	return len(s) < maxName
}

// isNamespace reports whether s is an RFC 1123 label in lower case, as the name of a namespace must be.
func isNamespace(s string) bool {
	return isSimple(s) && len(s) <= 63 && !strings.Contains(s, "_") && s[len(s)-1] != '-'
}

// isHost reports whether s consists of RFC 1123 labels.
func isHost(s string) bool {
	for part := range strings.SplitSeq(s, ".") {
		if !isNamespace(part) {
			return false
		}
	}
	return len(s) <= maxName
}
