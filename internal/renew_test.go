package internal_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/renew"
)

// almostOne is the largest random number.
var almostOne = math.Nextafter(1, 0)

func TestRenewAt(t *testing.T) {
	t.Parallel()
	const h, m, s, ms = time.Hour, time.Minute, time.Second, time.Millisecond
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(d time.Duration) time.Time { return noon.Add(d) }
	for name, c := range map[string]struct {
		received, notBefore, notAfter time.Duration // after noon
		grace, jitter, u              float64
		want                          time.Duration
	}{
		"half, no chance":                {0, 0, 24 * h, 0.5, 0.01, 0, 12 * h},
		"chance makes it earlier":        {0, 0, 100 * m, 0.5, 0.01, 0.5, 49*m + 30*s},
		"backdating does not count":      {0, -10 * h, 2 * h, 0.5, 0.01, 0, h},
		"a start ahead does":             {0, h, 3 * h, 0.5, 0.01, 0, 2 * h},
		"late arrival":                   {90 * m, 0, 2 * h, 0.5, 0.01, 0, 105 * m},
		"another ratio":                  {0, 0, 10 * h, 0.2, 0.01, 0, 8 * h},
		"seconds":                        {0, 0, 4 * s, 0.5, 0.01, 0, 2 * s},
		"never a tight loop":             {0, 0, 10 * ms, 0.5, 0.01, 0, 50 * ms},
		"already over":                   {2 * h, 0, h, 0.5, 0.01, 0, 2*h + 50*ms},
		"ratios that are more than life": {0, 0, h, 0.9, 0.9, almostOne, 50 * ms},
		"a token":                        {0, 0, 5 * m, 0.5, 0.1, almostOne, 2 * m},
	} {
		got := renew.RenewAt(at(c.received), at(c.notBefore), at(c.notAfter), c.grace, c.jitter, c.u)
		assert.WithinDuration(t, at(c.want), got, time.Microsecond, name)
	}

	for _, life := range []time.Duration{s, m, h, 24 * h, 90 * 24 * h} {
		for _, u := range []float64{0, 0.25, 0.5, 0.75, almostOne} {
			got := renew.RenewAt(noon, noon.Add(-h), noon.Add(life), 0.5, 0.01, u).Sub(noon)
			assert.LessOrEqual(t, got, life/2, "never later than the grace ratio says")
			assert.GreaterOrEqual(t, got, life*49/100, "never earlier than the jitter allows")
		}
	}
}

func TestRenewPoll(t *testing.T) {
	t.Parallel()
	const h, m, s, ms = time.Hour, time.Minute, time.Second, time.Millisecond
	for name, c := range map[string]struct {
		hint, floor, ceiling time.Duration
		low, high            time.Duration // the range over all random numbers
	}{
		"the usual":               {renew.UsualPoll, s, 24 * h, 270 * s, 330 * s},
		"a hint":                  {100 * s, s, 24 * h, 90 * s, 110 * s},
		"a hint that is short":    {ms, s, 24 * h, s, 1100 * ms},
		"a hint that is long":     {math.MaxInt64, s, 24 * h, 24 * h * 9 / 10, 24 * h},
		"a hint without an end":   {math.MaxInt64, m, renew.Longest, renew.Longest / 10 * 9, renew.Longest},
		"bounds that leave none":  {120 * s, m, m, m, 66 * s},
		"a hint near the ceiling": {120 * s, s, 125 * s, 108 * s, 125 * s},
		"a hint near the floor":   {120 * s, 115 * s, 24 * h, 115 * s, 132 * s},
	} {
		assert.InDelta(t, c.low, renew.Poll(c.hint, c.floor, c.ceiling, 0), 1000, name)
		assert.InEpsilon(t, c.high, renew.Poll(c.hint, c.floor, c.ceiling, almostOne), 1e-9, name)
	}
}

func TestRenewNewFailure(t *testing.T) {
	t.Parallel()
	const h = time.Hour
	plain := errors.New("down")
	for _, c := range []struct {
		err  error
		want renew.Failure
	}{
		{plain, renew.Failure{Times: 3}},
		{says{after: h, ok: true}, renew.Failure{Times: 3, Wish: h}},
		{says{ok: true}, renew.Failure{Times: 3}},
		{says{after: -h, ok: true}, renew.Failure{Times: 3}},
		{says{}, renew.Failure{Times: 3, Final: true}},
		{fmt.Errorf("x: %w", says{after: h, ok: true}), renew.Failure{Times: 3, Wish: h}},
		{errors.Join(plain, says{after: h, ok: true}), renew.Failure{Times: 3, Wish: h}},
	} {
		assert.Equal(t, c.want, renew.NewFailure(3, c.err))
	}
}

func times(n int) renew.Failure { return renew.Failure{Times: n} }

