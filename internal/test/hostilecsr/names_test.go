package hostilecsr_test

import (
	"fmt"
	"strings"

	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/test/hostilecsr"
)

// The tags of strings that x/crypto/cryptobyte does not name.
const (
	numericString   = asn1.Tag(18)
	videotexString  = asn1.Tag(21)
	visibleString   = asn1.Tag(26)
	universalString = asn1.Tag(28)
	bmpString       = asn1.Tag(30)
)

// sans has requests for names that the caller may not have, and for what is no name.
func (l *list) sans() {
	const me = "spiffe://cluster.local/ns/emojivoto/sa/web"
	for what, names := range ordered(
		"two URIs", [][]byte{uri(me), uri("spiffe://cluster.local/ns/kube-system/sa/admin")},
		"the same URI twice", [][]byte{uri(me), uri(me)},
		"one URI beside the DNS name", [][]byte{dns(hostilecsr.Name), uri(me)},
		"URI of another workload", [][]byte{uri("spiffe://cluster.local/ns/istio-system/sa/istiod")},
		"URI of another trust domain", [][]byte{uri("spiffe://evil.example/ns/emojivoto/sa/web")},
		"URI of the trust domain itself", [][]byte{uri("spiffe://cluster.local")},
		"URI with user info", [][]byte{uri("spiffe://admin@cluster.local/ns/emojivoto/sa/web")},
		"URI with a port", [][]byte{uri("spiffe://cluster.local:443/ns/emojivoto/sa/web")},
		"URI with a query", [][]byte{uri(me + "?x=1")},
		"URI with an empty query", [][]byte{uri(me + "?")},
		"URI with a fragment", [][]byte{uri(me + "#x")},
		"URI with a trailing slash", [][]byte{uri(me + "/")},
		"URI with an empty segment", [][]byte{uri("spiffe://cluster.local//ns/emojivoto/sa/web")},
		"URI with dot segments", [][]byte{uri("spiffe://cluster.local/ns/x/../emojivoto/sa/web")},
		"URI with percent encoding", [][]byte{uri("spiffe://cluster.local/ns/emojivoto/sa/%77eb")},
		"URI with an upper case trust domain", [][]byte{uri("spiffe://CLUSTER.LOCAL/ns/emojivoto/sa/web")},
		"URI with an upper case scheme", [][]byte{uri("SPIFFE://cluster.local/ns/emojivoto/sa/web")},
		"URI of another scheme", [][]byte{uri("https://cluster.local/ns/emojivoto/sa/web")},
		"URI without a scheme", [][]byte{uri("cluster.local/ns/emojivoto/sa/web")},
		"URI that javascript runs", [][]byte{uri("javascript:alert(1)")},
		"URI with a line break", [][]byte{uri(me + "\nspiffe://cluster.local/ns/a/sa/b")},
		"URI with a NUL", [][]byte{uri(me + "\x00/x")},
		"URI with bytes that are not ASCII", [][]byte{uri("spiffe://cluster.local/ns/emojivoto/sa/wéb")},
		"URI of 4 KiB", [][]byte{uri("spiffe://cluster.local/" + strings.Repeat("a", 4<<10))},
		"URI that is empty", [][]byte{uri("")},
		"URI with a template", [][]byte{uri("spiffe://cluster.local/{{.Secret}}/%s%n")},
		"no names", nil,
		"DNS name of another", [][]byte{dns("admin.kube-system.serviceaccount.identity.linkerd.cluster.local")},
		"DNS name of another beside the good one", [][]byte{dns(hostilecsr.Name), dns("admin.kube-system.serviceaccount.identity.linkerd.cluster.local")},
		"DNS name twice", [][]byte{dns(hostilecsr.Name), dns(hostilecsr.Name)},
		"DNS name that is empty", [][]byte{dns("")},
		"DNS name with a NUL", [][]byte{dns(hostilecsr.Name + "\x00.evil.example")},
		"DNS name with a line break", [][]byte{dns(hostilecsr.Name + "\n")},
		"DNS name with a carriage return", [][]byte{dns("\r" + hostilecsr.Name)},
		"DNS name with a blank", [][]byte{dns(hostilecsr.Name + " ")},
		"DNS name with a comma", [][]byte{dns(hostilecsr.Name + ",evil.example")},
		"DNS name with a slash", [][]byte{dns("../" + hostilecsr.Name)},
		"DNS name with a wildcard", [][]byte{dns("*." + hostilecsr.Name)},
		"DNS name that is a wildcard", [][]byte{dns("*")},
		"DNS name with a wildcard in the middle", [][]byte{dns("web.*.serviceaccount.identity.linkerd.cluster.local")},
		"DNS name with a leading dot", [][]byte{dns("." + hostilecsr.Name)},
		"DNS name with a trailing dot", [][]byte{dns(hostilecsr.Name + ".")},
		"DNS name with two dots", [][]byte{dns(strings.Replace(hostilecsr.Name, ".", "..", 1))},
		"DNS name in upper case", [][]byte{dns(strings.ToUpper(hostilecsr.Name))},
		"DNS name with a label of 300", [][]byte{dns(strings.Repeat("a", 300) + "." + hostilecsr.Name)},
		"DNS name of 10,000 bytes", [][]byte{dns(strings.Repeat("a.", 5000) + "b")},
		"DNS name in UTF-8", [][]byte{dns("wéb.emojivoto.serviceaccount.identity.linkerd.cluster.local")},
		"DNS name in Latin-1", [][]byte{dns("w\xe9b.emojivoto.serviceaccount.identity.linkerd.cluster.local")},
		"DNS name in punycode", [][]byte{dns("xn--wb-bja." + hostilecsr.Name)},
		"DNS name with a look-alike letter", [][]byte{dns(strings.Replace(hostilecsr.Name, "e", "\u0435", 1))},
		"DNS name that is an address", [][]byte{dns("127.0.0.1")},
		"DNS name that is an address in brackets", [][]byte{dns("[::1]")},
		"IP beside the DNS name", [][]byte{dns(hostilecsr.Name), ip(10, 0, 0, 1)},
		"IP of four bytes", [][]byte{ip(127, 0, 0, 1)},
		"IP of no bytes", [][]byte{ip()},
		"IP of five bytes", [][]byte{ip(10, 0, 0, 1, 0)},
		"IP of eight bytes, a network", [][]byte{ip(0, 0, 0, 0, 0, 0, 0, 0)},
		"IP of sixteen bytes", [][]byte{ip(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1)},
		"IP of 32 bytes", [][]byte{ip(make([]byte, 32)...)},
		"email beside the DNS name", [][]byte{dns(hostilecsr.Name), email("root@cluster.local")},
		"email with a line break", [][]byte{email("root@cluster.local\nbcc: x")},
		"email that is empty", [][]byte{email("")},
		"other name beside the DNS name", [][]byte{dns(hostilecsr.Name), tlv(wrapped(0), oid("1.3.6.1.4.1.311.20.2.3"), tlv(wrapped(0), str(asn1.UTF8String, "admin@cluster.local")))},
		"other name without a value", [][]byte{dns(hostilecsr.Name), tlv(wrapped(0), oid("1.3.6.1.4.1.311.20.2.3"))},
		"X.400 address beside the DNS name", [][]byte{dns(hostilecsr.Name), tlv(wrapped(3), seq())},
		"directory name beside the DNS name", [][]byte{dns(hostilecsr.Name), tlv(wrapped(4), name(cn(asn1.UTF8String, "admin")))},
		"directory name with garbage", [][]byte{dns(hostilecsr.Name), tlv(wrapped(4), []byte("garbage"))},
		"EDI party name beside the DNS name", [][]byte{dns(hostilecsr.Name), tlv(wrapped(5), tlv(wrapped(1), str(asn1.UTF8String, "x")))},
		"registered ID beside the DNS name", [][]byte{dns(hostilecsr.Name), tlv(context(8), []byte{0x2a, 0x03})},
		"name of unknown kind beside the DNS name", [][]byte{dns(hostilecsr.Name), str(context(9), "x")},
		"a thousand and one DNS names", repeated(1001, func(int) []byte { return dns(hostilecsr.Name) }),
		"five thousand addresses", repeated(5000, func(i int) []byte { return ip(10, 0, byte(i>>8), byte(i)) }),
	) {
		l.may("san/"+what, func(r *request) { r.sansAre(names...) })
	}
	for what, value := range ordered(
		"DNS name in constructed form", sanValue(tlv(wrapped(2), str(asn1.IA5String, hostilecsr.Name))),
		"DNS name with a universal tag", sanValue(str(asn1.IA5String, hostilecsr.Name)),
		"application tag", sanValue(str(asn1.Tag(0x42), hostilecsr.Name)),
		"a SET in place of the SEQUENCE", set(dns(hostilecsr.Name)),
		"no SEQUENCE around it", dns(hostilecsr.Name),
		"bytes after the names", cat(sanValue(dns(hostilecsr.Name)), []byte{5, 0}),
		"empty value", nil,
		"garbage", []byte("garbage"),
		"length over the end", []byte{0x30, 0x20, 0x82, 0x01, 'a'},
		"indefinite length", cat([]byte{0x30, 0x80}, dns(hostilecsr.Name), []byte{0, 0}),
		"length that is not minimal", cat([]byte{0x30, 0x81, byte(len(dns(hostilecsr.Name)))}, dns(hostilecsr.Name)),
		"length of 4 GiB", []byte{0x30, 0x84, 0xff, 0xff, 0xff, 0xff, 0x82, 0x01, 'a'},
		"tag of many bytes", sanValue([]byte{0x9f, 0x82, 0x02, 0x01, 'a'}),
	) {
		l.may("san form/"+what, func(r *request) { r.extensionsAre(extension(oidSAN, false, value)) })
	}
	l.may("san/critical", func(r *request) { r.extensionsAre(extension(oidSAN, true, sanValue(dns(hostilecsr.Name)))) })
	l.may("san/two extensions with different names", func(r *request) {
		r.alsoAsks(extension(oidSAN, false, sanValue(dns("evil.example"))))
	})
	l.may("san/in an issuer alternative name", func(r *request) {
		r.alsoAsks(extension("2.5.29.18", false, sanValue(dns("evil.example"))))
	})
	l.may("san/under its old number", func(r *request) {
		r.alsoAsks(extension("2.5.29.7", false, sanValue(dns("evil.example"))))
	})
}

