package vault_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/vault"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	caclienttest.Run(t, func(t testing.TB, ca *spiffetest.CA, path string) *caclienttest.Fake {
		return caclienttest.NewVault(t, ca, path).Fake
	}, func(f *caclienttest.Fake) (caclient.CA, error) {
		return vault.New(vault.Options{Endpoint: f.Endpoint(), Role: "workload"})
	})
}
