package spiffe_test

import (
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

var (
	longID     = "spiffe://example.org/" + strings.Repeat("a", 2027)
	segmentsID = "spiffe://example.org" + strings.Repeat("/a", 1014)
)

func TestIDParts(t *testing.T) {
	t.Parallel()
	id := spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web")
	td := spiffe.MustParseTrustDomain("example.org")
	assert.Equal(t, td, id.TrustDomain())
	assert.Equal(t, "/ns/prod/sa/web", id.Path())
	assert.True(t, id.MemberOf(td))
	assert.Equal(t, "spiffe://example.org/ns/prod/sa/web", id.URL().String())
	assert.Equal(t, "spiffe://example.org", td.ID().String())
	assert.Empty(t, td.ID().Path())
	assert.True(t, id == spiffe.MustParseID(id.String()), "equal bytes are equal IDs")
	assert.Panics(t, func() { spiffe.MustParseID("example.org") })
	assert.Panics(t, func() { spiffe.MustParseTrustDomain("spiffe://example.org") })
}

func TestKubernetesID(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.1-1", "IST-1.1-2", "IST-1.1-3")
	td := spiffe.MustParseTrustDomain("example.org")
	id := must.Get(td.WorkloadID("ns", "prod", "sa", "web"))(t)
	assert.Equal(t, "spiffe://example.org/ns/prod/sa/web", id.String())
	ns, sa, ok := id.Kubernetes()
	assert.True(t, ok)
	assert.Equal(t, []string{"prod", "web"}, []string{ns, sa})

	for _, path := range []string{
		"", "/ns", "/ns/prod", "/ns/prod/sa", "/ns/prod/xa/web", "/ns/prod/sa/web/x", "/sa/web/ns/prod", "/NS/prod/sa/web", "/x/ns/prod/sa/web",
	} {
		ns, sa, ok := spiffe.MustParseID("spiffe://example.org" + path).Kubernetes()
		assert.False(t, ok, path)
		assert.Empty(t, ns+sa, path)
	}
	for _, bad := range [][2]string{{"", "web"}, {"prod", ""}, {"prod/sa", "web"}, {"prod", "a/b"}, {"..", "web"}, {"prod", "wéb"}} {
		_, err := td.WorkloadID("ns", bad[0], "sa", bad[1])
		_, ok := errors.AsType[*spiffe.ParseError](err)
		assert.True(t, ok, "%q: %v", bad, err)
	}
	_, err := td.WorkloadID(strings.Repeat("a", 2028))
	assert.ErrorContains(t, err, "longer than 2048 bytes", "too long to build")
}

func TestZeroValues(t *testing.T) {
	t.Parallel()
	var id spiffe.ID
	var td spiffe.TrustDomain
	assert.True(t, id.IsZero())
	assert.True(t, td.IsZero())
	assert.Equal(t, "invalid SPIFFE ID", id.String())
	assert.Equal(t, "invalid trust domain", td.String())
	assert.Empty(t, id.Path())
	assert.Nil(t, id.URL())
	assert.True(t, id.TrustDomain().IsZero())
	assert.True(t, td.ID().IsZero())
	assert.False(t, id.MemberOf(td), "nothing is a member of nothing")
	_, _, ok := id.Kubernetes()
	assert.False(t, ok)

	_, err := id.MarshalText()
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = td.MarshalText()
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = td.WorkloadID("web")
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

func TestText(t *testing.T) {
	t.Parallel()
	type doc struct {
		ID     spiffe.ID                     `json:"id"`
		Domain spiffe.TrustDomain            `json:"domain"`
		Peer   spiffe.ID                     `json:"peer,omitzero"`
		Names  map[spiffe.ID]string          `json:"names"`
		Roots  map[spiffe.TrustDomain]string `json:"roots"`
	}
	in := doc{
		ID: webID, Domain: webID.TrustDomain(),
		Names: map[spiffe.ID]string{webID: "web"},
		Roots: map[spiffe.TrustDomain]string{webID.TrustDomain(): "roots.pem"},
	}
	text := must.Get(json.Marshal(in))(t)
	assert.JSONEq(t, `{
		"id": "spiffe://example.org/ns/prod/sa/web", "domain": "example.org",
		"names": {"spiffe://example.org/ns/prod/sa/web": "web"}, "roots": {"example.org": "roots.pem"}
	}`, string(text))
	var out doc
	require.NoError(t, json.Unmarshal(text, &out))
	assert.Equal(t, in, out)

	_, err := json.Marshal(struct{ ID spiffe.ID }{})
	assert.ErrorIs(t, err, spiffe.ErrZero)

	for _, bad := range []string{`{"id":""}`, `{"id":"spiffe://example.org/"}`, `{"domain":"spiffe://example.org"}`, `{"domain":""}`} {
		out := in
		err := json.Unmarshal([]byte(bad), &out)
		_, ok := errors.AsType[*spiffe.ParseError](err)
		assert.True(t, ok, "%s: %v", bad, err)
		assert.Equal(t, in, out, "a failed parse leaves the value")
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.1-3", "IST-1.1-4", "IST-1.4-1", "IST-1.4-2")
	for _, c := range []struct {
		in     string
		offset int
		rule   string
	}{
		{"", 0, "ID-2"},
		{"https://example.org/a", 0, "ID-2"},
		{"SPIFFE://example.org/a", 0, "ID-2"},
		{"spiffe:/example.org/a", 8, "ID-2"},
		{"spiffe:", 7, "ID-2"},
		{"spiffe://", 9, "ID-3"},
		{"spiffe:///a", 9, "ID-3"},
		{"spiffe://example.org?x=1", 20, "ID-4"},
		{"spiffe://example.org/a?", 22, "ID-4"},
		{"spiffe://example.org#", 20, "ID-5"},
		{"spiffe://example.org/a#f", 22, "ID-5"},
		{"spiffe://u@example.org/a", 10, "ID-6"},
		{"spiffe://u:p@example.org/a", 10, "ID-6"},
		{"spiffe://example.org:443/a", 20, "ID-7"},
		{"spiffe://example.org:443/a@b", 20, "ID-7"},
		{"spiffe://Example.org/a", 9, "ID-8"},
		{"spiffe://exAmple.org", 11, "ID-8"},
		{"spiffe://ex ample.org/a", 11, "ID-9"},
		{"spiffe://example.org\x00", 20, "ID-9"},
		{"spiffe://b\u00fccher.example/a", 10, "ID-9"},
		{"spiffe://ex%61mple.org/a", 11, "ID-10"},
		{"spiffe://[2001:db8::1]/a", 9, "ID-11"},
		{"spiffe://" + strings.Repeat("a", 256) + "/x", 9 + 255, "ID-13"},
		{"spiffe://" + strings.Repeat("a", 300) + "B/x", 9 + 300, "ID-8"},
		{"spiffe://example.org/a%2Fb", 22, "ID-15"},
		{"spiffe://example.org//a", 21, "ID-16"},
		{"spiffe://example.org/a//b", 23, "ID-16"},
		{"spiffe://example.org//", 21, "ID-16"},
		{"spiffe://example.org/./a", 21, "ID-17"},
		{"spiffe://example.org/a/..", 23, "ID-17"},
		{"spiffe://example.org/", 20, "ID-18"},
		{"spiffe://example.org/a/", 22, "ID-18"},
		{"spiffe://example.org/a~b", 22, "ID-19"},
		{"spiffe://example.org/caf\u00e9", 24, "ID-19"},
		{longID + "a", 2048, "ID-21"},
	} {
		_, err := spiffe.ParseID(c.in)
		e := must.As[*spiffe.ParseError](err)(t, c.in)
		assert.Equal(t, c.rule, e.Rule, "%q: %v", c.in, err)
		assert.Equal(t, c.offset, e.Offset, "%q: %v", c.in, err)
		assert.Equal(t, "ID", e.What)
	}

	for _, c := range []struct {
		in     string
		offset int
		rule   string
	}{
		{"", 0, "ID-3"},
		{"spiffe://example.org", 6, "ID-9"},
		{"SPIFFE://example.org", 6, "ID-9"},
		{"://", 0, "ID-9"},
		{"example.org/a", 11, "ID-9"},
		{"Example.org", 0, "ID-8"},
		{strings.Repeat("a", 256), 255, "ID-13"},
	} {
		_, err := spiffe.ParseTrustDomain(c.in)
		e := must.As[*spiffe.ParseError](err)(t, c.in)
		assert.Equal(t, spiffe.ParseError{What: "trust domain", Input: c.in, Offset: c.offset, Rule: c.rule, Reason: e.Reason}, *e)
	}

	for in, want := range map[string]string{
		"spiffe://example.org":     `spiffe: invalid trust domain "spiffe://example.org" at byte 6: it has a scheme; give the name alone`,
		"spiffe://example.org/web": `spiffe: invalid trust domain "spiffe://example.org/web" at byte 6: it has a scheme; give the name alone`,
		"https://example.org/":     `spiffe: invalid trust domain "https://example.org/" at byte 5: it has a scheme; give the name alone`,
		"spiffe://Example.org":     `spiffe: invalid trust domain "spiffe://Example.org" at byte 6: it has a scheme; give the name alone`,
		"example.org:8443":         `spiffe: invalid trust domain "example.org:8443" at byte 11: a port is not allowed`,
	} {
		_, err := spiffe.ParseTrustDomain(in)
		assert.EqualError(t, err, want)
	}

	_, err := webID.TrustDomain().WorkloadID("a", "b/c")
	assert.EqualError(t, err, `spiffe: invalid path segment "b/c" at byte 1: a slash is not allowed inside a segment`)
	_, err = spiffe.ParseID("spiffe://Example.org/web")
	assert.EqualError(t, err, `spiffe: invalid ID "spiffe://Example.org/web" at byte 9: upper case is not allowed in a trust domain name`)
	_, err = spiffe.ParseID(longID + "a")
	assert.Less(t, len(err.Error()), 300, "an error does not carry the whole input")
}

// Every byte that is not in the set of a place is refused there, and every other one accepted.
func TestEveryByte(t *testing.T) {
	t.Parallel()
	for c := range 256 {
		for _, in := range []string{"spiffe://ex" + string([]byte{byte(c)}) + "ample.org/a", "spiffe://example.org/a" + string([]byte{byte(c)}) + "b"} {
			_, err := spiffe.ParseID(in)
			assert.Equal(t, slowValidID(in), err == nil, "%q", in)
		}
	}
}

var idPattern = regexp.MustCompile(`\Aspiffe://[a-z0-9._-]{1,255}(/[A-Za-z0-9._-]+)*\z`)

// slowValidID is the grammar of SPIFFE-ID, written to be read.
func slowValidID(s string) bool {
	if len(s) > 2048 || !idPattern.MatchString(s) {
		return false
	}
	segments := strings.Split(s, "/")[3:]
	return !slices.Contains(segments, ".") && !slices.Contains(segments, "..")
}

func FuzzParseID(f *testing.F) {
	for _, v := range readLines[idVector](f, "ids.jsonl") {
		f.Add(v.input())
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := spiffe.ParseID(s)
		if (err == nil) != slowValidID(s) {
			t.Fatalf("ParseID(%q) = %v, %v; the reference disagrees", s, id, err)
		}
		if err != nil {
			e, ok := errors.AsType[*spiffe.ParseError](err)
			if !ok || e.Offset < 0 || e.Offset > len(s) || e.Rule == "" || e.Reason == "" || !id.IsZero() {
				t.Fatalf("ParseID(%q) = %v, %#v", s, id, err)
			}
			return
		}
		if id.String() != s {
			t.Fatalf("%q came back as %q", s, id)
		}
		td, err := spiffe.ParseTrustDomain(id.TrustDomain().String())
		if err != nil || !id.MemberOf(td) {
			t.Fatalf("%q: trust domain %q: %v", s, id.TrustDomain(), err)
		}
		built, err := td.WorkloadID(strings.Split(id.Path(), "/")[1:]...)
		if id.Path() == "" {
			built, err = td.ID(), nil
		}
		if err != nil || built != id {
			t.Fatalf("%q was rebuilt as %q, %v", s, built, err)
		}
		if u := id.URL().String(); u != s {
			t.Fatalf("%q as URL is %q", s, u)
		}
	})
}

func TestNoAllocs(t *testing.T) {
	many := manyIDs(t, 10_000)
	td := webID.TrustDomain()
	big := spiffe.AnyOf(spiffe.AllowIDs(many...), spiffe.AllowPathPrefix(td, "/ns/test"))
	for name, f := range map[string]func() bool{
		"ParseID":               func() bool { _, err := spiffe.ParseID("spiffe://example.org/ns/prod/sa/web"); return err == nil },
		"ParseID 2048 bytes":    func() bool { _, err := spiffe.ParseID(longID); return err == nil },
		"ParseID 1014 segments": func() bool { _, err := spiffe.ParseID(segmentsID); return err == nil },
		"ParseTrustDomain":      func() bool { _, err := spiffe.ParseTrustDomain("example.org"); return err == nil },
		"String":                func() bool { return webID.String() != "" },
		"TrustDomain":           func() bool { return webID.TrustDomain() == td },
		"Path":                  func() bool { return webID.Path() != "" },
		"Check":                 func() bool { return allows(big, many[77]) },
	} {
		require.True(t, f(), name)
		assert.Zero(t, testing.AllocsPerRun(100, func() { f() }), name)
	}
}
