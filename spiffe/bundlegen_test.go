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
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
)

var updateBundles = flag.Bool("update-bundles", false, "write the documents of testdata/bundles anew")

// bundleTemplates reads testdata/bundles/templates.txt, which says what it is.
func bundleTemplates(t testing.TB) map[string]string {
	t.Helper()
	templates := map[string]string{}
	for line := range strings.Lines(string(readBundleFile(t, "templates.txt"))) {
		if name, text, ok := strings.Cut(strings.TrimSuffix(line, "\n"), " "); ok && name != "#" {
			templates[name] = must.Get(strconv.Unquote(text))(t)
		}
	}
	return templates
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
	return must.Do(ecdsa.ParseRawPrivateKey(curve, scalar))
}

func bundleRSA() *rsa.PublicKey {
	n := must.Do(base64.RawURLEncoding.DecodeString(rsaModulus))
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
	der := must.Do(x509.CreateCertificate(nil, tmpl, parent, pub, signer))
	return must.Do(x509.ParseCertificate(der))
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
	changed := sequence(bytes.Replace(tbs.Bytes, cert.RawSubjectPublicKeyInfo, spki, 1))
	return must.Do(x509.ParseCertificate(sequence(append(changed, after...))))
}

// bundleJunk is the SubjectPublicKeyInfo of cert with another point behind its own.
func bundleJunk(cert *x509.Certificate, key *ecdsa.PublicKey) []byte {
	var spki asn1.RawValue
	if _, err := asn1.Unmarshal(cert.RawSubjectPublicKeyInfo, &spki); err != nil {
		panic(err)
	}
	point := must.Do(key.Bytes())
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

	kat := must.Do(os.ReadFile(filepath.Join("testdata", "bundles", "kat-ca1.pem")))
	block, _ := pem.Decode(kat)
	cert := must.Do(x509.ParseCertificate(block.Bytes))
	m.cert("KATCA", cert)
	return m
}

// key writes the JWK members of a key in the plainest way, without the code under test.
func (m bundleMaterial) key(name string, key crypto.PublicKey) {
	b64 := base64.RawURLEncoding.EncodeToString
	switch k := key.(type) {
	case *ecdsa.PublicKey:
		point := must.Do(k.Bytes())
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
	for name, template := range bundleTemplates(t) {
		file := filepath.Join("testdata", "bundles", name+".json")
		want := m.document(t, template)
		if *updateBundles {
			require.NoError(t, os.WriteFile(file, []byte(want), 0o644))
		}
		got := must.Get(os.ReadFile(file))(t)
		assert.Equal(t, want, string(got), "%s", file)
	}
}
