package local_test

import (
	"testing"

	"github.com/svidkit/svidkit/caclient"
	"github.com/svidkit/svidkit/caclient/caclienttest"
	"github.com/svidkit/svidkit/caclient/local"
	"github.com/svidkit/svidkit/internal/test/rounds"
	"github.com/svidkit/svidkit/pki"
)

func TestConformance(t *testing.T) {
	rounds.NotShort(t)
	t.Parallel()
	caclienttest.Run(t, nil, func(f *caclienttest.Fake) (caclient.CA, error) {
		return local.New(f.Signer(), f.Expectation().ID())
	})
}

func BenchmarkSign(b *testing.B) {
	c, err := local.New(newAuthority(b), web)
	if err != nil {
		b.Fatal(err)
	}
	csr := newCSR(b, pki.IDSAN(web))
	for b.Loop() {
		if _, err := c.Sign(b.Context(), csr, 0); err != nil {
			b.Fatal(err)
		}
	}
}
