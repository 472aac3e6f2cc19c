package ca_test

import (
	"crypto"
	"crypto/x509"
	"fmt"
	"maps"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/pki/ca"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func at(minutes int) time.Time { return epoch.Add(time.Duration(minutes) * time.Minute) }

// timeline writes roots as "1:retiring@70 2:active", with the minute of the next step.
func timeline(roots []rotation.Key) string {
	var parts []string
	for _, r := range roots {
		s := fmt.Sprintf("%v:%v", r.Cert.SerialNumber, r.Phase)
		if due := (&rotation.Document{Keys: [3][]rotation.Key{{r}}}).Next(); !due.IsZero() {
			s += fmt.Sprintf("@%d", int(due.Sub(epoch).Minutes()))
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, " ")
}

// advance returns keys of one kind as of now, and the events that lead there.
func advance(keys []rotation.Key, now time.Time) ([]rotation.Key, []rotation.Event) {
	after, events := (&rotation.Document{Keys: [3][]rotation.Key{keys}}).Advance(now)
	return after.Keys[rotation.Root], events
}

// course writes events as "25:+2 62:-1", with the minute, and activations first.
func course(events []rotation.Event) string {
	lines := map[int][]string{}
	for _, e := range events {
		minute := int(e.At.Sub(epoch).Minutes())
		if e.What == rotation.Activated {
			lines[minute] = slices.Insert(lines[minute], 0, fmt.Sprintf("+%v", e.Key.Cert.SerialNumber))
		} else {
			lines[minute] = append(lines[minute], fmt.Sprintf("-%v", e.Key.Cert.SerialNumber))
		}
	}
	var parts []string
	for _, minute := range slices.Sorted(maps.Keys(lines)) {
		parts = append(parts, fmt.Sprintf("%d:%s", minute, strings.Join(lines[minute], "")))
	}
	return strings.Join(parts, " ")
}

func cert(n int64) *x509.Certificate { return &x509.Certificate{SerialNumber: big.NewInt(n)} }

// Keys of these tests could sign leaves of an hour, which slow verifiers accept for two minutes more.
func signing(n int64) rotation.Key {
	return rotation.Key{
		Cert: cert(n), Issuer: new(pki.Issuer), Secret: func() crypto.Signer { return nil },
		Terms: rotation.Terms{Longest: time.Hour, Grace: 2 * time.Minute, Propagation: 25 * time.Minute},
	}
}

func active(n int64) rotation.Key { k := signing(n); k.Phase = rotation.Active; return k }
func distributing(n int64, minute int) rotation.Key {
	k := signing(n)
	k.Phase, k.Activates = rotation.Distributing, at(minute)
	return k
}
func retiring(n int64, minute int) rotation.Key {
	return rotation.Key{Cert: cert(n), Phase: rotation.Retiring, Retires: at(minute)}
}
func trusted(n int64) rotation.Key { return rotation.Key{Cert: cert(n), Phase: rotation.Trusted} }

func tainted(k rotation.Key, grace int) rotation.Key {
	k.Tainted, k.TaintGrace = true, time.Duration(grace)*time.Minute
	return k
}

func TestAdvance(t *testing.T) {
	t.Parallel()
	rotating := []rotation.Key{active(1), distributing(2, 25)}
	for _, tt := range []struct {
		name  string
		roots []rotation.Key
		now   time.Time
		want  string
		steps string
	}{
		{"one root has no steps", []rotation.Key{active(1)}, at(1e6), "1:active", ""},
		{"too early to activate", rotating, at(25).Add(-1), "1:active 2:distributing@25", ""},
		{"activates on the dot", rotating, at(25), "1:retiring@87 2:active", "25:+2"},
		{"the last leaf's grace is not over", rotating, at(87).Add(-1), "1:retiring@87 2:active", "25:+2"},
		{"retires when the last leaf and the grace are over", rotating, at(87), "2:active", "25:+2 87:-1"},
		{"a reader that comes late sees the same steps", rotating, at(1e6), "2:active", "25:+2 87:-1"},
		{"the clock went back before the preparation", rotating, epoch.AddDate(-30, 0, 0), "1:active 2:distributing@25", ""},
		{"the clock went back after the activation", []rotation.Key{retiring(1, 62), active(2)}, epoch.AddDate(-30, 0, 0), "1:retiring@62 2:active", ""},
		{"old roots retire each at its time", []rotation.Key{retiring(1, 70), retiring(2, 50), active(3)}, at(60), "1:retiring@70 3:active", "50:-2"},
		{"two at one time are one step", []rotation.Key{retiring(1, 50), retiring(2, 50), active(3)}, at(50), "3:active", "50:-1-2"},
		{"an activation and a retirement at one time are one step", []rotation.Key{retiring(1, 50), active(2), distributing(3, 50)}, at(55), "2:retiring@112 3:active", "50:+3-1"},
		{"it counts from the activation, not from the reading", rotating, at(86), "1:retiring@87 2:active", "25:+2"},
		{"gone", rotating, at(87), "2:active", "25:+2 87:-1"},
		{"each root has its own longest", []rotation.Key{{Cert: cert(1), Phase: rotation.Active, Terms: rotation.Terms{Longest: 10 * time.Minute}}, distributing(2, 25)}, at(25), "1:retiring@35 2:active", "25:+2"},
		{"tainted: the taint's grace, when its successor signs", []rotation.Key{tainted(active(1), 10), distributing(2, 25)}, at(25), "1:retiring@35 2:active", "25:+2"},
		{"tainted: not before its successor signs", []rotation.Key{tainted(active(1), 10), distributing(2, 25)}, at(25).Add(-1), "1:active 2:distributing@25", ""},
		{"tainted: gone", []rotation.Key{tainted(active(1), 10), distributing(2, 25)}, at(35), "2:active", "25:+2 35:-1"},
		{"tainted without a successor: nothing by itself", []rotation.Key{tainted(active(1), 10)}, at(1e6), "1:active", ""},
		{"the successor was tainted and taken out", []rotation.Key{active(1)}, at(1e6), "1:active", ""},
		{"trusted for ever", []rotation.Key{trusted(1), active(2)}, at(1e6), "1:trusted 2:active", ""},
		{"trusted until it expires", []rotation.Key{{Cert: cert(1), Phase: rotation.Trusted, Retires: at(9)}, active(2)}, at(9), "2:active", "9:-1"},
		{"trusted and not expired", []rotation.Key{{Cert: cert(1), Phase: rotation.Trusted, Retires: at(9)}, active(2)}, at(9).Add(-1), "1:trusted@9 2:active", ""},
		{"the first of its kind", []rotation.Key{distributing(1, 25)}, at(25), "1:active", "25:+1"},
		{"the first of its kind, too early", []rotation.Key{distributing(1, 25)}, at(24), "1:distributing@25", ""},
		{"none", nil, at(1e6), "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			before := timeline(tt.roots)
			roots, steps := advance(tt.roots, tt.now)
			assert.Equal(t, tt.want, timeline(roots))
			assert.Equal(t, tt.steps, course(steps))
			assert.Equal(t, before, timeline(tt.roots), "the input was changed")
			for _, r := range roots {
				if r.Phase == rotation.Retiring {
					assert.True(t, r.Issuer == nil && r.Secret == nil, "it must not sign any more: %v", r.Cert.SerialNumber)
				}
			}
		})
	}
}

// However often it is called, early, late or with a clock that goes back: the roots take the
// same steps.
func TestAdvanceDoesNotDependOnReaders(t *testing.T) {
	forward := []rotation.Phase{rotation.Distributing, rotation.Active, rotation.Retiring, rotation.Trusted}
	t.Parallel()
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		start := []rotation.Key{active(0)}
		if rng.IntN(3) == 0 {
			start[0] = tainted(start[0], rng.IntN(100))
		}
		for n := range rng.Int64N(6) {
			start = append([]rotation.Key{retiring(-1-n, rng.IntN(200))}, start...)
		}
		if rng.IntN(4) > 0 {
			start = append(start, distributing(1, rng.IntN(200)))
		}
		want, wantSteps := advance(start, at(1000))

		roots := start
		var steps []rotation.Event
		for latest := 0; latest < 1000; {
			now := rng.IntN(latest + 60) // often before what was seen already
			latest = max(latest, now)
			if rng.IntN(20) == 0 {
				latest, now = 1000, 1000
			}
			before := slices.Clone(roots)
			var s []rotation.Event
			roots, s = advance(roots, at(now))
			steps = append(steps, s...)

			n := 0
			for _, r := range roots {
				if r.Phase == rotation.Active {
					n++
				}
				i := slices.IndexFunc(before, func(b rotation.Key) bool { return b.Cert == r.Cert })
				require.GreaterOrEqual(t, i, 0, "seed %d: a root came back", seed)
				require.GreaterOrEqual(t, slices.Index(forward, r.Phase), slices.Index(forward, before[i].Phase), "seed %d: a root went back", seed)
			}
			require.Equal(t, 1, n, "seed %d: active roots", seed)
		}
		require.Equal(t, timeline(want), timeline(roots), "seed %d", seed)
		require.Equal(t, course(wantSteps), course(steps), "seed %d", seed)
	}
}

