package limit_test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/limit"
)

// A caller whose requests are good and forgiven has no limit, and one whose requests are not has that of its rate.
func TestForgive(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := limit.New(limit.Options{CallerRate: 0.5, CallerBurst: 3})
		take := func(caller string) error { return l.Acquire(t.Context(), caller) }
		for range 1000 {
			require.NoError(t, l.Check("good"))
			require.NoError(t, take("good"))
			l.Forgive("good")
		}
		for range 3 {
			require.NoError(t, take("bad"))
		}
		for range 100 {
			assert.Equal(t, 2*time.Second, refused(t, l.Check("bad"), limit.CallerRate))
			assert.Equal(t, 2*time.Second, refused(t, take("bad"), limit.CallerRate), "a refusal does not count")
		}
		l.Forgive("bad") // one that was under way was good
		require.NoError(t, take("bad"))
		refused(t, take("bad"), limit.CallerRate)
		require.NoError(t, take("good"))
		time.Sleep(2*time.Second - 1)
		assert.EqualValues(t, 1, refused(t, take("bad"), limit.CallerRate))
		time.Sleep(time.Nanosecond)
		require.NoError(t, take("bad"))
		time.Sleep(time.Minute)
		l.Forgive("bad")
		l.Forgive("stranger")
		for range 3 {
			require.NoError(t, take("bad"), "all are forgiven, and no more than all")
		}
		refused(t, take("bad"), limit.CallerRate)
	})
}
