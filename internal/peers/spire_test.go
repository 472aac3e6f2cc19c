package peers_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/peers"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// TestSPIRE has the identity of a workload from a real SPIRE, whose agent is then killed and comes back by itself.
func TestSPIRE(t *testing.T) {
	t.Parallel()
	s := peers.NewSPIRE(t, peers.SPIREOptions{})
	id := s.Register(t, "/web")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 2 {
		src, err := workloadapi.Start(ctx, workloadapi.Config{Address: s.WorkloadAPI(), JWTBundles: true})
		require.NoError(t, err)
		svid, err := src.SVID()
		require.NoError(t, err)
		assert.Equal(t, id, svid.ID())
		require.NoError(t, src.Close())
		s.Agent.Kill()
		s.StartAgent(t)
	}
}
