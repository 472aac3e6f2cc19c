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

// Policy says which verified peers are allowed. It is made by [AllowIDs], [AllowMembersOf],
// [AllowPathPrefix] and [AllowAnyPeer], or from text by [ParsePolicy], joined by [AnyOf] and narrowed by
// [Policy.Except]. It never changes and is safe for concurrent use. It is a [PolicySource] of itself; a
// [LivePolicy] can be replaced while it is in use.
//
// A policy fails closed. The zero Policy allows no peer. Neither does a policy with a mistake: one made from the
// zero ID, an empty list, or a prefix that is not a path, even if another part of it is sound.
// [CheckPolicySource] reports the mistake, and [NewVerifier] calls it, so that it shows when the program starts.
// [Policy.Warnings] lists rules that are valid but probably not meant.
//
// Only AllowIDs can allow an ID without a path, which names a trust domain. All other policies allow
// workloads only.
type Policy struct {
	_ [0]func() // == would compare pointers
	s *ruleSet  // nil in the zero Policy, if it has no trial
}

// ruleSet holds the rules of a Policy and its copies.
type ruleSet struct {
	clauses []clause          // in the order of their exceptions, which are different
	notes   map[string]string // for Explain: where a rule is from, if from a set or an alias
	mistake string            // why the policy cannot be used; then there are no clauses
	short   func() string     // for errors: sorts once, as a peer must not cause a sort at each refusal
	trial   *trial            // counts each decision; nil for none
}

// clause allows the IDs that a rule of allow covers and no rule of except.
type clause struct{ allow, except rules }

// lists are the rules of a clause that is being made. Without exceptions, except is nil.
type lists struct{ allow, except map[string]struct{} }

const (
	anyRule     = "*"
	wildcard    = "/" + anyRule
	maxInPolicy = 512 // bytes of a policy in an error
	maxClauses  = 16
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
	return newPolicy(nil, lists{allow: rules})
}

// AllowMembersOf allows every workload of these trust domains: every ID with a path whose trust domain
// name is equal byte for byte (ID-28). An empty list and the zero TrustDomain are mistakes; see [Policy].
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
	return newPolicy(nil, lists{allow: rules})
}

// AllowPathPrefix allows the workloads of td whose path begins with all segments of prefix and has
// more: "/ns/prod" allows /ns/prod/sa/web, and neither /ns/production/sa/web nor /ns/prod itself.
// The prefix is written like a path, with a slash in front and none at the end. Another form and the
// empty prefix are mistakes, see [Policy]; for the whole trust domain use [AllowMembersOf].
func AllowPathPrefix(td TrustDomain, prefix string) Policy {
	switch {
	case td.IsZero():
		return mistaken("AllowPathPrefix was given the zero TrustDomain")
	case prefix == "" || prefix == "/":
		return mistaken("AllowPathPrefix needs a path; AllowMembersOf allows the whole trust domain")
	case strings.HasPrefix(prefix, scheme):
		return mistaken(fmt.Sprintf("AllowPathPrefix takes the path alone, such as /ns/prod; drop the trust domain of %s", short(prefix)))
	case prefix[0] != '/':
		return mistaken(fmt.Sprintf("the prefix of AllowPathPrefix must begin with a slash; write %s", short("/"+prefix)))
	case prefix == wildcard:
		return mistaken(`AllowPathPrefix needs a path without "/*"; AllowMembersOf allows the whole trust domain`)
	case strings.HasSuffix(prefix, wildcard):
		return mistaken(fmt.Sprintf(`AllowPathPrefix allows everything below its prefix; drop the "/*" of %s`, short(prefix)))
	case strings.HasSuffix(prefix, "/"):
		return mistaken(fmt.Sprintf("AllowPathPrefix: a trailing slash is not allowed; drop that of %s", short(prefix)))
	case strings.Contains(prefix, anyRule):
		return mistaken("AllowPathPrefix takes no stars, as its prefix may be made from other names; ParsePolicy reads a policy with stars")
	}
	id, err := ParseID(scheme + td.name + prefix)
	if err != nil {
		return mistaken("AllowPathPrefix: " + inner(err))
	}
	return newPolicy(nil, lists{allow: map[string]struct{}{id.s + "/": {}}})
}

