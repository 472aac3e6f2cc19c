package local_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, nil, func(f *caclienttest.Fake) (caclient.CA, error) {
		return local.New(f.Signer(), f.Expectation().ID())
	})
}
