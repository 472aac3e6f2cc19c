package spiffe_test

import (
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
)

func allows(p spiffe.Policy, id spiffe.ID) bool { return p.Check(id) == nil }

// slowAllows decides from the text of a policy, which must therefore tell the truth.
func slowAllows(policy string, id spiffe.ID) bool {
	rules := strings.Split(strings.ReplaceAll(policy, ",\n", ", "), ", ")
	return !id.IsZero() && slices.ContainsFunc(rules, func(rule string) bool { return slowMatch(rule, id) })
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
	everyone := []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14}
	for _, c := range []struct {
		policy spiffe.Policy
		text   string
		allows []int // of ids
	}{
		{spiffe.AllowIDs(webID), "spiffe://example.org/ns/prod/sa/web", []int{3}},
		{spiffe.AllowIDs(ids[7], webID, webID), "spiffe://example.org/ns/prod/sa/web, spiffe://example.org/web", []int{3, 7}},
		{spiffe.AllowIDs(ids[0]), "spiffe://example.org", []int{0}},
		{spiffe.AllowIDs(ids[13]), longID, []int{13}},
		{spiffe.AllowMembersOf(home), "spiffe://example.org/*", []int{1, 2, 3, 4, 5, 6, 7, 13, 14}},
		{spiffe.AllowMembersOf(other, home), "spiffe://example.org/*, spiffe://other.test/*", []int{1, 2, 3, 4, 5, 6, 7, 11, 13, 14}},
		{prod, "spiffe://example.org/ns/prod/*", []int{3, 4, 5}},
		{spiffe.AllowPathPrefix(home, strings.Repeat("/a", 500)), "spiffe://example.org" + strings.Repeat("/a", 500) + "/*", []int{14}},
		{spiffe.AllowPathPrefix(home, ids[13].Path()), longID + "/*", nil},
		{spiffe.AllowAnyPeer(), "*", everyone},
		{spiffe.AnyOf(prod), "spiffe://example.org/ns/prod/*", []int{3, 4, 5}},
		{
			spiffe.AnyOf(spiffe.AllowIDs(ids[0]), prod, spiffe.AnyOf(spiffe.AllowMembersOf(other), prod)),
			"spiffe://example.org, spiffe://example.org/ns/prod/*, spiffe://other.test/*",
			[]int{0, 3, 4, 5, 11},
		},
		{spiffe.AnyOf(spiffe.AllowIDs(ids[10]), spiffe.AllowAnyPeer()), "*, spiffe://other.test", slices.Insert(slices.Clone(everyone), 9, 10)},
	} {
		assert.Equal(t, c.text, c.policy.String())
		assert.False(t, zeroPolicy(c.policy))
		assert.ErrorIs(t, c.policy.Check(spiffe.ID{}), spiffe.ErrDenied)
		parsed := must.Get(spiffe.ParsePolicy(c.text))(t)
		assert.Equal(t, c.text, parsed.String())
		var allowed []int
		for i, id := range ids {
			got := allows(c.policy, id)
			if got {
				allowed = append(allowed, i)
			}
			assert.Equal(t, slowAllows(c.text, id), got, "%s: %s", c.policy, id)
			assert.Equal(t, got, allows(parsed, id), "%s: %s", c.policy, id)
		}
		assert.Equal(t, c.allows, allowed, c.text)
		_, err := spiffe.NewVerifier(noBundles{}, c.policy, nil)
		assert.NoError(t, err)
	}
}

