package istioca_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
	})
}
