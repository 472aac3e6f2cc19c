package spiffe_test

import (
	"cmp"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
)

func TestParsePolicy(t *testing.T) {
	t.Parallel()
	td := webID.TrustDomain()
	other := spiffe.MustParseTrustDomain("other.test")
	for _, c := range []struct {
		text string
		want spiffe.Policy
	}{
		{"*", spiffe.AllowAnyPeer()},
		{"spiffe://example.org", spiffe.AllowIDs(td.ID())},
		{webID.String(), spiffe.AllowIDs(webID)},
		{"spiffe://example.org/*", spiffe.AllowMembersOf(td)},
		{"spiffe://example.org/ns/prod/*", spiffe.AllowPathPrefix(td, "/ns/prod")},
		{"spiffe://example.org/*, spiffe://other.test/*", spiffe.AllowMembersOf(td, other)},
		{"*, spiffe://other.test", spiffe.AnyOf(spiffe.AllowAnyPeer(), spiffe.AllowIDs(other.ID()))},
		{longID, spiffe.AllowIDs(spiffe.MustParseID(longID))},
		{longID + "/*", spiffe.AllowPathPrefix(td, spiffe.MustParseID(longID).Path())},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		require.NoError(t, err, c.text)
		assert.Equal(t, c.want.String(), p.String())
		assert.Equal(t, c.text, p.String())
		for _, id := range []spiffe.ID{webID, td.ID(), other.ID(), spiffe.MustParseID("spiffe://other.test/a")} {
			assert.Equal(t, c.want.Allows(id), p.Allows(id), "%s: %s", c.text, id)
		}
	}

	p, err := spiffe.ParsePolicy("spiffe://other.test/*, spiffe://example.org/web")
	require.NoError(t, err, "any order")
	assert.Equal(t, "spiffe://example.org/web, spiffe://other.test/*", p.String())

	many := spiffe.AllowIDs(manyIDs(t, 10_000)...)
	p, err = spiffe.ParsePolicy(many.String())
	require.NoError(t, err)
	assert.Equal(t, many.String(), p.String())
}

