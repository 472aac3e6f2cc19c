package pki_test

import (
	"bytes"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe"
)

func TestCertificateSANs(t *testing.T) {
	t.Parallel()
	root := newRoot(t)
	o := leafOptions()
	o.DNSNames = []string{"b", "*.a.b"}
	leaf, err := root.IssueLeaf(o)
	require.NoError(t, err)
	sans, err := pki.CertificateSANs(leaf)
	require.NoError(t, err)
	require.Equal(t, []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("b"), pki.DNSSAN("*.a.b")}, sans)
	o2 := certOptions()
	o2.CommonName, o2.SANs = "x", nil
	cert, err := root.IssueCertificate(o2)
	require.NoError(t, err)
	sans, err = pki.CertificateSANs(cert)
	require.NoError(t, err)
	require.Empty(t, sans)

	// Names of every kind, and names that crypto/x509 reads and we do not.
	withSAN := func(value []byte) *x509.Certificate {
		return &x509.Certificate{Extensions: append(slices.Clone(leaf.Extensions[:1]), extension(value))}
	}
	sans, err = pki.CertificateSANs(withSAN(der(tagSeq, der(0xa0, der(tagOID, []byte{0x2a}), der(0xa0, der(tagNull))), der(0x81, []byte("a@b")), der(0x87, []byte{10, 0, 0, 1}))))
	require.NoError(t, err)
	require.Equal(t, []pki.SAN{{Type: 0, Value: string(der(tagOID, []byte{0x2a})) + string(der(0xa0, der(tagNull)))}, {Type: pki.Email, Value: "a@b"}, {Type: pki.IP, Value: "\x0a\x00\x00\x01"}}, sans)
	for _, bad := range [][]byte{nil, der(tagSeq), der(tagSeq, der(0x82, []byte("a\nb"))), append(der(tagSeq, der(0x82, []byte("a"))), 0)} {
		sans, err = pki.CertificateSANs(withSAN(bad))
		require.ErrorIs(t, err, pki.ErrSAN)
		require.Nil(t, sans)
	}
}

// One bad certificate is no reason to trust none.
func TestParseRootsPEM(t *testing.T) {
	t.Parallel()
	a, b := newRoot(t).Certificate(), newRoot(t).Certificate()
	leaf, err := newRoot(t).IssueLeaf(leafOptions())
	require.NoError(t, err)
	small, err := rsa.GenerateKey(rand.Reader, 1024)
	require.NoError(t, err)
	weak := selfSignedBy(t, small)
	negative := bytes.Clone(a.Raw)
	i := bytes.Index(negative, append([]byte{0xa0, 3, 2, 1, 2, 2}, byte(len(a.SerialNumber.Bytes())))) + 7
	if negative[i] == 0 {
		i++
	}
	negative[i] |= 0x80
	pa, pb := string(certsPEM(a)), string(certsPEM(b))
	for name, tc := range map[string]struct {
		in   string
		want []*x509.Certificate
		errs []string
	}{
		"nothing":              {"", nil, nil},
		"blank":                {" \n\n", nil, nil},
		"two":                  {pa + pb, []*x509.Certificate{a, b}, nil},
		"twice":                {pb + pa + pb + pa, []*x509.Certificate{b, a}, nil},
		"comments":             {"# a\n" + pa + "\n# b\n" + pb + "\n", []*x509.Certificate{a, b}, nil},
		"a negative serial":    {block("CERTIFICATE", negative) + pa, []*x509.Certificate{a}, []string{"block 1: x509: "}},
		"not DER":              {pa + block("CERTIFICATE", []byte("hello")) + pb, []*x509.Certificate{a, b}, []string{"block 2: x509: "}},
		"an empty block":       {pa + "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n" + pb, []*x509.Certificate{a, b}, []string{"block 2: "}},
		"a key":                {pa + block("PRIVATE KEY", []byte("k")) + pb, []*x509.Certificate{a, b}, []string{`block 2: "PRIVATE KEY", not CERTIFICATE`}},
		"a trusted one":        {block("TRUSTED CERTIFICATE", a.Raw) + pb, []*x509.Certificate{b}, []string{`block 1: "TRUSTED CERTIFICATE", not CERTIFICATE`}},
		"a leaf":               {string(certsPEM(leaf)) + pb, []*x509.Certificate{b}, []string{"block 1: ", "is not a CA certificate"}},
		"a weak key":           {string(certsPEM(weak)) + pb, []*x509.Certificate{b}, []string{"block 1: RSA key of 1024 bits"}},
		"damaged":              {string(damaged([]byte(pa))) + pb, []*x509.Certificate{b}, []string{"1 damaged PEM blocks"}},
		"cut off":              {pa + pb[:len(pb)-30], []*x509.Certificate{a}, []string{"1 damaged PEM blocks"}},
		"text behind":          {pa + "hello", []*x509.Certificate{a}, []string{"after block 1: text that is not PEM"}},
		"text":                 {"hello", nil, []string{"after block 0: text that is not PEM"}},
		"several bad":          {block("X", nil) + pa + block("Y", nil) + string(certsPEM(weak)), []*x509.Certificate{a}, []string{"block 1: ", "block 3: ", "block 4: RSA"}},
		"very many bad":        {strings.Repeat(block("X", nil), 500) + pa, []*x509.Certificate{a}, []string{"block 10: ", "and 490 more"}},
		"1,000":                {strings.Repeat(pa, 1000), []*x509.Certificate{a}, nil},
		"1,001":                {strings.Repeat(pa, 1001), nil, []string{"1001 PEM blocks, the limit is 1000"}},
		"1 MiB and a byte":     {strings.Repeat("#", 1<<20-len(pa)) + "\n" + pa, nil, []string{"1048577 bytes of PEM"}},
		"version 1, as of old": {string(certsPEM(versionOne(t))), []*x509.Certificate{versionOne(t)}, nil},
	} {
		got, err := pki.ParseRootsPEM([]byte(tc.in))
		if !strings.HasPrefix(name, "version 1") {
			assert.Equal(t, certsPEM(tc.want...), certsPEM(got...), name)
		} else {
			assert.Len(t, got, 1)
		}
		if tc.errs == nil {
			assert.NoError(t, err, name)
			continue
		}
		require.Error(t, err, name)
		assert.Less(t, len(err.Error()), 4096, name)
		assert.Equal(t, 1, strings.Count(err.Error(), "pki:"), "%v", err)
		assert.True(t, strings.HasPrefix(err.Error(), "pki: parse roots: "), "%v", err)
		for _, want := range tc.errs {
			assert.ErrorContains(t, err, want, name)
		}
		assert.Equal(t, strings.HasPrefix(name, "1"), strings.Contains(err.Error(), spiffe.ErrTooLarge.Error()), name)
	}
	_, err = pki.ParseRootsPEM([]byte(strings.Repeat(pa, 1001)))
	require.ErrorIs(t, err, spiffe.ErrTooLarge)
	_, err = pki.ParseRootsPEM([]byte(string(certsPEM(weak)) + pb))
	require.ErrorIs(t, err, pki.ErrWeakKey)
}

