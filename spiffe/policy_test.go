package spiffe_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/spiffe"
)

// slowAllows decides from the text of a policy, which must therefore tell the truth.
func slowAllows(policy string, id spiffe.ID) bool {
	policy = strings.NewReplacer(",\n", ", ", ";\n", "; ").Replace(policy)
	sets := map[string]string{}
	expand := func(list string) (rules []string) {
		for word := range strings.SplitSeq(list, ", ") {
			if set, ok := sets[word]; ok {
				rules = append(rules, strings.Split(set, ", ")...)
			} else {
				rules = append(rules, word)
			}
		}
		return rules
	}
	matches := func(rules []string) bool {
		return slices.ContainsFunc(rules, func(rule string) bool { return slowMatch(rule, id) })
	}
	for part := range strings.SplitSeq(policy, "; ") {
		if name, list, ok := strings.Cut(part, " = "); ok {
			sets[name] = strings.Join(expand(list), ", ")
			continue
		}
		allow, except, excepts := strings.Cut(part, " except ")
		if !id.IsZero() && matches(expand(allow)) && !(excepts && matches(expand(except))) {
			return true
		}
	}
	return false
}

// slowMatch compares segment by segment.
func slowMatch(rule string, id spiffe.ID) bool {
	if rule == "*" {
		return id.Path() != ""
	}
	want, have := strings.Split(rule, "/"), strings.Split(id.String(), "/")
	if below := want[len(want)-1] == "*"; below && len(have) >= len(want) {
		have = have[:len(want)]
	}
	return slices.EqualFunc(want, have, func(w, h string) bool { return w == "*" || w == h })
}

func TestPolicy(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ID-24", "ID-28")
	var ids []spiffe.ID
	for _, s := range []string{
		"spiffe://example.org", "spiffe://example.org/ns", "spiffe://example.org/ns/prod", "spiffe://example.org/ns/prod/sa/web",
		"spiffe://example.org/ns/prod/sa/web/x", "spiffe://example.org/ns/prod/sa/Web", "spiffe://example.org/ns/production/sa/web",
		"spiffe://example.org/web", "spiffe://example.org.evil.test/ns/prod/sa/web", "spiffe://sub.example.org/web",
		"spiffe://other.test", "spiffe://other.test/ns/prod/sa/web", "spiffe://a/b", longID, segmentsID,
	} {
		ids = append(ids, spiffe.MustParseID(s))
	}
	home, other := ids[0].TrustDomain(), spiffe.MustParseTrustDomain("other.test")
	prod := spiffe.AllowPathPrefix(home, "/ns/prod")
	for _, c := range []struct {
		policy spiffe.Policy
		text   string
		allows []int // of ids
	}{
		{spiffe.AllowIDs(webID), "spiffe://example.org/ns/prod/sa/web", []int{3}},
		{spiffe.AllowIDs(ids[7], webID, webID), "spiffe://example.org/ns/prod/sa/web, spiffe://example.org/web", []int{3, 7}},
		{spiffe.AllowIDs(ids[0]), "spiffe://example.org", []int{0}},
		{spiffe.AllowMembersOf(home), "spiffe://example.org/*", []int{1, 2, 3, 4, 5, 6, 7, 13, 14}},
		{spiffe.AllowMembersOf(other, home), "spiffe://example.org/*, spiffe://other.test/*", []int{1, 2, 3, 4, 5, 6, 7, 11, 13, 14}},
		{prod, "spiffe://example.org/ns/prod/*", []int{3, 4, 5}},
		{spiffe.AllowPathPrefix(home, strings.Repeat("/a", 500)), "spiffe://example.org" + strings.Repeat("/a", 500) + "/*", []int{14}},
		{spiffe.AllowAnyPeer(), "*", []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14}},
		{spiffe.AnyOf(prod), "spiffe://example.org/ns/prod/*", []int{3, 4, 5}},
		{
			spiffe.AnyOf(spiffe.AllowIDs(ids[0]), prod, spiffe.AnyOf(spiffe.AllowMembersOf(other), prod)),
			"spiffe://example.org, spiffe://example.org/ns/prod/*, spiffe://other.test/*",
			[]int{0, 3, 4, 5, 11},
		},
		{spiffe.AnyOf(spiffe.AllowIDs(ids[10]), spiffe.AllowAnyPeer()), "*, spiffe://other.test", []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}},
	} {
		assert.Equal(t, c.text, c.policy.String())
		assert.False(t, c.policy.IsZero())
		assert.False(t, c.policy.Allows(spiffe.ID{}), "the zero ID is never allowed")
		assert.ErrorIs(t, c.policy.Check(spiffe.ID{}), spiffe.ErrDenied)
		var allows []int
		for i, id := range ids {
			got := c.policy.Allows(id)
			if got {
				allows = append(allows, i)
			}
			assert.Equal(t, slowAllows(c.policy.String(), id), got, "%s: %s", c.policy, id)
			if err := c.policy.Check(id); got {
				assert.NoError(t, err)
			} else {
				assert.ErrorIs(t, err, spiffe.ErrDenied)
			}
		}
		assert.Equal(t, c.allows, allows, c.text)
		_, err := spiffe.NewVerifier(noBundles{}, c.policy, nil)
		assert.NoError(t, err)
	}
}

