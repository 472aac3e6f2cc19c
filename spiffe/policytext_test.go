package spiffe_test

import (
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/conformance"
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
		{"*,  spiffe://a", 3, "ID-2", "must begin with"},
		{" *", 0, "ID-2", "must begin with"},
		{"* ", 0, "ID-2", "must begin with"},
		{"*\n", 0, "ID-2", "must begin with"},
		{"nobody", 0, "ID-2", "must begin with"},
		{"**", 0, "ID-2", "must begin with"},
		{"/*", 0, "ID-2", "must begin with"},
		{"*, *", 3, "", "the rule occurs twice"},
		{"spiffe://a/b, spiffe://a/*, spiffe://a/b", 28, "", "the rule occurs twice"},
		{"spiffe://*", 9, "ID-9", "only lower-case"},
		{"spiffe:///*", 9, "ID-3", "the trust domain name is empty"},
		{"spiffe://a/*/b", 11, "ID-19", "only letters"},
		{"spiffe://a/b*", 12, "ID-19", "only letters"},
		{"spiffe://a/b/**", 13, "ID-19", "only letters"},
		{"spiffe://a/b/", 12, "ID-18", "a trailing slash"},
		{"spiffe://a//*", 10, "ID-18", "a trailing slash"},
		{"spiffe://a/b/../*", 13, "ID-17", "are not allowed"},
		{"spiffe://a/b, spiffe://A/b", 23, "ID-8", "upper case"},
		{"spiffe://a/b ,spiffe://a/c", 12, "ID-19", "only letters"},
		{"spiffe://a/b; spiffe://a/c", 12, "ID-19", "only letters"},
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
		{spiffe.Policy{}, "spiffe://b.test/a", "", `"spiffe://b.test/a": not allowed by policy: the policy is zero; use AllowIDs, AllowMembersOf, AllowPathPrefix or AllowAnyPeer`},
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
	_, err = p.Explain(spiffe.ID{})
	assert.EqualError(t, err, `spiffe: "invalid SPIFFE ID": not allowed by policy: the zero ID is never allowed`)
	_, err = spiffe.AllowIDs(spiffe.MustParseID(longID)).Explain(spiffe.MustParseID(segmentsID))
	assert.Less(t, len(err.Error()), 1200)
}

// TestAliases shows that an alias changes which names a policy allows, and not which authorities are trusted.
func TestAliases(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ID-28", "X5-31", "SVID-1")
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
	assert.EqualError(t, err, "spiffe: new verifier: no policy")

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

func FuzzParsePolicy(f *testing.F) {
	for _, s := range []string{
		"*", "*, *", "spiffe://example.org/web", "spiffe://example.org/*", "spiffe://example.org", "spiffe://b/c, spiffe://a/b/*", "spiffe://a/*/b",
		"spiffe://a,spiffe://b", "spiffe://a, ", "nobody", "", "spiffe://a/b/../*, spiffe://a", "*, spiffe://a/", "spiffe:///*",
	} {
		f.Add(s, "spiffe://a/b/c")
	}
	f.Fuzz(func(t *testing.T, text, name string) {
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
		if len(canonical) != len(text) {
			t.Fatalf("%q became %q", text, canonical)
		}
		q, err := spiffe.ParsePolicy(canonical)
		if err != nil || q.String() != canonical {
			t.Fatalf("%q: %q, %v", canonical, q, err)
		}
		id, err := spiffe.ParseID(name)
		if err != nil {
			return
		}
		rule, err := p.Explain(id)
		if allowed := slowAllows(text, id); allowed != p.Allows(id) || allowed != (err == nil) || allowed != strings.Contains(", "+text+",", ", "+rule+",") {
			t.Fatalf("%q: %s: %v, %v, %q, %v", text, id, allowed, p.Allows(id), rule, err)
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