func TestParsePolicyRefuses(t *testing.T) {
	t.Parallel()
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
		{"* ", 1, "", "white space after the last rule is not allowed; trim the text"},
		{"*\n", 1, "", "white space after the last rule is not allowed; trim the text"},
		{"*\r\nspiffe://a", 0, "ID-2", "must begin with"},
		{"*,\tspiffe://a", 2, "", "a space must follow the comma, or a line break"},
		{"*,\n\nspiffe://a", 3, "", "line 2: white space is not allowed here"},
		{"*,\n spiffe://a", 3, "", "line 2: white space is not allowed here"},
		{"nobody", 0, "ID-2", "must begin with \"spiffe://\", in lower case, or be the name of a set that is defined before"},
		{"**", 0, "ID-2", "must begin with"},
		{"/*", 0, "ID-2", "must begin with"},
		{"spiffe://a/b, spiffe://a/*, spiffe://a/b", 28, "", "the rule occurs twice"},
		{"spiffe://*", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*/web", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*/*", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://*.test/web", 9, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe://a*/web/*", 10, "ID-9", "a star cannot stand in the trust domain"},
		{"spiffe:///*", 9, "ID-3", "the trust domain name is empty"},
		{"*/web", 0, "ID-2", "must begin with"},
		{"spiffe://a/ns/x*/sa", 15, "ID-19", "or a star as the whole of it"},
		{"spiffe://a/ns/*x/sa", 14, "ID-19", "or a star as the whole of it"},
		{"spiffe://a/ns/**/sa", 14, "ID-19", "or a star as the whole of it"},
		{"spiffe://a/*/b*", 14, "ID-19", "or a star as the whole of it"},
		{"spiffe://a/*/b**", 14, "ID-19", "or a star as the whole of it"},
		{"spiffe://a/*/", 12, "ID-18", "a trailing slash"},
		{"spiffe://a/*//*", 12, "ID-18", "a trailing slash"},
		{"spiffe://a/*//b", 13, "ID-16", "an empty path segment"},
		{"spiffe://a//*/b", 11, "ID-16", "an empty path segment"},
		{"spiffe://a/*/../b", 13, "ID-17", "are not allowed"},
		{"spiffe://A/*/b", 9, "ID-8", "upper case"},
		{"spiffe:///*/b", 9, "ID-3", "the trust domain name is empty"},
		{"spiffe://a/*/b?", 14, "ID-4", "a query"},
		{"spiffe://a" + strings.Repeat("/a", 64) + "/*/b", 139, "", "a star can stand in the first 64 path segments only"},
		{"*, *", 3, "", "the rule occurs twice"},
		{"spiffe://a/*/b, spiffe://a/*/b", 16, "", "the rule occurs twice"},

		{"* except", 1, "", "after a rule comes"},
		{"* except ", 9, "", "a rule is missing"},
		{" except *", 0, "", "white space is not allowed here"},
		{"except *", 0, "ID-2", "must begin with"},
		{"except", 0, "ID-2", "must begin with"},
		{"* Except spiffe://a", 1, "", "after a rule comes"},
		{"*  except spiffe://a", 1, "", "after a rule comes"},
		{"*\nexcept spiffe://a", 1, "", "after a rule comes"},
		{"* except  spiffe://a", 9, "", "white space is not allowed here"},
		{"*, except spiffe://a", 3, "ID-2", "must begin with"},
		{"* but spiffe://a", 1, "", "after a rule comes"},
		{"* except spiffe://a/b, spiffe://a/b", 23, "", "the rule occurs twice"},
		{"* except spiffe://a/b except spiffe://a/c", 22, "", `"except" occurs twice; write "; "`},
		{"* except *", 0, "", "the exceptions leave nothing of *"},
		{"spiffe://a, *; spiffe://a/b except spiffe://a/*", 15, "", "the exceptions leave nothing of spiffe://a/b"},
		{"spiffe://a/b, spiffe://a/c/* except spiffe://a/*", 0, "", "the exceptions leave nothing of"},
		{"spiffe://a/*/c/* except spiffe://a/*/*", 0, "", "the exceptions leave nothing of"},
		{"spiffe://a except spiffe://a", 0, "", "the exceptions leave nothing of"},

		{";", 0, "", "a rule is missing"},
		{"*;", 2, "", "a space must follow the semicolon"},
		{"*; ", 3, "", "a rule is missing"},
		{"*;*", 2, "", "a space must follow the semicolon"},
		{"*;; *", 2, "", "a space must follow the semicolon"},
		{"*; ; *", 3, "", "a rule is missing"},
		{"*\nspiffe://a", 1, "", "after a rule comes"},
		{strings.Repeat("*; ", 1024) + "*", 3072, "", "more than 1024 parts"},

		{"a = ", 4, "", "a rule is missing"},
		{"a = spiffe://a", 14, "", "rules are missing after the sets"},
		{"a = spiffe://a; ", 16, "", "a rule is missing"},
		{" = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{"1a = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{"a.b = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{"* = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{"spiffe://a/b = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{strings.Repeat("a", 64) + " = spiffe://a; *", 0, "", "the name of a set begins with a letter"},
		{"except = spiffe://a; *", 0, "", "a set cannot have this name"},
		{"a= spiffe://a; *", 0, "", `a set is defined as "name = rules"`},
		{"a =spiffe://a; *", 0, "", `a set is defined as "name = rules"`},
		{"a=spiffe://a; *", 0, "", `a set is defined as "name = rules"`},
		{"a = spiffe://a; a = spiffe://a; a", 16, "", "the set is defined twice"},
		{"a = spiffe://a, b = spiffe://b; a", 16, "", `a set is defined at the start of a part; write "; " before it`},
		{"a = b = spiffe://b; a", 4, "", "a set is defined at the start of a part"},
		{"a = * except spiffe://a; a", 6, "", "a set has no exceptions"},
		{"a = a; a", 4, "ID-2", "the name of a set that is defined before"},
		{"a = b; b = *; a", 4, "ID-2", "the name of a set that is defined before"},
		{"b; b = *", 0, "ID-2", "the name of a set that is defined before"},
		{"A = *; a", 7, "ID-2", "the name of a set that is defined before"},
		{"a = *; a, a", 10, "", "the set occurs twice"},
		{"a = *; a/*", 7, "ID-2", "must begin with"},
		{"a = spiffe://a/b; a except a", 18, "", "the exceptions leave nothing of spiffe://a/b"},
		{"a = spiffe://a/b;\na, spiffe://c,\nspiffe://C", 42, "ID-8", "line 3: upper case"},
		{"spiffe://a/b*", 12, "ID-19", "only letters"},
		{"spiffe://a/b/**", 13, "ID-19", "only letters"},
		{"spiffe://a/b/", 12, "ID-18", "a trailing slash"},
		{"spiffe://a//*", 10, "ID-18", "a trailing slash"},
		{"spiffe://a/b/../*", 13, "ID-17", "are not allowed"},
		{"spiffe://a/b, spiffe://A/b", 23, "ID-8", "upper case"},
		{"spiffe://a/b ,spiffe://a/c", 12, "", "after a rule comes"},
		{"spiffe://a/b|spiffe://a/c", 12, "ID-19", "only letters"},
		{longID + "x", 2048, "ID-21", "longer than 2048"},
		{"*, " + longID + "x/*", 2051, "ID-21", "longer than 2048"},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		assert.True(t, p.IsZero(), c.text)
		e, ok := errors.AsType[*spiffe.ParseError](err)
		require.True(t, ok, "%.40q: %v", c.text, err)
		assert.Equal(t, c.offset, e.Offset, "%.40q: %v", c.text, err)
		assert.Contains(t, e.Reason, c.reason, "%.40q", c.text)
		assert.Regexp(t, fmt.Sprintf("^spiffe: invalid policy( \".*\"…?)? at byte %d: ", c.offset), err.Error())
		assert.Less(t, len(err.Error()), 512)
		assert.Equal(t, c.rule, e.Rule, "%.40q", c.text)

		// What is refused changes nothing.
		q := spiffe.AllowIDs(webID)
		assert.Equal(t, err, q.UnmarshalText([]byte(c.text)))
		assert.True(t, q.Allows(webID))
	}
	_, err := spiffe.ParsePolicy(strings.Repeat("*", 1<<20+1))
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// TestPolicyLimits: what makes a policy slow, or larger than its text, is refused, and what is at the limit
// is not.
func TestPolicyLimits(t *testing.T) {
	t.Parallel()
	stars := func(n int) string { // the star in n different places
		var rules []string
		for i := range n {
			rules = append(rules, "spiffe://a"+strings.Repeat("/a", i)+"/*/b")
		}
		return strings.Join(rules, ", ")
	}
	exceptions := func(n int) string { // n different lists
		var parts []string
		for i := range n {
			parts = append(parts, fmt.Sprintf("spiffe://a/%d/* except spiffe://a/%d/b", i, i))
		}
		return strings.Join(parts, "; ")
	}
	for text, why := range map[string]string{
		stars(16): "", stars(17): "stars in more than 16 different places",
		stars(9) + "; spiffe://a/* except " + stars(8): "stars in more than 16 different places",
		exceptions(16): "", exceptions(17): "17 different lists of exceptions, the limit is 16",
		strings.Repeat("*; ", 1023) + "*":                            "",
		"spiffe://a" + strings.Repeat("/a", 63) + "/*/b":             "",
		"spiffe://a" + strings.Repeat("/*", 64) + "/b":               "",
		strings.Repeat("a", 63) + " = *; " + strings.Repeat("a", 63): "",
	} {
		p, err := spiffe.ParsePolicy(text)
		if why != "" {
			assert.ErrorContains(t, err, why)
			continue
		}
		require.NoError(t, err)
		again, err := spiffe.ParsePolicy(p.String())
		require.NoError(t, err)
		assert.Equal(t, p.String(), again.String())
	}
	at16, err := spiffe.ParsePolicy(stars(16))
	require.NoError(t, err)
	more, err := spiffe.ParsePolicy("spiffe://a/*/b/*/c")
	require.NoError(t, err)
	assert.ErrorContains(t, spiffe.AnyOf(at16, more).Check(webID), "stars in more than 16 different places")
	assert.False(t, spiffe.AnyOf(at16, more).Allows(spiffe.MustParseID("spiffe://a/x/b")))

	// Sets that name sets, and one that is named often.
	var b strings.Builder
	b.WriteString("s0 = " + spiffe.AllowIDs(manyIDs(t, 10_000)...).String())
	for i := range 1000 {
		fmt.Fprintf(&b, "; s%d = s%d", i+1, i)
	}
	_, err = spiffe.ParsePolicy(b.String() + "; s1000")
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
	text := strings.Repeat("s0 except spiffe://example.org/a; ", 1000)
	_, err = spiffe.ParsePolicy(b.String()[:strings.Index(b.String(), ";")+2] + text + "*")
	assert.ErrorIs(t, err, spiffe.ErrTooLarge)
}

// BenchmarkParsePolicyHostile reads texts of 1 MiB that are made to be slow.
func BenchmarkParsePolicyHostile(b *testing.B) {
	fill := func(rule func(i int) string) string {
		var t strings.Builder
		for i := 0; t.Len() < 1<<20-5000; i++ {
			t.WriteString(rule(i))
		}
		return t.String()
	}
	set := "s = " + spiffe.AllowIDs(manyIDs(b, 10_000)...).String() + "; "
	texts := map[string]string{
		"ids":   fill(func(i int) string { return fmt.Sprintf("spiffe://a/%x, ", i) }) + "*",
		"stars": fill(func(i int) string { return fmt.Sprintf("spiffe://a/*/%x, ", i) }) + "*",
		"places": fill(func(i int) string {
			return "spiffe://a" + strings.NewReplacer("0", "/a", "1", "/*").Replace(fmt.Sprintf("%b", i)) + "/b, "
		}) + "*",
		"deep":   fill(func(i int) string { return fmt.Sprintf("spiffe://a/%d%s/*, ", i, strings.Repeat("/a", 1000)) }) + "*",
		"except": "* except " + fill(func(i int) string { return fmt.Sprintf("spiffe://a/%x, ", i) }) + "spiffe://a",
		"dead":   fill(func(i int) string { return fmt.Sprintf("spiffe://a/%x, ", i) }) + "spiffe://a/z except spiffe://a/*",
		"parts":  strings.Repeat("*; ", 1000) + fill(func(i int) string { return fmt.Sprintf("spiffe://a/%x, ", i) }) + "*",
		"merge": fill(func(i int) string {
			return fmt.Sprintf("spiffe://a/%x, spiffe://a/%d%s; ", i, i, strings.Repeat("/a", 490))
		}) + "*",
		"set":      set + strings.Repeat("s; ", 1000) + "s",
		"sets":     fill(func(i int) string { return fmt.Sprintf("s%d = spiffe://a/%d; ", i, i) }) + "*",
		"one-rule": "spiffe://a" + strings.Repeat("/*", 1<<19-100),
	}
	for _, name := range slices.Sorted(maps.Keys(texts)) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, _ = spiffe.ParsePolicy(texts[name])
			}
		})
	}
}

