package certs_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/certs/bundleorder"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// bundles makes bundles with and without authorities and numbers.
type bundles struct {
	t  testing.TB
	ca *spiffetest.CA
}

func (f bundles) of(authorities bool, sequence ...uint64) *spiffe.Bundle {
	var c spiffe.BundleContents
	if authorities {
		c = f.ca.Bundle().Contents()
	}
	c.Sequence = nil
	if len(sequence) > 0 {
		c.Sequence = &sequence[0]
	}
	return must.Get(spiffe.NewBundle(f.ca.TrustDomain(), c))(f.t)
}

func (f bundles) full(sequence ...uint64) *spiffe.Bundle  { return f.of(true, sequence...) }
func (f bundles) empty(sequence ...uint64) *spiffe.Bundle { return f.of(false, sequence...) }

// The table of what is plausible. Lower numbers are the business of Supersedes.
func TestBundleorderDoubt(t *testing.T) {
	t.Parallel()
	f := bundles{t, spiffetest.NewCA(t, "example.org")}
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	s, ms, us, ns := uint64(now.Unix()), uint64(now.UnixMilli()), uint64(now.UnixMicro()), uint64(now.UnixNano())
	const year, month, day = 365 * 24 * 3600, 30 * 24 * 3600, 24 * 3600
	for _, c := range []struct {
		name       string
		have, next *spiffe.Bundle
		doubt      string
	}{
		{"the first", nil, f.full(1), ""},
		{"the first, without a number", nil, f.full(), ""},
		{"the first, empty", nil, f.empty(), ""},
		{"the first, by a clock", nil, f.full(ns), ""},
		{"the first, at the bound", nil, f.full(bundleorder.MaxNumber), ""},
		{"the first, beyond the bound", nil, f.full(bundleorder.MaxNumber + 1), "too high"},
		{"the first, the highest", nil, f.full(math.MaxUint64), "too high"},
		{"the first number", f.full(), f.full(1), ""},
		{"the first number, the highest", f.full(), f.full(math.MaxUint64), "too high"},

		{"no numbers", f.full(), f.full(), ""},
		{"revoked without numbers", f.full(), f.empty(), ""},
		{"back from nothing without numbers", f.empty(), f.full(), ""},

		{"the same", f.full(7), f.full(7), ""},
		{"the next", f.full(7), f.full(8), ""},
		{"lower", f.full(7), f.full(6), ""},
		{"lower than the highest", f.full(math.MaxUint64), f.full(1), ""},
		{"the largest step", f.full(7), f.full(7 + bundleorder.MaxStep), ""},
		{"a larger step", f.full(7), f.full(8 + bundleorder.MaxStep), "the step is too large"},
		{"the highest", f.full(7), f.full(math.MaxUint64), "its sequence number is 18446744073709551615, and the bundle in force has 7"},
		{"2^63", f.full(7), f.full(1 << 63), "too large"},
		{"a step beyond the bound", f.full(bundleorder.MaxNumber), f.full(bundleorder.MaxNumber + 1), ""},
		{"no overflow", f.full(math.MaxUint64 - 1), f.full(math.MaxUint64), ""},

		{"revoked by a number", f.full(7), f.empty(8), ""},
		{"revoked by a number that is too high", f.full(7), f.empty(math.MaxUint64), "too large"},
		{"revoked by no number", f.full(7), f.empty(7), "no authorities, and the bundle in force has the same sequence number, 7"},
		{"still revoked", f.empty(7), f.empty(7), ""},
		{"back from nothing", f.empty(7), f.full(8), ""},
		{"the number is lost", f.full(7), f.full(), "no sequence number, and the bundle in force has 7"},
		{"the number and everything is lost", f.full(7), f.empty(), "no authorities and no sequence number"},
		{"the number of nothing is lost", f.empty(7), f.empty(), "no sequence number"},

		{"seconds", f.full(s - year), f.full(s), ""},
		{"milliseconds", f.full(ms - year*1e3), f.full(ms), ""},
		{"microseconds", f.full(us - year*1e6), f.full(us), ""},
		{"nanoseconds", f.full(ns - year*1e9), f.full(ns), ""},
		{"a clock that is fast", f.full(ms - year*1e3), f.full(ms + day*1e3), ""},
		{"a clock that is too fast", f.full(ms - year*1e3), f.full(ms + day*1e3 + 1000), "too large"},
		{"nanoseconds that are too fast", f.full(ns - year*1e9), f.full(ns + month*1e9), "too large"},
		{"seconds after a counter", f.full(7), f.full(s), "too large"},
		{"milliseconds after a counter", f.full(7), f.full(ms), "too large"},
		{"milliseconds after seconds", f.full(s), f.full(ms), "too large"},
		{"an old time after a counter", f.full(7), f.full(1e9), "too large"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			doubt := bundleorder.Doubt(c.have, c.next, now)
			if c.doubt == "" {
				assert.Empty(t, doubt)
				return
			}
			assert.Contains(t, doubt, c.doubt)
		})
	}
	assert.NotEmpty(t, bundleorder.Doubt(f.full(1e9), f.full(2e9), time.Unix(1000, 0)), "a clock that was not set says nothing")
}