// A function is asked for workloads that no rule allows, and its error reaches the caller of Check.
func TestAllowFunc(t *testing.T) {
	t.Parallel()
	unknown := errors.New("no such tenant")
	var asked []string
	tenants := spiffe.AllowFunc(func(id spiffe.ID) error {
		asked = append(asked, id.String())
		if strings.HasPrefix(id.Path(), "/tenant/") {
			return nil
		}
		return unknown
	})
	tenant, td := spiffe.MustParseID("spiffe://example.org/tenant/7"), webID.TrustDomain()
	assert.NoError(t, tenants.Check(tenant))
	err := tenants.Check(webID)
	require.ErrorIs(t, err, spiffe.ErrDenied)
	require.ErrorIs(t, err, unknown)
	assert.EqualError(t, err, `spiffe: "spiffe://example.org/ns/prod/sa/web": not allowed by policy: no such tenant`)
	assert.Equal(t, "a function", tenants.String())
	assert.False(t, zeroPolicy(tenants))

	asked = nil
	assert.False(t, allows(tenants, td.ID()), "an ID without a path is no workload")
	assert.False(t, allows(tenants, spiffe.ID{}))
	assert.EqualError(t, tenants.Check(td.ID()), `spiffe: "spiffe://example.org": not allowed by policy, which allows a function`)

	either := spiffe.AnyOf(spiffe.AllowIDs(webID, td.ID()), tenants)
	assert.True(t, allows(either, webID))
	assert.True(t, allows(either, td.ID()))
	assert.Empty(t, asked)
	assert.True(t, allows(either, tenant))
	assert.Equal(t, "spiffe://example.org, spiffe://example.org/ns/prod/sa/web, a function", either.String())
	err = either.Check(spiffe.MustParseID("spiffe://b/c"))
	assert.ErrorIs(t, err, unknown)
	assert.EqualError(t, err, `spiffe: "spiffe://b/c": not allowed by policy, which allows spiffe://example.org, `+
		`spiffe://example.org/ns/prod/sa/web, a function: no such tenant`)
	_, err = spiffe.ParsePolicy(either.String())
	assert.Error(t, err)
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
		{spiffe.AllowPathPrefix(home, "/*"), "AllowPathPrefix needs a path; AllowMembersOf allows the whole trust domain"},
		{spiffe.AllowPathPrefix(home, "ns"), `takes the path alone, such as /ns/prod, and not "ns"`},
		{spiffe.AllowPathPrefix(home, ".evil.test/ns"), "takes the path alone"},
		{spiffe.AllowPathPrefix(home, "*"), "takes the path alone"},
		{spiffe.AllowPathPrefix(home, "/ns/"), "a trailing slash"},
		{spiffe.AllowPathPrefix(home, "/ns/*"), "takes no stars"},
		{spiffe.AllowPathPrefix(home, "/ns/*/sa"), "takes no stars"},
		{spiffe.AllowPathPrefix(home, "/ns/prod*"), "takes no stars"},
		{spiffe.AllowPathPrefix(home, "/ns/../prod"), "are not allowed"},
		{spiffe.AllowPathPrefix(home, "/"+strings.Repeat("a", 2048)), "longer than 2048 bytes"},
		{spiffe.AllowFunc(nil), "AllowFunc was given a nil function"},
		{spiffe.AnyOf(), "AnyOf needs at least one policy"},
		{spiffe.AnyOf(good, spiffe.Policy{}), "AnyOf was given the zero Policy"},
		{spiffe.AnyOf(good, spiffe.AllowIDs()), "AllowIDs needs at least one ID"},
		{spiffe.AnyOf(spiffe.AnyOf(good, spiffe.AllowPathPrefix(home, "ns")), good), "takes the path alone"},
	} {
		err := c.policy.Check(webID)
		require.ErrorIs(t, err, spiffe.ErrDenied)
		assert.ErrorContains(t, err, c.why)
		_, err = spiffe.NewVerifier(noBundles{}, c.policy, nil)
		assert.ErrorContains(t, err, "spiffe: new verifier: the policy is ")
		assert.ErrorContains(t, err, c.why)
		assert.True(t, strings.HasPrefix(c.policy.String(), "no peer"), c.policy)
		assert.Less(t, len(err.Error()), 400)
	}
	assert.Equal(t, "no peer", spiffe.Policy{}.String())
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
	assert.Less(t, len(err.Error()), 700)

	long := spiffe.MustParseID(longID)
	err = spiffe.AllowIDs(long).Check(spiffe.MustParseID(segmentsID))
	assert.Less(t, len(err.Error()), 1200)
	assert.Equal(t, 2, strings.Count(err.Error(), "…"), "both are cut: %v", err)

	// What looks like a prefix is one ID.
	p := must.Get(spiffe.ParsePolicy("spiffe://example.org/ns/prod"))(t)
	assert.EqualError(t, p.Check(webID), `spiffe: "spiffe://example.org/ns/prod/sa/web": not allowed by policy, `+
		`which allows spiffe://example.org/ns/prod; "spiffe://example.org/ns/prod" is one exact ID; `+
		`write "spiffe://example.org/ns/prod/*" for what is below it`)
	assert.NotContains(t, p.Check(spiffe.MustParseID("spiffe://example.org/ns/production")).Error(), "exact")
	assert.ErrorContains(t, spiffe.AllowIDs(webID.TrustDomain().ID()).Check(webID), `write "spiffe://example.org/*" for what is below it`)
}

