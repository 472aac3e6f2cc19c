package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/cryptobyte"
	casn1 "golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/certs/certpem"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func block(kind string, b []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}))
}

// keyFiles are private keys in the three formats, as tools write them.
func keyFiles(t testing.TB) map[string]struct {
	pem string
	key crypto.Signer
} {
	t.Helper()
	p256 := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	p521 := must.Get(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))(t)
	ed := newKey(t, "ed25519")
	pkcs8 := func(key any) []byte { return must.Get(x509.MarshalPKCS8PrivateKey(key))(t) }
	sec1 := must.Get(x509.MarshalECPrivateKey(p256))(t)
	pkcs1 := x509.MarshalPKCS1PrivateKey(rsaKey().(*rsa.PrivateKey))
	params := block("EC PARAMETERS", unhex("06082a8648ce3d030107"))
	return map[string]struct {
		pem string
		key crypto.Signer
	}{
		"PKCS#8 P-256":           {block("PRIVATE KEY", pkcs8(p256)), p256},
		"PKCS#8 P-521":           {block("PRIVATE KEY", pkcs8(p521)), p521},
		"PKCS#8 RSA":             {block("PRIVATE KEY", pkcs8(rsaKey())), rsaKey()},
		"PKCS#8 Ed25519":         {block("PRIVATE KEY", pkcs8(ed)), ed},
		"PKCS#1":                 {block("RSA PRIVATE KEY", pkcs1), rsaKey()},
		"SEC1":                   {block("EC PRIVATE KEY", sec1), p256},
		"SEC1 with parameters":   {params + block("EC PRIVATE KEY", sec1), p256},
		"a comment in front":     {"# the key of web\n" + block("PRIVATE KEY", pkcs8(p256)), p256},
		"blank lines around":     {"\n\n" + block("PRIVATE KEY", pkcs8(p256)) + "\n \n", p256},
		"Windows line ends":      {strings.ReplaceAll(block("EC PRIVATE KEY", sec1), "\n", "\r\n"), p256},
		"PKCS#8 in an odd block": {strings.ReplaceAll(block("PRIVATE KEY", pkcs8(p256)), "\n-----END", "\n\n-----END"), p256},
	}
}

// requireSameKey compares as keys: an RSA key has values that it may have worked out or not, and
// leading zeros in them or not.
func requireSameKey(t *testing.T, want, got crypto.Signer, name string) {
	t.Helper()
	k, ok := want.(interface{ Equal(crypto.PrivateKey) bool })
	require.True(t, ok, name)
	require.True(t, k.Equal(got), "%s: another key", name)
}

func TestPrivateKeyPEM(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-5", "IST-2.3-3", "IST-2.3-4", "IST-2.3-5")
	for name, tc := range keyFiles(t) {
		key, err := pki.ParsePrivateKeyPEM([]byte(tc.pem))
		require.NoError(t, err, name)
		requireSameKey(t, tc.key, key, name)
		out, err := pki.MarshalPrivateKeyPEM(key)
		require.NoError(t, err, name)
		require.True(t, bytes.HasPrefix(out, []byte("-----BEGIN PRIVATE KEY-----\n")), name)
		back, err := pki.ParsePrivateKeyPEM(out)
		require.NoError(t, err, name)
		requireSameKey(t, tc.key, back, name)
	}
	_, err := pki.MarshalPrivateKeyPEM(remote{p256Key})
	require.EqualError(t, err, "pki: marshal private key: a key of type pki_test.remote cannot be exported")
	require.Error(t, must.Err(pki.MarshalPrivateKeyPEM(nil)))
}