func TestRenewBackoff(t *testing.T) {
	t.Parallel()
	const h, m, s, ms = time.Hour, time.Minute, time.Second, time.Millisecond
	b := renew.Backoff{Low: 50 * ms, First: s, High: 30 * s, Wish: m}
	for name, c := range map[string]struct {
		f         renew.Failure
		low, high time.Duration
	}{
		"none":                      {times(0), 50 * ms, s},
		"first":                     {times(1), 50 * ms, s},
		"second":                    {times(2), 50 * ms, 2 * s},
		"fifth":                     {times(5), 50 * ms, 16 * s},
		"sixth":                     {times(6), 50 * ms, 30 * s},
		"no more failures than fit": {times(math.MaxInt), 50 * ms, 30 * s},
		"refused for good":          {renew.Failure{Times: 1, Final: true}, 15 * s, 30 * s},
		"a wish":                    {renew.Failure{Times: 1, Wish: 10 * s}, 10 * s, 11 * s},
		"a wish that is long":       {renew.Failure{Times: 1, Wish: h}, m, m},
		"a wish that is shorter":    {renew.Failure{Times: 1, Wish: ms}, 50 * ms, s},
	} {
		assert.InDelta(t, c.low, b.Wait(c.f, 0), 1000, name)
		assert.InDelta(t, c.high, b.Wait(c.f, almostOne), 1000, name)
	}
	// Bounds that make no sense are no tight loop and no overflow.
	assert.Equal(t, s, renew.Backoff{Low: s}.Wait(times(9), almostOne))
	assert.Equal(t, s, renew.Backoff{Low: s, First: h, High: ms}.Wait(times(9), almostOne))
	assert.LessOrEqual(t, renew.Backoff{Low: s, First: h, High: renew.Longest}.Wait(times(99), almostOne), renew.Longest)
}

func TestRenewPatience(t *testing.T) {
	t.Parallel()
	const h, m, s, ms = time.Hour, time.Minute, time.Second, time.Millisecond
	var (
		identities = renew.Patience{Impatient: 30 * s, Longest: 30 * m, Wish: h}
		tokens     = renew.Patience{Impatient: 5 * s, Longest: 30 * s, Wish: 5 * s}
		quick      = renew.Patience{Low: 250 * ms, Impatient: 5 * s, Longest: 30 * s, Wish: 5 * s}
	)
	wish := func(d time.Duration) renew.Failure { return renew.Failure{Times: 1, Wish: d} }
	final := renew.Failure{Times: 1, Final: true}
	for name, c := range map[string]struct {
		p          renew.Patience
		f          renew.Failure
		life, left time.Duration
		low, high  time.Duration // the range over all random numbers
	}{
		"first":                           {identities, times(1), 24 * h, 12 * h, s, 2 * s},
		"third":                           {identities, times(3), 24 * h, 12 * h, s, 8 * s},
		"many":                            {identities, times(100), 24 * h, 12 * h, s, 12 * h / 25},
		"no more failures than fit":       {identities, times(math.MaxInt), 24 * h, 12 * h, s, 12 * h / 25},
		"months":                          {identities, times(100), 9000 * h, 4500 * h, s, 30 * m},
		"near the end":                    {identities, times(100), h, m, s, m / 25},
		"at the end":                      {identities, times(100), h, s, s, s},
		"ended":                           {identities, times(100), h, 0, s, 30 * s},
		"never had one":                   {identities, times(100), 0, 0, s, 30 * s},
		"never had one, short ones asked": {identities, times(100), 4 * s, 0, 50 * ms, s},
		"seconds":                         {identities, times(9), 20 * s, 10 * s, 50 * ms, 400 * ms},
		"refused for good":                {identities, final, 24 * h, 12 * h, 6 * h / 25, 12 * h / 25},
		"refused for good, nothing held":  {identities, final, 0, 0, 15 * s, 30 * s},
		"a wish":                          {identities, wish(10 * m), 24 * h, 12 * h, 10 * m, 11 * m},
		"a wish that is shorter":          {identities, wish(ms), 24 * h, 12 * h, s, 2 * s},
		"a wish beyond the end":           {identities, wish(100 * h), 24 * h, 12 * h, 6 * h, 6 * h},
		"a wish, nothing held":            {identities, wish(100 * h), 0, 0, h, h},

		"token, first":                    {tokens, times(1), 5 * m, 150 * s, 600 * ms, 1200 * ms},
		"token, tenth":                    {tokens, times(10), 5 * m, 150 * s, 600 * ms, 6 * s},
		"token, tenth, much left":         {tokens, times(10), 20 * h, 10 * h, s, 30 * s},
		"token, tenth, ended":             {tokens, times(10), 5 * m, -h, 600 * ms, 5 * s},
		"token, thousandth, none":         {tokens, times(1000), 0, 0, s, 5 * s},
		"token, little left":              {tokens, times(10), 5 * m, s, 600 * ms, 600 * ms},
		"token, a wish":                   {tokens, wish(20 * s), 5 * m, 150 * s, 20 * s, 22 * s},
		"token, a long wish":              {tokens, wish(h), 5 * m, 150 * s, 75 * s, 75 * s},
		"token, a long wish, little left": {tokens, wish(h), 5 * m, 20 * s, 10 * s, 10 * s},
		"token, a long wish, none":        {tokens, wish(h), 0, 0, 5 * s, 5 * s},
		"token, refused, none":            {tokens, final, 0, 0, 2500 * ms, 5 * s},

		"quick, first":             {quick, times(1), 0, 0, 250 * ms, 500 * ms},
		"quick, tenth":             {quick, times(10), 0, 0, 250 * ms, 5 * s},
		"quick, tenth, much left":  {quick, times(10), 24 * h, 12 * h, 250 * ms, 30 * s},
		"quick, first, short life": {quick, times(1), 50 * s, 25 * s, 100 * ms, 200 * ms},
	} {
		assert.InDelta(t, c.low, c.p.Wait(c.f, c.life, c.left, 0), 1000, name)
		assert.InDelta(t, c.high, c.p.Wait(c.f, c.life, c.left, almostOne), 1000, name)
	}

	// What does not end.
	for _, c := range []struct {
		p         renew.Patience
		f         renew.Failure
		low, high time.Duration
	}{
		{tokens, times(1), s, 2 * s},
		{tokens, times(10), s, 30 * s},
		{quick, times(2), 250 * ms, s},
		{tokens, wish(h), 5 * s, 5 * s},
		{tokens, final, 15 * s, 30 * s},
	} {
		assert.InDelta(t, c.low, c.p.WaitEndless(c.f, 0), 1000)
		assert.InDelta(t, c.high, c.p.WaitEndless(c.f, almostOne), 1000)
	}

	// Whatever happens, it is no tight loop, and at most 4 % of what is left.
	for life := s; life < 1000*h; life *= 3 {
		for left := life; left > 0; left /= 2 {
			for _, u := range []float64{0, 0.5, almostOne} {
				for n := range 40 {
					wait := identities.Wait(renew.Failure{Times: n + 1, Final: n%2 == 1}, life, left, u)
					floor := max(min(life/500, s), 50*ms)
					assert.GreaterOrEqual(t, wait, floor)
					assert.LessOrEqual(t, wait, max(left/25, floor))
				}
			}
		}
	}
}

