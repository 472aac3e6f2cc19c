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

// ParsePolicy parses what [Policy.String] returns: rules with a comma and a space between them, in any
// order. A rule is an ID ("spiffe://example.org/web"), a trust domain or a path and everything below
// it ("spiffe://example.org/*", "spiffe://example.org/ns/prod/*"), or "*" for every workload of every
// trust domain. They mean what [AllowIDs], [AllowMembersOf], [AllowPathPrefix] and [AllowAnyPeer] mean.
//
// It is strict: an empty rule, a duplicate rule, a star elsewhere, white space and an ID that [ParseID]
// refuses are each a [*ParseError], whose offset counts from the start of text. There is no text for a
// policy that allows no peer; the empty text is an error. Text of more than 1 MiB gives an error that
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
			return Policy{}, ruleError(at, rule, "the rule occurs twice")
		}
		rules[key] = struct{}{}
		if !more {
			return newPolicy(rules), nil
		}
		at += len(rule) + len(",")
		if !strings.HasPrefix(rest, " ") {
			return Policy{}, ruleError(at, "", "a space must follow the comma")
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
			e.Offset, e.Rule, e.Reason = at+pe.Offset, pe.Rule, pe.Reason
		}
		return "", e
	}
	if below {
		return rule[:len(rule)-len(anyRule)], nil
	}
	return rule, nil
}

func ruleError(at int, rule, reason string) *ParseError {
	return &ParseError{What: "policy", Input: rule, Offset: at, Reason: reason}
}

// MarshalText implements [encoding.TextMarshaler]. It returns [Policy.String], and refuses a policy that
// can allow no peer and one of more than 1 MiB, which [ParsePolicy] could not read; the errors wrap
// [ErrZero] for the zero Policy and [ErrTooLarge]. For an optional field in JSON use the tag "omitzero".
func (p Policy) MarshalText() ([]byte, error) {
	if p.s == nil {
		return nil, errZero("policy")
	}
	if err := p.usable(); err != nil {
		return nil, fmt.Errorf("spiffe: %w", err)
	}
	text := p.s.text(0)
	if len(text) > maxPolicyText {
		return nil, fmt.Errorf("spiffe: invalid policy: %d bytes as text, the limit is %d: %w", len(text), maxPolicyText, ErrTooLarge)
	}
	return []byte(text), nil
}

// UnmarshalText implements [encoding.TextUnmarshaler]. It refuses what [ParsePolicy] refuses, and then
// leaves p unchanged.
func (p *Policy) UnmarshalText(text []byte) error {
	parsed, err := ParsePolicy(string(text))
	if err == nil {
		*p = parsed
	}
	return err
}

// Explain returns the narrowest rule of p that allows id, as [Policy.String] writes it, or an error
// that wraps [ErrDenied] and says why no rule allows id: no rule is about its trust domain, or which rule
// comes closest. It is for operators: unlike [Policy.Allows] its time grows with the number of rules.
func (p Policy) Explain(id ID) (rule string, err error) {
	if p.Allows(id) {
		return ruleText(p.s.narrowest(id)), nil
	}
	err = p.usable()
	if err == nil {
		err = errors.New(p.s.miss(id))
	}
	return "", fmt.Errorf("spiffe: %q: %w: %w", clip(id.String(), maxInError), ErrDenied, err)
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
		return "it has no path, so it names a trust domain; only a rule that is this ID allows it"
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