func TestPrivateKeyPEMRefuses(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.1-7", "IST-2.3-6")
	files := keyFiles(t)
	good := files["PKCS#8 P-256"].pem
	small := smallKey()
	p224 := must.Get(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))(t)
	sec1 := must.Get(x509.MarshalECPrivateKey(p224))(t)
	b, _ := pem.Decode([]byte(good))
	for name, tc := range map[string]struct {
		pem  string
		also error
	}{
		"empty":              {"", nil},
		"text":               {"secret-text", nil},
		"two keys":           {good + good, nil},
		"certificate":        {string(pki.MarshalCertificatesPEM(newRoot(t).Certificate())), nil},
		"certificate too":    {good + string(pki.MarshalCertificatesPEM(newRoot(t).Certificate())), nil},
		"public key":         {block("PUBLIC KEY", b.Bytes), nil},
		"encrypted PKCS#8":   {block("ENCRYPTED PRIVATE KEY", b.Bytes), nil},
		"encrypted SEC1":     {"-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nAAAA\n-----END EC PRIVATE KEY-----\n", nil},
		"truncated DER":      {block("PRIVATE KEY", b.Bytes[:len(b.Bytes)-1]), nil},
		"bytes after PKCS#8": {block("PRIVATE KEY", append(slices.Clone(b.Bytes), 0)), nil},
		"bytes after SEC1":   {block("EC PRIVATE KEY", append(slices.Clone(sec1), 0)), nil},
		"bytes after PKCS#1": {block("RSA PRIVATE KEY", append(x509.MarshalPKCS1PrivateKey(small), 0)), nil},
		"only parameters":    {block("EC PARAMETERS", []byte{5, 0}), nil},
		"RSA of 1024 bits":   {block("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(small)), pki.ErrWeakKey},
		"P-224":              {block("EC PRIVATE KEY", sec1), pki.ErrWeakKey},
		"1 MiB and one":      {strings.Repeat("#", 1<<20-len(good)) + "\n" + good, spiffe.ErrTooLarge},
		"a key over 8 KiB":   {block("PRIVATE KEY", make([]byte, 8<<10+1)), spiffe.ErrTooLarge},
	} {
		key, err := pki.ParsePrivateKeyPEM([]byte(tc.pem))
		require.ErrorContains(t, err, "pki: parse private key: ", name)
		require.True(t, key == nil, "%s: a nil pointer in the interface", name)
		requireIs(t, err, tc.also, name)
		require.NotContains(t, err.Error(), "secret-text")
		require.NotContains(t, err.Error(), base64.StdEncoding.EncodeToString(b.Bytes)[:20])
	}
	require.NotPanics(t, func() { _, _ = pki.ParsePrivateKeyPEM(nil) })
}

func TestCertificatesPEM(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.3-1", "IST-2.11-2")
	a, b := newRoot(t).Certificate(), newRoot(t).Certificate()
	text := string(pki.MarshalCertificatesPEM(a, b))
	for name, in := range map[string]string{
		"two":               text,
		"text around":       "first" + "\n" + text + "hello",
		"comments in front": "# first\n" + string(pki.MarshalCertificatesPEM(a)) + "# second\n" + string(pki.MarshalCertificatesPEM(b)),
		"blank lines":       "\n" + strings.ReplaceAll(text, "-----END CERTIFICATE-----\n", "-----END CERTIFICATE-----\n\n\n"),
	} {
		certs, err := pki.ParseCertificatesPEM([]byte(in))
		require.NoError(t, err, name)
		require.Len(t, certs, 2, name)
		require.True(t, certs[0].Equal(a) && certs[1].Equal(b), name)
	}
	require.Empty(t, pki.MarshalCertificatesPEM())

	one := string(pki.MarshalCertificatesPEM(a))
	for name, in := range map[string]string{
		"empty":         "",
		"text":          "hello",
		"key after":     one + block("PRIVATE KEY", []byte{1}),
		"trusted":       block("TRUSTED CERTIFICATE", a.Raw),
		"request":       block("CERTIFICATE REQUEST", a.Raw),
		"trailing DER":  block("CERTIFICATE", append(bytes.Clone(a.Raw), 0)),
		"empty block":   block("CERTIFICATE", nil),
		"cut off":       one[:len(one)-30],
		"1 MiB and one": strings.Repeat("#", 1<<20-len(one)) + "\n" + one,
		"1,001":         strings.Repeat(one, 1001),
	} {
		certs, err := pki.ParseCertificatesPEM([]byte(in))
		assert.ErrorContains(t, err, "pki: parse certificates: ", name)
		assert.Nil(t, certs, name)
		if slices.Contains([]string{"1 MiB and one", "1,001"}, name) {
			assert.ErrorIs(t, err, spiffe.ErrTooLarge, name)
		}
	}
	require.Len(t, must.Get(pki.ParseCertificatesPEM([]byte(strings.Repeat(one, 1000))))(t), 1000)
}

// Errors are short, so that hostile input cannot fill a log.
func TestPEMErrorsAreShort(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("A", 300_000)
	key := newKey(t, "ecdsa-p256")
	value := sanValue(uriSAN("https://" + strings.Repeat("%zz", 20_000)))
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: base, NotAfter: base.Add(time.Hour), ExtraExtensions: []pkix.Extension{extension(value)}}
	cert := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	tmpl = &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: base, NotAfter: base.Add(time.Hour), Subject: pkix.Name{CommonName: long + "\n"}}
	subject := must.Get(x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key))(t)
	oid := append([]byte{0x2a}, bytes.Repeat([]byte{0x7f}, 6_000)...)
	var b cryptobyte.Builder
	b.AddASN1(casn1.SEQUENCE, func(b *cryptobyte.Builder) {
		b.AddASN1Int64(0)
		b.AddASN1(casn1.SEQUENCE, func(b *cryptobyte.Builder) {
			b.AddASN1(casn1.OBJECT_IDENTIFIER, func(b *cryptobyte.Builder) { b.AddBytes(oid) })
		})
		b.AddASN1OctetString([]byte{1})
	})
	for name, in := range map[string]string{
		"a type":              block(long, []byte{1}),
		"a name":              block("CERTIFICATE", cert),
		"an algorithm":        block("PRIVATE KEY", b.BytesOrPanic()),
		"a type behind a key": string(mustKeyPEM(t, key)) + block(long, []byte{1}),
	} {
		_, err := pki.ParseCertificatesPEM([]byte(in))
		require.Error(t, err, name)
		assert.Less(t, len(err.Error()), 500, "certificates: %s", name)
		_, err = pki.ParsePrivateKeyPEM([]byte(in))
		require.Error(t, err, name)
		assert.Less(t, len(err.Error()), 500, "key: %s", name)
		_, err = readCRLs([]byte(in))
		require.Error(t, err, name)
		assert.Less(t, len(err.Error()), 500, "CRLs: %s", name)
		_, err = pki.ParseCSRPEM([]byte(in))
		require.Error(t, err, name)
		assert.Less(t, len(err.Error()), 500, "request: %s", name)
	}
	named := []byte(block("CERTIFICATE", subject))
	_, err := pki.NewSecretPEM("ROOTCA", nil, nil, named, time.Time{})
	requireShort(t, err)
	for _, p := range []keyCertPEM{{Cert: named, Roots: named}, {Cert: certsPEM(newRoot(t).Certificate()), Roots: named}} {
		_, err = p.read(base)
		requireShort(t, err)
	}
	tmpl.IsCA, tmpl.BasicConstraintsValid = true, true
	lists := must.Get(readCRLs(newTestRoot(t).crl(t)))(t)
	err = checkCRL(lists[0], createCertificate(t, tmpl, key))
	require.ErrorContains(t, err, "has signed none of them")
	requireShort(t, err)
}

