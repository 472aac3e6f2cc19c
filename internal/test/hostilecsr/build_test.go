package hostilecsr_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	encasn1 "encoding/asn1"
	"strconv"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/internal/test/hostilecsr"
)

// request is a PKCS#10 request in parts, each of which is a whole element.
type request struct {
	version, subject, spki []byte
	attributes             []byte // nil leaves them out
	behind                 []byte // what follows the attributes
	algorithm              []byte
	sign                   func(info []byte) []byte // returns the signature, without its BIT STRING
	key                    crypto.PublicKey
}

// base is the good request.
func base() request {
	return request{
		version:    integer(0),
		subject:    seq(),
		spki:       spki(p256().Public()),
		attributes: attributes(extensionRequest(extension(oidSAN, false, sanValue(dns(hostilecsr.Name))))),
		algorithm:  seq(oid(oidECDSAWithSHA256)),
		sign:       signP256(p256()),
		key:        p256().Public(),
	}
}

func (r *request) info() []byte {
	return seq(r.version, r.subject, r.spki, r.attributes, r.behind)
}

func (r *request) der() []byte {
	info := r.info()
	return seq(info, r.algorithm, bits(r.sign(info)))
}

// sansAre replaces the alternative names.
func (r *request) sansAre(names ...[]byte) {
	r.extensionsAre(extension(oidSAN, false, sanValue(names...)))
}

// extensionsAre replaces the extensions.
func (r *request) extensionsAre(exts ...[]byte) {
	r.attributes = attributes(extensionRequest(exts...))
}

// alsoAsks adds extensions to the good alternative name.
func (r *request) alsoAsks(exts ...[]byte) {
	r.extensionsAre(append([][]byte{extension(oidSAN, false, sanValue(dns(hostilecsr.Name)))}, exts...)...)
}

// alsoHas adds attributes to the request for the good alternative name.
func (r *request) alsoHas(attrs ...[]byte) {
	good := extensionRequest(extension(oidSAN, false, sanValue(dns(hostilecsr.Name))))
	r.attributes = attributes(append([][]byte{good}, attrs...)...)
}

// signedBy makes key the key of the request.
func (r *request) signedBy(pub crypto.PublicKey, algorithm []byte, sign func([]byte) []byte) {
	r.spki, r.key, r.algorithm, r.sign = spki(pub), pub, algorithm, sign
}

func signP256(key *ecdsa.PrivateKey) func([]byte) []byte {
	return func(info []byte) []byte {
		sum := sha256.Sum256(info)
		return must(ecdsa.SignASN1(rand.Reader, key, sum[:]))
	}
}

// must is for what fails only if this package is wrong.
func must[T any](v T, err error) T {
	if err != nil {
		panic("hostilecsr: " + err.Error())
	}
	return v
}

// The object identifiers.
const (
	oidCommonName       = "2.5.4.3"
	oidSAN              = "2.5.29.17"
	oidKeyUsage         = "2.5.29.15"
	oidExtKeyUsage      = "2.5.29.37"
	oidBasicConstraints = "2.5.29.19"
	oidSubjectKeyID     = "2.5.29.14"
	oidAuthorityKeyID   = "2.5.29.35"
	oidExtensionRequest = "1.2.840.113549.1.9.14"
	oidECDSAWithSHA256  = "1.2.840.10045.4.3.2"
	oidECPublicKey      = "1.2.840.10045.2.1"
	oidRSA              = "1.2.840.113549.1.1.1"
	oidSHA256WithRSA    = "1.2.840.113549.1.1.11"
	oidRSAPSS           = "1.2.840.113549.1.1.10"
	oidP256             = "1.2.840.10045.3.1.7"
	oidEd25519          = "1.3.101.112"
	oidUnknown          = "1.3.6.1.4.1.55555.1"
)

// tlv is an element with a definite, minimal length.
func tlv(tag asn1.Tag, parts ...[]byte) []byte {
	var b cryptobyte.Builder
	b.AddASN1(tag, func(b *cryptobyte.Builder) { b.AddBytes(cat(parts...)) })
	return b.BytesOrPanic()
}

func cat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func seq(parts ...[]byte) []byte { return tlv(asn1.SEQUENCE, parts...) }

func set(parts ...[]byte) []byte { return tlv(asn1.SET, parts...) }

func octets(b []byte) []byte { return tlv(asn1.OCTET_STRING, b) }

func bits(b []byte) []byte { return tlv(asn1.BIT_STRING, []byte{0}, b) }

func str(tag asn1.Tag, s string) []byte { return tlv(tag, []byte(s)) }

func boolean(v byte) []byte { return tlv(asn1.BOOLEAN, []byte{v}) }

func null() []byte { return tlv(asn1.NULL) }

func integer(v int64) []byte {
	var b cryptobyte.Builder
	b.AddASN1Int64(v)
	return b.BytesOrPanic()
}

func oid(dotted string) []byte {
	var id encasn1.ObjectIdentifier
	for arc := range strings.SplitSeq(dotted, ".") {
		id = append(id, must(strconv.Atoi(arc)))
	}
	var b cryptobyte.Builder
	b.AddASN1ObjectIdentifier(id)
	return b.BytesOrPanic()
}

// context is a context-specific tag.
func context(n uint8) asn1.Tag { return asn1.Tag(n).ContextSpecific() }

// wrapped is a context-specific tag of constructed form.
func wrapped(n uint8) asn1.Tag { return context(n).Constructed() }

func attributes(attrs ...[]byte) []byte { return tlv(wrapped(0), attrs...) }

func attribute(id string, values ...[]byte) []byte { return seq(oid(id), set(values...)) }

func extensionRequest(exts ...[]byte) []byte { return attribute(oidExtensionRequest, seq(exts...)) }

func extension(id string, critical bool, value []byte) []byte {
	if critical {
		return seq(oid(id), boolean(0xff), octets(value))
	}
	return seq(oid(id), octets(value))
}

func sanValue(names ...[]byte) []byte { return seq(names...) }

func dns(s string) []byte { return str(context(2), s) }

func email(s string) []byte { return str(context(1), s) }

func uri(s string) []byte { return str(context(6), s) }

func ip(b ...byte) []byte { return tlv(context(7), b) }

// name is a Name of RDNs with one attribute each.
func name(attrs ...[]byte) []byte {
	var rdns [][]byte
	for _, a := range attrs {
		rdns = append(rdns, set(a))
	}
	return seq(rdns...)
}

func rdnAttribute(id string, tag asn1.Tag, value string) []byte {
	return seq(oid(id), str(tag, value))
}

func cn(tag asn1.Tag, value string) []byte { return rdnAttribute(oidCommonName, tag, value) }

// spki encodes keys that the standard library knows.
func spki(pub crypto.PublicKey) []byte { return must(x509.MarshalPKIXPublicKey(pub)) }

// ecSPKI encodes a point on a named curve.
func ecSPKI(curve string, point []byte) []byte {
	return seq(seq(oid(oidECPublicKey), oid(curve)), bits(point))
}