// AllowAnyPeer allows every workload of every trust domain that the verifier has a bundle for. With
// federation that includes the workloads of other organisations.
func AllowAnyPeer() Policy {
	return newPolicy(nil, lists{allow: map[string]struct{}{anyRule: {}}})
}

// AnyOf allows an ID if at least one of the policies does, each with its own exceptions. An empty list, the zero
// Policy, a policy with a mistake, and more than 16 different lists of exceptions are mistakes; see [Policy].
func AnyOf(policies ...Policy) Policy {
	if len(policies) == 0 {
		return mistaken("AnyOf needs at least one policy")
	}
	var all []lists
	notes := make(map[string]string)
	for _, p := range policies {
		switch {
		case p.IsZero():
			return mistaken("AnyOf was given the zero Policy")
		case p.s.mistake != "":
			return p
		}
		all = append(all, p.s.lists()...)
		maps.Copy(notes, p.s.notes)
	}
	return newPolicy(notes, all...)
}

// Except returns a policy that allows an ID if p does and except does not. An exception applies to the rules of
// p only; [AnyOf] can allow the same ID by another policy.
//
// The zero Policy, a policy with a mistake, an except that has exceptions itself, exceptions that leave nothing
// of a part of p, and more than 16 different places of stars are mistakes; see [Policy].
func (p Policy) Except(except Policy) Policy {
	switch {
	case p.IsZero(), except.IsZero():
		return mistaken("Except was called with the zero Policy")
	case p.s.mistake != "":
		return p
	case except.s.mistake != "":
		return except
	case len(except.s.clauses) > 1 || except.s.clauses[0].except.set != nil:
		return mistaken("Except was given a policy that has exceptions itself")
	}
	all := p.s.lists()
	for i := range all {
		all[i].except = maps.Clone(all[i].except)
		if all[i].except == nil {
			all[i].except = make(map[string]struct{})
		}
		maps.Copy(all[i].except, except.s.clauses[0].allow.set)
	}
	notes := maps.Clone(except.s.notes)
	if notes == nil {
		notes = make(map[string]string)
	}
	maps.Copy(notes, p.s.notes)
	return newPolicy(notes, all...)
}

// WithAliases returns p with every rule about td repeated for each alias: if p allows spiffe://td/web,
// the result also allows spiffe://alias/web. Use it while a trust domain is renamed. Rules about other trust
// domains are unchanged, [AllowAnyPeer] needs no alias, and aliases do not chain. Exceptions are repeated like
// rules. [Policy.String] shows the result, [Policy.Explain] marks the rules that an alias made, and
// [LivePolicy.Try] of p without the alias counts the peers that need it.
//
// An alias changes what is allowed, not what is trusted. A peer still proves its own ID, against the
// bundle of the trust domain in that ID, so the verifier needs a bundle for the alias. [Peer.ID] is that
// ID, so other code that decides by ID sees both names.
//
// The authority of an alias can issue the ID of any workload that the rules name. Use an alias only for a second
// name of the same organisation, and remove it after the renaming. To allow some peers of a partner organisation,
// name those peers.
//
// The zero TrustDomain, an empty list, td as its own alias, and a policy without a rule about td are
// mistakes; see [Policy].
func (p Policy) WithAliases(td TrustDomain, aliases ...TrustDomain) Policy {
	switch {
	case p.IsZero():
		return mistaken("WithAliases was called on the zero Policy")
	case p.s.mistake != "":
		return p
	case td.IsZero():
		return mistaken("WithAliases was given the zero TrustDomain")
	case len(aliases) == 0:
		return mistaken("WithAliases needs at least one alias")
	}
	all, notes, found := p.s.lists(), make(map[string]string), false
	for _, alias := range aliases {
		switch alias {
		case TrustDomain{}:
			return mistaken("WithAliases was given the zero TrustDomain")
		case td:
			return mistaken("WithAliases was given the trust domain itself as its alias")
		}
	}
	twins := func(set map[string]struct{}) map[string]struct{} {
		out := maps.Clone(set)
		for r := range set {
			if ruleDomain(r) != td.name {
				continue
			}
			found = true
			for _, alias := range aliases {
				twin := scheme + alias.name + r[len(scheme)+len(td.name):]
				if _, own := set[twin]; !own {
					notes[twin] = fmt.Sprintf("by an alias of %q", td.name)
				}
				out[twin] = struct{}{}
			}
		}
		return out
	}
	for i, l := range all {
		all[i] = lists{twins(l.allow), twins(l.except)}
	}
	if !found {
		return mistaken("WithAliases finds no rule about the trust domain")
	}
	for twin := range notes {
		if len(strings.TrimSuffix(twin, "/")) > maxID {
			return mistaken("WithAliases makes a rule for IDs of more than 2048 bytes")
		}
	}
	maps.Copy(notes, p.s.notes)
	return newPolicy(notes, all...)
}

