package ca

import (
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/pki/ca/internal/rotation"
	"github.com/svidkit/svidkit/spiffe"
)

// Stepped returns the same moment of the monotonic clock as at, with a wall clock that was set by d.
func Stepped(t *testing.T, at time.Time, d time.Duration) time.Time {
	t.Helper()
	type bits struct { // of a time.Time with both readings
		wall uint64
		ext  int64
		loc  *time.Location
	}
	out := at.Add(d)
	(*bits)(unsafe.Pointer(&out)).ext -= int64(d)
	require.Zero(t, out.Sub(at), "on the monotonic clock")
	require.Equal(t, d, out.Round(0).Sub(at.Round(0)), "on the wall clock")
	return out
}

// While the wall clock is ahead of a wait, what is signed ends when others, whose clocks were not set,
// drop the root; and a root that is not valid yet signs nothing.
func TestSignAfterAStepOfTheWallClock(t *testing.T) {
	t.Parallel()
	a, err := Open(t.Context(), Config{TrustDomain: spiffe.MustParseTrustDomain("example.org"), Create: true, MaxTTL: time.Hour, JWT: new(JWTConfig)}, NewMemoryStore())
	require.NoError(t, err)
	must.Get(a.Rotate(t.Context()))(t)
	must.Get(a.RotateJWT(t.Context()))(t)
	a.mu.Lock()
	defer a.mu.Unlock()
	s, now := a.state.Load(), time.Now()
	a.synced = a.synced.Add(24 * time.Hour) // read again since the clock was set
	for _, kind := range []rotation.Kind{rotation.Root, rotation.Token} {
		until := s.Keys[kind][1].Activates.Round(0).Add(time.Hour)
		grant := func(set time.Duration) (*grant, error) {
			return a.grant(s, kind, time.Hour, Stepped(t, now, set))
		}
		g := must.Get(grant(0))(t)
		assert.True(t, g.notAfter.Equal(now.Add(time.Hour)))
		g = must.Get(grant(time.Hour))(t)
		assert.True(t, g.notAfter.Round(0).Equal(until), "%v, not %v", g.notAfter, until)
		_, err := grant(2 * time.Hour)
		require.ErrorIs(t, err, spiffe.ErrNotReady)
		left := until.Sub(now.Round(0))
		must.Get(grant(left - time.Second))(t)
		_, err = grant(left - time.Second + 1)
		require.ErrorIs(t, err, spiffe.ErrNotReady, "certificates carry whole seconds")
	}
	_, err = a.grant(s, rotation.Root, time.Hour, Stepped(t, now, -time.Hour))
	require.ErrorIs(t, err, spiffe.ErrNotReady)
	assert.ErrorContains(t, err, "check the clock")
}
