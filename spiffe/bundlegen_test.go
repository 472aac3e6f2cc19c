package spiffe_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/pem"
	"flag"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

var updateBundles = flag.Bool("update-bundles", false, "write the documents of testdata/bundles anew")

// bundleTemplates are the documents of testdata/bundles, by file name without ".json". What stands
// between « and » is replaced: «NAME» by the key members of that key or certificate, «der:NAME» by
// the certificate in base64, and so on; see bundleMaterial.
//
// BV, BS and KAT are the vectors of the conformance table, BX are ours.
var bundleTemplates = map[string]string{
	"KAT": `{"spiffe_sequence":7,"spiffe_refresh_hint":300,"keys":[{"use":"x509-svid",«KATCA»,"x5c":["«der:KATCA»"]},{"use":"jwt-svid","kid":"jwt-1",«KATJ»},{"use":"wit-svid","kid":"wit-1",«KATW»}]}` + "\n",

	"BV-01": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»}]}`,
	"BV-02": `{"spiffe_sequence":7,"spiffe_refresh_hint":300,"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»},{"use":"jwt-svid","kid":"jwt-1",«J1»},{"use":"wit-svid","kid":"wit-1",«W1»}]}`,
	"BV-03": `{"keys":[]}`,
	"BV-04": `{}`,
	"BV-05": `{"keys":null}`,
	"BV-06": `{"keys":{}}`,
	"BV-07": `[]`,
	"BV-08": `{"keys":[{"use":"sig","kid":"a",«J1»}]}`,
	"BV-09": `{"keys":[{"kid":"a",«J1»},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-10": `{"keys":[{"use":"JWT-SVID","kid":"a",«J1»}]}`,
	"BV-11": `{"keys":[{"Use":"jwt-svid","kid":"a",«J1»}]}`,
	"BV-12": `{"keys":[{"use":"jwt-svid","kid":"pq","kty":"AKP","alg":"ML-DSA-65","pub":"AAAA"},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-13": `{"keys":[{"use":"jwt-svid","kid":"a","crv":"P-256","x":"AA","y":"AA"},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-14": `{"keys":[{"use":"x509-svid",«CA1»},{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,
	"BV-15": `{"keys":[{"use":"x509-svid","x5c":[],«CA1»},{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,
	"BV-16": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»","«der:CA2»"],«CA1»}]}`,
	"BV-17": `{"keys":[{"use":"x509-svid","kid":"x","x5c":["«der:CA1»"],«CA1»}]}`,
	"BV-18": `{"keys":[{"use":"jwt-svid",«J1»},{"use":"jwt-svid","kid":"b",«J2»}]}`,
	"BV-19": `{"keys":[{"use":"jwt-svid","kid":"",«J1»}]}`,
	"BV-20": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»},{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,
	"BV-21": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»},{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»}]}`,
	"BV-22": `{"keys":[],"acme_extra":{"a":1}}`,
	"BV-23": `{"keys":[{"use":"jwt-svid","kid":"a","alg":"ES256","key_ops":["verify"],"acme":1,«J1»}]}`,
	"BV-24": `{"spiffe_sequence":9007199254740993,"keys":[]}`,
	"BV-25": `{"spiffe_sequence":18446744073709551615,"keys":[]}`,
	"BV-26": `{"spiffe_sequence":"7","keys":[]}`,
	"BV-27": `{"spiffe_refresh_hint":1.5,"keys":[]}`,
	"BV-28": `{"spiffe_refresh_hint":0,"keys":[]}`,
	"BV-29": `{"spiffe_refresh_hint":-5,"keys":[]}`,
	"BV-30": `{"keys":[{"use":"x509-svid","x5c":["«url:CA1»"],«CA1»}]}`,
	"BV-31": `{"keys":[{"use":"x509-svid","x5c":["«pem:CA1»"],«CA1»}]}`,
	"BV-32": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA2»}]}`,
	"BV-33": `{"keys":[{"use":"x509-svid","x5c":["«der:LEAF»"],«LEAF»}]}`,
	"BV-34": `{"keys":[],"x":"«ff»"}`,
	"BV-35": `{"keys":[]} {}`,
	"BV-36": `{"keys":[{"use":"jwt-svid","kid":"a",«J1»}],"keys":[]}`,
	"BV-37": `{"keys":[{"use":"jwt-svid","kid":"k",«J1»},{"use":"wit-svid","kid":"k",«W1»}]}`,
	"BV-38": `{"keys":[{"use":"jwt-svid","kid":"k",«J1»},{"use":"jwt-svid","kid":"k",«J2»}]}`,
	"BV-39": `{"keys":[{"use":"jwt-svid","kid":"a","kty":"EC","crv":"P-256","x":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA","y":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-40": `{"keys":[{"use":"jwt-svid","kid":"ed",«Ed»},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-41": `{"keys":[null,7,"x",{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BV-42": `{"keys":[{"use":"jwt-svid","kid":"r",«J2»}]}`,
	"BV-43": `<html>503</html>`,
	"BV-44": ``,
	"BV-45": `{"Keys":[]}`,
	"BV-46": `{"keys":[{"use":"jwt-svid","kid":7,«J1»},{"use":"jwt-svid","kid":"b",«J1»}]}`,

	"BS-04-old": `{"spiffe_sequence":7,"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»},{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,
	"BS-04-new": `{"spiffe_sequence":6,"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»}]}`,
	"BS-05-old": `{"spiffe_sequence":7,"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«CA1»}]}`,
	"BS-05-new": `{"keys":[{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,
	"BS-06-new": `{"spiffe_sequence":7,"keys":[{"use":"x509-svid","x5c":["«der:CA2»"],«CA2»}]}`,

	// All kinds of keys.
	"BX-01": `{"keys":[{"use":"jwt-svid","kid":"384",«J3»},{"use":"jwt-svid","kid":"521",«J4»},{"use":"jwt-svid","kid":"256",«J1»},{"use":"jwt-svid","kid":"rsa",«J2»}]}`,
	"BX-02": `{"keys":[{"use":"x509-svid","x5c":["«der:CARSA»"],«CARSA»},{"use":"x509-svid","x5c":["«der:CAEd»"],«CAEd»},{"use":"x509-svid","x5c":["«der:CA384»"],«CA384»},{"use":"x509-svid","x5c":["«der:CA521»"],«CA521»}]}`,
	"BX-03": `{"keys":[{"use":"x509-svid","x5c":["«der:CA224»"],«CA224»}]}`,

	// The certificate of an entry.
	"BX-04": `{"keys":[{"use":"x509-svid","x5c":["«lines:CA1»"],«CA1»}]}`,
	"BX-05": `{"keys":[{"use":"x509-svid","x5c":["«raw:CA2»"],«CA2»}]}`,
	"BX-06": `{"keys":[{"use":"x509-svid","x5c":[7,"«der:CA1»"],«CA1»}]}`,
	"BX-07": `{"keys":[{"use":"x509-svid","x5c":"«der:CA1»",«CA1»}]}`,
	"BX-08": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»",7,{}],«CA1»}]}`,
	"BX-09": `{"keys":[{"use":"x509-svid","x5c":["«tail:CA1»"],«CA1»}]}`,
	"BX-10": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],«J2»},{"use":"x509-svid","x5c":["«der:CA1»"],"kty":"EC"},{"use":"x509-svid","x5c":["«der:CARSA»"],«CA1»},{"use":"x509-svid","x5c":["«der:CAEd»"],"kty":"OKP","crv":"X25519","x":"AA"},{"use":"x509-svid","x5c":["«der:CA1»"]}]}`,

	// Keys that are damaged or that nothing can use.
	"BX-11": `{"keys":[{"use":"jwt-svid","kid":"short","kty":"EC","crv":"P-256","x":"AA","y":"AA"},{"use":"jwt-svid","kid":"no-y","kty":"EC","crv":"P-256","x":"«x:J1»"},{"use":"jwt-svid","kid":"padded","kty":"EC","crv":"P-256","x":"«x:J1»=","y":"«y:J1»"},{"use":"jwt-svid","kid":"stray","kty":"EC","crv":"P-256","x":"«stray:J1»","y":"«y:J1»"},{"use":"jwt-svid","kid":"line","kty":"EC","crv":"P-256","x":"«x:J1»\n","y":"«y:J1»"},{"use":"jwt-svid","kid":"curve","kty":"EC","crv":"P-384","x":"«x:J1»","y":"«y:J1»"},{"use":"jwt-svid","kid":"p224","kty":"EC","crv":"P-224","x":"«x:J1»","y":"«y:J1»"},{"use":"jwt-svid","kid":"secp256k1","kty":"EC","crv":"secp256k1","x":"«x:J1»","y":"«y:J1»"},{"use":"jwt-svid","kid":"b",«J1»}]}`,
	"BX-12": `{"keys":[{"use":"jwt-svid","kid":"1024","kty":"RSA","n":"«n:1024»","e":"AQAB"},{"use":"jwt-svid","kid":"8200","kty":"RSA","n":"«n:8200»","e":"AQAB"},{"use":"jwt-svid","kid":"huge","kty":"RSA","n":"«n:32768»","e":"AQAB"},{"use":"jwt-svid","kid":"even","kty":"RSA","n":"«n:even»","e":"AQAB"},{"use":"jwt-svid","kid":"zero","kty":"RSA","n":"«n:zero»","e":"AQAB"},{"use":"jwt-svid","kid":"e=1","kty":"RSA","n":"«n:2048»","e":"AQ"},{"use":"jwt-svid","kid":"e even","kty":"RSA","n":"«n:2048»","e":"AQAA"},{"use":"jwt-svid","kid":"e long","kty":"RSA","n":"«n:2048»","e":"AQAAAAE"},{"use":"jwt-svid","kid":"e zero","kty":"RSA","n":"«n:2048»","e":"AAEAAQ"},{"use":"jwt-svid","kid":"no e","kty":"RSA","n":"«n:2048»"},{"use":"jwt-svid","kid":"no n","kty":"RSA","e":"AQAB"},{"use":"jwt-svid","kid":"2^31","kty":"RSA","n":"«n:2048»","e":"gAAAAQ"},{"use":"jwt-svid","kid":"e=3","kty":"RSA","n":"«n:2048»","e":"Aw"},{"use":"jwt-svid","kid":"8192","kty":"RSA","n":"«n:8192»","e":"AQAB"}]}`,
	"BX-13": `{"keys":[{"use":"jwt-svid","kid":"a","kty":"oct","k":"AAAA"},{"use":"jwt-svid","kid":"b","kty":"ec","crv":"P-256","x":"AA","y":"AA"},{"use":7,"kid":"c",«J1»},{"use":"X509-svid","x5c":["«der:CA1»"],«CA1»}]}`,

	// JSON in unusual forms.
	"BX-14": `{"k\u0065ys":[{"us\u0065":"jwt\u002dsvid","kid":"\ud83d\udd11 \"\\\/\b\f\n\r\t\u0001","kty":"EC","crv":"P-256","x":"«x:J1»","y":"«y:J1»"},{"use":"x509-svid","x5c":["«slash:CA1»"],«CA1»}]}`,
	"BX-15": "\r\n\t { \"keys\" :\n[ { \"use\" : \"x509-svid\" , \"x5c\" : [ \"«der:CA1»\" ] , «CA1» } ] , \"spiffe_sequence\" : 0 }\r\n",
	"BX-16": `{"keys":[],"k\u0065ys":[]}`,
	"BX-17": `{"keys":[],"acme":[{"a":{"b":1,"c":2,"b":3}}]}`,
	"BX-18": `{"keys":[{"use":"sig","kid":"a","kid":"b"}]}`,
	"BX-19": `{"keys":[],"acme":"\ud800x"}`,
	"BX-20": "\ufeff" + `{"keys":[]}`,
	"BX-21": `{"keys":[],}`,
	"BX-22": `{"keys":[{"use":"jwt-svid","kid":"a` + "\n" + `"}]}`,
	"BX-23": `{"keys":[]`,
	"BX-24": `{"keys":[],"acme":01}`,
	"BX-25": `{"keys":[],"acme":` + strings.Repeat("[", 63) + strings.Repeat("]", 63) + `}`,
	"BX-26": `{"keys":[],"acme":` + strings.Repeat("[", 64) + strings.Repeat("]", 64) + `}`,
	"BX-27": `"keys"`,

	// Numbers.
	"BX-28": `{"spiffe_sequence":-1,"keys":[]}`,
	"BX-29": `{"spiffe_sequence":18446744073709551616,"keys":[]}`,
	"BX-30": `{"spiffe_sequence":7.0,"keys":[]}`,
	"BX-31": `{"spiffe_sequence":7e0,"keys":[]}`,
	"BX-32": `{"spiffe_sequence":null,"keys":[]}`,
	"BX-33": `{"spiffe_refresh_hint":"300","keys":[]}`,
	"BX-34": `{"spiffe_refresh_hint":9223372037,"keys":[]}`,
	"BX-35": `{"spiffe_refresh_hint":-99999999999999999999999999,"keys":[]}`,
	"BX-36": `{"spiffe_refresh_hint":9223372036,"spiffe_sequence":0,"keys":[]}`,

	// Key IDs.
	"BX-37": `{"keys":[{"use":"jwt-svid","kid":"k",«J1»},{"use":"jwt-svid","kid":"k",«J1»}]}`,
	"BX-38": `{"keys":[{"use":"jwt-svid","kid":"k",«Ed»},{"use":"jwt-svid","kid":"k",«J1»}]}`,
	"BX-39": `{"keys":[{"use":"x509-svid","kid":"k","x5c":["«der:CA1»"],«CA1»},{"use":"jwt-svid","kid":"k",«J1»}]}`,
	"BX-40": `{"keys":[{"use":"jwt-svid","kid":"a",«J1»,"d":"AA"}]}`,

	// Found by breaking the code on purpose and looking for what no other document noticed.
	"BX-41": `{"keys":[{"use":"x509-svid","x5c":["«stray:CA2»"],«CA2»}]}`,
	"BX-42": `{"spiffe_sequence":7E0,"keys":[]}`,
	"BX-43": `{"keys":[{"use":"x509-svid","x5c":["«der:CAJunk»"],«J1»},{"use":"x509-svid","x5c":["«der:CAJunk»"],«CA1»}]}`,
	"BX-44": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],"kty":"EC","crv":"P-384","x":"«x:CA1»","y":"«y:CA1»"},{"use":"x509-svid","x5c":["«der:CA1»"],"kty":"EC","crv":"P-256","x":"«x:CA1»","y":"«y:CA2»"},{"use":"x509-svid","x5c":["«der:CA1»"],"kty":"EC","crv":"P-256","x":"«x:CA1»A","y":"«y:CA1»"},{"use":"x509-svid","x5c":["«der:CARSA»"],"kty":"RSA","n":"«n:rsa»","e":"Aw"},{"use":"x509-svid","x5c":["«der:CAEd»"],"kty":"OKP","crv":"Ed25519","x":"«x:CA1»"}]}`,
	"BX-45": `{"keys":[{"use":"x509-svid","x5c":["«der:CAX25519»"],"kty":"OKP","crv":"X25519","x":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"}]}`,
	"BX-46": `{"keys":[{"use":"x509-svid","x5c":["«der:CA1»"],"kty":"RSA","crv":"P-256","x":"«x:CA1»","y":"«y:CA1»"},{"use":"x509-svid","x5c":["«der:CARSA»"],"kty":"EC","n":"«n:rsa»","e":"AQAB"},{"use":"x509-svid","x5c":["«der:CAEd»"],"kty":"EC","crv":"Ed25519","x":"«x:CAEd»"},{"use":"x509-svid","x5c":["«der:CAEd»"],"kty":"OKP","crv":"X25519","x":"«x:CAEd»"}]}`,
}

// bundleMaterial has what the templates are filled with. All of it follows from labels, and ECDSA
// without randomness signs by RFC 6979, so that the documents come out the same every time.
type bundleMaterial struct{ expand map[string]string }

// rsaModulus is the modulus of a key whose private half was not kept.
const rsaModulus = "ob2kprd-cc6Y4AsAdAGOg_0CFTHDuvrmFtH8KfUSHnnm0fpVHSPlJJJGxHGxyh8XU9q6yyKDo2LGyjbYSA9eIvYhXJYYU5iwr3AXjUsZQUH2N8ThiAtLHadlS3c5Y_dY2y0AVNQbBX9Wxw5J_x3szp" +
	"PRUQZ1ffwb85KunK0tccbomngK8qhlnzD95EeKOHs8y3ctmTyST3PEXjfIaPOMBllL8t9UuqKL4zk6qO8EpB-0S4Ok3avpa55Orsmj9a1SqvxeqErOcWtVzLwGudzfILhQEgs1E9WvIhDhv7t6Pqln" +
	"Xchh7LoLb86RXUbeZcro7C7MjWYh4dC1NtSeNaFL3Q"

func bundleKey(curve elliptic.Curve, label string) *ecdsa.PrivateKey {
	size := (curve.Params().BitSize + 7) / 8
	scalar := make([]byte, size)
	sum := sha256.Sum256([]byte(label))
	copy(scalar[max(0, size-len(sum)):], sum[:])
	k, err := ecdsa.ParseRawPrivateKey(curve, scalar)
	if err != nil {
		panic(err)
	}
	return k
}

func bundleRSA() *rsa.PublicKey {
	n, err := base64.RawURLEncoding.DecodeString(rsaModulus)
	if err != nil {
		panic(err)
	}
	return &rsa.PublicKey{N: new(big.Int).SetBytes(n), E: 65537}
}

func bundleCert(pub crypto.PublicKey, signer crypto.Signer, serial int64, path string) *x509.Certificate {
	tmpl := &x509.Certificate{
		SerialNumber:          big.NewInt(serial),
		NotBefore:             time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:              time.Date(2045, 1, 1, 0, 0, 0, 0, time.UTC),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		URIs:                  []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: path}},
	}
	parent := &x509.Certificate{Subject: pkix.Name{Organization: []string{"example.org"}}}
	if path == "" {
		tmpl.Subject, tmpl.IsCA = parent.Subject, true
		tmpl.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	}
	der, err := x509.CreateCertificate(nil, tmpl, parent, pub, signer)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		panic(err)
	}
	return cert
}