func TestReachedAsksBothClocks(t *testing.T) {
	t.Parallel()
	now := time.Now() // with a monotonic reading
	assert.True(t, rotation.Reached(now, now))
	assert.False(t, rotation.Reached(now, now.Add(1)))
	assert.True(t, rotation.Reached(now, now.Round(0)), "a time without a monotonic reading is compared by the wall clock")
	assert.False(t, rotation.Reached(now, now.Round(0).Add(1)))
	assert.False(t, rotation.Reached(now.Round(0), now.Add(1)))
}

// Setting the wall clock may delay a step, but never hastens one.
func TestStepsOfTheWallClock(t *testing.T) {
	t.Parallel()
	now := time.Now()
	after := func(d, set time.Duration) time.Time { return ca.Stepped(t, now.Add(d), set) }
	due := now.Add(25 * time.Minute)
	for _, tt := range []struct {
		after, set time.Duration
		want       bool
	}{
		{25*time.Minute - 1, 0, false},
		{25 * time.Minute, 0, true},
		{time.Minute, time.Hour, false}, // set forward: the wait is not cut short
		{25*time.Minute - 1, time.Hour, false},
		{25 * time.Minute, time.Hour, true},
		{25 * time.Minute, -time.Hour, false}, // set back: what is dated waits for its date
		{85*time.Minute - 1, -time.Hour, false},
		{85 * time.Minute, -time.Hour, true},
	} {
		assert.Equal(t, tt.want, rotation.Reached(after(tt.after, tt.set), due), "%v after, set by %v", tt.after, tt.set)
	}

	// A time from the store gets the reading of now, and waits as long as the wall clock said then.
	stored := due.Round(0)
	key := rotation.Key{ID: "1", Retires: due}
	known := &rotation.Document{Keys: [3][]rotation.Key{{key}}}
	key.Activates, key.Retires = stored, time.Time{}
	key = (&rotation.Document{Keys: [3][]rotation.Key{{key}}}).Merge(known, now).Keys[rotation.Root][0]
	anchored := key.Activates
	assert.True(t, anchored.Equal(due))
	assert.False(t, rotation.Reached(after(time.Minute, time.Hour), anchored))
	assert.True(t, rotation.Reached(after(time.Minute, time.Hour), stored), "without, it would be due")
	assert.Zero(t, key.Retires)

	// The same for a whole rotation.
	active, next := signing(1), signing(2)
	active.Phase, active.Prepared, active.Activates = rotation.Active, now, now
	next.Phase, next.Prepared, next.Activates = rotation.Distributing, now, due
	keys := []rotation.Key{active, next}
	phases := func(keys []rotation.Key) (out []rotation.Phase) {
		for _, k := range keys {
			out = append(out, k.Phase)
		}
		return out
	}
	got, _ := advance(keys, after(24*time.Minute, 1000*time.Hour))
	assert.Equal(t, []rotation.Phase{rotation.Active, rotation.Distributing}, phases(got))
	got, _ = advance(keys, after(25*time.Minute, 1000*time.Hour))
	assert.Equal(t, []rotation.Phase{rotation.Retiring, rotation.Active}, phases(got), "its leaves live on, whatever the wall clock says")
	got, _ = advance(got, after(25*time.Minute+time.Hour+2*time.Minute-1, 1000*time.Hour))
	assert.Equal(t, []rotation.Phase{rotation.Retiring, rotation.Active}, phases(got))
	got, _ = advance(got, after(25*time.Minute+time.Hour+2*time.Minute, 1000*time.Hour))
	assert.Equal(t, []rotation.Phase{rotation.Active}, phases(got))
	got, _ = advance(keys, after(10*time.Hour, -10*time.Hour))
	assert.Equal(t, []rotation.Phase{rotation.Active, rotation.Distributing}, phases(got))
}
