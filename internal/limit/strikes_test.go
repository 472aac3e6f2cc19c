package limit_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/limit"
)

func TestStrikes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := limit.NewStrikes(0.5, 3)
		for range 1000 {
			require.NoError(t, s.Check("good"))
			require.NoError(t, s.Take("good"))
			s.Forgive("good")
		}
		for range 3 {
			require.NoError(t, s.Take("bad"))
		}
		for range 100 {
			assert.Equal(t, 2*time.Second, refused(t, s.Check("bad"), limit.CallerRefused))
			assert.Equal(t, 2*time.Second, refused(t, s.Take("bad"), limit.CallerRefused), "a refusal is no strike")
		}
		s.Forgive("bad") // one that was under way was good
		require.NoError(t, s.Take("bad"))
		refused(t, s.Take("bad"), limit.CallerRefused)
		require.NoError(t, s.Take("good"))
		time.Sleep(2*time.Second - 1)
		assert.EqualValues(t, 1, refused(t, s.Take("bad"), limit.CallerRefused))
		time.Sleep(time.Nanosecond)
		require.NoError(t, s.Take("bad"))
		refused(t, s.Take("bad"), limit.CallerRefused)
		time.Sleep(time.Minute)
		s.Forgive("bad")
		s.Forgive("stranger")
		for range 3 {
			require.NoError(t, s.Take("bad"), "all are forgiven, and no more than all")
		}
		refused(t, s.Take("bad"), limit.CallerRefused)
	})
}

func TestStrikesBounded(t *testing.T) {
	t.Parallel()
	s := limit.NewStrikes(1, 1)
	for i := range 100_000 {
		require.NoError(t, s.Take(fmt.Sprint(i)))
	}
	assert.LessOrEqual(t, s.Callers(), 65_536)
	refused(t, s.Take("99999"), limit.CallerRefused)
}