// TestPolicyLanguage shows what texts mean, and their canonical form.
func TestPolicyLanguage(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text, canonical string // canonical is empty if it is text
		allows, refuses []string
	}{
		{
			"spiffe://a/ns/*/sa/web", "",
			[]string{"spiffe://a/ns/prod/sa/web", "spiffe://a/ns/ns/sa/web"},
			[]string{"spiffe://a/ns/sa/web", "spiffe://a/ns/x/y/sa/web", "spiffe://a/ns/x/sa/web/z", "spiffe://a/ns/x/sa/Web", "spiffe://a/ns/x/sa", "spiffe://b/ns/x/sa/web", "spiffe://a"},
		},
		{
			"spiffe://a/*/b/*", "",
			[]string{"spiffe://a/x/b/c", "spiffe://a/x/b/c/d", "spiffe://a/b/b/b"},
			[]string{"spiffe://a/x/b", "spiffe://a/b/c", "spiffe://a/x/y/b/c"},
		},
		{
			"spiffe://a/*/*", "",
			[]string{"spiffe://a/x/y", "spiffe://a/x/y/z"},
			[]string{"spiffe://a/x", "spiffe://a", "spiffe://aa/x/y"},
		},
		{
			"spiffe://a/*/c, spiffe://a/b/*/d", "",
			[]string{"spiffe://a/b/c", "spiffe://a/x/c", "spiffe://a/b/x/d"},
			[]string{"spiffe://a/b/c/e", "spiffe://a/x/b/d", "spiffe://a/b/d"},
		},
		{
			"spiffe://a/* except spiffe://a/dev/*, spiffe://a/ns/*/sa/x", "",
			[]string{"spiffe://a/b", "spiffe://a/dev", "spiffe://a/ns/p/sa/y"},
			[]string{"spiffe://a/dev/b", "spiffe://a/ns/p/sa/x", "spiffe://a", "spiffe://b/b"},
		},
		{
			"* except spiffe://a/*, spiffe://b", "",
			[]string{"spiffe://b/a", "spiffe://c/a"},
			[]string{"spiffe://a/b", "spiffe://a", "spiffe://b", "spiffe://c"},
		},
		{
			"spiffe://a/* except spiffe://a/dev/*; spiffe://a/dev/debugger",
			"spiffe://a/dev/debugger; spiffe://a/* except spiffe://a/dev/*",
			[]string{"spiffe://a/dev/debugger", "spiffe://a/x"},
			[]string{"spiffe://a/dev/x"},
		},
		{
			"spiffe://b/* except spiffe://b/x;\nspiffe://a/* except spiffe://a/x; spiffe://c/* except spiffe://b/x",
			"spiffe://a/* except spiffe://a/x; spiffe://b/*, spiffe://c/* except spiffe://b/x",
			[]string{"spiffe://a/b", "spiffe://c/x"},
			[]string{"spiffe://a/x", "spiffe://b/x"},
		},
		{
			"spiffe://b; spiffe://a; spiffe://b, spiffe://c", "spiffe://a, spiffe://b, spiffe://c",
			[]string{"spiffe://a", "spiffe://b", "spiffe://c"},
			[]string{"spiffe://a/b"},
		},
		{
			"prod = spiffe://a/prod/*,\nspiffe://a/canary/*;\nfuzzers = spiffe://a/*/fuzzer, spiffe://a/fuzz/*;\nprod, spiffe://b/gateway except fuzzers",
			"spiffe://a/canary/*, spiffe://a/prod/*, spiffe://b/gateway except spiffe://a/*/fuzzer, spiffe://a/fuzz/*",
			[]string{"spiffe://a/prod/x", "spiffe://a/canary/x", "spiffe://b/gateway"},
			[]string{"spiffe://a/prod/fuzzer", "spiffe://a/test/x", "spiffe://b/gateway/x"},
		},
		{
			"a = spiffe://a/x; unused = *; Both-2_ = a, spiffe://b/x; Both-2_, a, spiffe://a/x", "spiffe://a/x, spiffe://b/x",
			[]string{"spiffe://a/x", "spiffe://b/x"},
			[]string{"spiffe://c/x"},
		},
		// A rule that is also the other's prefix, and stars that shadow one another.
		{
			"spiffe://a/*/*/c, spiffe://a/*/b, spiffe://a/x/*/*", "",
			[]string{"spiffe://a/1/2/c", "spiffe://a/1/b", "spiffe://a/x/1/2", "spiffe://a/x/1/c"},
			[]string{"spiffe://a/x/1", "spiffe://a/1/2/d", "spiffe://a/1/b/d"},
		},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		require.NoError(t, err, c.text)
		assert.Equal(t, cmp.Or(c.canonical, c.text), p.String())
		again, err := spiffe.ParsePolicy(p.String())
		require.NoError(t, err)
		assert.Equal(t, p.String(), again.String())
		for _, name := range append(c.allows, c.refuses...) {
			id := spiffe.MustParseID(name)
			want := slices.Contains(c.allows, name)
			assert.Equal(t, want, p.Allows(id), "%s: %s", c.text, name)
			assert.Equal(t, want, again.Allows(id), "%s: %s", p, name)
			assert.Equal(t, want, slowAllows(c.text, id), "%s: %s", c.text, name)
			assert.Equal(t, want, p.Check(id) == nil)
		}
	}
}

