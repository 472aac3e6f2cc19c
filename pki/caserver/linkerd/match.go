package linkerd

import (
	"fmt"
	"strings"

	"github.com/svidkit/svidkit/spiffe"
)

// Match is what an authorization policy says of who may be a client: one identity, or many by a
// wildcard. It works with ==. The zero Match matches nothing.
type Match struct{ text string }

// ParseMatch reads the text of a policy:
//
//   - every DNS name, and no SPIFFE ID
//     *.REST        every DNS name that ends with .REST, with at least one label before it
//     NAME          this DNS name
//     spiffe://…    this SPIFFE ID
//
// A DNS name is labels of a-z, 0-9 and inner hyphens. The error wraps [ErrName].
func ParseMatch(s string) (Match, error) {
	if strings.HasPrefix(s, "spiffe:") {
		if _, err := spiffe.ParseID(s); err != nil {
			return Match{}, fmt.Errorf("linkerd: parse match: %w: %w", ErrName, err)
		}
		return Match{s}, nil
	}
	rest, wild := strings.CutPrefix(s, "*")
	switch {
	case wild && rest == "":
		return Match{s}, nil
	case wild && rest[0] != '.':
		return Match{}, fmt.Errorf("linkerd: parse match %.300q: a wildcard must be the whole first label: %w", s, ErrName)
	case wild:
		rest = rest[1:]
	}
	for label := range strings.SplitSeq(rest, ".") {
		if !isLongLabel(label) {
			return Match{}, fmt.Errorf("linkerd: parse match %.300q: neither a DNS name in lower case, which may begin with \"*.\", nor a SPIFFE ID: %w", s, ErrName)
		}
	}
	return Match{s}, nil
}

// String returns the text of the policy, or "" for the zero Match.
func (m Match) String() string { return m.text }

// Matches reports whether an identity is matched: the name out of a client's verified certificate, in
// the form of a DNS name, or the text of a SPIFFE ID. Names are compared byte for byte, and
// wildcards never match a SPIFFE ID.
func (m Match) Matches(identity string) bool {
	suffix, wild := strings.CutPrefix(m.text, "*")
	switch {
	case identity == "" || m.text == "":
		return false
	case !wild:
		return identity == m.text
	case strings.ContainsAny(identity, ":/"): // in every URI, and in no DNS name
		return false
	}
	return len(identity) > len(suffix) && strings.HasSuffix(identity, suffix)
}
