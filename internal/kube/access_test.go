package kube_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/internal/kube"
	"github.com/svidkit/svidkit/internal/test/kubetest"
)

// TestReview asks about the client itself, and about another account.
func TestReview(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	c := clientOf(t, s)
	what := kube.Access{Namespace: "app", Group: "g", Version: "v1", Resource: "things", Verb: "get"}
	asked := make(chan kubetest.AccessReviewSpec, 1)
	s.AccessReviews(func(in kubetest.AccessReviewSpec) kubetest.AccessReviewStatus {
		asked <- in
		return kubetest.AccessReviewStatus{Allowed: in.User != "", Reason: "because"}
	})
	attributes := &kubetest.ResourceAttributes{Namespace: "app", Group: "g", Version: "v1", Resource: "things", Verb: "get"}
	allowed, reason, err := c.Review(t.Context(), "", "", what)
	require.NoError(t, err)
	assert.False(t, allowed)
	assert.Equal(t, "because", reason)
	assert.Equal(t, kubetest.AccessReviewSpec{ResourceAttributes: attributes}, <-asked)
	allowed, _, err = c.Review(t.Context(), "app", "web", what)
	require.NoError(t, err)
	assert.True(t, allowed)
	assert.Equal(t, kubetest.AccessReviewSpec{
		User: "system:serviceaccount:app:web", Groups: []string{"system:serviceaccounts", "system:serviceaccounts:app", "system:authenticated"},
		ResourceAttributes: attributes,
	}, <-asked)

	for text, body := range map[string]string{
		"the answer is not a SubjectAccessReview": `{"kind":"SelfSubjectAccessReview","status":{"allowed":true}}`,
		"not the JSON": `{"kind":7}`,
	} {
		c := asks(t, func(w http.ResponseWriter, _ *http.Request) { answer(w, 201, body) })
		allowed, _, err := c.Review(t.Context(), "app", "web", what)
		require.ErrorContains(t, err, text)
		assert.False(t, allowed)
	}
	s.FailNext(1, kubetest.Fault{Code: 403, Reason: "Forbidden"}, nil)
	_, _, err = c.Review(t.Context(), "app", "web", what)
	assert.True(t, kube.Forbidden(err))
}
