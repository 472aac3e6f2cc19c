package stepca_test

import (
	"slices"
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/internal/test/cafake"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// startCA starts a CA for the example, which has no test.
func startCA() (endpoint caclient.Endpoint, rootFingerprint string, stop func()) {
	t := new(exampleT)
	root := spiffetest.NewCA(t, "example.org")
	endpoint = cafake.NewStepCA(t, root, "/web").Endpoint()
	endpoint.HTTPClient = nil
	return endpoint, fingerprint(root.Root()), t.end
}

// exampleT is what a test function is given; an example has none, and this one does not fail.
type exampleT struct {
	testing.TB
	cleanups []func()
}

func (*exampleT) Helper() {}

func (t *exampleT) Cleanup(f func()) { t.cleanups = append(t.cleanups, f) }

func (t *exampleT) end() {
	for _, f := range slices.Backward(t.cleanups) {
		f()
	}
}
