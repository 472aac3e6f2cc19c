package limit_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/limit"
)

func TestShares(t *testing.T) {
	t.Parallel()
	s := limit.NewShares[string](10, 4)
	reason := func(err error) string {
		t.Helper()
		e := new(limit.Error)
		require.ErrorAs(t, err, &e)
		return e.Reason
	}
	require.NoError(t, s.Take("a", 3))
	assert.Equal(t, limit.CallerShare, reason(s.Take("a", 2)), "all or nothing")
	require.NoError(t, s.Take("a", 1))
	assert.Equal(t, limit.CallerShare, reason(s.Take("a", 1)))
	require.NoError(t, s.Take("b", 4))
	assert.Equal(t, limit.TotalShare, reason(s.Take("c", 3)))
	require.NoError(t, s.Take("c", 2))
	assert.Equal(t, limit.TotalShare, reason(s.Take("c", 1)))
	assert.Equal(t, 10, s.Held())

	s.Give("a", 4)
	require.NoError(t, s.Take("c", 2))
	assert.Equal(t, limit.CallerShare, reason(s.Take("c", 1)), "its own share, although there is room")
	assert.Equal(t, 8, s.Held())
	assert.Panics(t, func() { s.Give("a", 1) }, "it holds nothing")
	assert.Panics(t, func() { s.Give("b", 5) })
	assert.Panics(t, func() { s.Give("b", -1) })
	assert.Panics(t, func() { _ = s.Take("b", -1) })
	assert.Equal(t, 8, s.Held())

	assert.Equal(t, limit.CallerShare, reason(s.Take("d", int(^uint(0)>>1))), "no sum overflows")
	none := limit.NewShares[int](0, -1)
	require.NoError(t, none.Take(1, 1<<40))
	assert.Equal(t, 1<<40, none.Held())
}
