package athenz_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/athenz"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	caclienttest.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *caclienttest.Fake {
		return caclienttest.NewZTS(t, ca, path).Fake
	}, func(f *caclienttest.Fake) (caclient.CA, error) {
		return athenz.New(athenz.Options{Endpoint: f.Endpoint(), Instance: caclienttest.AthenzInstance(f)})
	})
}
