package kube_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
)

// BenchmarkTokenReview asks an API server over loopback about each request, or about the first of a few seconds.
func BenchmarkTokenReview(b *testing.B) {
	s := kubetest.Start(b)
	s.TokenReviews(func(q kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(q.Audiences...) })
	for name, keep := range map[string]time.Duration{"fresh": 0, "again": 10 * time.Second} {
		b.Run(name, func(b *testing.B) {
			a, err := kube.TokenReview(kube.TokenReviewOptions{
				Reviewer: reviewer(b, s, kube.ReviewerOptions{CacheFor: keep, MaxPerSecond: 1_000_000}), TrustDomain: td,
			})
			require.NoError(b, err)
			r := request(token(`{"exp":4102444800}`))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := a.Authenticate(r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
