package secretcache_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/secretcache"
)

// almostOne is the largest random number.
var almostOne = math.Nextafter(1, 0)

func TestRenewAt(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(d time.Duration) time.Time { return noon.Add(d) }
	for name, c := range map[string]struct {
		received, notBefore, notAfter time.Duration // after noon
		grace, jitter, u              float64
		want                          time.Duration
	}{
		"half, no chance":                {0, 0, 24 * time.Hour, 0.5, 0.01, 0, 12 * time.Hour},
		"chance makes it earlier":        {0, 0, 100 * time.Minute, 0.5, 0.01, 0.5, 49*time.Minute + 30*time.Second},
		"backdating does not count":      {0, -10 * time.Hour, 2 * time.Hour, 0.5, 0.01, 0, time.Hour},
		"a start ahead does":             {0, time.Hour, 3 * time.Hour, 0.5, 0.01, 0, 2 * time.Hour},
		"late arrival":                   {90 * time.Minute, 0, 2 * time.Hour, 0.5, 0.01, 0, 105 * time.Minute},
		"another ratio":                  {0, 0, 10 * time.Hour, 0.2, 0.01, 0, 8 * time.Hour},
		"seconds":                        {0, 0, 4 * time.Second, 0.5, 0.01, 0, 2 * time.Second},
		"never a tight loop":             {0, 0, 10 * time.Millisecond, 0.5, 0.01, 0, 50 * time.Millisecond},
		"already over":                   {2 * time.Hour, 0, time.Hour, 0.5, 0.01, 0, 2*time.Hour + 50*time.Millisecond},
		"ratios that New would not take": {0, 0, time.Hour, 0.9, 0.9, almostOne, 50 * time.Millisecond},
	} {
		got := secretcache.RenewAt(at(c.received), at(c.notBefore), at(c.notAfter), c.grace, c.jitter, c.u)
		assert.WithinDuration(t, at(c.want), got, time.Microsecond, name)
	}

	for _, life := range []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour, 90 * 24 * time.Hour} {
		for _, u := range []float64{0, 0.25, 0.5, 0.75, almostOne} {
			got := secretcache.RenewAt(noon, noon.Add(-time.Hour), noon.Add(life), 0.5, 0.01, u).Sub(noon)
			assert.LessOrEqual(t, got, life/2, "never later than the grace ratio says")
			assert.GreaterOrEqual(t, got, life*49/100, "never earlier than the jitter allows")
		}
	}
}

func TestRetryIn(t *testing.T) {
	t.Parallel()
	const h, m, s = time.Hour, time.Minute, time.Second
	for name, c := range map[string]struct {
		r          secretcache.Refusal
		life, left time.Duration
		low, high  time.Duration // the range over all random numbers
	}{
		"first":                           {secretcache.NewRefusal(1, 0, false), 24 * h, 12 * h, s, 2 * s},
		"third":                           {secretcache.NewRefusal(3, 0, false), 24 * h, 12 * h, s, 8 * s},
		"many":                            {secretcache.NewRefusal(100, 0, false), 24 * h, 12 * h, s, 12 * h / 25},
		"no more failures than fit":       {secretcache.NewRefusal(math.MaxInt, 0, false), 24 * h, 12 * h, s, 12 * h / 25},
		"months":                          {secretcache.NewRefusal(100, 0, false), 9000 * h, 4500 * h, s, 30 * m},
		"near the end":                    {secretcache.NewRefusal(100, 0, false), h, m, s, m / 25},
		"at the end":                      {secretcache.NewRefusal(100, 0, false), h, s, s, s},
		"ended":                           {secretcache.NewRefusal(100, 0, false), h, 0, s, 30 * s},
		"never had one":                   {secretcache.NewRefusal(100, 0, false), 0, 0, s, 30 * s},
		"never had one, short ones asked": {secretcache.NewRefusal(100, 0, false), 4 * s, 0, 50 * time.Millisecond, s},
		"seconds":                         {secretcache.NewRefusal(9, 0, false), 20 * s, 10 * s, 50 * time.Millisecond, 400 * time.Millisecond},
		"refused for good":                {secretcache.NewRefusal(1, 0, true), 24 * h, 12 * h, 6 * h / 25, 12 * h / 25},
		"refused for good, nothing held":  {secretcache.NewRefusal(1, 0, true), 0, 0, 15 * s, 30 * s},
		"the CA's wish":                   {secretcache.NewRefusal(1, 10*m, false), 24 * h, 12 * h, 10 * m, 11 * m},
		"a wish that is shorter":          {secretcache.NewRefusal(1, time.Millisecond, false), 24 * h, 12 * h, s, 2 * s},
		"a wish beyond the end":           {secretcache.NewRefusal(1, 100*h, false), 24 * h, 12 * h, 6 * h, 6 * h},
		"a wish, nothing held":            {secretcache.NewRefusal(1, 100*h, false), 0, 0, h, h},
	} {
		assert.InDelta(t, c.low, secretcache.RetryIn(c.r, c.life, c.left, 0), 1000, name)
		assert.InDelta(t, c.high, secretcache.RetryIn(c.r, c.life, c.left, almostOne), 1000, name)
	}

	// Whatever happens, it is no tight loop, and at most 4 % of what is left.
	for life := time.Second; life < 1000*h; life *= 3 {
		for left := life; left > 0; left /= 2 {
			for _, u := range []float64{0, 0.5, almostOne} {
				for times := range 40 {
					wait := secretcache.RetryIn(secretcache.NewRefusal(times+1, 0, times%2 == 1), life, left, u)
					floor := max(min(life/500, s), 50*time.Millisecond)
					assert.GreaterOrEqual(t, wait, floor)
					assert.LessOrEqual(t, wait, max(left/25, floor))
				}
			}
		}
	}
}

