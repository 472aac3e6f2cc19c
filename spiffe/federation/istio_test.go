package federation_test

import (
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/spiffe/federation"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// The hazards of polling as Istio does: an outage removes nothing, a broken document hides no
// other, and an endpoint that refuses is not asked more often.
func TestIstioHazards(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-1.7-12", "IST-1.8-5")
	synctest.Test(t, func(t *testing.T) {
		world, web := newInternet(), spiffetest.NewCA(t, "web.test")
		foo, bar := spiffetest.NewCA(t, "foo"), spiffetest.NewCA(t, "bar")
		// A key of an unknown kind does not hide the others.
		doc := strings.Replace(string(documentOf(t, foo.Bundle())), `"keys":[`, `"keys":[{"use":"x509-svid","kty":"AKP","x5c":["AAAA"]},`, 1)
		world.host(t, "foo.test", webCert(web, "foo.test"), answer(200, []byte(doc)))
		two := world.host(t, "bar.test", webCert(web, "bar.test"), serving(t, bar.Bundle()))
		m := newManager(t, federation.Config{Relationships: []federation.Relationship{
			{TrustDomain: foo.TrustDomain(), URL: "https://foo.test/", Profile: webRoots(web)},
			{TrustDomain: bar.TrustDomain(), URL: "https://bar.test/", Profile: webRoots(web)},
		}, DialContext: world.dial})
		running(t, m)
		synctest.Wait()
		assert.True(t, trusts(t, m, foo))
		assert.True(t, trusts(t, m, bar))
		two.serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
		time.Sleep(time.Hour)
		synctest.Wait()
		assert.True(t, trusts(t, m, bar))
		assertStale(t, statusOf(t, m, bar.TrustDomain()))
		assert.True(t, statusOf(t, m, foo.TrustDomain()).Fresh)
	})
}
