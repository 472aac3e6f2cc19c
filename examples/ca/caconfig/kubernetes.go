package caconfig

import (
	"context"
	"errors"

	"github.com/svidkit/svidkit/authn/kube"
	"github.com/svidkit/svidkit/pki/caserver/istioca"
	"github.com/svidkit/svidkit/pki/caserver/linkerd"
	"github.com/svidkit/svidkit/spiffe"
)

// kubernetes authenticates callers by the service account tokens of one cluster, which its API server reviews.
// TrustDomain is required.
type kubernetes struct {
	TrustDomain spiffe.TrustDomain
	API         kube.ReviewerOptions // how to ask the API server

	// Audiences are the accepted audiences of tokens for Istio's API; nil means "istio-ca". ClusterID is the name of
	// the cluster that callers of that API give.
	Audiences []string
	ClusterID string

	// NodeAccounts are service accounts, as NAMESPACE/NAME, that may ask Istio's API for certificates of the
	// workloads of their node. Nil means none.
	NodeAccounts []string

	// Remotes are the other clusters with callers of Istio's API, by their ClusterID, and how to ask their API
	// servers.
	Remotes map[string]kube.ReviewerOptions

	// LinkerdAnyAudience accepts tokens for any audience from Linkerd's proxies, for a cluster without others.
	LinkerdAnyAudience bool
}

// set sets the authentication of callers in the options of the two APIs; linkerd may be nil. It returns a function
// that asks the API server of its own cluster whether this program has the rights that it needs there.
func (k kubernetes) set(istio *istioca.Options,
	linkerd *linkerd.Options) (check func(context.Context) error, err error) {
	reviewer, err := kube.NewReviewer(&k.API)
	if err != nil {
		return nil, err
	}
	remotes := make(map[string]*kube.Reviewer)
	for id, api := range k.Remotes {
		if remotes[id], err = kube.NewReviewer(&api); err != nil {
			return nil, err
		}
	}
	istio.Authenticator, err = kube.TokenReview(kube.TokenReviewOptions{
		Reviewer: reviewer, TrustDomain: k.TrustDomain, Audiences: k.Audiences, Cluster: k.ClusterID, Remotes: remotes,
	})
	if err != nil {
		return nil, err
	}
	check = reviewer.Check
	if len(k.NodeAccounts) > 0 {
		nodes, err := k.nodes(reviewer, remotes)
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

// nodes returns the authorizer for the nodes of all clusters.
func (k *kubernetes) nodes(own *kube.Reviewer, remotes map[string]*kube.Reviewer) (*kube.NodeAuthorizer, error) {
	others := make(map[string]*kube.NodeAuthorizer)
	for id, r := range remotes {
		var err error
		if others[id], err = kube.NewNodeAuthorizer(r, k.NodeAccounts, nil); err != nil {
			return nil, err
		}
	}
	return kube.NewNodeAuthorizer(own, k.NodeAccounts, others)
}