// requireShort tests an error that names a certificate.
func requireShort(t *testing.T, err error) {
	t.Helper()
	require.Error(t, err)
	require.Less(t, len(err.Error()), 1000)
	require.NotContains(t, err.Error(), "\n")
}

func mustKeyPEM(t *testing.T, key crypto.Signer) []byte {
	t.Helper()
	return must.Get(pki.MarshalPrivateKeyPEM(key))(t)
}

func FuzzParsePrivateKeyPEM(f *testing.F) {
	for name, tc := range keyFiles(f) {
		if !strings.Contains(name, "RSA") && name != "PKCS#1" { // slow to check; one is enough
			f.Add([]byte(tc.pem))
		}
	}
	f.Add([]byte(keyFiles(f)["PKCS#1"].pem))
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"))
	f.Add([]byte("-----BEGIN EC PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\nAAAA\n-----END EC PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		key, err := pki.ParsePrivateKeyPEM(data)
		if err != nil {
			require.True(t, key == nil)
			return
		}
		require.NoError(t, certpem.CheckKey(key.Public()))
		out := must.Get(pki.MarshalPrivateKeyPEM(key))(t)
		back := must.Get(pki.ParsePrivateKeyPEM(out))(t)
		require.True(t, pki.PublicKeysEqual(key.Public(), back.Public()))
		require.Equal(t, out, must.Get(pki.MarshalPrivateKeyPEM(back))(t))
	})
}

