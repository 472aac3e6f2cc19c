package hostilecsr_test

import (
	"fmt"
	"strings"

	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/test/hostilecsr"
)

// extensions has requests for powers.
func (l *list) extensions() {
	const aia, ocsp = "1.3.6.1.5.5.7.1.1", "1.3.6.1.5.5.7.48.1"
	url := uri("http://127.0.0.1:1/evil")
	ca := seq(boolean(0xff))
	for what, ext := range ordered(
		"CA", extension(oidBasicConstraints, true, ca),
		"CA, not critical", extension(oidBasicConstraints, false, ca),
		"CA with a path length", extension(oidBasicConstraints, true, seq(boolean(0xff), integer(7))),
		"CA with a negative path length", extension(oidBasicConstraints, true, seq(boolean(0xff), integer(-1))),
		"no CA, but a path length", extension(oidBasicConstraints, true, seq(integer(7))),
		"CA with a BER boolean", extension(oidBasicConstraints, true, seq(boolean(1))),
		"not a CA, said in full", extension(oidBasicConstraints, true, seq(boolean(0))),
		"basic constraints with garbage", extension(oidBasicConstraints, false, []byte("garbage")),
		"to sign certificates", extension(oidKeyUsage, true, keyUsage(2, 0x04)),
		"to sign certificates and CRLs", extension(oidKeyUsage, true, keyUsage(1, 0x06)),
		"every key usage", extension(oidKeyUsage, true, keyUsage(7, 0xff, 0x80)),
		"no key usage", extension(oidKeyUsage, true, keyUsage(0)),
		"key usage with trailing zero bits", extension(oidKeyUsage, true, keyUsage(0, 0x80)),
		"key usage of 100 bytes", extension(oidKeyUsage, true, keyUsage(0, make([]byte, 100)...)),
		"any extended key usage", extension(oidExtKeyUsage, false, seq(oid("2.5.29.37.0"))),
		"to sign code", extension(oidExtKeyUsage, false, seq(oid("1.3.6.1.5.5.7.3.3"))),
		"to sign OCSP answers", extension(oidExtKeyUsage, true, seq(oid("1.3.6.1.5.5.7.3.9"))),
		"to stamp times", extension(oidExtKeyUsage, true, seq(oid("1.3.6.1.5.5.7.3.8"))),
		"to log on with a smart card", extension(oidExtKeyUsage, false, seq(oid("1.3.6.1.4.1.311.20.2.2"))),
		"no extended key usage", extension(oidExtKeyUsage, true, seq()),
		"a subject key identifier of the issuer", extension(oidSubjectKeyID, false, octets([]byte("the issuer's own key"))),
		"a subject key identifier of nothing", extension(oidSubjectKeyID, false, octets(nil)),
		"a subject key identifier of 8 KiB", extension(oidSubjectKeyID, false, octets(make([]byte, 8<<10))),
		"an authority key identifier", extension(oidAuthorityKeyID, false, seq(tlv(context(0), []byte("another")))),
		"name constraints", extension("2.5.29.30", true, seq(tlv(wrapped(0), seq(uri("cluster.local"))))),
		"name constraints, not critical", extension("2.5.29.30", false, seq(tlv(wrapped(0), seq(uri("cluster.local"))))),
		"an OCSP server", extension(aia, false, seq(seq(oid(ocsp), url))),
		"a CRL server", extension("2.5.29.31", false, seq(seq(tlv(wrapped(0), tlv(wrapped(0), url))))),
		"the freshest CRL", extension("2.5.29.46", false, seq(seq(tlv(wrapped(0), tlv(wrapped(0), url))))),
		"a policy", extension("2.5.29.32", false, seq(seq(oid("2.23.140.1.1")))),
		"any policy, critical", extension("2.5.29.32", true, seq(seq(oid("2.5.29.32.0")))),
		"policy mappings", extension("2.5.29.33", true, seq(seq(oid("2.5.29.32.0"), oid("2.5.29.32.0")))),
		"policy constraints", extension("2.5.29.36", true, seq(tlv(context(0), []byte{0}))),
		"to inhibit any policy", extension("2.5.29.54", true, integer(0)),
		"the poison of a pre-certificate", extension("1.3.6.1.4.1.11129.2.4.3", true, null()),
		"timestamps of a log", extension("1.3.6.1.4.1.11129.2.4.2", false, octets([]byte{0, 2, 0, 0})),
		"to staple", extension("1.3.6.1.5.5.7.1.24", false, seq(integer(5))),
		"no check of revocation", extension("1.3.6.1.5.5.7.48.1.5", false, null()),
		"a Microsoft template", extension("1.3.6.1.4.1.311.21.7", false, seq(oid("1.3.6.1.4.1.311.21.8.1"), integer(1))),
		"a Microsoft security identifier", extension("1.3.6.1.4.1.311.25.2", false, seq(tlv(wrapped(0), oid("1.3.6.1.4.1.311.25.2.1"), tlv(wrapped(0), octets([]byte("S-1-5-32-544")))))),
		"a Netscape comment", extension("2.16.840.1.113730.1.13", false, str(asn1.IA5String, "trusted")),
		"Istio's old identity", extension("1.3.6.1.4.1.11129.2.1.17", false, []byte("admin")),
		"subject directory attributes", extension("2.5.29.9", false, seq(attribute("1.3.6.1.5.5.7.9.4", str(asn1.PrintableString, "US")))),
		"to be delegated to", extension("1.3.6.1.4.1.44363.44", false, null()),
		"to be a proxy", extension("1.3.6.1.5.5.7.1.14", true, seq(seq(oid("1.3.6.1.5.5.7.21.1")))),
		"something unknown", extension(oidUnknown, false, octets([]byte("x"))),
		"something unknown, critical", extension(oidUnknown, true, octets([]byte("x"))),
		"something unknown of 20 KiB", extension(oidUnknown, false, make([]byte, 20<<10)),
		"something with a number of many arcs", extension("1.3.6.1"+strings.Repeat(".1", 200), false, nil),
		"something with a number of large arcs", extension("1.3.6.1.2147483647.2147483647", false, nil),
	) {
		l.may("extension/asks for "+what, func(r *request) { r.alsoAsks(ext) })
	}
	l.may("extension/the same one twice", func(r *request) {
		e := extension(oidBasicConstraints, true, seq())
		r.alsoAsks(e, e)
	})
	l.may("extension/first not a CA, then one", func(r *request) {
		r.alsoAsks(extension(oidBasicConstraints, true, seq()), extension(oidBasicConstraints, true, ca))
	})
	l.may("extension/five hundred of them", func(r *request) {
		r.alsoAsks(repeated(500, func(i int) []byte { return extension(oidUnknown+fmt.Sprint(".", i), false, nil) })...)
	})
	l.may("extension/five hundred of one", func(r *request) {
		r.alsoAsks(repeated(500, func(int) []byte { return extension(oidUnknown, false, nil) })...)
	})
	for what, ext := range ordered(
		"not critical, said in full", seq(oid(oidUnknown), boolean(0), octets(nil)),
		"critical in BER", seq(oid(oidUnknown), boolean(1), octets(nil)),
		"critical of two bytes", seq(oid(oidUnknown), tlv(asn1.BOOLEAN, []byte{0xff, 0xff}), octets(nil)),
		"without a value", seq(oid(oidUnknown)),
		"without a number", seq(octets(nil)),
		"with a value that is no OCTET STRING", seq(oid(oidUnknown), null()),
		"with two values", seq(oid(oidUnknown), octets(nil), octets(nil)),
		"with an empty number", seq(tlv(asn1.OBJECT_IDENTIFIER), octets(nil)),
		"with a number that does not end", seq(tlv(asn1.OBJECT_IDENTIFIER, []byte{0x2a, 0x80}), octets(nil)),
		"with a number with leading zeros", seq(tlv(asn1.OBJECT_IDENTIFIER, []byte{0x55, 0x80, 0x1d, 0x11}), octets(nil)),
		"that is a SET", set(oid(oidUnknown), octets(nil)),
		"of indefinite length", cat([]byte{0x30, 0x80}, oid(oidUnknown), octets(nil), []byte{0, 0}),
		"longer than the request", []byte{0x30, 0x82, 0xff, 0xff, 0x06},
	) {
		// A CA that ignores the extensions need not read them, so it may sign.
		l.may("extension form/one "+what, func(r *request) { r.alsoAsks(ext) })
	}
}

