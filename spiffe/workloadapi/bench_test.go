package workloadapi_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/test/workloadtest"
	"github.com/svidkit/svidkit/spiffe/workloadapi"
)

// BenchmarkReaders is what a handshake pays.
func BenchmarkReaders(b *testing.B) {
	home := workloadtest.NewDomain(b, "example.org")
	m := response(b, home, home.SVID("/web"))
	s, err := workloadapi.New(workloadapi.Config{Client: inMemory(b, fake(b, func(c *call) { c.send(m); c.wait() }))})
	require.NoError(b, err)
	workloadtest.Run(b, s)
	require.NoError(b, s.Ready(b.Context()))
	td := home.TrustDomain()
	b.Run("SVID", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = s.SVID()
		}
	})
	b.Run("Bundle", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			_, _ = s.Bundle(td)
		}
	})
}

// BenchmarkRead is the work for one response: of a renewal, while the bundles stay, and of a first one.
func BenchmarkRead(b *testing.B) {
	for _, federated := range []int{0, 10, 100} {
		home := workloadtest.NewDomain(b, "example.org")
		var others []domain
		for i := range federated {
			others = append(others, workloadtest.NewDomain(b, fmt.Sprintf("d%d.test", i)))
		}
		two := [][]byte{marshal(b, response(b, home, home.SVID("/web"), others...)), marshal(b, response(b, home, home.SVID("/web"), others...))}
		b.Run(fmt.Sprintf("renewal/federated=%d", federated), func(b *testing.B) {
			var r workloadapi.Reader
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := r.X509SVIDs(two[i%2]); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("first/federated=%d", federated), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var r workloadapi.Reader
				if _, err := r.X509SVIDs(two[0]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
