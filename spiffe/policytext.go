package spiffe

import (
	"errors"
	"fmt"
	"strings"
)

const maxPolicyText = 1 << 20 // bytes of a policy as text

// ParsePolicy parses the output of [Policy.String]: rules with a comma and a space between them, in any order. The
// rules are:
//
//	spiffe://example.org/web          this ID and nothing below it, as [AllowIDs]
//	spiffe://example.org/*            every workload of the trust domain, as [AllowMembersOf]
//	spiffe://example.org/ns/prod/*    everything below this path, as [AllowPathPrefix]
//	spiffe://example.org/ns/*/sa/web  any one segment for the star
//	*                                 every workload of every trust domain, as [AllowAnyPeer]
//
// A star is a whole segment of the path, and never in the trust domain. At the end of a rule it stands for one
// segment or more, elsewhere for exactly one. At most 1,024 rules have a star that is not at the end. The space after
// a comma may be a line break instead.
//
// Parsing is strict: an empty rule, a rule that occurs twice, a star elsewhere, other white space, and an ID that
// [ParseID] refuses are each a [*ParseError], whose offset counts from the start of text. There is no text for a
// policy that allows no peer; the empty text is an error. Text of more than 1 MiB gives an error that wraps
// [ErrTooLarge].
func ParsePolicy(text string) (Policy, error) {
	if len(text) > maxPolicyText {
		return Policy{}, fmt.Errorf("spiffe: invalid policy: %d bytes, the limit is %d: %w", len(text),
			maxPolicyText, ErrTooLarge)
	}
	rules := make(map[string]struct{})
	for at := 0; ; {
		word, rest, more := strings.Cut(text[at:], ",")
		rule, err := parseRule(word, at)
		if err != nil {
			return Policy{}, err
		}
		if _, twice := rules[rule]; twice {
			return Policy{}, ruleError(at, word, "the rule occurs twice")
		}
		rules[rule] = struct{}{}
		if !more {
			break
		}
		at += len(word) + len(",")
		if rest == "" || rest[0] != ' ' && rest[0] != '\n' {
			return Policy{}, ruleError(at, "", "a space must follow the comma, or a line break")
		}
		at++
	}
	p := newPolicy(rules)
	if p.s.mistake != "" {
		return Policy{}, ruleError(0, "", p.s.mistake)
	}
	return p, nil
}

// parseRule returns rule, which begins at byte at of the text, in the form that a ruleSet holds.
func parseRule(rule string, at int) (string, error) {
	if i := strings.IndexAny(rule, " \t\r\n"); i >= 0 {
		return "", ruleError(at+i, rule, `white space is not allowed here; rules have ", " between them`)
	}
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
	e := checkStars(id)
	if e == nil {
		_, err := ParseID(strings.ReplaceAll(id, anyRule, "x"))
		e, _ = errors.AsType[*ParseError](err)
	}
	switch {
	case e != nil:
		e.What, e.Input, e.Offset = "policy", rule, at+e.Offset
		return "", e
	case below:
		return rule[:len(rule)-len(anyRule)], nil
	}
	return rule, nil
}

// checkStars refuses a star in id that is not a whole segment. id is a rule without its final "/*".
func checkStars(id string) *ParseError {
	if !strings.HasPrefix(id, scheme) {
		return nil // ParseID says so
	}
	for i := range len(id) {
		switch {
		case id[i] != '*':
		case !strings.Contains(id[len(scheme):i], "/"):
			return &ParseError{
				Offset: i, Rule: "ID-9",
				Reason: "a star cannot stand in the trust domain; " +
					"name each trust domain, or write \"*\" for every workload of all",
			}
		case id[i-1] != '/' || i+1 < len(id) && id[i+1] != '/':
			return &ParseError{
				Offset: i, Rule: "ID-19",
				Reason: "only letters, digits, '.', '-' and '_' are allowed in a path segment, " +
					"or a star as the whole of it",
			}
		}
	}
	return nil
}

func ruleError(at int, rule, reason string) *ParseError {
	return &ParseError{What: "policy", Input: rule, Offset: at, Reason: reason}
}