func FuzzParseCertificatesPEM(f *testing.F) {
	root := newRoot(f)
	leaf := must.Get(root.Issue(leafOptions()))(f)
	f.Add(pki.MarshalCertificatesPEM(leaf, root.Certificate()))
	f.Add(append([]byte("# a comment\n"), pki.MarshalCertificatesPEM(leaf)...))
	f.Add(append(pki.MarshalCertificatesPEM(leaf), "text"...))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Add([]byte(block("PRIVATE KEY", []byte{1, 2, 3})))
	f.Fuzz(func(t *testing.T, data []byte) {
		certs, err := pki.ParseCertificatesPEM(data)
		if err != nil {
			require.Nil(t, certs)
			return
		}
		require.NotEmpty(t, certs)
		out := pki.MarshalCertificatesPEM(certs...)
		back := must.Get(pki.ParseCertificatesPEM(out))(t)
		require.Len(t, back, len(certs))
		require.Equal(t, out, pki.MarshalCertificatesPEM(back...))
	})
}

func newKey(t testing.TB, a string) crypto.Signer {
	t.Helper()
	return must.Get(pki.NewKey(a))(t)
}

// rsaKey is made once: RSA keys are slow to make, and tests only need one or two.
var rsaKey = sync.OnceValue(func() crypto.Signer {
	key, err := pki.NewKey("rsa-2048")
	if err != nil {
		panic(err)
	}
	return key
})

func TestNewKey(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	conformance.Covers(t, "IST-2.2-1", "IST-2.2-2", "IST-2.2-3")
	p256 := newKey(t, "ecdsa-p256")
	assert.Equal(t, elliptic.P256(), p256.Public().(*ecdsa.PublicKey).Curve)
	p384 := newKey(t, "ecdsa-p384")
	assert.Equal(t, elliptic.P384(), p384.Public().(*ecdsa.PublicKey).Curve)
	assert.Equal(t, 2048, rsaKey().Public().(*rsa.PublicKey).N.BitLen())
	assert.Equal(t, 3072, newKey(t, "rsa-3072").Public().(*rsa.PublicKey).N.BitLen())
	assert.IsType(t, ed25519.PublicKey{}, newKey(t, "ed25519").Public())
	for _, key := range []crypto.Signer{p256, p384, rsaKey(), newKey(t, "ed25519")} {
		assert.NoError(t, certpem.CheckKey(key.Public()))
	}
	key := must.Get(pki.NewKey(""))(t)
	assert.Equal(t, elliptic.P256(), key.Public().(*ecdsa.PublicKey).Curve)
	for _, a := range []string{"rsa", "RSA-2048", "ecdsa-p256 ", "0", strings.Repeat("x", 1000)} {
		key, err := pki.NewKey(a)
		assert.ErrorContains(t, err, "pki: generate key: unknown key algorithm")
		assert.Less(t, len(err.Error()), 100)
		assert.True(t, key == nil, "a nil pointer in the interface")
	}
}

func oddModulus(bits int) *big.Int {
	n := new(big.Int).Lsh(big.NewInt(1), uint(bits-1))
	return n.Add(n, big.NewInt(1))
}

