package spiffe

import (
	"net/url"
	"strings"
)

// maxID is the longest SPIFFE ID in bytes that this package parses or builds, counting the scheme,
// "://", the trust domain name and the path.
const maxID = 2048

const scheme = "spiffe://"

// ID is a SPIFFE ID: the name of a workload or, without a path, of a trust domain. It is a small
// immutable value that works with ==, as a map key and in a switch. IDs are equal if their bytes are
// (SPIFFE-ID section 2.2).
//
// An ID is a claim: parsing it proves nothing about its sender. The proof is a [Peer].
//
// The zero ID is not valid: IsZero reports true, String says so, and MarshalText refuses it.
type ID struct {
	s  string // the whole ID
	td uint8  // length of the trust domain name; at most 255
}

// ParseID parses a SPIFFE ID of at most 2048 bytes. Nothing is normalised: the result prints as the
// input. The ID shares memory with s. The error is a [*ParseError].
func ParseID(s string) (ID, error) {
	if !strings.HasPrefix(s, scheme) {
		return ID{}, schemeError(s)
	}
	if len(s) > maxID {
		return ID{}, &ParseError{What: "ID", Input: s, Offset: maxID, Rule: "ID-21", Reason: "longer than 2048 bytes"}
	}
	end := len(scheme)
	for end < len(s) && nameByte[s[end]] {
		end++
	}
	n := end - len(scheme)
	if n == 0 || n > maxTrustDomain || end < len(s) && s[end] != '/' {
		name, _, _ := strings.Cut(s[len(scheme):], "/")
		e := checkName(name)
		e.What, e.Input = "ID", s
		e.Offset += len(scheme)
		return ID{}, e
	}
	if e := checkPath(s[end:]); e != nil {
		e.What, e.Input = "ID", s
		e.Offset += end
		return ID{}, e
	}
	return ID{s: s, td: uint8(n)}, nil
}

// MustParseID is [ParseID] for constants: it panics if s is not a SPIFFE ID.
func MustParseID(s string) ID {
	id, err := ParseID(s)
	if err != nil {
		panic(err)
	}
	return id
}

// IsZero reports whether id is the zero ID, which is not valid.
func (id ID) IsZero() bool { return id.s == "" }

// String returns the ID as it was parsed, or "invalid SPIFFE ID" for the zero ID.
func (id ID) String() string {
	if id.IsZero() {
		return "invalid SPIFFE ID"
	}
	return id.s
}

// TrustDomain returns the trust domain that id belongs to; the zero ID has the zero trust domain.
func (id ID) TrustDomain() TrustDomain {
	if id.IsZero() {
		return TrustDomain{}
	}
	return TrustDomain{name: id.s[len(scheme) : len(scheme)+int(id.td)]}
}

// Path returns the path with its leading slash, or "" for the ID of a trust domain. The library
// gives the path no meaning (SPIFFE-ID section 2.2).
func (id ID) Path() string {
	if id.IsZero() {
		return ""
	}
	return id.s[len(scheme)+int(id.td):]
}

// MemberOf reports whether id belongs to td: the names are equal, byte for byte (SPIFFE-ID section 2.1). The zero
// ID is a member of no trust domain.
func (id ID) MemberOf(td TrustDomain) bool { return !id.IsZero() && id.TrustDomain() == td }

// URL returns the ID as a new URL, for certificate templates of crypto/x509. The zero ID gives nil.
func (id ID) URL() *url.URL {
	if id.IsZero() {
		return nil
	}
	return &url.URL{Scheme: "spiffe", Host: id.TrustDomain().name, Path: id.Path()}
}

// MarshalText implements [encoding.TextMarshaler]. The zero ID is an error; for an optional field
// in JSON use the tag "omitzero".
func (id ID) MarshalText() ([]byte, error) {
	if id.IsZero() {
		return nil, errZero("ID")
	}
	return []byte(id.s), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler] with [ParseID]. After an error id is unchanged.
func (id *ID) UnmarshalText(text []byte) error {
	p, err := ParseID(string(text))
	if err == nil {
		*id = p
	}
	return err
}

// Kubernetes returns the namespace and service account of an ID of the form
// spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT, and whether id has that form.
func (id ID) Kubernetes() (namespace, serviceAccount string, ok bool) {
	segments := strings.Split(id.Path(), "/") // the first is empty
	if len(segments) != 5 || segments[1] != "ns" || segments[3] != "sa" {
		return "", "", false
	}
	return segments[2], segments[4], true
}

// checkPath applies the path rules to s, which is empty or begins with a slash.
func checkPath(s string) *ParseError {
	if s == "" {
		return nil
	}
	for start := 1; ; { // of the current segment
		i := start
		for i < len(s) && pathByte[s[i]] {
			i++
		}
		if i < len(s) && s[i] != '/' {
			return pathByteError(s, i)
		}
		switch seg := s[start:i]; {
		case seg == "" && i == len(s):
			return &ParseError{Offset: start - 1, Rule: "ID-18", Reason: "a trailing slash is not allowed"}
		case seg == "":
			return &ParseError{Offset: start, Rule: "ID-16", Reason: "an empty path segment is not allowed"}
		case seg == "." || seg == "..":
			return &ParseError{Offset: start, Rule: "ID-17", Reason: `the path segments "." and ".." are not allowed`}
		}
		if i == len(s) {
			return nil
		}
		start = i + 1
	}
}

func pathByteError(s string, i int) *ParseError {
	e := &ParseError{Offset: i}
	switch s[i] {
	case '?':
		e.Rule, e.Reason = "ID-4", "a query is not allowed"
	case '#':
		e.Rule, e.Reason = "ID-5", "a fragment is not allowed"
	case '%':
		e.Rule, e.Reason = "ID-15", "percent-encoding is not allowed in the path"
	default:
		e.Rule, e.Reason = "ID-19", "only letters, digits, '.', '-' and '_' are allowed in a path segment"
	}
	return e
}

func schemeError(s string) error {
	n := 0
	for n < len(s) && n < len(scheme) && s[n] == scheme[n] {
		n++
	}
	const reason = `must begin with "spiffe://", in lower case`
	return &ParseError{What: "ID", Input: s, Offset: n, Rule: "ID-2", Reason: reason}
}

var nameByte, pathByte = byteTables()

func byteTables() (name, path [256]bool) {
	for c := range 256 {
		switch b := byte(c); {
		case 'a' <= b && b <= 'z', '0' <= b && b <= '9', b == '.', b == '-', b == '_':
			name[c], path[c] = true, true
		case 'A' <= b && b <= 'Z':
			path[c] = true
		}
	}
	return name, path
}
