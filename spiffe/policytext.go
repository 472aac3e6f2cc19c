package spiffe

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

const (
	maxPolicyText = 1 << 20 // bytes of a policy as text
	wildcard      = "/" + anyRule
)

// PolicyError says where the text of a policy is wrong.
type PolicyError struct {
	Offset int    // the first byte of the text that is wrong
	Rule   string // the rule that it is in, as far as it is fit for a log
	Reason string // what is wrong, in words
	Err    error  // the [*ParseError] if it is the ID in the rule, whose offset counts from the ID; or nil
}

// Error names the rule and the byte.
func (e *PolicyError) Error() string {
	if e.Rule == "" {
		return fmt.Sprintf("spiffe: invalid policy at byte %d: %s", e.Offset, e.Reason)
	}
	return fmt.Sprintf("spiffe: invalid policy at byte %d: rule %q: %s", e.Offset, e.Rule, e.Reason)
}

// Unwrap returns e.Err.
func (e *PolicyError) Unwrap() error { return e.Err }

// ParsePolicy parses what [Policy.String] returns: rules with a comma and a space between them, in any
// order. A rule is an ID ("spiffe://example.org/web"), a trust domain or a path and everything below
// it ("spiffe://example.org/*", "spiffe://example.org/ns/prod/*"), or "*" for every workload of every
// trust domain, and means what [AllowIDs], [AllowMembersOf], [AllowPathPrefix] and [AllowAnyPeer]
// mean.
//
// It is strict: an empty rule, a rule that is there twice, a star elsewhere, white space and an ID
// that [ParseID] refuses are each a [*PolicyError], which has the offset. There is no text for a
// policy that allows nobody; the empty text is an error. Text of more than 1 MiB gives an error that
// wraps [ErrTooLarge].
func ParsePolicy(text string) (Policy, error) {
	if len(text) > maxPolicyText {
		return Policy{}, fmt.Errorf("spiffe: invalid policy: %d bytes, the limit is %d: %w", len(text), maxPolicyText, ErrTooLarge)
	}
	rules := make(map[string]struct{})
	for at := 0; ; {
		rule, rest, more := strings.Cut(text[at:], ",")
		key, err := parseRule(rule, at)
		if err != nil {
			return Policy{}, err
		}
		if _, twice := rules[key]; twice {
			return Policy{}, ruleError(at, rule, "it is there twice")
		}
		rules[key] = struct{}{}
		if !more {
			return newPolicy(rules), nil
		}
		at += len(rule) + len(",")
		if !strings.HasPrefix(rest, " ") {
			return Policy{}, ruleError(at, "", "a space has to follow the comma")
		}
		at += len(" ")
	}
}

// parseRule returns rule, which begins at byte at of the text, in the form that a ruleSet holds.
func parseRule(rule string, at int) (string, error) {
	switch {
	case rule == anyRule:
		return anyRule, nil
	case rule == "":
		return "", ruleError(at, "", `a rule is missing: want an ID, an ID and "/*", or "*"`)
	}
	id, below := rule, len(rule) >= len(scheme)+len(wildcard) && strings.HasSuffix(rule, wildcard)
	if below {
		id = rule[:len(rule)-len(wildcard)]
	}
	if _, err := ParseID(id); err != nil {
		e := ruleError(at, rule, inner(err))
		if pe, ok := errors.AsType[*ParseError](err); ok {
			e.Offset, e.Reason, e.Err = at+pe.Offset, fmt.Sprintf("%s (%s)", pe.Reason, pe.Rule), pe
		}
		return "", e
	}
	if below {
		return rule[:len(rule)-len(anyRule)], nil
	}
	return rule, nil
}

func ruleError(at int, rule, reason string) *PolicyError {
	return &PolicyError{Offset: at, Rule: clip(rule, 128), Reason: reason}
}

// AppendText implements [encoding.TextAppender]. It appends [Policy.String], and refuses a policy that
// can allow nobody and one of more than 1 MiB, which [ParsePolicy] could not read; the errors wrap
// [ErrZero] for the zero Policy and [ErrTooLarge].
func (p Policy) AppendText(b []byte) ([]byte, error) {
	if p.s == nil {
		return b, errZero("policy")
	}
	if err := p.usable(); err != nil {
		return b, fmt.Errorf("spiffe: %w", err)
	}
	text := p.s.text(0)
	if len(text) > maxPolicyText {
		return b, fmt.Errorf("spiffe: invalid policy: %d bytes as text, the limit is %d: %w", len(text), maxPolicyText, ErrTooLarge)
	}
	return append(b, text...), nil
}

// MarshalText implements [encoding.TextMarshaler]; see [Policy.AppendText]. For an optional field in
// JSON use the tag "omitzero".
func (p Policy) MarshalText() ([]byte, error) { return p.AppendText(nil) }

// UnmarshalText implements [encoding.TextUnmarshaler]; it refuses what [ParsePolicy] refuses and then
// leaves p as it was.
func (p *Policy) UnmarshalText(text []byte) error {
	parsed, err := ParsePolicy(string(text))
	if err == nil {
		*p = parsed
	}
	return err
}

// Explain returns the narrowest rule of p that allows id, as [Policy.String] writes it, or an error
// that wraps [ErrDenied] and says how id misses: that no rule is about its trust domain, or which rule
// comes closest. It is for people: unlike [Policy.Allows] it may take time that grows with p.
func (p Policy) Explain(id ID) (rule string, err error) {
	if p.Allows(id) {
		return ruleText(p.s.narrowest(id)), nil
	}
	if err := p.usable(); err != nil {
		return "", fmt.Errorf("spiffe: %q: %w: %w", clip(id.String(), maxInError), ErrDenied, err)
	}
	return "", fmt.Errorf("spiffe: %q: %w: %s", clip(id.String(), maxInError), ErrDenied, p.s.miss(id))
}

// narrowest returns the rule that allows id.
func (s *ruleSet) narrowest(id ID) string {
	for rule := id.s; rule != ""; {
		if _, ok := s.rules[rule]; ok {
			return rule
		}
		slash := strings.LastIndexByte(rule[:len(rule)-1], '/')
		if slash < len(scheme) {
			break
		}
		rule = rule[:slash+1]
	}
	return anyRule
}

// miss says why no rule allows id.
func (s *ruleSet) miss(id ID) string {
	if id.IsZero() {
		return "the zero ID is never allowed"
	}
	var closest string
	about, shared := 0, -1
	for _, r := range slices.Sorted(maps.Keys(s.rules)) {
		if ruleDomain(r) != id.TrustDomain().name {
			continue
		}
		about++
		if n := commonPrefix(r, id.s); n > shared {
			closest, shared = r, n
		}
	}
	switch {
	case id.Path() == "" && (s.any || about > 0):
		return "it has no path, so it names a trust domain; only a rule that is this very ID allows it"
	case about == 0:
		return fmt.Sprintf("no rule is about the trust domain %q", id.TrustDomain())
	case about == 1:
		return fmt.Sprintf("the one rule about its trust domain is %q", clip(ruleText(closest), maxInError))
	}
	return fmt.Sprintf("none of the %d rules about its trust domain; the closest is %q", about, clip(ruleText(closest), maxInError))
}

func commonPrefix(a, b string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}
