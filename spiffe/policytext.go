package spiffe

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/svidkit/svidkit/internal/redact"
)

const (
	maxPolicyText = 1 << 20 // bytes of a policy as text
	maxParts      = 1024
	maxSetName    = 63
	exceptWord    = " except "
	setSign       = " = "
)

// ParsePolicy parses what [Policy.String] returns: rules with a comma and a space between them, in any
// order. A rule is one of
//
//	spiffe://example.org/web          this ID and nothing below it, as [AllowIDs]
//	spiffe://example.org/*            every workload of the trust domain, as [AllowMembersOf]
//	spiffe://example.org/ns/prod/*    everything below this path, as [AllowPathPrefix]
//	spiffe://example.org/ns/*/sa/web  any one segment for the star
//	*                                 every workload of every trust domain, as [AllowAnyPeer]
//
// A star is a whole segment of the path, one of the first 64, and never in the trust domain. At the end of a
// rule it stands for one segment or more, elsewhere for exactly one. Stars can stand in at most 16
// different places of a policy.
//
// The rules after the word except are exceptions from those before it, up to the semicolon or the end, as
// [Policy.Except]. A semicolon joins parts with their own exceptions, as [AnyOf]. There are at most 16 different
// lists of exceptions, and 1,024 parts:
//
//	spiffe://example.org/* except spiffe://example.org/ns/dev/*, spiffe://example.org/ns/test/*; spiffe://example.org/ns/dev/sa/debugger
//
// A part can also define a set: a name for rules, which later parts use like a rule. The name begins with a
// letter and has at most 63 letters, digits, '-' and '_'. A policy prints the rules of its sets, not their names:
//
//	prod = spiffe://example.org/ns/prod/*, spiffe://example.org/ns/canary/*;
//	fuzzers = spiffe://example.org/ns/*/sa/fuzzer;
//	prod, spiffe://partner.test/gateway except fuzzers
//
// The space after a comma or a semicolon may be a line break instead.
//
// Parsing is strict: an empty rule, a rule that occurs twice in a list, a star elsewhere, other white space, an
// undefined name, exceptions that leave nothing of a part, and an ID that [ParseID] refuses are each a
// [*ParseError], whose offset counts from the start of text. There is no text for a policy that allows no peer;
// the empty text is an error. Text of more than 1 MiB, with its sets written out, gives an error that wraps
// [ErrTooLarge]. [Policy.Warnings] lists rules that are valid but probably not meant.
func ParsePolicy(text string) (Policy, error) {
	p := policyParser{text: text, sets: make(map[string]map[string]struct{}), notes: make(map[string]string)}
	if err := p.grow(len(text)); err != nil {
		return Policy{}, err
	}
	policy, err := p.policy()
	if e, ok := errors.AsType[*ParseError](err); ok {
		if line := 1 + strings.Count(text[:min(e.Offset, len(text))], "\n"); line > 1 {
			e.Reason = fmt.Sprintf("line %d: %s", line, e.Reason)
		}
	}
	return policy, err
}

// policyParser reads text from byte at.
type policyParser struct {
	text  string
	at    int
	size  int // bytes of the text with its sets written out
	sets  map[string]map[string]struct{}
	notes map[string]string // of the policy
}

func (p *policyParser) grow(n int) error {
	if p.size += n; p.size > maxPolicyText {
		return fmt.Errorf("spiffe: invalid policy: %d bytes or more with its sets, the limit is %d: %w", p.size, maxPolicyText, ErrTooLarge)
	}
	return nil
}

func (p *policyParser) policy() (policy Policy, err error) {
	var all []lists
	for parts := 0; ; {
		start := p.at
		l, err := p.part()
		if err != nil {
			return Policy{}, err
		}
		if l.allow != nil {
			all = append(all, l)
		}
		if l.except != nil { // judged alone, so that the error has its offset
			if policy = newPolicy(p.notes, l); policy.s.mistake != "" {
				return Policy{}, ruleError(start, "", policy.s.mistake)
			}
		}
		if parts++; parts > maxParts {
			return Policy{}, ruleError(start, "", fmt.Sprintf("more than %d parts; join those without exceptions by a comma", maxParts))
		}
		if p.at == len(p.text) {
			break
		}
		if err := p.gap("semicolon"); err != nil {
			return Policy{}, err
		}
	}
	switch {
	case len(all) == 0:
		return Policy{}, ruleError(p.at, "", "rules are missing after the sets")
	case len(all) == 1 && all[0].except != nil:
		return policy, nil
	}
	if policy = newPolicy(p.notes, all...); policy.s.mistake != "" {
		return Policy{}, ruleError(0, "", policy.s.mistake)
	}
	return policy, nil
}

