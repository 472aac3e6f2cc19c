package linkerd_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki/linkerdname"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewLinkerd, func(f *caclienttest.Fake) (caclient.CA, error) {
		e := f.Endpoint()
		return linkerd.New(linkerd.Options{Endpoint: e, Mesh: linkerdname.Mesh{ControlNamespace: "linkerd", TrustDomain: e.TrustDomain.String()}})
	})
}
