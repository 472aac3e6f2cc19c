package files_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/files/delivery"
	"github.com/svidkit/svidkit/spiffe"
)

func TestDeliveryNames(t *testing.T) {
	t.Parallel()
	td := spiffe.MustParseTrustDomain("example.org")
	require.Equal(t, "example.org.spiffe-trust-bundle.x509.pem", delivery.Bundle(td))
	got, ok := delivery.TrustDomain("example.org.spiffe-trust-bundle.x509.pem")
	require.True(t, ok)
	require.Equal(t, td, got)
	for _, name := range []string{
		"", ".spiffe-trust-bundle.x509.pem", "example.org", "example.org.spiffe-trust-bundle.pem", "example.org.spiffe-trust-bundle.x509.pem.tmp",
		"Example.org.spiffe-trust-bundle.x509.pem", "a/b.spiffe-trust-bundle.x509.pem", "spiffe://example.org.spiffe-trust-bundle.x509.pem",
		"ä.spiffe-trust-bundle.x509.pem", " example.org.spiffe-trust-bundle.x509.pem", delivery.Credential,
	} {
		_, ok := delivery.TrustDomain(name)
		require.False(t, ok, name)
	}
}

func FuzzDeliveryTrustDomain(f *testing.F) {
	for _, name := range []string{"example.org.spiffe-trust-bundle.x509.pem", "spiffe://a.spiffe-trust-bundle.x509.pem", "..spiffe-trust-bundle.x509.pem", "x"} {
		f.Add(name)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if td, ok := delivery.TrustDomain(name); ok {
			require.Equal(t, name, delivery.Bundle(td))
		}
	})
}
