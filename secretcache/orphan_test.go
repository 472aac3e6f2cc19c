package secretcache_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/bubble"
	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// TestRootHasLeft: an identity whose root has left the bundle is not ready while the CA gives no other, and stays as it is.
func TestRootHasLeft(t *testing.T) {
	bubble.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org")
		m := newManager(t, secretcache.Config{CA: ca})
		before, _ := ready(t, m)
		require.NoError(t, m.Report().NotReady)
		ca.FailNext(1, errors.New("busy"))
		ca.Rotate()
		ca.DropOldRoots()
		synctest.Wait()
		require.ErrorContains(t, m.Report().NotReady, `no peer that has the trust bundle accepts the identity spiffe://example.org/web, whose root has left it`)
		require.Same(t, before, current(t, m))
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		require.NoError(t, m.Report().NotReady)
	})
}
