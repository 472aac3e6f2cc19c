//go:build go1.27

package broker_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/memconn"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/internal/test/quantum"
	"github.com/svidkit/svidkit/spiffe/workloadserver"
)

// TestAlternative: the alternative of an SVID passes the Broker API, as it passes the Workload API.
func TestAlternative(t *testing.T) {
	quantum.Need(t)
	t.Parallel()
	h := newHub(t)
	h.serve(memconn.Listen())
	other := quantum.SVID(t, quantum.Root(t, quantum.Algorithm), quantum.Algorithm, "web")
	both := must.Get(h.ca.SVID("/web").WithAlternative(other))(t)
	h.add("shop", "web").ids = []workloadserver.Identity{{SVID: both}}
	svid := must.Get(ready(t, h.client(h.ca.Source("/broker")), pod("web")).SVID())(t)
	require.NotNil(t, svid.Alternative())
	require.Equal(t, other.Leaf().Raw, svid.Alternative().Leaf().Raw)
}