// part reads up to a semicolon or the end. It returns no rules for the definition of a set.
func (p *policyParser) part() (l lists, err error) {
	start := p.at
	name := p.word()
	if !p.next(setSign) {
		p.at = start
		name = ""
	} else if err := p.checkName(start, name); err != nil {
		return lists{}, err
	}
	if l.allow, err = p.list(); err != nil {
		return lists{}, err
	}
	at := p.at
	switch {
	case !p.next(exceptWord):
	case name != "":
		return lists{}, ruleError(at+1, "", `a set has no exceptions; write "except" where the set is used`)
	default:
		if l.except, err = p.list(); err != nil {
			return lists{}, err
		}
		if strings.HasPrefix(p.text[p.at:], exceptWord) {
			return lists{}, ruleError(p.at+1, "", `"except" occurs twice; write "; " to begin a part with its own exceptions`)
		}
	}
	switch rest := p.text[p.at:]; {
	case rest == "" || rest[0] == ';':
	case strings.TrimSpace(rest) == "":
		return lists{}, ruleError(p.at, "", "white space after the last rule is not allowed; trim the text")
	default:
		return lists{}, ruleError(p.at, "", `after a rule comes ", ", "; ", " except " or the end`)
	}
	if name != "" {
		p.sets[name] = l.allow
		return lists{}, nil
	}
	return l, nil
}

// list reads rules up to something that is no comma.
func (p *policyParser) list() (map[string]struct{}, error) {
	start := p.at
	var list map[string]struct{}
	var sets []string
	for {
		at := p.at
		word := p.word()
		if set, ok := p.sets[word]; ok {
			if slices.Contains(sets, word) {
				return nil, ruleError(at, word, "the set occurs twice")
			}
			sets = append(sets, word)
			for rule := range set {
				if err := p.grow(len(rule) + len(", *")); err != nil {
					return nil, err
				}
			}
		} else {
			rule, err := parseRule(word, at)
			if err != nil {
				return nil, p.explain(err, at, word)
			}
			if _, twice := list[rule]; twice {
				return nil, ruleError(at, word, "the rule occurs twice")
			}
			if list == nil { // The first one is a rule, so the others probably are.
				list = make(map[string]struct{}, min(p.commas(start)+1, (len(p.text)-start)/len(scheme+"a/b")+1))
			}
			list[rule] = struct{}{}
		}
		if p.at == len(p.text) || p.text[p.at] != ',' {
			break
		}
		if err := p.gap("comma"); err != nil {
			return nil, err
		}
	}
	// A set comes after the rules that are written, as it may have the same ones.
	if list == nil {
		list = make(map[string]struct{})
	}
	for _, name := range sets {
		for rule := range p.sets[name] {
			list[rule] = struct{}{}
			p.notes[rule] = fmt.Sprintf("of the set %q", name)
		}
	}
	return list, nil
}

// commas counts those of the list that begins at byte start.
func (p *policyParser) commas(start int) int {
	list, _, _ := strings.Cut(p.text[start:], ";")
	list, _, _ = strings.Cut(list, exceptWord)
	return strings.Count(list, ",")
}

// word returns the text up to the end of a rule.
func (p *policyParser) word() string {
	start := p.at
	if n := strings.IndexAny(p.text[start:], ",; \n"); n >= 0 {
		p.at += n
	} else {
		p.at = len(p.text)
	}
	return p.text[start:p.at]
}

func (p *policyParser) next(s string) bool {
	ok := strings.HasPrefix(p.text[p.at:], s)
	if ok {
		p.at += len(s)
	}
	return ok
}

// gap reads a comma or a semicolon and the space after it.
func (p *policyParser) gap(after string) error {
	p.at++
	if !p.next(" ") && !p.next("\n") {
		return ruleError(p.at, "", "a space must follow the "+after+", or a line break")
	}
	return nil
}

func (p *policyParser) checkName(at int, name string) error {
	switch _, twice := p.sets[name]; {
	case !isSetName(name):
		return ruleError(at, name, "the name of a set begins with a letter and has at most 63 letters, digits, '-' and '_'")
	case name == strings.TrimSpace(exceptWord):
		return ruleError(at, name, "a set cannot have this name")
	case twice:
		return ruleError(at, name, "the set is defined twice")
	}
	return nil
}

func isSetName(s string) bool {
	for i := range len(s) {
		letter := 'a' <= s[i]|0x20 && s[i]|0x20 <= 'z'
		if !letter && (i == 0 || s[i] != '-' && s[i] != '_' && (s[i] < '0' || s[i] > '9')) {
			return false
		}
	}
	return s != "" && len(s) <= maxSetName
}

