package athenz_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	cafake.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *cafake.Fake {
		return cafake.NewZTS(t, ca, path).Fake
	}, func(f *cafake.Fake) (caclient.CA, error) {
		return athenz.New(athenz.Options{Endpoint: f.Endpoint(), Instance: cafake.AthenzInstance(f)})
	})
}
