package hostilecsr_test

import (
	"bytes"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/test/hostilecsr"
)

// forms has requests with parts that are wrong, and are signed as they are.
func (l *list) forms() {
	for what, version := range ordered(
		"1", integer(1), "2", integer(2), "-1", integer(-1), "2^40", integer(1<<40),
		"0 in two bytes", tlv(asn1.INTEGER, []byte{0, 0}), "of no bytes", tlv(asn1.INTEGER),
		"of 9 bytes", tlv(asn1.INTEGER, ones(8), []byte{0}),
		"tagged, as in a certificate", tlv(wrapped(0), integer(0)),
		"a boolean", boolean(0), "missing", nil,
	) {
		l.not("form/version "+what, func(r *request) { r.version = version })
	}
	for what, attrs := range ordered(
		"missing", []byte(nil),
		"with a universal tag", set(extensionRequest(extension(oidSAN, false, sanValue(dns(hostilecsr.Name))))),
		"with another number", tlv(wrapped(1), extensionRequest(extension(oidSAN, false, sanValue(dns(hostilecsr.Name))))),
		"in primitive form", tlv(context(0), extensionRequest(extension(oidSAN, false, sanValue(dns(hostilecsr.Name))))),
		"twice", cat(attributes(), attributes()),
	) {
		l.not("form/attributes "+what, func(r *request) { r.attributes = attrs })
	}
	l.not("form/bytes after the attributes", func(r *request) { r.behind = null() })
	l.not("form/subject missing", func(r *request) { r.subject = nil })
	l.not("form/subject twice", func(r *request) { r.subject = cat(seq(), seq()) })

	good := base()
	info, alg := good.info(), good.algorithm
	sig := bits(good.sign(info))
	der := seq(info, alg, sig)
	for what, raw := range ordered(
		"nothing", []byte{},
		"one zero", []byte{0},
		"an empty SEQUENCE", seq(),
		"a NULL", null(),
		"three empty parts", seq(seq(), seq(), bits(nil)),
		"empty information", seq(seq(), alg, sig),
		"a byte after it", cat(der, []byte{0}),
		"a line break after it", cat(der, []byte{'\n'}),
		"itself after it", cat(der, der),
		"a byte in front of it", cat([]byte{0}, der),
		"a fourth part", seq(info, alg, sig, null()),
		"parts in another order", seq(alg, info, sig),
		"a SET", set(info, alg, sig),
		"a SET inside", seq(set(info[4:]), alg, sig),
		"only the information", info,
		"only text", []byte("MIIBIjANBgkqhkiG9w0BAQEFAAOC"),
		"HTML", []byte("<html><body>502</body></html>"),
		"its own PEM", block("CERTIFICATE REQUEST", der),
		"its own base64", []byte(base64.StdEncoding.EncodeToString(der)),
		"in an OCTET STRING", octets(der),
		"a length of 4 GiB", cat([]byte{0x30, 0x84, 0xff, 0xff, 0xff, 0xff}, der[4:]),
		"a length of 2^64", cat([]byte{0x30, 0x88, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, der[4:]),
		"a length of 127 bytes", cat([]byte{0x30, 0xff}, ones(127), der[4:]),
		"a length that is one short", func() []byte { b := bytes.Clone(der); b[3]--; return b }(),
		"a length that is one long", func() []byte { b := bytes.Clone(der); b[3]++; return b }(),
		"a length with leading zeros", cat([]byte{0x30, 0x83, 0}, der[2:]),
		"an indefinite length", cat([]byte{0x30, 0x80}, info, alg, sig, []byte{0, 0}),
		"an indefinite length inside", seq(cat([]byte{0x30, 0x80}, info[3:], []byte{0, 0}), alg, sig),
		"a long tag", cat([]byte{0x3f, 0x10}, der[1:]),
		"a thousand nested SEQUENCEs", nested(1000),
		"twenty thousand nested SEQUENCEs", nested(20000),
		"a MiB of zeros", make([]byte, 1<<20),
		"a MiB that is one SEQUENCE", seq(make([]byte, 1<<20)),
		"a certificate", seq(seq(tlv(wrapped(0), integer(2)), integer(1), alg, seq(), seq(str(asn1.UTCTime, "000101000000Z"), str(asn1.UTCTime, "491231235959Z")), seq(), good.spki), alg, sig),
		"a SignerInfo", seq(oid("1.2.840.113549.1.7.2"), tlv(wrapped(0), octets(der))),
		"a request message (CRMF)", seq(seq(seq(integer(0), seq(tlv(wrapped(6), good.spki[2:]))))),
		"a SPKAC", seq(seq(good.spki, str(asn1.IA5String, "challenge")), alg, sig),
	) {
		l.raw("form/"+what, raw)
	}
	l.may("form/of 200 KiB", func(r *request) {
		r.alsoHas(attribute(oidUnknown, octets(make([]byte, 200<<10))))
	})
}

// nested is SEQUENCEs in SEQUENCEs.
func nested(depth int) []byte {
	var heads [][]byte
	for size := 0; len(heads) < depth; {
		var head []byte
		switch {
		case size < 0x80:
			head = []byte{0x30, byte(size)}
		case size < 0x100:
			head = []byte{0x30, 0x81, byte(size)}
		case size < 0x10000:
			head = []byte{0x30, 0x82, byte(size >> 8), byte(size)}
		default:
			head = []byte{0x30, 0x83, byte(size >> 16), byte(size >> 8), byte(size)}
		}
		heads = append(heads, head)
		size += len(head)
	}
	slices.Reverse(heads)
	return bytes.Join(heads, nil)
}

// encodings has the good request, cut and changed.
func (l *list) encodings() {
	r := base()
	r.subject = name(cn(asn1.UTF8String, hostilecsr.Name))
	der := r.der()
	const parts = 24
	for i := range parts {
		n := 1 + i*(len(der)-1)/parts
		l.raw(fmt.Sprintf("cut/to %d of %d parts", i, parts), der[:n])
	}
	l.raw("cut/by one byte", der[:len(der)-1])
	// Every byte but those of the signature is signed, and the signature has to fit.
	for i := range parts {
		n := i * len(der) / parts
		for _, bit := range []byte{0x01, 0x80} {
			changed := bytes.Clone(der)
			changed[n] ^= bit
			l.raw(fmt.Sprintf("changed/bit %#02x in part %d of %d", bit, i, parts), changed)
		}
	}
}

// pems has texts around the good request.
func (l *list) pems() {
	r := base()
	der := r.der()
	const kind = "CERTIFICATE REQUEST"
	good := block(kind, der)
	text := string(good)
	body := base64.StdEncoding.EncodeToString(der)
	replace := func(old, with string) []byte { return []byte(strings.ReplaceAll(text, old, with)) }

	l.pem("text in front", true, append([]byte("Certificate Request:\n    Data:\n"), good...))
	l.pem("text behind", true, append(bytes.Clone(good), "rest"...))
	l.pem("a NUL behind", true, append(bytes.Clone(good), 0))
	l.pem("CRLF", true, replace("\n", "\r\n"))
	l.pem("no line break at the end", true, bytes.TrimSpace(good))
	l.pem("its older label", true, block("NEW CERTIFICATE REQUEST", der))
	l.pem("one long line", true, []byte("-----BEGIN "+kind+"-----\n"+body+"\n-----END "+kind+"-----\n"))
	for what, text := range ordered(
		"nothing", []byte{},
		"blanks", []byte(" \n\t\n"),
		"the DER", der,
		"base64 without a frame", []byte(body),
		"the begin only", []byte("-----BEGIN "+kind+"-----\n"),
		"no end", []byte("-----BEGIN "+kind+"-----\n"+body+"\n"),
		"no begin", []byte(body+"\n-----END "+kind+"-----\n"),
		"another end", []byte("-----BEGIN "+kind+"-----\n"+body+"\n-----END CERTIFICATE-----\n"),
		"an empty block", block(kind, nil),
		"label of a certificate", block("CERTIFICATE", der),
		"label of a private key", block("PRIVATE KEY", der),
		"label in lower case", replace(kind, strings.ToLower(kind)),
		"no label", replace(kind, ""),
		"label with a NUL", replace(kind, kind+"\x00"),
		"headers", pem.EncodeToMemory(&pem.Block{Type: kind, Headers: map[string]string{"Proc-Type": "4,ENCRYPTED", "DEK-Info": "AES-256-CBC,00"}, Bytes: der}),
		"a header of 64 KiB", pem.EncodeToMemory(&pem.Block{Type: kind, Headers: map[string]string{"x": strings.Repeat("a", 64<<10)}, Bytes: der}),
		"two blocks", append(bytes.Clone(good), good...),
		"a key in front", append(block("PRIVATE KEY", []byte("x")), good...),
		"base64 with a bad letter", replace(body[:4], "M*IB"),
		"base64 for addresses", replace(body[:4], "M-_B"),
		"base64 that is cut", []byte("-----BEGIN "+kind+"-----\n"+body[:len(body)-9]+"\n-----END "+kind+"-----\n"),
		"base64 of base64", block(kind, []byte(body)),
		"UTF-16", utf16(text),
		"two requests in one block", block(kind, append(bytes.Clone(der), der...)),
		"ten thousand begins", []byte(strings.Repeat("-----BEGIN "+kind+"-----\n", 10000)),
		"ten thousand begins in front", append([]byte(strings.Repeat("-----BEGIN X-----\n", 10000)), good...),
		"a MiB of dashes", []byte(strings.Repeat("-", 1<<20)),
		"a MiB of text in front", append(bytes.Repeat([]byte("text\n"), 1<<20/5), good...),
		"dashes missing", replace("-----END", "----END"),
	) {
		l.pem(what, false, text)
	}
}

func utf16(s string) []byte {
	out := []byte{0xff, 0xfe}
	for _, c := range []byte(s) {
		out = append(out, c, 0)
	}
	return out
}
