package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"flag"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

var update = flag.Bool("update", false, "write the files of testdata/x509 anew")

// The fixtures that every vector starts from.
var (
	now   = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	webID = spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
)

func atNow() time.Time { return now }

// certSpec says what a certificate is to be, right or wrong. It signs with crypto/x509 and builds
// the names and some extensions by hand, so that the code under test does not check itself and
// nothing repairs a fault.
type certSpec struct {
	key     string // label of the key, which is made from it
	ed25519 bool
	subject pkix.Name

	uris, dns, emails []string
	ips               [][]byte
	sanOptional       bool // not critical
	sanTwice          bool

	ca       bool
	pathLen  *int
	noBasic  bool // no basic constraints
	usage    x509.KeyUsage
	usageOpt bool // key usage not critical

	ext         []asn1.ObjectIdentifier // extended key usage
	extCritical bool
	permitted   []string // URI name constraint
	extra       []pkix.Extension

	notBefore, notAfter time.Time
}

var (
	serverAuth  = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 1}
	clientAuth  = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 2}
	codeSigning = asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 3, 3}
)

func leafSpec(uri string) certSpec {
	return certSpec{
		key: "leaf", uris: []string{uri},
		usage: x509.KeyUsageDigitalSignature, ext: []asn1.ObjectIdentifier{serverAuth, clientAuth},
		notBefore: now.Add(-time.Hour), notAfter: now.Add(time.Hour),
	}
}

func caSpec(key, uri string) certSpec {
	s := certSpec{
		key: key, subject: pkix.Name{CommonName: key}, sanOptional: true,
		ca: true, usage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		notBefore: now.AddDate(-1, 0, 0), notAfter: now.AddDate(9, 0, 0),
	}
	if uri != "" {
		s.uris = []string{uri}
	}
	return s
}

// with returns a copy with one change.
func (s certSpec) with(edit func(*certSpec)) certSpec {
	edit(&s)
	return s
}

func (s certSpec) signer() crypto.Signer {
	seed := sha256.Sum256([]byte("svidkit-vector-" + s.key))
	if s.ed25519 {
		return ed25519.NewKeyFromSeed(seed[:])
	}
	return must.Do(ecdsa.ParseRawPrivateKey(elliptic.P256(), seed[:]))
}

// issued is a certificate, its key, and the certificates above it up to the root.
type issued struct {
	der  []byte
	tmpl *x509.Certificate // as parent: crypto/x509 takes the subject and the key id from it
	key  crypto.Signer
}

func mustDER(v any) []byte {
	return must.Do(asn1.Marshal(v))
}

func (s certSpec) san() []byte {
	var names []asn1.RawValue
	add := func(tag int, all ...string) {
		for _, n := range all {
			names = append(names, asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, Bytes: []byte(n)})
		}
	}
	add(1, s.emails...)
	add(2, s.dns...)
	add(6, s.uris...)
	for _, ip := range s.ips {
		add(7, string(ip))
	}
	if names == nil {
		return nil
	}
	return mustDER(names)
}