// What is held prevails after three answers in half an hour, and not when another one comes between them.
func TestBundleorderPrevails(t *testing.T) {
	t.Parallel()
	f := bundles{t, spiffetest.NewCA(t, "example.org")}
	start := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	have, high, lost := f.full(7), f.full(math.MaxUint64), f.full()
	type step struct {
		at   time.Duration
		next *spiffe.Bundle
		want string
	}
	const held, taken, prevails = "held", "taken", "prevails"
	for name, steps := range map[string][]step{
		"repeated":           {{0, high, held}, {time.Minute, high, held}, {bundleorder.Time, high, prevails}},
		"too soon":           {{0, high, held}, {time.Minute, high, held}, {bundleorder.Time - 1, high, held}, {bundleorder.Time, high, prevails}},
		"too few":            {{0, high, held}, {48 * time.Hour, high, held}, {48*time.Hour + 1, high, prevails}},
		"contradicted":       {{0, high, held}, {time.Minute, have, taken}, {bundleorder.Time, high, held}, {bundleorder.Time + time.Minute, high, held}},
		"something else":     {{0, high, held}, {time.Minute, lost, held}, {bundleorder.Time, lost, held}, {bundleorder.Time + time.Minute, lost, prevails}},
		"it goes on":         {{0, f.full(1e6), held}, {time.Minute, f.full(1e6 + 1), held}, {bundleorder.Time, f.full(1e6 + 2), prevails}},
		"it goes down":       {{0, f.full(1e6), held}, {time.Minute, f.full(1e6 - 1), held}, {bundleorder.Time, f.full(1e6 - 1), held}},
		"higher and higher":  {{0, f.full(1e6), held}, {time.Minute, f.full(1e9), held}, {bundleorder.Time, f.full(1e12), held}},
		"all is lost":        {{0, f.empty(), held}, {time.Minute, f.empty(), held}, {bundleorder.Time, f.empty(), prevails}},
		"no doubt":           {{0, f.full(8), taken}, {1, f.empty(9), taken}},
		"lost, then revoked": {{0, lost, held}, {time.Minute, f.empty(8), taken}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var o bundleorder.Offers
			for i, s := range steps {
				at := fmt.Sprintf("step %d", i+1)
				prevailed, err := o.Judge(have, s.next, start.Add(s.at))
				got := taken
				switch {
				case err != nil:
					got = held
					assert.Same(t, s.next, o.Held(), at)
				case prevailed:
					got = prevails
				}
				require.Equal(t, s.want, got, at)
				if err == nil {
					assert.Nil(t, o.Held(), at)
				}
			}
		})
	}
}

func TestBundleorderForget(t *testing.T) {
	t.Parallel()
	f := bundles{t, spiffetest.NewCA(t, "example.org")}
	var o bundleorder.Offers
	now := time.Now()
	_, err := o.Judge(f.full(7), f.full(), now)
	require.EqualError(t, err, "the bundle is held: it has no sequence number, and the bundle in force has 7 (answer 1; it prevails if the publisher repeats it 3 times in 30m0s)")
	o.Forget()
	assert.Nil(t, o.Held())
	for range 2 {
		require.Error(t, must.Err(o.Judge(f.full(7), f.full(), now.Add(time.Hour))), "it begins anew")
	}
}

// A bundle is empty if it has keys of no kind.
func TestBundleorderDoubtKinds(t *testing.T) {
	t.Parallel()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	keys := map[string]crypto.PublicKey{"k": key.Public()}
	f := bundles{t, spiffetest.NewCA(t, "example.org")}
	for _, c := range []spiffe.BundleContents{{JWTAuthorities: keys}, {WITAuthorities: keys}} {
		c.Sequence = new(uint64(7))
		have := must.Get(spiffe.NewBundle(f.ca.TrustDomain(), c))(t)
		assert.Contains(t, bundleorder.Doubt(have, f.empty(7), time.Now()), "no authorities")
		assert.Empty(t, bundleorder.Doubt(have, have, time.Now()))
		assert.Empty(t, bundleorder.Doubt(f.full(7), have, time.Now()))
	}
}
