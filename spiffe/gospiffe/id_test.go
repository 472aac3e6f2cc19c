package gospiffe_test

import (
	"strings"
	"testing"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
	"github.com/spiffe/go-spiffe/v2/spiffetls/tlsconfig"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/gospiffe"
)

func TestIDs(t *testing.T) {
	t.Parallel()
	long := "spiffe://example.org/" + strings.Repeat("a", 2048-len("spiffe://example.org/"))
	for _, s := range []string{"spiffe://example.org", "spiffe://example.org/web", "spiffe://1.2.3.4/A/b-c_d.e", "spiffe://a..b/x", long} {
		theirs := spiffeid.RequireFromString(s)
		ours := must.Get(gospiffe.FromID(theirs))(t, s)
		assert.Equal(t, s, ours.String())
		back := must.Get(gospiffe.ToID(ours))(t, s)
		assert.Equal(t, theirs, back)

		td := must.Get(gospiffe.FromTrustDomain(theirs.TrustDomain()))(t, s)
		assert.Equal(t, ours.TrustDomain(), td)
		domain := must.Get(gospiffe.ToTrustDomain(td))(t, s)
		assert.Equal(t, theirs.TrustDomain(), domain)
	}
}

// What go-spiffe accepts and this library refuses.
func TestIDsRefused(t *testing.T) {
	t.Parallel()
	base := spiffeid.RequireFromString("spiffe://example.org/web")
	long := must.Get(base.AppendPath("/" + strings.Repeat("a", 2048)))(t)
	name := strings.Repeat("a", 256)
	for want, theirs := range map[string]spiffeid.ID{"ID-21": long, "ID-13": spiffeid.RequireFromString("spiffe://" + name + "/web")} {
		id, err := gospiffe.FromID(theirs)
		assert.True(t, id.IsZero())
		e := must.As[*spiffe.ParseError](err)(t)
		assert.Equal(t, want, e.Rule)
	}
	_, err := gospiffe.FromTrustDomain(spiffeid.RequireTrustDomainFromString(name))
	e := must.As[*spiffe.ParseError](err)(t)
	assert.Equal(t, "ID-13", e.Rule)

	_, err = gospiffe.FromID(spiffeid.ID{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = gospiffe.ToID(spiffe.ID{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = gospiffe.FromTrustDomain(spiffeid.TrustDomain{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
	_, err = gospiffe.ToTrustDomain(spiffe.TrustDomain{})
	assert.ErrorIs(t, err, spiffe.ErrZero)
}

// FuzzIDs gives a name to both: what crosses keeps its bytes, and what one side refuses does not cross.
func FuzzIDs(f *testing.F) {
	for _, s := range []string{
		"", "spiffe://", "spiffe://example.org", "spiffe://example.org/", "spiffe://example.org/a//b", "spiffe://example.org/../a", "SPIFFE://example.org/a",
		"spiffe://Example.org/a", "spiffe://example.org/a%20b", "spiffe://example.org/~a", "spiffe://user@example.org/a", "spiffe://example.org:80/a", "example.org", "a..b",
		"spiffe://a..b/c", "spiffe://example.org/" + strings.Repeat("a", 2028), "spiffe://" + strings.Repeat("a", 256), strings.Repeat("a", 255), "spiffe://example.org/\xff",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if theirs, err := spiffeid.FromString(s); err == nil {
			ours, err := gospiffe.FromID(theirs)
			if _, refused := spiffe.ParseID(s); (refused == nil) != (err == nil) {
				t.Fatalf("%q: FromID %v, ParseID %v", s, err, refused)
			}
			if err == nil && ours.String() != s {
				t.Fatalf("%q became %q", s, ours)
			}
		}
		if ours, err := spiffe.ParseID(s); err == nil {
			if theirs, err := gospiffe.ToID(ours); err != nil || theirs.String() != s {
				t.Fatalf("%q became %q, %v", s, theirs, err)
			}
		}
		if theirs, err := spiffeid.TrustDomainFromString(s); err == nil {
			if ours, err := gospiffe.FromTrustDomain(theirs); err == nil && ours.String() != theirs.Name() {
				t.Fatalf("%q became %q", theirs, ours)
			}
		}
		if ours, err := spiffe.ParseTrustDomain(s); err == nil {
			if theirs, err := gospiffe.ToTrustDomain(ours); err != nil || theirs.Name() != s {
				t.Fatalf("%q became %q, %v", s, theirs, err)
			}
		}
	})
}

func TestToMatcher(t *testing.T) {
	t.Parallel()
	web, db := spiffe.MustParseID("spiffe://example.org/web"), spiffeid.RequireFromString("spiffe://example.org/db")
	var live spiffe.LivePolicy
	match := gospiffe.ToMatcher(&live)
	theirs := must.Get(gospiffe.ToID(web))(t)
	assert.ErrorIs(t, match(theirs), spiffe.ErrDenied, "there is no policy yet")
	require.NoError(t, live.Set(spiffe.AllowIDs(web)))
	assert.NoError(t, match(theirs))
	assert.ErrorIs(t, match(db), spiffe.ErrDenied)
	assert.ErrorIs(t, match(spiffeid.ID{}), spiffe.ErrZero)
	assert.ErrorIs(t, tlsconfig.AdaptMatcher(match)(db, nil), spiffe.ErrDenied)
	assert.Panics(t, func() { gospiffe.ToMatcher(nil) })
}