// explain adds to the error for an invalid rule what its author probably meant.
func (p *policyParser) explain(err *ParseError, at int, word string) *ParseError {
	switch {
	case word == "" && p.at < len(p.text) && (p.text[p.at] == ' ' || p.text[p.at] == '\n'):
		return ruleError(at, "", "white space is not allowed here")
	case strings.Contains(word, "\r"):
		err.Reason += "; a line ends in a line feed alone, without a carriage return"
	case strings.HasPrefix(word, "#"):
		err.Reason += ", as a policy has no comments"
	case word != "" && strings.ContainsAny(word[:1], "\"'[{"):
		err.Reason += "; a policy has no quotes and no brackets"
	case strings.EqualFold(word, strings.TrimSpace(exceptWord)):
		err.Reason += `; "except" comes after a rule and a space, without a comma`
	case strings.Contains(word, "="), strings.HasPrefix(p.text[p.at:], " =") && !strings.HasPrefix(p.text[p.at:], setSign):
		return ruleError(at, word, `a set is defined as "name = rules", with a space on each side of the sign`)
	case strings.HasPrefix(p.text[p.at:], setSign):
		return ruleError(at, word, `a set is defined at the start of a part; write "; " before it`)
	case isSetName(word):
		err.Reason += ", or be the name of a set that is defined before"
	}
	return err
}

