package athenz_test

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/athenz"
	"github.com/svidkit/svidkit/internal/conformance"
	"github.com/svidkit/svidkit/internal/metrics/metricstest"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// fakeAgent gives identities that live for a while, and counts what it is asked.
type fakeAgent struct {
	t    testing.TB
	ca   *spiffetest.CA
	life time.Duration

	mu              sync.Mutex
	err             error
	inits, refreshs int
	begun           int // inits that gave something
	shown           []*pki.Credential
	given           []*athenz.Identity
	at              []time.Time
}

func (f *fakeAgent) give() (*athenz.Identity, error) {
	f.at = append(f.at, time.Now())
	if f.err != nil {
		return nil, f.err
	}
	chain, key := f.ca.Certificate("/web", func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now(), time.Now().Add(f.life) })
	credential, err := pki.NewCredential(chain, key)
	assert.NoError(f.t, err)
	i := &athenz.Identity{Credential: credential}
	if len(f.given) == 0 { // later ones have none
		i.Roots = []*x509.Certificate{f.ca.Root()}
	}
	f.given = append(f.given, i)
	return i, nil
}

func (f *fakeAgent) Init(context.Context) (*athenz.Identity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inits++
	if f.err == nil {
		f.begun++
	}
	return f.give()
}

func (f *fakeAgent) Refresh(_ context.Context, current *pki.Credential) (*athenz.Identity, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refreshs++
	f.shown = append(f.shown, current)
	return f.give()
}

func (f *fakeAgent) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *fakeAgent) last() *athenz.Identity {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.given[len(f.given)-1]
}

func TestSidecar(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-8-1", "ATH-8-8", "ATH-8-9")
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 30 * 24 * time.Hour}
		var log bytes.Buffer
		var kept []*athenz.Identity
		s, err := athenz.StartSidecar(t.Context(), athenz.SidecarConfig{
			Agent:  f,
			Keep:   func(_ context.Context, i *athenz.Identity) error { kept = append(kept, i); return nil },
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		require.NoError(t, err)
		changed := s.Changed()
		i, err := s.Identity()
		require.NoError(t, err)
		assert.Same(t, f.last(), i)
		time.Sleep(50 * time.Minute)
		assert.Equal(t, 0, f.refreshs)
		time.Sleep(20 * time.Minute)
		<-changed
		assert.Equal(t, []int{1, 1}, []int{f.inits, f.refreshs})
		time.Sleep(48 * time.Hour)
		assert.InDelta(t, 49, f.refreshs, 4)
		assert.Equal(t, 1, f.inits)
		for k, shown := range f.shown {
			assert.Same(t, f.given[k].Credential, shown, "each refresh shows the one before")
		}
		i, err = s.Identity()
		require.NoError(t, err)
		require.Len(t, i.Roots, 1, "those that are known stay")
		assert.Len(t, kept, len(f.given))

		// An agent that is away: the identity stays, and Close still works.
		f.fail(errors.New("away"))
		time.Sleep(5 * 24 * time.Hour)
		got, err := s.Identity()
		require.NoError(t, err)
		assert.Same(t, i, got)
		failures, err := s.Status()
		require.ErrorContains(t, err, "away")
		assert.Greater(t, failures, 10)
		assert.Less(t, failures, 24*60*5)
		var text bytes.Buffer
		require.NoError(t, s.WriteMetrics(&text))
		parsed, err := metricstest.Of(s)
		require.NoError(t, err)
		assert.Empty(t, parsed.Lint())
		assert.Contains(t, text.String(), "svidkit_athenz_sidecar_ready 1\n")
		f.fail(nil)
		time.Sleep(10 * time.Minute)
		_, err = s.Status()
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close())
		require.Error(t, s.Run(t.Context()))
		_, err = s.Identity()
		require.NoError(t, err)
	})
}

func TestSidecarShortLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 20 * time.Minute}
		s, err := athenz.StartSidecar(t.Context(), athenz.SidecarConfig{Agent: f})
		require.NoError(t, err)
		time.Sleep(11 * time.Minute)
		assert.Equal(t, 1, f.refreshs, "half of the life is over before the interval")
		// An outage of 45 % of a life, from any moment.
		f.fail(errors.New("away"))
		time.Sleep(9 * time.Minute)
		_, err = s.Identity()
		require.NoError(t, err)
		f.fail(nil)
		time.Sleep(time.Minute)
		assert.Same(t, f.last().Credential, must(t, s).Credential, "soon after it is back")
		// One that lasts: the identity ends, and the next is asked for by init.
		f.fail(errors.New("away"))
		time.Sleep(21 * time.Minute)
		_, err = s.Identity()
		require.ErrorIs(t, err, athenz.ErrNotReady)
		require.ErrorContains(t, err, "expired")
		var text bytes.Buffer
		require.NoError(t, s.WriteMetrics(&text))
		assert.Contains(t, text.String(), "svidkit_athenz_sidecar_ready 0\n")
		f.fail(nil)
		time.Sleep(time.Minute)
		assert.Equal(t, 2, f.begun)
		must(t, s)
		require.NoError(t, s.Close())
	})
}

func must(t testing.TB, s *athenz.Sidecar) *athenz.Identity {
	t.Helper()
	i, err := s.Identity()
	require.NoError(t, err)
	return i
}

// TestSidecarKeeps has what cannot be kept not become the present identity.
func TestSidecarKeeps(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "ATH-18-11")
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: 24 * time.Hour}
		first, err := f.Init(t.Context())
		require.NoError(t, err)
		full := errors.New("the disk is full")
		s, err := athenz.NewSidecar(athenz.SidecarConfig{
			Agent: f, Identity: &athenz.Identity{Credential: first.Credential}, Keep: func(context.Context, *athenz.Identity) error { return full },
		})
		require.NoError(t, err)
		assert.Same(t, first.Credential, must(t, s).Credential)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		time.Sleep(4 * time.Hour)
		assert.Same(t, first.Credential, must(t, s).Credential)
		require.Greater(t, len(f.shown), 3)
		for _, shown := range f.shown {
			assert.Same(t, first.Credential, shown, "it is the one that is kept")
		}
		assert.Equal(t, 1, f.inits)
		_, err = s.Status()
		require.ErrorIs(t, err, full)
		cancel()
		require.NoError(t, <-done)
	})
}

func TestSidecarRefuses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := &fakeAgent{t: t, ca: spiffetest.NewCA(t, "athenz.example"), life: time.Hour}
		for _, cfg := range []athenz.SidecarConfig{{}, {Agent: f, Interval: time.Second}, {Agent: f, Interval: -1}, {Agent: f, Timeout: -1}, {Agent: f, Identity: new(athenz.Identity)}} {
			_, err := athenz.NewSidecar(cfg)
			require.ErrorContains(t, err, "athenz: new sidecar: ")
			_, err = athenz.StartSidecar(t.Context(), cfg)
			require.Error(t, err)
		}
		s, err := athenz.NewSidecar(athenz.SidecarConfig{Agent: f})
		require.NoError(t, err)
		_, err = s.Identity()
		require.ErrorIs(t, err, athenz.ErrNotReady)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err = s.Ready(ctx)
		require.ErrorIs(t, err, athenz.ErrNotReady)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		away := errors.New("away")
		f.fail(away)
		ctx, cancel = context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		_, err = athenz.StartSidecar(ctx, athenz.SidecarConfig{Agent: f})
		require.ErrorIs(t, err, athenz.ErrNotReady)
		require.ErrorIs(t, err, away)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		assert.Greater(t, f.inits, 5)

		// An identity that has expired is none to begin with.
		f.fail(nil)
		old, err := f.Init(t.Context())
		require.NoError(t, err)
		time.Sleep(time.Hour)
		s, err = athenz.NewSidecar(athenz.SidecarConfig{Agent: f, Identity: old})
		require.NoError(t, err)
		_, err = s.Identity()
		require.ErrorIs(t, err, athenz.ErrNotReady)
	})
}