// issue makes the certificate; a nil parent means self-signed.
func (s certSpec) issue(parent *issued) *issued {
	key := s.signer()
	pub := must.Do(x509.MarshalPKIXPublicKey(key.Public()))
	id := sha256.Sum256(pub)
	serial := sha256.Sum256(append(pub, s.subject.String()...))
	t := &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial[:8]),
		Subject:      s.subject,
		NotBefore:    s.notBefore, NotAfter: s.notAfter,
		IsCA: s.ca, BasicConstraintsValid: !s.noBasic,
		PermittedURIDomains: s.permitted,
		ExtraExtensions:     s.extra,
	}
	if s.ca {
		t.SubjectKeyId = id[:20]
	}
	if s.pathLen != nil {
		t.MaxPathLen, t.MaxPathLenZero = *s.pathLen, *s.pathLen == 0
	}
	if san := s.san(); san != nil {
		e := pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Critical: !s.sanOptional, Value: san}
		t.ExtraExtensions = append(t.ExtraExtensions, e)
		if s.sanTwice {
			t.ExtraExtensions = append(t.ExtraExtensions, e)
		}
	}
	if s.ext != nil {
		t.ExtraExtensions = append(t.ExtraExtensions, pkix.Extension{
			Id: asn1.ObjectIdentifier{2, 5, 29, 37}, Critical: s.extCritical, Value: mustDER(s.ext),
		})
	}
	t.KeyUsage = s.usage
	if s.usageOpt {
		t.KeyUsage = 0
		t.ExtraExtensions = append(t.ExtraExtensions, pkix.Extension{ // digitalSignature
			Id: asn1.ObjectIdentifier{2, 5, 29, 15}, Value: mustDER(asn1.BitString{Bytes: []byte{0x80}, BitLength: 1}),
		})
	}
	p := &issued{tmpl: t, key: key}
	if parent != nil {
		p = parent
	}
	// Without a source of randomness ECDSA is deterministic (RFC 6979), and so are the files.
	der := must.Do(x509.CreateCertificate(nil, t, p.tmpl, key.Public(), p.key))
	return &issued{der: der, tmpl: t, key: key}
}

func pemOf(certs ...*issued) string {
	var b bytes.Buffer
	for _, c := range certs {
		if err := pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: c.der}); err != nil {
			panic(err)
		}
	}
	return b.String()
}

func base64Lines(der []byte) string {
	var b strings.Builder
	for s := base64.StdEncoding.EncodeToString(der); s != ""; {
		n := min(64, len(s))
		b.WriteString(s[:n] + "\n")
		s = s[n:]
	}
	return b.String()
}

