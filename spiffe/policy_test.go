package spiffe_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conformance"
	"github.com/svidkit/svidkit/spiffe"
)

// slowAllows decides from the text of a policy, which must therefore tell the truth.
func slowAllows(policy string, id spiffe.ID) bool {
	for rule := range strings.SplitSeq(policy, ", ") {
		prefix, wild := strings.CutSuffix(rule, "*")
		switch {
		case id.IsZero():
		case rule == "*" && id.Path() != "",
			wild && prefix != "" && strings.HasPrefix(id.String(), prefix),
			!wild && id.String() == rule:
			return true
		}
	}
	return false
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
		{spiffe.AllowPathPrefix(home, "/ns/*"), "only letters"},
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