func TestPollIn(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		hint      time.Duration
		ok        bool
		low, high time.Duration
	}{
		"no hint":     {0, false, 270 * time.Second, 330 * time.Second},
		"hint":        {100 * time.Second, true, 90 * time.Second, 110 * time.Second},
		"too short":   {time.Millisecond, true, 900 * time.Millisecond, 1100 * time.Millisecond},
		"half a life": {math.MaxInt64, true, 24 * time.Hour * 9 / 10, 24 * time.Hour * 11 / 10},
	} {
		assert.InDelta(t, c.low, secretcache.PollIn(c.hint, c.ok, 0), 1000, name)
		assert.InDelta(t, c.high, secretcache.PollIn(c.hint, c.ok, almostOne), 1000, name)
	}
}

func TestPollAgainIn(t *testing.T) {
	t.Parallel()
	const m, s = time.Minute, time.Second
	for name, c := range map[string]struct {
		r         secretcache.Refusal
		have      bool
		low, high time.Duration
	}{
		"first":                    {secretcache.NewRefusal(1, 0, false), true, s, 2 * s},
		"many":                     {secretcache.NewRefusal(50, 0, false), true, s, 5 * m},
		"many, nothing held":       {secretcache.NewRefusal(50, 0, false), false, s, 30 * s},
		"refused":                  {secretcache.NewRefusal(1, 0, true), true, 150 * s, 5 * m},
		"the CA's wish":            {secretcache.NewRefusal(1, 10*m, false), true, 10 * m, 11 * m},
		"the CA's wish has limits": {secretcache.NewRefusal(1, 1000*m, false), false, 60 * m, 60 * m},
	} {
		assert.InDelta(t, c.low, secretcache.PollAgainIn(c.r, 5*m, c.have, 0), 1000, name)
		assert.InDelta(t, c.high, secretcache.PollAgainIn(c.r, 5*m, c.have, almostOne), 1000, name)
	}
}

func TestAttemptTime(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ left, want time.Duration }{
		{0, 30 * time.Second},
		{-time.Hour, 30 * time.Second},
		{12 * time.Hour, 30 * time.Second},
		{30 * time.Minute, 18 * time.Second},
		{time.Minute, 5 * time.Second},
	} {
		assert.Equal(t, c.want, secretcache.AttemptTime(30*time.Second, c.left), "%v", c.left)
	}
}

// TestFleet starts a fleet in one moment and counts the renewals of each minute that follow.
func TestFleet(t *testing.T) {
	t.Parallel()
	const fleet, life = 20_000, 24 * time.Hour
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	random := rand.New(rand.NewPCG(1, 2))
	peak := func(jitter float64) float64 {
		const bin, bins = 15 * time.Minute, 10 * 24 * 4
		var count [bins]float64
		var all float64
		for range fleet {
			for at := start; ; {
				at = secretcache.RenewAt(at, at, at.Add(life), 0.5, jitter, random.Float64())
				if at.Sub(start) >= bins*bin {
					break
				}
				count[at.Sub(start)/bin]++
				all++
			}
		}
		first := int(life * 3 / 10 / bin) // the first renewals
		return slices.Max(count[:]) / (all / float64(bins-first))
	}
	assert.Less(t, peak(0.2), 3.0)
	assert.Greater(t, peak(0.01), 10.0)
}

// TestElapsed is what can be said of a clock that jumps, which no test can make it do.
func TestElapsed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ mono, wall, want time.Duration }{
		"both walk":                      {time.Minute, time.Minute, time.Minute},
		"drift is not believed":          {time.Minute, time.Minute + 900*time.Millisecond, time.Minute},
		"suspended for the night":        {time.Second, 8 * time.Hour, 8 * time.Hour},
		"put back a year":                {time.Minute, -365 * 24 * time.Hour, time.Minute},
		"put back a little":              {time.Minute, 59 * time.Second, time.Minute},
		"two clocks of different worlds": {-time.Hour, -time.Hour, 0},
	} {
		assert.Equal(t, c.want, secretcache.Elapsed(c.mono, c.wall), name)
	}
}

// TestWallClock shows that readers learn within a tenth of a second that the wall clock leapt.
func TestWallClock(t *testing.T) {
	t.Parallel()
	for _, leap := range []time.Duration{0, 8 * time.Hour, -8 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			clock := secretcache.NewWallClock(leap)
			assert.Equal(t, time.Now().Add(-leap).UnixNano(), clock())
			for range 10 {
				time.Sleep(101 * time.Millisecond)
				assert.Equal(t, time.Now().UnixNano(), clock())
				time.Sleep(50 * time.Millisecond)
				assert.Equal(t, time.Now().UnixNano(), clock())
			}
		})
	}
}
