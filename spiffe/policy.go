package spiffe

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// Policy says which verified peers are allowed. It is made by [AllowIDs], [AllowMembersOf],
// [AllowPathPrefix] and [AllowAnyPeer], or from text by [ParsePolicy], and joined by [AnyOf]. It
// never changes and is safe for concurrent use. It is a [PolicySource] of itself; one that can be
// replaced while it is in use is a [LivePolicy].
//
// A policy fails closed. The zero Policy allows nobody. A policy that was made by mistake, from
// the zero ID, from an empty list, from a prefix that is no path, allows nobody either, even where
// another part of it was sound: half a policy is not what its author meant. [NewVerifier] refuses
// both and says what is wrong, so that the mistake shows when the program starts.
//
// Only AllowIDs can allow an ID without a path, which names a trust domain and not a workload; all
// other policies are about workloads.
type Policy struct {
	_ [0]func() // == would compare pointers
	s *ruleSet  // nil in the zero Policy
}

// ruleSet is what a Policy shares with its copies. A rule is one string: an ID allows that ID, a
// string that ends in a slash all that is below it, and "*" every workload. A single map then holds a
// hundred thousand IDs, and looking up a piece of an ID's own string does not allocate.
type ruleSet struct {
	rules   map[string]struct{}
	any     bool          // "*" is among the rules
	longest int           // length of the longest rule that ends in a slash
	mistake string        // why the policy cannot be used; then there are no rules
	short   func() string // for errors: sorts once, as a peer must not make us sort at each refusal
}

const (
	anyRule     = "*"
	maxInPolicy = 512 // bytes of a policy in an error
)

// AllowIDs allows exactly these IDs. To be given none, or the zero ID, is a mistake; see [Policy].
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

// AllowMembersOf allows every workload of these trust domains: the names are equal byte for byte
// (ID-28), and the ID has a path. To be given none, or the zero TrustDomain, is a mistake; see
// [Policy].
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

// AllowPathPrefix allows the workloads of td whose path begins with all segments of prefix and
// goes on: "/ns/prod" allows /ns/prod/sa/web, and neither /ns/production/sa/web nor /ns/prod itself.
// The prefix is written like a path, with a slash in front and none at the end. What is not a
// path is a mistake, see [Policy], and so is the empty prefix: AllowMembersOf is the way to say
// that.
func AllowPathPrefix(td TrustDomain, prefix string) Policy {
	switch {
	case td.IsZero():
		return mistaken("AllowPathPrefix was given the zero TrustDomain")
	case prefix == "" || prefix == "/":
		return mistaken("AllowPathPrefix needs a path; AllowMembersOf allows the whole trust domain")
	case prefix[0] != '/':
		return mistaken("the prefix of AllowPathPrefix must begin with a slash")
	}
	id, err := ParseID(scheme + td.name + prefix)
	if err != nil {
		return mistaken("AllowPathPrefix: " + inner(err))
	}
	return newPolicy(map[string]struct{}{id.s + "/": {}})
}

// AllowAnyPeer allows every workload of every trust domain that the verifier has a bundle for. With
// federation those are the workloads of other organisations too.
func AllowAnyPeer() Policy { return newPolicy(map[string]struct{}{anyRule: {}}) }

// AnyOf allows what at least one of the policies allows. To be given none, the zero Policy, or one
// that was made by mistake is a mistake; see [Policy].
func AnyOf(policies ...Policy) Policy {
	if len(policies) == 0 {
		return mistaken("AnyOf needs at least one policy")
	}
	rules := make(map[string]struct{})
	for _, p := range policies {
		switch {
		case p.s == nil:
			return mistaken("AnyOf was given the zero Policy")
		case p.s.mistake != "":
			return p
		}
		maps.Copy(rules, p.s.rules)
	}
	return newPolicy(rules)
}

// WithAliases returns p with every rule about td repeated for each alias, as the workloads of td may
// be called while a trust domain is renamed: what p says of spiffe://td/web it then says of
// spiffe://alias/web too. Rules about other trust domains stay as they are, [AllowAnyPeer] needs no
// alias, and nothing chains: an alias of an alias is not one. [Policy.String] shows the outcome.
//
// An alias is about what is allowed and never about what is trusted. A peer still proves its own ID,
// against the bundle of the trust domain in that ID, so the verifier needs a bundle for the alias;
// and [Peer.ID] is that ID, so whatever else decides by ID, or keeps it in a record, meets both
// names. The danger is that whoever runs the authority of an alias can be any workload that the rules
// name: an alias is for a second name of one organisation, and goes when the renaming is over. To let
// some peers of a partner in, name those.
//
// To be given the zero TrustDomain, no alias, td as its own alias, or a policy without a rule about
// td is a mistake; see [Policy].
func (p Policy) WithAliases(td TrustDomain, aliases ...TrustDomain) Policy {
	switch {
	case p.s == nil:
		return mistaken("WithAliases was called on the zero Policy")
	case p.s.mistake != "":
		return p
	case td.IsZero():
		return mistaken("WithAliases was given the zero TrustDomain")
	case len(aliases) == 0:
		return mistaken("WithAliases needs at least one alias")
	}
	rules, found := maps.Clone(p.s.rules), false
	for _, alias := range aliases {
		switch alias {
		case TrustDomain{}:
			return mistaken("WithAliases was given the zero TrustDomain")
		case td:
			return mistaken("WithAliases was given the trust domain itself as its alias")
		}
		for r := range p.s.rules {
			if ruleDomain(r) != td.name {
				continue
			}
			twin := scheme + alias.name + r[len(scheme)+len(td.name):]
			if len(strings.TrimSuffix(twin, "/")) > maxID {
				return mistaken("WithAliases makes a rule for IDs of more than 2048 bytes")
			}
			rules[twin], found = struct{}{}, true
		}
	}
	if !found {
		return mistaken("WithAliases finds no rule about the trust domain")
	}
	return newPolicy(rules)
}

