package spiffetest

import (
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/svidkit/svidkit/spiffe"
)

// Fault is one way in which an identity can be wrong; see [Faults].
type Fault struct {
	Name    string        // for [CA.Broken]
	Stage   string        // the stage at which a [spiffe.Verifier] refuses this fault
	Rule    string        // the id of the rule that it breaks, as in [spiffe.VerifyError]
	Refused []spiffe.Role // the roles in which a peer with the fault is refused
}

// Faults returns all faults, in the order in which a verifier meets them:
//
//	NoURI                X5-3   a DNS name and no URI name
//	TwoURIs              X5-36  a second SPIFFE ID
//	TwoSchemes           X5-36  a second URI name, with the scheme https
//	ForeignScheme        X5-34  a URI name with the scheme https
//	InvalidID            X5-37  a path with an empty segment
//	CALeaf               X5-32  basic constraints with cA
//	PathlessID           X5-35  the ID of the trust domain
//	NoKeyUsage           X5-40  no key usage extension
//	CertSignLeaf         X5-33  key usage with keyCertSign
//	CRLSignLeaf          X5-33  key usage with cRLSign
//	NoDigitalSignature   X5-40  key usage keyAgreement only
//	UnknownDomain        X5-38  an ID of the trust domain "unknown.test", signed by this CA
//	ForeignCA            X5-31  signed by a root of the same trust domain that is not in the bundle
//	SelfSigned           X5-31  signed by its own key
//	MissingIntermediate  X5-31  signed by an intermediate that is not in the chain
//	IntermediateNotCA    X5-31  signed by an intermediate without cA
//	Expired              X5-30  ended a minute ago
//	NotYetValid          X5-30  starts in an hour
//	UnknownExtension     X5-30  an unknown critical extension
//	ServerOnly           X5-39  extended key usage serverAuth only, refused as a client
//	ClientOnly           X5-39  extended key usage clientAuth only, refused as a server
func Faults() []Fault {
	faults := make([]Fault, len(faultTable))
	for i, info := range faultTable {
		all := []spiffe.Role{spiffe.AnyRole, spiffe.ServerRole, spiffe.ClientRole, spiffe.BothRoles}
		faults[i] = Fault{info.name, info.stage, info.rule, all}
		switch info.name {
		case "ServerOnly":
			faults[i].Refused = []spiffe.Role{spiffe.ClientRole, spiffe.BothRoles}
		case "ClientOnly":
			faults[i].Refused = []spiffe.Role{spiffe.ServerRole, spiffe.BothRoles}
		}
	}
	return faults
}

// Broken mints an identity whose only fault is the named one: the chain, leaf first, and the leaf's key. Its ID is the
// trust domain followed by "/broken", unless the fault is in the ID. Times are relative to the present, so use it
// soon, or in a testing/synctest bubble.
func (ca *CA) Broken(fault string) ([]*x509.Certificate, crypto.Signer) {
	ca.t.Helper()
	i := slices.IndexFunc(faultTable, func(info faultInfo) bool { return info.name == fault })
	if i < 0 {
		var names []string
		for _, info := range faultTable {
			names = append(names, info.name)
		}
		ca.t.Fatalf("spiffetest: broken: there is no fault %q; the names are %s", fault, strings.Join(names, ", "))
	}
	info := faultTable[i]
	id, err := ca.trust.td.WorkloadID("broken")
	if err != nil {
		ca.t.Fatalf("spiffetest: broken: %v", err)
	}
	key, template, by := ca.newKey(), leafTemplate(id, leafLifetime), ca.signer()
	if info.template != nil {
		info.template(template, ca.trust.td)
	}
	switch fault {
	case "ForeignCA":
		if by, err = newRoot(ca.trust.td, "foreign root"); err != nil {
			ca.t.Fatalf("spiffetest: broken: %v", err)
		}
	case "SelfSigned":
		by = &authority{cert: template, key: seal(key)}
	case "MissingIntermediate":
		by = ca.Intermediate().fixed
		by.tail = nil
	case "IntermediateNotCA":
		by = ca.Intermediate(func(c *x509.Certificate) { c.IsCA = false }).fixed
	}
	return ca.mustSign(by, template, key.Public(), nil), key
}

