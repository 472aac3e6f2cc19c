package workloadapitest_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/svidkit/svidkit/spiffe/spiffetest"
	"github.com/svidkit/svidkit/spiffe/spiffetest/workloadapitest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

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

func Example() {
	t := new(exampleT)
	defer t.end()

	ca := spiffetest.NewCA(t, "example.org")
	api := workloadapitest.NewServer(t, ca, "/web")

	source, err := workloadapi.Start(context.Background(), api.Config())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer source.Close()
	svid, err := source.SVID()
	fmt.Println(svid, err)

	changed := source.Changed()
	api.Deny()
	<-changed
	_, err = source.SVID()
	fmt.Println(err != nil)
	// Output:
	// spiffe://example.org/web <nil>
	// true
}
