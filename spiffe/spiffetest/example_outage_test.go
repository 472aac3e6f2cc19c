package spiffetest_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/svidkit/svidkit/secretcache"
	"github.com/svidkit/svidkit/spiffe"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// testOutage is a test of a service whose CA is down for nearly all of the life of its identity, in the time of a
// bubble.
func testOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "example.org") // in the bubble, for its clock
		web := spiffe.MustParseID("spiffe://example.org/web")
		source, err := secretcache.Start(t.Context(), secretcache.Config{ID: web, CA: ca, Lifetime: 12 * time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		defer source.Close()
		signed := ca.Signed()

		ca.FailNext(-1, errors.New("the CA is down"))
		for range 11 {
			time.Sleep(time.Hour)
			svid, err := source.SVID()
			if err != nil || time.Now().After(svid.NotAfter()) {
				t.Fatal("the identity was lost in the outage:", err)
			}
		}
		if ca.Signed() != signed {
			t.Error("it was no outage")
		}

		ca.FailNext(0, nil)
		time.Sleep(time.Hour)
		svid, err := source.SVID()
		if err != nil || time.Until(svid.NotAfter()) < 10*time.Hour {
			t.Error("the identity was not renewed after the outage:", err)
		}
	})
}

// A CA that is down for hours, which takes no time. An example cannot be run in a bubble; testOutage is the body of a
// test function.
func Example_caOutage() {
	var t *testing.T // what "go test" gives a test function
	testOutage(t)
}
