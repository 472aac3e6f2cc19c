package workloadapi_test

import (
	"crypto/x509"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/renew"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/rounds"
	wire "github.com/svidkit/svidkit/internal/test/wire/workloadapi"
	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// pace is how a client decides when to ask again; see workloadapi.Pace.
type pace func(good bool, received, end, now time.Time, u float64) time.Duration

// schedule is one outage of an agent. Times are since the client has started.
type schedule struct {
	life     time.Duration
	down, up time.Duration
	renewal  float64 // the share of the life after which the agent renews
	random   *rand.Rand

	// The results. left is what was left of the identity when the agent came back, 0 if there was none, and took
	// how long the client then took.
	left, took time.Duration
}

// run plays the schedule: an agent that sends an identity at once, renews it and is away meanwhile.
func (s *schedule) run(next pace) {
	zero := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(d time.Duration) time.Time { return zero.Add(d) }
	away := func(d time.Duration) bool { return d >= s.down && d < s.up }
	var received, end time.Time
	now := time.Duration(0)
	for {
		if away(now) {
			now += next(false, received, end, at(now), s.random.Float64())
			continue
		}
		if now >= s.up { // back
			s.took = now - s.up
			if !end.IsZero() {
				s.left = end.Sub(at(s.up))
			}
			return
		}
		// The stream is open until the outage, and the agent renews on it.
		period := time.Duration(s.renewal * float64(s.life))
		received = at(now + (s.down-now)/period*period)
		end = received.Add(s.life)
		now = s.down
		now += next(true, received, end, at(now), s.random.Float64())
	}
}

// TestOutageArithmetic plays outages that start at any moment and take up to 45 % of the life, of lives
// from 20 seconds to a day: no identity expires. The ladder up to 30 seconds that is usual loses some.
func TestOutageArithmetic(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-18")
	play := func(make func() pace) (expired int, slowest float64, first time.Duration) {
		random := rand.New(rand.NewPCG(1, 2))
		for range rounds.Of(700) {
			life := time.Duration(20 * float64(time.Second) * math.Pow(24*3600/20, random.Float64()))
			down := time.Duration((3.2*random.Float64() - 0.2) * float64(life)) // before the client has started, too
			s := schedule{
				life: life, down: down, up: down + time.Duration(0.45*random.Float64()*float64(life)),
				renewal: 0.45 + 0.05*random.Float64(), random: random,
			}
			if s.up <= 0 {
				continue
			}
			s.run(make())
			if down <= 0 { // there was nothing before
				first = max(first, s.took)
				continue
			}
			require.Positive(t, s.left)
			slowest = max(slowest, float64(s.took)/float64(s.left))
			if s.took >= s.left {
				expired++
			}
		}
		return expired, slowest, first
	}
	expired, slowest, first := play(func() pace { return workloadapi.Pace() })
	assert.Zero(t, expired)
	assert.Less(t, slowest, 0.055) // 5 %, and the shortest wait where little is left of a short life
	assert.LessOrEqual(t, first, 5*time.Second)
	t.Logf("after %.1f %% of what was left at most, and %v if there was nothing", 100*slowest, first)
	expired, slowest, first = play(func() pace {
		failures := 0
		return func(good bool, _, _, _ time.Time, u float64) time.Duration {
			if good {
				failures = 0
				return 0
			}
			failures++
			return renew.Backoff{Low: time.Second, First: 2 * time.Second, High: 30 * time.Second}.Wait(renew.Failure{Times: failures}, u)
		}
	})
	assert.Greater(t, expired, rounds.Of(50)/16, "this test can fail")
	t.Logf("a ladder: %d expired, after %.0f %% of what was left at most, and %v if there was nothing", expired, 100*slowest, first)
}

// lasting returns a response with an identity that is good for life from now on.
func lasting(t testing.TB, d domain, life time.Duration) *wire.X509SVIDResponse {
	now := time.Now()
	return response(t, d, d.SVID("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = now.Add(-time.Second), now.Add(life) }))
}

// TestOutage runs a source through an outage: its readers have an identity that is good at every moment, and once
// the agent is back, the identity is renewed before another 5 % of what is left are gone.
func TestOutage(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "WAPI-18")
	long := 24 * time.Hour // with an attempt every five seconds at most while the agent is away
	if rounds.Of(1) == 1 {
		long = 20 * time.Minute
	}
	for i, life := range []time.Duration{20 * time.Second, time.Minute, long} {
		for j, begin := range []time.Duration{2, 17, 48} {
			for k, percent := range []time.Duration{8, 25, 45} {
				if (i+j+k)%3 >= rounds.Of(1) { // by default each with each other, once
					continue
				}
				begin, outage := life*begin/100, life*percent/100
				t.Run(fmt.Sprint(life, " from ", begin, " for ", outage), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						home := workloadtest.NewDomain(t, "example.org")
						start := time.Now()
						s := source(t, workloadapi.Config{}, func(c *call) {
							if up := time.Since(start) - begin; up >= 0 && up < outage {
								c.end(workloadtest.Unavailable, "")
								return
							}
							c.send(lasting(t, home, life))
							if d := begin - time.Since(start); d > 0 {
								c.sleep(d)
								return // the agent stops
							}
							c.wait()
						})
						require.NoError(t, s.Ready(t.Context()))
						first := must.Get(s.SVID())(t)
						left := first.NotAfter().Sub(start.Add(begin + outage))
						for svid := first; svid == first; svid = must.Get(s.SVID())(t) {
							require.LessOrEqual(t, time.Since(start), begin+outage+left/20, "not renewed, with %v left", left)
							time.Sleep(life / time.Duration(rounds.Of(250)))
							synctest.Wait()
							require.True(t, time.Now().Before(must.Get(s.SVID())(t).NotAfter()), "expired")
						}
						require.GreaterOrEqual(t, time.Since(start), begin+outage)
					})
				})
			}
		}
	}
}
