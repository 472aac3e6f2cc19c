package linkerdproxy_test

import (
	"crypto/x509"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/linkerd"
	"github.com/svidkit/svidkit/examples/linkerd-proxy/linkerdproxy"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/meshtest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// An answer on the wire that says that it has ended already, and each refusal, leaves what there is, and is followed by another
// request ten seconds later.
func TestAnswersOnTheWire(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "LNK-8-2", "LNK-8-6", "LNK-16-4", "LNK-16-10", "LNK-17-15")
	synctest.Test(t, func(t *testing.T) {
		ca := spiffetest.NewCA(t, "cluster.local")
		fake := caclienttest.NewLinkerd(caclienttest.InMemory(t), ca, "/ns/emojivoto/sa/web")
		service := must.Get(linkerd.New(linkerd.Options{Endpoint: fake.Endpoint(), Mesh: meshtest.Mesh()}))(t)
		id := must.Get(linkerdproxy.NewWith(config(t, web, ca.Bundle().MarshalPEM()), service))(t)
		const life = 10 * time.Minute
		lives := func(d time.Duration) {
			ca.EditTemplates(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(d) })
		}
		lives(life)
		run(t, id)
		require.NoError(t, id.Ready(t.Context()))
		first := must.Get(id.Credential())(t)

		// keeps waits for the next three requests, which change nothing.
		keeps := func(what string) {
			t.Helper()
			n := fake.Requests()
			for fake.Requests() == n {
				time.Sleep(time.Second)
				synctest.Wait()
			}
			n = fake.Requests()
			time.Sleep(20 * time.Second)
			synctest.Wait()
			assert.Equal(t, 2, fake.Requests()-n, what)
			require.Same(t, first, must.Get(id.Credential())(t), what)
			require.Error(t, id.Report().Identities[0].Err, what)
		}
		lives(-time.Second)
		keeps("valid until a second ago")
		for kind, code := range map[error]string{caclient.ErrInvalid: "invalid argument", caclient.ErrUnavailable: "unavailable"} {
			fake.Refuse(&caclient.Error{Op: "sign", Kind: kind, Err: caclient.ErrInvalid})
			keeps(code)
		}
		fake.Refuse(nil)
		lives(life)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		assert.True(t, must.Get(id.Credential())(t).NotAfter().After(first.NotAfter()))
		assert.True(t, time.Now().Before(first.NotAfter()), "nothing has expired")
	})
}
