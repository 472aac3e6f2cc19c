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
// A policy fails closed. The zero Policy allows no peer. Neither does a policy that was made by mistake:
// from the zero ID, from an empty list, or from a prefix that is not a path, even if another part of it
// is sound. [CheckPolicySource] says what is wrong, and [NewVerifier] calls it, so that the mistake shows
// when the program starts.
//
// Only AllowIDs can allow an ID without a path, which names a trust domain. All other policies allow
// workloads only.
type Policy struct {
	_ [0]func() // == would compare pointers
	s *ruleSet  // nil in the zero Policy
}

// ruleSet is what a Policy shares with its copies. A rule is one string: an ID allows that ID, a string
// that ends in a slash everything below it, and "*" every workload. One map holds them all, and a
// look-up of a part of an ID's own string does not allocate.
type ruleSet struct {
	rules   map[string]struct{}
	any     bool          // "*" is among the rules
	longest int           // length of the longest rule that ends in a slash
	mistake string        // why the policy cannot be used; then there are no rules
	short   func() string // for errors: sorts once, as a peer must not cause a sort at each refusal
}

const (
	anyRule     = "*"
	maxInPolicy = 512 // bytes of a policy in an error
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
	return newPolicy(rules)
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
// federation that includes the workloads of other organisations.
func AllowAnyPeer() Policy { return newPolicy(map[string]struct{}{anyRule: {}}) }

// AnyOf allows what at least one of the policies allows. An empty list, the zero Policy and a policy
// that was made by mistake are mistakes; see [Policy].
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

// WithAliases returns p with every rule about td repeated for each alias: if p allows spiffe://td/web,
// the result also allows spiffe://alias/web. It is for the time in which a trust domain is renamed. Rules
// about other trust domains are unchanged, [AllowAnyPeer] needs no alias, and aliases do not chain.
// [Policy.String] shows the result.
//
// An alias changes what is allowed, not what is trusted. A peer still proves its own ID, against the
// bundle of the trust domain in that ID, so the verifier needs a bundle for the alias. [Peer.ID] is that
// ID, so other code that decides by ID sees both names.
//
// The authority of an alias can issue the ID of any workload that the rules name. Use an alias only for
// a second name of the same organisation, and remove it after the renaming. To allow some peers of a
// partner, name those peers.
//
// The zero TrustDomain, an empty list, td as its own alias, and a policy without a rule about td are
// mistakes; see [Policy].
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
// An ID proves nothing by itself: pass the ID of a [Peer], or give the policy to a [Verifier].
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

// IsZero reports whether p is the zero Policy, which allows no peer.
func (p Policy) IsZero() bool { return p.s == nil }

// String returns the rules of p, sorted, with commas between them: "spiffe://example.org/web" is
// that ID, "spiffe://example.org/*" every workload of the trust domain,
// "spiffe://example.org/ns/prod/*" every workload below that path, and "*" every workload.
// [ParsePolicy] reads it back. A policy that can allow no peer is "no peer", with the mistake if there
// is one.
func (p Policy) String() string {
	switch {
	case p.s == nil:
		return "no peer"
	case p.s.mistake != "":
		return "no peer (" + p.s.mistake + ")"
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