// parseRule returns rule, which begins at byte at of the text, in the form that a ruleSet holds.
func parseRule(rule string, at int) (string, *ParseError) {
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
	plain := id
	if strings.Contains(id, anyRule) {
		if e := checkStars(id); e != nil {
			e.What, e.Input, e.Offset = "policy", rule, at+e.Offset
			return "", e
		}
		plain = strings.ReplaceAll(id, anyRule, "x")
	}
	if _, err := ParseID(plain); err != nil {
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

// checkStars refuses a star in id, a rule without its final "/*", that is not a whole segment.
func checkStars(id string) *ParseError {
	name, path, _ := strings.Cut(strings.TrimPrefix(id, scheme), "/")
	switch {
	case !strings.HasPrefix(id, scheme):
		return nil // ParseID says so
	case strings.Contains(name, anyRule):
		return &ParseError{
			Offset: strings.Index(id, anyRule), Rule: "ID-9",
			Reason: `a star cannot stand in the trust domain; name each trust domain, or write "*" for every workload of all`,
		}
	}
	at := len(scheme) + len(name) + 1
	for n := 0; path != ""; n++ {
		var segment string
		segment, path, _ = strings.Cut(path, "/")
		switch star := strings.Index(segment, anyRule); {
		case star < 0:
		case segment != anyRule:
			return &ParseError{
				Offset: at + star, Rule: "ID-19",
				Reason: `only letters, digits, '.', '-' and '_' are allowed in a path segment, or a star as the whole of it: "/ns/*/sa/web"`,
			}
		case n >= maxStars:
			return &ParseError{Offset: at, Reason: fmt.Sprintf("a star can stand in the first %d path segments only", maxStars)}
		}
		at += len(segment) + 1
	}
	return nil
}

func ruleError(at int, rule, reason string) *ParseError {
	return &ParseError{What: "policy", Input: rule, Offset: at, Reason: reason}
}

// MarshalText implements [encoding.TextMarshaler] with [Policy.String]. It refuses a policy that can allow no
// peer, and one of more than 1 MiB, which [ParsePolicy] could not read; the errors wrap [ErrZero] for the zero
// Policy and [ErrTooLarge]. For an optional field in JSON use the tag "omitzero".
func (p Policy) MarshalText() ([]byte, error) {
	if p.IsZero() {
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

// UnmarshalText implements [encoding.TextUnmarshaler] with [ParsePolicy]. After an error p is unchanged.
func (p *Policy) UnmarshalText(text []byte) error {
	parsed, err := ParsePolicy(string(text))
	if err == nil {
		*p = parsed
	}
	return err
}

// Explain returns the narrowest rule of p that allows id, as [Policy.String] writes it, or an error that wraps
// [ErrDenied] and says why no rule allows id: no rule is about its trust domain, an exception covers it, or which
// rule comes closest. A note in parentheses says that a rule is from a set or was made by [Policy.WithAliases].
// Explain is for operators: unlike that of [Policy.Allows], its time grows with the number of rules.
func (p Policy) Explain(id ID) (rule string, err error) {
	err = p.usable()
	if err == nil {
		var best, exception string
		for i := range p.s.clauses {
			c := &p.s.clauses[i]
			r, e := c.allow.narrowest(id), c.except.narrowest(id)
			switch {
			case r == "":
			case e != "" && rule == "":
				best, exception = r, e
			case e == "" && (rule == "" || compareRules(r, rule) < 0):
				rule = r
			}
		}
		switch {
		case rule != "":
			return p.s.noted(rule), nil
		case exception != "":
			err = fmt.Errorf("the exception %s takes it away from %s", p.s.quoted(exception), p.s.quoted(best))
		default:
			err = errors.New(p.s.miss(id))
		}
	}
	return "", fmt.Errorf("spiffe: %q: %w: %w", redact.Clip(id.String(), maxInError), ErrDenied, err)
}

// noted returns a rule as it is written, and where it is from.
func (s *ruleSet) noted(rule string) string {
	if note := s.notes[rule]; note != "" {
		return ruleText(rule) + " (" + note + ")"
	}
	return ruleText(rule)
}

// quoted is noted with the rule in quotes, for an error.
func (s *ruleSet) quoted(rule string) string {
	text := fmt.Sprintf("%q", redact.Clip(ruleText(rule), maxInError))
	if note := s.notes[rule]; note != "" {
		text += " (" + note + ")"
	}
	return text
}

// miss says why no rule allows id.
func (s *ruleSet) miss(id ID) string {
	if id.IsZero() {
		return "the zero ID is never allowed"
	}
	var closest string
	any, about, shared := false, 0, -1
	for i := range s.clauses {
		any = any || s.clauses[i].allow.any
		for _, r := range s.clauses[i].allow.sorted() {
			if ruleDomain(r) != id.TrustDomain().name {
				continue
			}
			about++
			if n := sharedPrefix(r, id.s); n > shared {
				closest, shared = r, n
			}
		}
	}
	switch {
	case id.Path() == "" && (any || about > 0):
		return "it has no path, so it names a trust domain; only a rule that is this ID allows it"
	case about == 0:
		return fmt.Sprintf("no rule is about the trust domain %q", id.TrustDomain())
	}
	why := "the one rule about its trust domain is " + s.quoted(closest)
	if about > 1 {
		why = fmt.Sprintf("none of the %d rules about its trust domain; the closest is %s", about, s.quoted(closest))
	}
	if closest[len(closest)-1] != '/' && covers(closest+"/", id.s) {
		why += ": " + oneID(closest)
	}
	return why
}

// sharedPrefix returns how many bytes of id a rule about its trust domain covers from the left.
func sharedPrefix(rule, id string) int {
	n := 0
	for rule != "" && n < len(id) {
		switch {
		case rule[0] == id[n]:
			n++
		case rule[0] == '*':
			n += len(id[n:]) - len(strings.TrimLeftFunc(id[n:], func(r rune) bool { return r != '/' }))
		default:
			return n
		}
		rule = rule[1:]
	}
	return n
}

// Warnings lists the parts of p that are valid but probably not meant, sorted, each with the remedy. A program
// logs them after it has read a policy:
//
//   - a rule or an exception that is the ID of a trust domain, or that ends within the path of a Kubernetes
//     workload, such as "spiffe://example.org/ns/prod": it is one exact ID and covers nothing below it;
//   - a rule that an exception covers completely;
//   - an exception about a trust domain that none of its rules allows.
//
// A policy that can allow no peer has no warnings; see [CheckPolicySource].
func (p Policy) Warnings() []string {
	var warnings []string
	if p.s == nil {
		return nil
	}
	for i := range p.s.clauses {
		c := &p.s.clauses[i]
		domains := make(map[string]bool)
		for r := range c.allow.set {
			domains[ruleDomain(r)] = true
			if c.excepts(r) {
				warnings = append(warnings, fmt.Sprintf("the rule %s allows nothing: an exception covers it; remove one of them", p.s.quoted(r)))
			} else if incomplete(r) {
				warnings = append(warnings, "the rule "+oneID(r))
			}
		}
		for e := range c.except.set {
			if domain := ruleDomain(e); !c.allow.any && domain != "" && !domains[domain] {
				warnings = append(warnings, fmt.Sprintf("the exception %s takes nothing away: no rule before it is about its trust domain; correct or remove it", p.s.quoted(e)))
			} else if incomplete(e) {
				warnings = append(warnings, "the exception "+oneID(e))
			}
		}
	}
	slices.Sort(warnings)
	return warnings
}

// incomplete reports whether a rule is an ID that by convention no workload has: the ID of a
// trust domain, or a Kubernetes name that ends early.
func incomplete(rule string) bool {
	_, path, ok := strings.Cut(strings.TrimPrefix(rule, scheme), "/")
	if rule == anyRule || rule[len(rule)-1] == '/' {
		return false
	}
	segments := strings.Split(path, "/")
	return !ok || segments[0] == "ns" && (len(segments) < 3 || len(segments) == 3 && segments[2] == "sa")
}
