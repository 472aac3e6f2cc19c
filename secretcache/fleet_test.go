package secretcache_test

import (
	"bytes"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/secretcache"
)

var update = flag.Bool("update", false, "write the files in testdata again")

// pace is the arithmetic of a Manager.
type pace struct {
	renewAt    func(received, notAfter time.Time, u float64) time.Time
	retryAfter func(failures int, life, left time.Duration, u float64) time.Duration
}

func paceOf(cfg secretcache.Config) pace {
	renewAt, retryAfter := secretcache.Pace(cfg)
	return pace{renewAt, retryAfter}
}

// obtain plays one certificate of a client, from its receipt to that of the next. The CA is away from down to up: it
// refuses, or hangs, and then a call takes as long as the Manager lets it.
func (p pace) obtain(received, notAfter, down, up time.Time, timeout time.Duration, random *rand.Rand) (next time.Time) {
	life := notAfter.Sub(received)
	at := p.renewAt(received, notAfter, random.Float64())
	for failures := 1; !at.Before(down) && at.Before(up); failures++ {
		if timeout > 0 {
			at = at.Add(renew.AttemptTime(timeout, notAfter.Sub(at)))
		}
		at = at.Add(p.retryAfter(failures, life, notAfter.Sub(at), random.Float64()))
	}
	return at
}

// TestOutageSweep plays every outage, by its start and by its length of up to 45 % of the life, each in steps of 1 %, for
// lives of 20 seconds to a day, with the arithmetic of the Manager; TestOutage has the Manager itself. Nothing
// expires, and the certificate is renewed before another 5 % of what is left are gone. A CA that hangs can take the time
// of one attempt more, which is a sixth of Config.Timeout where that is more than a hundredth of what is left.
func TestOutageSweep(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	each := rounds.Of(1)
	sweep := func(p pace) (outages, expired, slow int, slowest float64) {
		random := rand.New(rand.NewPCG(1, 2))
		received := time.Unix(1_000_000_000, 0)
		for _, life := range []time.Duration{20 * time.Second, time.Minute, 10 * time.Minute, time.Hour, 24 * time.Hour} {
			notAfter := received.Add(life)
			for _, timeout := range []time.Duration{0, min(30*time.Second, life/20)} {
				for start := range 100 {
					down := received.Add(life * time.Duration(start) / 100)
					for length := 1; length <= 45; length++ {
						up := down.Add(life * time.Duration(length) / 100)
						for range each {
							outages++
							next := p.obtain(received, notAfter, down, up, timeout, random)
							if !next.Before(notAfter) {
								expired++
							}
							if next.Before(up) || p.renewAt(received, notAfter, 0).After(up) && next.Equal(p.renewAt(received, notAfter, 0)) {
								continue // not met by the outage
							}
							left := notAfter.Sub(up)
							allowed := left/20 + renew.Shortest
							if timeout > 0 {
								allowed += max(renew.AttemptTime(timeout, left)-left/100, 0)
							}
							if took := next.Sub(up); took > allowed && p.renewAt(received, notAfter, 1).Before(up) {
								slow++
								slowest = max(slowest, float64(took)/float64(left))
							}
						}
					}
				}
			}
		}
		return outages, expired, slow, slowest
	}
	// A renewal that is due in the last half of the life, so that outages meet it early and late.
	p := paceOf(secretcache.Config{Jitter: 0.0001})
	outages, expired, slow, slowest := sweep(p)
	t.Logf("%d outages", outages)
	assert.Zero(t, expired, "expired")
	assert.Zero(t, slow, "after %.1f %% of what was left", 100*slowest)

	ladder := p
	ladder.retryAfter = func(failures int, _, _ time.Duration, u float64) time.Duration {
		return renew.Backoff{Low: time.Second, First: 2 * time.Second, High: 30 * time.Second}.Wait(renew.Failure{Times: failures}, u)
	}
	_, expired, slow, slowest = sweep(ladder)
	t.Logf("waits up to 30 seconds, whatever is left: %d expired, and %d were renewed after up to %.0f %% of what was left", expired, slow, 100*slowest)
	assert.Greater(t, expired, 100, "this test can fail")
	assert.Greater(t, slow, 1000, "this test can fail")
}

// fleet is a histogram of the renewals of all clients of a CA, per hundredth of a life.
type fleet struct {
	title string
	bins  [fleetBins]int
	mean  float64
	work  [2]int // the bins in which what is due must not wait
}

const (
	fleetLife = 24 * time.Hour
	fleetBin  = fleetLife / 100
	fleetBins = 600
	fleetFrom = 100 // what is before it is the time until the fleet is in its pace
)

// peak returns the largest bin, relative to the mean, of those from a to b, without those where what is due must not wait.
func (f *fleet) peak(a, b int) float64 {
	most := 0
	for i := a; i < b; i++ {
		if i < f.work[0] || i >= f.work[1] {
			most = max(most, f.bins[i])
		}
	}
	return float64(most) / f.mean
}