// bundleCertWithKey returns cert with another SubjectPublicKeyInfo, of which the signature knows nothing.
func bundleCertWithKey(cert *x509.Certificate, spki []byte) *x509.Certificate {
	sequence := func(content []byte) []byte {
		return mustDER(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: content})
	}
	var tbs asn1.RawValue
	if _, err := asn1.Unmarshal(cert.RawTBSCertificate, &tbs); err != nil {
		panic(err)
	}
	var whole asn1.RawValue
	if _, err := asn1.Unmarshal(cert.Raw, &whole); err != nil {
		panic(err)
	}
	after := whole.Bytes[len(cert.RawTBSCertificate):]
	changed, err := x509.ParseCertificate(sequence(append(sequence(bytes.Replace(tbs.Bytes, cert.RawSubjectPublicKeyInfo, spki, 1)), after...)))
	if err != nil {
		panic(err)
	}
	return changed
}

// bundleJunk is the SubjectPublicKeyInfo of cert with another point behind its own.
func bundleJunk(cert *x509.Certificate, key *ecdsa.PublicKey) []byte {
	var spki asn1.RawValue
	if _, err := asn1.Unmarshal(cert.RawSubjectPublicKeyInfo, &spki); err != nil {
		panic(err)
	}
	point, err := key.Bytes()
	if err != nil {
		panic(err)
	}
	return mustDER(asn1.RawValue{Tag: asn1.TagSequence, IsCompound: true, Bytes: slices.Concat(spki.Bytes, point)})
}

