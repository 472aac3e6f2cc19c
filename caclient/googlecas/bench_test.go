package googlecas_test

import (
	"strings"
	"testing"

	"github.com/svidkit/svidkit/caclient/googlecas"
	"github.com/svidkit/svidkit/spiffe/spiffetest"
)

// BenchmarkCalls is what the client itself costs, without a network.
func BenchmarkCalls(b *testing.B) {
	ca := spiffetest.NewCA(b, "example.org")
	csr := newCSR(b, webID)
	chain, err := ca.Intermediate().Sign(b.Context(), csr, 0)
	if err != nil {
		b.Fatal(err)
	}
	answer, roots := doc{"pemCertificate": pem(chain[0]), "pemCertificateChain": []string{pem(chain[1]), pem(ca.Root())}}, caCerts(ca)
	s := &script{}
	s.answer = func(c call) (int, any) {
		s.calls = s.calls[:0]
		if strings.HasSuffix(c.URL.Path, ":fetchCaCerts") {
			return 200, roots
		}
		return 200, answer
	}
	c := newCA(b, googlecas.Options{Endpoint: s.endpoint()})
	b.Run("sign", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Sign(b.Context(), csr, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("roots", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.FetchBundles(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
}
