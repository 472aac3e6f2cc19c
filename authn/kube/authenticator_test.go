package kube_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/svidkit/svidkit/authn"
	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/internal/test/conformance"
	"github.com/svidkit/svidkit/internal/test/kubetest"
	"github.com/svidkit/svidkit/internal/test/must"
	"github.com/svidkit/svidkit/spiffe"
)

var td = spiffe.MustParseTrustDomain("example.org")

// request has a token, and clusterid headers.
func request(tok string, clusters ...string) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "https://ca.example.org/", nil)
	if tok != "" {
		r.Header.Set("authorization", "Bearer "+tok)
	}
	for _, c := range clusters {
		r.Header.Add("clusterid", c)
	}
	return r
}

func TestTokenReview(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-5.3-1", "IST-5.3-3", "IST-5.3-7")
	s := kubetest.Start(t)
	var asked kubetest.TokenReviewSpec
	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		asked = spec
		return good(spec.Audiences[0])
	})
	r := reviewer(t, s, kube.ReviewerOptions{})
	a := must.Get(kube.TokenReview(kube.TokenReviewOptions{Reviewer: r, TrustDomain: td}))(t)
	tok := token(`{"exp":4102444800}`)
	c := must.Get(a.Authenticate(request(tok)))(t)
	assert.Equal(t, &authn.Caller{
		ID:       spiffe.MustParseID("spiffe://example.org/ns/prod/sa/web"),
		Method:   "kubernetes-token",
		NotAfter: time.Unix(4102444800, 0).UTC(),
		Pod:      &spiffe.Pod{Namespace: "prod", ServiceAccount: "web", ServiceAccountUID: "account-uid", Name: "web-0", UID: "pod-uid", Node: "node-1.example.org"},
	}, c)
	assert.Equal(t, kubetest.TokenReviewSpec{Token: tok, Audiences: []string{"istio-ca"}}, asked)

	a, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: r, TrustDomain: td, Audiences: []string{"x", "y"}})
	require.NoError(t, err)
	require.NoError(t, must.Err(a.Authenticate(request(tok))))
	assert.Equal(t, []string{"x", "y"}, asked.Audiences)
}

func TestTokenReviewErrors(t *testing.T) {
	t.Parallel()
	s := kubetest.Start(t)
	a, err := kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer(t, s, kube.ReviewerOptions{}), TrustDomain: td})
	require.NoError(t, err)

	_, err = a.Authenticate(request(""))
	require.ErrorIs(t, err, authn.ErrNoCredential)
	require.NotErrorIs(t, err, authn.ErrRefused)

	lower := request("")
	lower.Header.Set("Authorization", "bearer sesame")
	require.ErrorIs(t, must.Err(a.Authenticate(lower)), authn.ErrNoCredential)

	plain := request("sesame")
	plain.TLS = nil
	must.Fail(t, must.Err(a.Authenticate(plain)), authn.ErrRefused, "not encrypted")
	assert.Empty(t, s.Requests(), "a token that others may have read was sent on")

	s.TokenReviews(func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return kubetest.TokenReviewStatus{} })
	_, err = a.Authenticate(request("sesame"))
	must.Fail(t, err, authn.ErrRefused, kube.ErrNotAuthenticated)
	require.EqualError(t, err, "authn/kube: credential refused: token not authenticated: the API server does not know it")

	s.TokenReviews(func(kubetest.TokenReviewSpec) kubetest.TokenReviewStatus {
		return kubetest.TokenReviewStatus{Error: "expired"}
	})
	must.Fail(t, must.Err(a.Authenticate(request("another"))), authn.ErrRefused, kube.ErrInvalidToken)

	s.FailNext(1, kubetest.Fault{Code: 500}, nil)
	_, err = a.Authenticate(request("third"))
	require.ErrorIs(t, err, kube.ErrReviewFailed)
	require.NotErrorIs(t, err, authn.ErrRefused, "it is an outage and no refusal")
	require.NotErrorIs(t, err, authn.ErrNoCredential)

	s.TokenReviews(func(spec kubetest.TokenReviewSpec) kubetest.TokenReviewStatus { return good(spec.Audiences...) })
	require.NoError(t, must.Err(a.Authenticate(request("third"))))
	a = must.Get(kube.TokenReview(kube.TokenReviewOptions{Reviewer: reviewer(t, s, kube.ReviewerOptions{}), TrustDomain: td, AllowPlaintext: true}))(t)
	require.NoError(t, must.Err(a.Authenticate(plain)))
}