func bundleX25519() []byte {
	return append([]byte{0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x6e, 3, 33, 0}, make([]byte, 32)...)
}

// bundleLeaf is LEAF of the vectors: a workload's certificate, issued by CA1.
func bundleLeaf() *x509.Certificate {
	ca1, leaf := bundleKey(elliptic.P256(), "svidkit-bundle-ca1"), bundleKey(elliptic.P256(), "svidkit-bundle-leaf")
	return bundleCert(leaf.Public(), ca1, 20, "/ns/prod/sa/web")
}

func newBundleMaterial() bundleMaterial {
	m := bundleMaterial{expand: map[string]string{"ff": "\xff"}}
	p256 := elliptic.P256()
	ca1 := bundleKey(p256, "svidkit-bundle-ca1")
	self := func(name string, key crypto.Signer, serial int64) {
		m.cert(name, bundleCert(key.Public(), key, serial, ""))
	}
	self("CA1", ca1, 1)
	self("CA2", bundleKey(p256, "svidkit-bundle-ca2"), 1<<40) // a longer serial: base64 with padding
	self("CA224", bundleKey(elliptic.P224(), "svidkit-bundle-ca224"), 3)
	self("CA384", bundleKey(elliptic.P384(), "svidkit-bundle-ca384"), 4)
	self("CA521", bundleKey(elliptic.P521(), "svidkit-bundle-ca521"), 5)
	seed := sha256.Sum256([]byte("svidkit-bundle-ed25519"))
	self("CAEd", ed25519.NewKeyFromSeed(seed[:]), 6)
	m.cert("CARSA", bundleCert(bundleRSA(), ca1, 7, ""))
	m.cert("LEAF", bundleLeaf())
	ca := bundleCert(ca1.Public(), ca1, 1, "")
	m.cert("CAJunk", bundleCertWithKey(ca, bundleJunk(ca, &bundleKey(p256, "svidkit-bundle-jwt1").PublicKey)))
	m.cert("CAX25519", bundleCertWithKey(ca, bundleX25519()))

	m.key("J1", bundleKey(p256, "svidkit-bundle-jwt1").Public())
	m.key("J2", bundleRSA())
	m.key("J3", bundleKey(elliptic.P384(), "svidkit-bundle-jwt3").Public())
	m.key("J4", bundleKey(elliptic.P521(), "svidkit-bundle-jwt4").Public())
	m.key("W1", bundleKey(p256, "svidkit-bundle-wit1").Public())
	m.key("Ed", ed25519.NewKeyFromSeed(seed[:]).Public())
	m.key("KATJ", bundleKey(p256, "spiffe-kat-jwt1").Public())
	m.key("KATW", bundleKey(p256, "spiffe-kat-wit1").Public())
	// The last character of 32 bytes in base64url has two bits that mean nothing.
	x := m.expand["x:J1"]
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	m.expand["stray:J1"] = x[:42] + string(alphabet[strings.IndexByte(alphabet, x[42])|1])
	ca2, pad, _ := strings.Cut(m.expand["der:CA2"], "=")
	last := len(ca2) - 1
	m.expand["stray:CA2"] = ca2[:last] + string(alphabet[strings.IndexByte(alphabet, ca2[last])|1]) + "=" + pad

	for _, bits := range []uint{1024, 2048, 8192, 8200, 32768} {
		n := new(big.Int).Lsh(big.NewInt(1), bits-1)
		m.expand[fmt.Sprintf("n:%d", bits)] = base64.RawURLEncoding.EncodeToString(n.SetBit(n, 0, 1).Bytes())
	}
	n := bundleRSA().N
	m.expand["n:rsa"] = base64.RawURLEncoding.EncodeToString(n.Bytes())
	m.expand["n:zero"] = base64.RawURLEncoding.EncodeToString(append([]byte{0}, n.Bytes()...))
	m.expand["n:even"] = base64.RawURLEncoding.EncodeToString(new(big.Int).SetBit(n, 0, 0).Bytes())

	kat, err := os.ReadFile(filepath.Join("testdata", "bundles", "kat-ca1.pem"))
	if err != nil {
		panic(err)
	}
	block, _ := pem.Decode(kat)
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		panic(err)
	}
	m.cert("KATCA", cert)
	return m
}