// Naming a second trust domain changes which names a policy allows, and not which authorities are trusted: a member of
// each needs that domain's own authority.
func TestPolicyOfTwoTrustDomains(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ID-28", "X5-31", "SVID-1", "IST-1.2-1", "IST-1.2-2")
	td, old := webID.TrustDomain(), spiffe.MustParseTrustDomain("old.test")
	home, alias := caSpec("ca1", "spiffe://example.org").issue(nil), caSpec("ca2", "spiffe://old.test").issue(nil)
	oldWeb := must.Get(old.WorkloadID("ns", "prod", "sa", "web"))(t)
	verify := func(allow spiffe.Policy, leaf *x509.Certificate, bundles ...*spiffe.Bundle) (*spiffe.Peer, error) {
		set := must.Get(spiffe.NewBundleSet(bundles...))(t)
		return verifierAt(t, now, set, allow).VerifyChain([]*x509.Certificate{leaf}, spiffe.AnyRole)
	}
	homeBundle, oldBundle := bundleOf(t, td.String(), home.parse(t)), bundleOf(t, old.String(), alias.parse(t))
	both, good := spiffe.AllowIDs(webID, oldWeb), leafSpec(oldWeb.String()).issue(alias).parse(t)
	peer := must.Get(verify(both, good, homeBundle, oldBundle))(t)
	assert.Equal(t, oldWeb, peer.ID(), "the ID that was proved")
	_, err := verify(spiffe.AllowIDs(webID), good, homeBundle, oldBundle)
	assert.ErrorIs(t, err, spiffe.ErrDenied)
	_, err = verify(both, good, homeBundle)
	assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
	_, err = verify(both, leafSpec(oldWeb.String()).issue(home).parse(t), homeBundle, oldBundle)
	assert.ErrorContains(t, err, "unknown authority")
	_, err = verify(both, leafSpec(webID.String()).issue(alias).parse(t), homeBundle, oldBundle)
	assert.ErrorContains(t, err, "unknown authority")
}