// A mistake never widens a policy, and is found when the verifier is made.
func TestPolicyMistakes(t *testing.T) {
	t.Parallel()
	home := webID.TrustDomain()
	good := spiffe.AllowIDs(webID)
	for _, c := range []struct {
		policy spiffe.Policy
		why    string
	}{
		{spiffe.Policy{}, "the policy is zero"},
		{spiffe.AllowIDs(), "AllowIDs needs at least one ID"},
		{spiffe.AllowIDs(webID, spiffe.ID{}), "AllowIDs was given the zero ID"},
		{spiffe.AllowMembersOf(), "AllowMembersOf needs at least one trust domain"},
		{spiffe.AllowMembersOf(home, spiffe.TrustDomain{}), "AllowMembersOf was given the zero TrustDomain"},
		{spiffe.AllowPathPrefix(spiffe.TrustDomain{}, "/ns"), "AllowPathPrefix was given the zero TrustDomain"},
		{spiffe.AllowPathPrefix(home, ""), "AllowPathPrefix needs a path"},
		{spiffe.AllowPathPrefix(home, "/"), "AllowPathPrefix needs a path"},
		{spiffe.AllowPathPrefix(home, "ns"), "must begin with a slash"},
		{spiffe.AllowPathPrefix(home, ".evil.test/ns"), "must begin with a slash"},
		{spiffe.AllowPathPrefix(home, "/ns/"), "a trailing slash"},
		{spiffe.AllowPathPrefix(home, "/ns/*"), `AllowPathPrefix allows everything below its prefix; drop the "/*" of "/ns/*"`},
		{spiffe.AllowPathPrefix(home, "/*"), `AllowPathPrefix needs a path without "/*"; AllowMembersOf allows the whole trust domain`},
		{spiffe.AllowPathPrefix(home, "/ns/*/sa"), "takes no stars"},
		{spiffe.AllowPathPrefix(home, "/ns/prod*"), "takes no stars"},
		{spiffe.AllowPathPrefix(home, "*"), "must begin with a slash"},
		{good.Except(spiffe.Policy{}), "Except was called with the zero Policy"},
		{spiffe.Policy{}.Except(good), "Except was called with the zero Policy"},
		{good.Except(spiffe.AllowIDs()), "AllowIDs needs at least one ID"},
		{spiffe.AllowIDs().Except(good), "AllowIDs needs at least one ID"},
		{good.Except(good), "the exceptions leave nothing of spiffe://example.org/ns/prod/sa/web"},
		{good.Except(spiffe.AllowMembersOf(home)), "the exceptions leave nothing of spiffe://example.org/ns/prod/sa/web"},
		{spiffe.AllowAnyPeer().Except(spiffe.AllowAnyPeer()), "the exceptions leave nothing of *"},
		{spiffe.AllowAnyPeer().Except(spiffe.AllowMembersOf(home).Except(good)), "has exceptions itself"},
		{spiffe.AnyOf(spiffe.AllowMembersOf(home), good.Except(good)), "the exceptions leave nothing"},
		{spiffe.AllowPathPrefix(home, "/ns/../prod"), "are not allowed"},
		{spiffe.AllowPathPrefix(home, "/"+strings.Repeat("a", 2048)), "longer than 2048 bytes"},
		{spiffe.AnyOf(), "AnyOf needs at least one policy"},
		{spiffe.AnyOf(good, spiffe.Policy{}), "AnyOf was given the zero Policy"},
		{spiffe.AnyOf(good, spiffe.AllowIDs()), "AllowIDs needs at least one ID"},
		{spiffe.AnyOf(spiffe.AnyOf(good, spiffe.AllowPathPrefix(home, "ns")), good), "must begin with a slash"},
	} {
		assert.False(t, c.policy.Allows(webID), c.why)
		err := c.policy.Check(webID)
		require.ErrorIs(t, err, spiffe.ErrDenied)
		assert.ErrorContains(t, err, c.why)
		_, err = spiffe.NewVerifier(noBundles{}, c.policy, nil)
		assert.ErrorContains(t, err, "spiffe: new verifier: the policy is ")
		assert.ErrorContains(t, err, c.why)
		assert.True(t, strings.HasPrefix(c.policy.String(), "no peer"), c.policy)
		assert.Less(t, len(err.Error()), 400)
	}
	assert.True(t, spiffe.Policy{}.IsZero())
	assert.Equal(t, "no peer", spiffe.Policy{}.String())
	assert.False(t, spiffe.AllowIDs().IsZero(), "a mistake is not an omission")
}