// lists returns the rules, which are shared.
func (s *ruleSet) lists() []lists {
	all := make([]lists, len(s.clauses))
	for i := range s.clauses {
		all[i] = lists{s.clauses[i].allow.set, s.clauses[i].except.set}
	}
	return all
}

// newPolicy makes a policy of valid rules. Lists with the same exceptions become one clause.
func newPolicy(notes map[string]string, all ...lists) Policy {
	s := &ruleSet{notes: notes}
	if all = merge(all); len(all) > maxClauses {
		return mistaken(fmt.Sprintf("the policy has %d different lists of exceptions, the limit is %d", len(all), maxClauses))
	}
	arrangements := 0
	for _, l := range all {
		c := clause{newRules(l.allow), newRules(l.except)}
		if arrangements += len(c.allow.stars) + len(c.except.stars); arrangements > maxArrangement {
			return mistaken(fmt.Sprintf("the policy has stars in more than %d different places", maxArrangement))
		}
		if !c.alive() {
			return mistaken("the exceptions leave nothing of " + redact.Clip(joinRules(l.allow), maxInPolicy))
		}
		s.clauses = append(s.clauses, c)
	}
	s.short = sync.OnceValue(func() string { return s.text(maxInPolicy) })
	return Policy{s: s}
}

// merge joins the lists that have the same exceptions, and sorts them by their exceptions.
func merge(all []lists) []lists {
	if len(all) == 1 {
		return all
	}
	merged, copied := make(map[string]lists), make(map[string]bool)
	for _, l := range all {
		key := joinRules(l.except)
		m, ok := merged[key]
		switch {
		case !ok:
			m = l
		case !copied[key]:
			m.allow, copied[key] = maps.Clone(m.allow), true
			fallthrough
		default:
			maps.Copy(m.allow, l.allow)
		}
		merged[key] = m
	}
	sorted := make([]lists, 0, len(merged))
	for _, key := range slices.Sorted(maps.Keys(merged)) {
		sorted = append(sorted, merged[key])
	}
	return sorted
}

// alive reports whether the exceptions leave something of at least one rule.
func (c *clause) alive() bool {
	for rule := range c.allow.set {
		if !c.excepts(rule) {
			return true
		}
	}
	return false
}

// excepts reports whether an exception covers the whole rule.
func (c *clause) excepts(rule string) bool {
	if rule == anyRule {
		return c.except.any
	}
	return c.except.has(rule, pathStart(rule))
}

// joinRules returns rules as text.
func joinRules(set map[string]struct{}) string {
	if len(set) == 0 {
		return ""
	}
	texts := slices.AppendSeq(make([]string, 0, len(set)), maps.Keys(set))
	slices.Sort(texts)
	for i, r := range texts {
		texts[i] = ruleText(r)
	}
	return strings.Join(texts, ", ")
}

func mistaken(why string) Policy { return Policy{s: &ruleSet{mistake: why}} }

// Allows reports whether p allows id. It does not allocate. Its time grows with the lists of exceptions and the
// different places of stars, of which there are at most 16 each, and not with the number of rules. The zero ID
// is never allowed.
//
// An ID proves nothing by itself: pass the ID of a [Peer], or give the policy to a [Verifier].
func (p Policy) Allows(id ID) bool {
	if p.s == nil || id.IsZero() {
		return false
	}
	allowed := p.s.allows(id)
	if p.s.trial != nil {
		p.s.trial.compare(id, allowed)
	}
	return allowed
}

func (s *ruleSet) allows(id ID) bool {
	path := len(scheme) + int(id.td)
	for i := range s.clauses {
		c := &s.clauses[i]
		if c.allow.has(id.s, path) && (c.except.set == nil || !c.except.has(id.s, path)) {
			return true
		}
	}
	return false
}