func TestParsePolicyRefuses(t *testing.T) {
	t.Parallel()
	const star = "or a star as the whole of it"
	for _, c := range []struct {
		text   string
		offset int
		rule   string // of SPIFFE-ID
		reason string
	}{
		{"", 0, "", "a rule is missing"},
		{",", 0, "", "a rule is missing"},
		{"*,", 2, "", "a space must follow the comma"},
		{"*, ", 3, "", "a rule is missing"},
		{"*,spiffe://a", 2, "", "a space must follow the comma"},
		{"*,  spiffe://a", 3, "", "white space is not allowed here"},
		{" *", 0, "", "white space is not allowed here"},
		{"* ", 1, "", "white space is not allowed here"},
		{"*\n", 1, "", "white space is not allowed here"},
		{"*\r\nspiffe://a", 1, "", "white space is not allowed here"},
		{"*,\r\nspiffe://a", 2, "", "a space must follow the comma, or a line break"},
		{"*,\n\nspiffe://a", 3, "", "white space is not allowed here"},
		{"* except spiffe://a", 1, "", "white space is not allowed here"},
		{"spiffe://a; spiffe://b", 11, "", `rules have ", " between them`},
		{"# web", 1, "", "white space is not allowed here"},
		{"#web", 0, "ID-2", "must begin with"},
		{`["spiffe://a"]`, 0, "ID-2", "must begin with"},
		{"nobody", 0, "ID-2", "must begin with \"spiffe://\", in lower case"},
		{"**", 0, "ID-2", "must begin with"},
		{"/*", 0, "ID-2", "must begin with"},
		{"*/web", 0, "ID-2", "must begin with"},
		{"spiffe://a/b, spiffe://a/*, spiffe://a/b", 28, "", "the rule occurs twice"},
		{"spiffe://a/*/b, spiffe://a/*/b", 16, "", "the rule occurs twice"},
		{"*, *", 3, "", "the rule occurs twice"},
		{"spiffe://*", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*/web", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*/*", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*.test/web", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://a*/web/*", 10, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe:///*", 9, "ID-3", "the trust domain name is empty"},
		{"spiffe:///*/b", 9, "ID-3", "the trust domain name is empty"},
		{"spiffe://A/*/b", 9, "ID-8", "upper case"},
		{"spiffe://a/ns/x*/sa", 15, "ID-19", star},
		{"spiffe://a/ns/*x/sa", 14, "ID-19", star},
		{"spiffe://a/ns/**/sa", 14, "ID-19", star},
		{"spiffe://a/*/b*", 14, "ID-19", star},
		{"spiffe://a/b*", 12, "ID-19", star},
		{"spiffe://a/b/**", 13, "ID-19", star},
		{"spiffe://a/*/", 12, "ID-18", "a trailing slash"},
		{"spiffe://a/*//*", 12, "ID-18", "a trailing slash"},
		{"spiffe://a//*", 10, "ID-18", "a trailing slash"},
		{"spiffe://a/b/", 12, "ID-18", "a trailing slash"},
		{"spiffe://a/*//b", 13, "ID-16", "an empty path segment"},
		{"spiffe://a//*/b", 11, "ID-16", "an empty path segment"},
		{"spiffe://a/*/../b", 13, "ID-17", "are not allowed"},
		{"spiffe://a/b/../*", 13, "ID-17", "are not allowed"},
		{"spiffe://a/*/b?", 14, "ID-4", "a query"},
		{"spiffe://a/b, spiffe://A/b", 23, "ID-8", "upper case"},
		{"spiffe://a/b ,spiffe://a/c", 12, "", "white space is not allowed here"},
		{"spiffe://a/b|spiffe://a/c", 12, "ID-19", "only letters"},
		{longID + "x", 2048, "ID-21", "longer than 2048"},
		{"*, " + longID + "x/*", 2051, "ID-21", "longer than 2048"},
		{manyStars(1025), 0, "", "1025 rules with a star for a segment, the limit is 1024"},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		assert.True(t, zeroPolicy(p), c.text)
		e := must.As[*spiffe.ParseError](err)(t, c.text)
		assert.Equal(t, c.offset, e.Offset, "%.40q: %v", c.text, err)
		assert.Contains(t, e.Reason, c.reason, "%.40q", c.text)
		assert.Regexp(t, fmt.Sprintf("^spiffe: invalid policy( \".*\"…?)? at byte %d: ", c.offset), err.Error())
		assert.Less(t, len(err.Error()), 512)
		assert.Equal(t, c.rule, e.Rule, "%.40q", c.text)
	}
	_, err := spiffe.ParsePolicy(strings.Repeat("*", 1<<20+1))
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)

	half := must.Get(spiffe.ParsePolicy(manyStars(1024)))(t)
	more := must.Get(spiffe.ParsePolicy("spiffe://b/*/c"))(t)
	assert.ErrorContains(t, spiffe.AnyOf(half, more).Check(webID), "1025 rules with a star")
}

// manyStars is a policy of n rules, each with a star for a segment.
func manyStars(n int) string {
	rules := make([]string, n)
	for i := range rules {
		rules[i] = fmt.Sprintf("spiffe://a/*/%d", i)
	}
	return strings.Join(rules, ", ")
}

// TestPolicyText shows what texts with stars and line breaks mean.
func TestPolicyText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text            string
		allows, refuses []string
	}{
		{
			"spiffe://a/ns/*/sa/web",
			[]string{"spiffe://a/ns/prod/sa/web", "spiffe://a/ns/ns/sa/web"},
			[]string{
				"spiffe://a/ns/sa/web", "spiffe://a/ns/x/y/sa/web", "spiffe://a/ns/x/sa/web/z", "spiffe://a/ns/x/sa/Web",
				"spiffe://a/ns/x/sa", "spiffe://b/ns/x/sa/web", "spiffe://a",
			},
		},
		{
			"spiffe://a/*/b/*",
			[]string{"spiffe://a/x/b/c", "spiffe://a/x/b/c/d", "spiffe://a/b/b/b"},
			[]string{"spiffe://a/x/b", "spiffe://a/b/c", "spiffe://a/x/y/b/c"},
		},
		{
			"spiffe://a/*/*",
			[]string{"spiffe://a/x/y", "spiffe://a/x/y/z"},
			[]string{"spiffe://a/x", "spiffe://a", "spiffe://aa/x/y"},
		},
		{
			"spiffe://a/*/c,\nspiffe://a/b/*/d, spiffe://a/b/*/d/e/*",
			[]string{"spiffe://a/b/c", "spiffe://a/x/c", "spiffe://a/b/x/d", "spiffe://a/b/x/d/e/f"},
			[]string{"spiffe://a/b/c/e", "spiffe://a/x/b/d", "spiffe://a/b/d", "spiffe://a/b/x/d/e"},
		},
		{
			"spiffe://a/*/*/c, spiffe://a/*/b, spiffe://a/x/*/*",
			[]string{"spiffe://a/1/2/c", "spiffe://a/1/b", "spiffe://a/x/1/2", "spiffe://a/x/1/c"},
			[]string{"spiffe://a/x/1", "spiffe://a/1/2/d", "spiffe://a/1/b/d"},
		},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		require.NoError(t, err, c.text)
		for _, name := range append(c.allows, c.refuses...) {
			id := spiffe.MustParseID(name)
			want := slices.Contains(c.allows, name)
			assert.Equal(t, want, allows(p, id), "%s: %s", c.text, name)
			assert.Equal(t, want, slowAllows(p.String(), id), "%s: %s", c.text, name)
		}
	}
}

