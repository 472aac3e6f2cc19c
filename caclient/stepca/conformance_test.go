package stepca_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/stepca"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/internal/test/rounds"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	cafake.Run(t, cafake.NewStepCA, func(f *cafake.Fake) (caclient.CA, error) {
		return stepca.New(stepca.Options{Endpoint: f.Endpoint()})
	})
}
