package jwtsvid_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/jwtsvid"
)

// A set of audiences has a token of its own, whatever is in their names, and the same in each order.
func TestCacheSetsOfAudiences(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		source := &mint{issuer: issuer(t, jwtsvid.IssuerOptions{Now: time.Now, WideAudience: true})}
		c := must.Get(jwtsvid.NewCache(source, nil))(t)
		sets := [][]string{
			{"a"}, {"b"}, {"a", "b"}, {"a", "b", "c"}, {"ab"}, {"a", "bc"}, {"ab", "c"}, {"abc"},
			{"a:b"}, {"a", "b:c"}, {"a:b", "c"}, {"a:b:c"}, {":"}, {":", "::"}, {":::"}, {"a,b"}, {"a,b", "c"}, {"a", "b,c"}, {"a b"}, {"a", "b c"}, {"a b", "c"},
			{"1:a"}, {"1:a", "1:b"}, {"1:a1:b"}, {"1", "a1:b"}, {"2:a", "b"}, {"a\x00", "b"}, {"a", "\x00b"}, {"a\n", "b"}, {"a", "\nb"},
		}
		seen := map[string][]string{}
		for _, set := range sets {
			slices.Sort(set)
			n := fetch(t, c, set...)
			require.Nil(t, seen[n], "%q and %q have one token", set, seen[n])
			seen[n] = set
			token := must.Get(c.Fetch(t.Context(), set...))(t)
			u := must.Get(jwtsvid.ParseUnverified(token))(t)
			assert.ElementsMatch(t, set, u.Audience)
			slices.Reverse(set)
			assert.Equal(t, n, fetch(t, c, set...), "%q in another order", set)
		}
		for _, bad := range [][]string{nil, {""}, {"db", ""}, {"db", "db"}, {"\xff"}} {
			_, err := c.Fetch(t.Context(), bad...)
			assert.ErrorContains(t, err, "jwtsvid: fetch: ")
		}
		assert.Equal(t, len(sets), source.count(), "each once")
	})
}
