package ca

import (
	"crypto/x509"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func at(minutes int) time.Time { return epoch.Add(time.Duration(minutes) * time.Minute) }

// timeline writes roots as "1:retiring@70 2:active", with the minute of the next step.
func timeline(roots []root) string {
	var parts []string
	for _, r := range roots {
		s := fmt.Sprintf("%v:%v", r.cert.SerialNumber, r.phase)
		if due := r.due(); !due.IsZero() {
			s += fmt.Sprintf("@%d", int(due.Sub(epoch).Minutes()))
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, " ")
}

func history(steps []step) string {
	var parts []string
	for _, s := range steps {
		what := []string{fmt.Sprintf("%d:", int(s.at.Sub(epoch).Minutes()))}
		if s.activated != nil {
			what = append(what, fmt.Sprintf("+%v", s.activated.SerialNumber))
		}
		for _, c := range s.retired {
			what = append(what, fmt.Sprintf("-%v", c.SerialNumber))
		}
		parts = append(parts, strings.Join(what, ""))
	}
	return strings.Join(parts, " ")
}

func cert(n int64) *x509.Certificate { return &x509.Certificate{SerialNumber: big.NewInt(n)} }

func active(n int64) root { return root{cert: cert(n), issuer: new(pki.Issuer), phase: Active} }
func distributing(n int64, minute int) root {
	return root{cert: cert(n), issuer: new(pki.Issuer), phase: Distributing, activates: at(minute)}
}
func retiring(n int64, minute int) root {
	return root{cert: cert(n), phase: Retiring, retires: at(minute)}
}

func TestAdvance(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Minute
	never := time.Time{}
	rotating := []root{active(1), distributing(2, 25)}
	for _, tt := range []struct {
		name     string
		roots    []root
		lastLeaf time.Time
		now      time.Time
		want     string
		steps    string
	}{
		{"one root has no steps", []root{active(1)}, at(60), at(1e6), "1:active", ""},
		{"too early to activate", rotating, at(60), at(25).Add(-1), "1:active 2:distributing@25", ""},
		{"activates on the dot", rotating, at(60), at(25), "1:retiring@62 2:active", "25:+2"},
		{"the last leaf's grace is not over", rotating, at(60), at(62).Add(-1), "1:retiring@62 2:active", "25:+2"},
		{"retires when the last leaf and the grace are over", rotating, at(60), at(62), "2:active", "25:+2 62:-1"},
		{"a reader that comes late sees the same steps", rotating, at(60), at(1e6), "2:active", "25:+2 62:-1"},
		{"a root that signed nothing retires as it is replaced", rotating, never, at(25), "2:active", "25:+2-1"},
		{"the last leaf ended long before", rotating, at(5), at(25), "2:active", "25:+2-1"},
		{"the last leaf ended, its grace has not", rotating, at(24), at(25), "1:retiring@26 2:active", "25:+2"},
		{"the clock went back before the preparation", rotating, at(60), epoch.AddDate(-30, 0, 0), "1:active 2:distributing@25", ""},
		{"the clock went back after the activation", []root{retiring(1, 62), active(2)}, at(90), epoch.AddDate(-30, 0, 0), "1:retiring@62 2:active", ""},
		{"old roots retire each at its time", []root{retiring(1, 70), retiring(2, 50), active(3)}, at(90), at(60), "1:retiring@70 3:active", "50:-2"},
		{"two at one time are one step", []root{retiring(1, 50), retiring(2, 50), active(3)}, at(90), at(50), "3:active", "50:-1-2"},
		{"an activation and a retirement at one time are one step", []root{retiring(1, 50), active(2), distributing(3, 50)}, at(90), at(55), "2:retiring@92 3:active", "50:+3-1"},
		{"the new root's leaves are not the old one's", []root{active(1), distributing(2, 25)}, at(1e6), at(30), "1:retiring@1000002 2:active", "25:+2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			before := timeline(tt.roots)
			roots, steps := advance(tt.roots, tt.lastLeaf, grace, tt.now)
			assert.Equal(t, tt.want, timeline(roots))
			assert.Equal(t, tt.steps, history(steps))
			assert.Equal(t, before, timeline(tt.roots), "the input was changed")
			for _, r := range roots {
				assert.Equal(t, r.phase != Retiring, r.issuer != nil, "exactly the roots that may sign have a key: %v", r.cert.SerialNumber)
			}
		})
	}
}

// Whoever looks, and however often, early, late or with a clock that goes back: the roots take the
// same steps.
func TestAdvanceDoesNotDependOnWhoLooks(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		start := []root{active(0)}
		for n := range rng.Int64N(6) {
			start = append([]root{retiring(-1-n, rng.IntN(200))}, start...)
		}
		if rng.IntN(4) > 0 {
			start = append(start, distributing(1, rng.IntN(200)))
		}
		lastLeaf := at(rng.IntN(250))
		grace := time.Duration(rng.IntN(10)) * time.Minute
		want, wantSteps := advance(start, lastLeaf, grace, at(1000))

		roots, last := start, lastLeaf
		var steps []step
		for latest := 0; latest < 1000; {
			now := rng.IntN(latest + 60) // often before what was seen already
			latest = max(latest, now)
			if rng.IntN(20) == 0 {
				latest, now = 1000, 1000
			}
			before := slices.Clone(roots)
			var s []step
			roots, s = advance(roots, last, grace, at(now))
			for _, st := range s {
				if st.activated != nil {
					last = time.Time{}
				}
			}
			steps = append(steps, s...)

			n := 0
			for _, r := range roots {
				if r.phase == Active {
					n++
				}
				i := slices.IndexFunc(before, func(b root) bool { return b.cert == r.cert })
				require.GreaterOrEqual(t, i, 0, "seed %d: a root came back", seed)
				require.GreaterOrEqual(t, r.phase, before[i].phase, "seed %d: a root went back", seed)
			}
			require.Equal(t, 1, n, "seed %d: active roots", seed)
		}
		require.Equal(t, timeline(want), timeline(roots), "seed %d", seed)
		require.Equal(t, history(wantSteps), history(steps), "seed %d", seed)
	}
}

func TestReachedAsksBothClocks(t *testing.T) {
	t.Parallel()
	now := time.Now() // with a monotonic reading
	assert.True(t, reached(now, now))
	assert.False(t, reached(now, now.Add(1)))
	assert.True(t, reached(now, now.Round(0)), "a time without a monotonic reading is compared by the wall clock")
	assert.False(t, reached(now, now.Round(0).Add(1)))
	assert.False(t, reached(now.Round(0), now.Add(1)))
}

func TestRotateAt(t *testing.T) {
	t.Parallel()
	const day = 24 * time.Hour
	for _, tt := range []struct {
		name              string
		root, max, spread time.Duration
		left              time.Duration
	}{
		{"the defaults: two years, 90 days and 25 minutes before", 3650 * day, 90 * day, 25 * time.Minute, 730*day + 90*day + 25*time.Minute},
		{"a long maximum: at half of its life", 100 * day, 90 * day, time.Hour, 50 * day},
		{"a maximum beyond all reason", 100 * day, 1<<63 - 1, time.Hour, 50 * day},
		{"the three just fit into half", 100 * day, 20 * day, 10 * day, 50 * day},
		{"minutes", time.Hour, time.Minute, time.Minute, 14 * time.Minute},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{RootTTL: tt.root, MaxTTL: tt.max, Propagation: tt.spread}
			end := epoch.Add(tt.root)
			assert.Equal(t, tt.left, end.Sub(cfg.rotateAt(&x509.Certificate{NotAfter: end})))
		})
	}
}