// keyUsage is a BIT STRING whose last byte has so many unused bits.
func keyUsage(unused byte, b ...byte) []byte {
	return tlv(asn1.BIT_STRING, []byte{unused}, b)
}

// attributes has what stands beside the request for extensions, and what stands in its place.
func (l *list) attributes() {
	others := extensionRequest(extension(oidSAN, false, sanValue(dns("evil.example"))))
	good := extension(oidSAN, false, sanValue(dns(hostilecsr.Name)))
	for what, attr := range ordered(
		"two requests for extensions", others,
		"two equal requests for extensions", extensionRequest(good),
		"a challenge password", attribute("1.2.840.113549.1.9.7", str(asn1.PrintableString, "secret")),
		"a challenge password of 16 KiB", attribute("1.2.840.113549.1.9.7", str(asn1.UTF8String, strings.Repeat("x", 16<<10))),
		"an unstructured name", attribute("1.2.840.113549.1.9.2", str(asn1.UTF8String, "admin")),
		"Microsoft's request for extensions", attribute("1.3.6.1.4.1.311.2.1.14", seq(extension(oidSAN, false, sanValue(dns("evil.example"))))),
		"Microsoft's system version", attribute("1.3.6.1.4.1.311.13.2.3", str(asn1.IA5String, "10.0")),
		"Microsoft's client information", attribute("1.3.6.1.4.1.311.21.20", seq(integer(5), str(asn1.UTF8String, "host"), str(asn1.UTF8String, "admin"))),
		"Microsoft's provider", attribute("1.3.6.1.4.1.311.13.2.2", seq(integer(1), str(bmpString, "\x00x"), bits(nil))),
		"an unknown one", attribute(oidUnknown, null()),
		"an unknown one without values", attribute(oidUnknown),
		"an unknown one with a thousand values", attribute(oidUnknown, repeated(1000, func(i int) []byte { return integer(int64(i)) })...),
		"one twice", cat(attribute(oidUnknown, null()), attribute(oidUnknown, null())),
	) {
		l.may("attribute/"+what, func(r *request) { r.alsoHas(attr) })
	}
	l.may("attribute/two thousand", func(r *request) {
		r.alsoHas(repeated(2000, func(i int) []byte { return attribute(oidUnknown, integer(int64(i))) })...)
	})
	l.may("attribute/none", func(r *request) { r.attributes = attributes() })
	l.may("attribute/a request for no extensions", func(r *request) { r.attributes = attributes(extensionRequest()) })
	l.may("attribute/a request for extensions with two values", func(r *request) {
		r.attributes = attributes(attribute(oidExtensionRequest, seq(good), seq(extension(oidSAN, false, sanValue(dns("evil.example"))))))
	})
	l.may("attribute/a request for extensions without values", func(r *request) {
		r.attributes = attributes(attribute(oidExtensionRequest))
	})
	l.may("attribute/a request for extensions that is a string", func(r *request) {
		r.attributes = attributes(attribute(oidExtensionRequest, str(asn1.UTF8String, "x")))
	})
	for what, attrs := range ordered(
		"that is no SEQUENCE", attributes(null()),
		"without a number", attributes(seq(set(null()))),
		"without a SET", attributes(seq(oid(oidUnknown))),
		"with bytes after the SET", attributes(seq(oid(oidUnknown), set(null()), null())),
		"longer than the request", attributes([]byte{0x30, 0x7f, 0x06}),
	) {
		l.not("attribute form/one "+what, func(r *request) { r.attributes = attrs })
	}
}