// Which API server judges.
func TestTokenReviewClusters(t *testing.T) {
	t.Parallel()
	conformance.Covers(t, "IST-4.1-16", "IST-5.3-2")
	// The account says which server was asked.
	cluster := func(name string) *kube.Reviewer {
		status := good("istio-ca")
		status.User.Username = "system:serviceaccount:" + name + ":web"
		return answering(t, status)
	}
	west := cluster("west")
	a, err := kube.TokenReview(kube.TokenReviewOptions{
		Reviewer: cluster("own"), TrustDomain: td, Cluster: "Kubernetes",
		Remotes: map[string]*kube.Reviewer{"west": west, "W": west, "east": cluster("east")},
	})
	require.NoError(t, err)
	for _, c := range []struct {
		name          string
		header        []string
		asked, remote string
	}{
		{"none", nil, "own", ""},
		{"empty", []string{""}, "own", ""},
		{"own ID", []string{"Kubernetes"}, "own", ""},
		{"remote", []string{"west"}, "west", "west"},
		{"other remote", []string{"east"}, "east", "east"},
		{"alias of remote", []string{"W"}, "west", "W"},
		{"two count for none", []string{"west", "east"}, "own", ""},
		{"two unknown count for none", []string{"x", "x"}, "own", ""},
	} {
		caller := must.Get(a.Authenticate(request("sesame", c.header...)))(t, c.name)
		assert.Equal(t, c.asked, caller.Pod.Namespace, c.name)
		assert.Equal(t, c.remote, caller.Pod.Cluster, c.name)
		assert.Equal(t, td, caller.ID.TrustDomain(), c.name)
	}
	for _, name := range []string{"north", "kubernetes", "West", "w", " west", "west,east", strings.Repeat("x", 10_000)} {
		_, err := a.Authenticate(request("sesame", name))
		require.ErrorIs(t, err, authn.ErrRefused, name)
		require.ErrorContains(t, err, `is not one of ["Kubernetes" "W" "east" "west"]`)
		assert.Less(t, len(err.Error()), 500)
	}

	alone := must.Get(kube.TokenReview(kube.TokenReviewOptions{Reviewer: cluster("own"), TrustDomain: td}))(t)
	must.Fail(t, must.Err(alone.Authenticate(request("sesame", "Kubernetes"))), `the cluster "Kubernetes" is not one of []`)
	require.NoError(t, must.Err(alone.Authenticate(request("sesame", ""))))
}

func TestTokenReviewOptions(t *testing.T) {
	t.Parallel()
	r := answering(t, good("istio-ca"))
	base := func() kube.TokenReviewOptions {
		return kube.TokenReviewOptions{
			Reviewer: r, TrustDomain: td, Cluster: "own", Audiences: []string{"istio-ca"},
			Remotes: map[string]*kube.Reviewer{"west": r},
		}
	}
	for name, edit := range map[string]func(*kube.TokenReviewOptions){
		"no reviewer":             func(o *kube.TokenReviewOptions) { o.Reviewer = nil },
		"no trust domain":         func(o *kube.TokenReviewOptions) { o.TrustDomain = spiffe.TrustDomain{} },
		"no audience":             func(o *kube.TokenReviewOptions) { o.Audiences = []string{} },
		"empty audience":          func(o *kube.TokenReviewOptions) { o.Audiences = []string{"a", ""} },
		"remote without reviewer": func(o *kube.TokenReviewOptions) { o.Remotes["east"] = nil },
		"remote without ID":       func(o *kube.TokenReviewOptions) { o.Remotes[""] = r },
		"remote with our ID":      func(o *kube.TokenReviewOptions) { o.Remotes["own"] = r },
	} {
		o := base()
		edit(&o)
		require.ErrorContains(t, must.Err(kube.TokenReview(o)), "authn/kube: ", name)
	}

	// what is changed afterwards does not count
	o := base()
	a := must.Get(kube.TokenReview(o))(t)
	o.Audiences[0] = "changed"
	delete(o.Remotes, "west")
	require.NoError(t, must.Err(a.Authenticate(request("sesame", "west"))))
}