// versionOne returns a root of version 1, which cannot say that it is a CA.
func versionOne(t testing.TB) *x509.Certificate {
	t.Helper()
	root := newRoot(t).Certificate()
	spki := root.RawSubjectPublicKeyInfo
	name := der(tagSeq, rdn(oidCN, tagUTF8, "old"))
	tbs := der(tagSeq, integer(1), algECDSA256, name, der(tagSeq, utc("260101000000Z"), utc("360101000000Z")), name, spki)
	c, err := x509.ParseCertificate(der(tagSeq, tbs, algECDSA256, der(tagBits, []byte{0}, root.Signature)))
	require.NoError(t, err)
	require.Equal(t, 1, c.Version)
	return c
}

// A strict reader does not lose a certificate without a word.
func TestDamagedBlocksAreSeen(t *testing.T) {
	t.Parallel()
	a, b := certsPEM(newRoot(t).Certificate()), certsPEM(newRoot(t).Certificate())
	for name, in := range map[string][]byte{
		"the first":    slices.Concat(damaged(a), b),
		"in between":   slices.Concat(a, damaged(a), b),
		"the last":     slices.Concat(a, damaged(b)),
		"no end":       slices.Concat(a[:len(a)-26], b),
		"another end":  slices.Concat(bytes.Replace(a, []byte("END CERTIFICATE"), []byte("END CERTIFICATES"), 1), b),
		"no base64":    slices.Concat([]byte("-----BEGIN CERTIFICATE-----\nhello!\n-----END CERTIFICATE-----\n"), b),
		"a half begin": slices.Concat([]byte("-----BEGIN CERTIFICATE\n"), b),
	} {
		certs, err := pki.ParseCertificatesPEM(in)
		require.ErrorContains(t, err, "pki: parse certificates: ", name)
		require.Nil(t, certs, name)
	}
}

