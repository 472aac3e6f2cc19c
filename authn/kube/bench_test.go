package kube_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
)

// BenchmarkTokenReview asks an API server over loopback about each request, of as many peers as the limits take.
func BenchmarkTokenReview(b *testing.B) {
	s := kubetest.Start(b)
	s.TokenReviews(func(q kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(q.Audiences...) })
	var a authn.Authenticator
	r := request(token(`{"exp":4102444800}`))
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if n%500 == 0 {
			var err error
			a, err = kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer(b, s, kube.ReviewerOptions{}), TrustDomain: td})
			require.NoError(b, err)
		}
		if _, err := a.Authenticate(r); err != nil {
			b.Fatal(err)
		}
	}
}