// TestPolicyReference compares random policies, and what AnyOf makes of them, with the slow reference.
func TestPolicyReference(t *testing.T) {
	t.Parallel()
	rnd := rand.New(rand.NewPCG(11, 5))
	path := func(words ...string) string {
		var b strings.Builder
		for range 1 + rnd.IntN(4) {
			b.WriteString("/" + words[rnd.IntN(len(words))])
		}
		return b.String()
	}
	policy := func() (spiffe.Policy, string) {
		var rules []string
		for range 1 + rnd.IntN(8) {
			rule := "spiffe://" + []string{"a", "b"}[rnd.IntN(2)] + path("a", "b", "c", "*", "*")
			switch rnd.IntN(24) {
			case 0:
				rule = "*"
			case 1, 2:
				rule = "spiffe://a"
			}
			if !slices.Contains(rules, rule) {
				rules = append(rules, rule)
			}
		}
		text := strings.Join(rules, ", ")
		p := must.Get(spiffe.ParsePolicy(text))(t)
		return p, text
	}
	allowed := 0
	for range rounds.Of(100) {
		p, textP := policy()
		q, textQ := policy()
		either := spiffe.AnyOf(p, q)
		for range 40 {
			text := "spiffe://" + []string{"a", "b", "c"}[rnd.IntN(3)] + path("a", "b", "c", "d")
			if rnd.IntN(20) == 0 {
				text = "spiffe://a"
			}
			id := spiffe.MustParseID(text)
			want := slowAllows(textP, id)
			if want {
				allowed++
			}
			require.Equal(t, want, allows(p, id), "%s: %s", textP, id)
			require.Equal(t, want, slowAllows(p.String(), id), "%s: %s", p, id)
			require.Equal(t, want || slowAllows(textQ, id), allows(either, id), "any of %s; %s: %s", textP, textQ, id)
		}
	}
	assert.Greater(t, allowed, rounds.Of(500))
}

func TestLivePolicy(t *testing.T) {
	t.Parallel()
	var live spiffe.LivePolicy
	assert.True(t, zeroPolicy(live.Policy()))
	v, err := spiffe.NewVerifier(noBundles{}, &live, nil)
	require.NoError(t, err, "a source may have none yet")
	require.NotNil(t, v)
	_, err = spiffe.NewVerifier(noBundles{}, nil, nil)
	assert.EqualError(t, err, "spiffe: new verifier: no policy; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer")

	first := live.Changed()
	assert.Equal(t, first, live.Changed())
	require.NoError(t, live.Set(spiffe.AllowIDs(webID)))
	<-first
	assert.True(t, allows(live.Policy(), webID))

	second := live.Changed()
	assert.EqualError(t, live.Set(spiffe.AllowIDs()), "spiffe: set policy: the policy is not valid: AllowIDs needs at least one ID")
	assert.ErrorContains(t, live.Set(spiffe.Policy{}), "the policy is zero")
	assert.True(t, allows(live.Policy(), webID), "the one before stays")
	select {
	case <-second:
		t.Error("nothing has changed")
	default:
	}

	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 100 {
				changed := live.Changed()
				assert.NoError(t, live.Set(spiffe.AllowAnyPeer()))
				<-changed
				assert.False(t, zeroPolicy(live.Policy()))
			}
		})
	}
	wg.Wait()
	<-second
}

