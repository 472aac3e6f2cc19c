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

// A Client belongs to the caller: Sources that use it come, end and fail to start without harm to it. A Source without
// one ends its own connections.
func TestCloseLeavesTheClient(t *testing.T) {
	t.Parallel()
	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web", "/admin")
	c := must.Get(workloadapi.NewClient(api.Config().Address, nil))(t)
	t.Cleanup(c.CloseIdleConnections)
	cfg := workloadapi.Config{Client: c}
	stays := must.Get(workloadapi.Start(t.Context(), cfg))(t)
	t.Cleanup(func() { require.NoError(t, stays.Close()) })
	unharmed := func(after string) {
		t.Helper()
		must.Get(c.FetchJWTSVIDs(t.Context(), spiffe.ID{}, "db"))(t, after)
		changed := stays.Changed()
		api.Rotate()
		select {
		case <-changed:
		case <-time.After(patient):
			require.Fail(t, "nothing came", after)
		}
		require.Zero(t, stays.Status().X509.Failures, after)
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

	own := must.Get(workloadapi.Start(t.Context(), api.Config()))(t)
	require.NoError(t, own.Close())
	assert.ErrorIs(t, must.Err(own.Fetch(t.Context(), "db")), lifecycle.ErrClosed, "it has no connection any more")
	unharmed("a Source with an address was closed")
}
