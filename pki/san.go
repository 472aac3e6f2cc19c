package pki

import (
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/crypto/cryptobyte"
	"golang.org/x/crypto/cryptobyte/asn1"

	"github.com/svidkit/svidkit/spiffe"
)

// Limits on a subject alternative name extension.
const (
	maxSANBytes = 64 << 10
	maxSANs     = 1000
)

// errSAN says that a subject alternative name, or the extension that holds it, is not valid.
var errSAN = errors.New("invalid subject alternative name")

// The kinds of subject alternative names that this package understands: their context-specific tags in RFC 5280,
// section 4.2.1.6. Other kinds, such as a directory name (4), keep their tag when read, and are never written.
const (
	Email = 1 // an RFC 822 name; read only
	DNS   = 2
	URI   = 6
	IP    = 7
)

// kindName returns "email", "DNS", "URI", "IP", or "type n" for other kinds.
func kindName(kind int) string {
	switch kind {
	case Email:
		return "email"
	case DNS:
		return "DNS"
	case URI:
		return "URI"
	case IP:
		return "IP"
	default:
		return "type " + strconv.Itoa(kind)
	}
}

// SAN is one subject alternative name. It works with == and as a map key.
type SAN struct {
	Type int // one of the kinds above, or another tag

	// Value is text for DNS, URI and Email; the 4 or 16 bytes of the address for IP, as in
	// net.IP(san.Value); and the contents of the DER element for other kinds.
	Value string
}

// String returns the name for people, as in "URI:spiffe://example.org/web" or "IP:192.0.2.1". Bytes
// that are not printable ASCII are quoted.
func (s SAN) String() string {
	v := s.Value
	switch {
	case s.Type == IP && (len(v) == net.IPv4len || len(v) == net.IPv6len):
		v = net.IP(v).String()
	case s.Type != DNS && s.Type != URI && s.Type != Email:
		v = hex.EncodeToString([]byte(v))
	case !printable(v):
		v = strconv.QuoteToASCII(v)
	}
	return kindName(s.Type) + ":" + v
}

// IDSAN returns id as a URI name. The zero ID gives an empty URI, which [NewCSR] refuses.
func IDSAN(id spiffe.ID) SAN {
	if id.IsZero() {
		return SAN{Type: URI}
	}
	return SAN{Type: URI, Value: id.String()}
}

// DNSSAN returns name as a DNS name. It does not check name: [NewCSR] does.
func DNSSAN(name string) SAN { return SAN{Type: DNS, Value: name} }

// IPSAN returns ip as an address: 4 bytes for IPv4, even if written as IPv6 (::ffff:192.0.2.1), else 16. It does not
// check ip: [NewCSR] refuses any other length.
func IPSAN(ip net.IP) SAN {
	if v4 := ip.To4(); v4 != nil {
		ip = v4
	}
	return SAN{Type: IP, Value: string(ip)}
}

// sanExtension returns the extension for requested names.
func sanExtension(sans []SAN, critical bool) (ext pkix.Extension, err error) {
	for _, s := range sans {
		if err := s.checkRequested(); err != nil {
			return ext, err
		}
	}
	value, err := marshalSANs(sans)
	return pkix.Extension{Id: oidSAN(), Critical: critical, Value: value}, err
}

// ParseSANs returns all alternative names in the extensions of a certificate or request, of every kind and in order.
// Without the extension it returns none, and no error. It is strict: one extension; DNS, URI and Email names of
// printable ASCII; addresses of 4 or 16 bytes. It returns names of other kinds with their own type and bytes, and
// keeps empty DNS names. More than 64 KiB or 1,000 names give an error that wraps [spiffe.ErrTooLarge].
//
// Do not take a peer's SPIFFE ID from ParseSANs: a [spiffe.Verifier] returns it with the proof.
func ParseSANs(extensions []pkix.Extension) ([]SAN, error) {
	sans, err := findSANs(extensions)
	if err != nil {
		return nil, fmt.Errorf("pki: %w", err)
	}
	return sans, nil
}