// subjects has subjects that would say something in a certificate.
func (l *list) subjects() {
	for what, subject := range ordered(
		"common name of another", name(cn(asn1.UTF8String, "admin.kube-system.serviceaccount.identity.linkerd.cluster.local")),
		"common name with a SPIFFE ID", name(cn(asn1.UTF8String, "spiffe://cluster.local/ns/kube-system/sa/admin")),
		"common name with a NUL", name(cn(asn1.UTF8String, hostilecsr.Name+"\x00.evil.example")),
		"common name with a line break", name(cn(asn1.UTF8String, hostilecsr.Name+"\n")),
		"common name that is empty", name(cn(asn1.UTF8String, "")),
		"common name of 254 bytes", name(cn(asn1.UTF8String, strings.Repeat("a", 254))),
		"common name of 16 KiB", name(cn(asn1.UTF8String, strings.Repeat("a", 16<<10))),
		"common name of a wildcard", name(cn(asn1.UTF8String, "*.cluster.local")),
		"common name in bad UTF-8", name(cn(asn1.UTF8String, "w\xff\xfeb")),
		"common name in overlong UTF-8", name(cn(asn1.UTF8String, "web\xc0\xaeemojivoto")),
		"common name in UTF-8 with a right-to-left mark", name(cn(asn1.UTF8String, "web\u202egro.elpmaxe")),
		"common name in BMPString", name(cn(bmpString, "\x00w\x00e\x00b")),
		"common name in BMPString of odd length", name(cn(bmpString, "\x00w\x00e\x00")),
		"common name in UniversalString", name(cn(universalString, "\x00\x00\x00w")),
		"common name in T61String", name(cn(asn1.T61String, "w\xe9b")),
		"common name in VideotexString", name(cn(videotexString, "web")),
		"common name in NumericString with letters", name(cn(numericString, "web")),
		"common name in VisibleString", name(cn(visibleString, "web")),
		"common name in PrintableString with @ and *", name(cn(asn1.PrintableString, "*@"+hostilecsr.Name)),
		"common name in IA5String with high bytes", name(cn(asn1.IA5String, "w\xe9b")),
		"common name in an INTEGER", name(seq(oid(oidCommonName), integer(7))),
		"common name in a SEQUENCE", name(seq(oid(oidCommonName), seq(str(asn1.UTF8String, hostilecsr.Name)))),
		"common name in an OCTET STRING", name(seq(oid(oidCommonName), octets([]byte(hostilecsr.Name)))),
		"two common names", name(cn(asn1.UTF8String, hostilecsr.Name), cn(asn1.UTF8String, "admin")),
		"two common names in one RDN", seq(set(cn(asn1.UTF8String, "admin"), cn(asn1.UTF8String, hostilecsr.Name))),
		"ten common names", name(repeated(10, func(i int) []byte { return cn(asn1.UTF8String, fmt.Sprint("admin", i)) })...),
		"organization of an administrator", name(rdnAttribute("2.5.4.10", asn1.UTF8String, "system:masters")),
		"every usual attribute", name(
			rdnAttribute("2.5.4.6", asn1.PrintableString, "US"), rdnAttribute("2.5.4.8", asn1.UTF8String, "x"),
			rdnAttribute("2.5.4.7", asn1.UTF8String, "x"), rdnAttribute("2.5.4.10", asn1.UTF8String, "cluster.local"),
			rdnAttribute("2.5.4.11", asn1.UTF8String, "admins"), rdnAttribute("2.5.4.5", asn1.PrintableString, "1")),
		"email address", name(rdnAttribute("1.2.840.113549.1.9.1", asn1.IA5String, "root@cluster.local")),
		"user ID and domain components", name(
			rdnAttribute("0.9.2342.19200300.100.1.25", asn1.IA5String, "local"), rdnAttribute("0.9.2342.19200300.100.1.25", asn1.IA5String, "cluster"),
			rdnAttribute("0.9.2342.19200300.100.1.1", asn1.UTF8String, "root")),
		"country of five letters", name(rdnAttribute("2.5.4.6", asn1.PrintableString, "USUSU")),
		"attribute of unknown kind", name(rdnAttribute(oidUnknown, asn1.UTF8String, "x")),
		"organization of 16 KiB", name(rdnAttribute("2.5.4.10", asn1.UTF8String, strings.Repeat("a", 16<<10))),
		"organization of 100 KiB", name(rdnAttribute("2.5.4.10", asn1.UTF8String, strings.Repeat("a", 100<<10))),
		"two thousand RDNs", name(repeated(2000, func(i int) []byte { return rdnAttribute("2.5.4.11", asn1.UTF8String, fmt.Sprint(i)) })...),
		"two thousand attributes in one RDN", seq(set(repeated(2000, func(i int) []byte { return rdnAttribute("2.5.4.11", asn1.UTF8String, fmt.Sprint(i)) })...)),
		"organization with a line break and a comma", name(rdnAttribute("2.5.4.10", asn1.UTF8String, "x,CN=admin\nO=y")),
	) {
		l.may("subject/"+what, func(r *request) { r.subject = subject })
	}
	for what, subject := range ordered(
		"RDN without attributes", seq(set()),
		"RDN that is a SEQUENCE", seq(seq(cn(asn1.UTF8String, hostilecsr.Name))),
		"attribute without a value", seq(set(seq(oid(oidCommonName)))),
		"attribute with two values", seq(set(seq(oid(oidCommonName), str(asn1.UTF8String, hostilecsr.Name), str(asn1.UTF8String, "admin")))),
		"attribute without a kind", seq(set(seq(str(asn1.UTF8String, hostilecsr.Name)))),
		"SET in place of the SEQUENCE", set(set(cn(asn1.UTF8String, hostilecsr.Name))),
		"string in place of the name", str(asn1.UTF8String, hostilecsr.Name),
		"length over the end", []byte{0x30, 0x03, 0x31, 0x7f, 0x30},
		"indefinite length", cat([]byte{0x30, 0x80}, set(cn(asn1.UTF8String, hostilecsr.Name)), []byte{0, 0}),
	) {
		l.not("subject form/"+what, func(r *request) { r.subject = subject })
	}
}

func repeated(n int, f func(i int) []byte) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		out[i] = f(i)
	}
	return out
}

// ordered iterates over pairs of a name and a value, in their order.
func ordered[K any](first string, value K, rest ...any) func(func(string, K) bool) {
	return func(yield func(string, K) bool) {
		if !yield(first, value) {
			return
		}
		for i := 0; i < len(rest); i += 2 {
			v, _ := rest[i+1].(K) // an untyped nil is the zero value
			if !yield(rest[i].(string), v) {
				return
			}
		}
	}
}