// key writes the JWK members of a key in the plainest way, without the code under test.
func (m bundleMaterial) key(name string, key crypto.PublicKey) {
	b64 := base64.RawURLEncoding.EncodeToString
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		point, err := k.Bytes()
		if err != nil {
			panic(err)
		}
		half := len(point) / 2
		x, y := b64(point[1:1+half]), b64(point[1+half:])
		m.expand["x:"+name], m.expand["y:"+name] = x, y
		m.expand[name] = fmt.Sprintf(`"kty":"EC","crv":"%s","x":"%s","y":"%s"`, k.Params().Name, x, y)
	case *rsa.PublicKey:
		m.expand[name] = fmt.Sprintf(`"kty":"RSA","n":"%s","e":"AQAB"`, b64(k.N.Bytes()))
	case ed25519.PublicKey:
		m.expand["x:"+name] = b64(k)
		m.expand[name] = fmt.Sprintf(`"kty":"OKP","crv":"Ed25519","x":"%s"`, b64(k))
	}
}

func (m bundleMaterial) cert(name string, cert *x509.Certificate) {
	m.key(name, cert.PublicKey)
	std := base64.StdEncoding.EncodeToString(cert.Raw)
	m.expand["der:"+name] = std
	m.expand["raw:"+name] = strings.TrimRight(std, "=")
	m.expand["url:"+name] = base64.URLEncoding.EncodeToString(cert.Raw)
	m.expand["pem:"+name] = `-----BEGIN CERTIFICATE-----\n` + std
	m.expand["lines:"+name] = std[:64] + `\n\r\n\n` + std[64:]
	m.expand["slash:"+name] = strings.ReplaceAll(std, "/", `\/`)
	m.expand["tail:"+name] = base64.StdEncoding.EncodeToString(append(cert.Raw[:len(cert.Raw):len(cert.Raw)], 0))
}