// findSANs is ParseSANs without the package name in errors.
func findSANs(extensions []pkix.Extension) (sans []SAN, err error) {
	found := false
	for _, ext := range extensions {
		if !ext.Id.Equal(oidSAN()) {
			continue
		}
		if found { // crypto/x509 refuses that in a certificate
			return nil, sanError("the extension is there twice")
		}
		found = true
		if sans, err = parseSANs(ext.Value); err != nil {
			return nil, err
		}
	}
	return sans, nil
}

// certificateSANs returns the names of a certificate.
func certificateSANs(cert *x509.Certificate) ([]SAN, error) { return findSANs(cert.Extensions) }

// marshalSANs returns the value of a subject alternative name extension (OID 2.5.29.17) in DER, with the names in the
// given order. It checks only the encoding: an empty DNS name is written. There must be 1 to 1,000 DNS, URI or IP
// names, and the value is at most 64 KiB.
func marshalSANs(sans []SAN) ([]byte, error) {
	if len(sans) == 0 {
		return nil, sanError("there is no name")
	}
	if len(sans) > maxSANs {
		return nil, tooManySANs()
	}
	size := 4
	for _, s := range sans {
		if s.Type != DNS && s.Type != URI && s.Type != IP {
			return nil, sanError("a name of %s cannot be written", kindName(s.Type))
		}
		if err := s.check(); err != nil {
			return nil, err
		}
		size += 4 + len(s.Value)
		if size > 2*maxSANBytes { // before spending memory on it
			return nil, sansTooLarge(size)
		}
	}
	b := cryptobyte.NewBuilder(make([]byte, 0, size))
	b.AddASN1(asn1.SEQUENCE, func(b *cryptobyte.Builder) {
		for _, s := range sans {
			b.AddASN1(asn1.Tag(s.Type).ContextSpecific(), func(b *cryptobyte.Builder) { b.AddBytes([]byte(s.Value)) })
		}
	})
	der, err := b.Bytes()
	if err != nil {
		return nil, sanError("%v", err)
	}
	if len(der) > maxSANBytes {
		return nil, sansTooLarge(len(der))
	}
	return der, nil
}

// check reports whether s.Value is valid for its type. Any value is valid for a type without a constant.
func (s SAN) check() error {
	switch s.Type {
	case DNS, URI, Email:
		if !printable(s.Value) {
			return sanError("%s name %.80q is not printable ASCII", kindName(s.Type), s.Value)
		}
	case IP:
		if n := len(s.Value); n != net.IPv4len && n != net.IPv6len {
			return sanError("IP address of %d bytes, want 4 or 16", n)
		}
	}
	return nil
}

// parseSANs reads the value of a subject alternative name extension (OID 2.5.29.17). It is strict: one SEQUENCE in
// DER with at least one name and no trailing bytes; DNS, URI and Email names of printable ASCII, without the line
// breaks and NUL bytes that IA5String allows; addresses of 4 or 16 bytes. It returns names of other kinds with their
// own type and bytes, and keeps empty DNS names. The limits are 64 KiB and 1,000 names.
func parseSANs(der []byte) ([]SAN, error) {
	if len(der) > maxSANBytes {
		return nil, sansTooLarge(len(der))
	}
	in := cryptobyte.String(der)
	var names cryptobyte.String
	if !in.ReadASN1(&names, asn1.SEQUENCE) {
		return nil, sanError("the extension is not a SEQUENCE in DER")
	}
	if !in.Empty() {
		return nil, sanError("%d bytes after the SEQUENCE", len(in))
	}
	if names.Empty() {
		return nil, sanError("there is no name")
	}
	text := string(der) // one copy, which all values share
	sans := make([]SAN, 0, 4)
	for !names.Empty() {
		if len(sans) == maxSANs {
			return nil, tooManySANs()
		}
		var value cryptobyte.String
		var tag asn1.Tag
		if !names.ReadAnyASN1(&value, &tag) {
			return nil, sanError("name %d is not DER", len(sans)+1)
		}
		end := len(text) - len(names)
		s := SAN{Type: int(tag & tagNumber), Value: text[end-len(value) : end]}
		if err := s.checkRead(tag); err != nil {
			return nil, err
		}
		sans = append(sans, s)
	}
	return sans, nil
}