// TestPolicyReference compares random policies and what is made of them with the slow reference.
func TestPolicyReference(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	rnd := rand.New(rand.NewPCG(11, 5))
	path := func(words ...string) string {
		var b strings.Builder
		for range 1 + rnd.IntN(4) {
			b.WriteString("/" + words[rnd.IntN(len(words))])
		}
		return b.String()
	}
	list := func(upTo int) string {
		var rules []string
		for range 1 + rnd.IntN(upTo) {
			rule := "spiffe://" + []string{"a", "b"}[rnd.IntN(2)] + path("a", "b", "c", "*", "*")
			switch rnd.IntN(12) {
			case 0:
				rule = "*"
			case 1:
				rule = "spiffe://a"
			}
			if !slices.Contains(rules, rule) {
				rules = append(rules, rule)
			}
		}
		return strings.Join(rules, ", ")
	}
	policy := func() (spiffe.Policy, string) {
		for {
			var parts []string
			for range 1 + rnd.IntN(3) {
				part := list(8)
				if rnd.IntN(2) == 0 {
					part += " except " + list(3)
				}
				parts = append(parts, part)
			}
			text := strings.Join(parts, "; ")
			if p, err := spiffe.ParsePolicy(text); err == nil {
				return p, text
			} else if reason := err.Error(); !strings.Contains(reason, "leave nothing") && !strings.Contains(reason, "different places") {
				t.Fatalf("%s: %v", text, err)
			}
		}
	}
	allowed, usable := 0, 0
	for range rounds.Of(100) {
		p, textP := policy()
		q, textQ := policy()
		either, without := spiffe.AnyOf(p, q), p.Except(q)
		aliased := p.WithAliases(spiffe.MustParseTrustDomain("a"), spiffe.MustParseTrustDomain("alias"))
		for range 40 {
			text := "spiffe://" + []string{"a", "b", "c"}[rnd.IntN(3)] + path("a", "b", "c", "d")
			if rnd.IntN(20) == 0 {
				text = "spiffe://a"
			}
			id := spiffe.MustParseID(text)
			wantP, wantQ := slowAllows(textP, id), slowAllows(textQ, id)
			require.Equal(t, wantP, p.Allows(id), "%s: %s", textP, id)
			require.Equal(t, wantP, slowAllows(p.String(), id), "%s: %s", p, id)
			if wantP {
				allowed++
			}
			if _, err := either.MarshalText(); err == nil {
				require.Equal(t, wantP || wantQ, either.Allows(id), "any of %s; %s: %s", textP, textQ, id)
			} else {
				require.False(t, either.Allows(id))
			}
			if _, err := without.MarshalText(); err == nil {
				usable++
				require.Equal(t, wantP && !wantQ, without.Allows(id), "%s without %s: %s", textP, textQ, id)
			} else {
				require.False(t, without.Allows(id))
			}
			if _, err := aliased.MarshalText(); err == nil && strings.HasPrefix(text, "spiffe://a") {
				twin := spiffe.MustParseID("spiffe://alias" + id.Path())
				require.Equal(t, wantP, aliased.Allows(twin), "%s: %s", aliased, twin)
				require.Equal(t, wantP, aliased.Allows(id), "%s: %s", aliased, id)
			}
			rule, err := p.Explain(id)
			require.Equal(t, wantP, err == nil, "%s: %s: %v", textP, id, err)
			require.True(t, err != nil || slowMatch(rule, id), "%s: %s: %s", textP, id, rule)
		}
		for _, made := range []spiffe.Policy{p, q, either, without, aliased} {
			if text, err := made.MarshalText(); err == nil {
				again, err := spiffe.ParsePolicy(string(text))
				require.NoError(t, err, "%s", text)
				require.Equal(t, string(text), again.String())
			}
		}
	}
	assert.Greater(t, allowed, rounds.Of(500))
	assert.Greater(t, usable, rounds.Of(250))
}

func TestPolicyWarnings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		want []string
	}{
		{"*", nil},
		{"spiffe://a/*, spiffe://a/ns/prod/*, spiffe://a/ns/prod/sa/web, spiffe://a/web, spiffe://a/ns/*/sa/web, spiffe://a/nsx/b", nil},
		{"spiffe://a/ns/prod/sa/web/extra", nil},
		{"spiffe://example.org/ns/prod", []string{`the rule "spiffe://example.org/ns/prod" is one exact ID; write "spiffe://example.org/ns/prod/*" for what is below it`}},
		{"spiffe://a, spiffe://a/ns, spiffe://a/ns/*/sa", []string{
			`the rule "spiffe://a" is one exact ID; write "spiffe://a/*" for what is below it`,
			`the rule "spiffe://a/ns" is one exact ID; write "spiffe://a/ns/*" for what is below it`,
			`the rule "spiffe://a/ns/*/sa" is one exact ID; write "spiffe://a/ns/*/sa/*" for what is below it`,
		}},
		{"spiffe://a/* except spiffe://a/ns/dev", []string{`the exception "spiffe://a/ns/dev" is one exact ID; write "spiffe://a/ns/dev/*" for what is below it`}},
		{"spiffe://a/* except spiffe://b/*, spiffe://a/x", []string{`the exception "spiffe://b/*" takes nothing away: no rule before it is about its trust domain; correct or remove it`}},
		{"* except spiffe://b/*", nil},
		{"dev = spiffe://a/dev/*; spiffe://a/x, spiffe://a/dev/web except dev", []string{`the rule "spiffe://a/dev/web" allows nothing: an exception covers it; remove one of them`}},
		{"*, spiffe://a except *", []string{
			`the rule "*" allows nothing: an exception covers it; remove one of them`,
			`the rule "spiffe://a" is one exact ID; write "spiffe://a/*" for what is below it`,
		}},
	} {
		p, err := spiffe.ParsePolicy(c.text)
		require.NoError(t, err, c.text)
		assert.Equal(t, c.want, p.Warnings(), c.text)
	}
	assert.Empty(t, spiffe.Policy{}.Warnings())
	assert.Empty(t, spiffe.AllowIDs().Warnings())
	for _, w := range spiffe.AllowIDs(spiffe.MustParseID("spiffe://a/ns/" + strings.Repeat("a", 2000))).Warnings() {
		assert.Less(t, len(w), 1200)
	}
}

