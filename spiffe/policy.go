package spiffe

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/svidkit/svidkit/internal/redact"
)

// Policy says which verified peers are allowed. [AllowIDs], [AllowMembersOf], [AllowPathPrefix], [AllowFunc] and
// [AllowAnyPeer] make one, [ParsePolicy] reads one from text, and [AnyOf] joins several. A Policy never changes and is
// safe for concurrent use. It is a [PolicySource] of itself; a [LivePolicy] can be replaced while it is in use.
//
// A policy fails closed. The zero Policy allows no peer. Neither does a policy with a mistake: one made from the
// zero ID, an empty list, or a prefix that is not a path, even if another part of it is sound.
// [CheckPolicySource] reports the mistake, and [NewVerifier] calls it, so that it shows when the program starts.
//
// Only AllowIDs can allow an ID without a path, which names a trust domain. All other policies allow
// workloads only.
type Policy struct {
	_ [0]func() // == would compare pointers
	s *ruleSet  // nil in the zero Policy
}

// ruleSet holds the rules of a Policy and its copies.
//
// A rule is a string: an ID allows that ID, a string that ends in a slash allows everything below it, and "*"
// allows every workload. A path segment that is a star stands for any one segment. No ID ends in a slash or has a
// star, so a rule cannot be mistaken for an ID.
type ruleSet struct {
	rules   map[string]struct{}
	stars   []string         // the rules that have a star for a segment
	longest int              // the length of the longest rule that ends in a slash
	funcs   []func(ID) error // of AllowFunc
	mistake string           // why the policy cannot be used; then there are no rules
	short   func() string    // for errors: sorts once, as a peer must not cause a sort at each refusal
}

const (
	anyRule     = "*"
	wildcard    = "/" + anyRule
	maxInPolicy = 512  // bytes of a policy in an error
	maxStars    = 1024 // rules with a star for a segment; each is compared with the ID
)

// AllowIDs allows exactly these IDs. An empty list and the zero ID are mistakes; see [Policy].
func AllowIDs(ids ...ID) Policy {
	if len(ids) == 0 {
		return mistaken("AllowIDs needs at least one ID")
	}
	rules := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		if id.IsZero() {
			return mistaken("AllowIDs was given the zero ID")
		}
		rules[id.s] = struct{}{}
	}
	return newPolicy(rules)
}

// AllowMembersOf allows every workload of these trust domains: every ID with a path whose trust domain
// name is equal byte for byte. An empty list and the zero TrustDomain are mistakes; see [Policy].
func AllowMembersOf(tds ...TrustDomain) Policy {
	if len(tds) == 0 {
		return mistaken("AllowMembersOf needs at least one trust domain")
	}
	rules := make(map[string]struct{}, len(tds))
	for _, td := range tds {
		if td.IsZero() {
			return mistaken("AllowMembersOf was given the zero TrustDomain")
		}
		rules[scheme+td.name+"/"] = struct{}{}
	}
	return newPolicy(rules)
}

// AllowPathPrefix allows the workloads of td whose path begins with all segments of prefix and has more: "/ns/prod"
// allows /ns/prod/sa/web, but not /ns/production/sa/web or /ns/prod itself. The prefix is written like a path, with
// a slash in front and none at the end. Another form and the empty prefix are mistakes, see [Policy]; for the whole
// trust domain use [AllowMembersOf].
func AllowPathPrefix(td TrustDomain, prefix string) Policy {
	switch {
	case td.IsZero():
		return mistaken("AllowPathPrefix was given the zero TrustDomain")
	case prefix == "" || prefix == "/" || prefix == wildcard:
		return mistaken("AllowPathPrefix needs a path; AllowMembersOf allows the whole trust domain")
	case prefix[0] != '/':
		return mistaken("AllowPathPrefix takes the path alone, such as /ns/prod, and not " + short(prefix))
	case strings.Contains(prefix, anyRule):
		return mistaken("AllowPathPrefix takes no stars, as its prefix may be made from other names; " +
			"ParsePolicy reads a policy with stars")
	}
	id, err := ParseID(scheme + td.name + prefix)
	if err != nil {
		return mistaken("AllowPathPrefix: " + inner(err))
	}
	return newPolicy(map[string]struct{}{id.s + "/": {}})
}

// AllowAnyPeer allows every workload of every trust domain that the verifier has a bundle for. With
// federation that includes the workloads of other organisations.
func AllowAnyPeer() Policy { return newPolicy(map[string]struct{}{anyRule: {}}) }

// AllowFunc allows the workloads for which allow returns nil. Any other result refuses the peer, and
// [Policy.Check] wraps it. The function must not block and must be safe for concurrent use. It may be called for
// each handshake and each request, and must judge the ID alone. A nil function is a mistake; see [Policy].
func AllowFunc(allow func(ID) error) Policy {
	if allow == nil {
		return mistaken("AllowFunc was given a nil function")
	}
	return newPolicy(nil, allow)
}

// AnyOf allows an ID if at least one of the policies does. An empty list is a mistake, and so is a part that is the
// zero Policy or has a mistake itself; see [Policy].
func AnyOf(policies ...Policy) Policy {
	if len(policies) == 0 {
		return mistaken("AnyOf needs at least one policy")
	}
	rules := make(map[string]struct{})
	var funcs []func(ID) error
	for _, p := range policies {
		switch {
		case p.s == nil:
			return mistaken("AnyOf was given the zero Policy")
		case p.s.mistake != "":
			return p
		}
		maps.Copy(rules, p.s.rules)
		funcs = append(funcs, p.s.funcs...)
	}
	return newPolicy(rules, funcs...)
}