// edit spoils a template.
type edit = func(c *x509.Certificate, td spiffe.TrustDomain)

type faultInfo struct {
	name     string
	stage    string
	rule     string
	template edit // nil if the fault is not in the template
}

// oneURI replaces the URI name.
func oneURI(scheme, path string) edit {
	return func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = []*url.URL{{Scheme: scheme, Host: td.String(), Path: path}}
	}
}

// secondURI adds a URI name.
func secondURI(scheme, path string) edit {
	return func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.URIs = append(c.URIs, &url.URL{Scheme: scheme, Host: td.String(), Path: path})
	}
}

func keyUsage(usage x509.KeyUsage) edit {
	return func(c *x509.Certificate, _ spiffe.TrustDomain) { c.KeyUsage = usage }
}

func extKeyUsage(usage x509.ExtKeyUsage) edit {
	return func(c *x509.Certificate, _ spiffe.TrustDomain) { c.ExtKeyUsage = []x509.ExtKeyUsage{usage} }
}

var faultTable = []faultInfo{
	{"NoURI", "leaf", "X5-3", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.URIs, c.DNSNames = nil, []string{"broken.test"}
	}},
	{"TwoURIs", "leaf", "X5-36", secondURI("spiffe", "/other")},
	{"TwoSchemes", "leaf", "X5-36", secondURI("https", "/broken")},
	{"ForeignScheme", "leaf", "X5-34", oneURI("https", "/broken")},
	{"InvalidID", "leaf", "X5-37", oneURI("spiffe", "/broken//id")},
	{"CALeaf", "leaf", "X5-32", func(c *x509.Certificate, _ spiffe.TrustDomain) { c.IsCA = true }},
	{"PathlessID", "leaf", "X5-35", oneURI("spiffe", "")},
	{"NoKeyUsage", "leaf", "X5-40", keyUsage(0)},
	{"CertSignLeaf", "leaf", "X5-33", keyUsage(x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign)},
	{"CRLSignLeaf", "leaf", "X5-33", keyUsage(x509.KeyUsageDigitalSignature | x509.KeyUsageCRLSign)},
	{"NoDigitalSignature", "leaf", "X5-40", keyUsage(x509.KeyUsageKeyAgreement)},
	{"UnknownDomain", "bundle", "X5-38", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.URIs[0].Host = "unknown.test"
	}},
	{"ForeignCA", "chain", "X5-31", nil},
	{"SelfSigned", "chain", "X5-31", func(c *x509.Certificate, td spiffe.TrustDomain) {
		c.Subject = pkix.Name{Organization: []string{td.String()}, CommonName: "self-signed"}
	}},
	{"MissingIntermediate", "chain", "X5-31", nil},
	{"IntermediateNotCA", "chain", "X5-31", nil},
	{"Expired", "chain", "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-leafLifetime), c.NotBefore.Add(-time.Minute)
	}},
	{"NotYetValid", "chain", "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		c.NotBefore, c.NotAfter = c.NotAfter, c.NotAfter.Add(leafLifetime)
	}},
	{"UnknownExtension", "chain", "X5-30", func(c *x509.Certificate, _ spiffe.TrustDomain) {
		oid := asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1} // the arc for documentation, RFC 5612
		c.ExtraExtensions = []pkix.Extension{{Id: oid, Critical: true, Value: asn1.NullBytes}}
	}},
	{"ServerOnly", "chain", "X5-39", extKeyUsage(x509.ExtKeyUsageServerAuth)},
	{"ClientOnly", "chain", "X5-39", extKeyUsage(x509.ExtKeyUsageClientAuth)},
}