func TestPolicyText(t *testing.T) {
	t.Parallel()
	type config struct {
		Allow spiffe.Policy `json:",omitzero"`
	}
	in := config{spiffe.AllowIDs(webID)}
	doc, err := json.Marshal(in)
	require.NoError(t, err)
	assert.JSONEq(t, `{"Allow":"spiffe://example.org/ns/prod/sa/web"}`, string(doc))
	var out config
	require.NoError(t, json.Unmarshal(doc, &out))
	assert.Equal(t, in.Allow.String(), out.Allow.String())
	doc, err = json.Marshal(config{})
	require.NoError(t, err)
	assert.Equal(t, "{}", string(doc))

	_, err = spiffe.Policy{}.MarshalText()
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = spiffe.AllowIDs().MarshalText()
	assert.EqualError(t, err, "spiffe: the policy is not valid: AllowIDs needs at least one ID")
	_, err = spiffe.AllowIDs(manyIDs(t, 40_000)...).MarshalText()
	assert.ErrorIs(t, err, spiffe.ErrTooLarge, "what is written can be read")
}

func TestPolicyExplain(t *testing.T) {
	t.Parallel()
	p, err := spiffe.ParsePolicy("spiffe://b.test, spiffe://b.test/ns/prod/*, spiffe://b.test/ns/prod/sa/*, spiffe://b.test/ns/prod/sa/web, spiffe://c.test/*, spiffe://d.test/only")
	require.NoError(t, err)
	any := spiffe.AnyOf(p, spiffe.AllowAnyPeer())
	for _, c := range []struct {
		policy spiffe.Policy
		id     string
		rule   string
		err    string
	}{
		{p, "spiffe://b.test", "spiffe://b.test", ""},
		{p, "spiffe://b.test/ns/prod/sa/web", "spiffe://b.test/ns/prod/sa/web", ""},
		{p, "spiffe://b.test/ns/prod/sa/db", "spiffe://b.test/ns/prod/sa/*", ""},
		{p, "spiffe://b.test/ns/prod/other", "spiffe://b.test/ns/prod/*", ""},
		{p, "spiffe://c.test/a/b/c", "spiffe://c.test/*", ""},
		{any, "spiffe://c.test/a/b/c", "spiffe://c.test/*", ""},
		{any, "spiffe://b.test/else", "*", ""},
		{any, "spiffe://e.test/a", "*", ""},
		{any, "spiffe://e.test", "", `"spiffe://e.test": not allowed by policy: it has no path, so it names a trust domain; only a rule that is this ID allows it`},
		{p, "spiffe://c.test", "", `"spiffe://c.test": not allowed by policy: it has no path, so it names a trust domain; only a rule that is this ID allows it`},
		{p, "spiffe://e.test", "", `"spiffe://e.test": not allowed by policy: no rule is about the trust domain "e.test"`},
		{p, "spiffe://b.test.evil/ns/prod/sa/web", "", `"spiffe://b.test.evil/ns/prod/sa/web": not allowed by policy: no rule is about the trust domain "b.test.evil"`},
		{p, "spiffe://d.test/other", "", `"spiffe://d.test/other": not allowed by policy: the one rule about its trust domain is "spiffe://d.test/only"`},
		{p, "spiffe://b.test/ns/production/sa/web", "", `"spiffe://b.test/ns/production/sa/web": not allowed by policy: none of the 4 rules about its trust domain; the closest is "spiffe://b.test/ns/prod/*"`},
		{p, "spiffe://b.test/ns/prod/sa", "spiffe://b.test/ns/prod/*", ""},
		{spiffe.Policy{}, "spiffe://b.test/a", "", `"spiffe://b.test/a": not allowed by policy: the policy is zero; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer, or call Set of the LivePolicy`},
		{spiffe.AllowIDs(), "spiffe://b.test/a", "", `"spiffe://b.test/a": not allowed by policy: the policy is not valid: AllowIDs needs at least one ID`},
	} {
		id := spiffe.MustParseID(c.id)
		rule, err := c.policy.Explain(id)
		assert.Equal(t, c.rule, rule)
		assert.Equal(t, c.policy.Allows(id), err == nil)
		if err != nil {
			assert.ErrorIs(t, err, spiffe.ErrDenied)
			assert.EqualError(t, err, "spiffe: "+c.err)
		}
	}
	text := "prod = spiffe://a/prod/*; spiffe://a/*/sa/*, spiffe://a/x/sa/web, spiffe://a/y/z, prod except spiffe://a/*/*/debug; spiffe://b/* except spiffe://b/dev/*, spiffe://b/dev/x"
	p, err = spiffe.ParsePolicy(text)
	require.NoError(t, err)
	for _, c := range [][3]string{
		{"spiffe://a/x/sa/web", "spiffe://a/x/sa/web"},
		{"spiffe://a/z/sa/web", "spiffe://a/*/sa/*"},
		{"spiffe://a/prod/x", `spiffe://a/prod/* (of the set "prod")`},
		{"spiffe://a/prod/sa/x", "spiffe://a/*/sa/*"},
		{"spiffe://b/x", "spiffe://b/*"},
		{"spiffe://a/prod/x/debug", "", `the exception "spiffe://a/*/*/debug" takes it away from "spiffe://a/prod/*" (of the set "prod")`},
		{"spiffe://b/dev/x", "", `the exception "spiffe://b/dev/x" takes it away from "spiffe://b/*"`},
		{"spiffe://a/x/sb", "", `none of the 4 rules about its trust domain; the closest is "spiffe://a/*/sa/*"`},
		{"spiffe://a/q/s", "", `none of the 4 rules about its trust domain; the closest is "spiffe://a/*/sa/*"`},
		{"spiffe://a/y/z/1", "", `none of the 4 rules about its trust domain; the closest is "spiffe://a/y/z": "spiffe://a/y/z" is one exact ID; write "spiffe://a/y/z/*" for what is below it`},
		{"spiffe://b", "", "it has no path, so it names a trust domain; only a rule that is this ID allows it"},
	} {
		rule, err := p.Explain(spiffe.MustParseID(c[0]))
		assert.Equal(t, c[1], rule)
		if c[2] == "" {
			assert.NoError(t, err)
		} else {
			assert.EqualError(t, err, fmt.Sprintf("spiffe: %q: not allowed by policy: %s", c[0], c[2]))
		}
	}

	// What looks like a prefix is one ID; the error that a log has says so, too.
	p, err = spiffe.ParsePolicy("spiffe://example.org/ns/prod")
	require.NoError(t, err)
	hint := `"spiffe://example.org/ns/prod" is one exact ID; write "spiffe://example.org/ns/prod/*" for what is below it`
	_, err = p.Explain(webID)
	assert.EqualError(t, err, `spiffe: "spiffe://example.org/ns/prod/sa/web": not allowed by policy: the one rule about its trust domain is "spiffe://example.org/ns/prod": `+hint)
	assert.EqualError(t, p.Check(webID), `spiffe: "spiffe://example.org/ns/prod/sa/web": not allowed by policy, which allows spiffe://example.org/ns/prod; `+hint)
	assert.NotContains(t, p.Check(spiffe.MustParseID("spiffe://example.org/ns/production")).Error(), "exact")
	assert.ErrorContains(t, spiffe.AllowIDs(webID.TrustDomain().ID()).Check(webID), `"spiffe://example.org" is one exact ID; write "spiffe://example.org/*" for what is below it`)

	p = spiffe.AllowIDs(webID).WithAliases(webID.TrustDomain(), spiffe.MustParseTrustDomain("old.test"))
	rule, err := p.Explain(spiffe.MustParseID("spiffe://old.test/ns/prod/sa/web"))
	require.NoError(t, err)
	assert.Equal(t, `spiffe://old.test/ns/prod/sa/web (by an alias of "example.org")`, rule)
	rule, err = p.Explain(webID)
	require.NoError(t, err)
	assert.Equal(t, webID.String(), rule)

	_, err = p.Explain(spiffe.ID{})
	assert.EqualError(t, err, `spiffe: "invalid SPIFFE ID": not allowed by policy: the zero ID is never allowed`)
	_, err = spiffe.AllowIDs(spiffe.MustParseID(longID)).Explain(spiffe.MustParseID(segmentsID))
	assert.Less(t, len(err.Error()), 1200)
}