// newPolicy makes a policy of valid rules.
func newPolicy(rules map[string]struct{}, funcs ...func(ID) error) Policy {
	s := &ruleSet{rules: rules, funcs: funcs}
	for rule := range rules {
		switch {
		case rule == anyRule:
		case strings.Contains(rule, anyRule):
			s.stars = append(s.stars, rule)
		case rule[len(rule)-1] == '/':
			s.longest = max(s.longest, len(rule))
		}
	}
	if len(s.stars) > maxStars {
		return mistaken(fmt.Sprintf("the policy has %d rules with a star for a segment, the limit is %d",
			len(s.stars), maxStars))
	}
	s.short = sync.OnceValue(func() string { return redact.Clip(s.text(), maxInPolicy) })
	return Policy{s: s}
}

func mistaken(why string) Policy { return Policy{s: &ruleSet{mistake: why}} }

// Check returns nil if p allows id, or else an error that wraps [ErrDenied] and the errors of the functions of
// [AllowFunc]. Its text names the ID and shows the policy, shortened if it is long. The text is formatted when it is
// read, so a refusal that is not logged costs one allocation. The time grows only with the number of rules that have
// a star for a segment. The zero ID is never allowed.
//
// An ID proves nothing by itself: pass the ID of a [Peer], or give the policy to a [Verifier].
func (p Policy) Check(id ID) error {
	if p.s == nil || id.IsZero() {
		return &denial{p, id, nil}
	}
	if p.s.covers(id) {
		return nil
	}
	var refusals []error
	for _, allow := range p.s.funcs {
		if id.Path() == "" {
			break
		}
		err := allow(id)
		if err == nil {
			return nil
		}
		refusals = append(refusals, err)
	}
	return &denial{p, id, refusals}
}

// covers reports whether a rule allows id.
func (s *ruleSet) covers(id ID) bool {
	path := len(scheme) + int(id.td)
	for i := path; i < len(id.s) && i < s.longest; i++ {
		if id.s[i] != '/' {
			continue
		}
		if _, ok := s.rules[id.s[:i+1]]; ok {
			return true
		}
	}
	if _, ok := s.rules[id.s]; ok {
		return true
	}
	if path == len(id.s) {
		return false
	}
	if _, ok := s.rules[anyRule]; ok {
		return true
	}
	return slices.ContainsFunc(s.stars, func(rule string) bool { return matches(rule, id.s) })
}

// matches reports whether a rule with stars covers id.
func matches(rule, id string) bool {
	at := 0
	for i := range len(rule) {
		switch {
		case rule[i] == '*':
			for at < len(id) && id[at] != '/' {
				at++
			}
		case at == len(id) || id[at] != rule[i]:
			return false
		default:
			at++
		}
	}
	return at == len(id) || rule[len(rule)-1] == '/'
}

// denial is the error for an ID that a policy does not allow.
type denial struct {
	policy   Policy
	id       ID
	refusals []error // of functions
}

func (d *denial) Error() string {
	return fmt.Sprintf("spiffe: %q: %s", redact.Clip(d.id.String(), maxInError), d.reason())
}

func (d *denial) Unwrap() []error { return append([]error{ErrDenied}, d.refusals...) }

// reason is the text without the ID.
func (d *denial) reason() string {
	if err := d.policy.usable(); err != nil {
		return ErrDenied.Error() + ": " + err.Error()
	}
	var text strings.Builder
	text.WriteString(ErrDenied.Error())
	if len(d.policy.s.rules) > 0 || len(d.refusals) == 0 {
		text.WriteString(", which allows " + d.policy.s.short() + d.policy.s.hint(d.id))
	}
	for _, err := range d.refusals {
		text.WriteString(": " + redact.Clip(err.Error(), maxInError))
	}
	return text.String()
}

// hint returns a note if a rule is an ID above id, which was probably meant to cover id too.
func (s *ruleSet) hint(id ID) string {
	for above := id.s; ; {
		slash := strings.LastIndexByte(above, '/')
		if slash < len(scheme) {
			return ""
		}
		above = above[:slash]
		if _, ok := s.rules[above]; ok {
			rule := redact.Clip(above, maxInError)
			return fmt.Sprintf("; %q is one exact ID; write %q for what is below it", rule, rule+wildcard)
		}
	}
}

// usable returns an error that says why p can allow no peer, or nil.
func (p Policy) usable() error {
	switch {
	case p.s == nil:
		return errors.New("the policy is zero; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer, " +
			"or call Set of the LivePolicy")
	case p.s.mistake != "":
		return errors.New("the policy is not valid: " + p.s.mistake)
	}
	return nil
}

// String returns the rules of p, sorted, with commas between them: "spiffe://example.org/web" is
// that ID, "spiffe://example.org/*" every workload of the trust domain,
// "spiffe://example.org/ns/prod/*" every workload below that path, and "*" every workload. A star that is
// not at the end is one segment: "spiffe://example.org/ns/*/sa/web".
//
// The text is canonical: [ParsePolicy] reads it back, and policies of the same rules have the same text. The
// functions of [AllowFunc] follow as "a function", which ParsePolicy does not read. A policy that can allow no peer is
// "no peer", with the mistake if there is one.
func (p Policy) String() string {
	switch {
	case p.s == nil:
		return "no peer"
	case p.s.mistake != "":
		return "no peer (" + p.s.mistake + ")"
	}
	return p.s.text()
}

// text lists the rules.
func (s *ruleSet) text() string {
	list := slices.Sorted(maps.Keys(s.rules))
	for i, r := range list {
		if r[len(r)-1] == '/' {
			list[i] = r + anyRule
		}
	}
	if len(s.funcs) > 0 {
		list = append(list, "a function")
	}
	return strings.Join(list, ", ")
}