// The parts of an identifier octet.
const (
	tagNumber      = 0x1f
	tagConstructed = 0x20
	tagClass       = 0xc0
)

// checkRead reports whether s, read with this tag, is valid for its type.
func (s SAN) checkRead(tag asn1.Tag) error {
	if tag&tagClass != asn1.Tag(0).ContextSpecific() {
		return sanError("an element with tag %#x is not a name", uint8(tag))
	}
	switch s.Type {
	case DNS, URI, Email, IP:
		if tag&tagConstructed != 0 {
			return sanError("%s name in constructed form", kindName(s.Type))
		}
	}
	return s.check()
}

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// checkRequested applies the rules for names in a CSR that we make.
func (s SAN) checkRequested() error {
	switch s.Type {
	case DNS:
		return checkDNSName(s.Value)
	case URI:
		u, err := url.Parse(s.Value)
		if err != nil || u.Scheme == "" {
			return sanError("URI %.80q has no scheme", s.Value)
		}
		if u.Scheme == "spiffe" { // url.Parse lowers the case; ParseID does not
			id, err := spiffe.ParseID(s.Value)
			if err != nil {
				return fmt.Errorf("%w: %w", errSAN, err)
			}
			return checkReadable(id.TrustDomain())
		}
		if !readableHost(u.Host) {
			return sanError("URI %.80q has a host that crypto/x509 cannot read", s.Value)
		}
	case IP:
		// Address comparison treats it as the 4-byte form; name constraints do not.
		if ip := net.IP(s.Value); len(ip) == net.IPv6len && ip.To4() != nil {
			return sanError("the IPv4 address %s has 16 bytes, which IPSAN makes 4", ip)
		}
	}
	return nil // marshalSANs checks the rest
}

// checkDNSName applies the rules for a DNS name in a certificate: at most 253 bytes of letters, digits,
// hyphens and underscores in labels of 1 to 63 bytes; the first label may be "*".
func checkDNSName(name string) error {
	bad := func(why string) error { return sanError("DNS name %.80q: %s", name, why) }
	switch {
	case name == "":
		return bad("it is empty")
	case len(name) > 253:
		return bad("longer than 253 bytes")
	}
	if _, err := netip.ParseAddr(name); err == nil {
		return bad("it is an IP address, which has a type of its own")
	}
	rest, wild := strings.CutPrefix(name, "*.")
	for label := range strings.SplitSeq(rest, ".") {
		switch {
		case label == "" || len(label) > 63:
			return bad("a label must have 1 to 63 bytes")
		case label[0] == '-' || label[len(label)-1] == '-':
			return bad("a label must not begin or end with a hyphen")
		}
		for i := range len(label) {
			switch c := label[i]; {
			case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
			default:
				return bad("only letters, digits, hyphens and underscores are allowed in a label")
			}
		}
	}
	if wild && !strings.Contains(rest, ".") {
		return bad("a wildcard must not cover a top-level domain")
	}
	return nil
}

func sanError(format string, args ...any) error {
	return fmt.Errorf("%w: %s", errSAN, fmt.Sprintf(format, args...))
}

func tooManySANs() error {
	return fmt.Errorf("%w: more than %d names: %w", errSAN, maxSANs, spiffe.ErrTooLarge)
}

func sansTooLarge(n int) error {
	return fmt.Errorf("%w: extension of %d bytes, the limit is %d: %w", errSAN, n, maxSANBytes, spiffe.ErrTooLarge)
}