func TestCheckPublicKey(t *testing.T) {
	t.Parallel()
	p224 := must.Get(ecdsa.GenerateKey(elliptic.P224(), rand.Reader))(t)
	p521 := must.Get(ecdsa.GenerateKey(elliptic.P521(), rand.Reader))(t)
	rsaOf := func(bits, e int) *rsa.PublicKey { return &rsa.PublicKey{N: oddModulus(bits), E: e} }
	for _, tc := range []struct {
		name string
		key  crypto.PublicKey
		ok   bool
	}{
		{"RSA 2048", rsaOf(2048, 65537), true},
		{"RSA 8192", rsaOf(8192, 65537), true},
		{"RSA with a large exponent", rsaOf(3072, 1<<31-1), true},
		{"P-521", &p521.PublicKey, true},
		{"RSA 1024", rsaOf(1024, 65537), false},
		{"RSA 2047", rsaOf(2047, 65537), false},
		{"RSA 8193", rsaOf(8193, 65537), false},
		{"RSA 16384", rsaOf(16384, 65537), false},
		{"RSA exponent 1", rsaOf(2048, 1), false},
		{"RSA exponent 3", rsaOf(2048, 3), false},
		{"RSA exponent 65535", rsaOf(2048, 65535), false},
		{"RSA exponent 65536", rsaOf(2048, 65536), false},
		{"RSA exponent 65538", rsaOf(2048, 65538), false},
		{"RSA exponent -65537", rsaOf(2048, -65537), false},
		{"RSA even modulus", &rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), 2047), E: 65537}, false},
		{"RSA negative modulus", &rsa.PublicKey{N: new(big.Int).Neg(oddModulus(2048)), E: 65537}, false},
		{"RSA no modulus", &rsa.PublicKey{E: 65537}, false},
		{"RSA nil", (*rsa.PublicKey)(nil), false},
		{"RSA by value", *rsaOf(2048, 65537), false},
		{"P-224", &p224.PublicKey, false},
		{"not on the curve", offCurve(), false},
		{"ECDSA without a curve", &ecdsa.PublicKey{}, false},
		{"ECDSA without a point", &ecdsa.PublicKey{Curve: elliptic.P256()}, false},
		{"ECDSA nil", (*ecdsa.PublicKey)(nil), false},
		{"Ed25519 neutral element", ed25519.PublicKey(append([]byte{1}, make([]byte, 31)...)), false},
		{"Ed25519 neutral element with the other sign", ed25519.PublicKey(append(append([]byte{1}, make([]byte, 30)...), 0x80)), false},
		{"Ed25519 of order 4", ed25519.PublicKey(make([]byte, 32)), false},
		{"Ed25519 of order 8", ed25519.PublicKey(unhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85")), false},
		{"Ed25519 short", ed25519.PublicKey(make([]byte, 31)), false},
		{"Ed25519 nil", ed25519.PublicKey(nil), false},
		{"another kind", struct{}{}, false},
		{"a private key", p521, false},
		{"nil", nil, false},
	} {
		err := certpem.CheckKey(tc.key)
		if tc.ok {
			assert.NoError(t, err, tc.name)
			continue
		}
		assert.ErrorIs(t, err, pki.ErrWeakKey, tc.name)
	}
}

// A forged signature, made without a private key, verifies with a key of small order, which is why such a key is
// refused.
func TestSmallOrderIsForgeable(t *testing.T) {
	t.Parallel()
	neutral := append([]byte{1}, make([]byte, 31)...)
	forged := append(append([]byte{}, neutral...), make([]byte, 32)...) // R is the neutral element, S is 0
	require.True(t, ed25519.Verify(neutral, []byte("anything"), forged))
	require.ErrorIs(t, certpem.CheckKey(ed25519.PublicKey(neutral)), pki.ErrWeakKey)
}

func offCurve() *ecdsa.PublicKey {
	//lint:ignore SA1019 nothing else makes a bad key
	return &ecdsa.PublicKey{Curve: elliptic.P256(), X: big.NewInt(1), Y: big.NewInt(1)}
}

func TestPublicKeysEqual(t *testing.T) {
	t.Parallel()
	all := []crypto.PublicKey{
		newKey(t, "ecdsa-p256").Public(), newKey(t, "ecdsa-p256").Public(), newKey(t, "ecdsa-p384").Public(),
		rsaKey().Public(), &rsa.PublicKey{N: oddModulus(2048), E: 65537},
		newKey(t, "ed25519").Public(), newKey(t, "ed25519").Public(),
	}
	for i, a := range all {
		for j, b := range all {
			assert.Equal(t, i == j, pki.PublicKeysEqual(a, b), "%d, %d", i, j)
		}
	}
	var noRSA *rsa.PublicKey
	var noEC *ecdsa.PublicKey
	nothing := []crypto.PublicKey{nil, noRSA, noEC, ed25519.PublicKey{}, "text", newKey(t, "ecdsa-p256")}
	for i, a := range nothing {
		for j, b := range append(nothing, all...) {
			assert.False(t, pki.PublicKeysEqual(a, b), "%d, %d", i, j)
			assert.False(t, pki.PublicKeysEqual(b, a), "%d, %d", j, i)
		}
	}
}
