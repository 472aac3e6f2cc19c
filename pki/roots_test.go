package pki_test

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
)

func TestParseSANs(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-2.4-8")
	root := newRoot(t)
	o := leafOptions()
	o.SANs = append(o.SANs, dnsSANs("b", "*.a.b")...)
	leaf, err := root.Issue(o)
	require.NoError(t, err)
	sans := must.Get(pki.ParseSANs(leaf.Extensions))(t)
	require.Equal(t, []pki.SAN{pki.IDSAN(webID), pki.DNSSAN("b"), pki.DNSSAN("*.a.b")}, sans)
	o2 := certOptions()
	o2.CommonName, o2.SANs = "x", nil
	require.Empty(t, must.Get(pki.ParseSANs(must.Get(root.Issue(o2))(t).Extensions))(t))

	// Names of every kind, and names that crypto/x509 reads and we do not.
	withSAN := func(value []byte) *x509.Certificate {
		return &x509.Certificate{Extensions: append(slices.Clone(leaf.Extensions[:1]), extension(value))}
	}
	sans, err = pki.ParseSANs(withSAN(der(tagSeq, der(0xa0, der(tagOID, []byte{0x2a}), der(0xa0, der(tagNull))), der(0x81, []byte("a@b")), der(0x87, []byte{10, 0, 0, 1}))).Extensions)
	require.NoError(t, err)
	require.Equal(t, []pki.SAN{{Type: 0, Value: string(der(tagOID, []byte{0x2a})) + string(der(0xa0, der(tagNull)))}, {Type: pki.Email, Value: "a@b"}, {Type: pki.IP, Value: "\x0a\x00\x00\x01"}}, sans)
	for _, bad := range [][]byte{nil, der(tagSeq), der(tagSeq, der(0x82, []byte("a\nb"))), append(der(tagSeq, der(0x82, []byte("a"))), 0)} {
		sans, err = pki.ParseSANs(withSAN(bad).Extensions)
		require.ErrorIs(t, err, pki.ErrSAN)
		require.Nil(t, sans)
	}
	_, err = pki.ParseSANs(slices.Concat(leaf.Extensions, leaf.Extensions))
	require.EqualError(t, err, "pki: invalid subject alternative name: the extension is there twice")
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
	rounds.NotShort(t)
	readers := map[string]func([]byte){
		"certificates": func(b []byte) { _, _ = pki.ParseCertificatesPEM(b) },
		"private key":  func(b []byte) { _, _ = pki.ParsePrivateKeyPEM(b) },
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

func extension(value []byte) pkix.Extension {
	return pkix.Extension{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: value}
}
