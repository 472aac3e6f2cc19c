package linkerd

import (
	"errors"
	"fmt"
	"strings"
)

// ErrName says that something is not a name of the mesh, or cannot be part of one.
var ErrName = errors.New("invalid name")

// Form is one of the two ways in which names have been written.
type Form int

const (
	// Current is SERVICEACCOUNT.NAMESPACE.serviceaccount.identity.CONTROLNAMESPACE.TRUSTDOMAIN, as
	// Linkerd's proxies have it.
	Current Form = iota

	// Seed is SERVICEACCOUNT.NAMESPACE.sa.linkerd-identity.CONTROLNAMESPACE.TRUSTDOMAIN, from the first
	// design of the protocol.
	Seed
)

// String returns "current", "seed", or "Form(n)" for other values.
func (f Form) String() string {
	switch f {
	case Current:
		return "current"
	case Seed:
		return "seed"
	}
	return fmt.Sprintf("Form(%d)", int(f))
}

// labels returns what stands between the namespace and the control plane's namespace.
func (f Form) labels() (kind, marker string) {
	if f == Seed {
		return "sa", "linkerd-identity"
	}
	return "serviceaccount", "identity"
}

// maxName is the limit of a DNS name, in bytes.
const maxName = 253

// Mesh says how the names of one mesh are written. [NewMesh] makes one. It is a small value that
// works with ==; the zero Mesh has no names. The certifier, the injector and the destination service
// of a mesh have equal ones.
type Mesh struct {
	controlNamespace, trustDomain string
	form                          Form
}

// NewMesh returns the rules of a mesh whose control plane runs in a namespace, usually "linkerd", an
// RFC 1123 label, and whose names end with a trust domain, usually "cluster.local", an RFC 1123
// subdomain. The error wraps [ErrName].
func NewMesh(controlNamespace, trustDomain string, form Form) (Mesh, error) {
	switch {
	case form != Current && form != Seed:
		return Mesh{}, fmt.Errorf("linkerd: new mesh: %v is neither Current nor Seed: %w", form, ErrName)
	case !isLabel(controlNamespace):
		return Mesh{}, fmt.Errorf("linkerd: new mesh: control namespace: %w", labelError(controlNamespace))
	case !isSubdomain(trustDomain):
		return Mesh{}, fmt.Errorf("linkerd: new mesh: the trust domain %.300q is not an RFC 1123 subdomain (labels of a-z, 0-9 and inner hyphens, at most 253 bytes): %w", trustDomain, ErrName)
	}
	return Mesh{controlNamespace, trustDomain, form}, nil
}

// IsZero reports whether m is the zero Mesh.
func (m Mesh) IsZero() bool { return m == Mesh{} }

// ControlNamespace returns the namespace of the control plane.
func (m Mesh) ControlNamespace() string { return m.controlNamespace }

// TrustDomain returns the trust domain.
func (m Mesh) TrustDomain() string { return m.trustDomain }

// Form returns how names are written.
func (m Mesh) Form() Form { return m.form }

// String returns what all names of the mesh end with, such as "serviceaccount.identity.linkerd.cluster.local".
func (m Mesh) String() string {
	if m.IsZero() {
		return "no mesh"
	}
	kind, marker := m.form.labels()
	return kind + "." + marker + "." + m.controlNamespace + "." + m.trustDomain
}

// Name returns the name of a service account. Both must be RFC 1123 labels, which a service account
// whose name has a dot in it is not, though Kubernetes allows it; and the name has at most 253
// bytes. The error wraps [ErrName].
func (m Mesh) Name(namespace, serviceAccount string) (Name, error) {
	n, err := m.name(namespace, serviceAccount)
	if err != nil {
		return Name{}, fmt.Errorf("linkerd: name of a service account: %w", err)
	}
	return n, nil
}

func (m Mesh) name(namespace, serviceAccount string) (Name, error) {
	switch {
	case m.IsZero():
		return Name{}, fmt.Errorf("the Mesh is zero; NewMesh makes one: %w", ErrName)
	case !isLabel(namespace):
		return Name{}, fmt.Errorf("namespace: %w", labelError(namespace))
	case !isLabel(serviceAccount):
		return Name{}, fmt.Errorf("service account: %w", labelError(serviceAccount))
	}
	n := Name{serviceAccount + "." + namespace + "." + m.String(), len(serviceAccount), len(serviceAccount) + 1 + len(namespace)}
	if len(n.text) > maxName {
		return Name{}, fmt.Errorf("%d bytes, the limit of a DNS name is %d: %w", len(n.text), maxName, ErrName)
	}
	return n, nil
}