// TestAliases shows that an alias changes which names a policy allows, and not which authorities are trusted.
func TestAliases(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ID-28", "X5-31", "SVID-1", "IST-1.2-1", "IST-1.2-2")
	td, old, older := webID.TrustDomain(), spiffe.MustParseTrustDomain("old.test"), spiffe.MustParseTrustDomain("older.test")
	base := spiffe.AnyOf(
		spiffe.AllowIDs(webID, td.ID()), spiffe.AllowPathPrefix(td, "/ns/test"),
		spiffe.AllowMembersOf(spiffe.MustParseTrustDomain("example.org.evil")), spiffe.AllowIDs(spiffe.MustParseID("spiffe://old.test/own")),
	)
	before := base.String()
	p := base.WithAliases(td, old)
	assert.Equal(t, "spiffe://example.org, spiffe://example.org.evil/*, spiffe://example.org/ns/prod/sa/web, spiffe://example.org/ns/test/*, "+
		"spiffe://old.test, spiffe://old.test/ns/prod/sa/web, spiffe://old.test/ns/test/*, spiffe://old.test/own", p.String())
	assert.Equal(t, before, base.String(), "a policy never changes")
	back, err := spiffe.ParsePolicy(p.String())
	require.NoError(t, err)
	assert.Equal(t, p.String(), back.String())

	assert.Equal(t, "spiffe://example.org/*, spiffe://old.test/*, spiffe://older.test/*", spiffe.AllowMembersOf(td).WithAliases(td, old, older, old).String())
	assert.Equal(t, "spiffe://example.org/*, spiffe://old.test/*", spiffe.AllowMembersOf(td).WithAliases(td, old).WithAliases(td, old).String())
	assert.False(t, spiffe.AllowMembersOf(td, old).WithAliases(old, older).Allows(spiffe.MustParseID("spiffe://older.test.evil/a")))

	// An exception is repeated with the rule, so that the alias is no way around it.
	narrow := spiffe.AllowMembersOf(td).Except(spiffe.AllowPathPrefix(td, "/ns/dev")).WithAliases(td, old)
	assert.Equal(t, "spiffe://example.org/*, spiffe://old.test/* except spiffe://example.org/ns/dev/*, spiffe://old.test/ns/dev/*", narrow.String())
	assert.False(t, narrow.Allows(spiffe.MustParseID("spiffe://old.test/ns/dev/sa/x")))
	assert.Equal(t, "* except spiffe://example.org/ns/dev/*, spiffe://old.test/ns/dev/*",
		spiffe.AllowAnyPeer().Except(spiffe.AllowPathPrefix(td, "/ns/dev")).WithAliases(td, old).String())

	long := spiffe.MustParseTrustDomain(strings.Repeat("a", 255))
	for _, c := range []struct {
		policy spiffe.Policy
		why    string
	}{
		{spiffe.Policy{}.WithAliases(td, old), "the zero Policy"},
		{spiffe.AllowIDs().WithAliases(td, old), "AllowIDs needs at least one ID"},
		{base.WithAliases(spiffe.TrustDomain{}, old), "the zero TrustDomain"},
		{base.WithAliases(td), "needs at least one alias"},
		{base.WithAliases(td, old, spiffe.TrustDomain{}), "the zero TrustDomain"},
		{base.WithAliases(td, td), "the trust domain itself"},
		{base.WithAliases(older, old), "finds no rule about the trust domain"},
		{spiffe.AllowAnyPeer().WithAliases(td, old), "finds no rule about the trust domain"},
		{spiffe.AllowIDs(spiffe.MustParseID(longID)).WithAliases(td, long), "more than 2048 bytes"},
	} {
		assert.ErrorContains(t, c.policy.Check(webID), c.why)
	}

	// A member of the alias needs the alias's own authority.
	home, alias := caSpec("ca1", "spiffe://example.org").issue(nil), caSpec("ca2", "spiffe://old.test").issue(nil)
	aliasWeb := "spiffe://old.test/ns/prod/sa/web"
	good := leafSpec(aliasWeb).issue(alias)
	v := func(bundles ...*spiffe.Bundle) *spiffe.Verifier {
		set, err := spiffe.NewBundleSet(bundles...)
		require.NoError(t, err)
		return verifierAt(t, now, set, spiffe.AllowIDs(webID).WithAliases(td, old))
	}
	both := v(bundleOf(t, "example.org", home.parse(t)), bundleOf(t, "old.test", alias.parse(t)))
	peer, err := both.VerifyChain([]*x509.Certificate{good.parse(t)}, spiffe.AnyRole)
	require.NoError(t, err)
	assert.Equal(t, aliasWeb, peer.ID().String(), "the ID that was proved, not the one in the rule")

	_, err = v(bundleOf(t, "example.org", home.parse(t))).VerifyChain([]*x509.Certificate{good.parse(t)}, spiffe.AnyRole)
	assert.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain, "no bundle of its own")
	_, err = both.VerifyChain([]*x509.Certificate{leafSpec(aliasWeb).issue(home).parse(t)}, spiffe.AnyRole)
	assert.ErrorContains(t, err, "unknown authority", "the home authority does not speak for the alias")
	_, err = both.VerifyChain([]*x509.Certificate{leafSpec(webID.String()).issue(alias).parse(t)}, spiffe.AnyRole)
	assert.ErrorContains(t, err, "unknown authority", "nor the alias's for home")
	_, err = both.VerifyChain([]*x509.Certificate{leafSpec("spiffe://old.test/other").issue(alias).parse(t)}, spiffe.AnyRole)
	assert.ErrorIs(t, err, spiffe.ErrDenied)
}

