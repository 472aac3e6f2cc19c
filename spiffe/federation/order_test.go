package federation_test

import (
	"net/http"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// A bundle that is held prevails by equal answers in a row. Each other answer begins the row anew: that nothing was modified, and
// one that is refused.
func TestHeldInARow(t *testing.T) {
	t.Parallel()
	for _, between := range []string{"not modified", "an older one", "a failure"} {
		t.Run(between, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				first := bundleOf(t, w.ca, new(uint64(7)), renew.UsualPoll)
				w.site.serve(serving(t, first))
				m := newManager(t, w.cfg)
				running(t, m)
				synctest.Wait()
				wrong := bundleOf(t, spiffetest.NewCA(t, "partner.test"), new(uint64(1_000_000)), renew.UsualPoll)
				held := func() {
					t.Helper()
					w.site.serve(serving(t, wrong))
					next(t, m, partner)
					require.True(t, first.Equal(inForce(t, m, partner)), "it is held")
				}
				held()
				begun := time.Now()
				for time.Since(begun) < bundleorder.Time-2*renew.UsualPoll {
					held()
				}
				switch between {
				case "not modified":
					w.site.serve(serving(t, first))
				case "an older one":
					w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(6)), 0)))
				case "a failure":
					w.site.serve(answer(http.StatusInternalServerError, nil))
				}
				next(t, m, partner)
				again := time.Now()
				if between == "a failure" { // is no answer
					for time.Since(begun) < bundleorder.Time+2*renew.UsualPoll {
						w.site.serve(serving(t, wrong))
						next(t, m, partner)
					}
					require.True(t, wrong.Equal(inForce(t, m, partner)))
					return
				}
				for time.Since(again) < bundleorder.Time-renew.UsualPoll {
					held()
				}
				for time.Since(again) < bundleorder.Time+3*renew.UsualPoll {
					next(t, m, partner)
				}
				require.True(t, wrong.Equal(inForce(t, m, partner)), "it was repeated for long enough: %v", statusOf(t, m, partner).Err)
				assert.NoError(t, statusOf(t, m, partner).Err)
				assert.Nil(t, statusOf(t, m, partner).Refused)
			})
		})
	}
}

// What an operator sets before Run is not replaced by what was stored before.
func TestSetBeforeRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.cfg.Dir = filepath.Join(t.TempDir(), "store")
		m := newManager(t, w.cfg)
		stop := running(t, m)
		synctest.Wait()
		require.True(t, trusts(t, m, w.ca))
		stop()

		w.site.serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
		other := spiffetest.NewCA(t, "partner.test")
		m = newManager(t, w.cfg)
		require.NoError(t, m.Set(other.Bundle()))
		stop = running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, other))
		assert.False(t, trusts(t, m, w.ca))
		stop()

		m = newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, other), "and it is what was stored")
		assertStale(t, statusOf(t, m, partner))
	})
}

// A bundle is fresh until its next fetch, whatever the hint, and the first success after failures makes it so again, with waits and
// counts as before.
func TestFreshAgain(t *testing.T) {
	t.Parallel()
	for _, hint := range []time.Duration{0, time.Second, time.Minute, 12 * time.Hour, 1000 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t)
			b := bundleOf(t, w.ca, new(uint64(1)), hint)
			w.site.serve(serving(t, b))
			m := newManager(t, w.cfg)
			running(t, m)
			synctest.Wait()
			until := func() time.Duration { return time.Until(statusOf(t, m, partner).NextAttempt) }
			usual := until()
			check := func() {
				t.Helper()
				s := statusOf(t, m, partner)
				require.True(t, s.Fresh, "%v", hint)
				require.Zero(t, s.Failures)
				require.NoError(t, s.Err)
				assert.InDelta(t, usual.Seconds(), until().Seconds(), usual.Seconds()/4, "%v", hint)
				time.Sleep(until() - 1)
				require.True(t, statusOf(t, m, partner).Fresh, "%v: just before the next", hint)
			}
			check()
			for range rounds.Of(1) {
				w.site.serve(answer(http.StatusInternalServerError, nil))
				for n := range 4 {
					next(t, m, partner)
					s := statusOf(t, m, partner)
					require.False(t, s.Fresh)
					require.Equal(t, n+1, s.Failures)
					require.Error(t, s.Err)
				}
				w.site.serve(serving(t, b))
				next(t, m, partner)
				check()
			}
		})
	}
}

// A relationship that is removed takes nothing with it that others have, and may begin again as new.
func TestRemovedIsForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(9)), 0)))
		m := newManager(t, w.cfg)
		running(t, m)
		synctest.Wait()
		w.site.serve(serving(t, bundleOf(t, w.ca, new(uint64(3)), 0)))
		next(t, m, partner)
		s := statusOf(t, m, partner)
		requireCode(t, s.Err, outOfSequence)
		require.NoError(t, m.Remove(partner))
		require.Empty(t, m.Status())
		_, err := m.Bundle(partner)
		require.ErrorIs(t, err, spiffe.ErrUnknownTrustDomain)
		require.NoError(t, m.Add(w.cfg.Relationships[0]))
		synctest.Wait()
		s = statusOf(t, m, partner)
		require.NoError(t, s.Err)
		assert.Zero(t, s.Failures)
		assert.Nil(t, s.Refused)
		n, _ := inForce(t, m, partner).Sequence()
		assert.EqualValues(t, 3, n, "the old number is forgotten with it")
	})
}