// A policy of very many IDs costs neither time nor text at each refusal.
func TestPolicyDenied(t *testing.T) {
	t.Parallel()
	err := spiffe.AllowIDs(webID).Check(spiffe.MustParseID("spiffe://other.test/db"))
	assert.EqualError(t, err, `spiffe: "spiffe://other.test/db": not allowed by policy, which allows spiffe://example.org/ns/prod/sa/web`)

	many := manyIDs(t, 10_000)
	err = spiffe.AllowIDs(many...).Check(webID)
	assert.ErrorIs(t, err, spiffe.ErrDenied)
	assert.ErrorContains(t, err, "spiffe://example.org/ns/prod/sa/w00000, ")
	assert.ErrorContains(t, err, " more")
	assert.Less(t, len(err.Error()), 700)

	long := spiffe.MustParseID(longID)
	err = spiffe.AllowIDs(long).Check(spiffe.MustParseID(segmentsID))
	assert.Less(t, len(err.Error()), 1200)
	assert.Equal(t, 2, strings.Count(err.Error(), "…"), "both are cut: %v", err)
}

// A refusal costs one allocation, whatever the policy holds: the text is made when it is read.
func TestPolicyDeniedAllocations(t *testing.T) {
	policies := map[string]spiffe.Policy{
		"zero": {}, "mistake": spiffe.AllowIDs(), "prefix": spiffe.AllowPathPrefix(webID.TrustDomain(), "/ns/test"),
		"many IDs": spiffe.AllowIDs(manyIDs(t, 10_000)...),
	}
	var err error
	for name, p := range policies {
		assert.LessOrEqual(t, testing.AllocsPerRun(100, func() { err = p.Check(webID) }), 1.0, name)
		assert.ErrorIs(t, err, spiffe.ErrDenied, name)
	}
}

func manyIDs(t testing.TB, n int) []spiffe.ID {
	t.Helper()
	ids := make([]spiffe.ID, n)
	for i := range ids {
		id, err := webID.TrustDomain().KubernetesID("prod", fmt.Sprintf("w%05d", i))
		require.NoError(t, err)
		ids[i] = id
	}
	return ids
}