func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{
		"*", "*, *", "spiffe://example.org/web", "spiffe://example.org/*", "spiffe://example.org", "spiffe://b/c, spiffe://a/b/*",
		"spiffe://a/*/b", "spiffe://a,spiffe://b", "spiffe://a, ", "nobody", "", "spiffe://a/b/../*, spiffe://a", "*, spiffe://a/",
		"spiffe:///*", "spiffe://a/*/c, spiffe://a/*/*/*", "spiffe://a/b/*,\nspiffe://a/*/d", "* except spiffe://a/b/*",
	} {
		f.Add(s, "spiffe://a/*/c, spiffe://a/b", "spiffe://a/b/c")
	}
	f.Fuzz(func(t *testing.T, text, other, name string) {
		p, err := spiffe.ParsePolicy(text)
		if err != nil {
			e, ok := errors.AsType[*spiffe.ParseError](err)
			if !ok && !errors.Is(err, spiffe.ErrTooLarge) {
				t.Fatalf("%T: %v", err, err)
			}
			if ok && (e.Offset < 0 || e.Offset > len(text)) {
				t.Fatalf("%q: offset %d", text, e.Offset)
			}
			if !zeroPolicy(p) {
				t.Fatalf("%q: an error and a policy", text)
			}
			return
		}
		canonical := p.String()
		back, err := spiffe.ParsePolicy(canonical)
		if err != nil || back.String() != canonical || len(canonical) != len(text) {
			t.Fatalf("%q: %q, %v", text, canonical, err)
		}
		id, err := spiffe.ParseID(name)
		if err != nil {
			return
		}
		allowed := slowAllows(text, id)
		if allowed != allows(p, id) || allowed != allows(back, id) {
			t.Fatalf("%q: %s: %v, %v, %v", text, id, allowed, allows(p, id), allows(back, id))
		}
		q, err := spiffe.ParsePolicy(other)
		if err != nil {
			return
		}
		either := spiffe.AnyOf(p, q)
		if allows(either, id) != (allowed || allows(q, id)) {
			t.Fatalf("any of %q and %q: %s: %v", text, other, id, !allowed)
		}
	})
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
		id := must.Get(webID.TrustDomain().WorkloadID("ns", "prod", "sa", fmt.Sprintf("w%05d", i)))(t)
		ids[i] = id
	}
	return ids
}

// benchPolicies are policies that allow webID.
func benchPolicies(t testing.TB) map[string]spiffe.Policy {
	t.Helper()
	td := webID.TrustDomain()
	star := must.Get(spiffe.ParsePolicy("spiffe://example.org/ns/*/sa/web"))(t)
	stars := must.Get(spiffe.ParsePolicy(manyStars(1000)))(t)
	var domains []spiffe.TrustDomain
	var prefixes []spiffe.Policy
	for i := range 1000 {
		domains = append(domains, spiffe.MustParseTrustDomain(fmt.Sprintf("d%03d.example", i)))
		prefixes = append(prefixes, spiffe.AllowPathPrefix(td, fmt.Sprintf("/ns/n%03d", i)))
	}
	prod := spiffe.AllowPathPrefix(td, "/ns/prod")
	return map[string]spiffe.Policy{
		"id":             spiffe.AllowIDs(webID),
		"member":         spiffe.AllowMembersOf(td),
		"prefix":         prod,
		"member-of-1000": spiffe.AllowMembersOf(append(domains[:999:999], td)...),
		"prefix-of-1000": spiffe.AnyOf(append(prefixes, prod)...),
		"id-of-10000":    spiffe.AllowIDs(append(manyIDs(t, 10_000), webID)...),
		"star":           star,
		"star-of-1000":   spiffe.AnyOf(stars, star),
		"func":           spiffe.AllowFunc(func(spiffe.ID) error { return nil }),
	}
}

// TestPolicyAllocations: a decision does not allocate, whatever the policy holds.
func TestPolicyAllocations(t *testing.T) {
	for name, p := range benchPolicies(t) {
		require.True(t, allows(p, webID), name)
		assert.Zero(t, testing.AllocsPerRun(100, func() { _ = p.Check(webID) }), name)
	}
}

// zeroPolicy reports whether p is the zero Policy.
func zeroPolicy(p spiffe.Policy) bool { return p.String() == "no peer" }
