package spiffe

import "strings"

// maxTrustDomain is the longest trust domain name in bytes (SPIFFE-ID section 2.3).
const maxTrustDomain = 255

// TrustDomain is the name of a trust domain, such as "example.org", without a scheme. It is a
// small immutable value that works with == and as a map key. A name that looks like an IP address
// or a DNS name is handled as plain bytes, without look-ups or normalisation (SPIFFE-ID section 2.1).
//
// The zero TrustDomain is not valid: IsZero reports true, String says so, and MarshalText refuses it.
type TrustDomain struct{ name string }

// ParseTrustDomain parses a trust domain name of at most 255 bytes. It refuses the form of an ID,
// "spiffe://example.org", which is for [ParseID] and [ID.TrustDomain]. The error is a [*ParseError].
func ParseTrustDomain(name string) (TrustDomain, error) {
	if e := checkName(name); e != nil {
		e.What, e.Input = "trust domain", name
		if i := strings.Index(name, "://"); i >= 0 {
			e.Offset, e.Rule, e.Reason = i, "ID-9", "it has a scheme; give the name alone"
		}
		return TrustDomain{}, e
	}
	return TrustDomain{name: name}, nil
}

// MustParseTrustDomain is [ParseTrustDomain] for constants: it panics if name is not valid.
func MustParseTrustDomain(name string) TrustDomain {
	td, err := ParseTrustDomain(name)
	if err != nil {
		panic(err)
	}
	return td
}

// IsZero reports whether td is the zero TrustDomain, which is not valid.
func (td TrustDomain) IsZero() bool { return td.name == "" }

// String returns the name, or "invalid trust domain" for the zero TrustDomain.
func (td TrustDomain) String() string {
	if td.IsZero() {
		return "invalid trust domain"
	}
	return td.name
}

// ID returns the ID of the trust domain itself, which has no path: the name that its signing
// certificates carry. The zero TrustDomain gives the zero ID.
func (td TrustDomain) ID() ID {
	if td.IsZero() {
		return ID{}
	}
	return ID{s: scheme + td.name, td: uint8(len(td.name))}
}

// WorkloadID returns the ID of td with a path of the given segments, each without slashes, such as "ns", a namespace,
// "sa" and a service account. Segments that are empty or break the path rules are refused, never rewritten. Without
// segments it returns [TrustDomain.ID]. The error is a [*ParseError].
func (td TrustDomain) WorkloadID(segments ...string) (ID, error) {
	if td.IsZero() {
		return ID{}, errZero("trust domain")
	}
	for _, seg := range segments {
		if i := strings.IndexByte(seg, '/'); i >= 0 {
			e := &ParseError{What: "path segment", Input: seg, Offset: i, Rule: "ID-19"}
			e.Reason = "a slash is not allowed inside a segment"
			return ID{}, e
		}
	}
	return ParseID(strings.Join(append([]string{scheme + td.name}, segments...), "/"))
}

// MarshalText implements [encoding.TextMarshaler]. The zero TrustDomain is an error; for an
// optional field in JSON use the tag "omitzero".
func (td TrustDomain) MarshalText() ([]byte, error) {
	if td.IsZero() {
		return nil, errZero("trust domain")
	}
	return []byte(td.name), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler] with [ParseTrustDomain]. After an error td is unchanged.
func (td *TrustDomain) UnmarshalText(text []byte) error {
	p, err := ParseTrustDomain(string(text))
	if err == nil {
		*td = p
	}
	return err
}

// checkName applies the trust domain name rules. Offsets count from the start of name.
func checkName(name string) *ParseError {
	if name == "" {
		return &ParseError{Rule: "ID-3", Reason: "the trust domain name is empty"}
	}
	for i := range len(name) {
		if !nameByte[name[i]] {
			return nameByteError(name, i)
		}
	}
	if len(name) > maxTrustDomain {
		const reason = "the trust domain name is longer than 255 bytes"
		return &ParseError{Offset: maxTrustDomain, Rule: "ID-13", Reason: reason}
	}
	return nil
}

func nameByteError(name string, i int) *ParseError {
	e := &ParseError{Offset: i}
	switch c := name[i]; {
	case 'A' <= c && c <= 'Z':
		e.Rule, e.Reason = "ID-8", "upper case is not allowed in a trust domain name"
	case c == '%':
		e.Rule, e.Reason = "ID-10", "percent-encoding is not allowed in a trust domain name"
	case c == '@':
		e.Rule, e.Reason = "ID-6", "user information is not allowed"
	case c == '[':
		e.Rule, e.Reason = "ID-11", "an IPv6 literal is not allowed as trust domain name"
	case c == ':' && strings.IndexByte(name[i:], '@') > 0:
		e.Rule, e.Reason = "ID-6", "user information is not allowed"
	case c == ':':
		e.Rule, e.Reason = "ID-7", "a port is not allowed"
	case c == '?':
		e.Rule, e.Reason = "ID-4", "a query is not allowed"
	case c == '#':
		e.Rule, e.Reason = "ID-5", "a fragment is not allowed"
	default:
		e.Rule = "ID-9"
		e.Reason = "only lower-case letters, digits, '.', '-' and '_' are allowed in a trust domain name"
	}
	return e
}