func (m bundleMaterial) document(t testing.TB, template string) string {
	t.Helper()
	var b strings.Builder
	for {
		text, rest, found := strings.Cut(template, "«")
		b.WriteString(text)
		if !found {
			return b.String()
		}
		name, after, _ := strings.Cut(rest, "»")
		value, ok := m.expand[name]
		require.True(t, ok, "no material %q", name)
		b.WriteString(value)
		template = after
	}
}

// The documents on disk are what the templates say; with -update-bundles they are made so.
func TestBundleDocumentsOnDisk(t *testing.T) {
	t.Parallel()
	m := newBundleMaterial()
	require.Contains(t, m.expand["der:CA1"], "/", "BX-14 needs a slash to escape")
	require.Contains(t, m.expand["der:CA1"], "+", "BV-30 needs what differs between the alphabets")
	require.Contains(t, m.expand["der:CA2"], "=", "BX-05 needs padding to leave out")
	for name, template := range bundleTemplates {
		file := filepath.Join("testdata", "bundles", name+".json")
		want := m.document(t, template)
		if *updateBundles {
			require.NoError(t, os.WriteFile(file, []byte(want), 0o644))
		}
		got := must.Get(os.ReadFile(file))(t)
		assert.Equal(t, want, string(got), "%s", file)
	}
}
