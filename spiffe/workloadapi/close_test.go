package workloadapi_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/lifecycle"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// A Client belongs to the caller: Sources that use it come, end and fail to start without harm to its streams, to its calls or to
// each other. A Source without one ends its own connections.
func TestCloseLeavesTheClient(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web", "/admin")
	c := must.Get(workloadapi.NewClient(api.Config().Address, nil))(t)
	t.Cleanup(c.CloseIdleConnections)
	cfg := workloadapi.Config{Client: c, JWTBundles: true}

	ctx, cancel := context.WithCancel(t.Context())
	type told struct {
		serial string
		err    error
	}
	updates, done := make(chan told, 100), make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		for u, err := range c.WatchX509SVIDs(ctx) {
			if ctx.Err() != nil {
				return
			}
			one := told{err: err}
			if err == nil {
				one.serial = u.Identities[0].SVID.Leaf().SerialNumber.String()
			}
			updates <- one
		}
	}()
	next := func() string {
		t.Helper()
		select {
		case one := <-updates:
			require.NoError(t, one.err, "the stream goes on")
			return one.serial
		case <-time.After(patient):
			require.Fail(t, "nothing came")
			return ""
		}
	}
	last := next()
	stays := must.Get(workloadapi.Start(t.Context(), cfg))(t)
	t.Cleanup(func() { require.NoError(t, stays.Close()) })

	unharmed := func(after string) {
		t.Helper()
		must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db"))(t, after)
		api.Rotate()
		now := next()
		require.NotEqual(t, last, now, after)
		last = now
		require.Eventually(t, func() bool {
			svid, err := stays.SVID()
			return err == nil && svid.Leaf().SerialNumber.String() == now
		}, patient, time.Millisecond, after)
		require.Empty(t, updates, after)
	}
	goes := must.Get(workloadapi.Start(t.Context(), cfg))(t)
	require.NoError(t, goes.Close())
	require.NoError(t, goes.Close())
	unharmed("a Source was closed")
	must.Get(goes.Fetch(t.Context(), "db"))(t, "its calls are those of the Client")

	short, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, must.Err(workloadapi.Start(short, cfg)), context.Canceled)
	unharmed("a Source did not start")

	require.NoError(t, must.Get(workloadapi.New(cfg))(t).Close())
	unharmed("a Source that was never started was closed")

	own := must.Get(workloadapi.Start(t.Context(), api.Config()))(t)
	require.NoError(t, own.Close())
	assert.ErrorIs(t, must.Err(own.Fetch(t.Context(), "db")), lifecycle.ErrClosed, "it has no connection any more")
	unharmed("a Source with an address was closed")
}