// benchPolicies are policies that allow webID.
func benchPolicies(t testing.TB) map[string]spiffe.Policy {
	t.Helper()
	td := webID.TrustDomain()
	parse := func(text string) spiffe.Policy {
		p, err := spiffe.ParsePolicy(text)
		require.NoError(t, err)
		return p
	}
	var domains []spiffe.TrustDomain
	var prefixes []spiffe.Policy
	for i := range 1000 {
		domains = append(domains, spiffe.MustParseTrustDomain(fmt.Sprintf("d%03d.example", i)))
		prefixes = append(prefixes, spiffe.AllowPathPrefix(td, fmt.Sprintf("/ns/n%03d", i)))
	}
	prod := spiffe.AllowPathPrefix(td, "/ns/prod")
	var live spiffe.LivePolicy
	require.NoError(t, live.Set(prod))
	_, err := live.Try(prod)
	require.NoError(t, err)
	return map[string]spiffe.Policy{
		"id":             spiffe.AllowIDs(webID),
		"member":         spiffe.AllowMembersOf(td),
		"prefix":         prod,
		"member-of-4":    spiffe.AllowMembersOf(append(domains[:3:3], td)...),
		"member-of-1000": spiffe.AllowMembersOf(append(domains[:999:999], td)...),
		"prefix-of-1000": spiffe.AnyOf(append(prefixes, prod)...),
		"id-of-100000":   spiffe.AllowIDs(append(manyIDs(t, 100_000), webID)...),
		"prefix-trial":   live.Policy(),
		"star":           parse("spiffe://example.org/ns/*/sa/web"),
		"except":         parse("spiffe://example.org/* except spiffe://example.org/ns/dev/*"),
		"except-star":    parse("spiffe://example.org/* except spiffe://example.org/ns/*/sa/fuzzer"),
	}
}

// TestPolicyAllocations: a decision does not allocate, whatever the policy holds.
func TestPolicyAllocations(t *testing.T) {
	for name, p := range benchPolicies(t) {
		require.True(t, p.Allows(webID), name)
		assert.Zero(t, testing.AllocsPerRun(100, func() { p.Allows(webID) }), name)
		assert.Zero(t, testing.AllocsPerRun(100, func() { _ = p.Check(webID) }), name)
	}
}

// BenchmarkPolicyAllows has a bar of 10 ns for a member and a prefix.
func BenchmarkPolicyAllows(b *testing.B) {
	policies := benchPolicies(b)
	for _, name := range slices.Sorted(maps.Keys(policies)) {
		b.Run(name, func(b *testing.B) {
			p := policies[name]
			b.ReportAllocs()
			for b.Loop() {
				if !p.Allows(webID) {
					b.Fatal("refused")
				}
			}
		})
	}
}

// BenchmarkPolicyWorst is the slowest decision that a policy can cause: the longest ID, and a rule that asks
// for each of its segments behind each of 16 arrangements of stars.
func BenchmarkPolicyWorst(b *testing.B) {
	var rules []string
	for i := range 950 {
		rules = append(rules, "spiffe://a"+strings.Repeat("/a", i)+"/b/*")
	}
	for i := range 16 {
		rules = append(rules, "spiffe://a"+strings.Repeat("/a", i)+"/*/c")
	}
	p, err := spiffe.ParsePolicy(strings.Join(rules, ", "))
	require.NoError(b, err)
	id := spiffe.MustParseID("spiffe://a" + strings.Repeat("/a", 1018))
	b.ReportAllocs()
	for b.Loop() {
		if p.Allows(id) {
			b.Fatal("allowed")
		}
	}
}

func BenchmarkPolicy(b *testing.B) {
	many := spiffe.AllowIDs(manyIDs(b, 100_000)...)
	for _, c := range []struct {
		name   string
		policy spiffe.Policy
	}{
		{"one-id", spiffe.AllowIDs(spiffe.MustParseID("spiffe://example.org/ns/prod/sa/db"))},
		{"100000-ids", many},
		{"prefix", spiffe.AllowPathPrefix(webID.TrustDomain(), "/ns/test")},
	} {
		b.Run(c.name+"/allows", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if c.policy.Allows(webID) {
					b.Fatal("allowed")
				}
			}
		})
		b.Run(c.name+"/check", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if c.policy.Check(webID) == nil {
					b.Fatal("allowed")
				}
			}
		})
	}
}