// hostilePEM is text of about n bytes on which readers of PEM have been slow.
func hostilePEM(n int) map[string][]byte {
	fill := func(unit string) []byte { return bytes.Repeat([]byte(unit), n/len(unit)) }
	good := block("CERTIFICATE", []byte{0x30, 0})
	return map[string][]byte{
		"begins":                fill("-----BEGIN CERTIFICATE-----\n"),
		"begins, one line":      fill("-----BEGIN "),
		"ends":                  fill("\n-----END CERTIFICATE-----\n"),
		"half ends":             fill("\n-----END "),
		"begins and half ends":  fill("-----BEGIN X\n-----END "),
		"blocks without end":    fill("-----BEGIN X-----\nAAAA\n"),
		"blocks of no base64":   fill("-----BEGIN X-----\n!\n-----END X-----\n"),
		"another end":           fill("-----BEGIN X-----\nAAAA\n-----END Y-----\n"),
		"headers":               append([]byte("-----BEGIN X-----\n"), fill("a: b\n")...),
		"many headers":          append([]byte("-----BEGIN X-----\n"), manyHeaders(n)...),
		"many headers, whole":   slices.Concat([]byte("-----BEGIN CERTIFICATE-----\n"), manyHeaders(n), []byte("\nMAA=\n-----END CERTIFICATE-----\n")),
		"blocks of headers":     fill("-----BEGIN X-----\na: b\n\n-----END X-----\n"),
		"headers, no blank":     fill("-----BEGIN X-----\na: b\n-----END X-----\n"),
		"colons":                append([]byte("-----BEGIN X-----\n"), fill(":")...),
		"colons in lines":       append([]byte("-----BEGIN X-----\n"), fill(":\n")...),
		"one long line":         append([]byte("-----BEGIN X-----\n"), fill("A")...),
		"blanks":                append([]byte("-----BEGIN X-----\n"), fill(" ")...),
		"blanks in base64":      slices.Concat([]byte("-----BEGIN CERTIFICATE-----\n"), fill("A \t"), []byte("\n-----END CERTIFICATE-----\n")),
		"empty lines":           fill("\n"),
		"dashes":                fill("-"),
		"empty blocks":          fill("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"),
		"good and half a block": append([]byte(strings.Repeat(good, 900)), fill("-----BEGIN CERTIFICATE-----\nAAAA\n")...),
		"zeros":                 make([]byte, n),
	}
}

func manyHeaders(n int) []byte {
	var b bytes.Buffer
	for i := 0; b.Len() < n; i++ {
		fmt.Fprintf(&b, "h%d: v\n", i)
	}
	return b.Bytes()
}

// No reader of PEM takes more than a constant time per byte: what costs more than 50 ms has to cost less
// than twenty-four times as much as an eighth of it, where it would be sixty-four times if each byte looked
// at all others. What counts is the time of this thread, the best of several runs.
func TestHostilePEMIsLinear(t *testing.T) {
	readers := map[string]func([]byte){
		"certificates": func(b []byte) { _, _ = pki.ParseCertificatesPEM(b) },
		"private key":  func(b []byte) { _, _ = pki.ParsePrivateKeyPEM(b) },
		"roots":        func(b []byte) { _, _ = pki.ParseRootsPEM(b) },
		"CRLs":         func(b []byte) { _, _ = pki.ParseCRLsPEM(b) },
		"request":      func(b []byte) { _, _ = pki.ParseCSRPEM(b) },
	}
	const cheap = 50 * time.Millisecond
	runtime.LockOSThread() // for threadTime
	defer runtime.UnlockOSThread()
	best := func(f func([]byte), in []byte) time.Duration {
		b := time.Hour
		for range 5 {
			start := threadTime()
			f(in)
			if b = min(b, threadTime()-start); b < cheap {
				break
			}
		}
		return b
	}
	for what, read := range readers {
		large := 960 << 10
		if what == "request" {
			large = 120 << 10
		}
		small, big := hostilePEM(large/8), hostilePEM(large)
		for name := range small {
			eight := best(read, big[name])
			if eight < cheap {
				continue
			}
			one := best(read, small[name])
			assert.Less(t, float64(eight)/float64(max(one, time.Millisecond)), 24.0, "%s: %s: %v, an eighth of it %v", what, name, eight, one)
		}
		var before, after runtime.MemStats
		for name, in := range big {
			runtime.ReadMemStats(&before)
			read(in)
			runtime.ReadMemStats(&after)
			assert.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(4<<20), "%s: %s", what, name)
		}
	}
}

func FuzzParseRootsPEM(f *testing.F) {
	a, b := certsPEM(newRoot(f).Certificate()), certsPEM(newRoot(f).Certificate())
	f.Add(slices.Concat(a, b))
	f.Add(slices.Concat(a, damaged(b), a))
	f.Add(slices.Concat([]byte("# x\n"), a, []byte("text")))
	f.Add([]byte(block("PRIVATE KEY", []byte{1})))
	f.Add(slices.Concat(certsPEM(versionOne(f)), b))
	f.Fuzz(func(t *testing.T, data []byte) {
		roots, err := pki.ParseRootsPEM(data)
		strict, strictErr := pki.ParseCertificatesPEM(data)
		if err == nil && len(roots) > 0 {
			require.NoError(t, strictErr)
			require.Equal(t, certsPEM(pki.Distinct(strict)...), certsPEM(roots...))
		}
		if len(roots) == 0 {
			return
		}
		again, err := pki.ParseRootsPEM(certsPEM(roots...))
		require.NoError(t, err, "what is good is good")
		require.Equal(t, certsPEM(roots...), certsPEM(again...))
		_, rest := pem.Decode(certsPEM(roots[0]))
		require.Empty(t, rest)
	})
}

func extension(value []byte) pkix.Extension {
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}
}
