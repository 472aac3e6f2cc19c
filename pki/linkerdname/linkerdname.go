// Package linkerdname implements the names of service accounts in a Linkerd mesh, and the patterns of its
// authorization policies. The certifier, the injector, the destination service and the clients of a mesh share one
// [Mesh], and so agree on every name:
//
//	mesh := linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: "cluster.local"}
//	name, err := mesh.Name("emojivoto", "web") // web.emojivoto.serviceaccount.identity.linkerd.cluster.local
//	…
//	namespace, account, err := mesh.Parse(name)
//
// Names are lower case, have no dot at the end, and are compared byte for byte.
//
// # What it does not do
//
// It reads no Kubernetes resources, such as MeshTLSAuthentication and ExternalWorkload, and does not speak the API of
// the policy service: [Match] is for a program that has the patterns. Linkerd defines no rule that converts between
// names and SPIFFE IDs: a certificate of a mesh has only the name, and a workload outside the cluster gets its SPIFFE
// ID from the Workload API.
package linkerdname

import (
	"errors"
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// errName is in every error of this package.
var errName = errors.New("invalid name")

const (
	maxLabel = 63  // bytes of an RFC 1123 label
	maxName  = 253 // bytes of a DNS name
)

// Mesh is the form of the names of one mesh. It is comparable. The methods of a Mesh with an invalid field, such as
// the zero Mesh, return an error.
type Mesh struct {
	ControlNamespace string // the control plane's namespace, an RFC 1123 label; usually "linkerd"
	TrustDomain      string // the end of every name, an RFC 1123 subdomain; usually "cluster.local"

	// FirstDesign selects the names of the first design of the protocol,
	// SERVICEACCOUNT.NAMESPACE.sa.linkerd-identity.CONTROLNAMESPACE.TRUSTDOMAIN. Otherwise names have the form that
	// Linkerd's proxies use, SERVICEACCOUNT.NAMESPACE.serviceaccount.identity.CONTROLNAMESPACE.TRUSTDOMAIN.
	FirstDesign bool
}

// Name returns the name of a service account, which is the only DNS name in its certificates. Both arguments must be
// RFC 1123 labels: Kubernetes allows a dot in the name of a service account, Linkerd does not. The name has at most
// 253 bytes.
func (m Mesh) Name(namespace, serviceAccount string) (string, error) {
	name, err := m.name(namespace, serviceAccount)
	if err != nil {
		return "", fmt.Errorf("linkerdname: name of service account %.100q in namespace %.100q: %w", serviceAccount,
			namespace, err)
	}
	return name, nil
}

func (m Mesh) name(namespace, serviceAccount string) (string, error) {
	if err := m.check(); err != nil {
		return "", err
	}
	if !isLabel(namespace) || !isLabel(serviceAccount) {
		return "", fmt.Errorf("both must be RFC 1123 labels (1 to 63 of a-z, 0-9 and inner hyphens): %w", errName)
	}
	name := serviceAccount + "." + namespace + m.suffix()
	if len(name) > maxName {
		return "", fmt.Errorf("%d bytes, the limit of a DNS name is %d: %w", len(name), maxName, errName)
	}
	return name, nil
}

// check says which field is invalid.
func (m Mesh) check() error {
	switch {
	case !isLabel(m.ControlNamespace):
		return fmt.Errorf("the control namespace %.100q of the mesh is not an RFC 1123 label (1 to 63 of a-z, 0-9 "+
			"and inner hyphens): %w", m.ControlNamespace, errName)
	case !isSubdomain(m.TrustDomain):
		return fmt.Errorf("the trust domain %.300q of the mesh is not an RFC 1123 subdomain (labels of a-z, 0-9 and "+
			"inner hyphens, at most 253 bytes): %w", m.TrustDomain, errName)
	}
	return nil
}

// suffix returns the part after the namespace, the same in every name.
func (m Mesh) suffix() string {
	kind := ".serviceaccount.identity."
	if m.FirstDesign {
		kind = ".sa.linkerd-identity."
	}
	return kind + m.ControlNamespace + "." + m.TrustDomain
}

// Parse returns the service account of a name, which must be exactly as [Mesh.Name] returns it.
func (m Mesh) Parse(name string) (namespace, serviceAccount string, err error) {
	serviceAccount, rest, _ := strings.Cut(name, ".")
	namespace, _, _ = strings.Cut(rest, ".")
	want, err := m.name(namespace, serviceAccount)
	if err == nil && name != want {
		err = fmt.Errorf("it does not end with %q: %w", m.suffix(), errName)
	}
	if err != nil {
		return "", "", fmt.Errorf("linkerdname: parse %.300q: %w", name, err)
	}
	return namespace, serviceAccount, nil
}

// Certifier returns the name of the control plane's identity service. A proxy sends its token only to a server with
// this name.
func (m Mesh) Certifier() (string, error) { return m.Name(m.ControlNamespace, "linkerd-identity") }

// Destination returns the name of the control plane's destination service, which serves policies too.
func (m Mesh) Destination() (string, error) {
	if m.FirstDesign {
		return m.Name(m.ControlNamespace, "linkerd-controller")
	}
	return m.Name(m.ControlNamespace, "linkerd-destination")
}

// Issuer returns the common name of the issuer certificate that Linkerd's installer generates,
// identity.CONTROLNAMESPACE.TRUSTDOMAIN. X.509 limits a common name to 64 bytes.
func (m Mesh) Issuer() (string, error) {
	if err := m.check(); err != nil {
		return "", fmt.Errorf("linkerdname: name of the issuer: %w", err)
	}
	return "identity." + m.ControlNamespace + "." + m.TrustDomain, nil
}

// Namespace returns the pattern for all service accounts of a namespace; see [Match].
func (m Mesh) Namespace(namespace string) (string, error) {
	name, err := m.name(namespace, "a")
	if err != nil {
		return "", fmt.Errorf("linkerdname: pattern for namespace %.100q: %w", namespace, err)
	}
	return "*" + name[1:], nil
}

// Match reports whether an identity matches the pattern of an authorization policy. The identity is the DNS name, or
// the SPIFFE ID, in a client's verified certificate. The pattern has one of these forms:
//
//	NAME          this DNS name
//	*.REST        every DNS name that ends with .REST and has at least one label before it
//	*             every DNS name
//	spiffe://…    this SPIFFE ID
//
// No wildcard matches a SPIFFE ID. Any other pattern is an error, whatever the identity is.
func Match(pattern, identity string) (bool, error) {
	if err := checkPattern(pattern); err != nil {
		return false, fmt.Errorf("linkerdname: pattern %.300q: %w", pattern, err)
	}
	suffix, wild := strings.CutPrefix(pattern, "*")
	if !wild {
		return identity == pattern, nil
	}
	isDNS := !strings.ContainsAny(identity, ":/") // every URI has one of these characters
	return isDNS && len(identity) > len(suffix) && strings.HasSuffix(identity, suffix), nil
}

func checkPattern(pattern string) error {
	if strings.HasPrefix(pattern, "spiffe:") {
		if _, err := spiffe.ParseID(pattern); err != nil {
			return fmt.Errorf("%w: %w", errName, err)
		}
		return nil
	}
	if pattern == "*" {
		return nil
	}
	for label := range strings.SplitSeq(strings.TrimPrefix(pattern, "*."), ".") {
		if !isLongLabel(label) {
			return fmt.Errorf("neither a DNS name in lower case, whose first label may be \"*\", nor a SPIFFE ID: %w",
				errName)
		}
	}
	return nil
}

// isLabel reports whether s is an RFC 1123 label in lower case.
func isLabel(s string) bool { return len(s) <= maxLabel && isLongLabel(s) }

// isLongLabel is isLabel without a limit on length: Linkerd's policies have none.
func isLongLabel(s string) bool {
	for i := range len(s) {
		c := s[i]
		inside := i > 0 && i < len(s)-1
		if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' && inside) {
			return false
		}
	}
	return s != ""
}

func isSubdomain(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return false
		}
	}
	return len(s) <= maxName
}
