package istioca_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/istioca"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, caclienttest.NewIstio, func(f *caclienttest.Fake) (caclient.CA, error) {
		return istioca.New(istioca.Options{Endpoint: f.Endpoint()})
	})
}

func BenchmarkClient(b *testing.B) {
	f := caclienttest.NewIstio(b, spiffetest.NewCA(b, "example.org"), "/web")
	c, err := istioca.New(istioca.Options{Endpoint: f.Endpoint()})
	if err != nil {
		b.Fatal(err)
	}
	key, err := pki.NewKey(pki.ECDSAP256)
	if err != nil {
		b.Fatal(err)
	}
	csr, err := pki.NewCSR(key, pki.CSROptions{SANs: f.Expectation().Names()})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("Sign", func(b *testing.B) {
		for b.Loop() {
			if _, err := c.Sign(b.Context(), csr, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("KnownBundles", func(b *testing.B) {
		for b.Loop() {
			if _, err := c.FetchBundles(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