// ruleDomain returns the name of the trust domain that a rule is about, or "" for any.
func ruleDomain(rule string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(rule, scheme), "/")
	if name == anyRule {
		return ""
	}
	return name
}

func newPolicy(rules map[string]struct{}) Policy {
	s := &ruleSet{rules: rules}
	for r := range rules {
		switch {
		case r == anyRule:
			s.any = true
		case r[len(r)-1] == '/':
			s.longest = max(s.longest, len(r))
		}
	}
	s.short = sync.OnceValue(func() string { return s.text(maxInPolicy) })
	return Policy{s: s}
}

func mistaken(why string) Policy { return Policy{s: &ruleSet{mistake: why}} }

// Allows reports whether p allows id. It does not allocate, and its time does not grow with the
// number of IDs in p. The zero ID is never allowed.
//
// An ID that was merely parsed proves nothing: ask about the ID of a [Peer], or let a [Verifier]
// ask.
func (p Policy) Allows(id ID) bool {
	if p.s == nil || id.IsZero() {
		return false
	}
	if _, ok := p.s.rules[id.s]; ok {
		return true
	}
	path := len(scheme) + int(id.td)
	if p.s.any && path < len(id.s) {
		return true
	}
	for i := path; i < len(id.s) && i < p.s.longest; i++ {
		if id.s[i] != '/' {
			continue
		}
		if _, ok := p.s.rules[id.s[:i+1]]; ok {
			return true
		}
	}
	return false
}

// Check returns nil if p allows id, or else an error that wraps [ErrDenied]. Its text names the ID and
// shows the policy, shortened if it is long. The text is made when it is read, so a refusal that is not
// logged costs one allocation.
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
	return fmt.Sprintf("spiffe: %q: %s", clip(d.id.String(), maxInError), d.reason())
}

func (d *denial) Unwrap() error { return ErrDenied }

// reason is the text without the ID.
func (d *denial) reason() string {
	if err := d.policy.usable(); err != nil {
		return ErrDenied.Error() + ": " + err.Error()
	}
	return ErrDenied.Error() + ", which allows " + d.policy.s.short()
}

// usable says why p can allow no peer, or returns nil.
func (p Policy) usable() error {
	switch {
	case p.s == nil:
		return errors.New("the policy is zero; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer")
	case p.s.mistake != "":
		return errors.New("the policy is not valid: " + p.s.mistake)
	}
	return nil
}

// IsZero reports whether p is the zero Policy, which allows nobody.
func (p Policy) IsZero() bool { return p.s == nil }

// String returns the rules of p, sorted, with commas between them: "spiffe://example.org/web" is
// that ID, "spiffe://example.org/*" every workload of the trust domain,
// "spiffe://example.org/ns/prod/*" every workload below that path, and "*" every workload.
// [ParsePolicy] reads it back. A policy that can allow nobody is "nobody", with the mistake if there
// is one.
func (p Policy) String() string {
	switch {
	case p.s == nil:
		return "nobody"
	case p.s.mistake != "":
		return "nobody (" + p.s.mistake + ")"
	}
	return p.s.text(0)
}

// text lists the rules, and stops before limit bytes are passed unless limit is 0. The first rule
// is always there, cut if it must be.
func (s *ruleSet) text(limit int) string {
	var b strings.Builder
	for i, r := range slices.Sorted(maps.Keys(s.rules)) {
		r = ruleText(r)
		switch {
		case limit == 0:
		case i == 0:
			r = clip(r, limit)
		case b.Len()+len(", ")+len(r) > limit:
			fmt.Fprintf(&b, ", … and %d more", len(s.rules)-i)
			return b.String()
		}
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(r)
	}
	return b.String()
}

// ruleText is a rule as it is written.
func ruleText(r string) string {
	if r[len(r)-1] == '/' {
		return r + anyRule
	}
	return r
}
