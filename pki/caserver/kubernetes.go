package caserver

import (
	"context"
	"errors"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
)

// Kubernetes authenticates callers by the service account tokens of one cluster, as its API server judges
// them. TrustDomain is required.
type Kubernetes struct {
	TrustDomain spiffe.TrustDomain
	API         kube.ReviewerOptions // how to ask the API server

	// Audiences are those of tokens for Istio's API; nil means "istio-ca". ClusterID is the name of the
	// cluster, as callers of that API give it.
	Audiences []string
	ClusterID string

	// NodeAccounts are service accounts, as NAMESPACE/NAME, that may ask Istio's API for certificates of the
	// workloads of their node. Nil means none.
	NodeAccounts []string

	// LinkerdAnyAudience accepts tokens for any audience from Linkerd's proxies, for a cluster without others.
	LinkerdAnyAudience bool
}

// Set sets what authenticates the callers in the options of the two APIs, of which linkerd may be nil. It
// returns a function that asks the API server whether this program has the rights that it needs there.
func (k Kubernetes) Set(istio *istioca.Options, linkerd *linkerd.Options) (check func(context.Context) error, err error) {
	reviewer, err := kube.NewReviewer(&k.API)
	if err != nil {
		return nil, err
	}
	istio.Authenticator, err = kube.TokenReview(kube.TokenReviewOptions{
		Reviewer: reviewer, TrustDomain: k.TrustDomain, Audiences: k.Audiences, Cluster: k.ClusterID,
	})
	if err != nil {
		return nil, err
	}
	check = reviewer.Check
	if len(k.NodeAccounts) > 0 {
		nodes, err := kube.NewNodeAuthorizer(kube.NodeAuthorizerOptions{APIServer: k.API.APIServer, HTTPClient: k.API.HTTPClient, Accounts: k.NodeAccounts})
		if err != nil {
			return nil, err
		}
		istio.NodeAuthorizer = nodes.Authorize
		check = func(ctx context.Context) error { return errors.Join(reviewer.Check(ctx), nodes.Check(ctx)) }
	}
	if linkerd != nil {
		k.API.AnyAudience = k.LinkerdAnyAudience
		proxies, err := kube.NewReviewer(&k.API)
		if err != nil {
			return nil, err
		}
		linkerd.Review = proxies.Review
	}
	return check, nil
}
