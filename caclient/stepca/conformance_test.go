package stepca_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/stepca"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewStepCA, func(f *caclienttest.Fake) (caclient.CA, error) {
		return stepca.New(stepca.Options{Endpoint: f.Endpoint()})
	})
}
