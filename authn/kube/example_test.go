package kube_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/spiffe"
)

// A server that knows its callers by their service accounts.
func ExampleTokenReview() {
	api := kubetest.New(1) // an API server that knows one token
	api.TokenReviews(func(q kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		if q.Token != "sesame" {
			return kubetest.TokenReviewStatus{Error: "unknown"}
		}
		return good(q.Audiences...)
	})
	cluster := httptest.NewServer(api)
	defer cluster.Close()

	reviewer, err := kube.NewReviewer(&kube.ReviewerOptions{APIServer: cluster.URL, HTTPClient: cluster.Client()}) // nil in a pod
	if err != nil {
		panic(err)
	}
	who, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer, TrustDomain: spiffe.MustParseTrustDomain("example.org")})
	if err != nil {
		panic(err)
	}

	r := httptest.NewRequest(http.MethodPost, "https://ca.example.org/", nil)
	_, err = who.Authenticate(r)
	fmt.Println(errors.Is(err, authn.ErrNoCredential))
	r.Header.Set("Authorization", "Bearer sesame")
	caller, err := who.Authenticate(r)
	fmt.Println(caller.ID, err)
	r.Header.Set("Authorization", "Bearer stolen")
	_, err = who.Authenticate(r)
	fmt.Println(errors.Is(err, kube.ErrInvalidToken))
	// Output:
	// true
	// spiffe://example.org/ns/prod/sa/web <nil>
	// true
}
