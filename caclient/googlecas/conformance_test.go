package googlecas_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	cafake.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake {
		return cafake.NewGoogleCAS(t, ca, path).Fake
	}, func(f *cafake.Fake) (caclient.CA, error) {
		return googlecas.New(googlecas.Options{Endpoint: f.Endpoint(), Pool: pool})
	})
}