func newFleet(title string, n int, p pace, oneMoment bool, outage, orphaned time.Duration) *fleet {
	const event = 300 // bin
	f := &fleet{title: title}
	start := time.Unix(1_000_000_000, 0)
	down := start.Add(event * fleetBin)
	up := down.Add(outage)
	random := rand.New(rand.NewPCG(uint64(n), 5))
	steady := 0
	for range n {
		at := start
		if !oneMoment {
			at = start.Add(-time.Duration(random.Float64() * float64(fleetLife) / 2))
		}
		told := down.Add(time.Duration(random.Float64() * float64(orphaned)))
		for {
			next := p.obtain(at, at.Add(fleetLife), down, up, 0, random)
			if orphaned > 0 && at.Before(down) && next.After(told) {
				next = told // no peer accepts what it has
			}
			i := int(next.Sub(start) / fleetBin)
			if i >= fleetBins {
				break
			}
			if i >= 0 {
				f.bins[i]++
			}
			if i >= fleetFrom && i < event {
				steady++
			}
			at = next
		}
	}
	f.mean = float64(steady) / (event - fleetFrom)
	f.work = [2]int{event, event}
	switch {
	case outage > 0:
		f.work = [2]int{int(up.Sub(start) / fleetBin), int(up.Sub(start)/fleetBin) + 5}
	case orphaned > 0:
		f.work[1] += int((orphaned + fleetBin - 1) / fleetBin)
	}
	return f
}

// TestFleet holds what the CA of a fleet sees, with the arithmetic of the Manager: in no hundredth of a life are there
// more than three times as many renewals as on the average. Not when all clients were started in one moment, not in the
// lives after an outage, and not in those after the root was replaced. What must not wait is not held to it: after an
// outage the backlog is renewed before another 5 % of what each has left are gone, and after a root was withdrawn each
// client renews as soon as it knows.
func TestFleet(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	n := 10_000
	if *long {
		n = 1_000_000
	}
	play := func(p pace, n int) []*fleet {
		return []*fleet{
			newFleet("all started in one moment", n, p, true, 0, 0),
			newFleet("the CA is away for 10 % of a life", n, p, false, fleetLife/10, 0),
			newFleet("the CA is away for 45 % of a life", n, p, false, fleetLife*45/100, 0),
			newFleet("the root is withdrawn, and all learn of it within 5 minutes", n, p, false, 0, renew.UsualPoll),
		}
	}
	fleets := play(paceOf(secretcache.Config{}), n)
	for _, f := range fleets {
		t.Logf("%s: at most %.2f times the mean; %.2f where what is due must not wait", f.title, f.peak(0, fleetBins),
			float64(slices.Max(f.bins[f.work[0]:max(f.work[1], f.work[0]+1)]))/f.mean)
		assert.LessOrEqual(t, f.peak(0, fleetBins), 3.0, f.title)
	}
	for _, f := range play(paceOf(secretcache.Config{Jitter: 0.01}), n/10) {
		assert.Greater(t, f.peak(0, fleetBins), 3.0, "this test can fail: %s", f.title)
	}
	if n != 10_000 {
		return
	}
	const file = "testdata/fleet.svg"
	svg := drawFleets(fleets, n)
	if *update {
		require.NoError(t, os.MkdirAll("testdata", 0o755))
		require.NoError(t, os.WriteFile(file, svg, 0o644))
	}
	have := must.Get(os.ReadFile(file))(t)
	assert.Equal(t, string(have), string(svg), "%s is not what the test draws: go test ./secretcache -run TestFleet -update", file)
}

// hour is what an hour without any CA does to a fleet.
type hour struct {
	expired  float64       // the share of the clients that have no valid certificate for a while
	first    time.Duration // after the begin, the first of them; 0 for none
	perLife  float64       // renewals of a client in a life, before
	minute   float64       // the largest number of renewals in a minute after the hour, as a multiple of the mean
	recovery time.Duration // until 99 of 100 that were due in the hour have renewed
}

func (p pace) hour(n int, life time.Duration) (h hour) {
	start := time.Unix(1_000_000_000, 0)
	down := start.Add(3 * life)
	up := down.Add(time.Hour)
	random := rand.New(rand.NewPCG(uint64(n), 6))
	var before int
	var late []time.Duration // after up
	minutes := map[int]int{}
	for range n {
		at := start.Add(-time.Duration(random.Float64() * float64(life) / 2))
		for at.Before(up.Add(life)) {
			end := at.Add(life)
			next := p.obtain(at, end, down, up, 0, random)
			if !next.Before(start.Add(life)) && next.Before(down) {
				before++
			}
			if !end.After(next) {
				h.expired++
				if since := end.Sub(down); h.first == 0 || since < h.first {
					h.first = since
				}
			}
			if at.Before(down) && !next.Before(up) && p.renewAt(at, end, 1).Before(up) { // it was due
				late = append(late, next.Sub(up))
			}
			if !next.Before(up) {
				minutes[int(next.Sub(up)/time.Minute)]++
			}
			at = next
		}
	}
	h.expired /= float64(n)
	h.perLife = float64(before) / float64(n) / 2
	most := 0
	for _, m := range minutes {
		most = max(most, m)
	}
	h.minute = float64(most) / (h.perLife * float64(n) * float64(time.Minute) / float64(life))
	slices.Sort(late)
	if len(late) > 0 {
		h.recovery = late[len(late)*99/100]
	}
	return h
}