// Check returns nil if p allows id, or else an error that wraps [ErrDenied]. Its text names the ID and shows the
// policy, shortened if it is long. The text is formatted when it is read, so a refusal that is not logged costs
// one allocation.
func (p Policy) Check(id ID) error {
	if p.Allows(id) {
		return nil
	}
	return &denial{p, id}
}

// denial is the error for an ID that a policy does not allow.
type denial struct {
	policy Policy
	id     ID
}

func (d *denial) Error() string {
	return fmt.Sprintf("spiffe: %q: %s", redact.Clip(d.id.String(), maxInError), d.reason())
}

func (d *denial) Unwrap() error { return ErrDenied }

// reason is the text without the ID.
func (d *denial) reason() string {
	if err := d.policy.usable(); err != nil {
		return ErrDenied.Error() + ": " + err.Error()
	}
	return ErrDenied.Error() + ", which allows " + d.policy.s.short() + d.policy.s.hint(d.id)
}

// hint returns a note if a rule is an ID above id, which was probably meant to cover id too.
func (s *ruleSet) hint(id ID) string {
	for i := range s.clauses {
		for above := id.s; ; {
			slash := strings.LastIndexByte(above, '/')
			if slash < len(scheme) {
				break
			}
			above = above[:slash]
			if _, ok := s.clauses[i].allow.set[above]; ok {
				return "; " + oneID(above)
			}
		}
	}
	return ""
}

// oneID explains a rule that is an ID and looks like a prefix.
func oneID(rule string) string {
	return fmt.Sprintf("%q is one exact ID; write %q for what is below it", redact.Clip(rule, maxInError), redact.Clip(rule, maxInError)+wildcard)
}

// usable says why p can allow no peer, or returns nil.
func (p Policy) usable() error {
	switch {
	case p.IsZero():
		return errors.New("the policy is zero; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer, or call Set of the LivePolicy")
	case p.s.mistake != "":
		return errors.New("the policy is not valid: " + p.s.mistake)
	}
	return nil
}

// IsZero reports whether p is the zero Policy, which allows no peer.
func (p Policy) IsZero() bool { return p.s == nil || p.s.clauses == nil && p.s.mistake == "" }

// String returns the rules of p, sorted, with commas between them: "spiffe://example.org/web" is
// that ID, "spiffe://example.org/*" every workload of the trust domain,
// "spiffe://example.org/ns/prod/*" every workload below that path, and "*" every workload. A star that is
// not at the end is one segment: "spiffe://example.org/ns/*/sa/web". Exceptions follow after " except ".
// Rules with different exceptions are parts with "; " between them.
//
// The text is canonical: [ParsePolicy] reads it back, and policies of the same rules and exceptions have
// the same text. A policy that can allow no peer is "no peer", with the mistake if there is one.
func (p Policy) String() string {
	switch {
	case p.IsZero():
		return "no peer"
	case p.s.mistake != "":
		return "no peer (" + p.s.mistake + ")"
	}
	return p.s.text(0)
}

// text lists the rules in at most limit bytes; 0 means no limit. The first rule is always there, cut if it must
// be.
func (s *ruleSet) text(limit int) string {
	var b strings.Builder
	left := 0
	for i := range s.clauses {
		left += len(s.clauses[i].allow.set) + len(s.clauses[i].except.set)
	}
	// add writes rules, the first after sep, and reports whether there was room.
	add := func(sep string, set map[string]struct{}) bool {
		for _, r := range slices.Sorted(maps.Keys(set)) {
			r = ruleText(r)
			switch {
			case limit == 0:
			case b.Len() == 0:
				r = redact.Clip(r, limit)
			case b.Len()+len(sep)+len(r) > limit:
				fmt.Fprintf(&b, ", … and %d more", left)
				return false
			}
			b.WriteString(sep)
			b.WriteString(r)
			sep = ", "
			left--
		}
		return true
	}
	sep := ""
	for i := range s.clauses {
		c := &s.clauses[i]
		if !add(sep, c.allow.set) || !add(exceptWord, c.except.set) {
			break
		}
		sep = "; "
	}
	return b.String()
}