// UserName returns the name of a service account by its user name in Kubernetes,
// "system:serviceaccount:NAMESPACE:SERVICEACCOUNT", with the rules of [Mesh.Name]. The error wraps
// [ErrName].
func (m Mesh) UserName(username string) (Name, error) {
	parts := strings.Split(username, ":")
	if len(parts) != 4 || parts[0] != "system" || parts[1] != "serviceaccount" {
		return Name{}, fmt.Errorf("linkerd: the user name %.300q is not that of a service account (system:serviceaccount:NAMESPACE:NAME): %w", username, ErrName)
	}
	return m.Name(parts[2], parts[3])
}

// Parse reads a name. It must be exactly one that [Mesh.Name] returns: lower case, without a dot at the
// end, with the control namespace and the trust domain of the mesh. The error wraps [ErrName].
func (m Mesh) Parse(s string) (Name, error) {
	n, err := m.parse(s)
	if err != nil {
		return Name{}, fmt.Errorf("linkerd: parse name %.300q: %w", s, err)
	}
	return n, nil
}

func (m Mesh) parse(s string) (Name, error) {
	if m.IsZero() {
		return Name{}, fmt.Errorf("the Mesh is zero; NewMesh makes one: %w", ErrName)
	}
	// From the left, as a trust domain may have any number of labels.
	var labels [5]string
	rest := s
	for i := range labels {
		var ok bool
		if labels[i], rest, ok = strings.Cut(rest, "."); !ok {
			return Name{}, fmt.Errorf("fewer than five labels and a trust domain: %w", ErrName)
		}
	}
	kind, marker := m.form.labels()
	switch {
	case labels[2] != kind || labels[3] != marker:
		return Name{}, fmt.Errorf("the third and fourth label are not %q: %w", kind+"."+marker, ErrName)
	case labels[4] != m.controlNamespace:
		return Name{}, fmt.Errorf("the control namespace is not %q: %w", m.controlNamespace, ErrName)
	case rest != m.trustDomain:
		return Name{}, fmt.Errorf("the trust domain is not %q: %w", m.trustDomain, ErrName)
	}
	return m.name(labels[1], labels[0])
}

// Certifier returns the name of the control plane's identity service, which proxies expect to see
// before they send it their tokens.
func (m Mesh) Certifier() (Name, error) { return m.Name(m.controlNamespace, "linkerd-identity") }

// Destination returns the name of the control plane's destination service, which in the current form
// is also that of its policy service.
func (m Mesh) Destination() (Name, error) {
	if m.form == Seed {
		return m.Name(m.controlNamespace, "linkerd-controller")
	}
	return m.Name(m.controlNamespace, "linkerd-destination")
}

// IssuerName returns the common name that an issuer has that Linkerd makes for itself,
// identity.CONTROLNAMESPACE.TRUSTDOMAIN, or "" for the zero Mesh. In a certificate it fits only if it
// has at most 64 bytes.
func (m Mesh) IssuerName() string {
	if m.IsZero() {
		return ""
	}
	return "identity." + m.controlNamespace + "." + m.trustDomain
}

// Namespace returns a [Match] of every name in a namespace, an RFC 1123 label. The error wraps
// [ErrName].
func (m Mesh) Namespace(namespace string) (Match, error) {
	if m.IsZero() || !isLabel(namespace) {
		return Match{}, fmt.Errorf("linkerd: namespace of %v: %w", m, labelError(namespace))
	}
	return Match{"*." + namespace + "." + m.String()}, nil
}

// Name is the name of a service account in a mesh, which is the one DNS name in its certificates. A
// [Mesh] makes one. It works with == and as a map key. The zero Name is not valid.
type Name struct {
	text       string
	first, two int // where the first label ends, and the first two
}

// String returns the name as it is in certificates, or "" for the zero Name.
func (n Name) String() string { return n.text }

// IsZero reports whether n is the zero Name.
func (n Name) IsZero() bool { return n == Name{} }

// ServiceAccount returns the service account.
func (n Name) ServiceAccount() string { return n.text[:n.first] }

// Namespace returns the namespace of the service account.
func (n Name) Namespace() string {
	if n.IsZero() {
		return ""
	}
	return n.text[n.first+1 : n.two]
}

// isLabel reports whether s is an RFC 1123 label in lower case: 1 to 63 of a-z, 0-9 and, inside, "-".
func isLabel(s string) bool { return len(s) <= 63 && isLongLabel(s) }

// isLongLabel is isLabel without the limit.
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

func labelError(s string) error {
	return fmt.Errorf("%.100q is not an RFC 1123 label (1 to 63 of a-z, 0-9 and inner hyphens): %w", s, ErrName)
}

// isSubdomain reports whether s is an RFC 1123 subdomain.
func isSubdomain(s string) bool {
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return false
		}
	}
	return len(s) <= maxName
}