// TestFleetHour plays an hour without any CA, and has the page say what it does. Nothing expires where an hour is at
// most 45 % of a life.
func TestFleetHour(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	n := 10_000
	if *long {
		n = 1_000_000
	}
	page := string(must.Get(os.ReadFile("../examples/SCALE.md"))(t))
	p := paceOf(secretcache.Config{})
	for _, hours := range []float64{1, 1.5, 2, 3, 6, 24} {
		life := time.Duration(hours * float64(time.Hour))
		h := p.hour(n, life)
		expired := "none"
		if h.expired > 0 {
			expired = fmt.Sprintf("%.0f %%, the first after %.0f min", 100*h.expired, h.first.Minutes())
		}
		row := fmt.Sprintf("| %g h | %s | %.0f | %.0f min |", hours, expired, h.minute,
			math.Ceil(h.recovery.Minutes()))
		t.Logf("%s %.2f renewals in a life", row, h.perLife)
		if n == 10_000 {
			assert.Contains(t, page, row)
		}
		if time.Hour <= life*45/100 {
			assert.Zero(t, h.expired, life)
		}
	}
	assert.Greater(t, p.hour(n/10, time.Hour).expired, 0.9, "this test can fail")
}

// drawFleets returns the histograms as SVG, which is readable on light and on dark.
func drawFleets(fleets []*fleet, n int) []byte {
	const (
		left, width, row, high, top = 44, 660, 118, 72, 52
		scale                       = 4 // times the mean that a row shows
	)
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="Renewals of a fleet per hundredth of a lifetime">
<style>
svg { color: #1f2328; background: #fff }
.bar { fill: #2f6fc4 } .work { fill: #b35900 } .axis { stroke: currentColor; opacity: .45 } .limit { stroke: #c4302b; stroke-dasharray: 4 3 }
text { fill: currentColor } .dim { opacity: .75 }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0d1117 } .bar { fill: #6ea8fe } .work { fill: #f0a35e } .limit { stroke: #ff7b72 } }
</style>
<text x="%d" y="20" font-size="14" font-weight="600">Renewals per hundredth of a lifetime, as multiples of the mean</text>
<text x="%d" y="38" class="dim">%d clients with the default GraceRatio and Jitter; what must not wait is in the second colour; dashed: 3</text>
`, left+width+16, top+row*len(fleets)+24, left, left, n)
	for i, f := range fleets {
		base := top + row*i + 26 + high
		y := func(multiple float64) float64 { return float64(base) - min(multiple, scale)/scale*high }
		fmt.Fprintf(&b, `<text x="%d" y="%d">%s</text>`+"\n", left, base-high-8, f.title)
		for _, m := range []int{1, 3} {
			fmt.Fprintf(&b, `<text x="%d" y="%.1f" text-anchor="end" class="dim">%d×</text>`+"\n", left-6, y(float64(m))+4, m)
		}
		var bars [2]bytes.Buffer
		for bin, count := range f.bins {
			kind := 0
			if bin >= f.work[0] && bin < f.work[1] {
				kind = 1
			}
			x := left + float64(bin)*width/fleetBins
			fmt.Fprintf(&bars[kind], "M%.1f %dV%.1fh1.1V%dz", x, base, y(float64(count)/f.mean), base)
		}
		fmt.Fprintf(&b, `<path class="bar" d="%s"/>`+"\n", bars[0].Bytes())
		if bars[1].Len() > 0 {
			fmt.Fprintf(&b, `<path class="work" d="%s"/>`+"\n", bars[1].Bytes())
			most := float64(slices.Max(f.bins[f.work[0]:f.work[1]])) / f.mean
			fmt.Fprintf(&b, `<text x="%.1f" y="%d" class="dim">%.0f×</text>`+"\n", left+float64(f.work[1])*width/fleetBins+4, base-high+8, most)
		}
		fmt.Fprintf(&b, `<path class="axis" d="M%d %dh%d"/><path class="limit" d="M%d %.1fh%d"/>`+"\n", left, base, width, left, y(3), width)
	}
	for life := range fleetBins/100 + 1 {
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle" class="dim">%d</text>`+"\n", left+life*100*width/fleetBins, top+row*len(fleets)+2, life)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="middle" class="dim">lifetimes since the start</text>`+"\n</svg>\n", left+width/2, top+row*len(fleets)+18)
	return b.Bytes()
}