func TestLivePolicy(t *testing.T) {
	t.Parallel()
	var live spiffe.LivePolicy
	assert.True(t, live.Policy().IsZero())
	v, err := spiffe.NewVerifier(noBundles{}, &live, nil)
	require.NoError(t, err, "a source may have none yet")
	require.NotNil(t, v)
	_, err = spiffe.NewVerifier(noBundles{}, nil, nil)
	assert.EqualError(t, err, "spiffe: new verifier: no policy; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer")

	first := live.Changed()
	assert.Equal(t, first, live.Changed())
	require.NoError(t, live.Set(spiffe.AllowIDs(webID)))
	<-first
	assert.True(t, live.Policy().Allows(webID))

	second := live.Changed()
	assert.EqualError(t, live.Set(spiffe.AllowIDs()), "spiffe: set policy: the policy is not valid: AllowIDs needs at least one ID")
	assert.ErrorContains(t, live.Set(spiffe.Policy{}), "the policy is zero")
	assert.True(t, live.Policy().Allows(webID), "the one before stays")
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
				assert.False(t, live.Policy().IsZero())
			}
		})
	}
	wg.Wait()
	<-second
}

// TestPolicyTrial: a trial decides nothing, and counts each decision that would change.
func TestPolicyTrial(t *testing.T) {
	t.Parallel()
	td := webID.TrustDomain()
	db, dev := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/db"), spiffe.MustParseID("spiffe://example.org/ns/dev/sa/web")
	var live spiffe.LivePolicy

	// Without a policy in force.
	counts, err := live.Try(spiffe.AllowAnyPeer())
	require.NoError(t, err)
	assert.True(t, live.Policy().IsZero(), "what is tried is not in force")
	assert.False(t, live.Policy().Allows(webID))
	assert.ErrorContains(t, live.Policy().Check(webID), "the policy is zero")
	_, err = live.Policy().Explain(webID)
	assert.ErrorContains(t, err, "the policy is zero")
	_, err = live.Policy().MarshalText()
	assert.ErrorIs(t, err, spiffe.ErrZero)
	assert.Equal(t, "no peer", live.Policy().String())
	assert.ErrorContains(t, spiffe.AnyOf(live.Policy()).Check(webID), "AnyOf was given the zero Policy")
	assert.ErrorContains(t, live.Policy().WithAliases(td, td).Check(webID), "the zero Policy")
	assert.ErrorContains(t, live.Set(live.Policy()), "the policy is zero")
	assert.Empty(t, live.Policy().Warnings())
	assert.Equal(t, map[spiffe.ID]uint64{webID: 2}, counts().Allows)

	// With one.
	changed := live.Changed()
	require.NoError(t, live.Set(spiffe.AllowMembersOf(td).Except(spiffe.AllowIDs(db))))
	<-changed
	assert.Equal(t, map[spiffe.ID]uint64{webID: 2}, counts().Allows, "Set does not end it")
	next := spiffe.AllowPathPrefix(td, "/ns/prod")
	changed = live.Changed()
	before := counts
	counts, err = live.Try(next)
	require.NoError(t, err)
	select {
	case <-changed:
		t.Error("nothing has changed for connections")
	default:
	}
	got := counts()
	assert.Equal(t, next.String(), got.Policy.String())
	assert.Equal(t, spiffe.PolicyTrial{Policy: got.Policy, Refuses: map[spiffe.ID]uint64{}, Allows: map[spiffe.ID]uint64{}}, got, "from zero")
	for id, want := range map[spiffe.ID]bool{webID: true, dev: true, db: false, spiffe.MustParseID("spiffe://other.test/a"): false} {
		for range 3 {
			assert.Equal(t, want, live.Policy().Check(id) == nil, id)
		}
	}
	assert.False(t, live.Policy().Allows(spiffe.ID{}))
	got = counts()
	assert.EqualValues(t, 12, got.Decisions)
	assert.Equal(t, map[spiffe.ID]uint64{dev: 3}, got.Refuses)
	assert.Equal(t, map[spiffe.ID]uint64{db: 3}, got.Allows)
	assert.Zero(t, got.More)
	assert.False(t, got.Policy.Allows(dev))
	assert.Equal(t, got, counts(), "the policy of a report is not counted")
	clear(got.Refuses)
	assert.Len(t, counts().Refuses, 1, "the maps are the caller's")
	assert.Equal(t, map[spiffe.ID]uint64{webID: 2}, before().Allows, "the trial before has ended, and what it counted stays")

	// What is made of a policy with a trial has none, and neither has another LivePolicy.
	assert.True(t, spiffe.AnyOf(live.Policy(), spiffe.AllowIDs(db)).Allows(db))
	var other spiffe.LivePolicy
	require.NoError(t, other.Set(live.Policy()))
	assert.True(t, other.Policy().Allows(dev))
	others, err := other.Try(live.Policy())
	require.NoError(t, err)
	assert.True(t, other.Policy().Allows(dev))
	assert.EqualValues(t, 12, counts().Decisions)
	assert.EqualValues(t, 1, others().Decisions)

	// A mistake changes nothing; the zero Policy ends the trial.
	_, err = live.Try(spiffe.AllowIDs())
	assert.EqualError(t, err, "spiffe: try policy: the policy is not valid: AllowIDs needs at least one ID")
	assert.EqualValues(t, 12, counts().Decisions)
	none, err := live.Try(spiffe.Policy{})
	require.NoError(t, err)
	assert.True(t, live.Policy().Allows(dev))
	assert.Equal(t, spiffe.PolicyTrial{}, none())
	assert.EqualValues(t, 12, counts().Decisions, "it has ended")
}

