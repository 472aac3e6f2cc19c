package spiffetest

import (
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"net/url"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Fault is one way in which an identity can be wrong; see [CA.Broken]. The zero Fault is none.
type Fault int

// The faults, in the order in which a verifier meets them. Behind each is the rule that refuses it,
// which [Fault.Rule] returns.
const (
	NoURI               Fault = iota + 1 // X5-3: a DNS name and no URI name
	TwoURIs                              // X5-36: a second SPIFFE ID
	TwoSchemes                           // X5-36: a second URI name, with the scheme https
	ForeignScheme                        // X5-34: the URI name has the scheme https
	InvalidID                            // X5-37: the path of the ID has an empty segment
	CALeaf                               // X5-32: basic constraints with cA
	PathlessID                           // X5-35: the ID of the trust domain
	NoKeyUsage                           // X5-40: no key usage extension
	CertSignLeaf                         // X5-33: key usage with keyCertSign
	CRLSignLeaf                          // X5-33: key usage with cRLSign
	NoDigitalSignature                   // X5-40: key usage keyAgreement only
	UnknownDomain                        // X5-38: an ID of the trust domain "unknown.test", signed by this CA
	ForeignCA                            // X5-31: signed by a root of the same trust domain that is not in the bundle
	SelfSigned                           // X5-31: signed by its own key
	MissingIntermediate                  // X5-31: signed by an intermediate that is not in the chain
	IntermediateNotCA                    // X5-31: signed by an intermediate without cA
	Expired                              // X5-30: ended a minute ago
	NotYetValid                          // X5-30: starts in an hour
	UnknownExtension                     // X5-30: a critical extension that nobody knows
	ServerOnly                           // X5-39: extended key usage serverAuth only, refused as a client
	ClientOnly                           // X5-39: extended key usage clientAuth only, refused as a server
)

// Faults returns all faults, in their order.
func Faults() []Fault {
	faults := make([]Fault, 0, len(faultTable)-1)
	for f := NoURI; int(f) < len(faultTable); f++ {
		faults = append(faults, f)
	}
	return faults
}

// Broken mints an identity that is good but for f: the chain, leaf first, and the leaf's key. Its ID
// is the trust domain followed by "/broken", unless the ID is what is wrong. Times are relative to
// the present, so use it soon, or in a testing/synctest bubble.
func (ca *CA) Broken(f Fault) ([]*x509.Certificate, crypto.Signer) {
	ca.t.Helper()
	if f <= 0 || int(f) >= len(faultTable) {
		ca.t.Fatalf("spiffetest: broken: there is no %v", f)
	}
	id, err := ca.trust.td.WorkloadID("broken")
	if err != nil {
		ca.t.Fatalf("spiffetest: broken: %v", err)
	}
	key, template, by := ca.newKey(), leafTemplate(id, leafLifetime), ca.signer()
	if edit := faultTable[f].template; edit != nil {
		edit(template, ca.trust.td)
	}
	switch f {
	case ForeignCA:
		if by, err = newRoot(ca.trust.td, "foreign root"); err != nil {
			ca.t.Fatalf("spiffetest: broken: %v", err)
		}
	case SelfSigned:
		by = &authority{cert: template, key: key}
	case MissingIntermediate:
		by = ca.Intermediate().fixed
		by.tail = nil
	case IntermediateNotCA:
		by = ca.Intermediate(func(c *x509.Certificate) { c.IsCA = false }).fixed
	}
	return ca.mustSign(by, template, key.Public(), nil), key
}

// Stage returns the stage at which a [spiffe.Verifier] refuses what has this fault.
func (f Fault) Stage() spiffe.Stage { return f.info().stage }

// Rule returns the id of the rule that the fault breaks, as in [spiffe.VerifyError].
func (f Fault) Rule() string { return f.info().rule }

// Refused reports whether a peer in this role is refused for the fault. That is so for all but
// [ServerOnly] and [ClientOnly], which are refused in the other role only.
func (f Fault) Refused(role spiffe.Role) bool {
	switch f {
	case ServerOnly:
		return role == spiffe.ClientRole
	case ClientOnly:
		return role == spiffe.ServerRole
	}
	return f.info().rule != ""
}

// String returns the name of the fault, such as "TwoURIs".
func (f Fault) String() string {
	if name := f.info().name; name != "" {
		return name
	}
	return fmt.Sprintf("Fault(%d)", int(f))
}

func (f Fault) info() faultInfo {
	if f < 0 || int(f) >= len(faultTable) {
		return faultInfo{}
	}
	return faultTable[f]
}

// faultInfo is what there is to know about a Fault.
type faultInfo struct {
	name     string
	stage    spiffe.Stage
	rule     string
	template func(c *x509.Certificate, td spiffe.TrustDomain) // how to spoil the template; nil if something else is wrong
}

var faultTable = [...]faultInfo{
	NoURI: {"NoURI", spiffe.StageLeaf, "X5-3", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.URIs, c.DNSNames = nil, []string{"broken.test"}
	}},
	TwoURIs: {"TwoURIs", spiffe.StageLeaf, "X5-36", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = append(c.URIs, &url.URL{Scheme: "spiffe", Host: td.String(), Path: "/other"})
	}},
	TwoSchemes: {"TwoSchemes", spiffe.StageLeaf, "X5-36", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = append(c.URIs, &url.URL{Scheme: "https", Host: td.String(), Path: "/broken"})
	}},
	ForeignScheme: {"ForeignScheme", spiffe.StageLeaf, "X5-34", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = []*url.URL{{Scheme: "https", Host: td.String(), Path: "/broken"}}
	}},
	InvalidID: {"InvalidID", spiffe.StageLeaf, "X5-37", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = []*url.URL{{Scheme: "spiffe", Host: td.String(), Path: "/broken//id"}}
	}},
	CALeaf: {"CALeaf", spiffe.StageLeaf, "X5-32", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.IsCA = true
	}},
	PathlessID: {"PathlessID", spiffe.StageLeaf, "X5-35", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = []*url.URL{td.ID().URL()}
	}},
	NoKeyUsage: {"NoKeyUsage", spiffe.StageLeaf, "X5-40", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.KeyUsage = 0
	}},
	CertSignLeaf: {"CertSignLeaf", spiffe.StageLeaf, "X5-33", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.KeyUsage |= x509.KeyUsageCertSign
	}},
	CRLSignLeaf: {"CRLSignLeaf", spiffe.StageLeaf, "X5-33", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.KeyUsage |= x509.KeyUsageCRLSign
	}},
	NoDigitalSignature: {"NoDigitalSignature", spiffe.StageLeaf, "X5-40", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.KeyUsage = x509.KeyUsageKeyAgreement
	}},
	UnknownDomain: {"UnknownDomain", spiffe.StageBundle, "X5-38", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.URIs = []*url.URL{{Scheme: "spiffe", Host: "unknown.test", Path: "/broken"}}
	}},
	ForeignCA: {"ForeignCA", spiffe.StageChain, "X5-31", nil},
	SelfSigned: {"SelfSigned", spiffe.StageChain, "X5-31", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.Subject = pkix.Name{Organization: []string{td.String()}, CommonName: "self-signed"}
	}},
	MissingIntermediate: {"MissingIntermediate", spiffe.StageChain, "X5-31", nil},
	IntermediateNotCA:   {"IntermediateNotCA", spiffe.StageChain, "X5-31", nil},
	Expired: {"Expired", spiffe.StageChain, "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-leafLifetime), c.NotBefore.Add(-time.Minute)
	}},
	NotYetValid: {"NotYetValid", spiffe.StageChain, "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.NotBefore, c.NotAfter = c.NotAfter, c.NotAfter.Add(leafLifetime)
	}},
	UnknownExtension: {"UnknownExtension", spiffe.StageChain, "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		oid := asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1} // the arc for documentation, RFC 5612
		c.ExtraExtensions = []pkix.Extension{{Id: oid, Critical: true, Value: asn1.NullBytes}}
	}},
	ServerOnly: {"ServerOnly", spiffe.StageChain, "X5-39", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	}},
	ClientOnly: {"ClientOnly", spiffe.StageChain, "X5-39", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}},
}