func TestRenewNextEnd(t *testing.T) {
	t.Parallel()
	const h = time.Hour
	noon := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	at := func(d time.Duration) time.Time { return noon.Add(d) }
	for _, c := range []struct {
		ends []time.Time
		want time.Time
	}{
		{nil, time.Time{}},
		{[]time.Time{{}}, time.Time{}},
		{[]time.Time{at(2 * h), at(h), {}, at(3 * h)}, at(h)},
		{[]time.Time{at(-h), at(2 * h), at(-2 * h)}, at(2 * h)},
		{[]time.Time{at(-2 * h), {}, at(-h), at(-3 * h)}, at(-h)},
		{[]time.Time{noon}, noon},
		{[]time.Time{noon, at(h)}, at(h)},
	} {
		assert.Equal(t, c.want, renew.NextEnd(noon, slices.Values(c.ends)))
	}
}

func TestRenewAttemptTime(t *testing.T) {
	t.Parallel()
	const h, m, s = time.Hour, time.Minute, time.Second
	for _, c := range []struct{ left, want time.Duration }{
		{0, 30 * s},
		{-h, 30 * s},
		{12 * h, 30 * s},
		{30 * m, 18 * s},
		{m, 5 * s},
	} {
		assert.Equal(t, c.want, renew.AttemptTime(30*s, c.left), "%v", c.left)
	}
}

// What has passed by clocks that say different things brings the next attempt of a Loop nearer.
func TestRenewElapsed(t *testing.T) {
	t.Parallel()
	const h, m, s, ms = time.Hour, time.Minute, time.Second, time.Millisecond
	for name, c := range map[string]struct{ mono, wall, want time.Duration }{
		"both walk":                    {m, m, m},
		"drift is not believed":        {m, m + 900*ms, m},
		"nor a second":                 {m, m + s, m},
		"a suspension":                 {m, h, h},
		"suspended for the night":      {s, 8 * h, 8 * h},
		"put back a year":              {m, -365 * 24 * h, m},
		"put back a little":            {m, 59 * s, m},
		"clocks of different machines": {-h, -h, 0},
	} {
		var mu sync.Mutex
		l, e, now := renew.Loop[*renew.Entry]{Mu: &mu, Hold: true}, new(renew.Entry), time.Now()
		mono, wall := now, now.Round(0)
		l.SetClock(func() (time.Time, time.Time) { return mono, wall })
		mu.Lock()
		l.Put(e, 24*h)
		mono, wall = mono.Add(c.mono), wall.Add(c.wall)
		assert.Equal(t, c.want, 24*h-l.Next(e).Sub(wall), name)
		mu.Unlock()
	}
	now := time.Now()
	assert.Equal(t, h, renew.Elapsed(now, now.Add(h)))
	assert.Equal(t, time.Duration(0), renew.Elapsed(now.Add(h), now))
}