// TestPolicyTrialOfVerifier: the peers of a verifier are counted, among them those that need an alias.
func TestPolicyTrialOfVerifier(t *testing.T) {
	t.Parallel()
	td, old := webID.TrustDomain(), spiffe.MustParseTrustDomain("old.test")
	home, alias := caSpec("ca1", "spiffe://example.org").issue(nil), caSpec("ca2", "spiffe://old.test").issue(nil)
	set, err := spiffe.NewBundleSet(bundleOf(t, "example.org", home.parse(t)), bundleOf(t, "old.test", alias.parse(t)))
	require.NoError(t, err)
	policy := spiffe.AllowMembersOf(td)
	var live spiffe.LivePolicy
	require.NoError(t, live.Set(policy.WithAliases(td, old)))
	counts, err := live.Try(policy)
	require.NoError(t, err)
	v, err := spiffe.NewVerifier(set, &live, &spiffe.VerifierOptions{Now: func() time.Time { return now }})
	require.NoError(t, err)
	renamed := spiffe.MustParseID("spiffe://old.test/db")
	for _, leaf := range []*x509.Certificate{leafSpec(webID.String()).issue(home).parse(t), leafSpec(renamed.String()).issue(alias).parse(t)} {
		for range 2 {
			_, err = v.VerifyChain([]*x509.Certificate{leaf}, spiffe.AnyRole)
			require.NoError(t, err)
		}
	}
	_, err = v.VerifyChain([]*x509.Certificate{leafSpec("spiffe://old.test/thief").issue(home).parse(t)}, spiffe.AnyRole)
	require.Error(t, err)
	got := counts()
	assert.EqualValues(t, 4, got.Decisions, "an ID that is not proved is not counted")
	assert.Equal(t, map[spiffe.ID]uint64{renamed: 2}, got.Refuses)
	assert.Empty(t, got.Allows)
}

// TestPolicyTrialBounds: many peers, from many goroutines, take a bounded memory, and none is lost from the counts.
func TestPolicyTrialBounds(t *testing.T) {
	t.Parallel()
	ids := manyIDs(t, 3000)
	other := spiffe.MustParseID("spiffe://other.test/a")
	var live spiffe.LivePolicy
	require.NoError(t, live.Set(spiffe.AllowMembersOf(webID.TrustDomain())))
	counts, err := live.Try(spiffe.AllowIDs(other))
	require.NoError(t, err)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i, id := range ids {
				assert.True(t, live.Policy().Allows(id))
				if i%100 == 0 {
					counts()
				}
			}
			assert.False(t, live.Policy().Allows(other))
			assert.NoError(t, live.Set(spiffe.AllowMembersOf(webID.TrustDomain())))
		})
	}
	wg.Wait()
	got := counts()
	assert.EqualValues(t, 4*3001, got.Decisions)
	assert.Len(t, got.Refuses, 1024)
	assert.Equal(t, map[spiffe.ID]uint64{other: 4}, got.Allows, "one kind leaves room for the other")
	sum := got.More
	for _, n := range got.Refuses {
		sum += n
	}
	assert.EqualValues(t, 4*3000, sum)
}

// TestPolicyTrialAllocations: a trial costs no memory for peers that it has counted.
func TestPolicyTrialAllocations(t *testing.T) {
	var live spiffe.LivePolicy
	require.NoError(t, live.Set(spiffe.AllowMembersOf(webID.TrustDomain())))
	for _, tried := range []spiffe.Policy{spiffe.AllowIDs(webID), spiffe.AllowIDs(webID.TrustDomain().ID())} {
		_, err := live.Try(tried)
		require.NoError(t, err)
		assert.Zero(t, testing.AllocsPerRun(100, func() { live.Policy().Allows(webID) }))
	}
}

func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{
		"*", "*, *", "spiffe://example.org/web", "spiffe://example.org/*", "spiffe://example.org", "spiffe://b/c, spiffe://a/b/*", "spiffe://a/*/b",
		"spiffe://a,spiffe://b", "spiffe://a, ", "nobody", "", "spiffe://a/b/../*, spiffe://a", "*, spiffe://a/", "spiffe:///*",
		"spiffe://a/*/c, spiffe://a/*/*/*", "* except spiffe://a/b/*", "spiffe://a/* except spiffe://a/*/c; spiffe://a/b/c", "spiffe://a/b except spiffe://a/*",
		"s = spiffe://a/b/*,\nspiffe://a/*/d;\ns, spiffe://c except spiffe://a/*/e/*", "s = *; t = s; t except s", "s = spiffe://a; s; s",
	} {
		f.Add(s, "spiffe://a/* except spiffe://a/b/c", "spiffe://a/b/c")
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
			if !p.IsZero() {
				t.Fatalf("%q: an error and a policy", text)
			}
			return
		}
		canonical := p.String()
		if !strings.ContainsAny(text, "=;\n") && len(canonical) != len(text) {
			t.Fatalf("%q became %q", text, canonical)
		}
		back, err := spiffe.ParsePolicy(canonical)
		if err != nil || back.String() != canonical {
			t.Fatalf("%q: %q, %v", canonical, back, err)
		}
		p.Warnings()
		id, err := spiffe.ParseID(name)
		if err != nil {
			return
		}
		rule, err := p.Explain(id)
		rule, _, _ = strings.Cut(rule, " (")
		allowed := slowAllows(text, id)
		if allowed != p.Allows(id) || allowed != back.Allows(id) || allowed != (err == nil) || allowed && (!slowMatch(rule, id) || !strings.Contains(canonical, rule)) {
			t.Fatalf("%q: %s: %v, %v, %v, %q, %v", text, id, allowed, p.Allows(id), back.Allows(id), rule, err)
		}
		q, err := spiffe.ParsePolicy(other)
		if err != nil {
			return
		}
		either, without := spiffe.AnyOf(p, q), p.Except(q)
		if _, err := either.MarshalText(); either.Allows(id) != (err == nil && (allowed || q.Allows(id))) {
			t.Fatalf("any of %q and %q: %s: %v, %v", text, other, id, either.Allows(id), err)
		}
		if _, err := without.MarshalText(); without.Allows(id) != (err == nil && allowed && !q.Allows(id)) {
			t.Fatalf("%q without %q: %s: %v, %v", text, other, id, without.Allows(id), err)
		}
	})
}

func BenchmarkParsePolicy(b *testing.B) {
	text := spiffe.AllowIDs(manyIDs(b, 1000)...).String()
	b.SetBytes(int64(len(text)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := spiffe.ParsePolicy(text); err != nil {
			b.Fatal(err)
		}
	}
}