// generateVectors returns the content of testdata/x509.
func generateVectors() []x509Vector {
	const (
		web   = "spiffe://example.org/ns/prod/sa/web"
		other = "spiffe://other.test/ns/prod/sa/web"
	)
	ca1 := caSpec("ca1", "spiffe://example.org").issue(nil)
	ca2 := caSpec("ca2", "spiffe://example.org").issue(nil)
	cax := caSpec("cax", "spiffe://other.test").issue(nil)
	intSpec := caSpec("int1", "spiffe://example.org")
	int1 := intSpec.issue(ca1)
	leaf := leafSpec(web)
	base := leaf.issue(ca1)
	under := leaf.issue(int1)

	type bundles map[string][]*issued
	home := bundles{"example.org": {ca1}, "other.test": {cax}}

	var all []x509Vector
	add := func(id, rule, expect, why string, chain []*issued, b bundles) x509Vector {
		v := x509Vector{
			header:   map[string]string{"id": id, "rule": rule, "why": why, "role": "any", "now": now.Format(time.RFC3339)},
			sections: map[string]string{"chain": pemOf(chain...)},
		}
		if v.header["expect"] = expect; expect != "accept" {
			v.header["expect"], v.header["stage"] = "reject", expect
		} else {
			v.header["peer"] = web
		}
		for td, roots := range b {
			v.sections["bundle "+td] = pemOf(roots...)
		}
		all = append(all, v)
		return v
	}
	chain := func(c ...*issued) []*issued { return c }
	edited := func(edit func(*certSpec)) []*issued { return chain(leaf.with(edit).issue(ca1)) }
	uri := func(uris ...string) []*issued { return edited(func(s *certSpec) { s.uris = uris }) }
	badURI := func(id, idRule, u, why string) {
		rule := "X5-37"
		if idRule == "ID-2" {
			rule = "X5-34"
		}
		add(id, rule, "leaf", why, uri(u), home).header["id-rule"] = idRule
	}

	add("XV-01", "X5-30", "accept", "base", chain(base), home)
	add("XV-02", "X5-30", "accept", "intermediate supplied", chain(under, int1), home)
	add("XV-03", "X5-31", "chain", "no path: the intermediate is missing", chain(under), home)
	add("XV-04", "X5-36", "leaf", "two URI names", uri(web, "spiffe://example.org/other"), home)
	add("XV-05", "X5-36", "leaf", "two URI names of any scheme", uri(web, "https://example.org/x"), home)
	add("XV-06", "X5-3", "leaf", "DNS name only, no ID", edited(func(s *certSpec) { s.uris, s.dns = nil, []string{"web.example.org"} }), home)
	badURI("XV-07", "ID-2", "https://example.org/ns/prod/sa/web", "scheme")
	add("XV-08", "X5-4", "accept", "names of other kinds are free", edited(func(s *certSpec) {
		s.dns, s.emails, s.ips = []string{"a.example.org", "b.example.org"}, []string{"web@example.org"}, [][]byte{{192, 0, 2, 7}}
	}), home)
	add("XV-09", "X5-35", "leaf", "a leaf needs a path", uri("spiffe://example.org"), home)
	badURI("XV-10", "ID-18", "spiffe://example.org/", "root path, invalid ID")
	add("XV-11", "X5-32", "leaf", "cA true", edited(func(s *certSpec) { s.ca = true }), home)
	add("XV-12", "X5-33", "leaf", "key usage plus keyCertSign", edited(func(s *certSpec) { s.usage |= x509.KeyUsageCertSign }), home)
	add("XV-13", "X5-33", "leaf", "key usage plus cRLSign", edited(func(s *certSpec) { s.usage |= x509.KeyUsageCRLSign }), home)
	add("XV-14", "X5-40", "leaf", "no key usage", edited(func(s *certSpec) { s.usage = 0 }), home)
	add("XV-15", "X5-16", "accept", "key usage not critical: a fault of the issuer, tolerated", edited(func(s *certSpec) { s.usageOpt = true }), home)
	add("XV-16", "X5-40", "leaf", "keyEncipherment only", edited(func(s *certSpec) { s.usage = x509.KeyUsageKeyEncipherment }), home)
	add("XV-17", "X5-18", "accept", "permitted key usages", edited(func(s *certSpec) { s.usage |= x509.KeyUsageKeyEncipherment | x509.KeyUsageKeyAgreement }), home)
	add("XV-18", "X5-20", "accept", "no extended key usage: should, not must", edited(func(s *certSpec) { s.ext = nil }), home)
	serverOnly := edited(func(s *certSpec) { s.ext = s.ext[:1:1] })
	add("XV-19", "X5-39", "chain", "serverAuth only, presented by a client", serverOnly, home).header["role"] = "client"
	add("XV-19b", "X5-39", "accept", "serverAuth only, presented by a server", serverOnly, home).header["role"] = "server"
	add("XV-20", "X5-20", "accept", "extended key usage may be critical", edited(func(s *certSpec) { s.extCritical = true }), home)
	add("XV-21", "X5-20", "accept", "more extended key usages are allowed", edited(func(s *certSpec) { s.ext = append(s.ext[:2:2], codeSigning) }), home)
	add("XV-22", "X5-7", "accept", "empty subject and names not critical: a fault of the issuer, tolerated", edited(func(s *certSpec) { s.sanOptional = true }), home)
	add("XV-23", "X5-7", "accept", "critical is needed without a subject only", edited(func(s *certSpec) {
		s.subject, s.sanOptional = pkix.Name{Organization: []string{"acme"}}, true
	}), home)
	add("XV-24", "X5-30", "chain", "expired a minute ago", edited(func(s *certSpec) { s.notAfter = now.Add(-time.Minute) }), home)
	add("XV-25", "X5-30", "chain", "valid in a minute", edited(func(s *certSpec) { s.notBefore = now.Add(time.Minute) }), home)
	add("XV-26", "X5-30", "chain", "unknown critical extension", edited(func(s *certSpec) {
		s.extra = []pkix.Extension{{Id: asn1.ObjectIdentifier{1, 3, 6, 1, 4, 1, 32473, 1}, Critical: true, Value: []byte{5, 0}}}
	}), home)
	add("XV-27", "X5-31", "chain", "issued by the authority of another trust domain", chain(leaf.issue(cax)), home)
	add("XV-28", "X5-31", "chain", "issued by the authority of another trust domain", uri(other), home)
	add("XV-29", "X5-38", "bundle", "no bundle for the trust domain", uri(other), bundles{"example.org": {ca1}})
	add("XV-30", "X5-38", "bundle", "the bundle is empty", chain(base), bundles{"example.org": nil, "other.test": {cax}})

	short := intSpec.with(func(s *certSpec) { s.key, s.pathLen = "int0", new(0) })
	int0 := short.issue(ca1)
	below := intSpec.issue(int0)
	add("XV-31", "X5-30", "chain", "path length exceeded", chain(leaf.issue(below), below, int0), home)
	add("XV-32", "X5-14", "accept", "path length kept", chain(leaf.issue(int0), int0), home)
	notCA := intSpec.with(func(s *certSpec) { s.ca = false }).issue(ca1)
	add("XV-33", "X5-31", "chain", "intermediate with cA false", chain(leaf.issue(notCA), notCA), home)
	noSign := intSpec.with(func(s *certSpec) { s.usage = x509.KeyUsageCRLSign }).issue(ca1)
	add("XV-34", "X5-31", "chain", "intermediate without keyCertSign", chain(leaf.issue(noSign), noSign), home)
	add("XV-35", "X5-32", "leaf", "signing certificates do not authenticate", chain(int1), home)

	foreign := caSpec("intx", "spiffe://other.test").issue(ca1)
	guest := chain(leafSpec(other).issue(foreign), foreign)
	add("XV-36", "X5-31", "chain", "the root is no authority of the leaf's trust domain", guest, home)
	add("XV-37", "X5-12", "accept", "chaining is legitimate when the root is listed", guest, bundles{"other.test": {ca1}}).header["peer"] = other
	add("XV-38", "X5-22", "accept", "Ed25519: there is no list of algorithms", edited(func(s *certSpec) { s.ed25519 = true }), home)
	badURI("XV-39", "ID-15", "spiffe://example.org/%77eb", "percent-encoding")
	badURI("XV-40", "ID-8", "spiffe://Example.org/web", "upper case")
	badURI("XV-41", "ID-5", "spiffe://example.org/web#", "empty fragment, invisible after URL parsing")
	badURI("XV-42", "ID-2", "SPIFFE://example.org/web", "upper-case scheme (AMB-1)")
	badURI("XV-43", "ID-7", "spiffe://example.org:443/web", "port")
	badURI("XV-44", "ID-17", "spiffe://example.org/a/../web", "dot segment")
	badURI("XV-45", "ID-6", "spiffe://user@example.org/web", "user information")
	long := "spiffe://example.org/" + strings.Repeat("a", 2027)
	add("XV-46", "ID-21", "accept", "2048 bytes must be supported", uri(long), home).header["peer"] = long
	badURI("XV-47", "ID-21", long+"a", "2049 bytes (AMB-22)")
	dots := caSpec("cadots", "").issue(nil)
	add("XV-48", "GO-3", "parse", "trust domain a..b: a legal ID, but Go cannot read the certificate",
		chain(leafSpec("spiffe://a..b/web").issue(dots)), bundles{"a..b": {dots}})
	ip := caSpec("caip", "spiffe://192.0.2.7").issue(nil)
	add("XV-49", "ID-12", "accept", "names that look like an IP address are ordinary",
		chain(leafSpec("spiffe://192.0.2.7/web").issue(ip)), bundles{"192.0.2.7": {ip}}).header["peer"] = "spiffe://192.0.2.7/web"
	inside := intSpec.with(func(s *certSpec) { s.permitted = []string{"example.org"} }).issue(ca1)
	add("XV-50", "X5-15", "accept", "inside the name constraint", chain(leaf.issue(inside), inside), home)
	outside := intSpec.with(func(s *certSpec) { s.permitted = []string{"elsewhere.test"} }).issue(ca1)
	add("XV-51", "X5-30", "chain", "outside the name constraint", chain(leaf.issue(outside), outside), home)
	add("XV-52", "X5-30", "parse", "the extension with the names is there twice", edited(func(s *certSpec) { s.sanTwice = true }), home)
	add("XV-53", "X5-41", "bundle", "the leaf itself is listed as the only authority", chain(base), bundles{"example.org": {base}})
	add("XV-54", "X5-13", "accept", "no basic constraints: cA is false", edited(func(s *certSpec) { s.noBasic = true }), home)
	plain := caSpec("ca1", "").issue(nil)
	add("XV-55", "X5-10", "accept", "a root need not be an SVID", chain(leaf.issue(plain)), bundles{"example.org": {plain}})
	pathed := caSpec("ca1", "spiffe://example.org/ca").issue(nil)
	add("XV-56", "X5-9", "accept", "a root with a path: a fault of the issuer, tolerated", chain(leaf.issue(pathed)), bundles{"example.org": {pathed}})
	second := chain(leaf.issue(ca2))
	add("XV-57", "BND-1", "accept", "leaf under the second root", second, bundles{"example.org": {ca1, ca2}})
	add("XV-58", "X5-31", "chain", "leaf under a root that left the bundle", chain(base), bundles{"example.org": {ca2}})
	add("XV-59", "X5-32", "leaf", "the leaf comes first", chain(int1, under), home)
	add("XV-60", "X5-31", "chain", "self-signed leaf", chain(leaf.issue(nil)), home)

	load := func(id, rule, expect, why string, certs, key []byte) {
		v := add(id, rule, expect, why, nil, nil)
		delete(v.header, "role")
		delete(v.header, "now")
		delete(v.sections, "chain")
		v.sections["svid"], v.sections["key"] = base64Lines(certs), base64Lines(key)
	}
	pkcs8 := func(k crypto.Signer) []byte {
		return must.Do(x509.MarshalPKCS8PrivateKey(k))
	}
	sec1 := must.Do(x509.MarshalECPrivateKey(under.key.(*ecdsa.PrivateKey)))
	both := append(bytes.Clone(under.der), int1.der...)
	load("XV-61", "WAPI-32", "accept", "wire form", both, pkcs8(under.key))
	load("XV-62", "WAPI-26", "load", "key of another certificate", both, pkcs8(int1.key))
	load("XV-63", "WAPI-32", "load", "three bytes of junk after the last certificate", append(bytes.Clone(both), 1, 2, 3), pkcs8(under.key))
	load("XV-64", "WAPI-33", "load", "SEC1, where only PKCS#8 will do", both, sec1)
	load("XV-65", "X5-32", "load", "the leaf comes first", append(bytes.Clone(int1.der), under.der...), pkcs8(under.key))
	load("XV-66", "WAPI-32", "load", "no certificate", nil, pkcs8(under.key))
	loadBelow := func(id, rule, why string, signer *issued) {
		below := leaf.issue(signer)
		load(id, rule, "load", why, slices.Concat(below.der, signer.der), pkcs8(below.key))
	}
	loadBelow("XV-67", "X5-13", "the certificate above the leaf has cA false", notCA)
	loadBelow("XV-68", "X5-17", "the certificate above the leaf lacks keyCertSign", noSign)
	return all
}

// TestGenerateX509Vectors writes the files with -update. Otherwise it holds their headers to the
// generator, but not their certificates, as a later Go may encode those differently.
func TestGenerateX509Vectors(t *testing.T) {
	for _, v := range generateVectors() {
		file := filepath.Join("testdata", "x509", v.header["id"]+".txt")
		if *update {
			require.NoError(t, os.WriteFile(file, []byte(v.text()), 0o644))
		}
		assert.Equal(t, v.header, readX509Vector(t, file).header)
	}
}
